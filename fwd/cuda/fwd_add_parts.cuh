/* Adds the results of parts that kernels with one CTA per row block store (fwd_split.h): a warp per row.

   With m_p, l_p and O_p of part p, which are its maximum, the sum of exp(s - m_p), and that of exp(s - m_p) v:

   m = max m_p, l = sum exp(m_p - m) l_p, O = sum exp(m_p - m) O_p, in ascending order of the parts; then the row ends
   as it does in one CTA: O / l, L = m + ln l, with sink, dropout's scale and merge. Maxima are not rounded again, so
   that weights are exact however large the scores are.

   Tensors     o [b,h,i,d], lse [b,h,i]; any strides, d contiguous. results: fwd_split.h.
   Threads     BM warps; warp n has row n of BM, lane n columns n, n + 32 and so on.
   Loads       those of BN parts do not wait for each other.

   K_HALF (fwd_add_parts16.cuh): for 16-bit calls, with the exponentials of fwd_softmax.cuh.
   Instances: fwd_kernels.def. Macros in: cmake/instance.cu.in. */
#ifndef K_HALF
#define K_HALF 0
#endif
#include "core/device/describe.cuh"
#include "fwd/cuda/fwd_row_block.cuh"
#if K_HALF
#include "fwd/cuda/fwd_softmax.cuh"
typedef float real;
#else
#include "core/device/finish_row.cuh"
#endif

enum { THREADS = 32 * K_WARPS, COLUMNS = K_D / 32 };
static_assert(K_WARPS == K_BM && K_D % 32 == 0, "a warp per row");

/* exp(m - top) of two maxima, and the end of a row, as in the kernels that computed the parts. */
#if K_HALF
DEVICE real weight_of_part(real m, real top) { return weight_of(m, top, LOG2E); }
DEVICE row_result row_of_parts(const fattni_fwd_split_args *args, real top, real sum, int h, const real *lse) {
    return end_of_row(&args->a, 1, top, sum, LOG2E, 1.0f, h, lse);
}
#else
DEVICE real weight_of_part(real m, real top) { return exp(m - (top == -(real)INFINITY ? (real)0 : top)); }
DEVICE row_result row_of_parts(const fattni_fwd_split_args *args, real top, real sum, int h, const real *lse) {
    return finish_row(&args->a, top, sum, h, args->a.flags & FATTN_MERGE ? *lse : -(real)INFINITY);
}
#endif

/* O of a row; in 16 bits also what rounding takes off it, bytes up to a multiple of 8 columns (o_rest.h). */
DEVICE void store_o(const fattni_attention_args *a, const sequence *s, int h, int64_t row, const real o[COLUMNS]) {
    const int lane = (int)threadIdx.x & 31;
    const int64_t at = s->batch * a->o.b + h * a->o.h + row * a->o.row;
#if K_HALF
    if (!a->o_f32) {
        const int64_t rest_at = s->batch * a->o_rest.b + h * a->o_rest.h + row * a->o_rest.row;
#pragma unroll
        for (int c = 0; c < COLUMNS; ++c) {
            const int d = 32 * c + lane;
            const half_type rounded = to_half(o[c]);
            if (d < a->Dv) ((half_type *)a->o.p)[at + d] = rounded;
            if (!a->o_rest.p || d >= (a->Dv + 7) / 8 * 8) continue;
            const int rest = fattni_o_rest(__float_as_uint(o[c]), __float_as_uint(to_float(rounded)), O_REST);
            ((int8_t *)a->o_rest.p)[rest_at + d] = (int8_t)(d < a->Dv ? rest : 0);
        }
        return;
    }
#endif
#pragma unroll
    for (int c = 0; c < COLUMNS; ++c)
        if (32 * c + lane < a->Dv) ((real *)a->o.p)[at + 32 * c + lane] = o[c];
}

extern "C" __global__ void __launch_bounds__(THREADS, K_CTAS)
    K_NAME(const __grid_constant__ fattni_fwd_split_args args) {
    const fattni_attention_args &a = args.a;
    const int lane = (int)threadIdx.x & 31, groups = (a.Sq + K_BM - 1) / K_BM;
    const int plane = (int)(blockIdx.x / (unsigned)groups), h = plane % a.Hq, b = plane / a.Hq;
    const int i = (int)(blockIdx.x % (unsigned)groups) * K_BM + (int)threadIdx.x / 32;

    /* The row's block, its parts, and what they have of the row. */
    row_block work;
    work.s = sequence_of(&a, b);
    const sequence s = work.s;
    if (i >= s.Sq) return;
    const int blocks = (a.Sq + args.BM - 1) / args.BM, block = i / args.BM;
    work.i0 = block * args.BM, work.rows = min(args.BM, s.Sq - work.i0);
    find_keys(&work);
    const int parts = parts_of(&work, keys_of_part(&args, &s, args.BM, args.BN), args.BN);
    const int64_t first = ((int64_t)b * args.parts * a.Hq + h) * blocks + (blocks - 1 - block);
    const int64_t step = (int64_t)a.Hq * blocks * args.step; /* from part to part */
    const real *const results = (const real *)args.results + first * args.step;
    const real *const maxima = results + args.rows * args.width + (i - work.i0), *const sums = maxima + args.rows;
    const real *const part_o = results + (i - work.i0) * args.width + lane;

    real top = -(real)INFINITY, sum = 0;
    for (int p = lane; p < parts; p += 32) top = fmax(top, maxima[p * step]);
#pragma unroll
    for (int mask = 16; mask > 0; mask /= 2) top = fmax(top, __shfl_xor_sync(ALL_LANES, top, mask));
    for (int p = lane; p < parts; p += 32) sum += weight_of_part(maxima[p * step], top) * sums[p * step];
#pragma unroll
    for (int mask = 16; mask > 0; mask /= 2) sum += __shfl_xor_sync(ALL_LANES, sum, mask);

    real o[COLUMNS];
#pragma unroll
    for (int c = 0; c < COLUMNS; ++c) o[c] = 0;
    for (int p0 = 0; p0 < parts; p0 += K_BN) {
        real weight[K_BN], of_part[K_BN][COLUMNS];
#pragma unroll
        for (int n = 0; n < K_BN; ++n) {
            const int p = p0 + n;
            weight[n] = p < parts ? maxima[p * step] : -(real)INFINITY;
#pragma unroll
            for (int c = 0; c < COLUMNS; ++c)
                of_part[n][c] = p < parts && 32 * c + lane < a.Dv ? part_o[p * step + 32 * c] : (real)0;
        }
#pragma unroll
        for (int n = 0; n < K_BN; ++n) {
            const real w = weight_of_part(weight[n], top);
#pragma unroll
            for (int c = 0; c < COLUMNS; ++c) o[c] += w * of_part[n][c];
        }
    }

    real *const lse = (real *)a.lse.p + s.batch * a.lse.b + h * a.lse.h + (int64_t)(s.q0 + i) * a.lse.row;
    const row_result row = row_of_parts(&args, top, sum, h, lse);
    const real *const old = (const real *)a.o.p + s.batch * a.o.b + h * a.o.h + (int64_t)(s.q0 + i) * a.o.row;
#pragma unroll
    for (int c = 0; c < COLUMNS; ++c) {
        o[c] *= row.scale;
        if (row.keep_old > 0 && 32 * c + lane < a.Dv) o[c] += row.keep_old * old[32 * c + lane];
    }
    __syncwarp(); /* all lanes have read the old L */
    if (lane == 0) *lse = row.L;
    store_o(&a, &s, h, s.q0 + i, o);
}

DESCRIBE_KERNEL(fattni_fwd_split_args, 0, 1);
