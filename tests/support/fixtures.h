/* What the tests of fixture files share. */
#ifndef TEST_FIXTURES_H
#define TEST_FIXTURES_H

#include "problem.h"

/* The oracles in single precision (ref_single.c). */
fattn_status fwd_ref_single(fattn_ctx *ctx, const fattni_problem *p);
fattn_status bwd_ref_single(fattn_ctx *ctx, const fattni_problem *p);

#endif
