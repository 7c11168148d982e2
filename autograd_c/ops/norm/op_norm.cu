/* layernorm and rmsnorm on the device; equations in op_norm.c. */
#include "autograd_c/ops/op_cuda.h"

#include "core/device/any_dtype.cuh"

enum { NORM_PACKS = FATTNI_NORM_PACKS };

#define BODY "autograd_c/ops/norm/op_norm_cuda.inc"
#include "core/device/for_each_real.inc"

extern "C" __global__ void __launch_bounds__(ROW_THREADS)
    fattn_norm_warp_f64(const __grid_constant__ fattni_norm_args a) {
    begin_grid();
    norm_packs_f64(&a, 32, NORM_PACKS, 0);
}

/* Rows of at most 1024 elements in float: a warp has one in the registers of its lanes. Pack n of lane l begins at
   element (32 n + l) width, width 4 or 8. width, packs, centred, as and early are literals where these are called. */
enum { MOST_WIDTH = FATTNI_PACK, MOST_PACKS = 8, WARPS = ROW_THREADS / 32, MOST_WARPS = 12 };
typedef struct raw_pack { /* as it lies in memory; 16 bits: a, 4 of them the first half of a */
    uint4 a, b;
} raw_pack;

DEVICE raw_pack fetch_raw(const fattni_operand *t, int64_t i, int width, int32_t as) {
    raw_pack raw;
    if ((as ? as : t->dtype) == FATTN_F32) {
        const uint4 *const p = (const uint4 *)((const float *)t->p + i);
        raw.a = p[0];
        if (width == 8) raw.b = p[1];
    } else if (width == 8) {
        raw.a = *(const uint4 *)((const uint16_t *)t->p + i);
    } else {
        const uint2 half = *(const uint2 *)((const uint16_t *)t->p + i);
        raw.a = make_uint4(half.x, half.y, 0, 0);
    }
    return raw;
}
DEVICE void values_of(float *x, const raw_pack *raw, const fattni_operand *t, int width, int32_t as) {
    const uint32_t word[8] = {raw->a.x, raw->a.y, raw->a.z, raw->a.w, raw->b.x, raw->b.y, raw->b.z, raw->b.w};
    const int32_t dtype = as ? as : t->dtype;
    if (dtype == FATTN_F32) {
#pragma unroll
        for (int e = 0; e < width; ++e) x[e] = __uint_as_float(word[e]);
    } else if (dtype == FATTN_BF16) { /* the upper half of a float */
#pragma unroll
        for (int e = 0; e < width; ++e) x[e] = __uint_as_float(e % 2 ? word[e / 2] & 0xffff0000u : word[e / 2] << 16);
    } else {
#pragma unroll
        for (int e = 0; e < width; ++e) {
            const __half2 pair = *(const __half2 *)&word[e / 2];
            x[e] = e % 2 ? __high2float(pair) : __low2float(pair);
        }
    }
}
DEVICE void store_values(const fattni_operand *t, int64_t i, const float *x, int width, int32_t as) {
    const int32_t dtype = as ? as : t->dtype;
    if (dtype == FATTN_F32) {
#pragma unroll
        for (int e = 0; e < width; e += 4)
            *(float4 *)((float *)t->p + i + e) = make_float4(x[e], x[e + 1], x[e + 2], x[e + 3]);
        return;
    }
    uint32_t word[4];
#pragma unroll
    for (int e = 0; e < width; e += 2) {
        if (dtype == FATTN_BF16) {
            const __nv_bfloat162 pair = __floats2bfloat162_rn(x[e], x[e + 1]);
            word[e / 2] = *(const uint32_t *)&pair;
        } else {
            const __half2 pair = __floats2half2_rn(x[e], x[e + 1]);
            word[e / 2] = *(const uint32_t *)&pair;
        }
    }
    if (width == 8)
        *(uint4 *)((uint16_t *)t->p + i) = make_uint4(word[0], word[1], word[2], word[3]);
    else
        *(uint2 *)((uint16_t *)t->p + i) = make_uint2(word[0], word[1]);
}

/* The element where pack n of this lane begins. */
DEVICE int pack_at(int n, int width) { return (n * 32 + (int)threadIdx.x % 32) * width; }
DEVICE void fetch_row(raw_pack to[MOST_PACKS], const fattni_operand *t, int64_t row, int C, int width, int packs,
                      int32_t as) {
#pragma unroll
    for (int n = 0; n < packs; ++n)
        if (pack_at(n, width) < C) to[n] = fetch_raw(t, row + pack_at(n, width), width, as);
}

/* y of one row, from what is in raw. early: so are gain and bias. */
DEVICE void norm_row(const fattni_norm_args *a, int64_t row, const raw_pack *raw, const raw_pack *gains,
                     const raw_pack *biases, int width, int packs, int32_t as, bool early) {
    const int C = (int)a->C;
    const float eps = (float)a->eps;
    float x[MOST_PACKS][MOST_WIDTH], mean, r;
#pragma unroll
    for (int n = 0; n < packs; ++n) {
        if (pack_at(n, width) < C)
            values_of(x[n], &raw[n], &a->in, width, as);
        else
#pragma unroll
            for (int e = 0; e < width; ++e) x[n][e] = 0;
    }
    find_moments_f32(a, row, x, C, 32, packs, width, eps, &mean, &r);
    const int64_t y = walk_offset(&a->y, row);
#pragma unroll
    for (int n = 0; n < packs; ++n) {
        const int i = pack_at(n, width);
        if (i >= C) continue;
        float gain[MOST_WIDTH], bias[MOST_WIDTH];
        const raw_pack raw_gain = early ? gains[n] : fetch_raw(&a->gain, i, width, as);
        values_of(gain, &raw_gain, &a->gain, width, as);
        if (a->bias.p) {
            const raw_pack raw_bias = early ? biases[n] : fetch_raw(&a->bias, i, width, as);
            values_of(bias, &raw_bias, &a->bias, width, as);
        }
#pragma unroll
        for (int e = 0; e < width; ++e) {
            x[n][e] = (x[n][e] - mean) * r * gain[e];
            if (a->bias.p) x[n][e] += bias[e];
        }
        store_values(&a->out, y + i, x[n], width, as);
    }
}

/* early: gain and bias are read together with the row. loops: a warp has several rows, and one is on its way from
   memory while the one before is computed. Every choice gives the same bits. */
DEVICE void norm_rows(const fattni_norm_args *a, int width, int packs, int32_t as, bool early, bool loops) {
    const int C = (int)a->C;
    const int64_t step = (int64_t)gridDim.x * WARPS, first = (int64_t)blockIdx.x * WARPS + threadIdx.x / 32;
    raw_pack next[MOST_PACKS], gains[MOST_PACKS], biases[MOST_PACKS];
    if (first >= a->rows) return;
    fetch_row(next, &a->in, walk_offset(&a->x, first), C, width, packs, as);
    if (early) fetch_row(gains, &a->gain, 0, C, width, packs, as);
    if (early && a->bias.p) fetch_row(biases, &a->bias, 0, C, width, packs, as);
    if (!loops) {
        norm_row(a, first, next, gains, biases, width, packs, as, early);
        return;
    }
    for (int64_t row = first; row < a->rows; row += step) {
        raw_pack now[MOST_PACKS];
#pragma unroll
        for (int n = 0; n < packs; ++n) now[n] = next[n];
        if (row + step < a->rows) fetch_row(next, &a->in, walk_offset(&a->x, row + step), C, width, packs, as);
        norm_row(a, row, now, gains, biases, width, packs, as, early);
    }
}

enum { SUM_COLUMNS = ROW_THREADS / 2 };
static __shared__ float back_sums[2][MOST_WARPS][2][SUM_COLUMNS]; /* one for all of rows_back's copies */

/* What a lane reads of a row, and the row's statistics. */
typedef struct back_row {
    raw_pack x[MOST_PACKS], dy[MOST_PACKS], dx[MOST_PACKS]; /* dx: what it holds before, unless fresh */
    float r, mean;
} back_row;

DEVICE void fetch_back_row(back_row *to, const fattni_norm_args *a, int64_t row, int width, int packs, bool centred,
                           int32_t as) {
    const int C = (int)a->C;
    if (row >= a->rows) return;
    fetch_row(to->x, &a->in, walk_offset(&a->x, row), C, width, packs, as);
    fetch_row(to->dy, &a->out, walk_offset(&a->y, row), C, width, packs, as);
    if (!a->fresh) fetch_row(to->dx, &a->d_in, walk_offset(&a->dx, row), C, width, packs, as);
    to->r = ((const float *)a->statistics)[row];
    to->mean = centred ? ((const float *)a->statistics)[a->rows + row] : 0;
}

/* h and g = dy gain of pack n; dy as it is, too. */
DEVICE void back_pack(const fattni_norm_args *a, const back_row *row, const raw_pack *gains, int n, int width,
                      int32_t as, bool early, float *h, float *g, float *dy) {
    float gain[MOST_WIDTH];
    const raw_pack raw_gain = early ? gains[n] : fetch_raw(&a->gain, pack_at(n, width), width, as);
    values_of(h, &row->x[n], &a->in, width, as);
    values_of(dy, &row->dy[n], &a->out, width, as);
    values_of(gain, &raw_gain, &a->gain, width, as);
#pragma unroll
    for (int e = 0; e < width; ++e) {
        h[e] = normal_f32(h[e], row->mean * 0.5f, 2 * row->r);
        g[e] = dy[e] * gain[e];
    }
}

/* Adds what the lanes of all warps have: x's sums to `to`, with `both` y's behind them. A thread adds a column, four of
   each lane at a time; the other buffer may still be read. */
DEVICE void add_warps(double *to, const float x[MOST_PACKS][MOST_WIDTH], const float y[MOST_PACKS][MOST_WIDTH], int C,
                      int width, int packs, bool both) {
    const int warp = (int)threadIdx.x / 32, warps = (int)blockDim.x / 32, own = (int)threadIdx.x % 32 * 4,
              which = (int)threadIdx.x / SUM_COLUMNS, column = (int)threadIdx.x % SUM_COLUMNS;
#pragma unroll
    for (int n = 0; n < packs; ++n)
#pragma unroll
        for (int e = 0; e < width; e += 4) {
            float(*const sums)[2][SUM_COLUMNS] = back_sums[(n * width + e) / 4 % 2];
            const int i = (n * 32 + column / 4) * width + e + column % 4;
            *(float4 *)&sums[warp][0][own] = make_float4(x[n][e], x[n][e + 1], x[n][e + 2], x[n][e + 3]);
            if (both) *(float4 *)&sums[warp][1][own] = make_float4(y[n][e], y[n][e + 1], y[n][e + 2], y[n][e + 3]);
            __syncthreads();
            if (i >= C || which > (both ? 1 : 0)) continue;
            float sum = sums[0][which][column];
            for (int w = 1; w < warps; ++w) sum += sums[w][which][column];
            to[which * C + i] = (double)sum;
        }
}

/* dx together with the sums over rows of dy h and, for layernorm, of dy: one pass over x and dy, a warp per row at a
   time. early: a row is on its way from memory while the one before is computed, and gain is read once. totals: dx is
   summed, too, with what it holds before and not rounded. */
DEVICE void rows_back(const fattni_norm_args *a, int width, int packs, bool centred, int32_t as, bool early,
                      bool totals) {
    const int C = (int)a->C, warp = (int)threadIdx.x / 32, warps = (int)blockDim.x / 32;
    const int64_t step = (int64_t)gridDim.x * warps, first_row = (int64_t)blockIdx.x * warps + warp;
    float d_gain[MOST_PACKS][MOST_WIDTH] = {{0}}, d_bias[MOST_PACKS][MOST_WIDTH] = {{0}},
          total[MOST_PACKS][MOST_WIDTH] = {{0}};
    float h[MOST_WIDTH], g[MOST_WIDTH], dy[MOST_WIDTH], old[MOST_WIDTH];
    raw_pack gains[MOST_PACKS];
    back_row next;
    if (early) fetch_back_row(&next, a, first_row, width, packs, centred, as);
    if (early) fetch_row(gains, &a->gain, 0, C, width, packs, as);
    for (int64_t row = first_row; row < a->rows; row += step) {
        back_row now = next;
        fetch_back_row(early ? &next : &now, a, early ? row + step : row, width, packs, centred, as);
        const int64_t dx = walk_offset(&a->dx, row);
        float g_mean = 0, gh_mean = 0;
#pragma unroll
        for (int n = 0; n < packs; ++n) {
            if (pack_at(n, width) >= C) continue;
            back_pack(a, &now, gains, n, width, as, early, h, g, dy);
#pragma unroll
            for (int e = 0; e < width; ++e) {
                d_gain[n][e] += dy[e] * h[e];
                if (centred) d_bias[n][e] += dy[e];
                g_mean += g[e];
                gh_mean += g[e] * h[e];
            }
        }
        g_mean = centred ? warp_sum_f32(g_mean) / (float)C : 0;
        gh_mean = warp_sum_f32(gh_mean) / (float)C;
#pragma unroll
        for (int n = 0; n < packs; ++n) {
            if (pack_at(n, width) >= C) continue;
            back_pack(a, &now, gains, n, width, as, early, h, g, dy);
            if (!a->fresh) values_of(old, &now.dx[n], &a->d_in, width, as);
#pragma unroll
            for (int e = 0; e < width; ++e) {
                const float value = now.r * (g[e] - g_mean - h[e] * gh_mean);
                g[e] = a->fresh ? value : old[e] + value;
                if (totals) total[n][e] += g[e];
            }
            store_values(&a->d_in, dx + pack_at(n, width), g, width, as);
        }
    }
    double *const partial = a->partial + (int64_t)blockIdx.x * (totals ? 3 : 2) * C;
    add_warps(partial, d_gain, d_bias, C, width, packs, centred);
    if (!totals) return;
    __syncthreads(); /* the first buffer may be the last one */
    add_warps(partial + 2 * C, total, total, C, width, packs, false);
}

#define NORM_ROWS(name, width, packs, blocks, early, loops)                                                            \
    extern "C" __global__ void __launch_bounds__(ROW_THREADS, blocks)                                                  \
        name(const __grid_constant__ fattni_norm_args a) {                                                             \
        begin_grid();                                                                                                  \
        if (a.dtype == FATTN_BF16)                                                                                     \
            norm_rows(&a, width, packs, FATTN_BF16, early, loops);                                                     \
        else if (a.dtype == FATTN_F32 && (width) * (packs) <= 24)                                                      \
            norm_rows(&a, width, packs, FATTN_F32, (early) && !(loops), false);                                        \
        else                                                                                                           \
            norm_rows(&a, width, packs, 0, false, false);                                                              \
    }
#define ROWS_BACK(name, width, packs, warps, blocks, centred, as, early, totals)                                       \
    extern "C" __global__ void __launch_bounds__(32 * (warps), blocks)                                                 \
        name(const __grid_constant__ fattni_norm_args a) {                                                             \
        begin_grid();                                                                                                  \
        rows_back(&a, width, packs, centred, as, early, totals);                                                       \
    }

/* By the most columns. Packs of 4 where packs of 8 would leave half of the lanes idle. Where a lane has more than 16
   elements, registers allow either many warps or early reads: few rows have kernels of their own. With 32 elements a
   path of its own for F32 would cost the other paths a third of their warps. */
NORM_ROWS(fattn_norm_rows128, 4, 1, 3, true, true)
NORM_ROWS(fattn_norm_rows256, 8, 1, 3, true, true)
NORM_ROWS(fattn_norm_rows384, 4, 3, 3, true, true)
NORM_ROWS(fattn_norm_rows512, 8, 2, 2, true, true)
NORM_ROWS(fattn_norm_rows768, 8, 3, 3, false, false)
NORM_ROWS(fattn_norm_rows1024, 8, 4, 3, false, false)
NORM_ROWS(fattn_norm_few768, 8, 3, 1, true, false)
NORM_ROWS(fattn_norm_few1024, 8, 4, 1, true, false)
/* layernorm_sum: layernorm_back with the third sum; as many warps give its first two sums the same bits. A kernel for
   each type: one for all needs more registers, so fewer warps. */
#define OF_TYPES(name, width, packs, warps, blocks, centred, early, totals)                                            \
    ROWS_BACK(name##_bf16, width, packs, warps, blocks, centred, FATTN_BF16, early, totals)                            \
    ROWS_BACK(name##_f16, width, packs, warps, blocks, centred, FATTN_F16, early, totals)                              \
    ROWS_BACK(name##_f32, width, packs, warps, blocks, centred, FATTN_F32, width *packs <= 8, totals)
#define ALL_BACK(columns, width, packs, warps, blocks)                                                                 \
    OF_TYPES(fattn_rmsnorm_back##columns, width, packs, warps, blocks, false, true, false)                             \
    OF_TYPES(fattn_layernorm_back##columns, width, packs, warps, blocks, true, true, false)                            \
    OF_TYPES(fattn_layernorm_sum##columns, width, packs, warps, blocks, true, width *packs <= 24, true)
ALL_BACK(128, 4, 1, 12, 2)
ALL_BACK(256, 8, 1, 8, 2)
ALL_BACK(384, 4, 3, 8, 2)
ALL_BACK(512, 8, 2, 12, 1)
ALL_BACK(768, 8, 3, 8, 1)
ALL_BACK(1024, 8, 4, 8, 1)
