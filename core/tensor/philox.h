/* Philox4x32 (Salmon et al. 2011): with ten rounds for random numbers, through Random123 on the host, cuRAND on the
   device; with seven for dropout masks, which take up to half of attention's time. Seven are the fewest that pass
   BigCrush (table 2 of the paper), and what FlashAttention takes. cuRAND's function has ten; the rounds are its.

   The dropout mask is a pure function of (seed, stream, step, b*Hq+h, i, j), never of tile, thread or backend. One
   block of four words covers rows {r, r+8} by columns {c, c+1, c+8, c+9} of a 16 x 16 patch: the elements that one
   thread holds in two neighbouring accumulator tiles of mma.m16n8 or wgmma. */
#ifndef FATTNI_CORE_TENSOR_PHILOX_H
#define FATTNI_CORE_TENSOR_PHILOX_H

#include "core/tensor/numeric.h"

#ifdef __CUDACC__
/* Not curand_kernel.h: it adds 200 KB of tables to every object file. */
#include <curand_philox4x32_x.h>
#else
#include <Random123/philox.h>
#endif

typedef struct fattni_block {
    uint32_t w[4];
} fattni_block;

enum { FATTNI_MASK_ROUNDS = 7 };

#ifdef __CUDACC__
static __device__ inline fattni_block fattni_philox(uint64_t seed, fattni_block counter) {
    const uint4 c = make_uint4(counter.w[0], counter.w[1], counter.w[2], counter.w[3]);
    const uint2 key = make_uint2((uint32_t)seed, (uint32_t)(seed >> 32));
    const uint4 r = curand_Philox4x32_10(c, key);
    const fattni_block out = {{r.x, r.y, r.z, r.w}};
    return out;
}
QUALIFIERS fattni_block fattni_mask_philox(uint64_t seed, fattni_block counter) {
    uint4 c = make_uint4(counter.w[0], counter.w[1], counter.w[2], counter.w[3]);
    uint2 key = make_uint2((uint32_t)seed, (uint32_t)(seed >> 32));
    for (int round = 0; round < FATTNI_MASK_ROUNDS; ++round) {
        c = _philox4x32round(c, key);
        key.x += PHILOX_W32_0, key.y += PHILOX_W32_1;
    }
    const fattni_block out = {{c.x, c.y, c.z, c.w}};
    return out;
}
#define FATTNI_RANDOM static __device__ inline
#else
static inline fattni_block fattni_random123(int rounds, uint64_t seed, fattni_block counter) {
    const philox4x32_ctr_t c = {{counter.w[0], counter.w[1], counter.w[2], counter.w[3]}};
    const philox4x32_key_t key = {{(uint32_t)seed, (uint32_t)(seed >> 32)}};
    const philox4x32_ctr_t r = philox4x32_R((unsigned)rounds, c, key);
    const fattni_block out = {{r.v[0], r.v[1], r.v[2], r.v[3]}};
    return out;
}
static inline fattni_block fattni_philox(uint64_t seed, fattni_block counter) {
    return fattni_random123(10, seed, counter);
}
static inline fattni_block fattni_mask_philox(uint64_t seed, fattni_block counter) {
    return fattni_random123(FATTNI_MASK_ROUNDS, seed, counter);
}
#define FATTNI_RANDOM static inline
#endif

/* Counter of the block that holds element (i, j) of plane bh; i, j are whole-sequence positions. */
FATTNI_INLINE fattni_block fattni_dropout_counter(uint32_t stream, uint32_t step, uint32_t bh, int64_t i, int64_t j) {
    fattni_block c;
    c.w[0] = (uint32_t)((j >> 4) * 4 + ((j & 7) >> 1));
    c.w[1] = (uint32_t)((i >> 4) * 8 + (i & 7));
    c.w[2] = bh;
    c.w[3] = stream + 0x9E3779B1u * step;
    return c;
}

/* Which of the block's eight 16-bit lanes, low half first, belongs to (i, j). */
FATTNI_INLINE int fattni_dropout_lane(int64_t i, int64_t j) {
    return (int)(((j >> 3) & 1) * 4 + ((i >> 3) & 1) * 2 + (j & 1));
}

FATTNI_INLINE uint32_t fattni_lane16(fattni_block r, int lane) {
    const uint32_t low = lane & 2 ? r.w[1] : r.w[0], high = lane & 2 ? r.w[3] : r.w[2];
    return ((lane & 4 ? high : low) >> (16 * (lane & 1))) &
           0xffffu; /* no indexed array, which would not stay in registers */
}

/* Counter of the block whose lanes 0 to 7 belong to elements 8n to 8n + 7 of a tensor in row-major order: the tape's
   dropout. Its plane, b*Hq+h to attention, is one that no attention has. */
FATTNI_INLINE fattni_block fattni_element_counter(uint32_t stream, uint32_t step, int64_t n) {
    fattni_block c;
    c.w[0] = (uint32_t)n;
    c.w[1] = (uint32_t)(n >> 32);
    c.w[2] = 0xffffffffu;
    c.w[3] = stream + 0x9E3779B1u * step;
    return c;
}

/* p takes effect as T / FATTNI_DROP_ALL, T = lround(FATTNI_DROP_ALL p), 1 to FATTNI_DROP_ALL - 1. Whether a lane's
   element is kept: its low 15 bits decide. GPUs compare two lanes in one instruction, as F16, so that they are compared
   with FATTNI_DROP_ALL / 2 at most. */
enum { FATTNI_DROP_ALL = 32768 };
FATTNI_INLINE int fattni_keeps(uint32_t lane, uint32_t T) {
    const uint32_t bits = lane & (FATTNI_DROP_ALL - 1);
    return T <= FATTNI_DROP_ALL / 2 ? bits >= T : bits < FATTNI_DROP_ALL - T;
}

/* One element, at the cost of a whole block: for reference code and edges. */
FATTNI_RANDOM int fattni_keep(uint64_t seed, uint32_t stream, uint32_t step, uint32_t bh, int64_t i, int64_t j,
                              uint32_t T) {
    const fattni_block r = fattni_mask_philox(seed, fattni_dropout_counter(stream, step, bh, i, j));
    return fattni_keeps(fattni_lane16(r, fattni_dropout_lane(i, j)), T);
}

#endif
