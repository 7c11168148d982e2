/* Matrix products on the device through cuBLAS.

   The library is not linked with cuBLAS: it is looked for (dlopen) when a context on a GPU is
   created, in the toolkit that built the library and where the dynamic linker looks. Without it,
   what needs products is FATTN_E_UNSUPPORTED; the flash kernels work. */
#ifndef FATTNI_CORE_CUDA_BLAS_H
#define FATTNI_CORE_CUDA_BLAS_H

#include "core/base/internal.h"

/* Row-major C[M,N] = alpha op(A) op(B) + beta C, `batches` times, strides from one to the next; ld*
   and strides in elements. A and B have one dtype; C has it, too, or is F32 beside 16 bits. Sums
   are F32 (F64 for F64); beta 0 ignores what C held. */
typedef struct fattni_cuda_gemm {
    fattn_dtype dtype, c_dtype;
    bool trans_a, trans_b, tf32;
    int64_t batches, M, N, K;
    const void *a, *b;
    void *c;
    int64_t lda, ldb, ldc, stride_a, stride_b, stride_c;
    double alpha, beta;
} fattni_cuda_gemm;

/* A context's handle, or NULL when cuBLAS is not there; never an error. */
fattn_status fattni_cuda_blas_open(fattn_ctx *ctx);
void fattni_cuda_blas_close(fattn_ctx *ctx); /* NULL is fine */
/* NULL, or why this context has no products: the end of a sentence. */
const char *fattni_cuda_blas_missing(const fattn_ctx *ctx);
int fattni_cuda_blas_type(fattn_dtype t); /* a cudaDataType_t */
/* Bytes, aligned, with which a call runs at full speed: what NVIDIA recommends for sm_90. */
enum { FATTNI_CUDA_BLAS_WORKSPACE = 32 << 20 };
/* Enqueues on the context's stream; allocates nothing, waits for nothing. */
fattn_status fattni_cuda_multiply(fattn_ctx *ctx, const fattni_cuda_gemm *g, void *workspace);

#endif
