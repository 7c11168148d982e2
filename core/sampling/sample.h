/* fattn_sample after validation, and what both devices compute alike: the order of tokens, their weights, Gumbel's
   contest. */
#ifndef FATTNI_CORE_SAMPLING_SAMPLE_H
#define FATTNI_CORE_SAMPLING_SAMPLE_H

#include "core/tensor/philox.h"

#include <math.h>
#include <stdbool.h>

typedef struct fattni_sample {
    const void *logits;
    const int32_t *draws; /* NULL: b */
    int32_t *draws_after; /* or NULL */
    int32_t *tokens;
    int64_t row_stride, stride, draws_step, draws_after_step, tokens_step; /* elements */
    int64_t B, V;
    int64_t top_k;         /* 1..V */
    double inverse, top_p; /* 1 / temperature, 0: greedy; top_p in (0, 1] */
    uint64_t seed;
    uint32_t stream;
    int32_t dtype;
    int32_t weight_bits; /* of the largest weight: V of them fit 63 bits */
} fattni_sample;

/* Tokens in the order of likelihood, the likelier the larger: the order of floats, 0 and -0 the same, then the lower
   index. */
FATTNI_INLINE uint64_t fattni_sample_place(float logit, int64_t i) {
    const uint32_t u = fattni_float_bits(logit + 0.0f);
    return (uint64_t)(u >> 31 ? ~u : u | 0x80000000u) << 32 | (uint32_t)~i;
}
FATTNI_INLINE int64_t fattni_sample_index(uint64_t place) { return (int64_t)(uint32_t)~place; }
FATTNI_INLINE float fattni_sample_logit(uint64_t place) {
    const uint32_t u = (uint32_t)(place >> 32);
    return fattni_bits_float(u >> 31 ? u & 0x7fffffffu : ~u);
}
FATTNI_INLINE bool fattni_sample_is_bad(float logit) { return !(logit < INFINITY); }

/* (logit - top) / temperature, top being the largest logit. A product that is rounded before it is added to. */
FATTNI_INLINE double fattni_sample_scaled(const fattni_sample *a, float logit, float top) {
#ifdef __CUDA_ARCH__
    return __dmul_rn((double)logit - (double)top, a->inverse);
#else
    return ((double)logit - (double)top) * a->inverse;
#endif
}
/* e^scaled as an integer: sums of them are exact in any order. */
FATTNI_INLINE uint64_t fattni_sample_weight(const fattni_sample *a, float logit, float top) {
    return (uint64_t)(exp(fattni_sample_scaled(a, logit, top)) * (double)((uint64_t)1 << a->weight_bits));
}
/* How many of all weights top_p asks for. */
FATTNI_INLINE uint64_t fattni_sample_part(const fattni_sample *a, uint64_t all) {
    const double part = ceil(a->top_p * (double)all);
    return part < 1 ? 1 : part < (double)all ? (uint64_t)part : all;
}

/* Counter of the block whose words belong to tokens 4n to 4n + 3. */
FATTNI_INLINE fattni_block fattni_sample_counter(const fattni_sample *a, int32_t draw, int64_t n) {
    const fattni_block counter = {{(uint32_t)n, (uint32_t)draw, 0, a->stream}};
    return counter;
}

/* Gumbel's trick: the index of the largest scaled logit - log(-log u) has the distribution wanted. */
typedef struct fattni_contest {
    double highest;
    int64_t chosen;
} fattni_contest;

FATTNI_INLINE bool fattni_contest_beats(double score, int64_t i, const fattni_contest *c) {
    return score > c->highest || (score == c->highest && i < c->chosen);
}
FATTNI_INLINE void fattni_contest_enter(fattni_contest *c, double scaled, uint32_t word, int64_t i) {
    const double u = word * 0x1p-32 + 0x1p-33; /* in (0, 1) */
    const double y = scaled - c->highest;
    /* Most cannot win, which takes no logarithm to see: e^y < 1 / (1 - y + y^2 / 2) below 0, and -log u > 1 - u. */
    if (y < 0 && (1 - u) * (1 - y + y * y / 2) > 1) return;
    const double score = scaled - log(-log(u));
    if (fattni_contest_beats(score, i, c)) c->highest = score, c->chosen = i;
}

#ifndef __CUDACC__
#include "core/base/internal.h"

/* Of fattni_device_ops (core/base/device.h). The CPU's checks the values of draws before it writes. */
fattn_status fattni_host_sample(fattn_ctx *ctx, const fattni_sample *a);
fattn_status fattni_cuda_sample(fattn_ctx *ctx, const fattni_sample *a);
#endif

#endif
