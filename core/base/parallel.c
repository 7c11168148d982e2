/* Numbered tasks on threads. OpenMP is used in this file only. */
#include "core/base/internal.h"

#include <omp.h>
#include <sched.h>

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
    fattni_parallel_on(ctx->cpu_threads, count, run, arg);
}

void fattni_parallel_on(int most, int64_t count, fattni_task run, void *arg) {
    const int threads = (int)fattni_min(most, count);
    if (count <= 0) return;
    char fork, join;
    RELEASE(&fork);
#pragma omp parallel num_threads(threads)
    {
        ACQUIRE(&fork);
        /* Sets the default of this thread only: a BLAS called from a task stays on one thread even
           when the team is a single thread, which OpenMP does not count as parallel. */
        omp_set_num_threads(1);
#pragma omp for schedule(monotonic : dynamic, 1)
        for (int64_t task = 0; task < count; ++task) run(arg, task, omp_get_thread_num());
        RELEASE(&join);
    }
    ACQUIRE(&join);
}
