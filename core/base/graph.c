/* fattn_graph: checks; the device records. */
#include "core/base/device.h"

#include <fattn/graph.h>

static fattn_status no_graphs(fattn_ctx *ctx) {
    return fattn_ctx_fail(ctx, FATTN_E_UNSUPPORTED, "graph: the %s has none, only a GPU", ctx->ops->name);
}

fattn_status fattn_graph_begin(fattn_ctx *ctx) {
    if (!ctx) return FATTN_E_ARG;
    if (!ctx->ops->graph_begin) return no_graphs(ctx);
    if (ctx->recording) return fattn_ctx_fail(ctx, FATTN_E_STATE, "graph: the context is recording one already");
    FATTNI_TRY(ctx->ops->graph_begin(ctx));
    ctx->recording = true;
    return FATTN_OK;
}

fattn_status fattn_graph_end(fattn_ctx *ctx, fattn_graph **out) {
    if (out) *out = NULL;
    if (!ctx) return FATTN_E_ARG;
    if (!ctx->ops->graph_begin) return no_graphs(ctx);
    if (!out) return fattn_ctx_fail(ctx, FATTN_E_ARG, "graph: out is NULL");
    if (!ctx->recording) return fattn_ctx_fail(ctx, FATTN_E_STATE, "graph: the context is not recording one");
    ctx->recording = false;
    return ctx->ops->graph_end(ctx, out);
}

fattn_status fattn_graph_launch(fattn_ctx *ctx, const fattn_graph *g) {
    if (!ctx) return FATTN_E_ARG;
    if (!ctx->ops->graph_begin) return no_graphs(ctx);
    if (!g) return fattn_ctx_fail(ctx, FATTN_E_ARG, "graph: NULL");
    if (ctx->recording) return fattn_ctx_fail(ctx, FATTN_E_STATE, "graph: the context is recording one");
    return ctx->ops->graph_launch(ctx, g);
}

void fattn_graph_destroy(fattn_ctx *ctx, fattn_graph *g) {
    if (ctx && g) ctx->ops->graph_destroy(ctx, g);
}
