/* The mean of the keys of each (sequence, key head), for dQ in 16 bits and TF32.

   dQ = scale dS K. A row of dS sums to a known number, 0 in a call without sink and dL; rounded, and with a delta that
   comes from a rounded O, it sums to another one, and dQ is off by the difference times the mean of the keys. Channels
   of trained models have means of many standard deviations: then that is percents of dQ, and it grows with sqrt(Sk). In
   exact arithmetic dQ = scale (dS (K - m) + (sum of dS) m) for any m; here m is the mean of one key of STRIDE.

   Hopper's kernels multiply dS by K - m, rounded to 16 bits, which no other product uses; where there is no room for
   another tile they sum dS, as all others do: those for 16 bits on sm_80 beside dQ (dq_of_mean), Hopper's, TF32 and
   huge rows where they have dQ in registers. Hopper's find m themselves where they also do the work of
   bwd_preprocess.cu (bwd_sm90_scheduler.cuh).

   Where the sample does not show means, as with Gaussian keys, none is used (bwd_key_mean.cuh).

   One CTA of 64 to 512 threads per (sequence, key head). It also zeroes the counters of the call. */
#include "bwd/cuda/bwd_key_mean.cuh"
#include "bwd/cuda/bwd_workspace.cuh"
#include "core/device/load_8.cuh"
#include "core/ptx/grid.h"

enum { MOST_THREADS = 512, MOST_WARPS = MOST_THREADS / 32, STRIDE = 8, FEWEST = 64, AT_ONCE = 8, MAX_D = 256 };

/* Sums relative to the first key, so that large means cost no precision. */
DEVICE void add_key(float sum[8], float square[8], const float x[8], const float origin[8]) {
#pragma unroll
    for (int e = 0; e < 8; ++e) {
        const float y = x[e] - origin[e];
        sum[e] += y;
        square[e] += y * y;
    }
}

extern "C" __global__ void __launch_bounds__(MOST_THREADS)
    fattn_bwd_key_mean(const __grid_constant__ fattni_bwd_args args) {
    begin_grid();
    const fattni_bwd_args *const bwd = &args;
    const fattni_attention_args *const a = &args.a;
    extern __shared__ float sums[]; /* [warps][D], and of squares */
    __shared__ float origins[MAX_D], z_of_warps[MOST_WARPS];
    const int threads = (int)blockDim.x, warps = threads / 32, thread = (int)threadIdx.x, warp = thread / 32,
              plane = (int)blockIdx.x, b = plane / a->Hkv, hk = plane % a->Hkv;
    for (int64_t n = (int64_t)plane * threads + thread; n < bwd->counter_chunks; n += (int64_t)gridDim.x * threads)
        ((uint4 *)bwd->counters)[n] = make_uint4(0, 0, 0, 0);

    const sequence s = sequence_of(a, b);
    const int D = bwd->key_mean_pitch, chunks = D / 8, keys_at_once = threads / chunks; /* D: 64, 128 or 256 */
    const int stride = max(1, min((int)STRIDE, s.Sk / FEWEST)), count = s.Sk / stride, column = thread % chunks * 8;
    const int kind = bwd->key_mean_f32 ? KIND_F32 : a->kind;
    const int64_t size = bwd->key_mean_f32 ? 4 : 2, row = a->k.row * size; /* bytes */
    const char *const k = (const char *)a->k.p + (s.batch * a->k.b + hk * a->k.h) * size + s.k0 * row;
    float *const squares = sums + warps * D;
    float origin[8] = {}, sum[8] = {}, square[8] = {};
    if (kind != KIND_F32 && a->vector_qkv && a->D == D) {
        const uint4 origin_bits = count ? *(const uint4 *)(k + 2 * column) : make_uint4(0, 0, 0, 0);
        for (int first = thread / chunks; first < count; first += AT_ONCE * keys_at_once) {
            uint4 bits[AT_ONCE];
#pragma unroll
            for (int m = 0; m < AT_ONCE; ++m) { /* beyond the last key the first, which adds nothing */
                const int n = first + m * keys_at_once;
                bits[m] = n < count ? *(const uint4 *)(k + sampled_key(n, stride) * row + 2 * column) : origin_bits;
            }
            convert_8(origin, (const uint16_t *)&origin_bits, kind);
#pragma unroll
            for (int m = 0; m < AT_ONCE; ++m) {
                float x[8];
                convert_8(x, (const uint16_t *)(bits + m), kind);
                add_key(sum, square, x, origin);
            }
        }
        convert_8(origin, (const uint16_t *)&origin_bits, kind);
    } else {
        if (count > 0) load_8(origin, k, kind, column, a->D, a->vector_qkv);
        for (int first = thread / chunks; first < count; first += keys_at_once) {
            float x[8];
            load_8(x, k + sampled_key(first, stride) * row, kind, column, a->D, a->vector_qkv);
            add_key(sum, square, x, origin);
        }
    }
#pragma unroll
    for (int e = 0; e < 8; ++e) {
        for (int lanes = 16; lanes >= chunks; lanes /= 2) {
            sum[e] += __shfl_xor_sync(ALL_LANES, sum[e], lanes);
            square[e] += __shfl_xor_sync(ALL_LANES, square[e], lanes);
        }
        sums[warp * D + column + e] = sum[e];
        squares[warp * D + column + e] = square[e];
        if (thread < chunks) origins[column + e] = origin[e];
    }
    __syncthreads();
    float z = 0.0f; /* over channels */
    for (int c = thread; c < D; c += threads) {
        float total = 0.0f, total_square = 0.0f;
        for (int w = 0; w < warps; ++w) {
            total += sums[w * D + c];
            total_square += squares[w * D + c];
        }
        const float n = (float)count, shift = total / n, variance = fmaxf(total_square / n - shift * shift, 0.0f);
        bwd->key_mean[(int64_t)plane * D + c] = channel_mean(&z, origins[c] + shift, variance, count);
    }
    for (int lanes = 16; lanes > 0; lanes /= 2) z += __shfl_xor_sync(ALL_LANES, z, lanes);
    if (thread % 32 == 0) z_of_warps[warp] = z;
    __syncthreads();
    if (thread != 0) return;
    for (int w = 1; w < warps; ++w) z += z_of_warps[w];
    bwd->key_mean_used[plane] = shows_means(z, a->D, count);
}
