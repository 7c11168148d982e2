/* Matrix products on the device through cuBLAS.

   The library is not linked with cuBLAS: it is loaded (dlopen) when a context on a GPU is created,
   from the toolkit that built the library or the dynamic linker's search path. Without it, calls that
   need matrix products are FATTN_E_UNSUPPORTED; the flash kernels work. */
#ifndef FATTNI_CORE_CUDA_BLAS_H
#define FATTNI_CORE_CUDA_BLAS_H

#include "core/base/internal.h"

/* Row-major C[M,N] = alpha op(A) op(B) + beta C, strided-batched; ld* and strides in elements. A and B
   have one dtype; C has the same, or is F32 with 16-bit A and B. Sums are F32 (F64 for F64); with beta 0
   C is not read. */
typedef struct fattni_cuda_gemm {
    fattn_dtype dtype, c_dtype;
    bool trans_a, trans_b, tf32;
    int64_t batches, M, N, K;
    const void *a, *b;
    void *c;
    int64_t lda, ldb, ldc, stride_a, stride_b, stride_c;
    double alpha, beta;
    const void *row;  /* NULL, or N elements of dtype: added to each row; see fattni_cuda_multiply */
    const void *from; /* NULL, or a matrix that lies as C does, apart from it: added to it, beta is 0; likewise */
    void *gelu; /* NULL, or where gelu(C) goes, in its tanh form, lying as C does: apart from it, or C itself, which
                         is not stored then; without from, beta is 0; likewise */
} fattni_cuda_gemm;

/* Opens the context's handle, which is NULL when cuBLAS is not found or does not start: that is not an error. */
fattn_status fattni_cuda_blas_open(fattn_ctx *ctx);
void fattni_cuda_blas_close(fattn_ctx *ctx); /* NULL is allowed */
/* NULL, or why this context has no matrix products: the end of an error message. */
const char *fattni_cuda_blas_missing(const fattn_ctx *ctx);
int fattni_cuda_blas_type(fattn_dtype t); /* a cudaDataType_t */
/* Bytes of cuBLAS's workspace, aligned: NVIDIA's recommendation for sm_90. */
enum { FATTNI_CUDA_BLAS_WORKSPACE = 32 << 20 };
/* Enqueues on the context's stream; no allocation, no synchronisation. With a row, a matrix to add, or
   gelu, nothing may be enqueued: `added` is false then, and the caller does it otherwise. NULL when there is none. */
fattn_status fattni_cuda_multiply(fattn_ctx *ctx, const fattni_cuda_gemm *g, void *workspace, bool *added);

#endif
