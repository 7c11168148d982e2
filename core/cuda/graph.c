/* A recording is a capture of a stream that is made for it, since the default stream cannot be captured. Only calls of
   this thread that a capture forbids fail: other threads may allocate meanwhile. */
#include "core/cuda/graph.h"

#include "core/cuda/launch.h"

#include <cuda_runtime_api.h>

struct fattn_graph {
    cudaGraphExec_t run;
};

fattn_status fattni_cuda_graph_begin(fattn_ctx *ctx) {
    bool entered;
    cudaStream_t stream = NULL;
    FATTNI_TRY(fattni_cuda_enter(ctx, &entered));
    cudaError_t error = cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
    if (!error) error = cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal);
    if (error && stream) cudaStreamDestroy(stream);
    fattni_cuda_leave(ctx, entered);
    FATTNI_TRY(fattni_cuda_check(ctx, error, "graph: cudaStreamBeginCapture"));
    ctx->unrecorded = ctx->stream;
    ctx->stream = stream;
    return FATTN_OK;
}

/* Ends the capture and gives the context its stream back. */
static cudaError_t end_capture(fattn_ctx *ctx, cudaGraph_t *graph) {
    const cudaStream_t stream = ctx->stream;
    *graph = NULL;
    const cudaError_t error = cudaStreamEndCapture(stream, graph);
    cudaStreamDestroy(stream);
    ctx->stream = ctx->unrecorded;
    ctx->unrecorded = NULL;
    return error;
}

fattn_status fattni_cuda_graph_end(fattn_ctx *ctx, fattn_graph **out) {
    bool entered;
    void *memory = NULL;
    cudaGraph_t graph;
    cudaGraphExec_t run = NULL;
    FATTNI_TRY(fattni_cuda_enter(ctx, &entered));
    cudaError_t error = end_capture(ctx, &graph);
    if (!error) error = cudaGraphInstantiate(&run, graph, 0);
    if (graph) cudaGraphDestroy(graph);
    fattn_status s = FATTN_OK;
    if (error) s = fattni_cuda_check(ctx, error, "graph: what was enqueued cannot be recorded");
    if (!s) s = fattni_host_alloc(ctx, sizeof **out, &memory);
    if (s && run) cudaGraphExecDestroy(run);
    fattni_cuda_leave(ctx, entered);
    if (s) return s;
    *out = memory;
    **out = (fattn_graph){run};
    return FATTN_OK;
}

fattn_status fattni_cuda_graph_launch(fattn_ctx *ctx, const fattn_graph *g) {
    bool entered;
    FATTNI_TRY(fattni_cuda_enter(ctx, &entered));
    const cudaError_t error = cudaGraphLaunch(g->run, ctx->stream);
    fattni_cuda_leave(ctx, entered);
    return fattni_cuda_check(ctx, error, "cudaGraphLaunch");
}

void fattni_cuda_graph_destroy(fattn_ctx *ctx, fattn_graph *g) {
    bool entered;
    if (fattni_cuda_enter(ctx, &entered) != FATTN_OK) entered = false; /* free all the same */
    cudaGraphExecDestroy(g->run);
    fattni_cuda_leave(ctx, entered);
    fattni_host_free(ctx, g, sizeof *g);
}
