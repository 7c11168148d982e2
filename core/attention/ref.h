/* The reference implementations: fp64, one row at a time, every feature, any dtype and strides. Simple, not
   fast.

   The problem must come from fattni_problem_init with running = true. They need no workspace and no saved
   buffer, and allocate scratch memory from the context. Errors: FATTN_E_NOMEM. */
#ifndef FATTNI_CORE_ATTENTION_REF_H
#define FATTNI_CORE_ATTENTION_REF_H

#include "core/attention/problem.h"

fattn_status fattni_fwd_ref(fattn_ctx *ctx, const fattni_problem *p); /* writes o, lse */
/* Writes the gradients that are present; reads o and lse as written by forward. */
fattn_status fattni_bwd_ref(fattn_ctx *ctx, const fattni_problem *p);

#endif
