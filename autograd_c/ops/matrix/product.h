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
    void *gelu;               /* where gelu(C) goes, lying as C; NULL: none, or the caller writes it */
    bool *activated;          /* fattni_product's, as are early and norm */
    bool early;
    const fattni_row_norm *norm;
} fattni_batched_product;

/* What is added has C's dtype and strides, for a BLAS that begins with it. */
static inline bool fattni_onto_lies_as_c(const fattni_batched_product *p) {
    bool same = p->onto && p->c.count == 1 && p->onto->dtype == p->to->dtype && p->onto->ndim == p->to->ndim;
    for (int d = 0; same && d < p->to->ndim; ++d) same = p->to->shape[d] == 1 || p->onto->stride[d] == p->to->stride[d];
    return same;
}

#endif
