/* Matrix products against sums in double, with the standard bound of a dot product's rounding error, for every
   transpose, ragged blocks, pitches, and the split of a long K. */
#define _POSIX_C_SOURCE 200809L /* sigaction, timers */
#include "core/cpu/gemm_cpu.h"
#include "core/cpu/with_onednn.h"

#include <criterion/criterion.h>
#include <fattn/fattn.h>

#include <float.h>
#include <math.h>
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

typedef struct shape {
    int64_t M, N, K;
} shape;

/* 1, block - 1, block, block + 1, primes; K above and below the limit of the split; K = 0. */
static const shape shapes[] = {
    {1, 1, 1},      {1, 300, 7},    {127, 1, 128}, {128, 128, 129}, {129, 257, 31},  {3, 5, 0},      {257, 131, 2},
    {17, 13, 1100}, {64, 96, 2048}, {0, 4, 3},     {4, 0, 3},       {1031, 1100, 5}, {2049, 515, 3},
};
enum { SHAPES = sizeof shapes / sizeof *shapes };

/* Those that can multiply F32 matrices, and the one of these that contexts use. */
static const bool by_onednn[] = {false, FATTNI_WITH_ONEDNN(true, )};
enum { LIBRARIES = sizeof by_onednn / sizeof *by_onednn };
static int library;

static fattn_ctx *context(int threads) {
    const fattn_ctx_options o = {.struct_size = sizeof o, .cpu_threads = threads};
    fattn_ctx *ctx;
    cr_assert_eq(fattn_ctx_create(&o, &ctx), FATTN_OK);
    ctx->f32_by_onednn = by_onednn[library];
    return ctx;
}

#define EACH_LIBRARY(name)                                                                                             \
    static void name(void);                                                                                            \
    Test(gemm, name) {                                                                                                 \
        for (library = 0; library < LIBRARIES; ++library) name();                                                      \
    }                                                                                                                  \
    static void name(void)

static double value(int64_t i) { /* in (-1, 1), not symmetric */
    const uint64_t x = (uint64_t)i * 0x9e3779b97f4a7c15u;
    return (double)(int64_t)(x ^ (x >> 29)) * 0x1p-63;
}

static double get(const void *p, fattn_dtype t, int64_t i) {
    return t == FATTN_F64 ? ((const double *)p)[i] : (double)((const float *)p)[i];
}

static void *matrix(fattn_dtype t, int64_t rows, int64_t pitch, int64_t seed) {
    const int64_t n = rows * pitch;
    void *p = malloc((size_t)n * 8 + 8);
    for (int64_t i = 0; i < n; ++i) {
        if (t == FATTN_F64)
            ((double *)p)[i] = value(i + seed);
        else
            ((float *)p)[i] = (float)value(i + seed);
    }
    return p;
}

/* One product; c is [M, N + 3], its last three columns must not change. */
typedef struct product {
    fattni_gemm g;
    void *a, *b, *c, *row, *onto, *workspace;
} product;

static product make(fattn_dtype t, const shape *s, bool ta, bool tb, double beta, bool row, bool split) {
    const int64_t lda = (ta ? s->M : s->K) + 2, ldb = (tb ? s->K : s->N) + 1, ldc = s->N + 3;
    product p = {.a = matrix(t, ta ? s->K : s->M, lda, 1),
                 .b = matrix(t, tb ? s->N : s->K, ldb, 2),
                 .c = matrix(t, s->M, ldc, 3),
                 .row = matrix(t, 1, s->N, 4),
                 .onto = matrix(t, s->M, ldc, 5)};
    p.g = (fattni_gemm){.dtype = t,
                        .trans_a = ta,
                        .trans_b = tb,
                        .M = s->M,
                        .N = s->N,
                        .K = s->K,
                        .alpha = 0.75,
                        .beta = beta,
                        .a = p.a,
                        .b = p.b,
                        .c = p.c,
                        .lda = lda,
                        .ldb = ldb,
                        .ldc = ldc,
                        .row = row ? p.row : NULL};
    const size_t bytes = split ? fattni_gemm_workspace(&p.g) : 0;
    if (bytes) p.g.workspace = p.workspace = malloc(bytes);
    return p;
}

static void drop(product *p) { free(p->a), free(p->b), free(p->c), free(p->row), free(p->onto), free(p->workspace); }

/* Each of K products and sums, and the few operations after them, rounds once. */
static void check(const product *p, const void *before) {
    const fattni_gemm *g = &p->g;
    const double eps = g->dtype == FATTN_F64 ? DBL_EPSILON : FLT_EPSILON;
    for (int64_t m = 0; m < g->M; ++m) {
        for (int64_t n = 0; n < g->N; ++n) {
            double sum = 0, size = 0;
            for (int64_t k = 0; k < g->K; ++k) {
                const double x = get(g->a, g->dtype, g->trans_a ? k * g->lda + m : m * g->lda + k) *
                                 get(g->b, g->dtype, g->trans_b ? n * g->ldb + k : k * g->ldb + n);
                sum += x;
                size += fabs(x);
            }
            double want = g->alpha * sum;
            if (g->beta != 0) want += g->beta * get(before, g->dtype, m * g->ldc + n);
            if (g->row) want += get(g->row, g->dtype, n);
            if (g->onto) want += get(g->onto, g->dtype, m * g->ldc + n);
            const double got = get(g->c, g->dtype, m * g->ldc + n);
            const double bound = ((double)g->K + 4) * eps * (size + 2);
            cr_assert(fabs(got - want) <= bound, "%s %lldx%lldx%lld %d%d: [%lld,%lld] is %g, not %g",
                      fattn_dtype_name(g->dtype), (long long)g->M, (long long)g->N, (long long)g->K, g->trans_a,
                      g->trans_b, (long long)m, (long long)n, got, want);
        }
        for (int64_t n = g->N; n < g->ldc; ++n)
            cr_assert_eq(get(g->c, g->dtype, m * g->ldc + n), get(before, g->dtype, m * g->ldc + n),
                         "column %lld, beyond C, was written", (long long)n);
    }
}

EACH_LIBRARY(agrees_with_sums_in_double) {
    static const struct {
        double beta;
        bool row, onto, split;
    } modes[] = {{0, true, false, false},   {0, false, false, true}, {1, false, false, false},
                 {0.5, false, false, true}, {0, true, true, false},  {0, false, true, false}};
    fattn_ctx *ctx = context(2);
    for (int i = 0; i < SHAPES * 8; ++i) {
        const fattn_dtype t = i & 4 ? FATTN_F64 : FATTN_F32;
        for (size_t k = 0; k < sizeof modes / sizeof *modes; ++k) {
            product p = make(t, &shapes[i / 8], i & 1, i & 2, modes[k].beta, modes[k].row, modes[k].split);
            if (modes[k].onto) p.g.onto = p.onto;
            void *before = matrix(t, p.g.M, p.g.ldc, 3);
            fattni_gemm_cpu(ctx, &p.g);
            check(&p, before);
            free(before);
            drop(&p);
        }
    }
    fattn_ctx_destroy(ctx);
}

EACH_LIBRARY(beta_zero_ignores_what_was_there) {
    fattn_ctx *ctx = context(2);
    for (int i = 0; i < SHAPES * 2; ++i) {
        product p = make(FATTN_F32, &shapes[i / 2], false, true, 0, false, i & 1);
        for (int64_t e = 0; e < p.g.M * p.g.ldc; ++e) ((float *)p.c)[e] = NAN;
        if (p.workspace) memset(p.workspace, 0xff, fattni_gemm_workspace(&p.g));
        fattni_gemm_cpu(ctx, &p.g);
        for (int64_t m = 0; m < p.g.M; ++m)
            for (int64_t n = 0; n < p.g.N; ++n) cr_assert(isfinite(get(p.c, FATTN_F32, m * p.g.ldc + n)));
        drop(&p);
    }
    fattn_ctx_destroy(ctx);
}

EACH_LIBRARY(bits_do_not_depend_on_threads) {
    const shape large[] = {{129, 257, 2048}, {1031, 515, 77}, {128, 128, 9001}};
    const int threads[] = {1, 2, 3, 8};
    for (int i = 0; i < 12; ++i) {
        const fattn_dtype t = i & 1 ? FATTN_F64 : FATTN_F32;
        void *first = NULL;
        for (int k = 0; k < 4; ++k) {
            fattn_ctx *ctx = context(threads[k]);
            product p = make(t, &large[i / 4], true, false, 1, false, i & 2);
            const size_t bytes = (size_t)(p.g.M * p.g.ldc) * fattn_dtype_size(t);
            fattni_gemm_cpu(ctx, &p.g);
            if (!first) first = memcpy(malloc(bytes), p.c, bytes);
            cr_assert(memcmp(first, p.c, bytes) == 0, "%d threads differ from 1", threads[k]);
            drop(&p);
            fattn_ctx_destroy(ctx);
        }
        free(first);
    }
}

/* As in an op's tasks, where a library has one thread: with several threads OpenBLAS splits a block, and some of its
   kernels round differently at the edges. */
typedef struct backwards {
    const fattn_ctx *ctx;
    const fattni_gemm *g;
} backwards;
static void all_blocks_backwards(void *arg, int64_t task, int thread) {
    (void)task, (void)thread;
    const backwards *const x = arg;
    for (int64_t b = fattni_gemm_blocks(x->g); b-- > 0;) fattni_gemm_block(x->ctx, x->g, b);
}

EACH_LIBRARY(blocks_make_the_whole) {
    fattn_ctx *ctx = context(2);
    const shape s = {300, 515, 40};
    product whole = make(FATTN_F32, &s, false, false, 0, true, false);
    product pieces = make(FATTN_F32, &s, false, false, 0, true, false);
    fattni_gemm_cpu(ctx, &whole.g);
    cr_assert_gt(fattni_gemm_blocks(&pieces.g), 4);
    fattni_parallel(ctx, 1, all_blocks_backwards, &(backwards){ctx, &pieces.g});
    cr_assert(memcmp(whole.c, pieces.c, (size_t)(s.M * whole.g.ldc) * sizeof(float)) == 0);
    drop(&whole);
    drop(&pieces);
    fattn_ctx_destroy(ctx);
}

/* Each library rounds in an order of its own: that the choice has an effect, where both are there. */
Test(gemm, a_context_has_one_library) {
    const shape s = {128, 200, 700};
    void *c[2] = {NULL};
    if (LIBRARIES < 2) cr_skip("built without oneDNN");
    for (library = 0; library < LIBRARIES; ++library) {
        fattn_ctx *const ctx = context(1);
        product p = make(FATTN_F32, &s, false, false, 0, false, false);
        const size_t bytes = (size_t)(s.M * p.g.ldc) * sizeof(float);
        fattni_gemm_cpu(ctx, &p.g);
        c[library] = memcpy(malloc(bytes), p.c, bytes);
        drop(&p);
        fattn_ctx_destroy(ctx);
    }
    cr_assert_neq(memcmp(c[0], c[1], (size_t)(s.M * s.N) * sizeof(float)), 0);
    free(c[0]), free(c[1]);
}

/* How far from the test's frame a signal handler's is, on the test's thread. A library whose stack pointer points into
   memory of its own has the handler's frame written over what lies below. */
static volatile sig_atomic_t signals;
static pthread_t caller_thread;
static uintptr_t caller, farthest;
static void note_frame(int number) {
    (void)number;
    if (!pthread_equal(pthread_self(), caller_thread)) return;
    const uintptr_t frame = (uintptr_t)__builtin_frame_address(0);
    const uintptr_t distance = frame < caller ? caller - frame : frame - caller;
    if (distance > farthest) farthest = distance;
    ++signals;
}

EACH_LIBRARY(signal_handlers_have_the_stack) {
    enum { WANTED = 200, STACK = 1 << 20 };
    struct sigaction before;
    const struct sigaction action = {.sa_handler = note_frame}; /* on the stack of whom it interrupts */
    const struct itimerspec often = {{0, 100000}, {0, 100000}};
    struct sigevent event = {.sigev_notify = SIGEV_SIGNAL, .sigev_signo = SIGALRM};
    timer_t timer;
    sigset_t alarm_alone;
    sigemptyset(&alarm_alone), sigaddset(&alarm_alone, SIGALRM);
    cr_assert_eq(pthread_sigmask(SIG_UNBLOCK, &alarm_alone, NULL), 0); /* a parent may have blocked it */
    signals = 0, farthest = 0, caller = (uintptr_t)__builtin_frame_address(0), caller_thread = pthread_self();
    cr_assert_eq(sigaction(SIGALRM, &action, &before), 0);
    cr_assert_eq(timer_create(CLOCK_MONOTONIC, &event, &timer), 0);
    cr_assert_eq(timer_settime(timer, 0, &often, NULL), 0);
    fattn_ctx *const ctx = context(1);
    const shape s = {128, 96, 512};
    product p = make(FATTN_F32, &s, false, false, 0, false, false);
    while (signals < WANTED) fattni_gemm_cpu(ctx, &p.g);
    cr_assert_eq(timer_delete(timer), 0);
    cr_assert_eq(sigaction(SIGALRM, &before, NULL), 0);
    cr_assert_lt(farthest, STACK, "a handler's frame was %ju bytes away", (uintmax_t)farthest);
    void *const untouched = matrix(FATTN_F32, s.M, p.g.ldc, 3);
    check(&p, untouched);
    free(untouched);
    drop(&p);
    fattn_ctx_destroy(ctx);
}

Test(gemm, long_sums_over_a_small_result_are_split) {
    const fattni_gemm weight = {.dtype = FATTN_F32, .M = 128, .N = 128, .K = 4096};
    const fattni_gemm activation = {.dtype = FATTN_F32, .M = 4096, .N = 128, .K = 4096};
    cr_assert_eq(fattni_gemm_workspace(&weight), 8 * 128 * 128 * sizeof(float));
    cr_assert_eq(fattni_gemm_workspace(&activation), 0);
}
