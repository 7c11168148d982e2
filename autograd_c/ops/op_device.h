/* Devices behind the tape's ops.

   Most ops are made of a few primitives that know their device: elements, sums, products (ops.h) and what
   every context's device does (core/base/device.h). Ops with loops of their own have them once per device: a
   fattni_code each, and one line in op_device.c that names it. Checks and shapes are the op's own, whatever
   the device. */
#ifndef FATTNI_AUTOGRAD_OPS_OP_DEVICE_H
#define FATTNI_AUTOGRAD_OPS_OP_DEVICE_H

#include "autograd_c/ops/elementwise/elementwise.h"
#include "core/base/device.h"

#include <fattn/tape.h>

struct fattni_batched_product; /* autograd_c/ops/matrix/product.h */
struct fattni_elements;        /* autograd_c/ops/ops.h */
struct fattni_gemm;            /* core/cpu/gemm_cpu.h */
struct fattni_row_norm;        /* autograd_c/ops/ops.h */

typedef struct fattni_code {
    void (*plan)(fattn_op_call *c); /* at the end of infer: saved_bytes and workspaces */
    fattn_status (*forward)(fattn_op_call *c);
    fattn_status (*backward)(fattn_op_call *c); /* gradients' dtypes have been checked */
} fattni_code;

enum fattni_coded {
    FATTNI_NORM,
    FATTNI_SOFTMAX,
    FATTNI_DROPOUT,
    FATTNI_ROPE,
    FATTNI_EMBEDDING,
    FATTNI_CROSS_ENTROPY,
    FATTNI_LINEAR_CROSS_ENTROPY,
    FATTNI_CODED /* how many there are */
};

/* fattni_fill and the others below and in ops.h, for one device. */
typedef struct fattni_element_code {
    fattn_status (*fill)(fattn_ctx *ctx, const fattn_tensor *d, double value, bool fresh);
    fattn_status (*accumulate)(fattn_ctx *ctx, const fattn_tensor *d, const fattn_tensor *x, bool fresh);
    fattn_status (*each)(fattn_ctx *ctx, const struct fattni_elements *f, const fattn_tensor *const *t, int n,
                         bool fresh);
    size_t (*reduce_workspace)(const fattn_tensor *d, const fattn_tensor *x);
    fattn_status (*reduce)(fattn_ctx *ctx, const fattn_tensor *d, bool fresh, const fattn_tensor *x,
                           const fattn_tensor *y, double divisor, void *workspace);
    /* Of a device that computes linear and gelu together (op_linear.c); NULL: they are two ops. d = dy gelu'(x) of one
       shape, row-major but for dy; sums [N] (+)= the sum of its rows, NULL: not wanted. */
    size_t (*gelu_back_workspace)(const fattn_tensor *sums, const fattn_tensor *x);
    fattn_status (*gelu_back)(fattn_ctx *ctx, const fattn_tensor *d, const fattn_tensor *x, const fattn_tensor *dy,
                              const fattn_tensor *sums, bool fresh, void *workspace);
    fattn_status (*gelu)(fattn_ctx *ctx, const fattn_tensor *y, const fattn_tensor *x); /* y may be x */
} fattni_element_code;

/* What product.c needs of a BLAS. */
typedef struct fattni_product_code {
    bool one_stride; /* leads from each matrix of a batch to the next, upwards; else they lie anywhere */
    /* Whether BF16 operands of an op with FATTN_OP_F32_ON_CPU are multiplied as they are; NULL: always. */
    fattn_status (*takes_bf16)(fattn_ctx *ctx, int64_t M, int64_t N, int64_t K, bool *takes);
    /* Whether norm(x) w^T can be one product (fattni_product.norm), for one row x [1,K] and w [N,K]; NULL: never. */
    bool (*takes_norm)(const fattn_tensor *x, const fattn_tensor *w, const struct fattni_row_norm *norm);
    size_t (*workspace)(const fattn_ctx *ctx, fattn_dtype operands, const struct fattni_gemm *first, int64_t batches);
    /* onto_added: whether p->onto is in C now; else the caller adds it. */
    fattn_status (*run)(fattn_ctx *ctx, const struct fattni_batched_product *p, void *workspace, bool *onto_added);
    /* fattni_sum_rows of BF16 rows; NULL: fattni_reduce takes them. */
    size_t (*sum_rows_workspace)(const fattn_tensor *x);
    void (*sum_rows)(fattn_ctx *ctx, const fattn_tensor *d, bool fresh, const fattn_tensor *x, void *workspace);
} fattni_product_code;

typedef struct fattni_op_device {
    const fattni_element_code *elements;
    const fattni_product_code *products;
    const fattni_code *code[FATTNI_CODED];
} fattni_op_device;

const fattni_op_device *fattni_op_device_of(const fattn_ctx *ctx);

static inline const fattni_code *fattni_code_of(const fattn_op_call *c, enum fattni_coded op) {
    return fattni_op_device_of(c->ctx)->code[op];
}

/* d (+)= value in every element. */
fattn_status fattni_fill(fattn_ctx *ctx, const fattn_tensor *d, double value, bool fresh);
/* d = x when fresh, else d += x. Same shape, floating dtypes, any strides. */
fattn_status fattni_accumulate(fattn_ctx *ctx, const fattn_tensor *d, const fattn_tensor *x, bool fresh);

#endif
