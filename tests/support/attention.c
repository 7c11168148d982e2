#include "attention.h"

#include "core/tensor/numeric.h"
#include "core/attention/ref.h"

#include <criterion/criterion.h>
#include <math.h>
#include <stdlib.h>

const enum tensor_id attention_outputs[7] = {T_O, T_LSE, T_DQ, T_DK, T_DV, T_D_BIAS, T_D_SINK};
const char *const attention_names[T_COUNT] = {
    "q",        "k",      "v",         "o",         "lse",          "bias",
    "alibi",    "sink",   "seqlens_q", "seqlens_k", "cu_seqlens_q", "cu_seqlens_k",
    "rng_step", "d_o",    "d_lse",     "delta",     "dq",           "dk",
    "dv",       "d_bias", "d_sink"};

enum { GUARD = FATTNI_ALIGN };
enum { SLACK_FRONT = 1, SLACK_BACK = 2 }; /* rows of a packed buffer that belong to no sequence */

/* --- elements --------------------------------------------------------------------------------- */

void attention_index(const fattn_tensor *t, int64_t n, int64_t *at) {
    if (n <= UINT32_MAX) { /* tests do this for each element: divisions of 64 bits take three times as long */
        uint32_t rest = (uint32_t)n;
        for (int d = t->ndim - 1; d >= 0; --d) {
            const uint32_t size = (uint32_t)t->shape[d];
            at[d] = rest % size;
            rest /= size;
        }
        return;
    }
    for (int d = t->ndim - 1; d >= 0; --d) {
        at[d] = n % t->shape[d];
        n /= t->shape[d];
    }
}

static int64_t offset_of(const fattn_tensor *t, const int64_t *at) {
    int64_t offset = 0;
    for (int d = 0; d < t->ndim; ++d) offset += t->shape[d] > 1 ? at[d] * t->stride[d] : 0;
    return offset;
}

double attention_get(const fattn_tensor *t, const int64_t *at) {
    return fattni_load(t->data, t->dtype, offset_of(t, at));
}

void attention_set(const fattn_tensor *t, const int64_t *at, double x) {
    fattni_store(t->data, t->dtype, offset_of(t, at), x);
}

/* t with each element once: a dimension that broadcasts by stride 0 shrinks to one. */
static fattn_tensor distinct(const fattn_tensor *t) {
    fattn_tensor view = *t;
    const bool empty = fattn_tensor_numel(t) == 0; /* its strides are not read */
    for (int d = 0; d < t->ndim && !empty; ++d)
        if (t->stride[d] == 0 && t->shape[d] > 1) view.shape[d] = 1;
    return view;
}

/* --- sequences -------------------------------------------------------------------------------- */

static int64_t length(const attention *a, char side, int64_t b) {
    const attention_case *c = &a->c;
    const bool q = side == 'q';
    const bool given = c->lengths == LENGTHS_PACKED || c->lengths == LENGTHS_PADDED ||
                       c->lengths == (q ? LENGTHS_PADDED_Q : LENGTHS_PADDED_K);
    if (given) return q ? c->length_q[b] : c->length_k[b];
    return q ? c->Sq : c->Sk;
}

/* Rows of the buffers, in which sequence b of a packed batch starts after those before it. */
static int64_t start(const attention *a, char side, int64_t b) {
    int64_t row = SLACK_FRONT;
    for (int64_t n = 0; n < b; ++n) row += length(a, side, n);
    return row;
}

static int64_t rows(const attention *a, char side) {
    if (a->c.lengths == LENGTHS_PACKED) return start(a, side, a->c.B) + SLACK_BACK;
    return side == 'q' ? a->c.Sq : a->c.Sk;
}

static bool row_in_use(const attention *a, char side, int64_t b, int64_t row) {
    if (a->c.lengths == LENGTHS_PACKED) return row >= start(a, side, 0) && row < start(a, side, a->c.B);
    return row < length(a, side, b);
}

/* Whether some sequence has this row and key; a dimension that broadcasts stands for all its indices. */
static bool bias_in_use(const attention *a, const int64_t *at) {
    const unsigned over = a->c.bias;
    for (int64_t b = 0; b < a->c.B; ++b) {
        if (!(over & BIAS_OVER_B) && b != at[0]) continue;
        const bool row = (over & BIAS_OVER_I ? 0 : at[2]) < length(a, 'q', b);
        const bool key = (over & BIAS_OVER_J ? 0 : at[3]) < length(a, 'k', b);
        if (row && key) return true;
    }
    return false;
}

bool attention_in_use(const attention *a, enum tensor_id id, const int64_t *at) {
    switch (id) {
    case T_Q:
    case T_O:
    case T_LSE:
    case T_D_O:
    case T_D_LSE:
    case T_DELTA:
    case T_DQ: return row_in_use(a, 'q', at[0], at[2]);
    case T_K:
    case T_V:
    case T_DK:
    case T_DV: return row_in_use(a, 'k', at[0], at[2]);
    case T_BIAS: return bias_in_use(a, at);
    default: return true; /* all elements of d_bias and d_sink are written */
    }
}

/* --- memory ----------------------------------------------------------------------------------- */

/* Quiet NaNs in every float type of at least `element` bytes, with a different payload at each address. `bytes` is a
   multiple of 4. */
static void fill_with_nan(unsigned char *p, size_t bytes, size_t element) {
    for (size_t n = 0; n < bytes / 4; ++n) {
        const uint32_t place = (uint32_t)(n * 2654435761u) >> 13;
        const uint32_t word = element == 2 ? 0x7ff87ff8u | (place & 0x00070007u) : 0x7ff80000u | (place & 0x7ffffu);
        memcpy(p + 4 * n, &word, 4);
    }
}

static field field_new(size_t bytes, size_t element) {
    field f = {.size = 2 * GUARD + (bytes + GUARD - 1) / GUARD * GUARD};
    f.memory = aligned_alloc(GUARD, f.size);
    f.initial = malloc(f.size);
    cr_assert(f.memory && f.initial, "no memory for %zu bytes", f.size);
    fill_with_nan(f.memory, f.size, element);
    memcpy(f.initial, f.memory, f.size);
    return f;
}

static void field_free(field *f) {
    free(f->memory);
    free(f->initial);
    *f = (field){0};
}

/* Sets the strides; returns how many elements the layout spans. */
static int64_t lay_out(fattn_tensor *t, enum layout layout) {
    static const int row_major[FATTN_MAX_DIMS] = {0, 1, 2, 3, 4}, permuted[4] = {0, 2, 1, 3};
    const bool permute = t->ndim >= 3 && (layout == LAYOUT_BSHD || layout == LAYOUT_QKV);
    const int *const order = permute ? permuted : row_major; /* outermost first */
    int64_t stride = t->ndim == 3 && layout == LAYOUT_PITCH ? 2 : 1;
    for (int n = t->ndim - 1; n >= 0; --n) {
        t->stride[order[n]] = stride;
        stride *= t->shape[order[n]];
        if (t->ndim != 4) continue;
        if (n == 3 && layout == LAYOUT_PITCH) stride += 1;
        if (n == 2 && layout == LAYOUT_QKV) stride *= 3; /* q, k, v of one row side by side */
    }
    for (int d = 0; d < t->ndim - 1 && layout == LAYOUT_PITCH; ++d)
        if (t->shape[d] == 1) t->stride[d] = -12345;
    return stride;
}

static void place(attention *a, enum tensor_id id, fattn_dtype dtype, int ndim, const int64_t *shape,
                  enum layout layout) {
    static const int slices[T_COUNT] = {[T_K] = 1, [T_V] = 2, [T_DK] = 1, [T_DV] = 2};
    const int slice = layout == LAYOUT_QKV ? slices[id] : 0;
    const size_t element = fattn_dtype_size(dtype);
    fattn_tensor t = fattn_tensor_view(NULL, dtype, FATTN_CPU, 0, ndim, shape);
    const int64_t span = lay_out(&t, layout);
    int64_t first = layout == LAYOUT_PITCH;
    const bool reversed = layout == LAYOUT_REVERSED || (layout == LAYOUT_REVERSED_O && id == T_O);
    if (reversed && ndim == 4 && shape[2] > 1) {
        first = (shape[2] - 1) * t.stride[2];
        t.stride[2] = -t.stride[2];
    }
    if (slice) first = slice * t.shape[1] * t.shape[3];
    const enum tensor_id home = (enum tensor_id)((int)id - slice);
    const int64_t size = layout == LAYOUT_PITCH ? span + first : span;
    if (!slice) a->fields[id] = field_new((size_t)size * element, element);
    t.data = a->fields[home].memory + GUARD + (size_t)first * element;
    a->home[id] = home;
    a->t[id] = t;
}

static void place_bias(attention *a, enum tensor_id id, fattn_dtype dtype, enum layout layout) {
    static const unsigned over[4] = {BIAS_OVER_B, BIAS_OVER_H, BIAS_OVER_I, BIAS_OVER_J};
    const int64_t full[4] = {a->c.B, a->c.Hq, a->c.Sq, a->c.Sk};
    int64_t shape[4];
    for (int d = 0; d < 4; ++d) shape[d] = a->c.bias & over[d] ? 1 : full[d];
    place(a, id, dtype, 4, shape, LAYOUT_BHSD);
    for (int d = 0; d < 4 && layout == LAYOUT_BSHD; ++d)
        if (shape[d] == 1 && full[d] > 1) a->t[id].shape[d] = full[d], a->t[id].stride[d] = 0;
}

/* One row of d_o for all. */
static void place_sum(attention *a, fattn_dtype dtype, const int64_t *shape) {
    const int64_t one[4] = {1, 1, 1, shape[3]};
    place(a, T_D_O, dtype, 4, one, LAYOUT_BHSD);
    for (int d = 0; d < 3; ++d) a->t[T_D_O].shape[d] = shape[d], a->t[T_D_O].stride[d] = 0;
}

static void place_all(attention *a) {
    const attention_case *c = &a->c;
    const fattn_dtype t = c->dtype, statistic = t == FATTN_F64 ? t : FATTN_F32;
    const fattn_dtype out = c->wide ? statistic : t;
    const enum layout layout = c->layout, qkv = layout;
    const enum layout rest = layout == LAYOUT_QKV ? LAYOUT_BSHD : layout;
    const bool packed = c->lengths == LENGTHS_PACKED;
    const int64_t B = packed ? 1 : c->B, Rq = rows(a, 'q'), Rk = rows(a, 'k');
    const int64_t q[4] = {B, c->Hq, Rq, c->D}, o[4] = {B, c->Hq, Rq, c->Dv};
    const int64_t k[4] = {B, c->Hkv, Rk, c->D}, v[4] = {B, c->Hkv, Rk, c->Dv};
    const int64_t count[1] = {c->B}, ends[1] = {c->B + 1};
    place(a, T_Q, t, 4, q, qkv);
    place(a, T_K, t, 4, k, qkv);
    place(a, T_V, t, 4, v, qkv);
    place(a, T_O, out, 4, o, rest);
    place(a, T_LSE, statistic, 3, o, rest);
    if (c->bias) place_bias(a, T_BIAS, c->bias & BIAS_F32 ? statistic : t, layout);
    if (c->alibi) place(a, T_ALIBI, statistic, 1, &c->Hq, rest);
    if (c->sink) place(a, T_SINK, statistic, 1, &c->Hq, rest);
    if (c->lengths == LENGTHS_PADDED || c->lengths == LENGTHS_PADDED_Q)
        place(a, T_SEQLENS_Q, FATTN_I32, 1, count, rest);
    if (c->lengths == LENGTHS_PADDED || c->lengths == LENGTHS_PADDED_K)
        place(a, T_SEQLENS_K, FATTN_I32, 1, count, rest);
    if (packed) place(a, T_CU_Q, FATTN_I32, 1, ends, rest);
    if (packed) place(a, T_CU_K, FATTN_I32, 1, ends, rest);
    if (c->rng_step) place(a, T_RNG_STEP, FATTN_I32, 0, NULL, rest);
    if (c->sum_d_o)
        place_sum(a, out, o);
    else
        place(a, T_D_O, out, 4, o, LAYOUT_BHSD);
    if (c->d_lse) place(a, T_D_LSE, statistic, 3, o, rest);
    if (c->delta) place(a, T_DELTA, statistic, 3, o, rest);
    place(a, T_DQ, out, 4, q, qkv); /* dq first: dk and dv are slices of its field */
    place(a, T_DK, out, 4, k, qkv);
    place(a, T_DV, out, 4, v, qkv);
    if (c->bias) place_bias(a, T_D_BIAS, statistic, layout);
    if (c->sink) place(a, T_D_SINK, statistic, 1, &c->Hq, rest);
}

/* --- contents --------------------------------------------------------------------------------- */

static void fill(attention *a, enum tensor_id id, double mean, double std) {
    const fattn_tensor view = distinct(&a->t[id]);
    const fattn_rng rng = {.seed = 0x5eedf00d, .stream = (uint32_t)id};
    cr_assert_eq(fattn_tensor_normal(a->ctx, &view, mean, std, rng), FATTN_OK, "%s", fattn_ctx_error(a->ctx));
}

/* Fills rows that must be neither read nor written. */
static void poison_unused(attention *a, enum tensor_id id) {
    if (a->c.lengths == LENGTHS_NONE) return;
    const fattn_tensor view = distinct(&a->t[id]);
    int64_t at[FATTN_MAX_DIMS] = {0};
    for (int64_t n = 0; n < fattn_tensor_numel(&view); ++n) {
        attention_index(&view, n, at);
        if (!attention_in_use(a, id, at)) attention_set(&view, at, NAN);
    }
}

static void fill_integers(attention *a) {
    for (int64_t b = 0; b < a->c.B; ++b) {
        const double q = (double)length(a, 'q', b), k = (double)length(a, 'k', b);
        if (a->present[T_SEQLENS_Q]) attention_set(&a->t[T_SEQLENS_Q], &b, q);
        if (a->present[T_SEQLENS_K]) attention_set(&a->t[T_SEQLENS_K], &b, k);
    }
    for (int64_t b = 0; b <= a->c.B && a->present[T_CU_Q]; ++b) {
        attention_set(&a->t[T_CU_Q], &b, (double)start(a, 'q', b));
        attention_set(&a->t[T_CU_K], &b, (double)start(a, 'k', b));
    }
    if (a->present[T_RNG_STEP]) attention_set(&a->t[T_RNG_STEP], NULL, 7);
}

static void fill_inputs(attention *a) {
    static const enum tensor_id normal[] = {T_Q, T_K, T_V, T_BIAS, T_SINK, T_D_O, T_D_LSE};
    for (size_t n = 0; n < sizeof normal / sizeof *normal; ++n)
        if (a->present[normal[n]]) {
            fill(a, normal[n], 0, 1);
            if (normal[n] != T_D_O || !a->c.sum_d_o) poison_unused(a, normal[n]);
        }
    for (int64_t h = 0; h < a->c.Hq && a->present[T_ALIBI]; ++h)
        attention_set(&a->t[T_ALIBI], &h, (h % 2 ? -0.1 : 0.75) / (double)(h + 1)); /* of either sign */
    const fattn_tensor bias = distinct(&a->t[T_BIAS]);
    int64_t at[FATTN_MAX_DIMS] = {0};
    for (int64_t n = 0; a->c.bias & BIAS_MASKS && n < fattn_tensor_numel(&bias); n += 7) {
        attention_index(&bias, n, at);
        attention_set(&bias, at, -INFINITY);
    }
    fill_integers(a);
}

/* The values that FATTN_MERGE and the FATTN_ACC flags add to. Every fourth row has no keys yet. */
static void fill_partial_results(attention *a) {
    if (a->c.flags & FATTN_MERGE) {
        fill(a, T_O, 0, 1);
        fill(a, T_LSE, 1, 1);
        const fattn_tensor *const o = &a->t[T_O], *const lse = &a->t[T_LSE];
        int64_t at[FATTN_MAX_DIMS] = {0};
        for (int64_t n = 0; n < fattn_tensor_numel(o); ++n) {
            attention_index(o, n, at);
            if (at[2] % 4 != 3) continue;
            attention_set(o, at, 0);
            attention_set(lse, at, -INFINITY);
        }
        poison_unused(a, T_O);
        poison_unused(a, T_LSE);
    }
    static const struct {
        enum tensor_id id;
        uint32_t flag;
    } added[] = {{T_DQ, FATTN_ACC_DQ},
                 {T_DK, FATTN_ACC_DK},
                 {T_DV, FATTN_ACC_DV},
                 {T_D_BIAS, FATTN_ACC_DBIAS},
                 {T_D_SINK, FATTN_ACC_DSINK}};
    for (size_t n = 0; n < sizeof added / sizeof *added; ++n)
        if (a->c.flags & added[n].flag && a->present[added[n].id]) {
            fill(a, added[n].id, 0, 1);
            poison_unused(a, added[n].id);
        }
}

static void remember(attention *a) {
    for (int id = 0; id < T_COUNT; ++id)
        if (a->fields[id].memory) memcpy(a->fields[id].initial, a->fields[id].memory, a->fields[id].size);
}

static const fattn_tensor *tensor_or_null(const attention *a, enum tensor_id id) {
    return a->present[id] ? &a->t[id] : NULL;
}

static attention *build(fattn_ctx *ctx, const attention_case *given) {
    attention *const a = calloc(1, sizeof *a);
    cr_assert(a);
    attention_case *const c = &a->c;
    *c = *given;
    if (!c->Hkv) c->Hkv = c->Hq;
    if (!c->Dv) c->Dv = c->D;
    if (!c->dtype) c->dtype = FATTN_F64;
    a->ctx = ctx;
    a->params = (fattn_attention_params){.struct_size = sizeof a->params,
                                         .flags = c->flags,
                                         .algorithm = c->algorithm,
                                         .scale = c->scale,
                                         .softcap = c->softcap,
                                         .dropout_p = c->dropout_p,
                                         .window_left = c->window_left,
                                         .window_right = c->window_right,
                                         .q_pos0 = c->q_pos0,
                                         .k_pos0 = c->k_pos0,
                                         .unified_max = c->unified_max,
                                         .rng = {.seed = 0x123456789abcdefULL, .stream = 5}};
    if (c->rng_step) /* a slice of a larger batch */
        a->params.rng_batch0 = 3, a->params.rng_head0 = 1, a->params.rng_heads = (int)c->Hq + 2;
    if (c->lengths == LENGTHS_PACKED) a->params.max_seqlen_q = c->Sq, a->params.max_seqlen_k = c->Sk;
    place_all(a);

    static const struct {
        enum tensor_id id;
        unsigned omit;
    } gradients[] = {{T_DQ, NO_DQ}, {T_DK, NO_DK}, {T_DV, NO_DV}, {T_D_BIAS, NO_DBIAS}, {T_D_SINK, NO_DSINK}};
    for (int id = 0; id < T_COUNT; ++id) a->present[id] = a->t[id].dtype != 0;
    for (size_t n = 0; n < sizeof gradients / sizeof *gradients; ++n)
        if (c->omit & gradients[n].omit) a->present[gradients[n].id] = false;
    a->io = (fattn_attention_io){.struct_size = sizeof a->io,
                                 .q = tensor_or_null(a, T_Q),
                                 .k = tensor_or_null(a, T_K),
                                 .v = tensor_or_null(a, T_V),
                                 .o = tensor_or_null(a, T_O),
                                 .lse = tensor_or_null(a, T_LSE),
                                 .bias = tensor_or_null(a, T_BIAS),
                                 .alibi = tensor_or_null(a, T_ALIBI),
                                 .sink = tensor_or_null(a, T_SINK),
                                 .seqlens_q = tensor_or_null(a, T_SEQLENS_Q),
                                 .seqlens_k = tensor_or_null(a, T_SEQLENS_K),
                                 .cu_seqlens_q = tensor_or_null(a, T_CU_Q),
                                 .cu_seqlens_k = tensor_or_null(a, T_CU_K),
                                 .rng_step = tensor_or_null(a, T_RNG_STEP),
                                 .d_o = tensor_or_null(a, T_D_O),
                                 .d_lse = tensor_or_null(a, T_D_LSE),
                                 .delta = tensor_or_null(a, T_DELTA),
                                 .dq = tensor_or_null(a, T_DQ),
                                 .dk = tensor_or_null(a, T_DK),
                                 .dv = tensor_or_null(a, T_DV),
                                 .d_bias = tensor_or_null(a, T_D_BIAS),
                                 .d_sink = tensor_or_null(a, T_D_SINK)};
    return a;
}

attention *attention_new(fattn_ctx *ctx, const attention_case *c) {
    attention *const a = build(ctx, c);
    fill_inputs(a);
    fill_partial_results(a);
    remember(a);
    return a;
}

attention *attention_twin(const attention *a, fattn_dtype dtype) {
    attention_case c = a->c;
    c.dtype = dtype;
    c.layout = LAYOUT_BHSD;
    c.wide = false;
    attention *const twin = build(a->ctx, &c);
    for (int id = 0; id < T_COUNT; ++id) {
        if (!a->present[id]) continue;
        const fattn_tensor to = distinct(&twin->t[id]), from = distinct(&a->t[id]);
        cr_assert_eq(fattn_tensor_copy(a->ctx, &to, &from), FATTN_OK, "%s", fattn_ctx_error(a->ctx));
    }
    remember(twin);
    return twin;
}

void attention_free(attention *a) {
    for (int id = 0; id < T_COUNT; ++id) field_free(&a->fields[id]);
    field_free(&a->workspace);
    field_free(&a->saved);
    free(a);
}

/* --- runs ------------------------------------------------------------------------------------- */

static void reset(attention *a, enum tensor_id id) {
    const field *const f = &a->fields[a->home[id]];
    if (a->t[id].dtype) memcpy(f->memory, f->initial, f->size);
}

void attention_reset(attention *a) {
    for (int n = 0; n < 7; ++n) reset(a, attention_outputs[n]);
}

void attention_start(attention *a, enum tensor_id id, double x) {
    reset(a, id);
    int64_t at[FATTN_MAX_DIMS] = {0};
    for (int64_t n = 0; n < fattn_tensor_numel(&a->t[id]); ++n) {
        attention_index(&a->t[id], n, at);
        attention_set(&a->t[id], at, x);
    }
    const field *const f = &a->fields[a->home[id]];
    memcpy(f->initial, f->memory, f->size);
}

/* sum_d dO O - dL, as a caller may have computed it before. */
static void fill_delta(attention *a) {
    const fattn_tensor *const d_o = &a->t[T_D_O], *const delta = &a->t[T_DELTA];
    int64_t at[FATTN_MAX_DIMS] = {0};
    for (int64_t n = 0; n < fattn_tensor_numel(delta); ++n) {
        attention_index(delta, n, at);
        double sum = a->present[T_D_LSE] ? -attention_get(&a->t[T_D_LSE], at) : 0;
        for (at[3] = 0; at[3] < a->c.Dv; ++at[3]) sum += attention_get(d_o, at) * attention_get(&a->t[T_O], at);
        attention_set(delta, at, attention_in_use(a, T_DELTA, at) ? sum : NAN);
    }
}

static void plan(attention *a) {
    if (a->workspace.memory) return;
    a->plan = (fattn_attention_plan){.struct_size = sizeof a->plan};
    cr_assert_eq(fattn_attention_query(a->ctx, &a->params, &a->io, &a->plan), FATTN_OK, "%s: %s", a->c.name,
                 fattn_ctx_error(a->ctx));
    const size_t f = a->plan.fwd_workspace, b = a->plan.bwd_workspace;
    a->workspace = field_new(f > b ? f : b, 4);
    a->saved = field_new(a->plan.saved_bytes, 4);
    a->io.workspace = a->workspace.memory + GUARD;
    a->io.saved = a->saved.memory + GUARD;
    a->io.saved_bytes = a->plan.saved_bytes;
}

/* Sets the bits of all bytes that the pass may change. Rows of four dimensions are in use as a whole. */
static void open_tensor(const attention *a, enum tensor_id id, unsigned char *open) {
    const fattn_tensor view = distinct(&a->t[id]);
    const size_t element = fattn_dtype_size((fattn_dtype)view.dtype);
    const unsigned char *const memory = a->fields[a->home[id]].memory;
    const int64_t first = (const unsigned char *)view.data - memory;
    const int64_t count = fattn_tensor_numel(&view);
    const int64_t step = view.ndim == 4 && view.stride[3] == 1 && count > 0 ? view.shape[3] : 1;
    int64_t at[FATTN_MAX_DIMS] = {0};
    for (int64_t n = 0; n < count; n += step) {
        attention_index(&view, n, at);
        if (attention_in_use(a, id, at))
            memset(open + first + offset_of(&view, at) * (int64_t)element, 0xff, (size_t)step * element);
    }
}

enum { FIELDS = T_COUNT + 2 };

/* A copy of all memory, and the bits that may change. */
typedef struct watch {
    const field *fields[FIELDS];
    unsigned char *before[FIELDS], *open[FIELDS];
} watch;

static watch watch_start(const attention *a, enum fattni_pass pass, size_t workspace) {
    watch w = {{0}};
    for (int n = 0; n < FIELDS; ++n) {
        const field *const f = n < T_COUNT ? &a->fields[n] : n == T_COUNT ? &a->workspace : &a->saved;
        if (!f->memory) continue;
        w.fields[n] = f;
        w.before[n] = malloc(f->size);
        w.open[n] = calloc(f->size, 1);
        cr_assert(w.before[n] && w.open[n]);
        memcpy(w.before[n], f->memory, f->size);
    }
    for (int n = 0; n < 7; ++n) {
        const enum tensor_id id = attention_outputs[n];
        if (a->present[id] && (pass == FATTNI_FWD) == (n < 2)) open_tensor(a, id, w.open[a->home[id]]);
    }
    if (w.open[T_COUNT]) memset(w.open[T_COUNT] + GUARD, 0xff, workspace);
    if (w.open[T_COUNT + 1] && pass == FATTNI_FWD) memset(w.open[T_COUNT + 1] + GUARD, 0xff, a->plan.saved_bytes);
    return w;
}

/* The first word that has changed though it may not; `size`, a multiple of 8, if there is none. */
static size_t first_changed(const unsigned char *now, const unsigned char *before, const unsigned char *open,
                            size_t size) {
    for (size_t byte = 0; byte < size; byte += 8) {
        uint64_t x, y, mask;
        memcpy(&x, now + byte, 8), memcpy(&y, before + byte, 8), memcpy(&mask, open + byte, 8);
        if ((x ^ y) & ~mask) return byte;
    }
    return size;
}

static void watch_end(const attention *a, enum fattni_pass pass, watch *w) {
    for (int n = 0; n < FIELDS; ++n) {
        const size_t size = w->fields[n] ? w->fields[n]->size : 0;
        const size_t byte = size ? first_changed(w->fields[n]->memory, w->before[n], w->open[n], size) : 0;
        if (byte < size)
            cr_assert_fail("%s: %s wrote outside of its results, near %s, byte %lld of %zu", a->c.name,
                           pass == FATTNI_FWD ? "forward" : "backward",
                           n < T_COUNT    ? attention_names[n]
                           : n == T_COUNT ? "the workspace"
                                          : "saved",
                           (long long)byte - GUARD, size - 2 * (size_t)GUARD);
        free(w->before[n]);
        free(w->open[n]);
    }
}

static fattn_status run_reference(attention *a, enum fattni_pass pass, enum engine by) {
    fattni_problem p;
    FATTNI_TRY(fattni_problem_init(a->ctx, &a->params, &a->io, pass, true, &p));
    typedef fattn_status reference(fattn_ctx *, const fattni_problem *);
    reference *const by_engine[][2] = {[REFERENCE] = {fattni_fwd_ref, fattni_bwd_ref},
                                       [QUAD] = {fwd_ref_quad, bwd_ref_quad},
                                       [UNFUSED] = {fwd_ref_bf16, bwd_ref_bf16}};
    if (by == UNFUSED && p.dtype == FATTN_F16) return (pass == FATTNI_FWD ? fwd_ref_f16 : bwd_ref_f16)(a->ctx, &p);
    return by_engine[by][pass](a->ctx, &p);
}

static void run(attention *a, enum fattni_pass pass, enum engine by) {
    if (by == LIBRARY) plan(a);
    const size_t workspace = pass == FATTNI_FWD ? a->plan.fwd_workspace : a->plan.bwd_workspace;
    a->io.workspace_bytes = workspace;
    watch w = watch_start(a, pass, workspace);
    const fattn_mem before = fattn_ctx_mem(a->ctx);
    fattn_status s;
    if (by == ON_DEVICE)
        s = a->on_device(a, pass);
    else if (by != LIBRARY)
        s = run_reference(a, pass, by);
    else if (pass == FATTNI_FWD)
        s = fattn_attention_fwd(a->ctx, &a->params, &a->io);
    else
        s = fattn_attention_bwd(a->ctx, &a->params, &a->io);
    cr_assert_eq(s, FATTN_OK, "%s: %s", a->c.name, fattn_ctx_error(a->ctx));
    const fattn_mem after = fattn_ctx_mem(a->ctx);
    cr_assert_eq(after.live, before.live, "%s: %zu bytes leaked", a->c.name, after.live - before.live);
    cr_assert(by != LIBRARY || after.allocs == before.allocs, "%s: the call allocated", a->c.name);
    watch_end(a, pass, &w);
}

void attention_forward(attention *a, enum engine by) {
    reset(a, T_O);
    reset(a, T_LSE);
    run(a, FATTNI_FWD, by);
}

void attention_backward(attention *a, enum engine by) {
    for (int n = 2; n < 7; ++n) reset(a, attention_outputs[n]);
    if (a->present[T_DELTA]) fill_delta(a);
    run(a, FATTNI_BWD, by);
}

void attention_run(attention *a, enum engine by) {
    attention_forward(a, by);
    attention_backward(a, by);
}

/* --- comparisons ------------------------------------------------------------------------------ */

static void match_one(const attention *got, const attention *want, const attention *baseline, enum tensor_id id,
                      double factor, fattn_tolerance tol) {
    if (!got->present[id] || !want->present[id]) return;
    const fattn_tensor g = distinct(&got->t[id]), w = distinct(&want->t[id]);
    const fattn_tensor low = baseline ? distinct(&baseline->t[id]) : w;
    fattn_report r = {.struct_size = sizeof r};
    const fattn_status s = fattn_compare(got->ctx, &g, &w, baseline ? &low : NULL, factor, tol, &r);
    cr_assert_eq(s, FATTN_OK, "%s (%s): %s: %s", got->c.name, fattn_dtype_name(got->c.dtype), attention_names[id],
                 fattn_ctx_error(got->ctx));
}

void attention_match(const attention *got, const attention *want, const attention *baseline, double factor,
                     fattn_tolerance tol) {
    for (int n = 0; n < 7; ++n) match_one(got, want, baseline, attention_outputs[n], factor, tol);
}

/* Largest finite magnitude. */
static double largest(const attention *a, enum tensor_id id) {
    if (!a->present[id]) return 0;
    const fattn_tensor t = distinct(&a->t[id]);
    int64_t at[FATTN_MAX_DIMS] = {0};
    double most = 0;
    for (int64_t n = 0; n < fattn_tensor_numel(&t); ++n) {
        attention_index(&t, n, at);
        const double x = fabs(attention_get(&t, at));
        if (isfinite(x)) most = fmax(most, x);
    }
    return most;
}

/* Error of a sum of n products, relative to the sum of magnitudes, in units of u, half the distance
   from 1 to the next number: n in the worst case, and at most 8 sqrt(n) with a probability of failure
   that no test will see (Higham and Mary 2019). */
static double growth(int64_t n) { return fmin((double)n, 8 * sqrt((double)n)); }

/* First-order error analysis with maximum norms: |x| is the largest magnitude of a tensor, all
   errors in units of u, keep = 1/(1 - p).

   a score        es = growth(D + 4) scale D |q||k| + 4 (|slope| positions + |bias|); a softcap does
                  not amplify it
   L              es + growth(Sk + 8) + 4 |L|, the sink's weight among them
   P, relative    ep = 2 es + growth(Sk + 8) + 2 |L|: once for s, once for L
   O              eo = (ep + growth(Sk + 4)) (keep |v| + |O|), as sum P = 1; likewise a merge
   dP, delta      at most A = 2 Dv |dO| max(keep |v|, |O|) + |dL|, off by growth(Dv + 8) A +
                  Dv |dO| eo
   G, over P      eg = A (2 ep + growth(Dv + 8)) + Dv |dO| eo
   dQ             scale |k| (eg + growth(Sk + 4) A)
   dK, dV         as dQ and O, over the rows that a key sees, of whose P each is at most 1
   dbias, dsink   over all rows */
void attention_match_rounded(const attention *got, const attention *want) {
    const attention_case *c = &got->c;
    const double u = c->dtype == FATTN_F64 ? 0x1p-53 : 0x1p-24;
    const double keep = 1 / (1 - (double)c->dropout_p);
    const double scale = c->scale > 0 ? (double)c->scale : 1 / sqrt((double)c->D);
    const double q = largest(want, T_Q), k = largest(want, T_K), v = largest(want, T_V);
    const double o = largest(want, T_O), L = largest(want, T_LSE), d_o = largest(want, T_D_O);
    const double positions = (double)(c->Sq + c->Sk + c->q_pos0 + c->k_pos0), Dv = (double)c->Dv;
    const int64_t rows = c->Sq * (c->Hq / c->Hkv), every = c->B * c->Hq * c->Sq;
    const double es = growth(c->D + 4) * scale * (double)c->D * q * k +
                      4 * (largest(want, T_ALIBI) * positions + largest(want, T_BIAS));
    const double ep = 2 * es + growth(c->Sk + 8) + 2 * L;
    const double eo = (ep + growth(c->Sk + 4)) * (keep * v + o);
    const double A = 2 * Dv * d_o * fmax(v * keep, o) + largest(want, T_D_LSE);
    const double eg = A * (2 * ep + growth(c->Dv + 8)) + Dv * d_o * eo;
    const double bounds[7] = {
        eo,
        es + growth(c->Sk + 8) + 4 * L,
        scale * k * (eg + growth(c->Sk + 4) * A),
        scale * q * (double)rows * (eg + growth(rows + 4) * A),
        d_o * keep * (double)rows * (ep + growth(rows + 4)),
        (double)every * (eg + growth(every) * A),
        (double)every * (eg + growth(every) * A),
    };
    for (int n = 0; n < 7; ++n) {
        const enum tensor_id id = attention_outputs[n];
        const double stored = 4 * largest(want, id); /* and the values that it was added to */
        const fattn_tolerance tol = {u * (bounds[n] + stored) + 1e-300, 1e-30, 0};
        match_one(got, want, NULL, id, 0, tol);
    }
}

void attention_same_bits(const attention *a, const attention *b) {
    for (int n = 0; n < 7; ++n) {
        const enum tensor_id id = attention_outputs[n];
        if (!a->present[id] || !b->present[id]) continue;
        const field *const f = &a->fields[a->home[id]], *const g = &b->fields[b->home[id]];
        cr_assert_eq(f->size, g->size);
        cr_assert_eq(memcmp(f->memory, g->memory, f->size), 0, "%s: the bits of %s differ", a->c.name,
                     attention_names[id]);
    }
}

fattn_ctx *attention_context(int threads) {
    const fattn_ctx_options o = {.struct_size = sizeof o, .cpu_threads = threads};
    fattn_ctx *ctx;
    cr_assert_eq(fattn_ctx_create(&o, &ctx), FATTN_OK);
    return ctx;
}

fattn_ctx *attention_context_isa(int threads, int isa) {
    const fattn_ctx_options o = {.struct_size = sizeof o, .cpu_threads = threads, .arch_cap = isa};
    fattn_ctx *ctx;
    cr_assert_eq(fattn_ctx_create(&o, &ctx), FATTN_OK);
    if (ctx->isa == isa) return ctx;
    fattn_ctx_destroy(ctx);
    return NULL;
}

void attention_round_d_o(attention *a, fattn_dtype dtype) {
    const fattn_tensor *const t = &a->t[T_D_O];
    int64_t at[FATTN_MAX_DIMS] = {0};
    for (int64_t n = 0; n < fattn_tensor_numel(t); ++n) {
        double cell; /* storage for any dtype */
        attention_index(t, n, at);
        fattni_store(&cell, dtype, 0, attention_get(t, at));
        attention_set(t, at, fattni_load(&cell, dtype, 0));
    }
}

/* Gradients of a bias and of sinks are sums over many rows of terms that cancel within a row up to
   dO.(O - rounded O). Other outputs are compared with the error of the unfused computation, or, where
   too few numbers make its largest error unreliable, with the error of delta from rounding O. */
void attention_match_16_bits(const attention *got, const attention *want, const attention *low) {
    const attention_case *const c = &got->c;
    const double eps = c->dtype == FATTN_BF16 ? 0x1p-9 : 0x1p-12;
    const double rows = (double)(c->B * c->Hq * (c->Sq + 1) * (c->Dv + 1));
    const double floor = rows < 4096 ? eps * sqrt((double)c->Dv) / (1 - (double)c->dropout_p) : 2e-6;
    attention rest = *got, sums = *got;
    for (int n = 0; n < 7; ++n) (n > 4 ? &rest : &sums)->present[attention_outputs[n]] = false;
    attention_match(&rest, want, low, 3, (fattn_tolerance){.atol = floor});
    attention_match(&sums, want, low, 3, (fattn_tolerance){.atol = eps * sqrt(rows)});
}
