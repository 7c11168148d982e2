/* What the three backward kernels agree on: a row block's statistics and the order of the fp32 dQ
   accumulator. */
#ifndef FATTNI_BWD_CUDA_BWD_LAYOUT_H
#define FATTNI_BWD_CUDA_BWD_LAYOUT_H

#include "bwd/cuda/bwd_workspace.cuh"
#include "core/device/sm80_tile.cuh"

/* lse2[BM], delta[BM] of one row block to shared memory. */
DEVICE void load_statistics(float *to, int rows, const fattni_cuda_args *a, const sequence *s, int b,
                            int h, int i) {
    const int64_t at = row_base(a, s, b, h) + i;
    const int n = (int)threadIdx.x * 4;
    if (n < rows) cp_async_16(shared_address(to + n), a->lse2 + at + n, 16);
    else if (n < 2 * rows) cp_async_16(shared_address(to + n), a->delta + at + n - rows, 16);
}

/* The accumulator of a row block is in fragment order: each warp has 32 rows, two row tiles of as many
   column tiles, counted row by row; tile c of thread x is float4 number c * threads + x. */
DEVICE int64_t dq_offset(int tile, int threads) {
    return ((int64_t)tile * threads + threadIdx.x) * 4;
}

/* A warp's 32 rows (row0..) and columns (column0..) of a dK or dV block to global memory; x has two row
   tiles. `tile` has room for the block in shared memory, and only this warp uses its part. */
DEVICE void store_gradient(const float (*x)[4], int column_tiles, uint32_t tile, int columns, int row0,
                           int column0, const fattni_view *view, int batch, int head, int first_row,
                           int rows, int width, int f32, int accumulate, int vector) {
    if (!view->p) return;
    const int lane = (int)threadIdx.x & 31, g = lane / 4, t = lane % 4;
    const int64_t at = batch * view->b + head * view->h + (int64_t)first_row * view->row;
    if (f32 || accumulate || !vector) {
#pragma unroll
        for (int n = 0; n < 2 * column_tiles; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const int row = row0 + n / column_tiles * 16 + g + (e >= 2 ? 8 : 0);
                const int d = column0 + n % column_tiles * 8 + 2 * t + (e & 1);
                if (row >= rows || d >= width) continue;
                const int64_t to = at + row * view->row + d;
                if (f32) {
                    float *const p = (float *)view->p + to;
                    *p = accumulate ? *p + x[n][e] : x[n][e];
                } else {
                    half_type *const p = (half_type *)view->p + to;
                    *p = to_half(accumulate ? to_float(*p) + x[n][e] : x[n][e]);
                }
            }
        return;
    }
    __syncwarp();
#pragma unroll
    for (int n = 0; n < 2 * column_tiles; ++n) {
        const int row = row0 + n / column_tiles * 16 + g, chunk = column0 / 8 + n % column_tiles;
        store_shared_word(tile + tile_offset(columns, row, chunk) + 4u * t, pack(x[n][0], x[n][1]));
        store_shared_word(tile + tile_offset(columns, row + 8, chunk) + 4u * t, pack(x[n][2], x[n][3]));
    }
    __syncwarp();
    for (int n = lane; n < 32 * column_tiles; n += 32) {
        const int row = row0 + n / column_tiles, chunk = column0 / 8 + n % column_tiles;
        if (row < rows && chunk * 8 < width)
            *(uint4 *)((half_type *)view->p + at + row * view->row + chunk * 8) =
                load_chunk(tile + tile_offset(columns, row, chunk));
    }
}

#endif
