/* AdamW on the device: norm of each parameter's chunks, one thread that decides, update. */
#include "autograd_c/adamw_cuda.h"

#include "cuda_element.h"

/* partial[chunk] = sum of g^2 over a chunk. */
extern "C" __global__ void __launch_bounds__(ROW_THREADS)
    fattn_adamw_norm(const __grid_constant__ fattni_adamw_args a) {
    const int64_t begin = (int64_t)blockIdx.x * FATTNI_ADAMW_CHUNK;
    const int64_t end = min(a.count, begin + FATTNI_ADAMW_CHUNK);
    double sum = 0;
    for (int64_t i = begin + threadIdx.x; !a.frozen && i < end; i += ROW_THREADS) {
        const double g = load_f64(a.grad, a.grad_dtype, i);
        sum += g * g;
    }
    sum = block_sum_f64(sum);
    if (threadIdx.x == 0) a.partial[blockIdx.x] = sum;
}

/* One block: the norm of all, then what the step will do. */
extern "C" __global__ void __launch_bounds__(ROW_THREADS)
    fattn_adamw_begin(const __grid_constant__ fattni_adamw_args a) {
    double sum = 0;
    for (int64_t n = threadIdx.x; n < a.chunks; n += ROW_THREADS) sum += a.partial[n];
    sum = block_sum_f64(sum);
    if (threadIdx.x == 0) fattni_adamw_begin(a.state, sum, a.limit, a.beta1, a.beta2);
}

extern "C" __global__ void fattn_adamw_set(const __grid_constant__ fattni_adamw_args a) {
    if (a.lr >= 0) a.state->lr = a.lr;
    if (a.step >= 0) a.state->step = a.step;
}

#define BODY "autograd_c/adamw_cuda.inc"
#include "cuda_reals.inc"
