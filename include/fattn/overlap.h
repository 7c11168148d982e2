/* fattn/overlap.h - a host that works while its device does: memory that both reach, and marks that tell how far the
   device has come. A CPU's calls are done when they return: there the same code runs, and waits for nothing. */
#ifndef FATTN_OVERLAP_H
#define FATTN_OVERLAP_H

#include <fattn/tensor.h>

/* As fattn_tensor_alloc, but in the host's memory, where the GPU reaches it by itself: page-locked, beside the
   context's allocator and counters. The tensor is one of the context's device, so that fattn_tensor_copy from or to it
   only enqueues, and can be recorded (fattn/graph.h); the host reads and writes its elements through data, while no
   enqueued call does. Kernels reach it slowly: copy it. On the CPU it is memory like any other. Errors: ARG, DTYPE,
   NOMEM; STATE: ctx is recording a graph. */
FATTN_API FATTN_CHECKED fattn_status fattn_pinned_alloc(fattn_ctx *ctx, fattn_dtype t, int ndim, const int64_t *shape,
                                                        fattn_tensor *out);
/* Frees a tensor of fattn_pinned_alloc, which must be unchanged, and which no enqueued call uses any more. Sets data to
   NULL; data NULL is allowed. */
FATTN_API void fattn_pinned_free(fattn_ctx *ctx, fattn_tensor *t);

typedef struct fattn_mark fattn_mark;
FATTN_API FATTN_CHECKED fattn_status fattn_mark_create(fattn_ctx *ctx, fattn_mark **out); /* ARG, NOMEM, CUDA */
/* Behind all that is enqueued so far; where it stood before is forgotten. ARG, CUDA. STATE: ctx is recording. */
FATTN_API FATTN_CHECKED fattn_status fattn_mark_set(fattn_ctx *ctx, fattn_mark *m);
/* Blocks until what was enqueued before the mark is done, not what came later; returns at once from a mark that was
   never set. Reports faults of the device. ARG, CUDA. STATE: ctx is recording a graph. */
FATTN_API FATTN_CHECKED fattn_status fattn_mark_wait(fattn_ctx *ctx, const fattn_mark *m);
FATTN_API void fattn_mark_destroy(fattn_ctx *ctx, fattn_mark *m); /* the context that made it; NULL is allowed */

#endif
