#include "plans.h"

#include <criterion/criterion.h>
#include <string.h>

enum { Q, K, V, O, LSE, D_O, DQ, DK, DV, BIAS, D_BIAS, SINK, D_SINK, LENGTHS_Q, LENGTHS_K, TENSORS };

typedef struct question {
    fattn_tensor t[TENSORS];
    fattn_attention_params p;
    fattn_attention_io io;
} question;

/* A call: each field is an index into the choices below. */
typedef struct choice {
    int dtype, wide, algorithm, sizes, layout, feature, wanted;
} choice;

static const int64_t sizes[][6] = {
    /* Hq, Hkv, Sq, Sk, D, Dv */
    {2, 2, 513, 513, 64, 64}, {4, 2, 130, 700, 128, 128}, {3, 1, 64, 65, 80, 80},     {2, 2, 300, 200, 256, 256},
    {2, 1, 100, 100, 20, 40}, {1, 1, 1, 2048, 96, 64},    {2, 1, 130, 700, 192, 128},
};
enum { SIZES = sizeof sizes / sizeof *sizes, LAYOUTS = 3, FEATURES = 7, WANTED = 4, DTYPES = 4, BATCH = 3 };
static const fattn_dtype dtypes[DTYPES] = {FATTN_F64, FATTN_F32, FATTN_F16, FATTN_BF16};

/* Strides of [B,H,S,D]: row-major, [B,S,H,D] seen so, rows with a gap. */
static fattn_tensor laid_out(fattn_dtype dtype, int layout, const int64_t *n) {
    const int64_t across[4] = {n[0], n[2], n[1], n[3]}, wide[4] = {n[0], n[1], n[2], n[3] + 3};
    const int order[4] = {0, 2, 1, 3};
    fattn_tensor t = fattn_tensor_view(NULL, dtype, FATTN_CPU, 0, 4, layout == 1 ? across : layout == 2 ? wide : n);
    if (layout == 1) t = fattn_tensor_permute(&t, order);
    if (layout == 2) t = fattn_tensor_slice(&t, 3, 0, n[3]);
    return t;
}

/* Gives each tensor another address, a multiple of 256 bytes. */
static void place(const fattn_ctx *ctx, question *x) {
    for (int n = 0; n < TENSORS; ++n) {
        x->t[n].data = (void *)((uintptr_t)(n + 1) << 40);
        x->t[n].device = (int32_t)ctx->device;
        x->t[n].device_id = ctx->device_id;
    }
}

static void ask(const fattn_ctx *ctx, const choice *c, question *x) {
    const int64_t *const s = sizes[c->sizes];
    const bool packed = c->feature == 5;
    const int64_t B = packed ? 1 : BATCH, q[4] = {B, s[0], s[2], s[4]}, k[4] = {B, s[1], s[3], s[4]};
    const int64_t v[4] = {B, s[1], s[3], s[5]}, o[4] = {B, s[0], s[2], s[5]};
    const int64_t bias[4] = {1, s[0], s[2], s[3]}, lengths[1] = {BATCH + (packed ? 1 : 0)};
    const fattn_dtype dtype = dtypes[c->dtype], statistic = dtype == FATTN_F64 ? dtype : FATTN_F32;
    const fattn_dtype out = c->wide ? statistic : dtype;
    *x = (question){.p = {.struct_size = sizeof x->p, .algorithm = c->algorithm}, .io = {.struct_size = sizeof x->io}};
    fattn_tensor *const t = x->t;
    t[Q] = laid_out(dtype, c->layout, q), t[K] = laid_out(dtype, c->layout, k);
    t[V] = laid_out(dtype, c->layout, v), t[O] = laid_out(out, c->layout, o);
    t[D_O] = t[O];
    t[DQ] = laid_out(out, c->layout, q), t[DK] = laid_out(out, c->layout, k);
    t[DV] = laid_out(out, c->layout, v);
    t[LSE] = fattn_tensor_view(NULL, statistic, FATTN_CPU, 0, 3, o);
    t[BIAS] = fattn_tensor_view(NULL, dtype, FATTN_CPU, 0, 4, bias);
    t[D_BIAS] = fattn_tensor_view(NULL, statistic, FATTN_CPU, 0, 4, bias);
    t[SINK] = t[D_SINK] = fattn_tensor_view(NULL, statistic, FATTN_CPU, 0, 1, &s[0]);
    t[LENGTHS_Q] = t[LENGTHS_K] = fattn_tensor_view(NULL, FATTN_I32, FATTN_CPU, 0, 1, lengths);
    place(ctx, x);
    fattn_attention_io *const io = &x->io;
    io->q = &t[Q], io->k = &t[K], io->v = &t[V], io->o = &t[O], io->lse = &t[LSE];
    switch (c->feature) {
    case 1: x->p.flags = FATTN_CAUSAL; break;
    case 2: x->p.flags = FATTN_CAUSAL | FATTN_DETERMINISTIC; break;
    case 3: io->bias = &t[BIAS], io->sink = &t[SINK], x->p.softcap = 3, x->p.dropout_p = 0.1f; break;
    case 4: io->seqlens_q = &t[LENGTHS_Q], io->seqlens_k = &t[LENGTHS_K], io->sink = &t[SINK]; break;
    case 5:
        io->cu_seqlens_q = &t[LENGTHS_Q], io->cu_seqlens_k = &t[LENGTHS_K];
        x->p.max_seqlen_q = s[2], x->p.max_seqlen_k = s[3];
        break;
    case 6: x->p.flags = FATTN_ACC_DQ | FATTN_ACC_DK | FATTN_ACC_DV; break;
    default: break;
    }
    if (c->wanted == 1 || c->wanted == 2) io->dq = &t[DQ];
    if (c->wanted == 1 || c->wanted == 3) io->dk = &t[DK], io->dv = &t[DV];
    if (c->wanted == 1 && io->bias) io->d_bias = &t[D_BIAS];
    if (c->wanted == 1 && io->sink) io->d_sink = &t[D_SINK];
}

static fattn_attention_plan plan_of(fattn_ctx *ctx, const question *x) {
    fattn_attention_plan plan = {.struct_size = sizeof plan};
    cr_assert_eq(fattn_attention_query(ctx, &x->p, &x->io, &plan), FATTN_OK, "%s", fattn_ctx_error(ctx));
    return plan;
}

static void fits(const fattn_attention_plan *call, const fattn_attention_plan *plan, const choice *c, const char *what,
                 int n) {
    cr_assert(call->fwd_workspace <= plan->fwd_workspace && call->bwd_workspace <= plan->bwd_workspace &&
                  call->saved_bytes <= plan->saved_bytes,
              "%s %d needs %zu, %zu, %zu bytes (%s), the query gave %zu, %zu, %zu (%s): %s, o %s, algorithm %d, "
              "sizes %d, layout %d, feature %d, wanted %d",
              what, n, call->fwd_workspace, call->bwd_workspace, call->saved_bytes, call->bwd_kernel,
              plan->fwd_workspace, plan->bwd_workspace, plan->saved_bytes, plan->bwd_kernel,
              fattn_dtype_name(dtypes[c->dtype]), c->wide ? "wide" : "as q", c->algorithm, c->sizes, c->layout,
              c->feature, c->wanted);
}

/* A query with aligned tensors, and one without d_o; then with one, two, all of them moved by one element; with
   each d_o. */
static int check(fattn_ctx *ctx, const choice *c) {
    question x;
    ask(ctx, c, &x);
    const fattn_attention_plan none = plan_of(ctx, &x);
    const fattn_dtype dtype = dtypes[c->dtype], own = (fattn_dtype)x.t[LSE].dtype;
    const int64_t *const o = x.t[O].shape;
    int calls = 0;
    for (int n = 0; n < 2 * (LAYOUTS + 1); ++n, ++calls) { /* the last: one row for all */
        const fattn_dtype given = n % 2 ? own : dtype;
        x.t[D_O] = laid_out(given, n / 2 % LAYOUTS, o);
        if (n / 2 == LAYOUTS) memset(x.t[D_O].stride, 0, 3 * sizeof x.t[D_O].stride[0]);
        place(ctx, &x);
        x.io.d_o = &x.t[D_O];
        const fattn_attention_plan best = plan_of(ctx, &x);
        fits(&best, &none, c, "d_o", n);
        for (int moved = 0; moved <= TENSORS; ++moved, ++calls) {
            place(ctx, &x);
            for (int i = 0; i < TENSORS; ++i)
                if (moved == TENSORS || moved == i)
                    x.t[i].data = (char *)x.t[i].data + fattn_dtype_size((fattn_dtype)x.t[i].dtype);
            const fattn_attention_plan there = plan_of(ctx, &x);
            fits(&there, &best, c, "moved tensor", moved);
            fits(&best, &there, c, "not moved tensor", moved);
            if (moved < TENSORS) continue;
            x.io.d_o = NULL;
            const fattn_attention_plan none_there = plan_of(ctx, &x);
            fits(&none, &none_there, c, "no d_o, but moved tensors", moved);
            x.io.d_o = &x.t[D_O];
        }
    }
    return calls;
}

int plans_check(fattn_ctx *ctx) {
    int calls = 0;
    choice c;
    for (c.dtype = 0; c.dtype < DTYPES; ++c.dtype)
        for (c.wide = 0; c.wide < (c.dtype < 2 ? 1 : 2); ++c.wide)
            for (c.algorithm = FATTN_ALGO_AUTO; c.algorithm <= FATTN_ALGO_FLASH2; ++c.algorithm)
                for (c.sizes = 0; c.sizes < SIZES; ++c.sizes)
                    for (c.layout = 0; c.layout < LAYOUTS; ++c.layout)
                        for (c.feature = 0; c.feature < FEATURES; ++c.feature)
                            for (c.wanted = 0; c.wanted < WANTED; ++c.wanted) calls += check(ctx, &c);
    return calls;
}
