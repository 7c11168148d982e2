/* The mean of the keys of each (sequence, key head), for dQ in 16 bits and TF32.

   dQ = scale dS K. A row of dS sums to a known number, 0 in a call without sink and dL; rounded, and with a delta that
   comes from a rounded O, it sums to another one, and dQ is off by the difference times the mean of the keys. Channels
   of trained models have means of many standard deviations: then that is percents of dQ, and it grows with sqrt(Sk). In
   exact arithmetic dQ = scale (dS (K - m) + (sum of dS) m) for any m; here m is the mean of one key of STRIDE.

   What is rounded grows with the distance of a row's keys from m. So m is of keys that rows see, and that no bias
   masks; and in each channel not so far from 0 that any part of these keys is farther from m than from 0, or than a
   standard deviation: rows may be on one part alone, and means may drift.

   Hopper's kernels multiply dS by K - m, rounded to 16 bits, which no other product uses; where there is no room for
   another tile they sum dS, as all others do: those for 16 bits on sm_80 beside dQ (dq_of_mean), Hopper's, TF32 and
   huge rows where they have dQ in registers. Hopper's find m themselves where they also do the work of
   bwd_preprocess.cu (bwd_sm90_scheduler.cuh).

   Where the sample does not show means, as with Gaussian keys, none is used (bwd_key_mean.cuh).

   One CTA of 64 to 512 threads per (sequence, key head). It also zeroes the counters of the call. */
#include "bwd/cuda/bwd_blocks.cuh"
#include "bwd/cuda/bwd_key_mean.cuh"
#include "bwd/cuda/bwd_workspace.cuh"
#include "core/device/load_8.cuh"
#include "core/ptx/grid.h"

enum {
    MOST_THREADS = 512,
    MOST_WARPS = MOST_THREADS / 32,
    STRIDE = 8,
    FEWEST = 64,
    AT_ONCE = 8,
    PARTS = 8,          /* at least, where there are FEWEST keys */
    MOST_PARTS = 16,    /* one for each warp */
    FEWEST_OF_PART = 8, /* keys */
    MAX_D = 256
};
#define MASKING_BIAS (-1000.0f) /* keys that have less are masked by it */

/* Keys of a head that are looked at: `count`, one of `stride` from key `begin` on, divided into `parts`. */
typedef struct sample {
    int b, h, begin, stride, count, parts; /* h: of the rows whose bias is asked for */
    sequence s;
} sample;

DEVICE sample sample_of(const fattni_attention_args *a, int plane, int most_parts) {
    sample x = {plane / a->Hkv, plane % a->Hkv * a->group};
    x.s = sequence_of(a, x.b);
    const interval seen = keys_seen_by(&x.s, 0, x.s.Sq);
    const int keys = x.s.Sq > 0 ? max(seen.end - seen.begin, 0) : 0;
    x.begin = seen.begin;
    x.stride = max(1, min((int)STRIDE, keys / FEWEST));
    x.count = keys / x.stride;
    x.parts = max(1, min(most_parts, x.count / FEWEST_OF_PART));
    return x;
}
/* The first key of part k; with k = parts: past the last one. */
DEVICE int begin_of_part(const sample *x, int k) { return (int)((int64_t)k * x->count / x->parts); }

DEVICE float bias_at(const fattni_attention_args *a, const sample *x, int i, int j) {
    const int64_t at = x->b * a->bias.b + x->h * a->bias.h + i * a->bias.row + j * a->bias.column;
    if (a->bias_f32 || a->kind == KIND_F32) return ((const float *)a->bias.p)[at];
    return a->kind == KIND_BF16 ? __bfloat162float(((const __nv_bfloat16 *)a->bias.p)[at])
                                : __half2float(((const __half *)a->bias.p)[at]);
}
/* Whether key number n is one that a bias masks, for the first, the middle and the last row that see it. */
DEVICE int is_masked(const fattni_attention_args *a, const sample *x, int n) {
    const int j = x->begin + sampled_key(n, x->stride);
    const interval rows = rows_that_see(&x->s, j, 1);
    return rows.begin < rows.end && bias_at(a, x, rows.begin, j) < MASKING_BIAS &&
           bias_at(a, x, (rows.begin + rows.end) / 2, j) < MASKING_BIAS &&
           bias_at(a, x, rows.end - 1, j) < MASKING_BIAS;
}

/* Of keys of a part: sums relative to the first key, so that large means cost no precision. */
typedef struct key_sums {
    float sum[8], square[8], count;
} key_sums;
DEVICE void add_key(key_sums *sums, const float x[8], const float origin[8]) {
#pragma unroll
    for (int e = 0; e < 8; ++e) {
        const float y = x[e] - origin[e];
        sums->sum[e] += y;
        sums->square[e] += y * y;
    }
}

/* Threads that share keys, each with 8 columns of them, are a group; `of_part` groups share a part. */
extern "C" __global__ void __launch_bounds__(MOST_THREADS)
    fattn_bwd_key_mean(const __grid_constant__ fattni_bwd_args args) {
    begin_grid();
    const fattni_bwd_args *const bwd = &args;
    const fattni_attention_args *const a = &args.a;
    extern __shared__ float sums[]; /* [most_parts][D], and of squares */
    __shared__ float origins[MAX_D], counts[MOST_PARTS], z_of_warps[MOST_WARPS];
    const int threads = (int)blockDim.x, warps = threads / 32, thread = (int)threadIdx.x, warp = thread / 32,
              plane = (int)blockIdx.x;
    for (int64_t n = (int64_t)plane * threads + thread; n < bwd->counter_chunks; n += (int64_t)gridDim.x * threads)
        ((uint4 *)bwd->counters)[n] = make_uint4(0, 0, 0, 0);

    const int D = bwd->key_mean_pitch, chunks = D / 8, groups = threads / chunks; /* D: 64, 128 or 256; groups: 8, .. */
    const int most_parts = max((int)PARTS, warps), of_part = groups / most_parts;
    const sample x = sample_of(a, plane, most_parts);
    const int part = thread / chunks / of_part, first = thread / chunks % of_part, column = thread % chunks * 8;
    const int begin = part < x.parts ? begin_of_part(&x, part) : 0,
              end = part < x.parts ? begin_of_part(&x, part + 1) : 0;
    const int kind = bwd->key_mean_f32 ? KIND_F32 : a->kind;
    const int64_t size = bwd->key_mean_f32 ? 4 : 2, row = a->k.row * size; /* bytes */
    const char *const k =
        (const char *)a->k.p + (x.s.batch * a->k.b + x.h / a->group * a->k.h) * size + (x.s.k0 + x.begin) * row;
    float *const squares = sums + most_parts * D;
    float origin[8] = {};
    key_sums own = {};
    if (kind != KIND_F32 && a->vector_qkv && a->D == D) {
        const uint4 origin_bits = x.count ? *(const uint4 *)(k + 2 * column) : make_uint4(0, 0, 0, 0);
        for (int n0 = begin + first; n0 < end; n0 += AT_ONCE * of_part) {
            uint4 bits[AT_ONCE];
#pragma unroll
            for (int m = 0; m < AT_ONCE; ++m) { /* beyond the last key, and masked, the first, which adds nothing */
                const int n = n0 + m * of_part, counts = n < end && !(a->bias.p && is_masked(a, &x, n));
                bits[m] = counts ? *(const uint4 *)(k + sampled_key(n, x.stride) * row + 2 * column) : origin_bits;
                own.count += (float)counts;
            }
            convert_8(origin, (const uint16_t *)&origin_bits, kind);
#pragma unroll
            for (int m = 0; m < AT_ONCE; ++m) {
                float y[8];
                convert_8(y, (const uint16_t *)(bits + m), kind);
                add_key(&own, y, origin);
            }
        }
        convert_8(origin, (const uint16_t *)&origin_bits, kind);
    } else {
        if (x.count > 0) load_8(origin, k, kind, column, a->D, a->vector_qkv);
        for (int n = begin + first; n < end; n += of_part) {
            if (a->bias.p && is_masked(a, &x, n)) continue;
            float y[8];
            load_8(y, k + sampled_key(n, x.stride) * row, kind, column, a->D, a->vector_qkv);
            add_key(&own, y, origin);
            own.count += 1.0f;
        }
    }
    for (int lanes = chunks; lanes < min(32, chunks * of_part); lanes *= 2) {
        own.count += __shfl_xor_sync(ALL_LANES, own.count, lanes);
#pragma unroll
        for (int e = 0; e < 8; ++e) {
            own.sum[e] += __shfl_xor_sync(ALL_LANES, own.sum[e], lanes);
            own.square[e] += __shfl_xor_sync(ALL_LANES, own.square[e], lanes);
        }
    }
#pragma unroll
    for (int e = 0; e < 8; ++e) {
        sums[part * D + column + e] = own.sum[e];
        squares[part * D + column + e] = own.square[e];
        if (thread < chunks) origins[column + e] = origin[e];
    }
    if (column == 0) counts[part] = own.count;
    __syncthreads();
    float z = 0.0f, n = 0.0f; /* z: over channels; n: keys */
    for (int p = 0; p < x.parts; ++p) n += counts[p];
    for (int c = thread; c < D; c += threads) {
        mean_range range = any_mean();
        float total = 0.0f, total_square = 0.0f;
        for (int p = 0; p < x.parts; ++p) {
            const float sum = sums[p * D + c], square = squares[p * D + c];
            total += sum;
            total_square += square;
            bound_mean(&range, origins[c], sum, square, counts[p]); /* of no key: NaN, which is no bound */
        }
        const float shift = total / n, variance = fmaxf(total_square / n - shift * shift, 0.0f);
        const float mean = channel_mean(&z, origins[c] + shift, variance, (int)n);
        bwd->key_mean[(int64_t)plane * D + c] = mean == 0.0f ? mean : bounded_mean(&range, mean);
    }
    for (int lanes = 16; lanes > 0; lanes /= 2) z += __shfl_xor_sync(ALL_LANES, z, lanes);
    if (thread % 32 == 0) z_of_warps[warp] = z;
    __syncthreads();
    if (thread != 0) return;
    for (int w = 1; w < warps; ++w) z += z_of_warps[w];
    bwd->key_mean_used[plane] = shows_means(z, a->D, (int)n);
}
