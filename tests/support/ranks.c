#include "comm_checks.h"

#include <criterion/criterion.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>

int ranks_gpus = 1;

typedef struct job {
    rank_call call;
    fattn_world *world;
    const ranks_options *options;
    fattn_status (*function)(rank_call *);
    size_t leaked;
} job;

static void *work(void *arg) {
    job *const j = arg;
    const ranks_options *const o = j->options;
    const fattn_ctx_options ctx = {.struct_size = sizeof ctx,
                                   .flags = o->ctx_flags,
                                   .device = o->device ? o->device : FATTN_CPU,
                                   .device_id = o->device == FATTN_CUDA ? j->call.rank % ranks_gpus : 0,
                                   .stream = o->streams ? o->streams[j->call.rank] : NULL,
                                   .cpu_threads = 1};
    const fattn_comm_options comm = {
        .struct_size = sizeof comm, .flags = o->comm_flags, .time_limit = o->time_limit > 0 ? o->time_limit : 30};
    rank_call *const c = &j->call;
    c->status = fattn_ctx_create(&ctx, &c->ctx);
    if (!c->status)
        c->status = o->nccl_id ? fattn_comm_nccl(c->ctx, o->nccl_id, c->rank, c->size, &comm, &c->comm)
                               : fattn_comm_join(c->ctx, j->world, c->rank, &comm, &c->comm);
    if (!c->status) c->status = j->function(c);
    snprintf(c->error, sizeof c->error, "%s", fattn_ctx_error(c->ctx));
    const fattn_status synced = c->ctx ? fattn_ctx_sync(c->ctx) : FATTN_OK;
    if (!c->status) c->status = synced;
    free_rank_tensors(c);
    fattn_comm_destroy(c->comm);
    j->leaked = fattn_ctx_mem(c->ctx).live;
    fattn_ctx_destroy(c->ctx);
    return NULL;
}

void run_ranks(int size, const ranks_options *options, fattn_status (*function)(rank_call *), void *arg,
               rank_call *calls) {
    static const ranks_options none = {0};
    fattn_world *world;
    cr_assert_eq(fattn_world_create(size, &world), FATTN_OK);
    job *const jobs = calloc((size_t)size, sizeof *jobs);
    pthread_t *const threads = calloc((size_t)size, sizeof *threads);
    cr_assert(jobs && threads);
    if (!options) options = &none;
    for (int r = 0; r < size; ++r) {
        jobs[r] = (job){{.rank = r, .size = size, .arg = arg}, world, options, function, 0};
        if (r + 1 != options->absent) cr_assert_eq(pthread_create(&threads[r], NULL, work, &jobs[r]), 0);
    }
    for (int r = 0; r < size; ++r) {
        if (r + 1 != options->absent) pthread_join(threads[r], NULL);
        calls[r] = jobs[r].call;
        cr_assert_eq(jobs[r].leaked, 0, "rank %d leaked %zu bytes", r, jobs[r].leaked);
    }
    free(threads);
    free(jobs);
    fattn_world_destroy(world);
}

void expect_ranks(int size, const ranks_options *options, fattn_status (*function)(rank_call *), void *arg) {
    rank_call *const calls = calloc((size_t)size, sizeof *calls);
    run_ranks(size, options, function, arg, calls);
    for (int r = 0; r < size; ++r)
        cr_assert_eq(calls[r].status, FATTN_OK, "rank %d of %d: %s: %s", r, size, fattn_status_name(calls[r].status),
                     calls[r].error);
    free(calls);
}
