/* The oracles: fp64, one row at a time, every feature, any dtype and strides. Slow on purpose.

   They take a problem that fattni_problem_init accepted with running = true, need no workspace and
   no saved buffer, and use scratch of the context's allocator. Errors: FATTN_E_NOMEM. */
#ifndef FATTNI_CORE_ATTENTION_REF_H
#define FATTNI_CORE_ATTENTION_REF_H

#include "core/attention/problem.h"

fattn_status fattni_fwd_ref(fattn_ctx *ctx, const fattni_problem *p); /* writes o, lse */
/* Writes the gradients that are present; reads o and lse as a forward pass left them. */
fattn_status fattni_bwd_ref(fattn_ctx *ctx, const fattni_problem *p);

#endif
