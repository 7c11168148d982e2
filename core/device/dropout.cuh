/* The dropout mask on the device: the bits of core/tensor/philox.h. */
#ifndef FATTNI_CORE_DEVICE_DROPOUT_H
#define FATTNI_CORE_DEVICE_DROPOUT_H

#include "core/device/sequence.cuh"
#include "core/tensor/philox.h"

/* The seed, and the words of the Philox counter that one (sequence, head) shares. */
typedef struct dropout_plane {
    uint64_t seed;
    uint32_t w2, w3;
} dropout_plane;

DEVICE dropout_plane dropout_plane_of(const fattni_attention_args *a, int b, int h) {
    const fattni_block c = fattni_dropout_counter(a->stream, a->rng_step ? (uint32_t)*a->rng_step : 0u,
                                                  a->rng_plane0 + (uint32_t)b * a->rng_heads + (uint32_t)h, 0, 0);
    const dropout_plane plane = {a->seed, c.w[2], c.w[3]};
    return plane;
}

/* The random numbers of the block that holds element (i, j) of the whole sequence. */
DEVICE fattni_block dropout_block(const dropout_plane *plane, int64_t i, int64_t j) {
    fattni_block c = fattni_dropout_counter(0, 0, 0, i, j);
    c.w[2] = plane->w2, c.w[3] = plane->w3;
    return fattni_philox(plane->seed, c);
}

/* Whether element (i, j) is kept; i and j without q_pos0 and k_pos0. */
DEVICE int keep_at(const fattni_attention_args *a, const dropout_plane *plane, int i, int j) {
    const int64_t I = (int64_t)a->q_pos0 + i, J = (int64_t)a->k_pos0 + j;
    return fattni_lane16(dropout_block(plane, I, J), fattni_dropout_lane(I, J)) >= a->drop_T;
}

#endif
