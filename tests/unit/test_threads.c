/* The rules of fattn/context.h for threads and fork: a context, its tape and its optimizer are used by several
   threads one after the other; contexts compute concurrently; a child computes under the documented conditions. */
#define _DEFAULT_SOURCE /* fork, alarm */
#include <criterion/criterion.h>
#include <fattn/fattn.h>

#include <omp.h>
#include <pthread.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

enum { S = 96, H = 2, D = 16, C = H * D, PARAMS = 3, THREADS = 3, STEPS = 4 };

typedef struct model {
    int threads;
    fattn_ctx *ctx;
    fattn_tape *tape;
    fattn_adamw *opt;
    fattn_param params[PARAMS]; /* table [S,C], qkv [3C,C], out [C,C] */
    int32_t ids[S];
    double loss;
    fattn_status status;
} model;

static void *create(void *arg) {
    model *const m = arg;
    const fattn_ctx_options o = {.struct_size = sizeof o, .cpu_threads = m->threads};
    const int64_t rows[PARAMS] = {S, 3 * C, C};
    fattn_param *list[PARAMS];
    fattn_status s = fattn_ctx_create(&o, &m->ctx);
    for (int n = 0; n < PARAMS; ++n) {
        fattn_param *const p = list[n] = &m->params[n];
        const int64_t shape[2] = {rows[n], C};
        const fattn_rng rng = {.seed = 3, .stream = (uint32_t)n};
        *p = (fattn_param){.name = "p"};
        if (!s) s = fattn_tensor_alloc(m->ctx, FATTN_F32, 2, shape, &p->value);
        if (!s) s = fattn_tensor_alloc(m->ctx, FATTN_F32, 2, shape, &p->grad);
        if (!s) s = fattn_tensor_normal(m->ctx, &p->value, 0, 0.1, rng);
        if (!s) s = fattn_tensor_normal(m->ctx, &p->grad, 0, 0, rng);
    }
    if (!s) s = fattn_tape_create(m->ctx, &m->tape);
    if (!s) s = fattn_adamw_create(m->ctx, NULL, list, PARAMS, &m->opt);
    for (int n = 0; n < S; ++n) m->ids[n] = n * 7 % S;
    m->status = s;
    return NULL;
}

static void *step(void *arg) {
    model *const m = arg;
    fattn_tape *const t = m->tape;
    const fattn_attention_params ap = {.struct_size = sizeof ap, .flags = FATTN_CAUSAL};
    const fattn_tensor ids = fattn_tensor_view(m->ids, FATTN_I32, FATTN_CPU, 0, 2, (int64_t[]){1, S});
    const fattn_var none = {0};
    fattn_tape_reset(t);
    const fattn_var table = fattn_use(t, &m->params[0]), x = fattn_input(t, &ids);
    fattn_var h = fattn_op_embedding(t, table, x);
    h = fattn_op_linear(t, h, fattn_use(t, &m->params[1]), none);
    h = fattn_op_attention(t, fattn_op_heads(t, h, 0, H, D), fattn_op_heads(t, h, H, H, D),
                           fattn_op_heads(t, h, 2 * H, H, D), &ap);
    h = fattn_op_linear(t, fattn_op_merge(t, h), fattn_use(t, &m->params[2]), none);
    h = fattn_op_linear_cross_entropy(t, h, table, x, -1);
    m->status = fattn_tape_backward(t, h);
    if (!m->status) m->status = fattn_adamw_step(m->opt);
    if (!m->status) m->status = fattn_tape_item(t, h, &m->loss);
    return NULL;
}

static void *fail(void *arg) {
    model *const m = arg;
    m->status = fattn_ctx_set_stream(m->ctx, (fattn_stream)(void *)m);
    return NULL;
}

static void *destroy(void *arg) {
    model *const m = arg;
    fattn_adamw_destroy(m->opt);
    fattn_tape_destroy(m->tape);
    for (int n = 0; n < PARAMS; ++n) {
        fattn_tensor_free(m->ctx, &m->params[n].value);
        fattn_tensor_free(m->ctx, &m->params[n].grad);
    }
    fattn_ctx_destroy(m->ctx);
    return NULL;
}

/* Creates, trains and destroys a model. */
static void *whole_run(void *arg) {
    model *const m = arg;
    create(m);
    for (int n = 0; n < STEPS && !m->status; ++n) step(m);
    destroy(m);
    return NULL;
}

/* The loss after STEPS; its bits do not depend on the number of threads. */
static double wanted(void) {
    model m = {.threads = 2};
    whole_run(&m);
    cr_assert_eq(m.status, FATTN_OK);
    return m.loss;
}

static void on_a_thread_of_its_own(void *(*what)(void *), model *m, fattn_status status) {
    pthread_t thread;
    cr_assert_eq(pthread_create(&thread, NULL, what, m), 0);
    cr_assert_eq(pthread_join(thread, NULL), 0);
    cr_assert_eq(m->status, status, "%s", m->ctx ? fattn_ctx_error(m->ctx) : "");
}

Test(threads, one_context_on_many) {
    const double loss = wanted();
    model m = {.threads = 2};
    on_a_thread_of_its_own(create, &m, FATTN_OK);
    for (int n = 0; n < STEPS; ++n)
        if (n % 2)
            on_a_thread_of_its_own(step, &m, FATTN_OK);
        else
            step(&m);
    cr_assert_eq(m.loss, loss);
    on_a_thread_of_its_own(fail, &m, FATTN_E_ARG);
    cr_assert(strstr(fattn_ctx_error(m.ctx), "stream"), "a message belongs to the context");
    m.status = FATTN_OK;
    pthread_t thread; /* not by the helper function, which reads the error message after destruction */
    cr_assert_eq(pthread_create(&thread, NULL, destroy, &m), 0);
    cr_assert_eq(pthread_join(thread, NULL), 0);
}

Test(threads, contexts_at_the_same_time) {
    const double loss = wanted();
    for (int round = 0; round < 5; ++round) {
        model m[THREADS] = {{.threads = 1}, {.threads = 2}, {.threads = 3}};
        pthread_t threads[THREADS];
        for (int n = 0; n < THREADS; ++n) cr_assert_eq(pthread_create(&threads[n], NULL, whole_run, &m[n]), 0);
        for (int n = 0; n < THREADS; ++n) cr_assert_eq(pthread_join(threads[n], NULL), 0);
        for (int n = 0; n < THREADS; ++n) {
            cr_assert_eq(m[n].status, FATTN_OK);
            cr_assert_eq(m[n].loss, loss, "context %d", n);
        }
    }
}

/* ---- fork ---- */

#if defined(__has_feature)
#if __has_feature(thread_sanitizer)
#define UNDER_TSAN 1 /* TSan does not support a child that starts threads */
#endif
#endif
#ifndef UNDER_TSAN
/* Whether a child computes the same loss, with its own context and `threads` threads, and with `inherited` if that
   is given; fails after 20 seconds. */
static bool child_computes(int threads, model *inherited, double loss) {
    const pid_t child = fork();
    if (child == 0) {
        alarm(20);
        model own = {.threads = threads};
        whole_run(&own);
        bool good = !own.status && own.loss == loss;
        for (int n = 0; inherited && good && n < STEPS; ++n) {
            step(inherited);
            good = !inherited->status && (n + 1 < STEPS || inherited->loss == loss);
        }
        if (inherited && good) destroy(inherited);
        _exit(good ? 0 : 1);
    }
    int status = -1;
    return child > 0 && waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

static void *keep_wanted(void *to) {
    *(double *)to = wanted();
    return NULL;
}

Test(threads, fork_before_anything_was_computed_on_this_thread) {
    double loss = 0;
    pthread_t thread;
    cr_assert_eq(pthread_create(&thread, NULL, keep_wanted, &loss), 0);
    cr_assert_eq(pthread_join(thread, NULL), 0);
    model m = {.threads = 1}; /* one thread: no parallel region */
    create(&m);
    cr_assert(child_computes(2, &m, loss));
    destroy(&m);
}

__attribute__((weak)) int kmp_get_blocktime(void); /* LLVM's OpenMP, which must not be paused: context.h */

Test(threads, fork_after_the_team_was_released) {
    const double loss = wanted();
    model m = {.threads = 2};
    create(&m);
    if (!kmp_get_blocktime) cr_assert_eq(omp_pause_resource_all(omp_pause_hard), 0);
    cr_assert(child_computes(2, &m, loss));
    for (int n = 0; n < STEPS; ++n) step(&m); /* the parent continues, too */
    cr_assert_eq(m.loss, loss);
    destroy(&m);
}

Test(threads, fork_after_a_team_with_one_thread_in_the_child) {
    const double loss = wanted();
    model m = {.threads = 1};
    create(&m);
    cr_assert(child_computes(1, &m, loss));
    destroy(&m);
}
#endif
