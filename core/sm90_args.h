/* What a Hopper kernel is told beside fattni_cuda_args: tensor maps for the TMA unit, and its share of
   the persistent schedule. Filled by core/cuda_sm90.c. */
#ifndef FATTNI_SM90_ARGS_H
#define FATTNI_SM90_ARGS_H

#include "cuda_args.h"

#include <cuda.h>

/* How a map's head and batch coordinates follow h and b: 1, or 0 where one plane broadcasts. */
typedef struct fattni_map_step {
    int32_t head, batch;
} fattni_map_step;

typedef struct fattni_sm90_args {
    CUtensorMap q, k, v, d_o; /* {d, row, head, batch}, boxes of 64 columns */
    fattni_cuda_args a;
    int32_t *next_tile; /* 0 at the start: tiles handed out after the first of each CTA */
    int32_t tiles, blocks; /* of the whole call; blocks of one (b, h), a cluster's as one */
    int32_t section; /* so many heads are worked on together: their K and V (Q and dO) stay in L2 */
    fattni_map_step q_step, k_step, v_step, d_o_step;
} fattni_sm90_args;

#endif
