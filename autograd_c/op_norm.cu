/* layernorm and rmsnorm on the device; equations in op_norm.c. */
#include "autograd_c/op_cuda.h"

#include "cuda_element.h"

enum { NORM_PACKS = FATTNI_NORM_PACKS };

#define BODY "autograd_c/op_norm_cuda.inc"
#include "cuda_reals.inc"

/* dx together with the sums over rows of dy h and, for layernorm, of dy: one pass over x and dy, a warp
   per row at a time, float. Rows have at most 256 packs elements; packs and centred are literals where
   this is called. */
DEVICE void rows_back(const fattni_norm_args *a, int packs, bool centred) {
    enum { WARPS = ROW_THREADS / 32, COLUMNS = NORM_PACKS * 32 * FATTNI_PACK };
    __shared__ float sums[2][COLUMNS];
    const int C = (int)a->C, warp = (int)threadIdx.x / 32;
    const int first = (int)threadIdx.x % 32 * FATTNI_PACK;
    float d_gain[NORM_PACKS][FATTNI_PACK] = {{0}}, d_bias[NORM_PACKS][FATTNI_PACK] = {{0}};
    for (int64_t row = (int64_t)blockIdx.x * WARPS + warp; row < a->rows;
         row += (int64_t)gridDim.x * WARPS) {
        const int64_t x = walk_offset(&a->x, row), y = walk_offset(&a->y, row);
        float h[NORM_PACKS][FATTNI_PACK], g[NORM_PACKS][FATTNI_PACK], pack[FATTNI_PACK];
#pragma unroll
        for (int n = 0; n < packs; ++n) {
            const int i = first + n * 32 * FATTNI_PACK;
            if (i >= C) continue;
            load_row_pack_f32(h[n], &a->in, x + i);
            load_row_pack_f32(g[n], &a->out, y + i);
        }
        const float r = ((const float *)a->statistics)[row];
        const float mean = centred ? ((const float *)a->statistics)[a->rows + row] : 0;
        float g_mean = 0, gh_mean = 0;
#pragma unroll
        for (int n = 0; n < packs; ++n) {
            const int i = first + n * 32 * FATTNI_PACK;
            if (i >= C) continue;
            load_row_pack_f32(pack, &a->gain, i);
#pragma unroll
            for (int e = 0; e < FATTNI_PACK; ++e) {
                h[n][e] = (h[n][e] - mean) * r;
                d_gain[n][e] += g[n][e] * h[n][e];
                if (centred) d_bias[n][e] += g[n][e];
                g[n][e] *= pack[e];
                g_mean += g[n][e];
                gh_mean += g[n][e] * h[n][e];
            }
        }
        g_mean = centred ? warp_sum_f32(g_mean) / (float)C : 0;
        gh_mean = warp_sum_f32(gh_mean) / (float)C;
        const int64_t dx = walk_offset(&a->dx, row);
#pragma unroll
        for (int n = 0; n < packs; ++n) {
            const int i = first + n * 32 * FATTNI_PACK;
            if (i >= C) continue;
            if (!a->fresh) load_row_pack_f32(pack, &a->d_in, dx + i);
#pragma unroll
            for (int e = 0; e < FATTNI_PACK; ++e) {
                const float value = r * (g[n][e] - g_mean - h[n][e] * gh_mean);
                pack[e] = a->fresh ? value : pack[e] + value;
            }
            store_pack_f32(&a->d_in, dx + i, pack);
        }
    }
    for (int turn = 0; turn < WARPS; ++turn) {
        if (turn == warp)
#pragma unroll
            for (int n = 0; n < packs; ++n)
#pragma unroll
                for (int e = 0; e < FATTNI_PACK; ++e) {
                    const int i = first + n * 32 * FATTNI_PACK + e;
                    sums[0][i] = turn ? sums[0][i] + d_gain[n][e] : d_gain[n][e];
                    if (centred) sums[1][i] = turn ? sums[1][i] + d_bias[n][e] : d_bias[n][e];
                }
        __syncthreads();
    }
    double *const partial = a->partial + (int64_t)blockIdx.x * 2 * C;
    for (int i = (int)threadIdx.x; i < C; i += ROW_THREADS) {
        partial[i] = (double)sums[0][i];
        if (centred) partial[C + i] = (double)sums[1][i];
    }
}

#define ROWS_BACK(packs, blocks)                                                        \
    extern "C" __global__ void __launch_bounds__(ROW_THREADS, blocks)                   \
        fattn_norm_rows_back##packs(const __grid_constant__ fattni_norm_args a) {       \
        if (a.centred)                                                                  \
            rows_back(&a, packs, true);                                                 \
        else                                                                            \
            rows_back(&a, packs, false);                                                \
    }
ROWS_BACK(1, 2)
ROWS_BACK(2, 2)
ROWS_BACK(3, 2)
ROWS_BACK(4, 1)
