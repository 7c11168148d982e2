/* For compute-sanitizer: every op of the tape forward and backward and AdamW, in all dtypes, with sizes
   that fill packs, warps and chunks and sizes that do not. One process without forks; losses are only
   checked for NaN. Returns 77 without a device.

   initcheck does not track bulk copies, which cuBLAS uses in 16 bits where rows are multiples of 16 bytes, and
   racecheck ends with an internal error in such kernels: with the argument "initcheck" or "racecheck" those runs are
   left out. */
#include <fattn/fattn.h>

#include <math.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>

enum { SKIPPED = 77, B = 2, PARAMS = 10, STEPS = 2 };

typedef struct sizes {
    int64_t S, V, H, D, hidden;
} sizes;
static const sizes all_sizes[] = {
    {.S = 33, .V = 131, .H = 3, .D = 10, .hidden = 35}, /* no packs anywhere */
    {.S = 40, .V = 136, .H = 5, .D = 16, .hidden = 72}, /* packs, rows of a part of a warp's */
    {.S = 72, .V = 3000, .H = 9, .D = 64, .hidden = 600},
    {.S = 9, .V = 40, .H = 17, .D = 64, .hidden = 40}, /* rows of a norm for a block */
};

typedef struct run {
    fattn_ctx *ctx;
    sizes n;
    fattn_param p[PARAMS];
    fattn_param *list[PARAMS];
    fattn_tensor ids, targets;
    fattn_tape *tape;
    fattn_adamw *adamw;
} run;
enum { EMBEDDING, GAIN, BIAS, QKV, OUT, UP, UP_BIAS, DOWN, SCALE, POSITION };

#define TRY(expression)                                                                                                \
    do {                                                                                                               \
        const fattn_status try_status = (expression);                                                                  \
        if (try_status != FATTN_OK) return try_status;                                                                 \
    } while (0)

static fattn_status write_symbols(run *r) {
    int32_t host[2][B * 128];
    const int64_t shape[2] = {B, r->n.S};
    fattn_tensor *const to[] = {&r->ids, &r->targets};
    for (int64_t i = 0; i < B * r->n.S; ++i) {
        host[0][i] = (int32_t)(5 * i % r->n.V);
        host[1][i] = i % 7 == 3 ? -1 : (int32_t)((5 * i + 5) % r->n.V);
    }
    for (int i = 0; i < 2; ++i) {
        const fattn_tensor here = fattn_tensor_view(host[i], FATTN_I32, FATTN_CPU, 0, 2, shape);
        TRY(fattn_tensor_alloc(r->ctx, FATTN_I32, 2, shape, to[i]));
        TRY(fattn_tensor_copy(r->ctx, to[i], &here));
    }
    return FATTN_OK;
}

static fattn_status start(run *r, fattn_ctx *ctx, const sizes *n, fattn_dtype dtype) {
    const int64_t C = n->H * n->D, h = n->hidden;
    const int64_t shapes[PARAMS][2] = {{n->V, C}, {C, 0}, {C, 0}, {3 * C, C}, {C, C},
                                       {h, C},    {h, 0}, {C, h}, {C, 0},     {n->S, C}};
    const fattn_dtype wide = dtype == FATTN_F64 ? FATTN_F64 : FATTN_F32;
    *r = (run){.ctx = ctx, .n = *n};
    for (int i = 0; i < PARAMS; ++i) {
        const int ndim = shapes[i][1] ? 2 : 1;
        r->list[i] = &r->p[i];
        r->p[i].flags = ndim == 1 ? FATTN_PARAM_NO_DECAY : 0;
        TRY(fattn_tensor_alloc(ctx, dtype, ndim, shapes[i], &r->p[i].value));
        TRY(fattn_tensor_alloc(ctx, wide, ndim, shapes[i], &r->p[i].grad));
        TRY(fattn_tensor_normal(ctx, &r->p[i].value, ndim == 1, 0.05, (fattn_rng){.seed = 3, .stream = (uint32_t)i}));
        TRY(fattn_tensor_normal(ctx, &r->p[i].grad, 0, 0, (fattn_rng){0}));
    }
    fattn_adamw_options o = {.struct_size = sizeof o};
    fattn_adamw_defaults(&o);
    o.max_grad_norm = 0.5f;
    TRY(write_symbols(r));
    TRY(fattn_tape_create(ctx, &r->tape));
    return fattn_adamw_create(ctx, &o, r->list, PARAMS, &r->adamw);
}

static void end(run *r) {
    fattn_adamw_destroy(r->adamw);
    fattn_tape_destroy(r->tape);
    for (int i = 0; i < PARAMS; ++i) {
        fattn_tensor_free(r->ctx, &r->p[i].value);
        fattn_tensor_free(r->ctx, &r->p[i].grad);
    }
    fattn_tensor_free(r->ctx, &r->ids);
    fattn_tensor_free(r->ctx, &r->targets);
}

static fattn_var use(run *r, int i) { return fattn_use(r->tape, &r->p[i]); }

/* A block that uses every op; two losses. */
static fattn_var forward(run *r) {
    const fattn_attention_params p = {.struct_size = sizeof p, .flags = FATTN_CAUSAL, .algorithm = FATTN_ALGO_STANDARD};
    fattn_tape *const t = r->tape;
    const int H = (int)r->n.H, D = (int)r->n.D;
    const fattn_var none = {0}, E = use(r, EMBEDDING);
    fattn_var x = fattn_op_embedding(t, E, fattn_input(t, &r->ids));
    x = fattn_op_add(t, x, use(r, POSITION));
    fattn_var h = fattn_op_rmsnorm(t, x, use(r, GAIN), 1e-5f);
    const fattn_var qkv = fattn_op_linear(t, h, use(r, QKV), none);
    const fattn_var q = fattn_op_rope(t, fattn_op_heads(t, qkv, 0, H, D), 1e4f, 0);
    const fattn_var k = fattn_op_rope(t, fattn_op_heads(t, qkv, H, H, D), 1e4f, 0);
    const fattn_var v = fattn_op_heads(t, qkv, 2 * H, H, D);
    const fattn_var a = fattn_op_merge(t, fattn_op_attention(t, q, k, v, &p));
    x = fattn_op_linear_residual(t, a, use(r, OUT), none, x);
    h = fattn_op_layernorm(t, x, use(r, GAIN), use(r, BIAS), 1e-5f);
    const fattn_var up = fattn_op_linear(t, h, use(r, UP), use(r, UP_BIAS));
    h = fattn_op_mul(t, fattn_op_gelu(t, up), fattn_op_silu(t, up));
    fattn_var part = fattn_op_reshape(t, fattn_op_transpose(t, up, 0, 1), 2, (const int64_t[]){-1, r->n.hidden});
    part = fattn_op_concat(t, (const fattn_var[]){fattn_op_slice(t, part, 0, 1, 3), part}, 2, 0);
    part = fattn_op_slice(t, part, 0, 2, 2 + B * r->n.S);
    h = fattn_op_mul(t, h, fattn_op_reshape(t, part, 3, (const int64_t[]){B, r->n.S, r->n.hidden}));
    h = fattn_op_scale(t, fattn_op_mul(t, h, fattn_op_softmax(t, up)), 1.0 / 16); /* F16 ends at 65504 */
    h = fattn_op_swiglu(t, h, fattn_op_geglu(t, h, up));
    h = fattn_op_add(t, h, fattn_op_linear_gelu(t, x, use(r, UP), use(r, UP_BIAS)));
    h = fattn_op_dropout(t, h, 0.1f, (fattn_rng){.seed = 4}, none);
    h = fattn_op_add(t, h, fattn_op_sum(t, up, (const int[]){1}, 1, 1));
    h = fattn_op_add(t, h, fattn_op_mean(t, up, NULL, 0, 0));
    h = fattn_op_add(t, h, fattn_op_relu(t, fattn_op_tanh(t, fattn_op_scale(t, up, 0.5))));
    fattn_var normed;
    x = fattn_op_linear_norm(t, h, use(r, DOWN), use(r, BIAS), x, use(r, GAIN), use(r, BIAS), 1e-5f, &normed);
    x = fattn_op_mul(t, fattn_op_add(t, x, normed), use(r, SCALE));
    const fattn_var targets = fattn_input(t, &r->targets);
    const fattn_var logits = fattn_op_linear(t, x, E, none);
    x = fattn_op_mul(t, fattn_op_rmsnorm(t, x, use(r, GAIN), 1e-5f), use(r, POSITION)); /* small */
    x = fattn_op_matmul(t, fattn_op_matmul(t, x, x, 0, 1), x, 0, 0);                    /* [B,S,S], [B,S,C] */
    fattn_var loss = fattn_op_cross_entropy(t, fattn_op_cast(t, logits, FATTN_F32), targets, -1);
    const fattn_var other = fattn_op_linear_cross_entropy(t, x, E, targets, -1);
    if (r->p[0].value.dtype == FATTN_F64) loss = fattn_op_cast(t, loss, FATTN_F64);
    return fattn_op_add(t, loss, other);
}

static fattn_status train(run *r, double *loss) {
    for (int step = 0; step < STEPS; ++step) {
        fattn_tape_reset(r->tape);
        const fattn_var l = forward(r);
        TRY(fattn_tape_backward(r->tape, l));
        TRY(fattn_adamw_step(r->adamw));
        TRY(fattn_tape_item(r->tape, l, loss));
    }
    return FATTN_OK;
}

/* One row, whose products are a kernel of their own: rows of w that one warp has, and that eight share. The norm before
   the first one not for racecheck, which reports what is before and after a barrier of the block, since some warps have
   passed a named one. */
static fattn_status generate(fattn_ctx *ctx, fattn_dtype dtype, bool norms) {
    enum { ROW, OF_NORM, ADDED, WIDER, BACK, OPERANDS };
    static const int64_t shapes[OPERANDS][2] = {{1, 72}, {72}, {72}, {4096, 72}, {72, 4096}};
    fattn_tensor of[OPERANDS], y;
    fattn_var v[OPERANDS], x;
    fattn_tape *t;
    TRY(fattn_tape_create(ctx, &t));
    for (int i = 0; i < OPERANDS; ++i) {
        TRY(fattn_tensor_alloc(ctx, dtype, shapes[i][1] ? 2 : 1, shapes[i], &of[i]));
        TRY(fattn_tensor_normal(ctx, &of[i], 0, 0.1, (fattn_rng){.seed = 5, .stream = (uint32_t)i}));
        v[i] = fattn_input(t, &of[i]);
    }
    x = norms
            ? fattn_op_norm_linear(t, v[ROW], v[OF_NORM], v[ADDED], 1e-5f, v[WIDER], (fattn_var){0}, FATTN_LINEAR_GELU)
            : fattn_op_linear_gelu(t, v[ROW], v[WIDER], (fattn_var){0});
    x = fattn_op_linear_residual(t, x, v[BACK], v[ADDED], v[ROW]);
    const fattn_status s = fattn_tape_value(t, x, &y);
    for (int i = 0; i < OPERANDS; ++i) fattn_tensor_free(ctx, &of[i]);
    fattn_tape_destroy(t);
    return s;
}

static bool is_half(fattn_dtype t) { return t == FATTN_BF16 || t == FATTN_F16; }

int main(int argc, char **argv) {
    const bool races = argc > 1 && strcmp(argv[1], "racecheck") == 0;
    const bool no_bulk = races || (argc > 1 && strcmp(argv[1], "initcheck") == 0);
    static const fattn_dtype dtypes[] = {FATTN_BF16, FATTN_F16, FATTN_F32, FATTN_F64};
    static const uint32_t flags[] = {0, FATTN_CTX_DETERMINISTIC};
    int runs = 0, bad = 0;
    for (int f = 0; f < 2; ++f) {
        const fattn_ctx_options o = {.struct_size = sizeof o, .device = FATTN_CUDA, .flags = flags[f]};
        fattn_ctx *ctx;
        if (fattn_ctx_create(&o, &ctx) != FATTN_OK) {
            printf("%s\n", runs ? "the device is lost" : "skipped: no CUDA device");
            return runs ? 1 : SKIPPED;
        }
        for (size_t n = 0; n < sizeof all_sizes / sizeof *all_sizes; ++n)
            for (int d = 0; d < 4; ++d) {
                if (no_bulk && is_half(dtypes[d]) && all_sizes[n].H * all_sizes[n].D % 8 == 0) continue;
                run r;
                double loss = NAN;
                fattn_status s = start(&r, ctx, &all_sizes[n], dtypes[d]);
                if (!s) s = train(&r, &loss);
                if (s || !isfinite(loss)) {
                    printf("%s, sizes %zu: %s, loss %g\n", fattn_dtype_name(dtypes[d]), n,
                           s ? fattn_ctx_error(ctx) : "not finite", loss);
                    ++bad;
                }
                end(&r);
                ++runs;
            }
        for (int d = 0; d < 4; ++d) {
            const fattn_status s = generate(ctx, dtypes[d], !races);
            if (s) printf("%s, one row: %s\n", fattn_dtype_name(dtypes[d]), fattn_ctx_error(ctx)), ++bad;
            ++runs;
        }
        fattn_ctx_destroy(ctx);
    }
    printf("%d runs, of %d steps or of one row, %d bad\n", runs, STEPS, bad);
    return bad != 0;
}
