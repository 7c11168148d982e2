/* Numbered tasks: each runs once, on a valid thread number, also in nested calls. */
#include "core/base/internal.h"

#include <criterion/criterion.h>
#include <omp.h>
#include <stdatomic.h>
#include <stdlib.h>

static fattn_ctx *context(int threads) {
    const fattn_ctx_options o = {.struct_size = sizeof o, .cpu_threads = threads};
    fattn_ctx *ctx;
    cr_assert_eq(fattn_ctx_create(&o, &ctx), FATTN_OK);
    return ctx;
}

enum { MOST = 1000 };
typedef struct record {
    atomic_int runs[MOST];
    int threads;
    atomic_int bad_thread, bad_team;
    const fattn_ctx *ctx;
    struct record *inner; /* each task then runs these, nested */
} record;

static void note(void *arg, int64_t task, int thread) {
    record *r = arg;
    atomic_fetch_add(&r->runs[task], 1);
    if (thread < 0 || thread >= r->threads) atomic_fetch_add(&r->bad_thread, 1);
    if (omp_get_max_threads() != 1) atomic_fetch_add(&r->bad_team, 1);
    if (r->inner) fattni_parallel(r->ctx, 7, note, r->inner);
}

static record *new_record(const fattn_ctx *ctx) {
    record *r = calloc(1, sizeof *r);
    r->threads = ctx->cpu_threads;
    r->ctx = ctx;
    return r;
}

static void expect_runs(const record *r, int64_t count, int times) {
    for (int64_t task = 0; task < MOST; ++task)
        cr_assert_eq(r->runs[task], task < count ? times : 0, "task %lld", (long long)task);
    cr_assert_eq(r->bad_thread, 0);
    cr_assert_eq(r->bad_team, 0, "a BLAS inside a task would start its own threads");
}

Test(parallel, every_task_runs_once) {
    for (int threads = 1; threads <= 16; threads += threads < 3 ? 1 : 5) {
        fattn_ctx *ctx = context(threads);
        static const int64_t counts[] = {-1, 0, 1, 2, 3, 15, 16, 17, MOST};
        for (size_t i = 0; i < sizeof counts / sizeof *counts; ++i) {
            record *r = new_record(ctx);
            fattni_parallel(ctx, counts[i], note, r);
            expect_runs(r, counts[i], 1);
            free(r);
        }
        fattn_ctx_destroy(ctx);
    }
}

Test(parallel, tasks_may_ask_for_tasks) {
    fattn_ctx *ctx = context(3);
    record *outer = new_record(ctx), *inner = new_record(ctx);
    outer->inner = inner;
    fattni_parallel(ctx, 40, note, outer);
    expect_runs(outer, 40, 1);
    expect_runs(inner, 7, 40);
    free(outer);
    free(inner);
    fattn_ctx_destroy(ctx);
}

Test(parallel, a_caller_inside_its_own_team_is_fine) {
    fattn_ctx *const a = context(2), *const b = context(2);
    record *const of_a = new_record(a), *const of_b = new_record(b);
#pragma omp parallel num_threads(2)
    {
        if (omp_get_thread_num() == 0) fattni_parallel(a, 100, note, of_a);
        if (omp_get_thread_num() == omp_get_num_threads() - 1) fattni_parallel(b, 100, note, of_b);
    }
    expect_runs(of_a, 100, 1);
    expect_runs(of_b, 100, 1);
    free(of_a);
    free(of_b);
    fattn_ctx_destroy(a);
    fattn_ctx_destroy(b);
}

Test(parallel, openmp_s_choice_is_bounded_as_a_caller_s) {
    omp_set_num_threads(1000000);
    fattn_ctx *ctx = context(0);
    cr_assert_eq(ctx->cpu_threads, FATTNI_MOST_THREADS, "%d", ctx->cpu_threads);
    fattn_ctx_destroy(ctx);
}

Test(parallel, the_program_s_openmp_settings_stay) {
    omp_set_num_threads(5);
    fattn_ctx *ctx = context(0);
    cr_assert_eq(ctx->cpu_threads, 5, "0 means OpenMP's choice at creation");
    record *r = new_record(ctx);
    fattni_parallel(ctx, 64, note, r);
    expect_runs(r, 64, 1);
    cr_assert_eq(omp_get_max_threads(), 5);
    free(r);
    fattn_ctx_destroy(ctx);
}
