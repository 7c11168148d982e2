#include "core/tensor/spans.h"

/* Elements in a row without gaps, in the order of memory. */
static int64_t run_of(int ndim, const int64_t *shape, const int64_t *stride) {
    int64_t run = 1;
    for (int d = ndim - 1; d >= 0; --d) {
        if (shape[d] <= 1 || (stride[d] != run && stride[d] != -run)) continue;
        run *= shape[d];
        d = ndim; /* any dimension may be the next */
    }
    return run;
}

fattni_span fattni_span_of(const char *name, const void *p, size_t element, int ndim, const int64_t *shape,
                           const int64_t *stride) {
    int64_t before = 0, after = 1;
    for (int d = 0; d < ndim; ++d) {
        if (shape[d] <= 1) continue;
        if (stride[d] < 0)
            before -= (shape[d] - 1) * stride[d];
        else
            after += (shape[d] - 1) * stride[d];
    }
    const uintptr_t at = (uintptr_t)p;
    return (fattni_span){.name = name,
                         .begin = at - (uintptr_t)before * element,
                         .end = at + (uintptr_t)after * element,
                         .dense = (uintptr_t)run_of(ndim, shape, stride) * element};
}

void fattni_add_span(fattni_span *all, int *n, const char *name, const fattn_tensor *t) {
    if (!t || fattn_tensor_numel(t) == 0) return;
    const size_t size = fattn_dtype_size((fattn_dtype)t->dtype);
    all[(*n)++] = fattni_span_of(name, t->data, size, t->ndim, t->shape, t->stride);
}

/* Whether a dense end of a overlaps one of b. */
static bool share_memory(const fattni_span *a, const fattni_span *b) {
    const uintptr_t of_a[2] = {a->begin, a->end - a->dense}, of_b[2] = {b->begin, b->end - b->dense};
    for (int n = 0; n < 4; ++n)
        if (of_a[n / 2] < of_b[n % 2] + b->dense && of_b[n % 2] < of_a[n / 2] + a->dense) return true;
    return false;
}

fattn_status fattni_check_spans(fattn_ctx *ctx, const fattni_span *all, int written, int n) {
    for (int i = 0; i < written; ++i)
        for (int j = i + 1; j < n; ++j) {
            const fattni_span *const a = &all[i], *const b = &all[j];
            if (a->end <= b->begin || b->end <= a->begin || !share_memory(a, b)) continue;
            return fattn_ctx_fail(ctx, FATTN_E_ARG, "%s and %s overlap: bytes 0x%llx..0x%llx and 0x%llx..0x%llx",
                                  a->name, b->name, (unsigned long long)a->begin, (unsigned long long)a->end - 1,
                                  (unsigned long long)b->begin, (unsigned long long)b->end - 1);
        }
    return FATTN_OK;
}
