#include "cli/measure/layer.h"

#include <string.h>

static size_t bytes(const fattn_tensor *t) {
    return (size_t)fattn_tensor_numel(t) * fattn_dtype_size((fattn_dtype)t->dtype);
}

static fattn_tensor describe(const fattn_ctx *ctx, fattn_dtype dtype, int ndim, const int64_t *shape) {
    return fattn_tensor_view(NULL, dtype, fattn_ctx_device(ctx), 0, ndim, shape);
}

fattn_status layer_plan(layer *l, fattn_ctx *ctx, const layer_shape *s, fattn_algorithm algorithm, uint32_t flags) {
    *l = (layer){.ctx = ctx,
                 .params = {.struct_size = sizeof l->params, .flags = flags, .algorithm = algorithm},
                 .io = {.struct_size = sizeof l->io},
                 .plan = {.struct_size = sizeof l->plan}};
    const int64_t q[4] = {s->batch, s->heads, s->rows, s->head_dim};
    const int64_t k[4] = {s->batch, s->kv_heads, s->keys, s->head_dim};
    fattn_tensor *const t = l->tensor;
    t[LAYER_Q] = t[LAYER_O] = t[LAYER_DO] = t[LAYER_DQ] = describe(ctx, s->dtype, 4, q);
    t[LAYER_K] = t[LAYER_V] = t[LAYER_DK] = t[LAYER_DV] = describe(ctx, s->dtype, 4, k);
    t[LAYER_LSE] = describe(ctx, s->dtype == FATTN_F64 ? FATTN_F64 : FATTN_F32, 3, q);
    l->io.q = &t[LAYER_Q], l->io.k = &t[LAYER_K], l->io.v = &t[LAYER_V];
    l->io.o = &t[LAYER_O], l->io.lse = &t[LAYER_LSE];
    l->io.d_o = &t[LAYER_DO];
    l->io.dq = &t[LAYER_DQ], l->io.dk = &t[LAYER_DK], l->io.dv = &t[LAYER_DV];

    /* A query reads no data but needs pointers: distinct addresses that are never dereferenced. */
    uintptr_t address = 4096;
    for (int i = 0; i < LAYER_TENSORS; ++i) {
        t[i].data = (void *)address;
        address += (bytes(&t[i]) + 4095) / 4096 * 4096;
    }
    const fattn_status status = fattn_attention_query(ctx, &l->params, &l->io, &l->plan);
    for (int i = 0; i < LAYER_TENSORS; ++i) t[i].data = NULL;
    if (status != FATTN_OK) return status;

    t[LAYER_SAVED] = describe(ctx, FATTN_U8, 1, (int64_t[]){(int64_t)l->plan.saved_bytes});
    size_t forward = 0, gradients = 0;
    for (int i = 0; i < LAYER_FORWARD; ++i) forward += bytes(&t[i]);
    for (int i = LAYER_FORWARD; i < LAYER_TENSORS; ++i) gradients += bytes(&t[i]);
    const size_t in_forward = forward + l->plan.fwd_workspace;
    const size_t in_backward = forward + gradients + l->plan.bwd_workspace;
    l->predicted_peak = in_forward > in_backward ? in_forward : in_backward;
    return FATTN_OK;
}

/* Allocates those of the tensors begin..end-1 that are not allocated yet. */
static fattn_status allocate(layer *l, int begin, int end) {
    for (int i = begin; i < end; ++i) {
        fattn_tensor *t = &l->tensor[i];
        if (t->data) continue;
        const fattn_status s = fattn_tensor_alloc(l->ctx, (fattn_dtype)t->dtype, t->ndim, t->shape, t);
        if (s != FATTN_OK) return s;
    }
    return FATTN_OK;
}

static fattn_status randomise(layer *l, int i) {
    return fattn_tensor_normal(l->ctx, &l->tensor[i], 0, 1, (fattn_rng){.seed = 1, .stream = (uint32_t)i});
}

fattn_status layer_start(layer *l) {
    fattn_status s = allocate(l, LAYER_Q, LAYER_V + 1);
    for (int i = LAYER_Q; s == FATTN_OK && i <= LAYER_V; ++i) s = randomise(l, i);
    return s;
}

typedef fattn_status pass(fattn_ctx *, const fattn_attention_params *, const fattn_attention_io *);

static fattn_status with_workspace(layer *l, size_t size, pass *run) {
    fattn_status s = fattn_tensor_alloc(l->ctx, FATTN_U8, 1, (int64_t[]){(int64_t)size}, &l->workspace);
    if (s != FATTN_OK) return s;
    l->io.saved = l->tensor[LAYER_SAVED].data;
    l->io.saved_bytes = l->plan.saved_bytes;
    l->io.workspace = l->workspace.data;
    l->io.workspace_bytes = size;
    s = run(l->ctx, &l->params, &l->io);
    fattn_tensor_free(l->ctx, &l->workspace);
    return s;
}

fattn_status layer_forward(layer *l) {
    const fattn_status s = allocate(l, LAYER_O, LAYER_FORWARD);
    return s == FATTN_OK ? with_workspace(l, l->plan.fwd_workspace, fattn_attention_fwd) : s;
}

fattn_status layer_backward(layer *l) {
    const bool first = !l->tensor[LAYER_DO].data;
    fattn_status s = allocate(l, LAYER_DO, LAYER_TENSORS);
    if (s == FATTN_OK && first) s = randomise(l, LAYER_DO);
    return s == FATTN_OK ? with_workspace(l, l->plan.bwd_workspace, fattn_attention_bwd) : s;
}

void layer_free(layer *l) {
    for (int i = 0; i < LAYER_TENSORS; ++i) fattn_tensor_free(l->ctx, &l->tensor[i]);
    fattn_tensor_free(l->ctx, &l->workspace);
}
