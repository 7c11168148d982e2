/* One attention case: inputs in the dtype and strides it asks for, the results it expects. */
#include "fixture_internal.h"

#include <math.h>
#include <stddef.h>
#include <string.h>

/* How [B,H,S,D] tensors lie in memory: the attribute "layout" of the case. */
typedef enum layout {
    BHSD, /* row-major; the default */
    BSHD, /* the permuted view of a row-major [B,S,H,D] */
    QKV,  /* q, k, v, and dq, dk, dv, as slices of row-major [B,S,3,H,D]; the rest as BSHD */
    PITCH /* rows D+1 apart, the first element unaligned: a slice of [B,H,S,D+1] */
} layout;

enum slot { /* inputs, then outputs from O on */
    Q, K, V, D_O, BIAS, ALIBI, SINK, D_LSE, DELTA,
    SEQLENS_Q, SEQLENS_K, CU_SEQLENS_Q, CU_SEQLENS_K, RNG_STEP,
    O, LSE, DQ, DK, DV, D_BIAS, D_SINK, SLOTS
};
typedef enum role { DATA, STATISTIC, INTEGER } role;

/* A tensor of the io struct and its dataset; for an output, what the call adds to under `flag`. */
typedef struct slot_rule {
    const char *dataset;
    size_t offset; /* of the pointer in fattn_attention_io */
    role role;
    uint32_t flag;
} slot_rule;
#define IO(member) offsetof(fattn_attention_io, member)
static const slot_rule rules[SLOTS] = {
    [Q] = {"q", IO(q), DATA, 0},
    [K] = {"k", IO(k), DATA, 0},
    [V] = {"v", IO(v), DATA, 0},
    [D_O] = {"d_o", IO(d_o), DATA, 0},
    [BIAS] = {"bias", IO(bias), DATA, 0},
    [ALIBI] = {"alibi", IO(alibi), STATISTIC, 0},
    [SINK] = {"sink", IO(sink), STATISTIC, 0},
    [D_LSE] = {"d_lse", IO(d_lse), STATISTIC, 0},
    [DELTA] = {"delta", IO(delta), STATISTIC, 0},
    [SEQLENS_Q] = {"seqlens_q", IO(seqlens_q), INTEGER, 0},
    [SEQLENS_K] = {"seqlens_k", IO(seqlens_k), INTEGER, 0},
    [CU_SEQLENS_Q] = {"cu_seqlens_q", IO(cu_seqlens_q), INTEGER, 0},
    [CU_SEQLENS_K] = {"cu_seqlens_k", IO(cu_seqlens_k), INTEGER, 0},
    [RNG_STEP] = {"rng_step", IO(rng_step), INTEGER, 0},
    [O] = {"o_in", IO(o), DATA, FATTN_MERGE},
    [LSE] = {"lse_in", IO(lse), STATISTIC, FATTN_MERGE},
    [DQ] = {"dq_in", IO(dq), DATA, FATTN_ACC_DQ},
    [DK] = {"dk_in", IO(dk), DATA, FATTN_ACC_DK},
    [DV] = {"dv_in", IO(dv), DATA, FATTN_ACC_DV},
    [D_BIAS] = {"d_bias_in", IO(d_bias), STATISTIC, FATTN_ACC_DBIAS},
    [D_SINK] = {"d_sink_in", IO(d_sink), STATISTIC, FATTN_ACC_DSINK},
};
static const struct {
    const char *name, *input;
    enum slot slot;
} gradients[] = {
    {"dq", "q", DQ},
    {"dk", "k", DK},
    {"dv", "v", DV},
    {"d_bias", "bias", D_BIAS},
    {"d_sink", "sink", D_SINK},
};

typedef struct loader {
    fattn_fixture *f;
    fattn_fixture_attention *c;
    const char *name;
    fattn_dtype dtype, statistic;
    layout layout;
    fattn_tensor packed[2]; /* layout QKV: [B,S,3,H,D] of q, k, v and of dq, dk, dv */
    int held;               /* tensors in c->memory */
} loader;

static fattn_status refuse(const loader *l, fattn_status s, const char *dataset, const char *what) {
    return fattn_ctx_fail(l->f->ctx, s, "%s: case %s: %s %s", l->f->path, l->name, dataset, what);
}

static void path_of(const loader *l, const char *dataset, char *path) {
    snprintf(path, FATTNI_FIXTURE_PATH, "/cases/%s/%s", l->name, dataset);
}

static bool present(const loader *l, const char *dataset) {
    char path[FATTNI_FIXTURE_PATH];
    path_of(l, dataset, path);
    return fattn_fixture_has(l->f, path);
}

static fattn_status get(const loader *l, const char *dataset, fattn_dtype as, fattn_tensor *out) {
    char path[FATTNI_FIXTURE_PATH];
    path_of(l, dataset, path);
    return fattn_fixture_get(l->f, path, as, out);
}

static bool same_shape(const fattn_tensor *t, int ndim, const int64_t *shape) {
    return t->ndim == ndim && memcmp(t->shape, shape, (size_t)ndim * sizeof *shape) == 0;
}

static fattn_status hold(loader *l, fattn_dtype t, int ndim, const int64_t *shape,
                         fattn_tensor *out) {
    fattn_tensor *const owned = &l->c->memory[l->held];
    const fattn_status status = fattn_tensor_alloc(l->f->ctx, t, ndim, shape, owned);
    if (status != FATTN_OK) return status;
    l->held += 1;
    *out = *owned;
    return FATTN_OK;
}

/* Slice n of [B,S,3,H,D], seen as [B,H,S,D]. */
static fattn_status place_slice(loader *l, enum slot s, fattn_dtype dtype, const int64_t *shape,
                                fattn_tensor *out) {
    const int n = (int)s - (int)(s >= DQ ? DQ : Q);
    fattn_tensor *const packed = &l->packed[s >= DQ];
    const int64_t whole[5] = {shape[0], shape[2], 3, shape[1], shape[3]};
    if (packed->ndim == 0) {
        const fattn_status status = hold(l, dtype, 5, whole, packed);
        if (status != FATTN_OK) return status;
    }
    if (!same_shape(packed, 5, whole))
        return refuse(l, FATTN_E_IO, rules[s].dataset, "differs in shape: no layout qkv");
    *out = fattn_tensor_slice(packed, 2, n, n + 1);
    out->ndim = 4;
    static const int from[4] = {0, 3, 1, 4};
    for (int d = 0; d < 4; ++d) {
        out->shape[d] = shape[d];
        out->stride[d] = packed->stride[from[d]];
    }
    return FATTN_OK;
}

/* Memory for slot s, contents undefined. Only [B,H,S,D] tensors have a layout; d_o stays row-major
   when o does not, so that their strides differ. */
static fattn_status place(loader *l, enum slot s, int ndim, const int64_t *shape) {
    fattn_tensor *const t = &l->c->tensor[s];
    const bool partial = s == O && (l->c->params.flags & FATTN_MERGE);
    const fattn_dtype dtype = rules[s].role == INTEGER                ? FATTN_I32
                              : rules[s].role == STATISTIC || partial ? l->statistic
                                                                      : l->dtype;
    const bool rows = ndim == 4 && s != BIAS && s != D_BIAS;
    fattn_status status;
    if (rows && l->layout == PITCH) {
        const int64_t pitched[4] = {shape[0], shape[1], shape[2], shape[3] + 1};
        status = hold(l, dtype, 4, pitched, t);
        if (status == FATTN_OK) *t = fattn_tensor_slice(t, 3, 1, shape[3] + 1);
    } else if (rows && l->layout == QKV && s != O && s != D_O) {
        status = place_slice(l, s, dtype, shape, t);
    } else if (rows && l->layout != BHSD && s != D_O) {
        const int64_t swapped[4] = {shape[0], shape[2], shape[1], shape[3]};
        status = hold(l, dtype, 4, swapped, t);
        if (status == FATTN_OK) *t = fattn_tensor_permute(t, (const int[]){0, 2, 1, 3});
    } else {
        status = hold(l, dtype, ndim, shape, t);
    }
    if (status == FATTN_OK) *(const fattn_tensor **)((char *)&l->c->io + rules[s].offset) = t;
    return status;
}

/* Both row-major F64. */
static bool same_values(const fattn_tensor *a, const fattn_tensor *b) {
    const double *const x = a->data, *const y = b->data;
    const int64_t count = fattn_tensor_numel(a);
    for (int64_t i = 0; i < count; ++i)
        if (x[i] != y[i] && !(isnan(x[i]) && isnan(y[i]))) return false;
    return true;
}

/* slot = values, which must not lose anything. */
static fattn_status fill(loader *l, enum slot s, const fattn_tensor *values) {
    const fattn_tensor *const t = &l->c->tensor[s];
    fattn_tensor back = {0};
    fattn_status status = fattn_tensor_copy(l->f->ctx, t, values);
    if (status == FATTN_OK)
        status = fattn_tensor_alloc(l->f->ctx, FATTN_F64, values->ndim, values->shape, &back);
    if (status == FATTN_OK) status = fattn_tensor_copy(l->f->ctx, &back, t);
    if (status == FATTN_OK && !same_values(values, &back)) {
        char what[64];
        snprintf(what, sizeof what, "is not exact in %s", fattn_dtype_name((fattn_dtype)t->dtype));
        status = refuse(l, FATTN_E_DTYPE, rules[s].dataset, what);
    }
    fattn_tensor_free(l->f->ctx, &back);
    return status;
}

/* The gradient of o or of lse may be given with dimensions of 1, as that of a sum is. */
static void broadcast(fattn_tensor *t, const fattn_tensor *like) {
    if (t->ndim != like->ndim) return;
    for (int d = 0; d < t->ndim; ++d)
        if (t->shape[d] == 1 && like->shape[d] != 1) {
            t->shape[d] = like->shape[d];
            t->stride[d] = 0;
        }
}

static fattn_status load_input(loader *l, enum slot s) {
    if (!present(l, rules[s].dataset)) {
        if (s > V) return FATTN_OK;
        return refuse(l, FATTN_E_IO, rules[s].dataset, "is absent");
    }
    fattn_tensor values = {0};
    fattn_status status = get(l, rules[s].dataset, FATTN_F64, &values);
    if (status == FATTN_OK) status = place(l, s, values.ndim, values.shape);
    if (status == FATTN_OK) status = fill(l, s, &values);
    if (status == FATTN_OK && s == D_O) broadcast(&l->c->tensor[s], &l->c->want_o);
    if (status == FATTN_OK && s == D_LSE) broadcast(&l->c->tensor[s], &l->c->want_lse);
    fattn_tensor_free(l->f->ctx, &values);
    return status;
}

/* Shaped like the result it is to have; before the call NaN, or what the call adds to. */
static fattn_status load_output(loader *l, enum slot s, const fattn_tensor *want) {
    fattn_status status = place(l, s, want->ndim, want->shape);
    if (status != FATTN_OK) return status;
    if (rules[s].flag & l->c->params.flags) {
        fattn_tensor values = {0};
        status = get(l, rules[s].dataset, FATTN_F64, &values);
        if (status == FATTN_OK) {
            status = same_shape(&values, want->ndim, want->shape)
                         ? fill(l, s, &values)
                         : refuse(l, FATTN_E_IO, rules[s].dataset, "differs in shape");
            fattn_tensor_free(l->f->ctx, &values);
        }
        return status;
    }
    double nan_value = NAN;
    fattn_tensor everywhere = *want;
    everywhere.data = &nan_value;
    memset(everywhere.stride, 0, sizeof everywhere.stride);
    return fattn_tensor_copy(l->f->ctx, &l->c->tensor[s], &everywhere);
}

static fattn_status load_differences(loader *l, const char *input, fattn_fixture_gradient *g) {
    char index[32], value[32], path[FATTNI_FIXTURE_PATH];
    snprintf(index, sizeof index, "fd/%s_index", input);
    snprintf(value, sizeof value, "fd/%s_value", input);
    if (!present(l, index)) return FATTN_OK;
    path_of(l, value, path);
    fattn_status status = get(l, index, FATTN_I32, &g->fd_index);
    if (status == FATTN_OK) status = get(l, value, FATTN_F64, &g->fd_value);
    if (status == FATTN_OK) status = fattn_fixture_get_f64(l->f, path, "step", &g->fd_step);
    if (status != FATTN_OK) return status;
    bool sound = g->fd_index.ndim == 1 && same_shape(&g->fd_value, 1, g->fd_index.shape) &&
                 isfinite(g->fd_step) && g->fd_step > 0;
    const int32_t *const at = g->fd_index.data;
    const int64_t count = fattn_tensor_numel(&g->want);
    for (int64_t n = 0; sound && n < g->fd_index.shape[0]; ++n)
        sound = at[n] >= 0 && at[n] < count;
    return sound ? FATTN_OK : refuse(l, FATTN_E_IO, index, "does not index its gradient");
}

static fattn_status load_gradients(loader *l) {
    for (int n = 0; n < FATTN_FIXTURE_GRADIENTS; ++n) {
        if (!present(l, gradients[n].name)) continue;
        fattn_fixture_gradient *const g = &l->c->gradient[n];
        fattn_status status = get(l, gradients[n].name, FATTN_F64, &g->want);
        if (status == FATTN_OK) status = load_output(l, gradients[n].slot, &g->want);
        if (status == FATTN_OK) status = load_differences(l, gradients[n].input, g);
        if (status != FATTN_OK) return status;
        g->name = gradients[n].name;
        g->got = &l->c->tensor[gradients[n].slot];
    }
    return FATTN_OK;
}

static fattn_status load_layout(loader *l) {
    static const char *const names[] = {"bhsd", "bshd", "qkv", "pitch"};
    char path[FATTNI_FIXTURE_PATH], text[16];
    fattn_status status = fattni_fixture_case_path(l->f, l->name, path);
    if (status == FATTN_OK)
        status = fattn_fixture_get_text(l->f, path, "layout", text, sizeof text);
    if (status != FATTN_OK) return status;
    for (int n = 0; n < 4; ++n)
        if (strcmp(text, names[n]) == 0) {
            l->layout = (layout)n;
            return FATTN_OK;
        }
    return refuse(l, FATTN_E_IO, "layout", "is not bhsd, bshd, qkv or pitch");
}

static fattn_status load(loader *l) {
    fattn_status status = fattn_fixture_params(l->f, l->name, &l->c->params);
    if (status == FATTN_OK) status = load_layout(l);
    if (status == FATTN_OK) status = get(l, "o", FATTN_F64, &l->c->want_o);
    if (status == FATTN_OK) status = get(l, "lse", FATTN_F64, &l->c->want_lse);
    for (int s = 0; status == FATTN_OK && s < O; ++s)
        status = load_input(l, (enum slot)s);
    if (status == FATTN_OK) status = load_output(l, O, &l->c->want_o);
    if (status == FATTN_OK) status = load_output(l, LSE, &l->c->want_lse);
    return status == FATTN_OK ? load_gradients(l) : status;
}

fattn_status fattn_fixture_attention_load(fattn_fixture *f, const char *name, fattn_dtype dtype,
                                          fattn_fixture_attention *out) {
    if (!f) return FATTN_E_ARG;
    if (!out) return fattn_ctx_fail(f->ctx, FATTN_E_ARG, "fixture_attention_load: out is NULL");
    if (out->struct_size != sizeof *out)
        return fattn_ctx_fail(f->ctx, FATTN_E_ABI,
                              "fixture_attention_load: struct_size is %u, not %zu",
                              out->struct_size, sizeof *out);
    if (dtype < FATTN_F64 || dtype > FATTN_BF16)
        return fattn_ctx_fail(f->ctx, FATTN_E_DTYPE,
                              "fixture_attention_load: %s is not a float type",
                              fattn_dtype_name(dtype));
    *out = (fattn_fixture_attention){.struct_size = sizeof *out,
                                     .params.struct_size = sizeof out->params,
                                     .io.struct_size = sizeof out->io};
    loader l = {.f = f,
                .c = out,
                .name = name,
                .dtype = dtype,
                .statistic = dtype == FATTN_F64 ? FATTN_F64 : FATTN_F32};
    const fattn_status status = load(&l);
    if (status != FATTN_OK) fattn_fixture_attention_free(f->ctx, out);
    return status;
}

void fattn_fixture_attention_free(fattn_ctx *ctx, fattn_fixture_attention *c) {
    if (!c) return;
    enum { OWNED = sizeof c->memory / sizeof *c->memory };
    for (int n = 0; n < OWNED; ++n)
        fattn_tensor_free(ctx, &c->memory[n]);
    for (int n = 0; n < FATTN_FIXTURE_GRADIENTS; ++n) {
        fattn_tensor_free(ctx, &c->gradient[n].want);
        fattn_tensor_free(ctx, &c->gradient[n].fd_index);
        fattn_tensor_free(ctx, &c->gradient[n].fd_value);
    }
    fattn_tensor_free(ctx, &c->want_o);
    fattn_tensor_free(ctx, &c->want_lse);
    *c = (fattn_fixture_attention){.struct_size = sizeof *c};
}

fattn_status fattn_fixture_attention_run(fattn_ctx *ctx, fattn_fixture_attention *c) {
    if (!ctx) return FATTN_E_ARG;
    if (!c) return fattn_ctx_fail(ctx, FATTN_E_ARG, "fixture_attention_run: the case is NULL");
    fattn_attention_plan plan = {.struct_size = sizeof plan};
    fattn_status status = fattn_attention_query(ctx, &c->params, &c->io, &plan);
    if (status != FATTN_OK) return status;
    const size_t larger =
        plan.fwd_workspace > plan.bwd_workspace ? plan.fwd_workspace : plan.bwd_workspace;
    const int64_t workspace_bytes = (int64_t)larger, saved_bytes = (int64_t)plan.saved_bytes;
    fattn_tensor workspace = {0}, saved = {0};
    status = fattn_tensor_alloc(ctx, FATTN_U8, 1, &workspace_bytes, &workspace);
    if (status == FATTN_OK) status = fattn_tensor_alloc(ctx, FATTN_U8, 1, &saved_bytes, &saved);
    c->io.workspace = workspace.data, c->io.workspace_bytes = larger;
    c->io.saved = saved.data, c->io.saved_bytes = plan.saved_bytes;
    if (status == FATTN_OK) status = fattn_attention_fwd(ctx, &c->params, &c->io);
    if (status == FATTN_OK) status = fattn_attention_bwd(ctx, &c->params, &c->io);
    c->io.workspace = c->io.saved = NULL;
    c->io.workspace_bytes = c->io.saved_bytes = 0;
    fattn_tensor_free(ctx, &workspace);
    fattn_tensor_free(ctx, &saved);
    return status;
}
