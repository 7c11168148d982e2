/* Softmax cross-entropy on the device; equations in op_cross_entropy.c. Nobody can look at targets
   without waiting for them: one that is neither ignored nor a class makes the loss NaN. */
#include "autograd_c/op_cuda.h"

#include "cuda_element.h"

DEVICE int32_t target_of(const fattni_loss_args *a, int64_t row) {
    return a->id[walk_offset(&a->target, row / a->target_columns) +
                 row % a->target_columns * a->target_step];
}

/* One block: kept = how many of all targets are not ignored. */
extern "C" __global__ void __launch_bounds__(ROW_THREADS)
    fattn_loss_count(const __grid_constant__ fattni_loss_args a) {
    double kept = 0;
    for (int64_t row = threadIdx.x; row < a.all; row += ROW_THREADS)
        kept += target_of(&a, row) != a.ignore;
    kept = block_sum_f64(kept);
    if (threadIdx.x == 0) *a.kept = kept;
}

/* One block: out = the mean of the rows' losses; without any row 0. */
extern "C" __global__ void __launch_bounds__(ROW_THREADS)
    fattn_loss_mean(const __grid_constant__ fattni_loss_args a) {
    double sum = 0;
    for (int64_t row = threadIdx.x; row < a.all; row += ROW_THREADS) sum += a.loss[row];
    sum = block_sum_f64(sum);
    if (threadIdx.x != 0) return;
    const double loss = *a.kept > 0 ? sum / *a.kept : sum;
    if (a.out.dtype == FATTN_F64)
        *(double *)a.out.p = loss;
    else
        *(float *)a.out.p = (float)loss;
}

#define BODY "autograd_c/op_loss_cuda.inc"
#include "cuda_reals.inc"
