/* Before the main kernel: delta = rowsum(dO * O) - dL and lse2 = L log2(e) for every padded row, a dQ
   accumulator of zeros, this row block's part of dsink, and a 16-bit copy of an F32 dO. Hopper's
   kernels do the usual part themselves (bwd_sm90_scheduler.cuh).

   One CTA per row block of one (sequence, head). A group of 8, 16 or 32 lanes owns a row. */
#define K_BF16 1
#include "bwd/cuda/bwd_layout.cuh"

#include "core/device/helpers.cuh"

enum { THREADS = 256 };

/* Eight elements from column c of a row; beyond `width` they are 0. */
DEVICE void load_8(float x[8], const void *row, int kind, int c, int width, int vector) {
    if (kind == KIND_F32) {
#pragma unroll
        for (int e = 0; e < 8; ++e) x[e] = c + e < width ? ((const float *)row)[c + e] : 0.0f;
        return;
    }
    uint16_t bits[8];
    if (vector && c + 8 <= width) {
        *(uint4 *)bits = *(const uint4 *)((const uint16_t *)row + c);
    } else {
#pragma unroll
        for (int e = 0; e < 8; ++e) bits[e] = c + e < width ? ((const uint16_t *)row)[c + e] : 0;
    }
#pragma unroll
    for (int e = 0; e < 8; ++e)
        x[e] = kind == KIND_BF16 ? __bfloat162float(*(const __nv_bfloat16 *)&bits[e])
                                 : __half2float(*(const __half *)&bits[e]);
}

/* Eight elements of d_o's 16-bit copy. */
DEVICE void store_8(const fattni_cuda_args *a, int64_t at, const float x[8]) {
    uint32_t pairs[4];
#pragma unroll
    for (int e = 0; e < 4; ++e)
        pairs[e] = a->kind == KIND_BF16 ? pack_bf16(x[2 * e], x[2 * e + 1]) : pack_f16(x[2 * e], x[2 * e + 1]);
    *(uint4 *)((uint16_t *)a->d_o_copy.p + at) = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
}

extern "C" __global__ void __launch_bounds__(THREADS)
    fattn_bwd_delta(const __grid_constant__ fattni_cuda_args a) {
    const int BM = a.row_block, blocks = (a.Sq + BM - 1) / BM;
    const int plane = (int)(blockIdx.x / (unsigned)blocks), h = plane % a.Hq, b = plane / a.Hq;
    const int i0 = (int)(blockIdx.x % (unsigned)blocks) * BM;
    const sequence s = sequence_of(&a, b);
    if (a.turns && threadIdx.x == 0) a.turns[blockIdx.x] = 0;
    float *const sink_part =
        (float *)a.sink_parts + ((int64_t)h * a.B + b) * blocks + blockIdx.x % (unsigned)blocks;
    if (i0 >= s.Sq) {
        if (a.d_sink.p && threadIdx.x == 0) *sink_part = 0.0f;
        return;
    }
    const int64_t base = row_base(&a, &s, b, h) + i0;
    const int lanes = a.D_padded > 128 ? 32 : a.D_padded > 64 ? 16 : 8;
    const int group = (int)threadIdx.x / lanes, lane = (int)threadIdx.x % lanes;
    const int kind_o = a.o_f32 ? KIND_F32 : a.kind, kind_do = a.d_o_f32 ? KIND_F32 : a.kind;
    const size_t size_o = kind_o == KIND_F32 ? 4 : 2, size_do = kind_do == KIND_F32 ? 4 : 2;

    float sink_gradient = 0.0f;
    for (int r = group; r < BM; r += THREADS / lanes) {
        const int i = i0 + r;
        float sum = 0.0f;
        if (i < s.Sq && (!a.given_delta.p || a.d_o_copy.p)) {
            const int64_t row = s.q0 + i;
            const char *const o = (const char *)a.o.p +
                                  (s.batch * a.o.b + h * a.o.h + row * a.o.row) * (int64_t)size_o;
            const char *const d_o = (const char *)a.d_o.p +
                                    (s.batch * a.d_o.b + h * a.d_o.h + row * a.d_o.row) * (int64_t)size_do;
            float x[8], y[8];
            load_8(x, o, kind_o, 8 * lane, a.Dv, a.vector_gradients);
            load_8(y, d_o, kind_do, 8 * lane, a.Dv, a.vector_gradients);
#pragma unroll
            for (int e = 0; e < 8; ++e) sum += x[e] * y[e];
            if (a.d_o_copy.p && 8 * lane < a.D_padded)
                store_8(&a,
                        s.batch * a.d_o_copy.b + h * a.d_o_copy.h + row * a.d_o_copy.row + 8 * lane,
                        y);
        }
        for (int step = lanes / 2; step > 0; step /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
        if (lane != 0) continue;
        float L = INFINITY;
        if (i < s.Sq) {
            const int64_t row = s.q0 + i;
            L = ((const float *)a.lse.p)[s.batch * a.lse.b + h * a.lse.h + row * a.lse.row];
            if (a.given_delta.p)
                sum = ((const float *)a.given_delta.p)[s.batch * a.given_delta.b +
                                                       h * a.given_delta.h + row * a.given_delta.row];
            else if (a.d_lse.p)
                sum -= ((const float *)a.d_lse.p)[s.batch * a.d_lse.b + h * a.d_lse.h +
                                                  row * a.d_lse.row];
            if (a.d_sink.p && L != -INFINITY && !FATTNI_IS_HUGE(L)) { /* the sink's share of the row's P */
                const float sink = float_at(&a.sink, h), share = sink == L ? 1.0f : expf(sink - L);
                sink_gradient -= share * sum;
            }
        }
        store_statistics(&a, base + r, L, sum);
    }
    if (a.d_sink.p) {
        __shared__ float warps[THREADS / 32];
        for (int step = 16; step > 0; step /= 2)
            sink_gradient += __shfl_xor_sync(0xffffffffu, sink_gradient, step);
        if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = sink_gradient;
        __syncthreads();
        if (threadIdx.x == 0) {
            float sum = 0.0f;
            for (int w = 0; w < THREADS / 32; ++w) sum += warps[w];
            *sink_part = sum;
        }
    }
    if (!a.dq_accumulator) return;
    float4 *const zero = (float4 *)(a.dq_accumulator + base * a.D_padded);
    for (int n = (int)threadIdx.x; n < BM * a.D_padded / 4; n += THREADS)
        zero[n] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
}

/* Zeroes d_bias, which the main kernel adds to. */
extern "C" __global__ void __launch_bounds__(THREADS)
    fattn_bwd_zero(const __grid_constant__ fattni_cuda_args a) {
    const int64_t first = (int64_t)blockIdx.x * THREADS + threadIdx.x;
    const int64_t *const n = a.d_bias_n;
    const int64_t count = n[0] * n[1] * n[2] * n[3];
    for (int64_t at = first; at < count; at += (int64_t)gridDim.x * THREADS) {
        const int64_t j = at % n[3], i = at / n[3] % n[2], h = at / n[3] / n[2] % n[1],
                      b = at / n[3] / n[2] / n[1];
        const int64_t to = b * a.d_bias.b + h * a.d_bias.h + i * a.d_bias.row + j * a.d_bias.column;
        if (a.f64) ((double *)a.d_bias.p)[to] = 0.0;
        else ((float *)a.d_bias.p)[to] = 0.0f;
    }
}
