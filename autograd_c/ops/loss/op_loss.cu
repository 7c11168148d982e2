/* Softmax cross-entropy on the device; equations in op_cross_entropy.c. The host cannot check
   targets without waiting for the stream: one that is neither ignored nor a class makes the loss
   NaN. */
#include "autograd_c/ops/op_cuda.h"

#include "core/device/any_dtype.cuh"

/* Of an SM: rows in flight fit the cache together. One of sm_75 holds 1024 threads. */
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
enum { LOSS_BLOCKS_f32 = 1, LOSS_BLOCKS_f64 = 1 };
#else
enum { LOSS_BLOCKS_f32 = 2, LOSS_BLOCKS_f64 = 1 };
#endif

/* A row's packs as they lie in memory; each is written and read by the same thread. */
extern __shared__ uint4 loss_row[];

DEVICE int32_t target_of(const fattni_loss_args *a, int64_t row) {
    return a->id[walk_offset(&a->target, row / a->target_columns) + row % a->target_columns * a->target_step];
}

/* Where this thread's row stays: it writes and reads every row_threads'th pack. */
DEVICE uint4 *kept_row(const fattni_loss_args *a) {
    return a->row_threads == 32 ? loss_row + threadIdx.x / 32 * (a->width / FATTNI_PACK) : loss_row;
}

/* This thread's row, and its number among the row's. */
DEVICE int64_t row_of(const fattni_loss_args *a, int *thread) {
    *thread = (int)threadIdx.x;
    if (a->row_threads > 32) return blockIdx.x;
    *thread %= 32;
    return (int64_t)blockIdx.x * FATTNI_LOSS_ROWS + threadIdx.x / 32;
}

/* Over the `threads` of a row, a warp's or a block's, in one order; every thread gets the result. */
DEVICE double row_sum(double x, int threads) {
    __shared__ double part[32];
    const int lane = (int)threadIdx.x % 32;
    for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(0xffffffffu, x, step);
    if (threads == 32) return x;
    if (lane == 0) part[threadIdx.x / 32] = x;
    __syncthreads();
    x = lane < (int)blockDim.x / 32 ? part[lane] : 0;
    for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(0xffffffffu, x, step);
    return x;
}

/* One block: kept = how many of all targets are not ignored. */
extern "C" __global__ void __launch_bounds__(FATTNI_LOSS_THREADS)
    fattn_loss_count(const __grid_constant__ fattni_loss_args a) {
    begin_grid();
    const int64_t in_fours = a.fours ? a.all - a.all % 4 : 0;
    int64_t kept = 0;
#pragma unroll 8
    for (int64_t row = 4 * threadIdx.x; row < in_fours; row += 4 * FATTNI_LOSS_THREADS) {
        const int4 t = *(const int4 *)(a.id + row);
        kept += (t.x != a.ignore) + (t.y != a.ignore) + (t.z != a.ignore) + (t.w != a.ignore);
    }
#pragma unroll 8
    for (int64_t row = in_fours + threadIdx.x; row < a.all; row += FATTNI_LOSS_THREADS)
        kept += target_of(&a, row) != a.ignore;
    const double all = row_sum((double)kept, FATTNI_LOSS_THREADS);
    if (threadIdx.x == 0) *a.kept = all;
}

/* One block: out = the mean of the rows' losses; without any row 0. */
extern "C" __global__ void __launch_bounds__(FATTNI_LOSS_THREADS)
    fattn_loss_mean(const __grid_constant__ fattni_loss_args a) {
    begin_grid();
    double sum = 0;
#pragma unroll 8
    for (int64_t row = threadIdx.x; row < a.all; row += FATTNI_LOSS_THREADS) sum += a.loss[row];
    sum = row_sum(sum, FATTNI_LOSS_THREADS);
    if (threadIdx.x != 0) return;
    const double loss = *a.kept > 0 ? sum / *a.kept : sum;
    if (a.rest) *a.rest = *a.kept > 0 ? (float)(1 / (*a.kept * FATTNI_LOSS_UNIT)) : 0.0f;
    if (a.out.dtype == FATTN_F64)
        *(double *)a.out.p = loss;
    else
        *(float *)a.out.p = (float)loss;
}

#define BODY "autograd_c/ops/loss/op_loss_cuda.inc"
#include "core/device/for_each_real.inc"
