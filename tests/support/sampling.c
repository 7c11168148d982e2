#include "sampling.h"

#include "core/tensor/philox.h"

#include <criterion/criterion.h>
#include <math.h>
#include <stdbool.h>
#include <stdlib.h>

#define MUST(call) cr_assert_eq(call, FATTN_OK, "%s", fattn_ctx_error(ctx))

/* ---- the expected token ---- */

typedef struct token {
    float logit;
    int32_t index;
} token;

static int likelier_first(const void *a, const void *b) {
    const token *const x = a, *const y = b;
    if (x->logit != y->logit) return x->logit > y->logit ? -1 : 1;
    return (x->index > y->index) - (x->index < y->index);
}

static double uniform(const sampling_rule *r, int32_t draw, int32_t i) {
    const fattni_block counter = {{(uint32_t)i / 4, (uint32_t)draw, 0, r->rng.stream}};
    return ((double)fattni_philox(r->rng.seed, counter).w[i % 4] + 0.5) / 0x1p32;
}

int32_t sampling_expected(const float *logits, int64_t V, const sampling_rule *r, int32_t draw) {
    token *const all = malloc((size_t)V * sizeof *all);
    double *const weight = malloc((size_t)V * sizeof *weight);
    cr_assert(all && weight);
    for (int64_t i = 0; i < V; ++i) all[i] = (token){logits[i], (int32_t)i};
    qsort(all, (size_t)V, sizeof *all, likelier_first);
    int64_t kept = V;
    int32_t best = all[0].index;
    if (r->temperature > 0) {
        double sum = 0, part = 0, highest = -INFINITY;
        if (r->top_k > 0 && r->top_k < V) kept = r->top_k;
        for (int64_t n = 0; n < kept; ++n)
            sum += weight[n] = exp(((double)all[n].logit - (double)all[0].logit) / r->temperature);
        if (r->top_p > 0 && r->top_p < 1) {
            int64_t nucleus = 0;
            while (part < r->top_p * sum) part += weight[nucleus++];
            kept = nucleus;
        }
        for (int64_t n = 0; n < kept; ++n) {
            const double score = ((double)all[n].logit - (double)all[0].logit) / r->temperature -
                                 log(-log(uniform(r, draw, all[n].index)));
            if (score > highest) highest = score, best = all[n].index;
        }
    }
    free(all);
    free(weight);
    return best;
}

int32_t sampling_of_row(fattn_ctx *ctx, const float *logits, int64_t V, const sampling_rule *r, int32_t draw) {
    int32_t chosen = -2;
    const int64_t shape[2] = {1, V}, one = 1;
    const fattn_tensor x = fattn_tensor_view((void *)(uintptr_t)logits, FATTN_F32, FATTN_CPU, 0, 2, shape);
    const fattn_tensor d = fattn_tensor_view(&draw, FATTN_I32, FATTN_CPU, 0, 1, &one);
    const fattn_tensor t = fattn_tensor_view(&chosen, FATTN_I32, FATTN_CPU, 0, 1, &one);
    const fattn_sample_io io = {.struct_size = sizeof io,
                                .top_k = r->top_k,
                                .temperature = r->temperature,
                                .top_p = r->top_p,
                                .rng = r->rng,
                                .logits = &x,
                                .draws = &d,
                                .tokens = &t};
    MUST(fattn_sample(ctx, &io));
    return chosen;
}

/* ---- cases ---- */

static uint32_t state;
static uint32_t below(uint32_t n) {
    state = state * 1664525u + 1013904223u;
    return (uint32_t)((uint64_t)(state >> 8) * n >> 24);
}
static float normal(void) {
    float x = -6;
    for (int n = 0; n < 12; ++n) x += (float)below(1u << 20) * 0x1p-20f;
    return x;
}

enum kind { NORMAL, WIDE, LEVELS, EQUAL, MASKED, HUGE, ZEROS, KINDS };
static float logit_of(enum kind kind) {
    switch (kind) {
    case WIDE: return 20 * normal();
    case LEVELS: return (float)below(7) - 3;
    case EQUAL: return 1.5f;
    case MASKED: return below(3) ? -INFINITY : normal();
    case HUGE: return (below(2) ? 1e3f : 1e4f) * normal();
    case ZEROS: return below(2) ? 0.0f : -0.0f;
    default: return normal();
    }
}

enum layout { DENSE, PITCHED, TURNED, ONE_ROW, LAYOUTS };

/* [B,V] with the strides of the layout, in memory of *owner. */
static fattn_tensor logits_of(fattn_ctx *ctx, enum layout layout, fattn_dtype dtype, int64_t B, int64_t V,
                              fattn_tensor *owner) {
    const int64_t dense[2] = {B, V}, pitched[2] = {B, V + 5}, turned[2] = {V, B}, row[2] = {1, V};
    const int order[2] = {1, 0};
    MUST(fattn_tensor_alloc(ctx, dtype, 2,
                            layout == PITCHED   ? pitched
                            : layout == TURNED  ? turned
                            : layout == ONE_ROW ? row
                                                : dense,
                            owner));
    if (layout == TURNED) return fattn_tensor_permute(owner, order);
    fattn_tensor t = fattn_tensor_slice(owner, 1, 0, V);
    if (layout == ONE_ROW) t.shape[0] = B, t.stride[0] = 0;
    return t;
}

static fattn_tensor I32_of(fattn_ctx *ctx, int64_t n, const int32_t *values) {
    const fattn_tensor host = fattn_tensor_view((void *)(uintptr_t)values, FATTN_I32, FATTN_CPU, 0, 1, &n);
    fattn_tensor t;
    MUST(fattn_tensor_alloc(ctx, FATTN_I32, 1, &n, &t));
    if (values) MUST(fattn_tensor_copy(ctx, &t, &host));
    return t;
}

static void read_I32(fattn_ctx *ctx, const fattn_tensor *t, int32_t *to) {
    const fattn_tensor host = fattn_tensor_view(to, FATTN_I32, FATTN_CPU, 0, 1, t->shape);
    MUST(fattn_tensor_copy(ctx, &host, t));
}

enum { MOST_ROWS = 4 };

static void check(fattn_ctx *ctx, int n, int64_t V) {
    static const fattn_dtype dtypes[] = {FATTN_F32, FATTN_BF16, FATTN_F16, FATTN_F64};
    static const double temperatures[] = {1, 0.7, 0, 3, 1e-3}, parts[] = {0, 0.9, 0.5, 1, 1e-6, 0.999};
    const enum kind kind = (enum kind)(n % KINDS);
    const enum layout layout = (enum layout)(n / 3 % LAYOUTS);
    const fattn_dtype dtype = dtypes[n / 2 % 4];
    const int64_t B = 1 + n % MOST_ROWS;
    const sampling_rule r = {.temperature = temperatures[n % 5],
                             .top_p = parts[n / 5 % 6],
                             .top_k = n % 2 ? 0 : (int32_t)below((uint32_t)V + 3),
                             .rng = {.seed = (uint64_t)n << 33 | 5, .stream = (uint32_t)n}};
    float *const host = malloc((size_t)(B * V) * sizeof *host);
    int32_t draws[MOST_ROWS], tokens[MOST_ROWS], after[MOST_ROWS];
    fattn_tensor owner;
    cr_assert(host);
    const fattn_tensor logits = logits_of(ctx, layout, dtype, B, V, &owner);
    for (int64_t i = 0; i < B * V; ++i) host[i] = logit_of(kind);
    for (int64_t b = 0; b < B; ++b) host[b * V + below((uint32_t)V)] = 1; /* of MASKED some is finite */
    fattn_tensor one = logits, there = fattn_tensor_view(host, FATTN_F32, FATTN_CPU, 0, 2, logits.shape), back = there;
    if (layout == ONE_ROW) one.shape[0] = there.shape[0] = 1;
    MUST(fattn_tensor_copy(ctx, &one, &there));
    MUST(fattn_tensor_copy(ctx, &back, &logits)); /* rounded, and one row in all */
    for (int b = 0; b < MOST_ROWS; ++b) draws[b] = (int32_t)below(1u << 24);
    fattn_tensor d = I32_of(ctx, B, draws), a = I32_of(ctx, B, NULL), t = I32_of(ctx, B, NULL);
    const bool numbered = n % 3 > 0, in_place = n % 3 == 2;
    const fattn_sample_io io = {.struct_size = sizeof io,
                                .top_k = r.top_k,
                                .temperature = r.temperature,
                                .top_p = r.top_p,
                                .rng = r.rng,
                                .logits = &logits,
                                .draws = numbered ? &d : NULL,
                                .draws_after = !numbered  ? NULL
                                               : in_place ? &d
                                                          : &a,
                                .tokens = &t};
    const size_t allocs = fattn_ctx_mem(ctx).allocs;
    MUST(fattn_sample(ctx, &io));
    cr_assert_eq(fattn_ctx_mem(ctx).allocs, allocs);
    read_I32(ctx, &t, tokens);
    if (numbered) read_I32(ctx, in_place ? &d : &a, after);
    for (int64_t b = 0; b < B; ++b) {
        const int32_t draw = numbered ? draws[b] : (int32_t)b, want = sampling_expected(host + b * V, V, &r, draw);
        cr_assert_eq(tokens[b], want, "case %d, row %d of V %d, kind %d, %s: %d (%g), not %d (%g)", n, (int)b, (int)V,
                     (int)kind, fattn_dtype_name(dtype), tokens[b],
                     tokens[b] < 0 ? 0.0 : (double)host[b * V + tokens[b]], want, (double)host[b * V + want]);
        if (numbered) cr_assert_eq(after[b], draws[b] + 1);
    }
    fattn_tensor_free(ctx, &d);
    fattn_tensor_free(ctx, &a);
    fattn_tensor_free(ctx, &t);
    fattn_tensor_free(ctx, &owner);
    free(host);
}

void sampling_check(fattn_ctx *ctx, int n) {
    static const int64_t sizes[] = {1, 2, 3, 4, 5, 17, 96, 256, 257, 1000, 2047, 2053};
    state = (uint32_t)n + 77;
    check(ctx, n, sizes[n % 12]);
}

void sampling_check_large(fattn_ctx *ctx, int n) {
    static const int64_t sizes[SAMPLING_LARGE] = {50257, 50304, 32000, 65536, 70001, 128256};
    state = (uint32_t)n + 7;
    check(ctx, 21 * n + 1, sizes[n]);
}

enum { BAD_ROWS = 6, LONG = 20000 };
static void check_bad_rows(fattn_ctx *ctx, int32_t V) {
    static float x[BAD_ROWS * LONG];
    const int64_t shape[2] = {BAD_ROWS, V};
    const int32_t want[BAD_ROWS] = {-1, -1, -1, -1, V - 2, V - 1};
    int32_t tokens[BAD_ROWS];
    for (int b = 0; b < BAD_ROWS; ++b)
        for (int i = 0; i < V; ++i) x[b * V + i] = b == 3 ? -INFINITY : (float)i;
    x[V - 1] = NAN;
    x[V] = INFINITY;
    x[2 * V + V / 2] = -NAN;
    x[5 * V - 1] = -INFINITY; /* the last row stays as it is */
    const fattn_tensor host = fattn_tensor_view(x, FATTN_F32, FATTN_CPU, 0, 2, shape);
    fattn_tensor logits, t = I32_of(ctx, BAD_ROWS, NULL);
    MUST(fattn_tensor_alloc(ctx, FATTN_F32, 2, shape, &logits));
    MUST(fattn_tensor_copy(ctx, &logits, &host));
    for (int n = 0; n < 3; ++n) {
        const fattn_sample_io io = {.struct_size = sizeof io,
                                    .temperature = n == 0 ? 0 : 1e-3,
                                    .top_k = n == 2 ? 3 : 0,
                                    .top_p = n == 2 ? 0.9 : 0,
                                    .logits = &logits,
                                    .tokens = &t};
        MUST(fattn_sample(ctx, &io));
        read_I32(ctx, &t, tokens);
        cr_assert_arr_eq(tokens, want, sizeof tokens, "%d, V %d: %d %d %d %d %d %d", n, V, tokens[0], tokens[1],
                         tokens[2], tokens[3], tokens[4], tokens[5]);
    }
    fattn_tensor_free(ctx, &logits);
    fattn_tensor_free(ctx, &t);
}

void sampling_check_bad_rows(fattn_ctx *ctx) {
    check_bad_rows(ctx, 70);
    check_bad_rows(ctx, LONG);
}
