/* Times fattn_op_linear on BF16 tensors of a CPU, and both products of its backward, with products of BF16 numbers and
   with FATTN_CTX_F32_PRODUCTS, alternately; medians, and the quartiles' distance from them in percent. One thread is
   timed by its processor time, which other programs on the machine change little; more by the clock.

     gcc -O2 -Iinclude bench/linear_bf16.c -o linear_bf16 -L<build>/lib -Wl,-rpath,<build>/lib -lfattn -lm
     OMP_WAIT_POLICY=passive ./linear_bf16 THREADS [REPEATS] */
#include <fattn/fattn.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define MUST(call)                                                                                                     \
    do {                                                                                                               \
        if ((call) != FATTN_OK) {                                                                                      \
            fprintf(stderr, "%s: %s\n", #call, fattn_ctx_error(m->ctx));                                               \
            exit(1);                                                                                                   \
        }                                                                                                              \
    } while (0)

enum { MOST_REPEATS = 101, PRODUCTS = 3 };

typedef struct mode {
    fattn_ctx *ctx;
    fattn_tape *tape;
    fattn_tensor x, w, dx, dw, dy;
    double seconds[PRODUCTS][MOST_REPEATS];
} mode;

static clockid_t timer = CLOCK_MONOTONIC;

static double now(void) {
    struct timespec t;
    clock_gettime(timer, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* A loss whose gradient is dy; notes when it has written that. */
typedef struct given {
    const fattn_tensor *dy;
    double *written;
} given;

static fattn_status given_infer(fattn_op_call *c) {
    c->out[0].dtype = FATTN_F32;
    return FATTN_OK;
}
static fattn_status given_forward(fattn_op_call *c) {
    *(float *)c->out[0].data = 0;
    return FATTN_OK;
}
static fattn_status given_backward(fattn_op_call *c) {
    const given *const g = c->attr;
    const fattn_status s = fattn_tensor_copy(c->ctx, &c->d_in[0], g->dy);
    *g->written = now();
    return s;
}
static const fattn_op_def given_loss = {.struct_size = sizeof given_loss,
                                        .attr_size = sizeof(given),
                                        .n_out = 1,
                                        .name = "given",
                                        .infer = given_infer,
                                        .forward = given_forward,
                                        .backward = given_backward};

/* Forward, and the gradient of x or of w. */
static void step(mode *m, int which, double *forward, double *backward) {
    fattn_param x = {.value = m->x, .grad = m->dx, .flags = which == 1 ? 0 : FATTN_PARAM_FROZEN};
    fattn_param w = {.value = m->w, .grad = m->dw, .flags = which == 2 ? 0 : FATTN_PARAM_FROZEN};
    double written = 0;
    fattn_tape_reset(m->tape);
    const fattn_var vx = fattn_use(m->tape, &x), vw = fattn_use(m->tape, &w), none = {0};
    const double begin = now();
    fattn_var y = fattn_op_linear(m->tape, vx, vw, none);
    *forward = now() - begin;
    y = fattn_op_custom(m->tape, &given_loss, &y, 1, &(given){&m->dy, &written});
    MUST(fattn_tape_backward(m->tape, y));
    *backward = now() - written;
}

static void open_mode(mode *m, int threads, uint32_t flags, int64_t T, int64_t N, int64_t K) {
    const fattn_ctx_options o = {.struct_size = sizeof o, .cpu_threads = threads, .flags = flags};
    *m = (mode){.ctx = NULL};
    MUST(fattn_ctx_create(&o, &m->ctx));
    MUST(fattn_tape_create(m->ctx, &m->tape));
    MUST(fattn_tensor_alloc(m->ctx, FATTN_BF16, 2, (const int64_t[]){T, K}, &m->x));
    MUST(fattn_tensor_alloc(m->ctx, FATTN_BF16, 2, (const int64_t[]){N, K}, &m->w));
    MUST(fattn_tensor_alloc(m->ctx, FATTN_BF16, 2, (const int64_t[]){T, K}, &m->dx));
    MUST(fattn_tensor_alloc(m->ctx, FATTN_F32, 2, (const int64_t[]){N, K}, &m->dw));
    MUST(fattn_tensor_alloc(m->ctx, FATTN_BF16, 2, (const int64_t[]){T, N}, &m->dy));
    fattn_tensor *const t[] = {&m->x, &m->w, &m->dx, &m->dw, &m->dy};
    for (uint32_t i = 0; i < 5; ++i)
        MUST(fattn_tensor_normal(m->ctx, t[i], 0, i == 1 ? 0.02 : 1, (fattn_rng){.stream = i}));
}

static void close_mode(mode *m) {
    fattn_tensor *const t[] = {&m->x, &m->w, &m->dx, &m->dw, &m->dy};
    for (int i = 0; i < 5; ++i) fattn_tensor_free(m->ctx, t[i]);
    fattn_tape_destroy(m->tape);
    fattn_ctx_destroy(m->ctx);
}

static int ascending(const void *a, const void *b) {
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static void measure(int threads, int repeats, int64_t T, int64_t N, int64_t K) {
    static const char *const names[PRODUCTS] = {"y = x w^T", "dx = dy w", "dw += dy^T x"};
    static mode modes[2];
    open_mode(&modes[0], threads, FATTN_CTX_F32_PRODUCTS, T, N, K);
    open_mode(&modes[1], threads, 0, T, N, K);
    for (int r = -1; r < repeats; ++r) /* the first round warms up */
        for (int i = 0; i < 2; ++i) {
            double unused, *const to = r < 0 ? &unused : NULL;
            step(&modes[i], 1, to ? to : &modes[i].seconds[0][r], to ? to : &modes[i].seconds[1][r]);
            step(&modes[i], 2, &unused, to ? to : &modes[i].seconds[2][r]);
        }
    const double gflop = 2e-9 * (double)T * (double)N * (double)K;
    for (int p = 0; p < PRODUCTS; ++p) {
        double median[2], spread[2];
        for (int i = 0; i < 2; ++i) {
            double *const s = modes[i].seconds[p];
            qsort(s, (size_t)repeats, sizeof *s, ascending);
            median[i] = s[repeats / 2];
            spread[i] = 50 * (s[3 * repeats / 4] - s[repeats / 4]) / median[i];
        }
        printf("%-12s %6ld x %4ld -> %5ld  %8.2f ms %3.0f %% %5.0f  %8.2f ms %3.0f %% %5.0f  %5.2f\n", names[p],
               (long)T, (long)K, (long)N, 1e3 * median[0], spread[0], gflop / median[0], 1e3 * median[1], spread[1],
               gflop / median[1], median[0] / median[1]);
        fflush(stdout);
    }
    close_mode(&modes[0]);
    close_mode(&modes[1]);
}

int main(int argc, char **argv) {
    static const int64_t tokens[] = {1024, 4096, 8192};
    static const int64_t layers[][2] = {{768, 768}, {2304, 768}, {3072, 768}, {768, 3072}}; /* N, K */
    const int threads = argc > 1 ? atoi(argv[1]) : 1, repeats = argc > 2 ? atoi(argv[2]) : 11;
    if (threads < 1 || repeats < 1 || repeats > MOST_REPEATS) return 2;
    if (threads == 1) timer = CLOCK_PROCESS_CPUTIME_ID;
    printf("threads %d, %d rounds; F32 products: ms, spread, GFLOP/s; BF16 products: the same; their ratio\n", threads,
           repeats);
    for (int t = 0; t < 3; ++t)
        for (int l = 0; l < 4; ++l) measure(threads, repeats, tokens[t], layers[l][0], layers[l][1]);
    measure(threads, repeats < 3 ? repeats : 3, 1024, 50304, 768);
    static const int64_t small[][3] = {{32, 32, 32},  {64, 64, 64},   {128, 128, 128},
                                       {1, 768, 768}, {16, 768, 768}, {1024, 128, 128}};
    for (int s = 0; s < 6; ++s) measure(threads, MOST_REPEATS, small[s][0], small[s][1], small[s][2]);
    return 0;
}
