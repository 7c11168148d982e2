/* Products of BF16 matrices against sums in double, with the bound of an F32 sum's rounding error, for every transpose,
   ragged blocks, pitches, batches, the split of a long K and both dtypes of the result. */
#define _XOPEN_SOURCE 700 /* sigaltstack, setenv */
#include "core/cpu/gemm_bf16.h"
#include "core/cpu/with_onednn.h"
#include "core/tensor/numeric.h"

#include <criterion/criterion.h>
#include <fattn/fattn.h>

#include <math.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct shape {
    int64_t count, M, N, K;
} shape;

/* 1, block - 1, block, block + 1, primes; single rows and columns; K with and without a split; K = 0; nothing. */
static const shape shapes[] = {
    {1, 1, 1, 1},      {1, 1, 300, 107},  {1, 300, 1, 107},  {1, 257, 513, 1},   {1, 127, 129, 128}, {1, 255, 511, 31},
    {1, 257, 257, 64}, {1, 513, 1025, 3}, {1, 17, 13, 1100}, {1, 64, 96, 2048},  {1, 131, 67, 0},    {1, 0, 4, 3},
    {1, 4, 0, 3},      {3, 37, 53, 101},  {5, 128, 64, 64},  {2, 300, 17, 1031}, {1, 1031, 701, 5},  {1, 2, 3, 4099},
};
enum { SHAPES = sizeof shapes / sizeof *shapes };

static const char *const built_in[] = {FATTNI_WITH_ONEDNN("oneDNN", ) NULL};

static fattn_ctx *context(int threads, int cap) {
    const fattn_ctx_options o = {.struct_size = sizeof o, .cpu_threads = threads, .arch_cap = cap};
    fattn_ctx *ctx;
    cr_assert_eq(fattn_ctx_create(&o, &ctx), FATTN_OK);
    return ctx;
}

static bool multiplies(const fattn_ctx *ctx) { return ctx->isa >= FATTNI_ISA_AVX512BF16 && built_in[0]; }

/* A context that multiplies BF16 numbers; skips the test where this build or this CPU does not. */
static fattn_ctx *bf16_context(int threads) {
    fattn_ctx *const ctx = context(threads, 0);
    bool takes;
    if (!built_in[0]) cr_skip("built without oneDNN");
    if (ctx->isa < FATTNI_ISA_AVX512BF16) cr_skip("neither AMX nor AMD's AVX512-BF16");
    cr_assert_eq(fattni_bf16_takes(ctx, 64, 64, 64, &takes), FATTN_OK);
    cr_assert(takes);
    return ctx;
}

static float value(int64_t i) { /* in (-1, 1), of BF16, not symmetric */
    const uint64_t x = (uint64_t)i * 0x9e3779b97f4a7c15u;
    return fattni_bf16_to_float(fattni_float_to_bf16((float)((double)(int64_t)(x ^ (x >> 29)) * 0x1p-63)));
}

static void *numbers(fattn_dtype t, int64_t n, int64_t seed) {
    char *const p = malloc((size_t)n * 4 + 4);
    for (int64_t i = 0; i < n; ++i) fattni_store(p, (int32_t)t, i, (double)value(i + seed));
    return p;
}

static fattni_rows batches(int64_t count, int64_t stride) {
    return (fattni_rows){.count = count, .columns = 1, .step = 1, .n = 1, .shape = {count}, .stride = {stride}};
}

typedef struct product {
    fattni_bf16_products p;
    void *a, *b, *c, *before, *row, *workspace;
    int64_t size; /* of c, padding included */
} product;

static product make(const fattn_ctx *ctx, fattn_dtype t, const shape *s, bool ta, bool tb, bool add, bool row) {
    const int64_t lda = (ta ? s->M : s->K) + 2, ldb = (tb ? s->K : s->N) + 1, ldc = s->N + 3;
    const int64_t size_a = (ta ? s->K : s->M) * lda, size_b = (tb ? s->N : s->K) * ldb, size_c = s->M * ldc + 5;
    product p = {.a = numbers(FATTN_BF16, s->count * size_a, 1),
                 .b = numbers(FATTN_BF16, s->count * size_b, 2),
                 .c = numbers(t, s->count * size_c, 3),
                 .before = numbers(t, s->count * size_c, 3),
                 .row = numbers(FATTN_BF16, s->N, 4),
                 .size = s->count * size_c};
    p.p = (fattni_bf16_products){.first = {.dtype = t,
                                           .trans_a = ta,
                                           .trans_b = tb,
                                           .M = s->M,
                                           .N = s->N,
                                           .K = s->K,
                                           .alpha = 1,
                                           .beta = add,
                                           .a = p.a,
                                           .b = p.b,
                                           .c = p.c,
                                           .lda = lda,
                                           .ldb = ldb,
                                           .ldc = ldc,
                                           .row = row ? p.row : NULL},
                                 .a = batches(s->count, size_a),
                                 .b = batches(s->count, size_b),
                                 .c = batches(s->count, size_c)};
    p.workspace = aligned_alloc(FATTNI_ALIGN, fattni_bf16_workspace(ctx, &p.p.first, s->count) + FATTNI_ALIGN);
    return p;
}

static void destroy(product *p) {
    free(p->a), free(p->b), free(p->c), free(p->before), free(p->row), free(p->workspace);
}

/* (K + 8) u of the sum of |terms| for F32 sums in any order, and half a unit in the last place of the result. */
static void check(const product *p, const char *what) {
    const fattni_gemm *const g = &p->p.first;
    const int32_t t = (int32_t)g->dtype;
    const double last = g->dtype == FATTN_BF16 ? 0x1p-8 : 0x1p-24;
    int64_t seen = 0;
    for (int64_t n = 0; n < p->p.c.count; ++n)
        for (int64_t i = 0; i < g->M; ++i)
            for (int64_t j = 0; j < g->N; ++j) {
                const int64_t at = n * p->p.c.stride[0] + i * g->ldc + j;
                double sum = 0, size = 0;
                for (int64_t k = 0; k < g->K; ++k) {
                    const int64_t ia = g->trans_a ? k * g->lda + i : i * g->lda + k;
                    const int64_t ib = g->trans_b ? j * g->ldb + k : k * g->ldb + j;
                    const double term = fattni_load(p->a, FATTN_BF16, n * p->p.a.stride[0] + ia) *
                                        fattni_load(p->b, FATTN_BF16, n * p->p.b.stride[0] + ib);
                    sum += term, size += fabs(term);
                }
                if (g->row) sum += fattni_load(p->row, FATTN_BF16, j), size += fabs(fattni_load(p->row, FATTN_BF16, j));
                if (g->beta != 0) sum += fattni_load(p->before, t, at), size += fabs(fattni_load(p->before, t, at));
                const double got = fattni_load(p->c, t, at),
                             bound = (double)(g->K + 8) * 0x1p-24 * size + last * fabs(sum);
                cr_assert(fabs(got - sum) <= bound, "%s %s: c[%ld,%ld,%ld] = %g, not %g, bound %g", what,
                          fattn_dtype_name(g->dtype), (long)n, (long)i, (long)j, got, sum, bound);
                fattni_store(p->before, t, at, got); /* what remains must be as before */
                seen += 1;
            }
    cr_assert_eq(seen, p->p.c.count * g->M * g->N);
    cr_assert_eq(memcmp(p->before, p->c, (size_t)p->size * fattn_dtype_size(g->dtype)), 0, "%s: padding changed", what);
}

Test(gemm_bf16, products) {
    fattn_ctx *const ctx = bf16_context(2);
    for (int i = 0; i < SHAPES * 32; ++i) {
        const shape *const s = &shapes[i / 32];
        const fattn_dtype t = i & 1 ? FATTN_F32 : FATTN_BF16;
        char what[96];
        snprintf(what, sizeof what, "%ld x (%ld,%ld,%ld), case %d", (long)s->count, (long)s->M, (long)s->N, (long)s->K,
                 i % 32);
        product p = make(ctx, t, s, i & 2, i & 4, i & 8, i & 16);
        cr_assert_eq(fattni_bf16_multiply(ctx, &p.p, p.workspace), FATTN_OK, "%s", fattn_ctx_error(ctx));
        check(&p, what);
        destroy(&p);
    }
    fattn_ctx_destroy(ctx);
}

/* Tasks depend on the shape alone, so the bits do not depend on the number of threads. */
Test(gemm_bf16, bits_for_any_number_of_threads) {
    static const int threads[] = {2, 3, 5};
    fattn_ctx *const one = bf16_context(1);
    for (int n = 0; n < 3; ++n) {
        fattn_ctx *const ctx = bf16_context(threads[n]);
        for (int i = 0; i < SHAPES * 4; ++i) {
            product a = make(one, i & 1 ? FATTN_F32 : FATTN_BF16, &shapes[i / 4], i & 2, i & 2, i & 1, true);
            product b = make(ctx, i & 1 ? FATTN_F32 : FATTN_BF16, &shapes[i / 4], i & 2, i & 2, i & 1, true);
            cr_assert_eq(fattni_bf16_multiply(one, &a.p, a.workspace), FATTN_OK);
            cr_assert_eq(fattni_bf16_multiply(ctx, &b.p, b.workspace), FATTN_OK);
            cr_assert_eq(memcmp(a.c, b.c, (size_t)a.size * fattn_dtype_size(a.p.first.dtype)), 0,
                         "shape %d, %d threads", i / 4, threads[n]);
            destroy(&a);
            destroy(&b);
        }
        fattn_ctx_destroy(ctx);
    }
    fattn_ctx_destroy(one);
}

/* beta 0 does not read C. Infinity and NaN go where their terms do, and nowhere else. */
Test(gemm_bf16, infinity_and_nan) {
    static const shape s = {1, 40, 70, 65};
    fattn_ctx *const ctx = bf16_context(2);
    for (int beta = 0; beta < 2; ++beta) {
        product p = make(ctx, FATTN_BF16, &s, false, false, beta, false);
        const fattni_gemm *const g = &p.p.first;
        uint16_t *const c = p.c, *const a = p.a;
        for (int64_t i = 0; i < g->M * g->ldc; ++i)
            if (!beta) c[i] = 0x7fc0;
        a[3 * g->lda + 64] = 0x7f80;  /* row 3: infinite */
        a[20 * g->lda + 11] = 0x7fc0; /* row 20: NaN */
        cr_assert_eq(fattni_bf16_multiply(ctx, &p.p, p.workspace), FATTN_OK);
        for (int64_t i = 0; i < g->M; ++i)
            for (int64_t j = 0; j < g->N; ++j) {
                const double got = fattni_load(c, FATTN_BF16, i * g->ldc + j);
                cr_assert(i == 20  ? isnan(got)
                          : i == 3 ? isinf(got)
                                   : isfinite(got),
                          "c[%ld,%ld] = %g", (long)i, (long)j, got);
            }
        destroy(&p);
    }
    fattn_ctx_destroy(ctx);
}

static bool takes(fattn_ctx *ctx, int64_t M, int64_t N, int64_t K) {
    bool yes;
    cr_assert_eq(fattni_bf16_takes(ctx, M, N, K, &yes), FATTN_OK);
    return yes;
}

/* Only with instructions for it, which the context may forbid, and for sizes that gain. */
Test(gemm_bf16, chosen_by_context_and_size) {
    fattn_ctx *const best = context(1, 0);
    const bool some = multiplies(best);
    cr_assert_eq(takes(best, 32, 32, 32), some);
    cr_assert_eq(takes(best, 1, 768, 768), some);
    cr_assert_eq(takes(best, INT32_MAX, INT32_MAX, INT32_MAX), some);
    cr_assert_not(takes(best, 32, 32, 31));
    cr_assert_not(takes(best, 1000, 0, 1000));
    fattn_ctx_destroy(best);
    for (int cap = FATTNI_ISA_BASELINE; cap < FATTNI_ISA_AMX; ++cap) {
        if (cap == FATTNI_ISA_AVX512BF16 && fattni_cpu_isa() == cap) continue; /* no cap */
        fattn_ctx *const ctx = context(1, cap);
        cr_assert_not(takes(ctx, 512, 512, 512), "arch_cap %d", cap);
        cr_assert_null(ctx->bf16.engine);
        fattn_ctx_destroy(ctx);
    }
    const fattn_ctx_options exact = {.struct_size = sizeof exact, .flags = FATTN_CTX_F32_PRODUCTS};
    fattn_ctx *ctx;
    cr_assert_eq(fattn_ctx_create(&exact, &ctx), FATTN_OK);
    cr_assert_not(takes(ctx, 512, 512, 512));
    fattn_ctx_destroy(ctx);
}

static void note(void *user, fattn_log level, const char *text) {
    if (level == FATTN_LOG_WARN && (strstr(text, "AMX") || strstr(text, "AVX512-BF16"))) ++*(int *)user;
}

/* Linux refuses AMX beside a signal stack that is too small for its registers: F32 products, and one warning. Neither a
   context nor a small product asks for AMX. */
Test(gemm_bf16, refused_by_the_operating_system) {
    static char memory[8192];
    const stack_t stack = {.ss_sp = memory, .ss_size = sizeof memory};
    int warnings = 0;
    const fattn_ctx_options o = {.struct_size = sizeof o, .log = note, .log_user = &warnings};
    fattn_ctx *ctx;
    cr_assert_eq(fattn_ctx_create(&o, &ctx), FATTN_OK);
    if (ctx->isa < FATTNI_ISA_AMX || !built_in[0]) cr_skip("no AMX, or built without oneDNN");
    cr_assert_not(takes(ctx, 8, 8, 8));
    cr_assert_eq(sigaltstack(&stack, NULL), 0);
    cr_assert_not(takes(ctx, 512, 512, 512));
    cr_assert_not(takes(ctx, 512, 512, 512));
    cr_assert_eq(warnings, 1);
    fattn_ctx_destroy(ctx);
}

/* oneDNN was told not to use AMX, or AVX512-BF16: F32 products, and one warning. */
Test(gemm_bf16, capped_by_onednn) {
    int warnings = 0;
    const fattn_ctx_options o = {.struct_size = sizeof o, .log = note, .log_user = &warnings};
    const char *const cap = fattni_cpu_isa() >= FATTNI_ISA_AMX ? "AVX512_CORE_BF16" : "AVX512_CORE";
    fattn_ctx *ctx;
    cr_assert_eq(setenv("ONEDNN_MAX_CPU_ISA", cap, 1), 0); /* read when oneDNN is first used */
    cr_assert_eq(fattn_ctx_create(&o, &ctx), FATTN_OK);
    if (!multiplies(ctx)) cr_skip("no instructions for it, or built without oneDNN");
    cr_assert_not(takes(ctx, 512, 512, 512));
    cr_assert_not(takes(ctx, 512, 512, 512));
    cr_assert_eq(warnings, 1);
    fattn_ctx_destroy(ctx);
}

/* Against sums in double, for one part and for many, with every kind of d; bits for any number of threads. */
Test(gemm_bf16, column_sums) {
    static const int64_t sizes[][2] = {{0, 5}, {1, 1}, {255, 511}, {257, 513}, {1031, 1025}, {20000, 7}, {3, 0}};
    for (int i = 0; i < 7 * 4; ++i) {
        const int64_t R = sizes[i / 4][0], N = sizes[i / 4][1], pitch = N + 3;
        const fattn_dtype t = i & 1 ? FATTN_F32 : FATTN_BF16;
        const bool fresh = i & 2;
        uint16_t *const x = numbers(FATTN_BF16, R * pitch, 7);
        void *const old = numbers(t, N, 8), *const workspace = malloc(fattni_bf16_column_sums_workspace(R, N) + 8);
        void *d[2];
        for (int n = 0; n < 2; ++n) {
            fattn_ctx *const ctx = context(n ? 3 : 1, FATTNI_ISA_AVX512);
            if (ctx->isa < FATTNI_ISA_AVX512) cr_skip("no AVX-512");
            d[n] = numbers(t, N, 8);
            fattni_bf16_column_sums(ctx, x, R, N, pitch, d[n], t, fresh, workspace);
            fattn_ctx_destroy(ctx);
        }
        for (int64_t n = 0; n < N; ++n) {
            double sum = fresh ? 0 : fattni_load(old, (int32_t)t, n), size = 0;
            for (int64_t r = 0; r < R; ++r) {
                sum += fattni_load(x, FATTN_BF16, r * pitch + n);
                size += fabs(fattni_load(x, FATTN_BF16, r * pitch + n));
            }
            const double unit = t == FATTN_BF16 ? 0x1p-8 : 0x1p-24, got = fattni_load(d[0], (int32_t)t, n);
            cr_assert(fabs(got - sum) <= unit * fabs(sum) + (double)R * 0x1p-52 * size, "%ld of %ld rows: %g, not %g",
                      (long)n, (long)R, got, sum);
        }
        cr_assert_eq(memcmp(d[0], d[1], (size_t)N * fattn_dtype_size(t)), 0);
        free(x), free(old), free(workspace), free(d[0]), free(d[1]);
    }
}

/* Two BF16 numbers have 16 bits of a float's 24. */
Test(gemm_bf16, split) {
    static const float special[] = {0,         -0.0f,     1,        -3.5f,     0x1.fffffep127f,
                                    0x1p-126f, 0x1p-149f, INFINITY, -INFINITY, NAN};
    enum { N = 1009 };
    float x[N];
    uint16_t high[N], low[N];
    fattn_ctx *const ctx = context(1, 0);
    if (ctx->isa < FATTNI_ISA_AVX512) cr_skip("no AVX-512");
    for (int i = 0; i < N; ++i)
        x[i] = i < 10 ? special[i] : (float)ldexp((double)value(i) + (double)value(3 * i) / 300, i % 200 - 110);
    fattni_bf16_split(x, high, low, N);
    for (int i = 0; i < N; ++i) {
        const double sum = fattni_load(high, FATTN_BF16, i) + fattni_load(low, FATTN_BF16, i);
        if (isnan(x[i]))
            cr_assert(isnan(sum));
        else if (isinf(x[i]) || fabsf(x[i]) > 0x1.fep127f) /* rounds to infinity */
            cr_assert_eq(sum, copysign(INFINITY, (double)x[i]));
        else
            cr_assert(fabs(sum - (double)x[i]) <= fmax(0x1p-16 * fabs((double)x[i]), 0x1p-126), "%a is %a",
                      (double)x[i], sum);
    }
    fattn_ctx_destroy(ctx);
}
