/* Blocks of rows in FlashAttention-2's order, for rows of dispatch that share it: plain calls (fwd_cpu.c) and those on
   8-bit copies (fwd_fp8.c). */
#ifndef FATTNI_FWD_CPU_FWD_CPU_H
#define FATTNI_FWD_CPU_FWD_CPU_H

#include "core/attention/problem.h"

/* Bytes; what fattni_fwd_blocks uses of p->workspace. */
size_t fattni_fwd_blocks_workspace(const fattn_ctx *ctx, const fattni_problem *p);
/* Writes o and lse. */
void fattni_fwd_blocks(const fattn_ctx *ctx, const fattni_problem *p);

#endif
