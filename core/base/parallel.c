/* Numbered tasks on threads. OpenMP is used in this file only. */
#include "core/base/internal.h"

#include <omp.h>
#include <sched.h>
#include <stdatomic.h>

/* libomp is not instrumented for the thread sanitizer, and its tool for that (Archer) misses
   synchronisations on a busy machine. These annotations state the only ones: a parallel region starts
   after the code before it and ends before the code after it. */
#if defined(__has_feature)
#if __has_feature(thread_sanitizer)
#include <sanitizer/tsan_interface.h>
#define RELEASE(where) __tsan_release(where)
#define ACQUIRE(where) __tsan_acquire(where)
#endif
#endif
#ifndef RELEASE
#define RELEASE(where) ((void)(where))
#define ACQUIRE(where) ((void)(where))
#endif

void fattni_pause(int n) {
    if (n % 64 == 63) sched_yield(); /* there may be fewer cores than threads */
}

int fattni_default_threads(void) { return (int)fattni_min(omp_get_max_threads(), FATTNI_MOST_THREADS); }

void fattni_parallel(const fattn_ctx *ctx, int64_t count, fattni_task run, void *arg) {
    fattni_parallel_on(ctx, ctx->cpu_threads, count, run, arg);
}

/* A team has one size, whatever the number of tasks: libgomp ends the threads that a smaller team has no use for, and
   starts them again for the next larger one. Only as many threads as tasks are started beyond the processors. */
void fattni_parallel_on(const fattn_ctx *ctx, int64_t most, int64_t count, fattni_task run, void *arg) {
    const int64_t threads = fattni_min(most, count);
    if (count <= 0) return;
    const int64_t kept = fattni_min(ctx->cpu_threads, omp_get_num_procs());
    const int team = threads > 1 ? (int)fattni_max(threads, kept) : 1;
    atomic_llong next = 0;
    char fork, join;
    RELEASE(&fork);
#pragma omp parallel num_threads(team)
    {
        ACQUIRE(&fork);
        /* Sets the default of this thread only: a BLAS called from a task stays on one thread even
           when the team is a single thread, which OpenMP does not count as parallel. */
        omp_set_num_threads(1);
        const int thread = omp_get_thread_num();
        for (int64_t task; thread < threads && (task = atomic_fetch_add(&next, 1)) < count;) run(arg, task, thread);
        RELEASE(&join);
    }
    ACQUIRE(&join);
}
