/* Around the F32 and F64 backward kernel, and for every dtype the sink's gradient. K_F64 and
   K_ROWS_NAME, K_SINK_NAME are set by the files that include this. */
#include "core/attention/huge.h"
#include "core/device/float_types.cuh"

enum { THREADS = 256, WARPS = THREADS / 32 };

/* One order whatever the schedule: lanes, then warps. All threads; the result is thread 0's. */
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
extern "C" __global__ void __launch_bounds__(THREADS)
    K_ROWS_NAME(const __grid_constant__ fattni_cuda_args a) {
    const int BM = a.row_block, blocks = (a.Sq + BM - 1) / BM;
    const int plane = (int)(blockIdx.x / (unsigned)blocks), h = plane % a.Hq, b = plane / a.Hq;
    const int block = (int)(blockIdx.x % (unsigned)blocks), i0 = block * BM;
    const sequence s = sequence_of(&a, b);
    const int warp = (int)threadIdx.x / 32, lane = (int)threadIdx.x % 32;
    real sink_gradient = 0;
    if (a.turns && threadIdx.x == 0) a.turns[blockIdx.x] = 0;
    for (int i = i0 + warp; i < min(i0 + BM, s.Sq); i += WARPS) {
        const int64_t row = s.q0 + i;
        real delta = 0;
        if (a.given_delta.p) {
            delta = *row_at(&a.given_delta, &s, h, row);
        } else {
            const real *const o = row_at(&a.o, &s, h, row), *const d_o = row_at(&a.d_o, &s, h, row);
            for (int d = lane; d < a.Dv; d += 32) delta += o[d] * d_o[d];
            for (int step = 16; step > 0; step /= 2)
                delta += __shfl_xor_sync(0xffffffffu, delta, step);
            if (a.d_lse.p) delta -= *row_at(&a.d_lse, &s, h, row);
        }
        if (a.dq.p && !(a.flags & FATTN_ACC_DQ)) {
            real *const dq = row_at(&a.dq, &s, h, row);
            for (int d = lane; d < a.D; d += 32) dq[d] = 0;
        }
        if (lane != 0) continue;
        ((real *)a.delta)[row_number(&a, &s, h, i)] = delta;
        const real L = *row_at(&a.lse, &s, h, row);
        const int huge = FATTNI_IS_HUGE(L); /* bwd_huge_real.cuh has the row's P */
        if (huge) a.huge[0] = 1;
        if (a.d_sink.p && L != -(real)INFINITY && !huge) /* the sink's share of the row's probability */
            sink_gradient -= share_of(real_at(&a.sink, h), L) * delta;
    }
    if (!a.d_sink.p) return;
    sink_gradient = block_sum(sink_gradient);
    if (threadIdx.x == 0)
        ((real *)a.sink_parts)[((int64_t)h * a.B + b) * blocks + block] = sink_gradient;
}

/* dsink from its parts, one CTA per head. */
extern "C" __global__ void __launch_bounds__(THREADS)
    K_SINK_NAME(const __grid_constant__ fattni_cuda_args a) {
    const int h = (int)blockIdx.x;
    const int64_t count = (int64_t)a.B * ((a.Sq + a.row_block - 1) / a.row_block);
    const real *const parts = (const real *)a.sink_parts + h * count;
    real sum = 0;
    for (int64_t n = threadIdx.x; n < count; n += THREADS) sum += parts[n];
    const int64_t huge_count = (int64_t)a.B * ((a.Sq + a.huge_block - 1) / a.huge_block);
    const real *const huge_parts = (const real *)a.huge_sink + h * huge_count;
    for (int64_t n = threadIdx.x; n < huge_count; n += THREADS) sum += huge_parts[n];
    sum = block_sum(sum);
    if (threadIdx.x != 0) return;
    real *const to = (real *)a.d_sink.p + h * a.d_sink.step;
    *to = a.flags & FATTN_ACC_DSINK ? *to + sum : sum;
}
