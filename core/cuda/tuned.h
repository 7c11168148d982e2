/* The fastest of cuBLASLt's candidates for each product, for contexts with FATTN_CTX_TUNE.

   cuBLAS chooses by a model of the device that is off by up to a third for shapes of a training step.
   Here the first call of a shape runs its candidates one after the other, waits for the device, and
   keeps the best; all later calls only enqueue. What is chosen depends on the clock, so roundings may
   differ from run to run. */
#ifndef FATTNI_CORE_CUDA_TUNED_H
#define FATTNI_CORE_CUDA_TUNED_H

#include "core/cuda/blas.h"

struct fattni_cuda_tuned;

/* handle: a cublasHandle_t, which serves as Lt's, too. *out is NULL without cuBLASLt; never an error
   but NOMEM. */
fattn_status fattni_cuda_tuned_open(fattn_ctx *ctx, void *handle, struct fattni_cuda_tuned **out);
void fattni_cuda_tuned_close(fattn_ctx *ctx, struct fattni_cuda_tuned *t); /* NULL is fine */
/* As fattni_cuda_multiply, on a product that is not empty. *done false: nothing was enqueued, since the
   shape has no candidate, or is new while the stream is being captured. */
fattn_status fattni_cuda_tuned_multiply(fattn_ctx *ctx, struct fattni_cuda_tuned *t,
                                        const fattni_cuda_gemm *g, void *workspace, bool *done);

#endif
