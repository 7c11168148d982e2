/* Products of BF16 matrices on CPUs with AMX, and AMD's with AVX512-BF16, by a library for blocks of the result.
   Operands are multiplied as they are, sums are F32, and each result is rounded once. Blocks and parts of K depend on
   the shape alone and a block is computed by one thread: results are bitwise independent of the number of threads. */
#ifndef FATTNI_CORE_CPU_GEMM_BF16_H
#define FATTNI_CORE_CPU_GEMM_BF16_H

#include "core/cpu/gemm_cpu.h"
#include "core/tensor/rows.h"

/* A library that multiplies blocks, on the calling thread. */
typedef struct fattni_bf16_library {
    /* engine stays NULL when the library does not use the context's instructions in this process, and after a
       failure: NOMEM; UNSUPPORTED, it has no such product. */
    fattn_status (*open)(fattn_ctx *ctx, fattni_bf16 *b);
    void (*close)(fattni_bf16 *b);
    /* c = op(a) op(b): a and b BF16, c F32; M, N, K above 0. False: the library has no memory. */
    bool (*multiply)(const fattni_bf16 *b, const fattni_gemm *g, void *scratch);
} fattni_bf16_library;

/* Products of matrices [M,K] and [K,N], one for each row of c: the first one, and the offsets of all. The dtype of
   `first` is C's, F32 or BF16; a, b and row are BF16; alpha is 1, beta 0 or 1. */
typedef struct fattni_bf16_products {
    fattni_gemm first;
    fattni_rows a, b, c;
} fattni_bf16_products;

/* Whether products of this size are computed here: the context may use AMX or AVX512-BF16, BF16 products are not
   forbidden by FATTN_CTX_F32_PRODUCTS, a library is there, and the size is worth it. The first call for a context opens
   the library. NOMEM, UNSUPPORTED. */
fattn_status fattni_bf16_takes(fattn_ctx *ctx, int64_t M, int64_t N, int64_t K, bool *takes);
/* By the shape, the number of products and the context's threads. */
size_t fattni_bf16_workspace(const fattn_ctx *ctx, const fattni_gemm *first, int64_t count);
/* For sizes that fattni_bf16_takes has accepted, or parts of them. NOMEM. */
fattn_status fattni_bf16_multiply(fattn_ctx *ctx, const fattni_bf16_products *p, void *workspace);

/* d[N] (+)= the sums of x [R,N], BF16 in rows of a pitch, in double; d is BF16 or F32 and rounded once. */
size_t fattni_bf16_column_sums_workspace(int64_t R, int64_t N);
void fattni_bf16_column_sums(const fattn_ctx *ctx, const uint16_t *x, int64_t R, int64_t N, int64_t pitch, void *d,
                             fattn_dtype dtype, bool fresh, void *workspace);

/* x = high + low, to 2^-16 of x, or 2^-126 when that is more; infinite and NaN x have low 0. For CPUs with AVX-512. */
void fattni_bf16_split(const float *x, uint16_t *high, uint16_t *low, int64_t n);

void fattni_bf16_close(fattn_ctx *ctx);

#endif
