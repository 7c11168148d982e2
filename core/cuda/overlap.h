/* Page-locked memory, events and streams: fattni_device_ops.pinned_*, mark_*, stream_* (core/base/device.h). */
#ifndef FATTNI_CORE_CUDA_OVERLAP_H
#define FATTNI_CORE_CUDA_OVERLAP_H

#include "core/base/internal.h"

fattn_status fattni_cuda_pinned_alloc(fattn_ctx *ctx, size_t bytes, void **out);
void fattni_cuda_pinned_free(fattn_ctx *ctx, void *p);
fattn_status fattni_cuda_mark_create(fattn_ctx *ctx, void **event);
fattn_status fattni_cuda_mark_set(fattn_ctx *ctx, void *event);
fattn_status fattni_cuda_mark_wait(fattn_ctx *ctx, void *event);
void fattni_cuda_mark_destroy(fattn_ctx *ctx, void *event);
fattn_status fattni_cuda_stream_create(fattn_ctx *ctx, fattn_stream *out);
fattn_status fattni_cuda_stream_order(fattn_ctx *ctx, fattn_stream first, fattn_stream then);
void fattni_cuda_stream_destroy(fattn_ctx *ctx, fattn_stream s);

#endif
