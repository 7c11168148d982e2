/* Arguments of the Hopper kernels of both passes, beside fattni_attention_args: how tensor maps are addressed, and the
   persistent schedule. */
#ifndef FATTNI_CORE_CUDA_SM90_ARGS_H
#define FATTNI_CORE_CUDA_SM90_ARGS_H

#include "core/cuda/args.h"

#include <cuda.h>

/* A map's coordinates of (b, h) are (batch b, head h): each 1, or 0 where the tensor broadcasts. */
typedef struct fattni_map_step {
    int32_t head, batch;
} fattni_map_step;

typedef struct fattni_sm90_schedule {
    int32_t *next_tile;    /* counts tiles that are handed out, of some kernels not each CTA's first; 0 at the start */
    int32_t tiles, blocks; /* tiles of the call; tiles of one (b, h). A cluster's tiles count as one */
    int32_t planes;        /* the number of (b, h) */
    int32_t head_group;    /* planes that are scheduled together, so that their K and V (Q and dO) stay in L2 */
} fattni_sm90_schedule;

#endif
