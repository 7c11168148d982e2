/* A product with one row, as generation has for every layer and token: y = x w^T, x [K], w [N,K], or with the norm of x
   in its place. Its time is that of reading w, a few MB, of the same order as that of a launch. cuBLAS's kernels, which
   do not start before the kernel before them has ended, take 1.5 times as long (bench/results/sampling.txt). */
#ifndef FATTNI_AUTOGRAD_OPS_MATRIX_ROW_PRODUCT_H
#define FATTNI_AUTOGRAD_OPS_MATRIX_ROW_PRODUCT_H

#include <stdint.h>

enum { FATTNI_ROW_PRODUCT_THREADS = 256, FATTNI_ROW_PRODUCT_WARPS = FATTNI_ROW_PRODUCT_THREADS / 32 };
enum { FATTNI_ROW_PRODUCT_AHEAD = 3 }; /* packs of 16 bytes that a lane loads at once */
enum { FATTNI_ROW_PRODUCT_NORM_COLUMNS = 8 * FATTNI_ROW_PRODUCT_THREADS }; /* most of a norm: a thread has 8 */

/* z = h w^T + row + onto to c, and gelu(z) to gelu, which is c where z is not wanted. h is x, or layernorm or rmsnorm
   of it, rounded as they are. */
typedef struct fattni_row_product_args {
    const void *x, *w;       /* [K]; rows of K, `pitch` bytes apart */
    const void *row, *onto;  /* [N] each, in w's and c's dtype; NULL: none */
    const void *gain, *bias; /* [K] of the norm; bias NULL: none */
    void *c, *gelu;          /* [N]; gelu NULL: not wanted */
    int64_t pitch;
    double eps;
    int32_t N, K, packs;      /* packs: of 16 bytes in a row */
    int32_t sharing;          /* warps that share a row of w: 1, 2, 4 or 8 */
    int32_t c_dtype, centred; /* centred: layernorm */
    int32_t early, reserved;  /* early: w is read before the kernels before have ended */
} fattni_row_product_args;

#ifndef __CUDACC__
#include "autograd_c/ops/ops.h"
#include "core/cuda/blas/blas.h"

/* Whether it is such a product, of F32 or 16 bits, with rows that 16-byte loads can read. norm: NULL, or of x, in its
   place: its columns are limited to NORM_COLUMNS, in packs of 8. */
bool fattni_cuda_is_row_product(const fattni_cuda_gemm *g, const fattni_row_norm *norm);
/* Enqueues it, with row, from and gelu. early: w may be read before the kernels before have ended. */
fattn_status fattni_cuda_row_product(fattn_ctx *ctx, const fattni_cuda_gemm *g, bool early,
                                     const fattni_row_norm *norm);
#endif

#endif
