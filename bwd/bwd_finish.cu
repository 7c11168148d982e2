/* After the main kernel: dq = scale * accumulator, from fragment order to the caller's layout. */
#define K_BF16 1
#include "bwd_layout.h"

#include "cuda_helpers.h"

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

/* One CTA per row block, with the main kernel's threads: thread x owns what thread x added to. */
extern "C" __global__ void __launch_bounds__(256)
    fattn_bwd_finish(const __grid_constant__ fattni_cuda_args a) {
    const int BM = a.row_block, blocks = (a.Sq + BM - 1) / BM;
    const int plane = (int)(blockIdx.x / (unsigned)blocks), h = plane % a.Hq, b = plane / a.Hq;
    const int i0 = (int)(blockIdx.x % (unsigned)blocks) * BM;
    const sequence s = sequence_of(&a, b);
    if (i0 >= s.Sq) return;
    const int threads = a.dq_threads, warp = (int)threadIdx.x / 32, lane = (int)threadIdx.x % 32;
    const int row_warps = BM / 32, columns = a.D_padded / (threads / 32 / row_warps);
    const int row0 = i0 + warp % row_warps * 32 + lane / 4, tiles = columns / 8;
    const int column0 = warp / row_warps * columns + lane % 4 * 2;
    const float4 *const from =
        (const float4 *)(a.dq_accumulator + (row_base(&a, &s, b, h) + i0) * a.D_padded);
    const int64_t to = s.batch * a.dq.b + h * a.dq.h + (int64_t)s.q0 * a.dq.row;
#pragma unroll 4
    for (int n = 0; n < 2 * tiles; ++n) {
        const float4 x = from[n * threads + (int)threadIdx.x];
        const float y[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            const int i = row0 + n / tiles * 16 + (e >= 2 ? 8 : 0);
            const int d = column0 + n % tiles * 8 + (e & 1);
            if (i < s.Sq && d < a.D) put(&a, to + (int64_t)i * a.dq.row + d, a.scale * y[e]);
        }
    }
}
