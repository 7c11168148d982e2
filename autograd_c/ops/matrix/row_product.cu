/* A product with one row (row_product.h). A row of w is the work of one warp, or of several, each of which has every
   so many packs of it: lane l takes packs l, l + 32 ... of h and w, and the sums of lanes and warps are added in one
   order. Each block computes the norm for itself, while its first packs of w are on their way. */
#include "autograd_c/ops/matrix/row_product.h"

#include "autograd_c/ops/op_cuda.h"
#include "core/device/any_dtype.cuh"
#include "core/ptx/load_once.h"
#include "core/ptx/mbarrier.h"

enum {
    WARPS = FATTNI_ROW_PRODUCT_WARPS,
    AHEAD = FATTNI_ROW_PRODUCT_AHEAD,
    NORM_PACKS = 1,
    PACK_BYTES = 16,
    BLOCKS_OF_AN_SM = 4 /* of this product and of the next, which wait */
};

/* Over the block's first `lanes` threads, whole warps; the others are not here. */
DEVICE float row_sum_f32(float x, int lanes) {
    __shared__ float part[WARPS];
    x = warp_sum_f32(x);
    named_barrier_sync(1, lanes); /* all have read the last call's parts */
    if (threadIdx.x % 32 == 0) part[threadIdx.x / 32] = x;
    named_barrier_sync(1, lanes);
    float sum = part[0];
    for (int warp = 1; warp < lanes / 32; ++warp) sum += part[warp];
    return sum;
}

#define REAL float
#define FN(name) name##_f32
#define MATH(name) name##f
#include "autograd_c/ops/gelu_gate.inc"
#include "autograd_c/ops/op_pack.inc"
#include "autograd_c/ops/norm/norm_moments.inc"
#undef REAL
#undef FN
#undef MATH

extern __shared__ __align__(16) unsigned char shared[]; /* the norm of x, in its dtype */

/* By the warps that have a part of the row. as: the dtype of x and w, a literal where these are called. */
DEVICE void normalize(const fattni_row_product_args *a, int32_t as) {
    const int lanes = (a->K / FATTNI_PACK + 31) / 32 * 32, first = (int)threadIdx.x * FATTNI_PACK;
    if ((int)threadIdx.x >= lanes) return;
    const fattni_operand x = {(void *)a->x, as}, gain = {(void *)a->gain, as}, bias = {(void *)a->bias, as},
                         h = {shared, as};
    float row[NORM_PACKS][FATTNI_PACK], gains[NORM_PACKS][FATTNI_PACK], biases[NORM_PACKS][FATTNI_PACK] = {}, mean, r;
    load_row_f32(row, &x, 0, a->K, lanes, NORM_PACKS, as);
    load_row_f32(gains, &gain, 0, a->K, lanes, NORM_PACKS, as);
    if (a->bias) load_row_f32(biases, &bias, 0, a->K, lanes, NORM_PACKS, as);
    moments_f32(row, a->K, lanes, NORM_PACKS, FATTNI_PACK, first, a->centred, a->eps, (float)a->eps, &mean, &r);
#pragma unroll
    for (int e = 0; e < FATTNI_PACK; ++e) row[0][e] = (row[0][e] - mean) * r * gains[0][e] + biases[0][e];
    if (first < a->K) store_pack_f32(&h, first, row[0], as);
}

/* sum[0] and sum[1] += the products of even and odd elements. */
DEVICE void add_products(float sum[2], const uint32_t x[4], const uint32_t w[4], int32_t as) {
#pragma unroll
    for (int n = 0; n < 4; ++n) {
        if (as == FATTN_F32) {
            sum[n % 2] = fmaf(__uint_as_float(x[n]), __uint_as_float(w[n]), sum[n % 2]);
        } else if (as == FATTN_BF16) { /* the upper half of a float */
            sum[0] = fmaf(__uint_as_float(x[n] << 16), __uint_as_float(w[n] << 16), sum[0]);
            sum[1] = fmaf(__uint_as_float(x[n] & 0xffff0000u), __uint_as_float(w[n] & 0xffff0000u), sum[1]);
        } else {
            const float2 a = __half22float2(*(const __half2 *)&x[n]), b = __half22float2(*(const __half2 *)&w[n]);
            sum[0] = fmaf(a.x, b.x, sum[0]);
            sum[1] = fmaf(a.y, b.y, sum[1]);
        }
    }
}

/* Packs p, p + step ... of a row of w; those beyond it are not written. */
DEVICE void load_packs(uint32_t to[AHEAD][4], const char *w, int p, int step, int packs) {
#pragma unroll
    for (int n = 0; n < AHEAD; ++n)
        if (p + n * step < packs) load_once_4(to[n], w + (int64_t)(p + n * step) * PACK_BYTES);
}

/* Over the lanes, then over the `sharing` warps of a row: to the first lane of the first of them. */
DEVICE float add_lanes_and_warps(float sum, int sharing) {
    __shared__ float part[WARPS];
    const int warp = (int)threadIdx.x / 32;
    sum = warp_sum_f32(sum);
    if (sharing == 1) return sum;
    if (threadIdx.x % 32 == 0) part[warp] = sum;
    __syncthreads();
    for (int n = 1; n < sharing; ++n) sum += part[(warp + n) % WARPS];
    return sum;
}

/* early: w, which nothing in flight writes, is read before the kernels before have ended. norms: a literal. */
DEVICE void multiply_row(const fattni_row_product_args *a, int32_t as, bool norms) {
    const int warp = (int)threadIdx.x / 32, lane = (int)threadIdx.x % 32, sharing = a->sharing, place = warp % sharing;
    const int n = (int)blockIdx.x * (WARPS / sharing) + warp / sharing, first = place * 32 + lane, step = sharing * 32;
    const bool has_row = n < a->N, is_first = first == 0 && has_row;
    const char *const w = (const char *)a->w + (has_row ? n * a->pitch : 0);
    const char *const x = norms ? (const char *)shared : (const char *)a->x;
    const int packs = has_row ? a->packs : 0;
    uint32_t of_w[AHEAD][4];
    float row = 0, onto = 0, sum[2] = {0, 0};
    load_packs(of_w, w, first, step, packs);
    if (a->early) begin_grid();
    if (is_first && a->row) row = load_f32(a->row, as, n);
    if (is_first && a->onto) onto = load_f32(a->onto, a->c_dtype, n);
    if (norms) {
        normalize(a, as);
        __syncthreads();
    }
    for (int p = first; p < packs; p += AHEAD * step) {
        if (p != first) load_packs(of_w, w, p, step, packs);
#pragma unroll
        for (int e = 0; e < AHEAD; ++e) {
            if (p + e * step >= packs) continue;
            const uint4 pack = *(const uint4 *)(x + (int64_t)(p + e * step) * PACK_BYTES);
            const uint32_t of_x[4] = {pack.x, pack.y, pack.z, pack.w};
            add_products(sum, of_x, of_w[e], as);
        }
    }
    const float z = add_lanes_and_warps(sum[0] + sum[1], sharing) + row + onto;
    if (!is_first) return;
    if (a->gelu != a->c) store_f32(a->c, a->c_dtype, n, z);
    if (a->gelu) store_f32(a->gelu, a->c_dtype, n, z * gelu_gate_f32(z));
}

#define KERNEL(name, dtype, norms)                                                                                     \
    extern "C" __global__ void __launch_bounds__(FATTNI_ROW_PRODUCT_THREADS, BLOCKS_OF_AN_SM)                          \
        fattn_##name(const __grid_constant__ fattni_row_product_args a) {                                              \
        if (!a.early) begin_grid();                                                                                    \
        multiply_row(&a, dtype, norms);                                                                                \
    }
KERNEL(row_product_f32, FATTN_F32, false)
KERNEL(row_product_f16, FATTN_F16, false)
KERNEL(row_product_bf16, FATTN_BF16, false)
KERNEL(row_product_norm_f32, FATTN_F32, true)
KERNEL(row_product_norm_f16, FATTN_F16, true)
KERNEL(row_product_norm_bf16, FATTN_BF16, true)
