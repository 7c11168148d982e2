/* A quad: the four lanes that share the rows of an mma or wgmma accumulator; lane t of it has columns 2t, 2t+1 of
   every 8. */
#ifndef FATTNI_CORE_DEVICE_QUAD_H
#define FATTNI_CORE_DEVICE_QUAD_H

#include "core/device/half_types.cuh"
#include "core/ptx/global.h"

DEVICE float quad_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(ALL_LANES, x, 1));
    return fmaxf(x, __shfl_xor_sync(ALL_LANES, x, 2));
}
DEVICE float quad_sum(float x) {
    x += __shfl_xor_sync(ALL_LANES, x, 1);
    return x + __shfl_xor_sync(ALL_LANES, x, 2);
}

/* Lane t has in r[n] columns 2t, 2t+1 of chunk n, n in 0..3; afterwards it has in r[0..3] the whole chunk t. */
DEVICE void transpose_quad(uint32_t r[4]) {
    const int t = (int)threadIdx.x & 3;
#pragma unroll
    for (int step = 1; step <= 2; step *= 2) {
        const int other = 3 - step; /* the pairs (0, step) and (other, 3) */
        const uint32_t x = __shfl_xor_sync(ALL_LANES, t & step ? r[0] : r[step], step);
        const uint32_t y = __shfl_xor_sync(ALL_LANES, t & step ? r[other] : r[3], step);
        if (t & step)
            r[0] = x, r[other] = y;
        else
            r[step] = x, r[3] = y;
    }
}

/* Columns [0, width) of a row to global memory, times `scale`: x[4c], x[4c + 1] are this lane's columns 8c + 2t and
   8c + 2t + 1 for c < `chunks`. F32 or the 16-bit dtype; `accumulate`: added to the row. A 16-bit row that is not
   accumulated must start at a multiple of 16 bytes. All lanes take part; those whose row is not `inside` store
   nothing. */
DEVICE void store_row(void *row, const float *x, int chunks, float scale, int inside, int width, int f32,
                      int accumulate) {
    const int t = (int)threadIdx.x & 3;
    if (f32 || accumulate) {
#pragma unroll
        for (int c = 0; c < chunks; ++c)
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                const int d = 8 * c + 2 * t + e;
                const float value = x[4 * c + e] * scale;
                if (!inside || d >= width) continue;
                if (f32) {
                    float *const to = (float *)row + d;
                    *to = accumulate ? *to + value : value;
                } else {
                    half_type *const to = (half_type *)row + d;
                    *to = to_half(to_float(*to) + value);
                }
            }
        return;
    }
#pragma unroll
    for (int c = 0; c < chunks; c += 4) {
        uint32_t r[4];
#pragma unroll
        for (int n = 0; n < 4; ++n)
            r[n] = c + n < chunks ? pack(x[4 * (c + n)] * scale, x[4 * (c + n) + 1] * scale) : 0;
        transpose_quad(r);
        store_global_4_if((half_type *)row + 8 * (c + t), r, inside && 8 * (c + t) < width);
    }
}

/* Of 16-bit r[n], columns 2t, 2t+1 of chunk n in lane t, two in a register: the whole chunk t. */
DEVICE uint2 transpose_quad_16(uint32_t chunks01, uint32_t chunks23) {
    const int t = (int)threadIdx.x & 3, odd = t & 1, upper = t & 2;
    const uint32_t own = upper ? chunks23 : chunks01,
                   other = __shfl_xor_sync(ALL_LANES, upper ? chunks01 : chunks23, 2); /* of lane t ^ 2 */
    const uint32_t kept = __byte_perm(own, other, odd ? 0x7632 : 0x5410),
                   next = __shfl_xor_sync(ALL_LANES, __byte_perm(own, other, odd ? 0x5410 : 0x7632), 1);
    const uint32_t mine = __byte_perm(kept, next, odd ? 0x1054 : 0x5410),
                   theirs = __byte_perm(kept, next, odd ? 0x3276 : 0x7632);
    return upper ? make_uint2(theirs, mine) : make_uint2(mine, theirs);
}

/* store_row's complement: what rounding takes off x times `scale`, a byte each (o_rest.h), to a row at a multiple of 8
   bytes. */
DEVICE void store_rest(void *row, const float *x, int chunks, float scale, int inside, int width) {
    const int t = (int)threadIdx.x & 3;
#pragma unroll
    for (int c = 0; c < chunks; c += 4) {
        uint32_t pairs[2] = {0, 0};
#pragma unroll
        for (int n = 3; n >= 0; --n)
            if (c + n < chunks)
                pairs[n / 2] = rest_pair(x[4 * (c + n)] * scale, x[4 * (c + n) + 1] * scale, pairs[n / 2]);
        const uint2 rest = transpose_quad_16(pairs[0], pairs[1]);
        store_global_2_if((char *)row + 8 * (c + t), rest, inside && 8 * (c + t) < width);
    }
}

#endif
