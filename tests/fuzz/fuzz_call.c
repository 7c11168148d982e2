#include "fuzz_call.h"

#include "core/tensor/numeric.h"

#include <math.h>
#include <string.h>

enum { MOST_ELEMENTS = 1 << 13, MOST_SEQUENCES = 4, NORMALS = 1021 };
static void *const untouchable = (void *)4096;

/* A dimension is a letter: B of the buffers, N sequences, E = N + 1, heads H of q and G of k, rows R
   of q and C of k in the buffers, head dimensions D and V, rows q and keys k of a sequence at most.
   A dtype: t as q, s of statistics, o of results, b of the bias, i integer. */
typedef struct kind {
    const char *name;
    size_t field;
    const char *dims;
    char dtype;
    bool output;
} kind;

#define FIELD(name) offsetof(fattn_attention_io, name)
static const kind kinds[TENSORS] = {
    [Q] = {"q", FIELD(q), "BHRD", 't', false},
    [K] = {"k", FIELD(k), "BGCD", 't', false},
    [V] = {"v", FIELD(v), "BGCV", 't', false},
    [O] = {"o", FIELD(o), "BHRV", 'o', true},
    [LSE] = {"lse", FIELD(lse), "BHR", 's', true},
    [BIAS] = {"bias", FIELD(bias), "NHqk", 'b', false},
    [ALIBI] = {"alibi", FIELD(alibi), "H", 's', false},
    [SINK] = {"sink", FIELD(sink), "H", 's', false},
    [SEQLENS_Q] = {"seqlens_q", FIELD(seqlens_q), "N", 'i', false},
    [SEQLENS_K] = {"seqlens_k", FIELD(seqlens_k), "N", 'i', false},
    [CU_Q] = {"cu_seqlens_q", FIELD(cu_seqlens_q), "E", 'i', false},
    [CU_K] = {"cu_seqlens_k", FIELD(cu_seqlens_k), "E", 'i', false},
    [RNG_STEP] = {"rng_step", FIELD(rng_step), "", 'i', false},
    [D_O] = {"d_o", FIELD(d_o), "BHRV", 'o', false},
    [D_LSE] = {"d_lse", FIELD(d_lse), "BHR", 's', false},
    [DELTA] = {"delta", FIELD(delta), "BHR", 's', false},
    [DQ] = {"dq", FIELD(dq), "BHRD", 'o', true},
    [DK] = {"dk", FIELD(dk), "BGCD", 'o', true},
    [DV] = {"dv", FIELD(dv), "BGCV", 'o', true},
    [D_BIAS] = {"d_bias", FIELD(d_bias), "NHqk", 's', true},
    [D_SINK] = {"d_sink", FIELD(d_sink), "H", 's', true},
};

bool fuzz_is_output(int tensor) { return kinds[tensor].output; }
const char *fuzz_tensor_name(int tensor) { return kinds[tensor].name; }

/* --- choices ---------------------------------------------------------------------------------- */

typedef struct sizes {
    int64_t of[128]; /* by letter */
    int64_t lengths_q[MOST_SEQUENCES], lengths_k[MOST_SEQUENCES];
    bool packed;
} sizes;

static int64_t a_length(fuzz_input *in) {
    static const uint8_t common[] = {5, 1, 0, 2, 3, 4, 7, 8, 15, 16, 17, 31, 33, 64, 65, 130};
    return common[fuzz_below(in, sizeof common)];
}

static int64_t a_head_dim(fuzz_input *in) {
    static const uint8_t common[] = {8, 1, 2, 3, 4, 5, 7, 16, 17, 32, 33, 64, 80, 128, 200, 255};
    return common[fuzz_below(in, sizeof common)];
}

static void choose_sizes(fuzz_input *in, sizes *s, fattn_attention_params *p) {
    int64_t *const of = s->of;
    const int64_t N = 1 + fuzz_below(in, MOST_SEQUENCES - 1), G = 1 + fuzz_below(in, 3);
    of['N'] = of['B'] = N, of['G'] = G;
    of['H'] = G * (1 + fuzz_below(in, 3));
    of['D'] = a_head_dim(in);
    const int64_t Dv = fuzz_byte(in);
    of['V'] = Dv ? Dv : of['D'];
    of['R'] = of['q'] = a_length(in);
    of['C'] = of['k'] = a_length(in);
    for (int64_t n = 0; n < N; ++n) {
        s->lengths_q[n] = of['q'] - fuzz_below(in, (unsigned)of['q'] + 1);
        s->lengths_k[n] = of['k'] - fuzz_below(in, (unsigned)of['k'] + 1);
    }
    s->packed = fuzz_below(in, 4) == 3;
    if (s->packed) { /* lengths of R rows, up to q of them in a sequence */
        of['B'] = 1;
        of['R'] = fuzz_below(in, 3), of['C'] = fuzz_below(in, 3);
        for (int64_t n = 0; n < N; ++n) of['R'] += s->lengths_q[n], of['C'] += s->lengths_k[n];
        p->max_seqlen_q = of['q'], p->max_seqlen_k = of['k'];
    }
}

/* One or two sizes too large for any machine, in all tensors alike. */
static void spoil_sizes(fuzz_input *in, sizes *s, fattn_attention_params *p) {
    static const char letters[] = "NBHGRCDVqk";
    for (unsigned n = fuzz_below(in, 3); n > 0; --n)
        s->of[(int)letters[fuzz_below(in, sizeof letters - 1)]] = fuzz_hostile(in);
    if (s->packed)
        p->max_seqlen_q = s->of['q'], p->max_seqlen_k = s->of['k'];
    else
        s->of['R'] = s->of['q'], s->of['C'] = s->of['k'], s->of['B'] = s->of['N'];
    s->of['E'] = s->of['N'] < INT64_MAX ? s->of['N'] + 1 : s->of['N'];
}

static void choose_params(fuzz_input *in, fattn_attention_params *p) {
    static const uint32_t flags[] = {
        FATTN_CAUSAL,        FATTN_CAUSAL_TOP_LEFT, FATTN_WINDOW,     FATTN_MERGE,     FATTN_ACC_DQ,
        FATTN_ACC_DK,        FATTN_ACC_DV,          FATTN_ACC_DBIAS,  FATTN_ACC_DSINK, FATTN_TF32,
        FATTN_DETERMINISTIC, FATTN_EXACT_DELTA,     FATTN_UNIFIED_MAX};
    static const float scales[] = {0, 0.5f, 1, 4}, caps[] = {0, 0, 1, 30};
    static const float dropout[] = {0, 0, 0, 0.1f, 0.5f, 0.9f, 1e-9f, 1};
    const uint64_t bits = fuzz_word(in, 2);
    for (unsigned n = 0; n < sizeof flags / sizeof *flags; ++n)
        if (bits >> n & 1) p->flags |= flags[n];
    p->algorithm = (int32_t)fuzz_below(in, 4);
    p->scale = scales[fuzz_below(in, 4)];
    p->softcap = caps[fuzz_below(in, 4)];
    p->dropout_p = dropout[fuzz_below(in, 8)];
    p->rng.seed = fuzz_byte(in);
    p->unified_max = (float)p->rng.seed - 128;
    p->window_left = (int8_t)fuzz_byte(in), p->window_right = (int8_t)fuzz_byte(in);
    p->q_pos0 = fuzz_below(in, 32), p->k_pos0 = fuzz_below(in, 32);
}

/* --- tensors ---------------------------------------------------------------------------------- */

/* Row-major; [B,S,H,D]; gaps between rows and arbitrary strides for single ones; rows in reverse. */
static void lay_out(fattn_tensor *t, unsigned layout) {
    static const int row_major[] = {0, 1, 2, 3}, permuted[] = {0, 2, 1, 3};
    const int *const order = layout == 1 && t->ndim >= 3 ? permuted : row_major;
    uint64_t stride = 1; /* may wrap: then the tensor is rejected */
    for (int n = t->ndim - 1; n >= 0; --n) {
        t->stride[order[n]] = (int64_t)stride;
        stride *= (uint64_t)t->shape[order[n]];
        if (layout == 2 && n == 3) stride += 1;
    }
    for (int d = 0; d < t->ndim && layout == 2; ++d)
        if (t->shape[d] == 1) t->stride[d] = -12345;
    const int rows = t->ndim > 2 ? 2 : 0;
    if (layout == 3 && t->ndim) t->stride[rows] = (int64_t)(0 - (uint64_t)t->stride[rows]);
}

static fattn_dtype dtype_of(char letter, fattn_dtype t, bool wide) {
    const fattn_dtype statistic = t == FATTN_F64 ? FATTN_F64 : FATTN_F32;
    switch (letter) {
    case 't': return t;
    case 's': return statistic;
    case 'i': return FATTN_I32;
    default: return wide ? statistic : t;
    }
}

/* The field of io that points to it. */
static const fattn_tensor **slot(fuzz_call *c, int tensor) {
    return (const fattn_tensor **)(void *)((char *)&c->io + kinds[tensor].field);
}

static void choose_tensors(fuzz_input *in, fuzz_call *c, const sizes *s) {
    static const fattn_dtype dtypes[] = {FATTN_F64, FATTN_F32, FATTN_F16, FATTN_BF16};
    const fattn_dtype t = dtypes[fuzz_below(in, 4)];
    const bool wide = fuzz_below(in, 2);
    const unsigned inputs = fuzz_byte(in), missing = fuzz_byte(in), over = fuzz_byte(in);
    const unsigned layouts = (unsigned)fuzz_word(in, 4);
    for (int n = 0; n < TENSORS; ++n) {
        fattn_tensor *const x = &c->t[n];
        x->dtype = dtype_of(kinds[n].dtype, t, wide);
        x->device = FATTN_CPU;
        x->ndim = (int32_t)strlen(kinds[n].dims);
        for (int d = 0; d < x->ndim; ++d) x->shape[d] = s->of[(int)kinds[n].dims[d]];
        const bool bias = n == BIAS || n == D_BIAS;
        for (int d = 0; d < 4 && bias; ++d) /* broadcast over it by size */
            if (over >> d & 1) x->shape[d] = 1;
        lay_out(x, layouts >> (n % 16 * 2) & 3);
        for (int d = 0; d < 4 && bias; ++d) /* or by stride */
            if (over >> (d + 4) & 1) x->stride[d] = 0;
    }
    bool present[TENSORS];
    for (int n = 0; n < TENSORS; ++n) present[n] = true;
    present[BIAS] = inputs & 1;
    present[ALIBI] = inputs & 2;
    present[SINK] = inputs & 4;
    present[RNG_STEP] = inputs & 8;
    present[D_LSE] = inputs & 16;
    present[DELTA] = inputs & 32;
    present[SEQLENS_Q] = !s->packed && inputs & 64;
    present[SEQLENS_K] = !s->packed && inputs & 128;
    present[CU_Q] = present[CU_K] = s->packed;
    present[DQ] = !(missing & 1);
    present[DK] = !(missing & 2);
    present[DV] = !(missing & 4);
    present[D_BIAS] = present[BIAS] && !(missing & 8);
    present[D_SINK] = present[SINK] && !(missing & 16);
    for (int n = 0; n < TENSORS; ++n) *slot(c, n) = present[n] ? &c->t[n] : NULL;
}

/* Sets one field of a tensor, of the params or of io to an invalid value. */
static void edit(fuzz_input *in, fuzz_call *c) {
    const unsigned what = fuzz_below(in, 10);
    fattn_tensor *const x = &c->t[fuzz_below(in, TENSORS)];
    const int64_t value = fuzz_hostile(in);
    const unsigned at = fuzz_byte(in);
    c->edited = true;
    switch (what) {
    case 0: x->shape[at % FATTN_MAX_DIMS] = value; break;
    case 1: x->stride[at % FATTN_MAX_DIMS] = value; break;
    case 2: x->ndim = (int32_t)value; break;
    case 3: x->dtype = (int32_t)value; break;
    case 4: x->device = (int32_t)value; break;
    case 5: x->device_id = (int32_t)value; break;
    case 6: { /* absent, or present again */
        const fattn_tensor **const field = slot(c, (int)(x - c->t));
        *field = *field ? NULL : x;
        break;
    }
    case 7: /* struct_size and reserved */
        memcpy((char *)&c->io + at % 2 * 4, &(uint32_t){(uint32_t)value}, 4);
        if (c->io.struct_size > sizeof c->io) c->io.struct_size = sizeof c->io;
        break;
    case 8: {
        const size_t place = at * 4 % sizeof *c->params;
        memcpy((char *)c->params + place, &(uint32_t){(uint32_t)value}, 4);
        break;
    }
    default: {
        const size_t place = at * 8 % sizeof *c->params;
        memcpy((char *)c->params + place, &value, 8);
    }
    }
}

/* --- memory ----------------------------------------------------------------------------------- */

/* Elements before the first one, and the number of elements spanned; false when they are too many, or the dtype
   is unknown. */
static bool span(const fattn_tensor *t, int64_t *before, int64_t *count) {
    double low = 0, high = 0;
    if (t->ndim < 0 || t->ndim > FATTN_MAX_DIMS || !fattn_dtype_size((fattn_dtype)t->dtype)) return false;
    for (int d = 0; d < t->ndim; ++d) {
        if (t->shape[d] < 0) return false;
        const double reach = (double)(t->shape[d] - 1) * (double)t->stride[d];
        if (t->shape[d] > 1 && reach < 0) low -= reach;
        if (t->shape[d] > 1 && reach > 0) high += reach;
    }
    for (int d = 0; d < t->ndim; ++d)
        if (t->shape[d] == 0) low = 0, high = -1;
    double elements = 1; /* more than the span has, where strides are 0 */
    for (int d = 0; d < t->ndim; ++d) elements *= (double)t->shape[d];
    const bool small = low + high < MOST_ELEMENTS && elements <= MOST_ELEMENTS;
    *before = small ? (int64_t)low : 0;
    *count = small ? (int64_t)(low + high + 1) : elements > 0;
    return small;
}

/* The same numbers each time: generating them would take longer than the calls. */
static void fill(fattn_ctx *ctx, void *memory, fattn_dtype t, int64_t count) {
    static unsigned char normals[FATTN_U8 + 1][NORMALS * sizeof(double)];
    static bool made[FATTN_U8 + 1];
    if (t == FATTN_I32 || t == FATTN_U8) return;
    const size_t size = fattn_dtype_size(t);
    if (!made[t]) {
        const int64_t n = NORMALS;
        const fattn_tensor flat = fattn_tensor_view(normals[t], t, FATTN_CPU, 0, 1, &n);
        made[t] = fattn_tensor_normal(ctx, &flat, 0, 1, (fattn_rng){.seed = 1}) == FATTN_OK;
        FUZZ_CHECK(made[t], "%s", fattn_ctx_error(ctx));
    }
    for (int64_t at = 0; at < count; at += NORMALS) {
        const int64_t n = count - at < NORMALS ? count - at : NORMALS;
        memcpy((char *)memory + (size_t)at * size, normals[t], (size_t)n * size);
    }
}

static void give_memory(fuzz_call *c) {
    c->runnable = true;
    for (int n = 0; n < TENSORS; ++n) {
        int64_t before = 0, count = 1;
        if (!*slot(c, n)) continue;
        const bool small = span(&c->t[n], &before, &count);
        c->runnable = c->runnable && small;
        c->t[n].data = count ? untouchable : NULL;
        if (!small || !count) continue;
        const size_t size = fattn_dtype_size((fattn_dtype)c->t[n].dtype);
        c->bytes[n] = (size_t)count * size;
        c->memory[n] = calloc(1, c->bytes[n]);
        c->before[n] = malloc(c->bytes[n]);
        FUZZ_CHECK(c->memory[n] && c->before[n], "no memory");
        c->t[n].data = (char *)c->memory[n] + (size_t)before * size;
        fill(c->ctx, c->memory[n], (fattn_dtype)c->t[n].dtype, count);
    }
}

static void put(const fuzz_call *c, int tensor, int64_t at, int64_t value) {
    const fattn_tensor *const t = &c->t[tensor];
    if (!c->memory[tensor] || t->dtype != FATTN_I32 || t->ndim != 1 || at >= t->shape[0]) return;
    ((int32_t *)t->data)[at * t->stride[0]] = (int32_t)value;
}

static void put_lengths(fuzz_call *c, const sizes *s) {
    int64_t end_q = 0, end_k = 0;
    for (int64_t n = 0; n < MOST_SEQUENCES; ++n) {
        put(c, SEQLENS_Q, n, s->lengths_q[n]);
        put(c, SEQLENS_K, n, s->lengths_k[n]);
        put(c, CU_Q, n, end_q);
        put(c, CU_K, n, end_k);
        end_q += s->lengths_q[n], end_k += s->lengths_k[n];
    }
    put(c, RNG_STEP, 0, 7);
}

/* Sets one element to an extreme value. */
static void spoil_element(fuzz_input *in, fuzz_call *c) {
    static const double extremes[] = {NAN, INFINITY, -INFINITY, 1e38, -1e38, 1e-40, -1, 1e9, 70000};
    const int n = (int)fuzz_below(in, TENSORS);
    const double x = extremes[fuzz_below(in, sizeof extremes / sizeof *extremes)];
    const uint64_t place = fuzz_word(in, 2);
    c->edited = true;
    if (!c->memory[n]) return;
    const size_t size = fattn_dtype_size((fattn_dtype)c->t[n].dtype);
    const int64_t at = (int64_t)(place % (c->bytes[n] / size));
    if (c->t[n].dtype == FATTN_I32)
        ((int32_t *)c->memory[n])[at] = x > -1e9 && x < 1e9 ? (int32_t)x : INT32_MIN;
    else
        fattni_store(c->memory[n], c->t[n].dtype, at, x);
}

/* --- a call ----------------------------------------------------------------------------------- */

/* With extra bytes of a newer caller when struct_size includes them, up to a limit. */
static void resize_params(fuzz_call *c) {
    enum { SURPLUS = 16 };
    const size_t known = sizeof *c->params;
    if (c->params->struct_size > known + SURPLUS) c->params->struct_size = known + SURPLUS;
    const size_t size = c->params->struct_size > 8 ? c->params->struct_size : 8;
    unsigned char *const exact = calloc(1, size);
    FUZZ_CHECK(exact, "no memory");
    memcpy(exact, c->params, size < known ? size : known);
    free(c->params);
    c->params = (fattn_attention_params *)(void *)exact;
}

static double multiplications(const sizes *s) {
    const int64_t *const of = s->of;
    return (double)of['N'] * (double)of['H'] * ((double)of['q'] + 1) * ((double)of['k'] + 1) *
           ((double)of['D'] + (double)of['V']);
}

void fuzz_call_open(fuzz_call *c, fuzz_input *in) {
    *c = (fuzz_call){.io = {.struct_size = sizeof c->io}};
    fattn_ctx_options o = {.struct_size = sizeof o, .cpu_threads = 1};
    const unsigned machine = fuzz_byte(in);
    o.arch_cap = (int32_t)(machine & 3);
    if (machine >> 2 & 1) o.flags = FATTN_CTX_DETERMINISTIC;
    if (machine >> 3 == 31) o.cpu_threads = 3;
    const fattn_status status = fattn_ctx_create(&o, &c->ctx);
    FUZZ_CHECK(status == FATTN_OK, "context");
    c->params = calloc(1, sizeof *c->params);
    FUZZ_CHECK(c->params, "no memory");
    c->params->struct_size = sizeof *c->params;

    sizes s = {0};
    choose_sizes(in, &s, c->params);
    choose_params(in, c->params);
    const unsigned spoiled = fuzz_byte(in);
    s.of['E'] = s.of['N'] + 1;
    if (spoiled & 1) spoil_sizes(in, &s, c->params), c->edited = true;
    choose_tensors(in, c, &s);
    for (unsigned n = spoiled >> 1 & 3; n > 0; --n) edit(in, c);
    resize_params(c);
    give_memory(c);
    put_lengths(c, &s);
    for (unsigned n = spoiled >> 3 & 3; n > 0; --n) spoil_element(in, c);
    c->work = multiplications(&s);
    for (int n = 0; n < TENSORS; ++n)
        if (c->memory[n]) memcpy(c->before[n], c->memory[n], c->bytes[n]);
}

void fuzz_call_close(fuzz_call *c) {
    for (int n = 0; n < TENSORS; ++n) {
        free(c->memory[n]);
        free(c->before[n]);
    }
    free(c->params);
    fattn_ctx_destroy(c->ctx);
}
