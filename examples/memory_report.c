/* Memory of one attention layer, forward and backward: the library's prediction and what its allocator
   counted, with and without N x N stored. */
#include <fattn/fattn.h>
#include <stdio.h>

enum { H = 4, D = 64, Q = 0, K, V, O, DO, DQ, DK, DV, TENSORS };

typedef struct layer {
    fattn_tensor t[TENSORS], lse, saved, workspace;
    fattn_attention_params params;
    fattn_attention_io io;
    fattn_attention_plan plan;
} layer;

/* Memory for a saved buffer or a workspace, as a tensor of bytes. */
static fattn_status bytes(fattn_ctx *ctx, size_t n, fattn_tensor *out) {
    return fattn_tensor_alloc(ctx, FATTN_U8, 1, (int64_t[]){(int64_t)n}, out);
}

static fattn_status open_layer(fattn_ctx *ctx, fattn_algorithm algorithm, int64_t N, layer *l) {
    *l = (layer){.params = {.struct_size = sizeof l->params, .flags = FATTN_CAUSAL, .algorithm = algorithm},
                 .io = {.struct_size = sizeof l->io},
                 .plan = {.struct_size = sizeof l->plan}};
    const int64_t shape[4] = {1, H, N, D};
    fattn_status s = fattn_tensor_alloc(ctx, FATTN_F32, 3, shape, &l->lse);
    for (uint32_t i = 0; i < TENSORS && !s; ++i) {
        s = fattn_tensor_alloc(ctx, FATTN_F32, 4, shape, &l->t[i]);
        if (!s) s = fattn_tensor_normal(ctx, &l->t[i], 0, 1, (fattn_rng){.seed = 1, .stream = i});
    }
    fattn_attention_io *io = &l->io;
    io->q = &l->t[Q], io->k = &l->t[K], io->v = &l->t[V], io->o = &l->t[O], io->lse = &l->lse;
    io->d_o = &l->t[DO], io->dq = &l->t[DQ], io->dk = &l->t[DK], io->dv = &l->t[DV];
    if (!s) s = fattn_attention_query(ctx, &l->params, io, &l->plan);
    return s;
}

static void close_layer(fattn_ctx *ctx, layer *l) {
    for (int i = 0; i < TENSORS; ++i) fattn_tensor_free(ctx, &l->t[i]);
    fattn_tensor_free(ctx, &l->lse);
}

/* Runs both passes; *peak: their memory beyond q, k, v, o, L and the gradients. */
static fattn_status run(fattn_ctx *ctx, layer *l, size_t *peak) {
    const size_t before = fattn_ctx_mem(ctx).live;
    fattn_ctx_mem_reset_peak(ctx);
    l->io.saved_bytes = l->plan.saved_bytes;
    l->io.workspace_bytes = l->plan.fwd_workspace;
    fattn_status s = bytes(ctx, l->plan.saved_bytes, &l->saved);
    if (!s) s = bytes(ctx, l->plan.fwd_workspace, &l->workspace);
    l->io.saved = l->saved.data, l->io.workspace = l->workspace.data;
    if (!s) s = fattn_attention_fwd(ctx, &l->params, &l->io);
    fattn_tensor_free(ctx, &l->workspace);
    if (!s) s = bytes(ctx, l->plan.bwd_workspace, &l->workspace);
    l->io.workspace = l->workspace.data, l->io.workspace_bytes = l->plan.bwd_workspace;
    if (!s) s = fattn_attention_bwd(ctx, &l->params, &l->io);
    fattn_tensor_free(ctx, &l->workspace);
    fattn_tensor_free(ctx, &l->saved);
    *peak = fattn_ctx_mem(ctx).peak - before;
    return s;
}

int main(void) {
    fattn_ctx *ctx;
    fattn_status s = FATTN_OK;
    int wrong = 0;
    if (fattn_ctx_create(NULL, &ctx)) return 1;
    printf("one causal layer, f32, %d heads of %d; KiB beside q, k, v, o, L and gradients\n", H, D);
    printf("%6s %-9s %10s %10s %10s %10s\n", "N", "", "saved", "workspace", "predicted", "measured");
    for (int64_t N = 128; N <= 1024 && !s; N *= 2)
        for (int flash = 0; flash <= 1 && !s; ++flash) {
            layer l;
            size_t measured = 0;
            s = open_layer(ctx, flash ? FATTN_ALGO_AUTO : FATTN_ALGO_STANDARD, N, &l);
            if (!s) s = run(ctx, &l, &measured);
            const size_t f = l.plan.fwd_workspace, b = l.plan.bwd_workspace, most = f > b ? f : b;
            const size_t predicted = l.plan.saved_bytes + most;
            if (!s)
                printf("%6lld %-9s %10.1f %10.1f %10.1f %10.1f\n", (long long)N, flash ? "flash" : "N x N",
                       (double)l.plan.saved_bytes / 1024, (double)most / 1024, (double)predicted / 1024,
                       (double)measured / 1024);
            wrong += measured != predicted;
            close_layer(ctx, &l);
        }
    if (s) fprintf(stderr, "%s: %s\n", fattn_status_name(s), fattn_ctx_error(ctx));
    const size_t leaked = fattn_ctx_mem(ctx).live;
    fattn_ctx_destroy(ctx);
    return s != FATTN_OK || wrong || leaked;
}
