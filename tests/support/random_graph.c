#include "random_graph.h"

#include "core/tensor/philox.h"

#include <criterion/criterion.h>
#include <math.h>
#include <string.h>

enum { WEIGHTS = 400, MOST_VARIABLES = 40, MOST_ELEMENTS = 160, IDS = 6, CLASSES = 3, HEADS = 4, BORDER = 3 };

typedef struct graph {
    fattn_ctx *ctx;
    fattn_tape *t;
    uint64_t seed;
    uint32_t rolls;
    bool small; /* what attention gets is below 1: of large numbers o is rounded too coarsely for a comparison */
    fattn_dtype dtype;
    fattn_var weights, ids, borders; /* [WEIGHTS]; I32 [2,IDS/2] in 0..CLASSES-1; I32 [3] */
    const fattn_tensor *slopes;      /* [HEADS], F32 and F64 */
    fattn_var at[MOST_VARIABLES];
    int n;
} graph;

static int64_t roll(graph *g, int64_t n) {
    const fattni_block counter = {{g->rolls++, 0, 0, 0}};
    return (int64_t)(fattni_philox(g->seed, counter).w[0] % (uint64_t)n);
}

static fattn_tensor shape_of(const graph *g, fattn_var v) {
    fattn_tensor x;
    cr_assert_eq(fattn_tape_value(g->t, v, &x), FATTN_OK, "%s", fattn_ctx_error(g->ctx));
    return x;
}

static fattn_dtype wide(fattn_dtype t) { return t == FATTN_F64 ? FATTN_F64 : FATTN_F32; }

static int64_t last(const fattn_tensor *x) { return x->shape[x->ndim - 1]; }

/* Some of the weights, as a tensor of this shape: two of them may overlap. */
static fattn_var take(graph *g, int ndim, const int64_t *shape) {
    int64_t n = 1;
    for (int d = 0; d < ndim; ++d) n *= shape[d];
    const int64_t begin = roll(g, WEIGHTS - n + 1);
    return fattn_op_reshape(g->t, fattn_op_slice(g->t, g->weights, 0, begin, begin + n), ndim, shape);
}
static fattn_var vector(graph *g, int64_t n) { return take(g, 1, &n); }
static fattn_var vector_or_none(graph *g, int64_t n) { return roll(g, 2) ? vector(g, n) : (fattn_var){0}; }

static fattn_var any(graph *g) { return g->at[roll(g, g->n)]; }

/* A variable of x's shape, often another one than x, where there is one; else weights. */
static fattn_var like(graph *g, fattn_var x) {
    const fattn_tensor s = shape_of(g, x);
    const int64_t first = roll(g, g->n);
    for (int64_t i = 0; i < g->n; ++i) {
        const fattn_var y = g->at[(first + i) % g->n];
        const fattn_tensor o = shape_of(g, y);
        bool same = o.ndim == s.ndim;
        for (int d = 0; d < s.ndim && same; ++d) same = o.shape[d] == s.shape[d];
        if (same && (y.id != x.id || roll(g, 3) == 0)) return y;
    }
    return take(g, s.ndim, s.shape);
}

/* x, or a row-major copy where the elements of a row do not follow each other. */
static fattn_var rows(graph *g, fattn_var x) {
    const fattn_tensor s = shape_of(g, x);
    return s.stride[s.ndim - 1] == 1 || last(&s) == 1 ? x : fattn_op_cast(g->t, x, (fattn_dtype)s.dtype);
}

/* The first n ids as a vector: lengths, positions. */
static fattn_var some_ids(graph *g, int64_t n) {
    return fattn_op_slice(g->t, fattn_op_reshape(g->t, g->ids, 1, (int64_t[]){-1}), 0, 0, n);
}

/* Ops: {0} where x is not one for them. */

static fattn_var linear(graph *g, fattn_var x) {
    const fattn_tensor s = shape_of(g, x);
    const int64_t n = 1 + roll(g, 6), k = last(&s), matrix[2] = {n, k};
    fattn_tensor y = s;
    y.shape[y.ndim - 1] = n;
    if (n * k > WEIGHTS || fattn_tensor_numel(&y) > MOST_ELEMENTS) return (fattn_var){0};
    const fattn_var w = take(g, 2, matrix), bias = vector_or_none(g, n);
    x = rows(g, x);
    switch (roll(g, 5)) {
    case 0: return fattn_op_linear_gelu(g->t, x, w, bias);
    case 1: return fattn_op_linear_residual(g->t, x, w, bias, take(g, y.ndim, y.shape));
    case 2: {
        fattn_var normed;
        const fattn_var residual = take(g, y.ndim, y.shape), gain = vector(g, n);
        const fattn_var norm_bias = vector_or_none(g, n);
        const fattn_var sum = fattn_op_linear_norm(g->t, x, w, bias, residual, gain, norm_bias, 0.5f, &normed);
        if (roll(g, 3) == 0) return normed; /* the sum has no other consumer */
        if (g->n < MOST_VARIABLES) g->at[g->n++] = normed;
        return sum;
    }
    case 3: {
        const uint32_t flags = (uint32_t)roll(g, 4);
        const fattn_var gain = vector(g, k);
        const fattn_var norm_bias = flags & FATTN_NORM_RMS ? (fattn_var){0} : vector_or_none(g, k);
        return fattn_op_norm_linear(g->t, x, gain, norm_bias, 0.5f, w, bias, flags);
    }
    default: return fattn_op_linear(g->t, x, w, bias);
    }
}

static fattn_var matmul(graph *g, fattn_var x) {
    fattn_tensor s = shape_of(g, x);
    if (s.ndim < 2) return (fattn_var){0};
    if (roll(g, 3) == 0) return fattn_op_matmul(g->t, x, x, 0, 1);
    const int trans_a = (int)roll(g, 2), trans_b = (int)roll(g, 2);
    const int64_t k = s.shape[s.ndim - (trans_a ? 2 : 1)], n = 1 + roll(g, 4);
    s.shape[s.ndim - 2] = trans_b ? n : k, s.shape[s.ndim - 1] = trans_b ? k : n;
    if (fattn_tensor_numel(&s) > MOST_ELEMENTS) return (fattn_var){0};
    return fattn_op_matmul(g->t, x, take(g, s.ndim, s.shape), trans_a, trans_b);
}

/* b has x's shape, or fewer dimensions, or some of one element. */
static fattn_var add_or_mul(graph *g, fattn_var x) {
    const fattn_tensor s = shape_of(g, x);
    fattn_var b = like(g, x);
    if (roll(g, 2)) {
        const int from = (int)roll(g, s.ndim + 1), ndim = s.ndim - from;
        int64_t shape[FATTN_MAX_DIMS];
        for (int d = 0; d < ndim; ++d) shape[d] = roll(g, 3) ? s.shape[from + d] : 1;
        b = take(g, ndim, shape);
    }
    return roll(g, 3) ? fattn_op_add(g->t, x, b) : fattn_op_mul(g->t, x, b);
}

/* Without relu: a difference across its kink is no derivative. */
static fattn_var elementwise(graph *g, fattn_var x) {
    switch (roll(g, 6)) {
    case 0: return fattn_op_gelu(g->t, x);
    case 1: return fattn_op_silu(g->t, x);
    case 2: return fattn_op_scale(g->t, x, -0.75);
    case 3: return fattn_op_dropout(g->t, x, 0.25f, (fattn_rng){g->seed, g->rolls, 0}, (fattn_var){0});
    case 4: return fattn_op_cast(g->t, x, g->dtype);
    default: return fattn_op_tanh(g->t, x);
    }
}

static fattn_var gated(graph *g, fattn_var x) {
    const fattn_tensor s = shape_of(g, x);
    const int dim = (int)roll(g, s.ndim);
    const int64_t half = s.shape[dim] / 2;
    fattn_var up = like(g, x), gate = x;
    if (half && roll(g, 2)) {
        gate = fattn_op_slice(g->t, x, dim, 0, half);
        up = fattn_op_slice(g->t, x, dim, s.shape[dim] - half, s.shape[dim]);
    }
    return roll(g, 2) ? fattn_op_swiglu(g->t, gate, up) : fattn_op_geglu(g->t, gate, up);
}

static fattn_var reduce(graph *g, fattn_var x) {
    const fattn_tensor s = shape_of(g, x);
    int dims[FATTN_MAX_DIMS], n = 0;
    for (int d = s.ndim - 1; d >= 0; --d)
        if (roll(g, 3) == 0) dims[n++] = d;
    const int keep = (int)roll(g, 2);
    if (!keep && (n == 0 || n == s.ndim)) return (fattn_var){0}; /* no scalars: they have no dimension to go on with */
    return roll(g, 2) ? fattn_op_sum(g->t, x, dims, n, keep) : fattn_op_mean(g->t, x, dims, n, keep);
}

static fattn_var over_rows(graph *g, fattn_var x) {
    const fattn_tensor s = shape_of(g, x);
    const fattn_var gain = vector(g, last(&s)), bias = vector_or_none(g, last(&s));
    x = rows(g, x);
    switch (roll(g, 3)) {
    case 0: return fattn_op_softmax(g->t, x);
    case 1: return fattn_op_rmsnorm(g->t, x, gain, 0.5f);
    default: return fattn_op_layernorm(g->t, x, gain, bias, 0.5f);
    }
}

static fattn_var moved(graph *g, fattn_var x) {
    const fattn_tensor s = shape_of(g, x);
    const int dim = (int)roll(g, s.ndim), other = (int)roll(g, s.ndim);
    switch (roll(g, 5)) {
    case 0: return fattn_op_transpose(g->t, x, dim, other);
    case 1: {
        int order[FATTN_MAX_DIMS];
        for (int d = 0; d < s.ndim; ++d) order[d] = (d + dim) % s.ndim;
        return fattn_op_permute(g->t, x, s.ndim, order);
    }
    case 2: {
        const int64_t begin = roll(g, s.shape[dim]);
        return fattn_op_slice(g->t, x, dim, begin, begin + 1 + roll(g, s.shape[dim] - begin));
    }
    case 3: { /* an odd part and 2 divide an even number of elements */
        const int64_t whole = fattn_tensor_numel(&s), part = s.shape[dim];
        const bool halves = whole % 2 == 0 && part % 2 && roll(g, 2);
        const int64_t shape[3] = {roll(g, 2) ? 1 : part, -1, halves ? 2 : 1};
        return fattn_op_reshape(g->t, x, 3, shape);
    }
    default: {
        const fattn_var second = like(g, x), third = like(g, x), all[3] = {x, second, third};
        const int n = 2 + (int)roll(g, 2);
        return n * fattn_tensor_numel(&s) > MOST_ELEMENTS ? (fattn_var){0} : fattn_op_concat(g->t, all, n, dim);
    }
    }
}

/* x [B,S,C] is the q, k and v of all heads side by side, or x [B,H,S,D] each of them. */
static fattn_var attention(graph *g, fattn_var x) {
    const fattn_tensor s = shape_of(g, x);
    fattn_attention_vars a = {.struct_size = sizeof a};
    fattn_attention_params p = {.struct_size = sizeof p};
    x = rows(g, g->small ? fattn_op_tanh(g->t, x) : x);
    if (s.ndim == 4) {
        a.q = a.k = a.v = x;
        if (roll(g, 2)) a.v = rows(g, g->small ? fattn_op_tanh(g->t, like(g, x)) : like(g, x));
        if (roll(g, 2) && s.shape[2] > 1) a.q = fattn_op_slice(g->t, x, 2, s.shape[2] / 2, s.shape[2]);
        if (roll(g, 2)) a.k = fattn_op_slice(g->t, a.k, 1, 0, 1), a.v = fattn_op_slice(g->t, a.v, 1, 0, 1);
        if (roll(g, 2) && last(&s) % 2 == 0) a.q = fattn_op_rope(g->t, a.q, 100, roll(g, 3));
    } else if (s.ndim == 3 && last(&s) % 4 == 0) {
        const int d = (int)last(&s) / 4; /* two heads of q, one of k and v */
        a.q = fattn_op_heads(g->t, x, 0, 2, d);
        a.k = fattn_op_heads(g->t, x, 2, 1, d);
        a.v = fattn_op_heads(g->t, x, (int)roll(g, 4), 1, d);
    } else {
        return (fattn_var){0};
    }
    const fattn_tensor q = shape_of(g, a.q), k = shape_of(g, a.k);
    const int64_t batches = roll(g, 2) ? q.shape[0] : 1, heads = roll(g, 2) ? q.shape[1] : 1;
    if (roll(g, 3) == 0) a.sink = fattn_op_cast(g->t, vector(g, q.shape[1]), wide(g->dtype));
    if (roll(g, 3) == 0 && batches * heads * q.shape[2] * k.shape[2] <= WEIGHTS)
        a.bias = take(g, 4, (int64_t[]){batches, heads, q.shape[2], k.shape[2]});
    if (roll(g, 4) == 0 && q.shape[1] <= HEADS) {
        const fattn_tensor slopes = fattn_tensor_slice(&g->slopes[g->dtype == FATTN_F64], 0, 0, q.shape[1]);
        a.alibi = fattn_input(g->t, &slopes);
    }
    if (roll(g, 4) == 0 && q.shape[0] <= IDS && k.shape[2] >= CLASSES - 1) a.seqlens_k = some_ids(g, q.shape[0]);
    if (roll(g, 4) == 0 && q.shape[0] <= IDS && q.shape[2] >= CLASSES - 1) a.seqlens_q = some_ids(g, q.shape[0]);
    if (roll(g, 2) && q.shape[0] == 1 && q.shape[2] >= BORDER && k.shape[2] >= BORDER) {
        a.bias = a.seqlens_q = a.seqlens_k = (fattn_var){0};
        a.cu_seqlens_q = a.cu_seqlens_k = g->borders;
        p.max_seqlen_q = p.max_seqlen_k = BORDER;
    }
    static const uint32_t masks[4] = {0, FATTN_CAUSAL, FATTN_CAUSAL_TOP_LEFT, FATTN_WINDOW};
    p.flags = masks[roll(g, 4)];
    p.window_left = 1, p.window_right = (int32_t)roll(g, 2);
    if (roll(g, 3) == 0) p.softcap = 2;
    if (roll(g, 3) == 0) p.dropout_p = 0.25f, p.rng = (fattn_rng){g->seed, g->rolls, 0};
    static const int32_t algorithms[4] = {FATTN_ALGO_AUTO, FATTN_ALGO_STANDARD, FATTN_ALGO_FLASH1, FATTN_ALGO_FLASH2};
    p.algorithm = algorithms[roll(g, 4)];
    if (p.algorithm != FATTN_ALGO_STANDARD && roll(g, 4) == 0) p.flags |= FATTN_EXACT_DELTA;
    fattn_var lse;
    const fattn_var o = fattn_op_attention_ex(g->t, &a, &p, &lse);
    if (a.sink.id && roll(g, 2) && g->n < MOST_VARIABLES)
        g->at[g->n++] = fattn_op_cast(g->t, lse, g->dtype); /* finite for rows without keys, too */
    return roll(g, 2) ? fattn_op_merge(g->t, o) : o;
}

static fattn_var looked_up(graph *g, fattn_var x) {
    const fattn_tensor s = shape_of(g, x);
    if (s.ndim == 2 && s.shape[0] >= CLASSES) return fattn_op_embedding(g->t, rows(g, x), g->ids);
    const int64_t table[2] = {CLASSES + 1, 1 + roll(g, 5)};
    return fattn_op_embedding(g->t, take(g, 2, table), g->ids);
}

/* A loss over as many rows as there are ids, as [1,1]. */
static fattn_var loss(graph *g, fattn_var x) {
    const fattn_tensor s = shape_of(g, x);
    const int64_t n = fattn_tensor_numel(&s), each = n / IDS;
    if (n % IDS || each < 1) return (fattn_var){0};
    x = rows(g, fattn_op_reshape(g->t, x, 3, (int64_t[]){2, IDS / 2, each}));
    const int32_t ignore = (int32_t)roll(g, CLASSES + 1);
    fattn_var y;
    if (each >= CLASSES && roll(g, 2)) {
        y = fattn_op_cross_entropy(g->t, x, g->ids, ignore);
    } else {
        const fattn_var w = take(g, 2, (int64_t[]){CLASSES + 2, each});
        y = roll(g, 2) ? fattn_op_linear_cross_entropy(g->t, x, w, g->ids, ignore)
                       : fattn_op_linear_cross_entropy_padded(g->t, x, w, g->ids, ignore, CLASSES);
    }
    return fattn_op_reshape(g->t, fattn_op_cast(g->t, y, g->dtype), 2, (int64_t[]){1, 1});
}

static fattn_var build(fattn_tape *t, const fattn_var *in, int n_in, void *user) {
    static fattn_var (*const ops[])(graph *, fattn_var) = {linear,    matmul,    add_or_mul, elementwise, gated,
                                                           reduce,    over_rows, moved,      moved,       attention,
                                                           attention, looked_up, loss};
    (void)n_in;
    graph *const g = user;
    g->t = t, g->rolls = 0, g->n = 0;
    g->weights = in[0], g->ids = in[3], g->borders = in[4];
    g->at[g->n++] = in[1], g->at[g->n++] = in[2];
    g->dtype = (fattn_dtype)shape_of(g, in[0]).dtype;
    for (int64_t left = 3 + roll(g, 12); left > 0; --left) {
        const fattn_var x = roll(g, 3) ? g->at[g->n - 1] : any(g);
        const fattn_var y = ops[roll(g, sizeof ops / sizeof *ops)](g, x);
        cr_assert_eq(fattn_tape_status(t), FATTN_OK, "seed %lu: %s", (unsigned long)g->seed, fattn_ctx_error(g->ctx));
        if (!y.id) continue;
        const fattn_tensor s = shape_of(g, y);
        if (s.ndim && g->n < MOST_VARIABLES && fattn_tensor_numel(&s) <= MOST_ELEMENTS) g->at[g->n++] = y;
    }
    fattn_var all[3]; /* the last one and two others, end to end */
    for (int i = 0; i < 3; ++i) all[i] = fattn_op_reshape(t, i ? any(g) : g->at[g->n - 1], 1, (int64_t[]){-1});
    return fattn_op_concat(t, all, 3, 0);
}

enum { INPUTS = 3 };
static const int64_t shapes[INPUTS][4] = {{WEIGHTS}, {2, 3, 8}, {2, 2, 3, 4}};
static const int dims[INPUTS] = {1, 3, 4};

typedef struct numbers {
    fattn_tensor ids, borders, slopes[2];
} numbers;

static fattn_tensor copied(fattn_ctx *ctx, const void *data, fattn_dtype dtype, int ndim, const int64_t *shape) {
    fattn_tensor t, host = fattn_tensor_view(NULL, dtype, FATTN_CPU, 0, ndim, shape);
    memcpy(&host.data, &data, sizeof data); /* only read */
    cr_assert_eq(fattn_tensor_alloc(ctx, dtype, ndim, shape, &t), FATTN_OK);
    cr_assert_eq(fattn_tensor_copy(ctx, &t, &host), FATTN_OK);
    return t;
}

static numbers numbers_alloc(fattn_ctx *ctx, uint64_t seed) {
    static const double slopes[HEADS] = {0.5, 0.25, 0, 0.125};
    static const float slopes_f32[HEADS] = {0.5f, 0.25f, 0, 0.125f};
    int32_t ids[IDS];
    const int32_t borders[3] = {0, 1 + (int32_t)(seed % 2), BORDER};
    for (int i = 0; i < IDS; ++i) ids[i] = (i * 5 + (int)(seed % 7)) % CLASSES;
    return (numbers){
        copied(ctx, ids, FATTN_I32, 2, (int64_t[]){2, IDS / 2}),
        copied(ctx, borders, FATTN_I32, 1, (int64_t[]){3}),
        {copied(ctx, slopes_f32, FATTN_F32, 1, (int64_t[]){HEADS}),
         copied(ctx, slopes, FATTN_F64, 1, (int64_t[]){HEADS})},
    };
}

static void numbers_free(fattn_ctx *ctx, numbers *n) {
    fattn_tensor_free(ctx, &n->ids);
    fattn_tensor_free(ctx, &n->borders);
    for (int i = 0; i < 2; ++i) fattn_tensor_free(ctx, &n->slopes[i]);
}

static void normal_alloc(fattn_ctx *ctx, uint64_t seed, fattn_dtype dtype, int input, fattn_tensor *t) {
    cr_assert_eq(fattn_tensor_alloc(ctx, dtype, dims[input], shapes[input], t), FATTN_OK);
    cr_assert_eq(fattn_tensor_normal(ctx, t, 0, 0.5, (fattn_rng){seed, (uint32_t)input, 0}), FATTN_OK);
}

void random_graph_check(fattn_ctx *ctx, uint64_t seed, fattn_dtype dtype) {
    fattn_tensor in[INPUTS + 2];
    numbers n = numbers_alloc(ctx, seed);
    for (int i = 0; i < INPUTS; ++i) normal_alloc(ctx, seed, dtype, i, &in[i]);
    in[INPUTS] = n.ids, in[INPUTS + 1] = n.borders;
    graph g = {.ctx = ctx, .seed = seed, .slopes = n.slopes};
    fattn_report r = {.struct_size = sizeof r};
    fattn_gradcheck_options o = {.struct_size = sizeof o, .order = 4, .max_coords = 16, .seed = seed};
    if (dtype == FATTN_F32) o.tol = (fattn_tolerance){.atol = 2e-3, .rtol = 2e-3}; /* scores may be some hundreds */
    const fattn_status s = fattn_gradcheck(ctx, build, &g, in, INPUTS + 2, &o, &r);
    cr_assert_eq(s, FATTN_OK, "seed %lu, %s: %s", (unsigned long)seed, fattn_dtype_name(dtype), fattn_ctx_error(ctx));
    cr_assert_eq(r.checked, 16 * INPUTS);
    for (int i = 0; i < INPUTS; ++i) fattn_tensor_free(ctx, &in[i]);
    numbers_free(ctx, &n);
}

enum { ELEMENTS = WEIGHTS + 48 + 48 };

static void fill(fattn_ctx *ctx, const fattn_tensor *t, double with) {
    double x[WEIGHTS];
    for (int i = 0; i < WEIGHTS; ++i) x[i] = with;
    const fattn_tensor host = fattn_tensor_view(x, FATTN_F64, FATTN_CPU, 0, t->ndim, t->shape);
    cr_assert_eq(fattn_tensor_copy(ctx, t, &host), FATTN_OK);
}

/* Gradients of a contraction of the graph's output at x, computed in dtype, with gradients of that dtype or F32. flags:
   of the inputs. */
static void gradients_with(fattn_ctx *ctx, uint64_t seed, fattn_dtype dtype, fattn_dtype grad, uint32_t flags,
                           const double *x, double *d) {
    fattn_param p[INPUTS];
    fattn_var in[INPUTS + 2];
    fattn_tensor weights;
    numbers n = numbers_alloc(ctx, seed);
    fattn_tape *t;
    cr_assert_eq(fattn_tape_create(ctx, &t), FATTN_OK);
    int64_t at = 0;
    for (int i = 0; i < INPUTS; ++i) {
        const fattn_tensor given = fattn_tensor_view((void *)(x + at), FATTN_F64, FATTN_CPU, 0, dims[i], shapes[i]);
        p[i] = (fattn_param){.name = "input", .flags = flags};
        cr_assert_eq(fattn_tensor_alloc(ctx, dtype, dims[i], shapes[i], &p[i].value), FATTN_OK);
        cr_assert_eq(fattn_tensor_alloc(ctx, grad, dims[i], shapes[i], &p[i].grad), FATTN_OK);
        cr_assert_eq(fattn_tensor_copy(ctx, &p[i].value, &given), FATTN_OK);
        fill(ctx, &p[i].grad, flags & FATTN_PARAM_ONE_PASS ? (double)NAN : 0);
        in[i] = fattn_use(t, &p[i]);
        at += fattn_tensor_numel(&given);
    }
    in[INPUTS] = fattn_input(t, &n.ids), in[INPUTS + 1] = fattn_input(t, &n.borders);
    graph g = {.ctx = ctx, .seed = seed, .slopes = n.slopes, .small = true};
    const fattn_var y = build(t, in, INPUTS + 2, &g);
    const fattn_tensor v = shape_of(&g, y);
    cr_assert_eq(fattn_tensor_alloc(ctx, dtype, v.ndim, v.shape, &weights), FATTN_OK);
    cr_assert_eq(fattn_tensor_normal(ctx, &weights, 0, 1, (fattn_rng){seed, INPUTS, 0}), FATTN_OK);
    const fattn_var loss = fattn_op_sum(t, fattn_op_mul(t, y, fattn_input(t, &weights)), NULL, 0, 0);
    cr_assert_eq(fattn_tape_backward(t, loss), FATTN_OK, "seed %lu: %s", (unsigned long)seed, fattn_ctx_error(ctx));
    at = 0;
    for (int i = 0; i < INPUTS; ++i) {
        const fattn_tensor out = fattn_tensor_view(d + at, FATTN_F64, FATTN_CPU, 0, dims[i], shapes[i]);
        cr_assert_eq(fattn_tensor_copy(ctx, &out, &p[i].grad), FATTN_OK);
        at += fattn_tensor_numel(&out);
        fattn_tensor_free(ctx, &p[i].value);
        fattn_tensor_free(ctx, &p[i].grad);
    }
    numbers_free(ctx, &n);
    fattn_tensor_free(ctx, &weights);
    fattn_tape_destroy(t);
}

static void gradients(fattn_ctx *ctx, uint64_t seed, fattn_dtype dtype, fattn_dtype grad, const double *x, double *d) {
    gradients_with(ctx, seed, dtype, grad, 0, x, d);
}

/* The inputs' elements, one after the other. */
static void inputs_of(fattn_ctx *ctx, uint64_t seed, fattn_dtype dtype, double *x) {
    int64_t at = 0;
    for (int i = 0; i < INPUTS; ++i) {
        fattn_tensor t;
        normal_alloc(ctx, seed, dtype, i, &t);
        const fattn_tensor out = fattn_tensor_view(x + at, FATTN_F64, FATTN_CPU, 0, dims[i], shapes[i]);
        cr_assert_eq(fattn_tensor_copy(ctx, &out, &t), FATTN_OK);
        at += fattn_tensor_numel(&out);
        fattn_tensor_free(ctx, &t);
    }
}

void random_graph_check_one_pass(fattn_ctx *ctx, uint64_t seed, fattn_dtype dtype) {
    static double x[ELEMENTS], added[ELEMENTS], stored[ELEMENTS];
    const bool narrow = dtype == FATTN_F16 || dtype == FATTN_BF16;
    const fattn_dtype grad = narrow && seed % 2 ? FATTN_F32 : dtype;
    inputs_of(ctx, seed, dtype, x);
    gradients_with(ctx, seed, dtype, grad, 0, x, added);
    gradients_with(ctx, seed, dtype, grad, FATTN_PARAM_ONE_PASS, x, stored);
    for (int i = 0; i < ELEMENTS; ++i)
        cr_assert_eq(stored[i], added[i], "seed %lu, %s: element %d is %.17g, not %.17g", (unsigned long)seed,
                     fattn_dtype_name(dtype), i, stored[i], added[i]);
}

static double distance(const double *a, const double *b) {
    double sum = 0;
    for (int i = 0; i < ELEMENTS; ++i) sum += (a[i] - b[i]) * (a[i] - b[i]);
    return sqrt(sum);
}

void random_graph_check_16_bits(fattn_ctx *ctx, uint64_t seed, fattn_dtype dtype) {
    static double x[ELEMENTS], rounded[ELEMENTS], noise[ELEMENTS], want[ELEMENTS], got[ELEMENTS], near[ELEMENTS];
    static const double none[ELEMENTS];
    inputs_of(ctx, seed, dtype, x); /* numbers that dtype has */
    gradients(ctx, seed, FATTN_F64, FATTN_F64, x, want);
    const double unit = dtype == FATTN_BF16 ? 0x1p-8 : 0x1p-11;
    gradients(ctx, seed, FATTN_F32, FATTN_F32, x, near);
    double roundings = distance(near, want) * unit / 0x1p-24; /* of what is computed on the way */
    for (uint32_t n = 0; n < 2; ++n) {                        /* and of the inputs */
        const fattn_tensor host = fattn_tensor_view(noise, FATTN_F64, FATTN_CPU, 0, 1, (int64_t[]){ELEMENTS});
        fattn_tensor t;
        cr_assert_eq(fattn_tensor_alloc(ctx, FATTN_F64, 1, host.shape, &t), FATTN_OK);
        cr_assert_eq(fattn_tensor_normal(ctx, &t, 0, unit, (fattn_rng){seed, 100 + n, 0}), FATTN_OK);
        cr_assert_eq(fattn_tensor_copy(ctx, &host, &t), FATTN_OK);
        fattn_tensor_free(ctx, &t);
        for (int i = 0; i < ELEMENTS; ++i) rounded[i] = x[i] * (1 + noise[i]);
        gradients(ctx, seed, FATTN_F64, FATTN_F64, rounded, near);
        roundings = fmax(roundings, distance(near, want));
    }
    gradients_with(ctx, seed, dtype, seed % 2 ? FATTN_F32 : dtype, seed / 2 % 2 ? FATTN_PARAM_ONE_PASS : 0, x, got);
    const double error = distance(got, want), all = distance(want, none);
    cr_assert_leq(error, 4 * (roundings + unit * fmax(all, 1)), "seed %lu, %s: %g of %g, where roundings make %g",
                  (unsigned long)seed, fattn_dtype_name(dtype), error, all, roundings);
}
