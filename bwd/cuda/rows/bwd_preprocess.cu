/* Before the main kernel in 16 bits: delta = rowsum(dO * O) - dL and lse2 (bwd_workspace.cuh) for every padded row, a
   zeroed dQ accumulator, this row block's part of dsink, and a 16-bit copy of an F32 dO. In most calls Hopper's kernels
   do this themselves (bwd_sm90_scheduler.cuh).

   One CTA per row block of one (sequence, head). A group of 8, 16 or 32 lanes has a row. */
#define K_BF16 1
#include "bwd/cuda/bwd_workspace.cuh"
#include "bwd/cuda/rows/bwd_row_block_at.cuh"
#include "core/device/half_types.cuh"
#include "core/ptx/grid.h"
#include "core/device/load_8.cuh"

#if defined __CUDA_ARCH__ && __CUDA_ARCH__ >= 1200 /* an SM holds 1536 threads, and four CTAs' registers spill */
enum { CTAS = 3 };
#else
enum { CTAS = 4 };
#endif
enum { THREADS = 256, AT_ONCE = 4 };

/* Eight elements of O, more exact by their rest (o_rest.h). Beyond Dv d_o is 0. */
DEVICE void add_rest_8(float x[8], const int8_t *from, int kind) {
    const uint2 rest = *(const uint2 *)from;
#pragma unroll
    for (int e = 0; e < 8; ++e) {
        const int8_t units = (int8_t)((e < 4 ? rest.x : rest.y) >> 8 * (e % 4));
        x[e] = __uint_as_float(
            fattni_o_exact(__float_as_uint(x[e]), units, kind == KIND_BF16 ? FATTNI_O_REST_BF16 : FATTNI_O_REST_F16));
    }
}

/* Eight elements of d_o's 16-bit copy. */
DEVICE void store_8(const fattni_bwd_args *bwd, int64_t at, const float x[8]) {
    const fattni_attention_args *const a = &bwd->a;
    uint32_t pairs[4];
#pragma unroll
    for (int e = 0; e < 4; ++e)
        pairs[e] = a->kind == KIND_BF16 ? pack_bf16(x[2 * e], x[2 * e + 1]) : pack_f16(x[2 * e], x[2 * e + 1]);
    *(uint4 *)((uint16_t *)bwd->d_o_copy.p + at) = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
}

/* This lane's part of a row's dO * O, of any types; its d_o is copied where that is wanted. */
DEVICE float product_of_row(const fattni_bwd_args *bwd, const sequence *s, int h, int i, int lane) {
    const fattni_attention_args *const a = &bwd->a;
    if (bwd->given_delta.p && !bwd->d_o_copy.p) return 0.0f;
    const int kind_o = a->o_f32 ? KIND_F32 : a->kind, kind_do = bwd->d_o_f32 ? KIND_F32 : a->kind;
    const size_t size_o = kind_o == KIND_F32 ? 4 : 2, size_do = kind_do == KIND_F32 ? 4 : 2;
    const int64_t row = s->q0 + i;
    const char *const o = (const char *)a->o.p + (s->batch * a->o.b + h * a->o.h + row * a->o.row) * (int64_t)size_o;
    const char *const d_o =
        (const char *)bwd->d_o.p + (s->batch * bwd->d_o.b + h * bwd->d_o.h + row * bwd->d_o.row) * (int64_t)size_do;
    float x[8], y[8], sum = 0.0f;
    load_8(x, o, kind_o, 8 * lane, a->Dv, bwd->vector_gradients);
    if (a->o_rest.p && 8 * lane < a->Dv)
        add_rest_8(
            x, (const int8_t *)a->o_rest.p + s->batch * a->o_rest.b + h * a->o_rest.h + row * a->o_rest.row + 8 * lane,
            kind_o);
    load_8(y, d_o, kind_do, 8 * lane, a->Dv, bwd->vector_gradients);
#pragma unroll
    for (int e = 0; e < 8; ++e) sum += x[e] * y[e];
    if (bwd->d_o_copy.p && 8 * lane < bwd->D_padded)
        store_8(bwd, s->batch * bwd->d_o_copy.b + h * bwd->d_o_copy.h + row * bwd->d_o_copy.row + 8 * lane, y);
    return sum;
}
/* The sum over neighbouring lanes, in all of them. */
DEVICE float sum_of_lanes(float x, int lanes) {
    for (int step = lanes / 2; step > 0; step /= 2) x += __shfl_xor_sync(0xffffffffu, x, step);
    return x;
}

extern "C" __global__ void __launch_bounds__(THREADS, CTAS)
    fattn_bwd_preprocess(const __grid_constant__ fattni_bwd_args args) {
    begin_grid();
    const fattni_bwd_args *const bwd = &args;
    const fattni_attention_args *const a = &args.a;
    const int BM = bwd->row_block, blocks = (a->Sq + BM - 1) / BM;
    const block_position at = row_block_at(bwd, &a->o);
    const int b = at.b, h = at.h, i0 = at.first;
    const sequence s = sequence_of(a, b);
    float *const sink_part = (float *)bwd->sink_parts + ((int64_t)h * a->B + b) * blocks + (unsigned)at.index;
    if (i0 < 0 || i0 >= s.Sq) {
        if (bwd->d_sink.p && threadIdx.x == 0) *sink_part = 0.0f;
        return;
    }
    if (bwd->dq_semaphore && threadIdx.x == 0) bwd->dq_semaphore[((int64_t)b * a->Hq + h) * blocks + at.index] = 0;
    const int64_t base = row_base(bwd, &s, b, h) + i0;
    if (bwd->dq_accumulator) {
        float4 *const zero = (float4 *)(bwd->dq_accumulator + base * bwd->D_padded);
        for (int n = (int)threadIdx.x; n < BM * bwd->D_padded / 4; n += THREADS)
            zero[n] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    }
    const int lanes = bwd->D_padded > 128 ? 32 : bwd->D_padded > 64 ? 16 : 8;
    const int group = (int)threadIdx.x / lanes, lane = (int)threadIdx.x % lanes;
    const float sink = a->sink.p ? float_at(&a->sink, h) : -INFINITY;
    /* Rows that a group of lanes loads before it uses them; lane n has row n's result. */
    const int groups = THREADS / lanes;
    const int quick =
        bwd->vector_gradients && !a->o_f32 && !bwd->d_o_f32 && !a->o_rest.p && !bwd->given_delta.p && a->Dv % 8 == 0;
    float sink_gradient = 0.0f;
    for (int first = group; first - group < BM; first += AT_ONCE * groups) {
        float sum = 0.0f; /* of row `first` + lane * groups */
        if (quick) {
            uint4 left[AT_ONCE], right[AT_ONCE];
#pragma unroll
            for (int n = 0; n < AT_ONCE; ++n) {
                const int r = first + n * groups, inside = r < BM && i0 + r < s.Sq && 8 * lane < a->Dv;
                const int64_t row = s.q0 + i0 + r;
                const uint16_t *const o = (const uint16_t *)a->o.p + s.batch * a->o.b + h * a->o.h + 8 * lane;
                const uint16_t *const d_o =
                    (const uint16_t *)bwd->d_o.p + s.batch * bwd->d_o.b + h * bwd->d_o.h + 8 * lane;
                left[n] = inside ? *(const uint4 *)(o + row * a->o.row) : make_uint4(0, 0, 0, 0);
                right[n] = inside ? *(const uint4 *)(d_o + row * bwd->d_o.row) : make_uint4(0, 0, 0, 0);
            }
#pragma unroll
            for (int n = 0; n < AT_ONCE; ++n) {
                float x[8], y[8], product = 0.0f;
                convert_8(x, (const uint16_t *)(left + n), a->kind);
                convert_8(y, (const uint16_t *)(right + n), a->kind);
#pragma unroll
                for (int e = 0; e < 8; ++e) product += x[e] * y[e];
                product = sum_of_lanes(product, lanes);
                if (lane == n) sum = product;
            }
        }
#pragma unroll 1
        for (int n = 0; n < AT_ONCE && !quick; ++n) {
            const int r = first + n * groups;
            const float product = r < BM && i0 + r < s.Sq ? product_of_row(bwd, &s, h, i0 + r, lane) : 0.0f;
            const float all = sum_of_lanes(product, lanes);
            if (lane == n) sum = all;
        }
        const int r = first + lane * groups, i = i0 + r;
        if (lane >= AT_ONCE || r >= BM) continue;
        float L = INFINITY, d_lse = 0.0f;
        if (i < s.Sq) {
            const int64_t row = s.q0 + i;
            L = ((const float *)a->lse.p)[s.batch * a->lse.b + h * a->lse.h + row * a->lse.row];
            if (bwd->d_lse.p)
                d_lse = ((const float *)bwd->d_lse.p)[s.batch * bwd->d_lse.b + h * bwd->d_lse.h + row * bwd->d_lse.row];
            if (bwd->given_delta.p)
                sum = ((const float *)bwd->given_delta
                           .p)[s.batch * bwd->given_delta.b + h * bwd->given_delta.h + row * bwd->given_delta.row];
            else
                sum -= d_lse;
            if (bwd->d_sink.p && L != -INFINITY && !FATTNI_IS_HUGE(L)) { /* the sink's share of the row's P */
                const float share = sink == L ? 1.0f : expf(sink - L);
                sink_gradient -= share * sum;
            }
        }
        store_statistics(bwd, base + r, L, sum);
        if (bwd->dq_of_mean && !(a->softcap > 0) && key_mean_of(bwd, b, h / a->group))
            store_sum_of_ds(bwd, base + r, L, sum, sink, d_lse);
    }
    if (bwd->d_sink.p) {
        __shared__ float warps[THREADS / 32];
        for (int step = 16; step > 0; step /= 2) sink_gradient += __shfl_xor_sync(0xffffffffu, sink_gradient, step);
        if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = sink_gradient;
        __syncthreads();
        if (threadIdx.x == 0) {
            float sum = 0.0f;
            for (int w = 0; w < THREADS / 32; ++w) sum += warps[w];
            *sink_part = sum;
        }
    }
}

/* Zeroes d_bias, which the main kernel adds to. */
extern "C" __global__ void __launch_bounds__(THREADS) fattn_bwd_zero(const __grid_constant__ fattni_bwd_args args) {
    begin_grid();
    const fattni_bwd_args *const bwd = &args;
    const fattni_attention_args *const a = &args.a;
    const int64_t first = (int64_t)blockIdx.x * THREADS + threadIdx.x;
    const int64_t *const n = bwd->d_bias_n;
    const int64_t count = n[0] * n[1] * n[2] * n[3];
    for (int64_t at = first; at < count; at += (int64_t)gridDim.x * THREADS) {
        const int64_t j = at % n[3], i = at / n[3] % n[2], h = at / n[3] / n[2] % n[1], b = at / n[3] / n[2] / n[1];
        const int64_t to = b * bwd->d_bias.b + h * bwd->d_bias.h + i * bwd->d_bias.row + j * bwd->d_bias.column;
        if (a->f64)
            ((double *)bwd->d_bias.p)[to] = 0.0;
        else
            ((float *)bwd->d_bias.p)[to] = 0.0f;
    }
}
