/* The error of 16-bit gradients while a model is trained. A small GPT-2 (biases, layernorm, learned positions, bytes)
   is trained with AdamW on a text. At steps 0, 100, 200, 500, 1000, ... the gradients of one held-out batch are
   compared with those of an F64 copy of the same weights:

   - of the weights: the rows of W_qkv that make q, k and v, and all parameters together;
   - of attention alone: dQ, dK, dV of the q, k, v and dO of the 16-bit run, against F64 on the same numbers; in q's
     dtype, or F32 with --gradients f32, which leaves out the last rounding.

   Each for four backward passes. "default" has no flag. "merge" has FATTN_MERGE: then o and lse may be of more keys
   than the call's, so rows of dS need not sum to zero, and backward must not subtract the keys' mean. A query demands o
   in F32 with that flag, so it gets a copy of the same numbers. A library that never subtracts gives the same twice.
   "wide o": forward keeps o in F32, so that delta is as exact. "exact delta": FATTN_EXACT_DELTA.

   cc -O2 -std=c11 -Iinclude bench/gradient_error.c -o gradient_error -Lbuild/release/lib -lfattn -lm \
      -Wl,-rpath,build/release/lib
   git ls-files '*.c' '*.h' '*.inc' '*.cu' '*.cuh' '*.md' '*.py' | xargs cat > text.txt
   ./gradient_error text.txt --device cuda > bench/results/gradient_error_h200.txt
   LD_LIBRARY_PATH=<folder of another libfattn.so> ./gradient_error ...     (two libraries, one program)

   --backward merge, or "exact delta", trains with that pass. On a CPU only attention can have 16 bits: --dtype f32
   --attention bf16.
   A test of the program, since F32 must agree with F64:
   ./gradient_error text.txt --dtype f32 --check 1e-5 --layers 2 --heads 2 --context 128 --batch 4 --probe 2 --steps 40
   */
#include <fattn/fattn.h>
#include <math.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { VOCAB = 256, MOST_LAYERS = 48, MOST_HEAD_DIM = 256, MOST_CHECKPOINTS = 32, PARTS = 3 };
static const float NORM_EPS = 1e-5f;
static const char *const variant_names[] = {"default", "merge", "wide o", "exact delta"};
enum { DEFAULT, MERGE, WIDE, EXACT, VARIANTS };

typedef struct options {
    const char *text, *device, *dtype, *attention, *gradients, *backward;
    int64_t layers, heads, head_dim, context, batch, probe, steps, warmup, seed;
    double lr, weight_decay, check;
} options;

static fattn_ctx *ctx;
static options opt = {.device = "cpu",
                      .dtype = "bf16",
                      .backward = "default",
                      .layers = 6,
                      .heads = 6,
                      .head_dim = 64,
                      .context = 1024,
                      .batch = 16,
                      .probe = 8,
                      .steps = 2000,
                      .warmup = 100,
                      .seed = 1,
                      .lr = 1e-3,
                      .weight_decay = 0.1};

static void fail(const char *what, const char *why) {
    fprintf(stderr, "gradient_error: %s: %s\n", what, why);
    exit(1);
}
static void check(fattn_status s, const char *what) {
    if (s) fail(what, ctx && *fattn_ctx_error(ctx) ? fattn_ctx_error(ctx) : fattn_status_text(s));
}
static void *memory(int64_t count, size_t size) {
    void *p = calloc((size_t)count, size);
    if (!p) fail("memory", "there is none");
    return p;
}

static fattn_dtype dtype_of(const char *name) {
    const fattn_dtype known[] = {FATTN_BF16, FATTN_F16, FATTN_F32};
    for (int i = 0; i < 3; ++i)
        if (strcmp(name, fattn_dtype_name(known[i])) == 0) return known[i];
    fail(name, "is not bf16, f16 or f32");
    return FATTN_BF16;
}

static fattn_tensor alloc(fattn_dtype dtype, int ndim, const int64_t *shape) {
    fattn_tensor t;
    check(fattn_tensor_alloc(ctx, dtype, ndim, shape, &t), "allocation");
    return t;
}
static void release(fattn_tensor *t) { fattn_tensor_free(ctx, t); }
static void zero(const fattn_tensor *t) { check(fattn_tensor_normal(ctx, t, 0, 0, (fattn_rng){0}), "zeros"); }
static void copy(const fattn_tensor *to, const fattn_tensor *from) { check(fattn_tensor_copy(ctx, to, from), "copy"); }
static void read_back(const fattn_tensor *t, double *to) {
    const fattn_tensor host = fattn_tensor_view(to, FATTN_F64, FATTN_CPU, 0, t->ndim, t->shape);
    copy(&host, t);
}

/* ---- attention whose backward reads an o in F32 ---- */

enum { Q, K, V };
enum { O, LSE, WIDE_O };

typedef struct passes {
    fattn_attention_params p;
    uint32_t more; /* backward's flags beside p's */
    bool wide;     /* forward writes o in F32, from which the 16-bit one is rounded; else that is copied to F32 */
} passes;

#define PARAMS                                                                                                         \
    { .struct_size = sizeof(fattn_attention_params), .flags = FATTN_CAUSAL }
static const fattn_attention_params causal = PARAMS;
static const fattn_attention_params exact_delta = {.struct_size = sizeof exact_delta,
                                                   .flags = FATTN_CAUSAL | FATTN_EXACT_DELTA};
static const passes merge_passes = {.p = PARAMS, .more = FATTN_MERGE}, wide_passes = {.p = PARAMS, .wide = true};

static fattn_tensor wide(const fattn_tensor *o) {
    fattn_tensor w = *o;
    if (fattn_dtype_size((fattn_dtype)o->dtype) == 2) w.dtype = FATTN_F32;
    return w;
}

static fattn_attention_io io_of(fattn_op_call *c, const fattn_tensor *o) {
    return (fattn_attention_io){.struct_size = sizeof(fattn_attention_io),
                                .q = &c->in[Q],
                                .k = &c->in[K],
                                .v = &c->in[V],
                                .o = o,
                                .lse = &c->out[LSE]};
}

static fattn_status wide_infer(fattn_op_call *c) {
    const int64_t *const q = c->in[Q].shape, B = q[0], H = q[1], S = q[2], D = c->in[V].shape[3];
    fattn_tensor o = {.ndim = 4,
                      .dtype = c->in[Q].dtype,
                      .shape = {B, H, S, D},
                      .stride = {S * H * D, D, H * D, 1}}; /* [B,S,H,D], so that op_merge is a view */
    fattn_tensor lse = {
        .ndim = 3, .dtype = o.dtype == FATTN_F64 ? FATTN_F64 : FATTN_F32, .shape = {B, H, S}, .stride = {H * S, S, 1}};
    o.device = lse.device = c->in[Q].device, o.device_id = lse.device_id = c->in[Q].device_id;
    c->out[O] = o, c->out[LSE] = lse, c->out[WIDE_O] = wide(&o);
    o.data = lse.data = c->in[Q].data; /* not read, but must be there */
    const fattn_tensor w = wide(&o);
    const passes *const how = c->attr;
    fattn_attention_params p = how->p;
    fattn_attention_io io = io_of(c, how->wide ? &w : &o);
    fattn_attention_plan plan = {.struct_size = sizeof plan};
    io.lse = &lse;
    fattn_status s = fattn_attention_query(c->ctx, &p, &io, &plan);
    c->fwd_workspace = plan.fwd_workspace;
    p.flags |= how->more;
    io.o = &w;
    if (!s) s = fattn_attention_query(c->ctx, &p, &io, &plan);
    c->bwd_workspace = plan.bwd_workspace;
    return s;
}

static fattn_status wide_forward(fattn_op_call *c) {
    const passes *const how = c->attr;
    const int from = how->wide ? WIDE_O : O, to = how->wide ? O : WIDE_O;
    fattn_attention_io io = io_of(c, &c->out[from]);
    io.workspace = c->workspace, io.workspace_bytes = c->fwd_workspace;
    const fattn_status s = fattn_attention_fwd(c->ctx, &how->p, &io);
    return s ? s : fattn_tensor_copy(c->ctx, &c->out[to], &c->out[from]);
}

static fattn_status wide_backward(fattn_op_call *c) {
    static const uint32_t add[] = {FATTN_ACC_DQ, FATTN_ACC_DK, FATTN_ACC_DV};
    const passes *const how = c->attr;
    fattn_attention_params p = how->p;
    fattn_attention_io io = io_of(c, &c->out[WIDE_O]);
    p.flags |= how->more;
    for (int i = Q; i <= V; ++i)
        if (!c->d_in_fresh[i]) p.flags |= add[i];
    io.d_o = &c->d_out[O];
    io.dq = &c->d_in[Q], io.dk = &c->d_in[K], io.dv = &c->d_in[V];
    io.workspace = c->workspace, io.workspace_bytes = c->bwd_workspace;
    return fattn_attention_bwd(c->ctx, &p, &io);
}

static const fattn_op_def wide_def = {.struct_size = sizeof wide_def,
                                      .attr_size = sizeof(passes),
                                      .n_out = 3,
                                      .name = "attention_wide",
                                      .infer = wide_infer,
                                      .forward = wide_forward,
                                      .backward = wide_backward};

static fattn_var attend(fattn_tape *t, int variant, const fattn_var in[3]) {
    if (variant == MERGE) return fattn_op_custom(t, &wide_def, in, 3, &merge_passes);
    if (variant == WIDE) return fattn_op_custom(t, &wide_def, in, 3, &wide_passes);
    return fattn_op_attention(t, in[Q], in[K], in[V], variant == EXACT ? &exact_delta : &causal);
}

/* ---- the model ---- */

enum { G1, B1, WQKV, BQKV, WO, BO, G2, B2, WUP, BUP, WDOWN, BDOWN, BLOCK_PARAMS };
enum { EMBEDDING, POSITIONS, FIRST_BLOCK };

typedef struct model {
    fattn_dtype dtype, attention; /* of weights and activations; of q, k, v and o */
    int n;
    fattn_param *p;
    fattn_param **list;
    int64_t *offset; /* of parameter i's gradient among all; offset[n] is their number */
} model;

typedef struct layer_vars {
    fattn_var q, k, v, o;
} layer_vars;

static int block_param(int64_t layer, int which) { return FIRST_BLOCK + (int)layer * BLOCK_PARAMS + which; }

/* GPT-2's: 0.02, output projections of a block by sqrt(2 layers) smaller; gains 1, biases 0. */
static fattn_param make_param(fattn_dtype dtype, int index, int n) {
    const int64_t C = opt.heads * opt.head_dim;
    const int which = index < FIRST_BLOCK || index >= n - 2 ? -1 : (index - FIRST_BLOCK) % BLOCK_PARAMS;
    int64_t shape[2] = {C, C};
    int ndim = 1;
    double mean = 0, std = 0;
    if (index < FIRST_BLOCK) {
        ndim = 2, shape[0] = index == EMBEDDING ? VOCAB : opt.context, std = 0.02;
    } else if (which < 0) {
        mean = index == n - 2;
    } else {
        if (which == WQKV || which == BQKV) shape[0] = 3 * C;
        if (which == WUP || which == BUP) shape[0] = 4 * C;
        if (which == WDOWN) shape[1] = 4 * C;
        if (which == WQKV || which == WO || which == WUP || which == WDOWN) ndim = 2, std = 0.02;
        if (which == WO || which == WDOWN) std /= sqrt(2.0 * (double)opt.layers);
        mean = which == G1 || which == G2;
    }
    fattn_param p = {.flags = ndim == 1 ? FATTN_PARAM_NO_DECAY : 0};
    p.value = alloc(dtype, ndim, shape);
    p.grad = alloc(dtype == FATTN_F64 ? FATTN_F64 : FATTN_F32, ndim, shape);
    const fattn_rng rng = {.seed = (uint64_t)opt.seed, .stream = (uint32_t)index};
    check(fattn_tensor_normal(ctx, &p.value, mean, std, rng), "initialisation");
    zero(&p.grad);
    return p;
}

static model model_create(fattn_dtype dtype, fattn_dtype attention) {
    const int n = block_param(opt.layers, 0) + 2;
    model m = {.dtype = dtype, .attention = attention, .n = n};
    m.p = memory(n, sizeof *m.p);
    m.list = memory(n, sizeof *m.list);
    m.offset = memory(n + 1, sizeof *m.offset);
    for (int i = 0; i < n; ++i) {
        m.p[i] = make_param(dtype, i, n);
        m.list[i] = &m.p[i];
        m.offset[i + 1] = m.offset[i] + fattn_tensor_numel(&m.p[i].value);
    }
    return m;
}

static void model_destroy(model *m) {
    for (int i = 0; i < m->n; ++i) release(&m->p[i].value), release(&m->p[i].grad);
    free(m->p), free(m->list), free(m->offset);
}

static fattn_var linear(fattn_tape *t, fattn_param *block, fattn_var x, int w, int bias) {
    return fattn_op_linear(t, x, fattn_use(t, &block[w]), fattn_use(t, &block[bias]));
}
static fattn_var norm(fattn_tape *t, fattn_var x, fattn_param *gain) { /* its bias is the next parameter */
    return fattn_op_layernorm(t, x, fattn_use(t, gain), fattn_use(t, gain + 1), NORM_EPS);
}

/* The mean loss of a batch [B,T]; `seen`, if not NULL, gets the variables of each attention. */
static fattn_var model_loss(const model *m, fattn_tape *t, const fattn_tensor *batch, int variant, layer_vars *seen) {
    const int H = (int)opt.heads, D = (int)opt.head_dim;
    fattn_tape_reset(t);
    const fattn_var table = fattn_use(t, &m->p[EMBEDDING]);
    fattn_var x = fattn_op_embedding(t, table, fattn_input(t, &batch[0]));
    x = fattn_op_add(t, x, fattn_use(t, &m->p[POSITIONS]));
    for (int64_t layer = 0; layer < opt.layers; ++layer) {
        fattn_param *const block = &m->p[block_param(layer, 0)];
        layer_vars a;
        fattn_var h = linear(t, block, norm(t, x, &block[G1]), WQKV, BQKV);
        a.q = fattn_op_heads(t, h, 0, H, D), a.k = fattn_op_heads(t, h, H, H, D);
        a.v = fattn_op_heads(t, h, 2 * H, H, D);
        if (m->attention != m->dtype) {
            a.q = fattn_op_cast(t, a.q, m->attention), a.k = fattn_op_cast(t, a.k, m->attention);
            a.v = fattn_op_cast(t, a.v, m->attention);
        }
        const fattn_var in[] = {a.q, a.k, a.v};
        a.o = attend(t, variant, in);
        h = fattn_op_merge(t, a.o);
        if (m->attention != m->dtype) h = fattn_op_cast(t, h, m->dtype);
        x = fattn_op_add(t, x, linear(t, block, h, WO, BO));
        h = fattn_op_gelu(t, linear(t, block, norm(t, x, &block[G2]), WUP, BUP));
        x = fattn_op_add(t, x, linear(t, block, h, WDOWN, BDOWN));
        if (!seen) continue;
        check(fattn_tape_keep_grad(t, a.o), "keep_grad");
        seen[layer] = a;
    }
    x = norm(t, x, &m->p[m->n - 2]);
    return fattn_op_linear_cross_entropy(t, x, table, fattn_input(t, &batch[1]), -1);
}

/* Loss, and all gradients as F64 on the host; those of the parameters are zero again. */
static double gradients(const model *m, fattn_tape *t, const fattn_tensor *batch, int variant, layer_vars *seen,
                        double *out) {
    double loss;
    const fattn_var l = model_loss(m, t, batch, variant, seen);
    check(fattn_tape_backward(t, l), "backward");
    check(fattn_tape_item(t, l, &loss), "loss");
    for (int i = 0; i < m->n; ++i) read_back(&m->p[i].grad, out + m->offset[i]), zero(&m->p[i].grad);
    return loss;
}

/* ---- text ---- */

typedef struct text {
    uint8_t *bytes;
    int64_t n, train; /* the bytes after the first `train` are held out */
    uint64_t state;   /* of the positions' random numbers: splitmix64 (Steele et al. 2014) */
} text;

static text text_read(const char *path) {
    FILE *file = fopen(path, "rb");
    if (!file) fail(path, "cannot be opened");
    text t = {.state = (uint64_t)opt.seed};
    for (int64_t capacity = 0;;) {
        if (t.n == capacity) {
            capacity = 2 * capacity + (1 << 20);
            t.bytes = realloc(t.bytes, (size_t)capacity);
            if (!t.bytes) fail(path, "no memory");
        }
        const size_t got = fread(t.bytes + t.n, 1, (size_t)(capacity - t.n), file);
        if (!got) break;
        t.n += (int64_t)got;
    }
    fclose(file);
    t.train = t.n - t.n / 10;
    if (t.n - t.train < opt.context + 1) fail(path, "is too short: a tenth of it must be longer than --context");
    return t;
}

static int64_t below(text *t, int64_t n) {
    uint64_t z = t->state += 0x9e3779b97f4a7c15u;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return (int64_t)((z ^ z >> 31) % (uint64_t)n);
}

/* Window `row` of a batch from byte `at` on: ids, and the bytes that follow them. */
static void put_window(const text *t, int64_t at, int64_t row, int32_t *ids, int32_t *targets) {
    for (int64_t i = 0; i < opt.context; ++i) {
        ids[row * opt.context + i] = t->bytes[at + i];
        targets[row * opt.context + i] = t->bytes[at + i + 1];
    }
}
static void send(int32_t *const symbols[2], const fattn_tensor *batch) {
    for (int i = 0; i < 2; ++i) {
        const fattn_tensor host = fattn_tensor_view(symbols[i], FATTN_I32, FATTN_CPU, 0, 2, batch[i].shape);
        copy(&batch[i], &host);
    }
}
static void train_batch(text *t, int32_t *const symbols[2], const fattn_tensor *batch) {
    for (int64_t row = 0; row < opt.batch; ++row)
        put_window(t, below(t, t->train - opt.context), row, symbols[0], symbols[1]);
    send(symbols, batch);
}
static void held_out_batch(const text *t, int32_t *const symbols[2], const fattn_tensor *batch) {
    const int64_t places = t->n - t->train - opt.context; /* evenly spaced windows */
    for (int64_t row = 0; row < opt.probe; ++row)
        put_window(t, t->train + row * places / opt.probe, row, symbols[0], symbols[1]);
    send(symbols, batch);
}

/* ---- comparison ---- */

typedef struct difference {
    double error, ratio, angle; /* |a-b|/|b|, |a|/|b|, 1 - cosine */
} difference;
typedef struct comparison {
    difference part[VARIANTS][PARTS]; /* of q, k, v */
    double along[VARIANTS];           /* of attention alone: share of dQ's error, squared, along the mean key */
} comparison;

static difference compare(const double *a, const double *b, int64_t n) {
    double aa = 0, bb = 0, dd = 0;
    for (int64_t i = 0; i < n; ++i) {
        aa += a[i] * a[i], bb += b[i] * b[i];
        dd += (a[i] - b[i]) * (a[i] - b[i]);
    }
    difference d = {.error = sqrt(dd / bb), .ratio = sqrt(aa / bb)};
    /* e^2 = r^2 - 2 r cos + 1; the cosine itself would lose these digits */
    d.angle = (d.error * d.error - (d.ratio - 1) * (d.ratio - 1)) / (2 * d.ratio);
    return d;
}

typedef struct keys {
    double largest, share; /* largest |mean|/std of a channel; the means' share of the sum of k^2 */
} keys;

/* Means and deviations over the keys of one sequence and head. k [B,H,S,D]. */
static keys keys_of(const double *k, int64_t heads, int64_t S, int64_t D) {
    keys out = {0};
    double means = 0, all = 0;
    for (int64_t h = 0; h < heads; ++h)
        for (int64_t d = 0; d < D; ++d) {
            const double *const channel = k + h * S * D + d;
            double sum = 0, squares = 0;
            for (int64_t j = 0; j < S; ++j) sum += channel[j * D];
            const double mean = sum / (double)S;
            for (int64_t j = 0; j < S; ++j) squares += (channel[j * D] - mean) * (channel[j * D] - mean);
            means += mean * mean * (double)S;
            all += mean * mean * (double)S + squares;
            out.largest = fmax(out.largest, fabs(mean) / sqrt(squares / (double)S));
        }
    out.share = means / all;
    return out;
}

/* The share of |a - b|^2 that lies along the mean key of its sequence and head. All [B,H,S,D]. */
static double along_mean(const double *a, const double *b, const double *k, int64_t heads, int64_t S, int64_t D) {
    double along = 0, all = 0;
    for (int64_t h = 0; h < heads; ++h, a += S * D, b += S * D, k += S * D) {
        double mean[MOST_HEAD_DIM] = {0}, norm = 0;
        for (int64_t j = 0; j < S; ++j)
            for (int64_t d = 0; d < D; ++d) mean[d] += k[j * D + d];
        for (int64_t d = 0; d < D; ++d) norm += mean[d] * mean[d];
        for (int64_t i = 0; i < S; ++i) {
            double product = 0;
            for (int64_t d = 0; d < D; ++d) {
                const double e = a[i * D + d] - b[i * D + d];
                product += e * mean[d], all += e * e;
            }
            along += product * product / norm;
        }
    }
    return along / all;
}

/* Backward of one attention with these tensors; dq, dk, dv go to the host. */
static void attention(const fattn_tensor in[4], int variant, double *const out[PARTS], char kernel[48]) {
    const fattn_dtype dtype = (fattn_dtype)in[0].dtype;
    fattn_attention_params p = variant == EXACT ? exact_delta : causal;
    fattn_tensor o = alloc(dtype, 4, in[0].shape), w = wide(&o), d[PARTS], saved = {0};
    fattn_tensor lse = alloc(dtype == FATTN_F64 ? FATTN_F64 : FATTN_F32, 3, in[0].shape);
    fattn_attention_io io = {.struct_size = sizeof io, .q = &in[Q], .k = &in[K], .v = &in[V], .o = &o, .lse = &lse};
    io.d_o = &in[3];
    const fattn_dtype to = opt.gradients && dtype != FATTN_F64 ? dtype_of(opt.gradients) : dtype;
    for (int i = Q; i <= V; ++i) d[i] = alloc(to, 4, in[0].shape);
    io.dq = &d[Q], io.dk = &d[K], io.dv = &d[V];
    w = alloc((fattn_dtype)w.dtype, 4, in[0].shape);
    if (variant == WIDE) io.o = &w;
    for (int pass = 0; pass < 2; ++pass) {
        fattn_attention_plan plan = {.struct_size = sizeof plan};
        if (pass && variant == MERGE) copy(&w, &o), io.o = &w, p.flags |= FATTN_MERGE;
        check(fattn_attention_query(ctx, &p, &io, &plan), "query");
        const int64_t bytes[] = {(int64_t)(pass ? plan.bwd_workspace : plan.fwd_workspace)};
        const int64_t kept[] = {(int64_t)plan.saved_bytes};
        fattn_tensor workspace = alloc(FATTN_U8, 1, bytes);
        if (!pass) saved = alloc(FATTN_U8, 1, kept);
        io.saved = saved.data, io.saved_bytes = plan.saved_bytes;
        io.workspace = workspace.data, io.workspace_bytes = (size_t)bytes[0];
        check(pass ? fattn_attention_bwd(ctx, &p, &io) : fattn_attention_fwd(ctx, &p, &io), pass ? "bwd" : "fwd");
        release(&workspace);
        if (pass) memcpy(kernel, plan.bwd_kernel, sizeof plan.bwd_kernel);
    }
    for (int i = Q; i <= V; ++i) read_back(&d[i], out[i]), release(&d[i]);
    release(&o), release(&w), release(&saved), release(&lse);
}

/* ---- a run ---- */

typedef struct checkpoint {
    int64_t step;
    double train_loss, loss, exact_loss;
    difference whole[VARIANTS];
    comparison weights[MOST_LAYERS], alone[MOST_LAYERS];
    keys keys[MOST_LAYERS];
} checkpoint;

typedef struct run {
    text text;
    model trained, exact;
    fattn_adamw *adamw;
    fattn_tape *train_tape, *probe_tape, *exact_tape;
    fattn_tensor batch[2], probe[2]; /* ids and targets */
    int32_t *symbols[2];             /* the same on the host */
    double *gradient[VARIANTS + 1];  /* of all parameters; the last: F64 */
    char kernel[VARIANTS + 1][48];
} run;

/* The attention of a layer, whose variables are on the probe's tape after its backward. */
static void attention_alone(run *r, const layer_vars *vars, comparison *out, keys *k) {
    const int64_t shape[4] = {opt.probe, opt.heads, opt.context, opt.head_dim};
    const int64_t n = shape[0] * shape[1] * shape[2] * shape[3];
    fattn_tensor given[4], exact[4];
    double *results[VARIANTS + 1][PARTS], *host = memory(n, sizeof *host);
    for (int i = 0; i < 4; ++i) {
        const fattn_var v[] = {vars->q, vars->k, vars->v, vars->o};
        fattn_tensor view;
        check(i < 3 ? fattn_tape_value(r->probe_tape, v[i], &view) : fattn_tape_grad(r->probe_tape, v[i], &view),
              "a variable of attention");
        given[i] = alloc(r->trained.attention, 4, shape), exact[i] = alloc(FATTN_F64, 4, shape);
        copy(&given[i], &view), copy(&exact[i], &given[i]);
    }
    read_back(&given[K], host);
    *k = keys_of(host, shape[0] * shape[1], shape[2], shape[3]);
    for (int variant = 0; variant <= VARIANTS; ++variant) {
        for (int i = 0; i < PARTS; ++i) results[variant][i] = memory(n, sizeof(double));
        attention(variant < VARIANTS ? given : exact, variant, results[variant], r->kernel[variant]);
    }
    for (int i = 0; i < PARTS; ++i)
        for (int variant = 0; variant < VARIANTS; ++variant)
            out->part[variant][i] = compare(results[variant][i], results[VARIANTS][i], n);
    for (int variant = 0; variant < VARIANTS; ++variant)
        out->along[variant] =
            along_mean(results[variant][Q], results[VARIANTS][Q], host, shape[0] * shape[1], shape[2], shape[3]);
    for (int variant = 0; variant <= VARIANTS; ++variant)
        for (int i = 0; i < PARTS; ++i) free(results[variant][i]);
    for (int i = 0; i < 4; ++i) release(&given[i]), release(&exact[i]);
    free(host);
}

static void measure(run *r, checkpoint *c) {
    const int64_t *const offset = r->exact.offset, C = opt.heads * opt.head_dim;
    layer_vars seen[MOST_LAYERS];
    for (int i = 0; i < r->exact.n; ++i) copy(&r->exact.p[i].value, &r->trained.p[i].value);
    c->exact_loss = gradients(&r->exact, r->exact_tape, r->probe, DEFAULT, NULL, r->gradient[VARIANTS]);
    for (int variant = VARIANTS - 1; variant > DEFAULT; --variant)
        gradients(&r->trained, r->probe_tape, r->probe, variant, NULL, r->gradient[variant]);
    c->loss = gradients(&r->trained, r->probe_tape, r->probe, DEFAULT, seen, r->gradient[DEFAULT]);
    for (int64_t layer = 0; layer < opt.layers; ++layer)
        attention_alone(r, &seen[layer], &c->alone[layer], &c->keys[layer]);
    for (int variant = 0; variant < VARIANTS; ++variant) {
        c->whole[variant] = compare(r->gradient[variant], r->gradient[VARIANTS], offset[r->exact.n]);
        for (int64_t layer = 0; layer < opt.layers; ++layer)
            for (int i = 0; i < PARTS; ++i) {
                const int64_t at = offset[block_param(layer, WQKV)] + i * C * C;
                c->weights[layer].part[variant][i] =
                    compare(r->gradient[variant] + at, r->gradient[VARIANTS] + at, C * C);
            }
    }
}

static void print_difference(difference d) { printf("  %8.2e %8.1e %6.4f", d.error, d.angle, d.ratio); }

static void print_rows(const checkpoint *c, const comparison *rows, const char *names[PARTS], bool along) {
    printf("layer  mean/std  share  backward   ");
    for (int i = 0; i < PARTS; ++i) printf("  %-8s %8s %6s", names[i], "1-cos", "norm");
    puts(along ? "  along" : "");
    for (int64_t layer = 0; layer < opt.layers; ++layer)
        for (int variant = 0; variant < VARIANTS; ++variant) {
            if (variant == 0)
                printf("%5lld  %8.2f  %5.3f", (long long)layer, c->keys[layer].largest, c->keys[layer].share);
            else
                printf("%22s", "");
            printf("  %-11s", variant_names[variant]);
            for (int i = 0; i < PARTS; ++i) print_difference(rows[layer].part[variant][i]);
            if (along) printf("  %5.3f", rows[layer].along[variant]);
            putchar('\n');
        }
}

static void print_checkpoint(const checkpoint *c) {
    printf("\nStep %lld: held-out loss %.6f, F64 %.6f", (long long)c->step, c->loss, c->exact_loss);
    if (c->step) printf("; training loss %.4f", c->train_loss);
    putchar('\n');
    printf("\nGradients of the weights\n");
    print_rows(c, c->weights, (const char *[]){"W_q", "W_k", "W_v"}, false);
    for (int variant = 0; variant < VARIANTS; ++variant) {
        printf("%-22s  %-11s", variant ? "" : "all parameters", variant_names[variant]);
        print_difference(c->whole[variant]);
        putchar('\n');
    }
    printf("\nAttention alone\n");
    print_rows(c, c->alone, (const char *[]){"dQ", "dK", "dV"}, true);
    fflush(stdout);
}

static int by_size(const void *a, const void *b) {
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}
/* Median and largest error of q's part over the layers. */
static void print_spread(const comparison *rows, int variant) {
    double e[MOST_LAYERS];
    for (int64_t layer = 0; layer < opt.layers; ++layer) e[layer] = rows[layer].part[variant][Q].error;
    qsort(e, (size_t)opt.layers, sizeof *e, by_size);
    printf("  %8.2e %8.2e", (e[(opt.layers - 1) / 2] + e[opt.layers / 2]) / 2, e[opt.layers - 1]);
}
static void print_summary(const checkpoint *c, int n) {
    printf("\nErrors over the run: W_q and dQ as median and largest of the layers, mean/std and share the largest\n\n");
    printf("  step  mean/std  share  backward     W_q               dQ                 all\n");
    for (int i = 0; i < n; ++i, ++c) {
        double largest = 0, share = 0;
        for (int64_t layer = 0; layer < opt.layers; ++layer) {
            largest = fmax(largest, c->keys[layer].largest);
            share = fmax(share, c->keys[layer].share);
        }
        for (int variant = 0; variant < VARIANTS; ++variant) {
            if (variant == 0)
                printf("%6lld  %8.2f  %5.3f", (long long)c->step, largest, share);
            else
                printf("%23s", "");
            printf("  %-11s", variant_names[variant]);
            print_spread(c->weights, variant), print_spread(c->alone, variant);
            printf("  %8.2e\n", c->whole[variant].error);
        }
    }
}

static double largest_error(const checkpoint *c) {
    double most = 0;
    for (int variant = 0; variant < VARIANTS; ++variant) most = fmax(most, c->whole[variant].error);
    for (int64_t layer = 0; layer < opt.layers; ++layer)
        for (int variant = 0; variant < VARIANTS; ++variant)
            for (int i = 0; i < PARTS; ++i) {
                most = fmax(most, c->weights[layer].part[variant][i].error);
                most = fmax(most, c->alone[layer].part[variant][i].error);
            }
    return most;
}

/* 0, 100, 200, 500, 1000, ... and the last. */
static bool is_checkpoint(int64_t step) {
    int64_t digits = step;
    while (digits >= 100 && digits % 10 == 0) digits /= 10;
    return step == 0 || step == opt.steps || (step >= 100 && (digits == 10 || digits == 20 || digits == 50));
}

static float learning_rate(int64_t step) { /* linear warm-up, then a cosine to a tenth */
    const double used = (double)step / (double)opt.steps;
    const double cosine = 0.1 + 0.45 * (1 + cos(3.14159265358979323846 * used));
    return (float)(opt.lr * cosine * fmin(1, (double)(step + 1) / (double)(opt.warmup + 1)));
}

static void parse(int argc, char **argv) {
    const struct {
        const char *name, **value;
    } words[] = {{"--device", &opt.device},
                 {"--dtype", &opt.dtype},
                 {"--attention", &opt.attention},
                 {"--gradients", &opt.gradients},
                 {"--backward", &opt.backward}};
    const struct {
        const char *name;
        int64_t *value;
    } counts[] = {{"--layers", &opt.layers},   {"--heads", &opt.heads},   {"--head-dim", &opt.head_dim},
                  {"--context", &opt.context}, {"--batch", &opt.batch},   {"--probe", &opt.probe},
                  {"--steps", &opt.steps},     {"--warmup", &opt.warmup}, {"--seed", &opt.seed}};
    const struct {
        const char *name;
        double *value;
    } reals[] = {{"--lr", &opt.lr}, {"--weight-decay", &opt.weight_decay}, {"--check", &opt.check}};
    for (int i = 1; i < argc; ++i) {
        const char *const name = argv[i], *const value = i + 1 < argc ? argv[i + 1] : "";
        const char *unread = NULL; /* what follows a number */
        char *end;
        if (name[0] != '-' && !opt.text) {
            opt.text = name;
            continue;
        }
        for (size_t n = 0; n < sizeof words / sizeof *words; ++n)
            if (strcmp(name, words[n].name) == 0) *words[n].value = value, unread = "";
        for (size_t n = 0; n < sizeof counts / sizeof *counts; ++n)
            if (strcmp(name, counts[n].name) == 0) *counts[n].value = strtoll(value, &end, 10), unread = end;
        for (size_t n = 0; n < sizeof reals / sizeof *reals; ++n)
            if (strcmp(name, reals[n].name) == 0) *reals[n].value = strtod(value, &end), unread = end;
        if (!unread) fail(name, "is not an option");
        if (*unread || !*value) fail(name, "has no value, or one that is not a number");
        ++i;
    }
    if (!opt.text) fail("usage", "gradient_error TEXT [--device cpu|cuda] [--dtype bf16|f16|f32] [--steps N] ...");
    if (opt.layers < 1 || opt.layers > MOST_LAYERS || opt.heads < 1 || opt.head_dim < 1 ||
        opt.head_dim > MOST_HEAD_DIM || opt.context < 1 || opt.batch < 1 || opt.probe < 1 || opt.steps < 1)
        fail("sizes", "must be 1 or more; --layers 48, --head-dim 256 at most");
}

static int variant_of(const char *name) {
    for (int variant = 0; variant < VARIANTS; ++variant)
        if (strcmp(name, variant_names[variant]) == 0) return variant;
    fail("--backward", "has an unknown value");
    return DEFAULT;
}

/* Which of two words `value` is. */
static bool second(const char *name, const char *value, const char *a, const char *b) {
    if (strcmp(value, a) && strcmp(value, b)) fail(name, "has an unknown value");
    return strcmp(value, b) == 0;
}
static run run_create(void) {
    const fattn_dtype dtype = dtype_of(opt.dtype), attends = opt.attention ? dtype_of(opt.attention) : dtype;
    const int64_t batch_shape[] = {opt.batch, opt.context}, probe_shape[] = {opt.probe, opt.context};
    const int64_t most = opt.batch > opt.probe ? opt.batch : opt.probe;
    run r = {.text = text_read(opt.text)};
    r.trained = model_create(dtype, attends), r.exact = model_create(FATTN_F64, FATTN_F64);
    check(fattn_tape_create(ctx, &r.train_tape), "tape");
    check(fattn_tape_create(ctx, &r.probe_tape), "tape");
    check(fattn_tape_create(ctx, &r.exact_tape), "tape");
    for (int i = 0; i < 2; ++i) {
        r.batch[i] = alloc(FATTN_I32, 2, batch_shape), r.probe[i] = alloc(FATTN_I32, 2, probe_shape);
        r.symbols[i] = memory(most * opt.context, sizeof *r.symbols[i]);
    }
    for (int i = 0; i <= VARIANTS; ++i) r.gradient[i] = memory(r.exact.offset[r.exact.n], sizeof(double));
    held_out_batch(&r.text, r.symbols, r.probe);
    fattn_adamw_options o = {.struct_size = sizeof o};
    fattn_adamw_defaults(&o);
    o.beta2 = 0.99f; /* the run is short */
    o.weight_decay = (float)opt.weight_decay;
    o.max_grad_norm = 1;
    check(fattn_adamw_create(ctx, &o, r.trained.list, r.trained.n, &r.adamw), "adamw");
    return r;
}

static void run_destroy(run *r) {
    fattn_adamw_destroy(r->adamw);
    fattn_tape_destroy(r->train_tape), fattn_tape_destroy(r->probe_tape), fattn_tape_destroy(r->exact_tape);
    for (int i = 0; i < 2; ++i) release(&r->batch[i]), release(&r->probe[i]), free(r->symbols[i]);
    for (int i = 0; i <= VARIANTS; ++i) free(r->gradient[i]);
    model_destroy(&r->trained), model_destroy(&r->exact);
    free(r->text.bytes);
}

/* Changes *loss every 50 steps, and before a checkpoint: reading it waits for the device. */
static void train(run *r, int64_t step, int variant, double *loss) {
    train_batch(&r->text, r->symbols, r->batch);
    const fattn_var l = model_loss(&r->trained, r->train_tape, r->batch, variant, NULL);
    check(fattn_tape_backward(r->train_tape, l), "backward");
    check(fattn_adamw_set_lr(r->adamw, learning_rate(step)), "learning rate");
    check(fattn_adamw_step(r->adamw), "step");
    if ((step + 1) % 50 && !is_checkpoint(step + 1)) return;
    check(fattn_tape_item(r->train_tape, l, loss), "loss");
    if (!isfinite(*loss)) fail("training", "the loss is not finite");
}

static void print_head(const run *r) {
    printf("# Gradients of a GPT-2 in %s, attention in %s, against F64 on the same weights: bench/gradient_error.c\n",
           fattn_dtype_name(r->trained.dtype), fattn_dtype_name(r->trained.attention));
    printf("# %lld layers, %lld heads of %lld, T %lld, %d symbols, %.2f million parameters\n", (long long)opt.layers,
           (long long)opt.heads, (long long)opt.head_dim, (long long)opt.context, VOCAB,
           1e-6 * (double)r->exact.offset[r->exact.n]);
    printf("# AdamW, batch %lld, learning rate %g, weight decay %g, %lld steps; backward in training: %s\n",
           (long long)opt.batch, opt.lr, opt.weight_decay, (long long)opt.steps, opt.backward);
    printf("# %lld bytes of text, the last tenth held out; gradients of %lld sequences of that\n", (long long)r->text.n,
           (long long)opt.probe);
    printf("# Under a name: the error |g - g64| / |g64|; 1-cos: of the angle between g and g64; norm: |g| / |g64|\n");
    printf("# mean/std: the largest of a key channel in a sequence and head; share: of the channel means in sum k^2\n");
    printf("# along: the share of dQ's error, squared, along the mean key; 1/%lld would be chance\n",
           (long long)opt.head_dim);
    printf("# Kernels: default %s, merge %s, F64 %s\n", r->kernel[DEFAULT], r->kernel[MERGE], r->kernel[VARIANTS]);
}

int main(int argc, char **argv) {
    parse(argc, argv);
    const bool cuda = second("--device", opt.device, "cpu", "cuda");
    const int variant = variant_of(opt.backward);
    const fattn_ctx_options context = {.struct_size = sizeof context, .device = cuda ? FATTN_CUDA : FATTN_CPU};
    check(fattn_ctx_create(&context, &ctx), "context");
    run r = run_create();
    checkpoint *const checkpoints = memory(MOST_CHECKPOINTS, sizeof *checkpoints);
    int done = 0;
    double loss = NAN, most_error = 0;
    const time_t begin = time(NULL);
    for (int64_t step = 0; step <= opt.steps; ++step) {
        if (is_checkpoint(step) && done < MOST_CHECKPOINTS) {
            checkpoint *const c = &checkpoints[done++];
            c->step = step, c->train_loss = loss;
            measure(&r, c);
            if (step == 0) print_head(&r);
            print_checkpoint(c);
            most_error = fmax(most_error, largest_error(c));
        }
        if (step % 50 == 0)
            fprintf(stderr, "step %lld of %lld, loss %.4f, %.0f s\n", (long long)step, (long long)opt.steps, loss,
                    difftime(time(NULL), begin));
        if (step < opt.steps) train(&r, step, variant, &loss);
    }
    print_summary(checkpoints, done);
    run_destroy(&r);
    free(checkpoints);
    fattn_ctx_destroy(ctx);
    if (opt.check > 0 && !(most_error <= opt.check)) {
        fprintf(stderr, "gradient_error: the largest error is %.2e, --check %g\n", most_error, opt.check);
        return 1;
    }
    return 0;
}
