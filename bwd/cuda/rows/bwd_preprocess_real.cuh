/* Before the main kernel in F32 and F64: delta, dQ = 0, the parts of dsink. And, after it, for every dtype: dsink from
   its parts. The files that include this define K_F64, K_ROWS_NAME and K_SINK_NAME. */
#include "bwd/cuda/bwd_args.h"
#include "bwd/cuda/bwd_blocks.cuh"
#include "bwd/cuda/bwd_workspace.cuh"
#include "core/attention/huge.h"
#include "core/device/float_types.cuh"
#include "core/ptx/grid.h"

enum { THREADS = 256, WARPS = THREADS / 32 };

/* The sum over all threads, in one order: lanes, then warps. All threads call it; thread 0 uses the result. */
DEVICE real block_sum(real x) {
    __shared__ real parts[WARPS];
    for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(0xffffffffu, x, step);
    if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = x;
    __syncthreads();
    real sum = 0;
    for (int w = 0; w < WARPS; ++w) sum += parts[w];
    return sum;
}

/* delta = rowsum(dO * O) - dL unless it is given, dQ = 0 unless it is added to, and this row
   block's part of dsink. One CTA per row block of one (sequence, head), one warp per row. */
extern "C" __global__ void __launch_bounds__(THREADS) K_ROWS_NAME(const __grid_constant__ fattni_bwd_args args) {
    begin_grid();
    const fattni_bwd_args *const bwd = &args;
    const fattni_attention_args *const a = &args.a;
    const int BM = bwd->row_block, blocks = (a->Sq + BM - 1) / BM;
    const block_position at = block_at(blockIdx.x, a->Sq, BM, a->Hq);
    const int b = at.b, h = at.h, i0 = at.first;
    const sequence s = sequence_of(a, b);
    const int warp = (int)threadIdx.x / 32, lane = (int)threadIdx.x % 32;
    const float *const key_mean = K_F64 ? 0 : key_mean_of(bwd, b, h / a->group);
    real sink_gradient = 0;
    if (bwd->dq_semaphore && threadIdx.x == 0) bwd->dq_semaphore[blockIdx.x] = 0;
    for (int i = i0 + warp; i < min(i0 + BM, s.Sq); i += WARPS) {
        const int64_t row = s.q0 + i;
        real delta = 0;
        if (bwd->given_delta.p) {
            delta = *row_at(&bwd->given_delta, &s, h, row);
        } else {
            const real *const o = row_at(&a->o, &s, h, row), *const d_o = row_at(&bwd->d_o, &s, h, row);
            for (int d = lane; d < a->Dv; d += 32) delta += o[d] * d_o[d];
            for (int step = 16; step > 0; step /= 2) delta += __shfl_xor_sync(0xffffffffu, delta, step);
            if (bwd->d_lse.p) delta -= *row_at(&bwd->d_lse, &s, h, row);
        }
        const real L = *row_at(&a->lse, &s, h, row);
        const int huge = FATTNI_IS_HUGE(L); /* the row is bwd_huge_real.cuh's */
        /* Of dS, which the main kernel's dQ leaves to this one (bwd_key_mean.cu), or with a softcap to
           bwd_capped_sums_real.cuh. */
        real sum = 0;
        if (key_mean && L - L == 0 && !huge && !(a->softcap > 0)) {
            const real d_lse = bwd->d_lse.p ? *row_at(&bwd->d_lse, &s, h, row) : (real)0;
            sum = ARG(a, scale) * (d_lse + (a->sink.p ? share_of(real_at(&a->sink, h), L) * delta : (real)0));
        }
        if (bwd->dq.p && (sum != 0 || !(a->flags & FATTN_ACC_DQ))) {
            real *const dq = row_at(&bwd->dq, &s, h, row);
            for (int d = lane; d < a->D; d += 32)
                dq[d] = (a->flags & FATTN_ACC_DQ ? dq[d] : (real)0) + (key_mean ? sum * (real)key_mean[d] : (real)0);
        }
        if (lane != 0) continue;
        ((real *)bwd->delta)[row_number(a, &s, h, i)] = delta;
        if (huge) bwd->huge[0] = 1;
        if (bwd->d_sink.p && L != -(real)INFINITY && !huge) /* the sink's share of the row's probability */
            sink_gradient -= share_of(real_at(&a->sink, h), L) * delta;
    }
    if (!bwd->d_sink.p) return;
    sink_gradient = block_sum(sink_gradient);
    if (threadIdx.x == 0) ((real *)bwd->sink_parts)[((int64_t)h * a->B + b) * blocks + at.index] = sink_gradient;
}

/* dsink from its parts, one CTA per head. */
extern "C" __global__ void __launch_bounds__(THREADS) K_SINK_NAME(const __grid_constant__ fattni_bwd_args args) {
    begin_grid();
    const fattni_bwd_args *const bwd = &args;
    const fattni_attention_args *const a = &args.a;
    const int h = (int)blockIdx.x;
    const int64_t count = (int64_t)a->B * ((a->Sq + bwd->row_block - 1) / bwd->row_block);
    const real *const parts = (const real *)bwd->sink_parts + h * count;
    real sum = 0;
    for (int64_t n = threadIdx.x; n < count; n += THREADS) sum += parts[n];
    const int64_t huge_count = (int64_t)a->B * ((a->Sq + bwd->huge_block - 1) / bwd->huge_block);
    const real *const huge_parts = (const real *)bwd->huge_sink + h * huge_count;
    for (int64_t n = threadIdx.x; n < huge_count; n += THREADS) sum += huge_parts[n];
    sum = block_sum(sum);
    if (threadIdx.x != 0) return;
    real *const to = (real *)bwd->d_sink.p + h * bwd->d_sink.step;
    *to = a->flags & FATTN_ACC_DSINK ? *to + sum : sum;
}
