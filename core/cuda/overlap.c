/* With unified addressing page-locked memory has one address for the host and for every device. */
#include "core/cuda/overlap.h"

#include "core/cuda/launch.h"

#include <cuda_runtime_api.h>

fattn_status fattni_cuda_pinned_alloc(fattn_ctx *ctx, size_t bytes, void **out) {
    bool entered;
    FATTNI_TRY(fattni_cuda_enter(ctx, &entered));
    const cudaError_t error = cudaHostAlloc(out, bytes, cudaHostAllocDefault);
    if (error) cudaGetLastError(); /* clears the pending error */
    fattni_cuda_leave(ctx, entered);
    if (error == cudaErrorMemoryAllocation)
        return fattn_ctx_fail(ctx, FATTN_E_NOMEM, "no page-locked memory for %zu bytes", bytes);
    return fattni_cuda_check(ctx, error, "cudaHostAlloc");
}

void fattni_cuda_pinned_free(fattn_ctx *ctx, void *p) {
    bool entered;
    if (fattni_cuda_enter(ctx, &entered) != FATTN_OK) entered = false; /* free all the same */
    cudaFreeHost(p);
    fattni_cuda_leave(ctx, entered);
}

fattn_status fattni_cuda_mark_create(fattn_ctx *ctx, void **event) {
    bool entered;
    cudaEvent_t made = NULL;
    FATTNI_TRY(fattni_cuda_enter(ctx, &entered));
    const cudaError_t error = cudaEventCreateWithFlags(&made, cudaEventDisableTiming);
    fattni_cuda_leave(ctx, entered);
    *event = made;
    return fattni_cuda_check(ctx, error, "cudaEventCreateWithFlags");
}

fattn_status fattni_cuda_mark_set(fattn_ctx *ctx, void *event) {
    bool entered;
    FATTNI_TRY(fattni_cuda_enter(ctx, &entered));
    const cudaError_t error = cudaEventRecord(event, ctx->stream);
    fattni_cuda_leave(ctx, entered);
    return fattni_cuda_check(ctx, error, "cudaEventRecord");
}

fattn_status fattni_cuda_mark_wait(fattn_ctx *ctx, void *event) {
    bool entered;
    FATTNI_TRY(fattni_cuda_enter(ctx, &entered));
    const cudaError_t error = cudaEventSynchronize(event);
    fattni_cuda_leave(ctx, entered);
    return fattni_cuda_check(ctx, error, "cudaEventSynchronize");
}

void fattni_cuda_mark_destroy(fattn_ctx *ctx, void *event) {
    bool entered;
    if (fattni_cuda_enter(ctx, &entered) != FATTN_OK) entered = false; /* free all the same */
    cudaEventDestroy(event);
    fattni_cuda_leave(ctx, entered);
}

fattn_status fattni_cuda_stream_create(fattn_ctx *ctx, fattn_stream *out) {
    bool entered;
    FATTNI_TRY(fattni_cuda_enter(ctx, &entered));
    const cudaError_t error = cudaStreamCreateWithFlags(out, cudaStreamNonBlocking);
    fattni_cuda_leave(ctx, entered);
    return fattni_cuda_check(ctx, error, "cudaStreamCreateWithFlags");
}

fattn_status fattni_cuda_stream_order(fattn_ctx *ctx, fattn_stream first, fattn_stream then) {
    bool entered;
    cudaEvent_t event = NULL;
    FATTNI_TRY(fattni_cuda_enter(ctx, &entered));
    cudaError_t error = cudaEventCreateWithFlags(&event, cudaEventDisableTiming);
    if (!error) error = cudaEventRecord(event, first);
    if (!error) error = cudaStreamWaitEvent(then, event, 0);
    if (event) cudaEventDestroy(event); /* its memory stays until the wait is over */
    fattni_cuda_leave(ctx, entered);
    return fattni_cuda_check(ctx, error, "cudaStreamWaitEvent");
}

void fattni_cuda_stream_destroy(fattn_ctx *ctx, fattn_stream s) {
    bool entered;
    if (fattni_cuda_enter(ctx, &entered) != FATTN_OK) entered = false; /* free all the same */
    cudaStreamDestroy(s);
    fattni_cuda_leave(ctx, entered);
}
