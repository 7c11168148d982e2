/* A tile of a 16-bit bias in shared memory, as Hopper's kernels add it to S. Include after defining K_BF16. */
#ifndef FATTNI_CORE_DEVICE_SM90_BIAS_H
#define FATTNI_CORE_DEVICE_SM90_BIAS_H

#include "core/device/sm90_tile.cuh"
#include "core/ptx/after_loads.h"

/* Two tiles of S become scale S + bias; x: the bias, as ldmatrix gives four matrices of it. */
DEVICE void scale_and_add(float s[8], const uint32_t x[4], float scale) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
        const float2 y = unpack(x[e]);
        s[2 * e] = fmaf(s[2 * e], scale, y.x);
        s[2 * e + 1] = fmaf(s[2 * e + 1], scale, y.y);
    }
}
/* S becomes scale S + bias, scores in natural units: the 64 rows at `tile` of panels that are `panel` bytes apart.
   s: a thread's part of 64 x `columns`, which is what ldmatrix gives. Returns a value of all loads, for after_load. */
DEVICE uint32_t add_bias_rows(float *s, int columns, uint32_t tile, int panel, float scale, int thread) {
    const int lane = thread % 32;
    const uint32_t rows = tile + (uint32_t)(thread % 128 / 32 * 16 + lane % 16) * 128;
    uint32_t loaded = 0;
#pragma unroll
    for (int n = 0; n < columns / 8; n += 2) { /* matrices: 8 rows and the next 8, of two chunks of 8 columns */
        uint32_t x[4];
        ldmatrix_x4(x, rows + n / 8 * panel + (uint32_t)((n % 8 + lane / 16) ^ lane % 8) * 16);
        loaded |= x[0];
        scale_and_add(s + 4 * n, x, scale);
    }
    return loaded;
}

#endif
