/* A product as product.c hands it to the BLAS of a device (fattni_product_code). */
#ifndef FATTNI_AUTOGRAD_OPS_MATRIX_PRODUCT_H
#define FATTNI_AUTOGRAD_OPS_MATRIX_PRODUCT_H

#include "autograd_c/ops/ops.h"
#include "core/cpu/gemm_cpu.h"

typedef struct fattni_batched_product {
    fattni_gemm first;        /* of the first batch; its dtype is C's */
    fattn_dtype operands;     /* of A and B: as C's, or 16 bits beside F32 */
    fattni_rows a, b, c;      /* row n: where the matrix of batch n begins */
    const fattn_tensor *to;   /* C */
    const fattn_tensor *onto; /* added to C; NULL: none, or the caller adds it */
} fattni_batched_product;

#endif
