/* Products by cuBLASLt, which adds a row or a matrix, or applies gelu, inside the product: its first candidate or, in
   contexts with FATTN_CTX_TUNE, the fastest one.

   cuBLAS's heuristic choice is up to a third slower than the best one for shapes of a training step. With TUNE
   the first call of a shape times its candidates, waits for the device, and keeps the fastest; later calls
   only enqueue. The choice depends on measured times, so roundings may differ from run to run. Candidates are timed
   as graphs of many runs, in turns: one at a time, small products are as slow as the host. */
#ifndef FATTNI_CORE_CUDA_BLAS_LT_H
#define FATTNI_CORE_CUDA_BLAS_LT_H

#include "core/cuda/blas/blas.h"

struct fattni_cuda_lt;

/* handle: a cublasHandle_t, which can be used as a cublasLtHandle_t. *out is NULL without cuBLASLt; the only
   error is NOMEM. */
fattn_status fattni_cuda_lt_open(fattn_ctx *ctx, void *handle, struct fattni_cuda_lt **out);
void fattni_cuda_lt_close(fattn_ctx *ctx, struct fattni_cuda_lt *t); /* NULL is allowed */
/* As fattni_cuda_multiply, for a product that is not empty. *done is false when nothing was enqueued: no
   candidate supports the shape, or it is new, to be timed, while the stream is being captured. */
fattn_status fattni_cuda_lt_multiply(fattn_ctx *ctx, struct fattni_cuda_lt *t, const fattni_cuda_gemm *g,
                                     void *workspace, bool *done);

#endif
