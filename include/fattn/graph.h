/* fattn/graph.h - calls recorded once and launched again as a whole: CUDA graphs. On a GPU a step of many small
   kernels, as one token of decoding, then costs one launch. What a step depends on and changes must be in device
   memory, as the lengths of fattn/kv_cache.h. Code that uses CUDA itself may capture the context's stream instead. */
#ifndef FATTN_GRAPH_H
#define FATTN_GRAPH_H

#include <fattn/context.h>

typedef struct fattn_graph fattn_graph;

/* From here on what calls with ctx enqueue is recorded and does not run. Meanwhile memory cannot be allocated (STATE),
   and must not be freed, nor copied from or to the host, and no call may wait for the device: run the same calls once
   before, which also loads their kernels; a tape is reset after that, and not again while the graph is in use. Whether
   the context has a stream of its own or the default one does not matter: the recording has another, and must not be
   interrupted by fattn_ctx_set_stream. UNSUPPORTED: the CPU. STATE: ctx is recording. CUDA. */
FATTN_API FATTN_CHECKED fattn_status fattn_graph_begin(fattn_ctx *ctx);
/* Ends the recording, also after a failure of a recorded call; on failure *out is NULL. ARG. STATE: ctx is not
   recording. CUDA: among others, a call did what cannot be recorded. NOMEM. */
FATTN_API FATTN_CHECKED fattn_status fattn_graph_end(fattn_ctx *ctx, fattn_graph **out);
/* Enqueues what was recorded, with the addresses and numbers of then, on the context's stream of now. ARG. STATE: ctx
   is recording. CUDA. */
FATTN_API FATTN_CHECKED fattn_status fattn_graph_launch(fattn_ctx *ctx, const fattn_graph *g);
/* The context that recorded it. NULL is allowed; a launch that runs is completed. */
FATTN_API void fattn_graph_destroy(fattn_ctx *ctx, fattn_graph *g);

#endif
