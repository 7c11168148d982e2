/* The functions of a device: one const table for each device, listed in devices.c and defined in the device's own
   folder (core/cpu/device.c, core/cuda/device.c). The tape's functions are in autograd_c/ops/op_device.h. */
#ifndef FATTNI_CORE_BASE_DEVICE_H
#define FATTNI_CORE_BASE_DEVICE_H

#include "core/base/internal.h"

#include <fattn/graph.h>

struct fattni_problem;
struct fattni_kv_append;
struct fattni_sample;
struct fattni_fp8;

/* to = from: of equal shapes and dtypes, on the device, without overlap. */
typedef struct fattni_copy_pair {
    fattn_tensor to, from;
} fattni_copy_pair;

typedef struct fattni_device_ops {
    const char *name; /* "CPU", in error messages */
    bool on_host;     /* its memory is host memory, which then also holds the context and its records */
    bool has_streams; /* false: the stream must be NULL and device_id 0 */

    /* ---- contexts ---- */
    fattn_allocator (*default_allocator)(void);
    /* Completes a context whose options are set. After a failure, close frees what it has allocated. */
    fattn_status (*open)(fattn_ctx *ctx);
    void (*close)(fattn_ctx *ctx);
    fattn_status (*sync)(fattn_ctx *ctx);                               /* fattn_ctx_sync */
    fattn_status (*describe)(fattn_ctx *ctx, char *text, size_t bytes); /* fattn_ctx_describe */
    /* Around calls of an allocator: make the device current for the calling thread, and restore. They nest;
       leave gets the value of entered that enter stored. */
    fattn_status (*enter)(fattn_ctx *ctx, bool *entered);
    void (*leave)(const fattn_ctx *ctx, bool entered);

    /* Before attention on tensors of this dtype, or a product of them; may be NULL. */
    void (*use)(fattn_ctx *ctx, fattn_dtype dtype);

    /* ---- tensors: checked by the caller, not empty, on the device unless stated otherwise ---- */
    /* fattn_tensor_copy: either may be in host memory. */
    fattn_status (*copy)(fattn_ctx *ctx, const fattn_tensor *dst, const fattn_tensor *src);
    fattn_status (*add)(fattn_ctx *ctx, const fattn_tensor *dst, const fattn_tensor *src);
    /* Some copies at once, in any order; tensors may be empty. */
    fattn_status (*copy_pairs)(fattn_ctx *ctx, const fattni_copy_pair *pairs, int n);
    /* fattn_tensor_normal: dst may be in host memory. */
    fattn_status (*normal)(fattn_ctx *ctx, const fattn_tensor *dst, double mean, double std, fattn_rng rng);
    /* Sets `rows` times `width` bytes, `pitch` bytes apart, to zero; each of the three may be 0. */
    fattn_status (*zero_rows)(fattn_ctx *ctx, void *p, size_t pitch, size_t width, int64_t rows);
    /* The dropout mask: keep[b,h,i,j] = 1 or 0 for i < rows, j < columns of every plane; strides in elements. */
    fattn_status (*dropout_mask)(fattn_ctx *ctx, const struct fattni_problem *p, uint8_t *keep, const int64_t stride[4],
                                 int64_t rows, int64_t columns);
    /* fattn_kv_append; there is a sequence. */
    fattn_status (*kv_append)(fattn_ctx *ctx, const struct fattni_kv_append *a);
    /* fattn_sample; there is a row. */
    fattn_status (*sample)(fattn_ctx *ctx, const struct fattni_sample *a);
    /* Fills the 8-bit copies of a forward call with FATTN_FP8 (core/fp8/fp8.h); tensors may be empty. */
    fattn_status (*fp8_quantize)(fattn_ctx *ctx, const struct fattni_problem *p, const struct fattni_fp8 *to);

    /* fattn_graph_begin to _destroy, in this state; all NULL: the device has no graphs. begin puts the stream that is
       recorded into ctx->stream, end, also after a failure, the one before. */
    fattn_status (*graph_begin)(fattn_ctx *ctx);
    fattn_status (*graph_end)(fattn_ctx *ctx, fattn_graph **out);
    fattn_status (*graph_launch)(fattn_ctx *ctx, const fattn_graph *g);
    void (*graph_destroy)(fattn_ctx *ctx, fattn_graph *g);

    /* Memory of fattn_pinned_alloc, and what a fattn_mark is for the device; all NULL: memory is the host's anyway, and
       calls are done when they return. */
    fattn_status (*pinned_alloc)(fattn_ctx *ctx, size_t bytes, void **out);
    void (*pinned_free)(fattn_ctx *ctx, void *p);
    fattn_status (*mark_create)(fattn_ctx *ctx, void **event);
    fattn_status (*mark_set)(fattn_ctx *ctx, void *event);
    fattn_status (*mark_wait)(fattn_ctx *ctx, void *event);
    void (*mark_destroy)(fattn_ctx *ctx, void *event);

    /* Streams beside the context's; all NULL without streams. order: what is enqueued on `then` from now on runs after
       what `first` has. */
    fattn_status (*stream_create)(fattn_ctx *ctx, fattn_stream *out);
    fattn_status (*stream_order)(fattn_ctx *ctx, fattn_stream first, fattn_stream then);
    void (*stream_destroy)(fattn_ctx *ctx, fattn_stream s);
} fattni_device_ops;

/* NULL: this build has no code for the device. */
const fattni_device_ops *fattni_device_ops_of(fattn_device device);

#endif
