/* Devices behind the tape's ops.

   Most ops are made of a few primitives that know their device: elements, sums, products (ops.h)
   and copies. Ops with loops of their own have them once per device: a fattni_code each, and one
   line in op_device.c that names both. Checks and shapes are the op's own, whatever the device. */
#ifndef FATTNI_AUTOGRAD_OPS_OP_DEVICE_H
#define FATTNI_AUTOGRAD_OPS_OP_DEVICE_H

#include "autograd_c/ops/elementwise/elementwise.h"
#include "core/base/internal.h"

#include <fattn/tape.h>

typedef struct fattni_code {
    void (*plan)(fattn_op_call *c); /* at the end of infer: saved_bytes and workspaces */
    fattn_status (*forward)(fattn_op_call *c);
    fattn_status (*backward)(fattn_op_call *c); /* gradients' dtypes have been checked */
} fattni_code;

enum fattni_coded {
    FATTNI_NORM, FATTNI_ROPE, FATTNI_EMBEDDING, FATTNI_CROSS_ENTROPY, FATTNI_LINEAR_CROSS_ENTROPY
};
const fattni_code *fattni_code_of(const fattn_op_call *c, enum fattni_coded op);

#ifdef FATTNI_HAVE_CUDA
fattn_status fattni_cuda_each(fattn_ctx *ctx, enum fattni_element what,
                              const fattn_tensor *const *t, int operands, bool fresh, double value);
size_t fattni_cuda_reduce_workspace(const fattn_tensor *d, const fattn_tensor *x);
fattn_status fattni_cuda_reduce(fattn_ctx *ctx, const fattn_tensor *d, bool fresh,
                                const fattn_tensor *x, const fattn_tensor *y, void *workspace);
#endif

/* `rows` times `width` bytes, `pitch` apart, become zero; bytes of a context's memory. */
fattn_status fattni_zero(fattn_ctx *ctx, void *p, size_t pitch, size_t width, int64_t rows);
/* d (+)= value in every element. */
fattn_status fattni_fill(fattn_ctx *ctx, const fattn_tensor *d, double value, bool fresh);
/* d = x when fresh, else d += x. Same shape, floating dtypes, any strides. */
fattn_status fattni_accumulate(fattn_ctx *ctx, const fattn_tensor *d, const fattn_tensor *x,
                               bool fresh);

#endif
