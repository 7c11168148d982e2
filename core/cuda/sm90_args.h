/* Arguments of the Hopper kernels of both passes, beside fattni_attention_args: how tensor maps are addressed, and the
   persistent schedule. */
#ifndef FATTNI_CORE_CUDA_SM90_ARGS_H
#define FATTNI_CORE_CUDA_SM90_ARGS_H

#include "core/cuda/args.h"
#include "core/cuda/divider.h"

#include <cuda.h>

/* A map's coordinates of (b, h) are (batch b, head h): each 1, or 0 where the tensor broadcasts. */
typedef struct fattni_map_step {
    int32_t head, batch;
} fattni_map_step;

/* In which order blocks below a diagonal are claimed, numbered from the longest on: so, but `count` of them from number
   `begin` on from the shortest of these on, turned by `shift`: those that would be first come last. */
typedef struct fattni_block_order {
    int32_t begin, count, shift;
} fattni_block_order;
FATTNI_DIVIDER int fattni_ordered_block(const fattni_block_order *x, int n) {
    const int at = n - x->begin;
    if (at < 0 || at >= x->count) return n;
    return x->begin + x->count - 1 - (at + x->shift < x->count ? at + x->shift : at + x->shift - x->count);
}

typedef struct fattni_sm90_schedule {
    int32_t *next_tile;    /* counts tiles that are handed out, of some kernels not each CTA's first; 0 at the start */
    int32_t tiles, blocks; /* tiles of the call; tiles of one (b, h). A cluster's tiles count as one */
    int32_t planes;        /* the number of (b, h) */
    int32_t head_group;    /* planes that are scheduled together, so that their K and V (Q and dO) stay in L2 */
    fattni_block_order order; /* count 0 unless all planes of a causal call are one head group */
} fattni_sm90_schedule;

#endif
