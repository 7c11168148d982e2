/* After the main kernel: dq = dq_scale * accumulator, from fragment order to the caller's layout. */
#define K_BF16 1
#include "bwd/cuda/bwd_layout.cuh"

#include "core/device/helpers.cuh"
#include "core/device/quad.cuh"

DEVICE void put(const fattni_cuda_args *a, int64_t at, float x) {
    if (a->dq_f32) {
        float *const p = (float *)a->dq.p + at;
        *p = a->flags & FATTN_ACC_DQ ? *p + x : x;
    } else if (a->kind == KIND_BF16) {
        __nv_bfloat16 *const p = (__nv_bfloat16 *)a->dq.p + at;
        *p = __float2bfloat16_rn(a->flags & FATTN_ACC_DQ ? __bfloat162float(*p) + x : x);
    } else {
        __half *const p = (__half *)a->dq.p + at;
        *p = __float2half_rn(a->flags & FATTN_ACC_DQ ? __half2float(*p) + x : x);
    }
}

/* One CTA per row block, with the threads that added to it: thread x owns what thread x added. */
extern "C" __global__ void __launch_bounds__(256)
    fattn_bwd_finish(const __grid_constant__ fattni_cuda_args a) {
    const int BM = a.row_block, blocks = (a.Sq + BM - 1) / BM;
    const int plane = (int)(blockIdx.x / (unsigned)blocks), h = plane % a.Hq, b = plane / a.Hq;
    const int i0 = (int)(blockIdx.x % (unsigned)blocks) * BM;
    const sequence s = sequence_of(&a, b);
    if (i0 >= s.Sq) return;
    const int thread = (int)threadIdx.x, warp = thread / 32, t = thread % 4;
    /* Warps side by side share the columns evenly; of 80 and 96 the first have 48. */
    const int row_warps = BM / a.dq_warp_rows;
    const int columns = a.D_padded % 64 ? 48 : a.D_padded / (a.dq_threads / 32 / row_warps);
    const int row0 = i0 + warp % row_warps * a.dq_warp_rows + thread % 32 / 4;
    const int column0 = warp / row_warps * columns, tiles = min(columns, a.D_padded - column0) / 8;
    const int row_tiles = a.dq_warp_rows / 16, count = row_tiles * tiles;
    const float4 *const from =
        (const float4 *)(a.dq_accumulator + (row_base(&a, &s, b, h) + i0) * a.D_padded) +
        thread / a.dq_group * (a.dq_group * row_tiles * columns / 8) + thread % a.dq_group;
    const int64_t to = s.batch * a.dq.b + h * a.dq.h + (int64_t)s.q0 * a.dq.row;
    const int whole = tiles % 2 == 0 && a.vector_gradients && !a.dq_f32 && !(a.flags & FATTN_ACC_DQ);
    if (whole) { /* two tiles at once: each lane of a quad gets 16 bytes, of one tile and row */
#pragma unroll 4
        for (int n = 0; n < count; n += 2) {
            uint32_t r[4];
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                const float4 x = from[(n + e) * a.dq_group];
                const float y[4] = {a.dq_scale * x.x, a.dq_scale * x.y, a.dq_scale * x.z, a.dq_scale * x.w};
                r[e] = a.kind == KIND_BF16 ? pack_bf16(y[0], y[1]) : pack_f16(y[0], y[1]);
                r[2 + e] = a.kind == KIND_BF16 ? pack_bf16(y[2], y[3]) : pack_f16(y[2], y[3]);
            }
            transpose_quad(r);
            const int i = row0 + n / tiles * 16 + t / 2 * 8, d = column0 + (n % tiles + t % 2) * 8;
            if (i < s.Sq && d < a.D)
                *(uint4 *)((uint16_t *)a.dq.p + to + (int64_t)i * a.dq.row + d) =
                    make_uint4(r[0], r[1], r[2], r[3]);
        }
        return;
    }
#pragma unroll 4
    for (int n = 0; n < count; ++n) {
        const float4 x = from[n * a.dq_group];
        const float y[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            const int i = row0 + n / tiles * 16 + (e >= 2 ? 8 : 0);
            const int d = column0 + n % tiles * 8 + 2 * t + (e & 1);
            if (i < s.Sq && d < a.D) put(&a, to + (int64_t)i * a.dq.row + d, a.dq_scale * y[e]);
        }
    }
}
