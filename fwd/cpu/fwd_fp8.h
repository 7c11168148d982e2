/* What differs in a block of rows (fwd_row_block.c) that computes on 8-bit copies. Its problem is that of F32 tensors,
   with p->fp8 present and FATTN_FP8 among its flags.

   S = (q_scale k_scale q8).k8 in F32, where the first factor is Q^T, with FATTN_FP8_INT8 (q_scale q8).(k_scale k8).
   P, relative to the maximum so far, is rounded to E4M3 in units of 1/64, as a GPU does; at the end
   O = v_scale O + v_mean, L = L + scale q_shift, and a sink. */
#ifndef FATTNI_FWD_CPU_FWD_FP8_H
#define FATTNI_FWD_CPU_FWD_FP8_H

#include "fwd/cpu/fwd_row_block.h"

void fattni_fwd_fp8_load_q(const fattni_fwd_rows *r);
/* Into the room; as fattni_fwd_load_keys. */
fattni_fwd_keys fattni_fwd_fp8_load_keys(const fattni_problem *p, const fattni_cpu_kernels *k,
                                         const fattni_sequence *seq, int64_t g, fattni_range keys,
                                         const fattni_fwd_room *room);
/* o and lse from O^T, maximum and sum. */
void fattni_fwd_fp8_finish(const fattni_fwd_rows *r);

#endif
