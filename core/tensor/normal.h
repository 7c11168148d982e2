/* Normal numbers as a pure function of (seed, stream, element): one source for host and device. */
#ifndef FATTNI_CORE_TENSOR_NORMAL_H
#define FATTNI_CORE_TENSOR_NORMAL_H

#include "core/tensor/philox.h"

#include <math.h>

/* Box-Muller: elements 2n and 2n + 1 are the cosine and the sine of pair n. Counter words: low half
   of the pair number, high half, 0, stream. As between any two call sites, only a different stream
   separates these numbers from the dropout bits of the same seed. */
FATTNI_RANDOM double fattni_normal_at(const fattn_rng *rng, int64_t element) {
    const uint64_t pair = (uint64_t)element >> 1;
    const fattni_block counter = {{(uint32_t)pair, (uint32_t)(pair >> 32), 0, rng->stream}};
    const fattni_block r = fattni_philox(rng->seed, counter);
    const double u = ((double)((uint64_t)r.w[0] << 20 | r.w[1] >> 12) + 1.0) * 0x1p-52; /* (0, 1] */
    const double angle = (double)((uint64_t)r.w[2] << 20 | r.w[3] >> 12) * (0x1p-52 * 6.283185307179586476925);
    const double radius = sqrt(-2.0 * log(u));
    return radius * (element & 1 ? sin(angle) : cos(angle));
}

#endif
