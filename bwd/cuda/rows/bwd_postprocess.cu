/* After the main kernel: dq = dq_scale * accumulator, from fragment order to the caller's layout. Of keys with a
   mean dq_of_mean times that is added (bwd_key_mean.cu). */
#define K_BF16 1
#include "bwd/cuda/bwd_workspace.cuh"
#include "core/device/quad.cuh"
#include "bwd/cuda/rows/bwd_row_block_at.cuh"
#include "core/ptx/grid.h"

/* x to dq, or added to it. */
DEVICE void store_dq(const fattni_bwd_args *bwd, int64_t at, float x) {
    const fattni_attention_args *const a = &bwd->a;
    if (bwd->dq_f32) {
        float *const p = (float *)bwd->dq.p + at;
        *p = a->flags & FATTN_ACC_DQ ? *p + x : x;
    } else if (a->kind == KIND_BF16) {
        __nv_bfloat16 *const p = (__nv_bfloat16 *)bwd->dq.p + at;
        *p = __float2bfloat16_rn(a->flags & FATTN_ACC_DQ ? __bfloat162float(*p) + x : x);
    } else {
        __half *const p = (__half *)bwd->dq.p + at;
        *p = __float2half_rn(a->flags & FATTN_ACC_DQ ? __half2float(*p) + x : x);
    }
}

/* With dq_of_mean of padded rows `row` and `row` + 8 times the mean of the keys, of columns d and d + 1. */
DEVICE float4 with_mean(const fattni_bwd_args *bwd, float4 x, const float *mean, int64_t row, int d) {
    if (!mean) return x;
    const float sum = bwd->dq_of_mean[row], sum8 = bwd->dq_of_mean[row + 8];
    const float2 m = *(const float2 *)(mean + d);
    return make_float4(x.x + sum * m.x, x.y + sum * m.y, x.z + sum8 * m.x, x.w + sum8 * m.y);
}

/* One CTA per row block, with as many threads as added to it: thread x stores what thread x added. */
extern "C" __global__ void __launch_bounds__(256) fattn_bwd_postprocess(const __grid_constant__ fattni_bwd_args args) {
    begin_grid();
    const fattni_bwd_args *const bwd = &args;
    const fattni_attention_args *const a = &args.a;
    const int BM = bwd->row_block;
    const block_position at = row_block_at(bwd, &bwd->dq);
    const int b = at.b, h = at.h, i0 = at.first;
    const sequence s = sequence_of(a, b);
    if (i0 < 0 || i0 >= s.Sq) return;
    const int thread = (int)threadIdx.x, warp = thread / 32, t = thread % 4;
    /* Warps side by side have equal parts of the columns; of 80 and 96 columns the first has 48. */
    const int row_warps = BM / bwd->dq_warp_rows;
    const int columns = bwd->D_padded % 64 ? 48 : bwd->D_padded / (bwd->dq_threads / 32 / row_warps);
    const int row0 = i0 + warp % row_warps * bwd->dq_warp_rows + thread % 32 / 4;
    const int column0 = warp / row_warps * columns, tiles = min(columns, bwd->D_padded - column0) / 8;
    const int row_tiles = bwd->dq_warp_rows / 16, count = row_tiles * tiles;
    const float4 *const from = (const float4 *)(bwd->dq_accumulator + (row_base(bwd, &s, b, h) + i0) * bwd->D_padded) +
                               thread / bwd->dq_group * (bwd->dq_group * row_tiles * columns / 8) +
                               thread % bwd->dq_group;
    const float *const mean = bwd->dq_of_mean ? key_mean_of(bwd, b, h / a->group) : 0;
    const int64_t base = row_base(bwd, &s, b, h); /* its padded rows */
    const int64_t to = s.batch * bwd->dq.b + h * bwd->dq.h + (int64_t)s.q0 * bwd->dq.row;
    const int whole = tiles % 2 == 0 && bwd->vector_gradients && !bwd->dq_f32 && !(a->flags & FATTN_ACC_DQ);
    if (whole) { /* two tiles at a time: each lane of a quad stores 16 bytes, of one tile and row */
#pragma unroll 4
        for (int n = 0; n < count; n += 2) {
            uint32_t r[4];
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                const int row = row0 + n / tiles * 16, d = column0 + (n % tiles + e) * 8 + 2 * t;
                const float4 x = with_mean(bwd, from[(n + e) * bwd->dq_group], mean, base + row, d);
                const float y[4] = {bwd->dq_scale * x.x, bwd->dq_scale * x.y, bwd->dq_scale * x.z, bwd->dq_scale * x.w};
                r[e] = a->kind == KIND_BF16 ? pack_bf16(y[0], y[1]) : pack_f16(y[0], y[1]);
                r[2 + e] = a->kind == KIND_BF16 ? pack_bf16(y[2], y[3]) : pack_f16(y[2], y[3]);
            }
            transpose_quad(r);
            const int i = row0 + n / tiles * 16 + t / 2 * 8, d = column0 + (n % tiles + t % 2) * 8;
            if (i < s.Sq && d < a->D)
                *(uint4 *)((uint16_t *)bwd->dq.p + to + (int64_t)i * bwd->dq.row + d) =
                    make_uint4(r[0], r[1], r[2], r[3]);
        }
        return;
    }
#pragma unroll 4
    for (int n = 0; n < count; ++n) {
        const int row = row0 + n / tiles * 16, d0 = column0 + n % tiles * 8 + 2 * t;
        const float4 x = with_mean(bwd, from[n * bwd->dq_group], mean, base + row, d0);
        const float y[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            const int i = row + (e >= 2 ? 8 : 0), d = d0 + (e & 1);
            if (i < s.Sq && d < a->D) store_dq(bwd, to + (int64_t)i * bwd->dq.row + d, bwd->dq_scale * y[e]);
        }
    }
}
