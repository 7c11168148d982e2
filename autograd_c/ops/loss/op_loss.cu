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

/* Over the block, in one order; every thread gets the result. */
DEVICE double row_sum(double x) {
    __shared__ double part[32];
    const int lane = (int)threadIdx.x % 32;
    for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(0xffffffffu, x, step);
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
    double kept = 0;
#pragma unroll 8
    for (int64_t row = threadIdx.x; row < a.all; row += FATTNI_LOSS_THREADS) kept += target_of(&a, row) != a.ignore;
    kept = row_sum(kept);
    if (threadIdx.x == 0) *a.kept = kept;
}

/* One block: out = the mean of the rows' losses; without any row 0. */
extern "C" __global__ void __launch_bounds__(FATTNI_LOSS_THREADS)
    fattn_loss_mean(const __grid_constant__ fattni_loss_args a) {
    begin_grid();
    double sum = 0;
#pragma unroll 8
    for (int64_t row = threadIdx.x; row < a.all; row += FATTNI_LOSS_THREADS) sum += a.loss[row];
    sum = row_sum(sum);
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
