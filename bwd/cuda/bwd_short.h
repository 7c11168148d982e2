/* Hopper's backward kernels of short causal rows (sm90/bwd_sm90_short.cuh). */
#ifndef FATTNI_BWD_CUDA_BWD_SHORT_H
#define FATTNI_BWD_CUDA_BWD_SHORT_H

#include "bwd/cuda/bwd_args.h"

/* Most keys of a head: dQ of all row blocks but one is in shared memory. */
enum { FATTNI_SHORT_KEYS = 512 };

typedef struct fattni_bwd_short_args {
    fattni_bwd_sm90_args s; /* items: heads; progress NULL */
    CUtensorMap dk, dv;     /* {d, row, head, batch}, boxes of 64 columns and 16 rows */
    fattni_map_step dk_step, dv_step;
} fattni_bwd_short_args;

#endif
