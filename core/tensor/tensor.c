/* Views, and the checks before a device copies, adds or fills tensors of any dtype and strides. */
#include "core/base/device.h"

#include <fattn/overlap.h>
#include <math.h>
#include <stdio.h>

size_t fattn_dtype_size(fattn_dtype t) {
    switch (t) {
    case FATTN_F64: return 8;
    case FATTN_F32:
    case FATTN_I32: return 4;
    case FATTN_F16:
    case FATTN_BF16: return 2;
    case FATTN_U8:
    case FATTN_F8E4M3:
    case FATTN_I8: return 1;
    default: return 0;
    }
}

const char *fattn_dtype_name(fattn_dtype t) {
    switch (t) {
    case FATTN_F64: return "f64";
    case FATTN_F32: return "f32";
    case FATTN_F16: return "f16";
    case FATTN_BF16: return "bf16";
    case FATTN_I32: return "i32";
    case FATTN_U8: return "u8";
    case FATTN_F8E4M3: return "f8e4m3";
    case FATTN_I8: return "i8";
    default: return "?";
    }
}

int64_t fattn_tensor_numel(const fattn_tensor *t) {
    int64_t n = 1;
    for (int d = 0; d < t->ndim; ++d)
        if (t->shape[d] == 0) return 0; /* before the product of the others overflows */
    for (int d = 0; d < t->ndim; ++d)
        if (__builtin_mul_overflow(n, t->shape[d], &n)) return INT64_MAX; /* saturates */
    return n;
}

fattn_tensor fattn_tensor_view(void *data, fattn_dtype t, fattn_device dev, int32_t id, int ndim,
                               const int64_t *shape) {
    fattn_tensor v = {.data = data, .ndim = ndim, .dtype = t, .device = dev, .device_id = id};
    uint64_t stride = 1; /* may wrap, where another dimension is 0 and no element is reached */
    for (int d = ndim - 1; d >= 0; --d) {
        v.shape[d] = shape[d];
        v.stride[d] = (int64_t)stride;
        stride *= (uint64_t)shape[d];
    }
    return v;
}

fattn_tensor fattn_tensor_permute(const fattn_tensor *t, const int *order) {
    fattn_tensor v = *t;
    for (int d = 0; d < t->ndim; ++d) {
        v.shape[d] = t->shape[order[d]];
        v.stride[d] = t->stride[order[d]];
    }
    return v;
}

fattn_tensor fattn_tensor_slice(const fattn_tensor *t, int dim, int64_t begin, int64_t end) {
    fattn_tensor v = *t;
    begin = fattni_max(0, fattni_min(begin, t->shape[dim]));
    end = fattni_max(begin, fattni_min(end, t->shape[dim]));
    v.shape[dim] = end - begin;
    /* Strides of empty tensors are not read; an empty part stays where t is, not behind its end. */
    if (begin > 0 && fattn_tensor_numel(&v) > 0)
        v.data = (char *)t->data + begin * t->stride[dim] * (int64_t)fattn_dtype_size((fattn_dtype)t->dtype);
    return v;
}

bool fattni_is_row_major(const fattn_tensor *t) {
    int64_t stride = 1;
    if (fattn_tensor_numel(t) == 0) return true;
    for (int d = t->ndim - 1; d >= 0; --d) {
        if (t->shape[d] > 1 && t->stride[d] != stride) return false;
        stride *= t->shape[d];
    }
    return true;
}

bool fattni_bytes(int64_t count, size_t element, size_t *out) {
    return !__builtin_mul_overflow((size_t)count, element, out) && *out <= (size_t)PTRDIFF_MAX;
}

const char *fattni_shape_text(const fattn_tensor *t, char *buffer, size_t size) {
    size_t used = (size_t)snprintf(buffer, size, "[");
    for (int d = 0; d < t->ndim && d < FATTN_MAX_DIMS && used < size; ++d)
        used += (size_t)snprintf(buffer + used, size - used, "%s%lld", d ? "," : "", (long long)t->shape[d]);
    if (used < size) snprintf(buffer + used, size - used, "]");
    return buffer;
}

fattn_status fattni_check_tensor(fattn_ctx *ctx, const char *name, const fattn_tensor *t) {
    if (!t) return fattn_ctx_fail(ctx, FATTN_E_ARG, "%s: NULL, but it is required", name);
    if (t->ndim < 0 || t->ndim > FATTN_MAX_DIMS)
        return fattn_ctx_fail(ctx, FATTN_E_SHAPE, "%s: ndim %d is not in 0..%d", name, t->ndim, FATTN_MAX_DIMS);
    const size_t size = fattn_dtype_size((fattn_dtype)t->dtype);
    if (!size) return fattn_ctx_fail(ctx, FATTN_E_DTYPE, "%s: unknown dtype %d", name, t->dtype);
    if (t->device != (int32_t)ctx->device || t->device_id != ctx->device_id)
        return fattn_ctx_fail(ctx, FATTN_E_DEVICE, "%s: is on device %d:%d, the context on %d:%d", name, t->device,
                              t->device_id, (int)ctx->device, ctx->device_id);
    int64_t count = 1, reach = 0;
    bool fits = true;
    for (int d = 0; d < t->ndim; ++d) {
        if (t->shape[d] < 0)
            return fattn_ctx_fail(ctx, FATTN_E_SHAPE, "%s: shape[%d] is %lld", name, d, (long long)t->shape[d]);
        if (t->shape[d] == 0) count = 0;
    }
    for (int d = 0; d < t->ndim && count; ++d) {
        int64_t span;
        fits = fits && !__builtin_mul_overflow(count, t->shape[d], &count) &&
               (t->shape[d] <= 1 ||
                (t->stride[d] != INT64_MIN &&
                 !__builtin_mul_overflow(t->shape[d] - 1, t->stride[d] < 0 ? -t->stride[d] : t->stride[d], &span) &&
                 !__builtin_add_overflow(reach, span, &reach)));
    }
    const int64_t limit = INT64_MAX / 2 / (int64_t)size;
    if (!fits || count > limit || reach > limit)
        return fattn_ctx_fail(ctx, FATTN_E_SHAPE, "%s: its extent does not fit in 62 bits", name);
    if (count && !t->data)
        return fattn_ctx_fail(ctx, FATTN_E_ARG, "%s: data is NULL, but it has %lld elements", name, (long long)count);
    if (count && (uintptr_t)t->data % size)
        return fattn_ctx_fail(ctx, FATTN_E_ARG, "%s: data %p is not aligned to its %zu-byte elements", name, t->data,
                              size);
    return FATTN_OK;
}

/* The bytes of a new tensor. who: in error messages. */
static fattn_status size_new(fattn_ctx *ctx, const char *who, fattn_dtype t, int ndim, const int64_t *shape,
                             const fattn_tensor *out, size_t *bytes) {
    if (!out || (ndim > 0 && !shape)) return fattn_ctx_fail(ctx, FATTN_E_ARG, "%s: out or shape is NULL", who);
    if (ndim < 0 || ndim > FATTN_MAX_DIMS)
        return fattn_ctx_fail(ctx, FATTN_E_ARG, "%s: ndim %d is not in 0..%d", who, ndim, FATTN_MAX_DIMS);
    const size_t size = fattn_dtype_size(t);
    if (!size) return fattn_ctx_fail(ctx, FATTN_E_DTYPE, "%s: unknown dtype %d", who, (int)t);
    bool empty = false, fits = true;
    for (int d = 0; d < ndim; ++d) {
        if (shape[d] < 0) return fattn_ctx_fail(ctx, FATTN_E_ARG, "%s: shape[%d] is %lld", who, d, (long long)shape[d]);
        if (shape[d] == 0) empty = true;
    }
    int64_t count = empty ? 0 : 1;
    for (int d = 0; d < ndim && !empty; ++d) fits = fits && !__builtin_mul_overflow(count, shape[d], &count);
    if (!fits || !fattni_bytes(count, size, bytes))
        return fattn_ctx_fail(ctx, FATTN_E_NOMEM, "%s: the byte count overflows", who);
    return FATTN_OK;
}

fattn_status fattn_tensor_alloc(fattn_ctx *ctx, fattn_dtype t, int ndim, const int64_t *shape, fattn_tensor *out) {
    if (!ctx) return FATTN_E_ARG;
    size_t bytes = 0;
    void *data;
    FATTNI_TRY(size_new(ctx, "tensor_alloc", t, ndim, shape, out, &bytes));
    FATTNI_TRY(fattni_alloc(ctx, bytes, &data));
    *out = fattn_tensor_view(data, t, ctx->device, ctx->device_id, ndim, shape);
    return FATTN_OK;
}

static size_t bytes_of(const fattn_tensor *t) {
    return (size_t)fattn_tensor_numel(t) * fattn_dtype_size((fattn_dtype)t->dtype);
}

void fattn_tensor_free(fattn_ctx *ctx, fattn_tensor *t) {
    if (!ctx || !t || !t->data) return;
    fattni_free(ctx, t->data, bytes_of(t));
    t->data = NULL;
}

fattn_status fattn_pinned_alloc(fattn_ctx *ctx, fattn_dtype t, int ndim, const int64_t *shape, fattn_tensor *out) {
    if (!ctx) return FATTN_E_ARG;
    size_t bytes = 0;
    void *data = NULL;
    FATTNI_TRY(size_new(ctx, "pinned_alloc", t, ndim, shape, out, &bytes));
    if (ctx->recording)
        return fattn_ctx_fail(ctx, FATTN_E_STATE, "pinned_alloc: %zu bytes are asked for while a graph is recorded",
                              bytes);
    if (!ctx->ops->pinned_alloc) FATTNI_TRY(fattni_alloc(ctx, bytes, &data));
    if (ctx->ops->pinned_alloc && bytes) FATTNI_TRY(ctx->ops->pinned_alloc(ctx, bytes, &data));
    *out = fattn_tensor_view(data, t, ctx->device, ctx->device_id, ndim, shape);
    return FATTN_OK;
}

void fattn_pinned_free(fattn_ctx *ctx, fattn_tensor *t) {
    if (!ctx || !t || !t->data) return;
    if (ctx->ops->pinned_free)
        ctx->ops->pinned_free(ctx, t->data);
    else
        fattni_free(ctx, t->data, bytes_of(t));
    t->data = NULL;
}

static bool on_host(const fattn_tensor *t) { return t->device == FATTN_CPU; }

/* With arithmetic: not an integer, and not what only fattn/fp8.h and copies have. */
static bool is_float(const fattn_tensor *t) { return t->dtype >= FATTN_F64 && t->dtype <= FATTN_BF16; }

/* A copy may also read or write host memory. */
static fattn_status check_anywhere(fattn_ctx *ctx, const char *name, const fattn_tensor *t) {
    if (!t || !on_host(t)) return fattni_check_tensor(ctx, name, t);
    fattn_tensor here = *t;
    here.device = (int32_t)ctx->device;
    if (ctx->device != FATTN_CPU) here.device_id = ctx->device_id;
    return fattni_check_tensor(ctx, name, &here);
}

static fattn_status check_writable(fattn_ctx *ctx, const char *name, const fattn_tensor *t) {
    FATTNI_TRY(check_anywhere(ctx, name, t));
    const bool empty = fattn_tensor_numel(t) == 0; /* its strides are not read */
    for (int d = 0; d < t->ndim && !empty; ++d)
        if (t->shape[d] > 1 && t->stride[d] == 0)
            return fattn_ctx_fail(ctx, FATTN_E_SHAPE, "%s: stride[%d] is 0: several elements share one address", name,
                                  d);
    return FATTN_OK;
}

static fattn_status check_shapes(fattn_ctx *ctx, const char *who, const fattn_tensor *dst, const fattn_tensor *src) {
    bool same = dst->ndim == src->ndim;
    for (int d = 0; same && d < dst->ndim; ++d) same = dst->shape[d] == src->shape[d];
    char a[96], b[96];
    if (same) return FATTN_OK;
    return fattn_ctx_fail(ctx, FATTN_E_SHAPE, "%s: dst is %s, src is %s", who, fattni_shape_text(dst, a, sizeof a),
                          fattni_shape_text(src, b, sizeof b));
}

fattn_status fattn_tensor_copy(fattn_ctx *ctx, const fattn_tensor *dst, const fattn_tensor *src) {
    if (!ctx) return FATTN_E_ARG;
    FATTNI_TRY(check_writable(ctx, "dst", dst));
    FATTNI_TRY(check_anywhere(ctx, "src", src));
    FATTNI_TRY(check_shapes(ctx, "tensor_copy", dst, src));
    if (fattn_tensor_numel(dst) == 0) return FATTN_OK;
    return ctx->ops->copy(ctx, dst, src);
}

fattn_status fattn_tensor_add(fattn_ctx *ctx, const fattn_tensor *dst, const fattn_tensor *src) {
    if (!ctx) return FATTN_E_ARG;
    FATTNI_TRY(check_writable(ctx, "dst", dst));
    FATTNI_TRY(fattni_check_tensor(ctx, "dst", dst));
    FATTNI_TRY(fattni_check_tensor(ctx, "src", src));
    const fattn_tensor *const both[] = {dst, src};
    for (int n = 0; n < 2; ++n)
        if (!is_float(both[n]))
            return fattn_ctx_fail(ctx, FATTN_E_DTYPE, "tensor_add: %s is %s, not f64, f32, f16 or bf16",
                                  n ? "src" : "dst", fattn_dtype_name((fattn_dtype)both[n]->dtype));
    FATTNI_TRY(check_shapes(ctx, "tensor_add", dst, src));
    if (fattn_tensor_numel(dst) == 0) return FATTN_OK;
    return ctx->ops->add(ctx, dst, src);
}

fattn_status fattn_tensor_normal(fattn_ctx *ctx, const fattn_tensor *dst, double mean, double std, fattn_rng rng) {
    if (!ctx) return FATTN_E_ARG;
    FATTNI_TRY(check_writable(ctx, "dst", dst));
    if (!is_float(dst))
        return fattn_ctx_fail(ctx, FATTN_E_DTYPE, "tensor_normal: dst is %s, not f64, f32, f16 or bf16",
                              fattn_dtype_name((fattn_dtype)dst->dtype));
    if (!(isfinite(mean) && isfinite(std) && std >= 0))
        return fattn_ctx_fail(ctx, FATTN_E_ARG, "tensor_normal: mean %g, std %g", mean, std);
    if (rng.reserved) return fattn_ctx_fail(ctx, FATTN_E_ARG, "tensor_normal: rng.reserved is %u, not 0", rng.reserved);
    if (fattn_tensor_numel(dst) == 0) return FATTN_OK;
    return ctx->ops->normal(ctx, dst, mean, std, rng);
}
