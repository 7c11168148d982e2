/* layernorm and rmsnorm on the device; equations in op_norm.c. */
#include "autograd_c/ops/op_cuda.h"

#include "core/device/any_dtype.cuh"

enum { NORM_PACKS = FATTNI_NORM_PACKS };

/* A row whose mean square is outside of (least, 1 / least) is scaled by unit or 1 / unit and
   computed again. */
#define NORM_LEAST_f32 0x1p-100f
#define NORM_LEAST_f64 0x1p-900
#define NORM_UNIT_f32 0x1p-100f
#define NORM_UNIT_f64 0x1p-700
#define BODY "autograd_c/ops/norm/op_norm_cuda.inc"
#include "core/device/for_each_real.inc"

enum { BACK_COLUMNS = NORM_PACKS * 32 * FATTNI_PACK };
static __shared__ float back_sums[2][BACK_COLUMNS]; /* one for all of rows_back's copies */

/* What a lane reads of a row in packs of 16 bits, and the row's statistics. */
typedef struct back_row {
    uint4 x[NORM_PACKS], dy[NORM_PACKS], dx[NORM_PACKS]; /* dx: what it holds before, unless fresh */
    float r, mean;
} back_row;

DEVICE void fetch_back_row(back_row *to, const fattni_norm_args *a, int64_t row, int packs, bool centred) {
    if (row >= a->rows) return;
    const int64_t x = walk_offset(&a->x, row), y = walk_offset(&a->y, row), dx = walk_offset(&a->dx, row);
#pragma unroll
    for (int n = 0; n < packs; ++n) {
        const int i = ((int)threadIdx.x % 32 + n * 32) * FATTNI_PACK;
        if (i >= (int)a->C) continue;
        to->x[n] = fetch_pack_f32(&a->in, x + i);
        to->dy[n] = fetch_pack_f32(&a->out, y + i);
        if (!a->fresh) to->dx[n] = fetch_pack_f32(&a->d_in, dx + i);
    }
    to->r = ((const float *)a->statistics)[row];
    to->mean = centred ? ((const float *)a->statistics)[a->rows + row] : 0;
}

/* dx together with the sums over rows of dy h and, for layernorm, of dy: one pass over x and dy, a warp
   per row at a time, float. Rows have at most 256 packs elements; packs, centred and as are literals where
   this is called. Where all have 16 bits (as), a row is on its way from memory while the one before is computed. */
DEVICE void rows_back(const fattni_norm_args *a, int packs, bool centred, int32_t as) {
    enum { WARPS = ROW_THREADS / 32 };
    const int C = (int)a->C, warp = (int)threadIdx.x / 32;
    const int first = (int)threadIdx.x % 32 * FATTNI_PACK;
    const int64_t step = (int64_t)gridDim.x * WARPS, first_row = (int64_t)blockIdx.x * WARPS + warp;
    float d_gain[NORM_PACKS][FATTNI_PACK] = {{0}}, d_bias[NORM_PACKS][FATTNI_PACK] = {{0}};
    back_row next;
    if (as) fetch_back_row(&next, a, first_row, packs, centred);
    for (int64_t row = first_row; row < a->rows; row += step) {
        const int64_t x = walk_offset(&a->x, row), y = walk_offset(&a->y, row), dx = walk_offset(&a->dx, row);
        float h[NORM_PACKS][FATTNI_PACK], g[NORM_PACKS][FATTNI_PACK], pack[FATTNI_PACK];
        const back_row now = next;
        if (as) fetch_back_row(&next, a, row + step, packs, centred);
#pragma unroll
        for (int n = 0; n < packs; ++n) {
            const int i = first + n * 32 * FATTNI_PACK;
            if (i >= C) continue;
            if (as) {
                unpack_f32(h[n], now.x[n], as);
                unpack_f32(g[n], now.dy[n], as);
            } else {
                load_row_pack_f32(h[n], &a->in, x + i, 0);
                load_row_pack_f32(g[n], &a->out, y + i, 0);
            }
        }
        const float r = as ? now.r : ((const float *)a->statistics)[row];
        const float mean = !centred ? 0 : as ? now.mean : ((const float *)a->statistics)[a->rows + row];
        float g_mean = 0, gh_mean = 0;
#pragma unroll
        for (int n = 0; n < packs; ++n) {
            const int i = first + n * 32 * FATTNI_PACK;
            if (i >= C) continue;
            load_row_pack_f32(pack, &a->gain, i, as);
#pragma unroll
            for (int e = 0; e < FATTNI_PACK; ++e) {
                h[n][e] = normal_f32(h[n][e], mean * 0.5f, 2 * r);
                d_gain[n][e] += g[n][e] * h[n][e];
                if (centred) d_bias[n][e] += g[n][e];
                g[n][e] *= pack[e];
                g_mean += g[n][e];
                gh_mean += g[n][e] * h[n][e];
            }
        }
        g_mean = centred ? warp_sum_f32(g_mean) / (float)C : 0;
        gh_mean = warp_sum_f32(gh_mean) / (float)C;
#pragma unroll
        for (int n = 0; n < packs; ++n) {
            const int i = first + n * 32 * FATTNI_PACK;
            if (i >= C) continue;
            if (!a->fresh && as)
                unpack_f32(pack, now.dx[n], as);
            else if (!a->fresh)
                load_row_pack_f32(pack, &a->d_in, dx + i, 0);
#pragma unroll
            for (int e = 0; e < FATTNI_PACK; ++e) {
                const float value = r * (g[n][e] - g_mean - h[n][e] * gh_mean);
                pack[e] = a->fresh ? value : pack[e] + value;
            }
            store_pack_f32(&a->d_in, dx + i, pack, as);
        }
    }
    for (int adding = 0; adding < WARPS; ++adding) { /* one warp after the other */
        if (adding == warp)
#pragma unroll
            for (int n = 0; n < packs; ++n)
#pragma unroll
                for (int e = 0; e < FATTNI_PACK; ++e) {
                    const int i = first + n * 32 * FATTNI_PACK + e;
                    back_sums[0][i] = adding ? back_sums[0][i] + d_gain[n][e] : d_gain[n][e];
                    if (centred) back_sums[1][i] = adding ? back_sums[1][i] + d_bias[n][e] : d_bias[n][e];
                }
        __syncthreads();
    }
    double *const partial = a->partial + (int64_t)blockIdx.x * 2 * C;
    for (int i = (int)threadIdx.x; i < C; i += ROW_THREADS) {
        partial[i] = (double)back_sums[0][i];
        if (centred) partial[C + i] = (double)back_sums[1][i];
    }
}

#define ROWS_BACK(name, packs, centred)                                                                                \
    extern "C" __global__ void __launch_bounds__(ROW_THREADS) name(const __grid_constant__ fattni_norm_args a) {       \
        begin_grid();                                                                                                  \
        if (a.dtype == FATTN_BF16)                                                                                     \
            rows_back(&a, packs, centred, FATTN_BF16);                                                                 \
        else                                                                                                           \
            rows_back(&a, packs, centred, 0);                                                                          \
    }
ROWS_BACK(fattn_rmsnorm_back1, 1, false)
ROWS_BACK(fattn_rmsnorm_back2, 2, false)
ROWS_BACK(fattn_rmsnorm_back3, 3, false)
ROWS_BACK(fattn_rmsnorm_back4, 4, false)
ROWS_BACK(fattn_layernorm_back1, 1, true)
ROWS_BACK(fattn_layernorm_back2, 2, true)
ROWS_BACK(fattn_layernorm_back3, 3, true)
ROWS_BACK(fattn_layernorm_back4, 4, true)
