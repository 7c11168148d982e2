/* Ops whose result is a view of their input, or a copy where the input's elements share addresses. */
#ifndef FATTNI_AUTOGRAD_OPS_SHAPE_PART_H
#define FATTNI_AUTOGRAD_OPS_SHAPE_PART_H

#include "autograd_c/ops/ops.h"
#include "autograd_c/tape/tape_nodes.h"

/* out[0] = view, a view of in[0]; without an address if its elements overlap: then forward copies. */
static inline fattn_status fattni_part_infer(fattn_op_call *c, const fattn_tensor *view) {
    fattn_tensor *const y = &c->out[0];
    *y = *view;
    if (!fattni_elements_overlap(view)) return FATTN_OK;
    y->data = NULL;
    for (int d = 0; d < y->ndim; ++d) y->stride[d] = 0; /* row-major */
    return FATTN_OK;
}

/* Never has work: an x with a gradient is viewed, or is empty. An empty y is no view, and without a backward it would
   not count as depending on x. */
static inline fattn_status fattni_part_backward(fattn_op_call *c) {
    (void)c;
    return FATTN_OK;
}

#endif
