/* A strided tensor as rows: the last dimension, and a row-major count over all others. */
#ifndef FATTNI_CORE_TENSOR_ROWS_H
#define FATTNI_CORE_TENSOR_ROWS_H

#include "core/base/internal.h"

/* The stride of dimension d, 0 where there is one element, or the tensor has none: what callers leave there counts
   for nothing. */
static inline int64_t fattni_step(const fattn_tensor *t, int d) {
    return t->shape[d] > 1 && fattn_tensor_numel(t) > 0 ? t->stride[d] : 0;
}

typedef struct fattni_rows {
    int64_t count, columns;
    int64_t step; /* from element to element of a row; 1 when a row has at most one */
    int n;        /* leading dimensions, after merging those that one stride covers; at least 1 */
    int64_t shape[FATTN_MAX_DIMS], stride[FATTN_MAX_DIMS];
} fattni_rows;

static inline fattni_rows fattni_rows_of(const fattn_tensor *t) {
    const int last = t->ndim - 1;
    fattni_rows r = {.count = 1, .columns = last >= 0 ? t->shape[last] : 1, .step = 1};
    for (int d = 0; d < last; ++d) r.count *= t->shape[d];
    if (r.columns > 1) r.step = t->stride[last];
    for (int d = 0; d < last && r.count > 0; ++d) {
        if (t->shape[d] == 1) continue;
        const int outer = r.n - 1;
        if (outer >= 0 && r.stride[outer] == t->shape[d] * t->stride[d]) {
            r.shape[outer] *= t->shape[d];
            r.stride[outer] = t->stride[d];
        } else {
            r.shape[r.n] = t->shape[d];
            r.stride[r.n++] = t->stride[d];
        }
    }
    if (r.n == 0) {
        r.shape[0] = 1;
        r.stride[0] = r.columns;
        r.n = 1;
    }
    return r;
}

/* Offset of row `row`, in elements. */
static inline int64_t fattni_row(const fattni_rows *r, int64_t row) {
    int64_t offset = 0;
    for (int d = r->n - 1; d > 0; --d) {
        offset += row % r->shape[d] * r->stride[d];
        row /= r->shape[d];
    }
    return offset + row * r->stride[0];
}

#endif
