/* Whether tensors of a call share memory, as far as addresses prove it. */
#ifndef FATTNI_CORE_TENSOR_SPANS_H
#define FATTNI_CORE_TENSOR_SPANS_H

#include "core/base/internal.h"

typedef struct fattni_span {
    const char *name;
    uintptr_t begin, end; /* of all bytes between the lowest and the highest element */
    uintptr_t dense;      /* so many bytes at each end are elements without gaps: all of a dense tensor */
} fattni_span;

/* Of a tensor that is not empty; strides of dimensions with one element are not read. */
fattni_span fattni_span_of(const char *name, const void *p, size_t element, int ndim, const int64_t *shape,
                           const int64_t *stride);

/* Appends a tensor's to all[*n]; nothing for NULL and for a tensor without elements. */
void fattni_add_span(fattni_span *all, int *n, const char *name, const fattn_tensor *t);

/* FATTN_E_ARG with both names and ranges when one of the first `written` shares memory with another one. The ranges
   of strided tensors may intersect: slices of one buffer are allowed. */
fattn_status fattni_check_spans(fattn_ctx *ctx, const fattni_span *all, int written, int n);

#endif
