/* The dropout mask on the device: the bits of core/tensor/philox.h. */
#ifndef FATTNI_CORE_DEVICE_DROPOUT_H
#define FATTNI_CORE_DEVICE_DROPOUT_H

#include "core/device/sequence.cuh"
#include "core/ptx/compare.h"
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

/* The counter of the block that holds element (i, j) of the whole sequence. Of 16 rows later word 1 is 8 more, of 16
   columns word 0 is 4 more. */
DEVICE fattni_block dropout_counter(const dropout_plane *plane, int64_t i, int64_t j) {
    fattni_block c = fattni_dropout_counter(0, 0, 0, i, j);
    c.w[2] = plane->w2, c.w[3] = plane->w3;
    return c;
}

/* fattni_keeps for both lanes of a word at once. Positive numbers of 16 bits are ordered as their bits are, and what is
   not one, bits from 0x7c00 on, counts as larger than `from`, which is at most 0x4000. */
typedef struct keep_rule {
    uint32_t from; /* the same in both halves */
    uint32_t flip; /* all bits, or none */
} keep_rule;
DEVICE keep_rule keep_rule_of(uint32_t T) {
    const uint32_t flips = T > FATTNI_DROP_ALL / 2, from = flips ? FATTNI_DROP_ALL - T : T;
    const keep_rule rule = {from << 16 | from, flips ? ~0u : 0u};
    return rule;
}
/* A mask for two 16-bit numbers: all bits of those that are kept. */
DEVICE uint32_t keep_mask_of(uint32_t word, keep_rule rule) { return not_below_2(word, rule.from) ^ rule.flip; }

/* Whether element (i, j) is kept; i and j without q_pos0 and k_pos0. */
DEVICE int keep_at(const fattni_attention_args *a, const dropout_plane *plane, int i, int j) {
    const int64_t I = (int64_t)a->q_pos0 + i, J = (int64_t)a->k_pos0 + j;
    const fattni_block block = fattni_mask_philox(plane->seed, dropout_counter(plane, I, J));
    return fattni_keeps(fattni_lane16(block, fattni_dropout_lane(I, J)), a->drop_T);
}

#endif
