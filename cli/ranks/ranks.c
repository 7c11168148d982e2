#include "cli/ranks/ranks.h"

#include "cli/base/cli.h"
#include "cli/ranks/mpi.h"

#include <omp.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

static bool has_failed(int code) { return code != CLI_OK && code != CLI_INTERRUPTED; }

static fattn_comm_options options_of(const rank_group *g) {
    return (fattn_comm_options){.struct_size = sizeof(fattn_comm_options), .time_limit = g->time_limit};
}

/* ---- who they are ---- */

/* What processes have: a launcher that says one, or nothing, needs no MPI. */
static int find_processes(rank_group *g, int64_t threads, int *first) {
    const launch l = launch_of_process();
    if (!l.launcher || l.processes == 1) return CLI_OK;
    const int code = mpi_begin(&l, first, &g->size);
    if (code) return code;
    g->of_mpi = true;
    g->at[0] = (rank){.number = *first, .size = g->size, .is_process = g->size > 1};
    if (*first > 0) cli_keep_messages(g->at[0].said, sizeof g->at[0].said);
    if (g->size > RANKS_MOST) return cli_fail(CLI_USAGE, "%d processes: at most %d are possible", g->size, RANKS_MOST);
    if (g->size > 1 && threads > 1)
        return cli_fail(CLI_USAGE,
                        "--ranks %lld: %s has started %d processes, each of which is a rank: leave --ranks and --gpus "
                        "out",
                        (long long)threads, l.launcher, g->size);
    return CLI_OK;
}

static fattn_status open_control(rank_group *g, rank *k) {
    const fattn_comm_options o = options_of(g);
    const fattn_ctx_options one_thread = {.struct_size = sizeof one_thread, .cpu_threads = 1};
    const fattn_status s = fattn_ctx_create(&one_thread, &k->host);
    if (s || g->size == 1) return s;
    return k->is_process ? mpi_comm(k->host, &o, &k->control)
                         : fattn_comm_join(k->host, g->control, k->number, &o, &k->control);
}

int ranks_begin(rank_group *g, int64_t threads, double time_limit) {
    int first = 0;
    *g = (rank_group){.here = 1, .size = 1, .time_limit = time_limit, .at = calloc((size_t)threads, sizeof *g->at)};
    if (!g->at) return cli_fail(CLI_FAILURE, "no memory for %lld ranks", (long long)threads);
    const int code = find_processes(g, threads, &first);
    if (code) return code;
    if (g->size == 1) g->here = g->size = (int)threads;
    fattn_status s = g->here > 1 ? fattn_world_create(g->size, &g->control) : FATTN_OK;
    for (int i = 0; i < g->here; ++i) {
        rank *const k = &g->at[i];
        k->number = first + i;
        k->size = g->size;
        if (!s) s = open_control(g, k);
        if (s) return cli_status(k->host, s, "ranks");
    }
    return CLI_OK;
}

/* ---- their devices ---- */

/* Threads of the CPU for each rank. Processes share what the launcher leaves them. */
static int64_t threads_of(const rank_group *g, const ranks_device *d, int on_machine) {
    const int64_t all = d->threads > 0 ? d->threads : omp_get_max_threads();
    int64_t part = all / g->size;
    if (g->size == 1 || d->device != ON_CPU) return d->threads;
    if (g->at[0].is_process) {
        if (d->threads > 0) return d->threads;
        part = sysconf(_SC_NPROCESSORS_ONLN) / on_machine;
        if (part > all) part = all;
    }
    return part > 0 ? part : 1;
}

static int fail_gpu(const rank *k, fattn_status s, int gpu) {
    const char *const why = *k->why ? k->why : fattn_status_text(s);
    if (k->size == 1) return cli_fail(CLI_FAILURE, "context: %s (%s)", why, fattn_status_name(s));
    return cli_fail(CLI_FAILURE, "GPU %d for rank %d of %d: %s (%s)", gpu, k->number, k->size, why,
                    fattn_status_name(s));
}

/* Of the ranks of a process the first one's context logs warnings, which are the same for all. */
static fattn_status open_context(rank *k, const ranks_device *d, int gpu, int64_t threads, bool logs) {
    if (!logs) cli_keep_messages(k->said, sizeof k->said);
    const fattn_status s = device_create_at(d->device, gpu, d->flags, threads, k->why, &k->ctx);
    if (!logs) cli_keep_messages(NULL, 0);
    return s;
}

/* The ranks' contexts. Threads take the GPUs in turn; their number is known when one is missing. */
static int open_contexts(rank_group *g, const ranks_device *d) {
    int on_machine = 1, gpu = 0, gpus = g->here;
    if (g->at[0].is_process) mpi_local(&on_machine, &gpu);
    const int64_t threads = threads_of(g, d, on_machine);
    for (int i = 0; i < g->here; ++i) {
        rank *const k = &g->at[i];
        const int number = k->is_process ? gpu : i % gpus;
        fattn_status s = open_context(k, d, number, threads, i == 0);
        if (s == FATTN_E_UNSUPPORTED && d->device == ON_CUDA && i > 0 && i < gpus && !d->own_gpus) {
            gpus = i;
            s = open_context(k, d, 0, threads, false);
        }
        if (s && d->device == ON_CUDA) return fail_gpu(k, s, number);
        if (s)
            return cli_fail(CLI_FAILURE, "context: %s (%s)", *k->why ? k->why : fattn_status_text(s),
                            fattn_status_name(s));
    }
    if (gpus < g->here) cli_fail(CLI_OK, "%d ranks share %d GPU%s", g->here, gpus, gpus > 1 ? "s" : "");
    return CLI_OK;
}

int ranks_open(rank_group *g, const ranks_device *d) {
    const fattn_comm_options o = options_of(g);
    const int code = open_contexts(g, d);
    if (code || !d->sums) return code;
    fattn_status s = g->at[0].is_process ? FATTN_OK : fattn_world_create(g->size, &g->sums);
    for (int i = 0; i < g->here; ++i) {
        rank *const k = &g->at[i];
        if (!s)
            s = k->is_process ? mpi_comm(k->ctx, &o, &k->comm)
                              : fattn_comm_join(k->ctx, g->sums, k->number, &o, &k->comm);
        if (s) return rank_failed(k, s, "ranks");
    }
    return CLI_OK;
}

/* ---- failures ---- */

int rank_failed(const rank *k, fattn_status s, const char *what) {
    const char *const message = fattn_ctx_error(k->ctx);
    /* It has been stopped, or busy: another process has printed what is told here. */
    if (s == FATTN_E_COMM && k->is_process && rank_leads(k) && mpi_announced(0.1)) return CLI_FAILURE;
    if (s == FATTN_E_COMM && *message) return cli_fail(CLI_FAILURE, "%s", message);
    /* All ranks find the same wrong numbers; and what a rank that does not print has said is told with its number. */
    if (k->size == 1 || s == FATTN_E_MISMATCH || !rank_leads(k)) return cli_status(k->ctx, s, what);
    return cli_fail(CLI_FAILURE, "rank %d: %s: %s (%s)", k->number, what, *message ? message : fattn_status_text(s),
                    fattn_status_name(s));
}

static void tell(rank *k) {
    const char *const text = rank_leads(k) ? "it has ended with an error message" : k->said;
    fattn_comm_abort(k->control, text);
    fattn_comm_abort(k->comm, text);
}

/* Ends all processes. A rank but the first one waits for those before it, which have more to say: rank 0 has the
   message of the one that failed, unless it is gone or busy. */
static _Noreturn void end_processes(rank *k, int code) {
    (void)cli_flush();
    if (rank_leads(k)) {
        mpi_announce();
        (void)mpi_announced(0.1); /* time for what has been printed, and for what has been told */
    } else if (mpi_announced(2 + k->number)) {
        const struct timespec pause = {.tv_sec = 10}; /* for the end that the other one brings */
        nanosleep(&pause, NULL);
    } else {
        mpi_announce();
        cli_keep_messages(NULL, 0);
        cli_fail(code, "rank %d: %s", k->number, k->said);
        (void)mpi_announced(0.1);
    }
    mpi_abort(code);
}

void rank_leaves(rank *k, int code) {
    if (!has_failed(code) || k->size == 1) return;
    tell(k);
    if (k->is_process) end_processes(k, code);
}

/* ---- their work ---- */

typedef struct job {
    rank *rank;
    int (*run)(rank *k, void *arg);
    void *arg;
    int code;
    pthread_t thread;
} job;

static void *work(void *arg) {
    job *const j = arg;
    if (!rank_leads(j->rank)) cli_keep_messages(j->rank->said, sizeof j->rank->said);
    j->code = j->run(j->rank, j->arg);
    rank_leaves(j->rank, j->code);
    return NULL;
}

int ranks_run(rank_group *g, int (*run)(rank *k, void *arg), void *arg) {
    job *const jobs = calloc((size_t)g->here, sizeof *jobs);
    int started = 1, error = 0;
    if (!jobs) return cli_fail(CLI_FAILURE, "no memory for %d ranks", g->here);
    for (int i = 0; i < g->here; ++i) jobs[i] = (job){.rank = &g->at[i], .run = run, .arg = arg};
    while (started < g->here && !error) {
        error = pthread_create(&jobs[started].thread, NULL, work, &jobs[started]);
        if (!error) ++started;
    }
    if (error) {
        jobs[0].code = cli_fail(CLI_FAILURE, "rank %d of %d: no thread: %s", started, g->here, strerror(error));
        tell(&g->at[0]);
    } else
        work(&jobs[0]);
    int code = jobs[0].code;
    for (int i = 1; i < started; ++i) {
        pthread_join(jobs[i].thread, NULL);
        if (!has_failed(code) && has_failed(jobs[i].code))
            code = cli_fail(jobs[i].code, "rank %d: %s", g->at[i].number, g->at[i].said);
    }
    free(jobs);
    return code;
}

int ranks_end(rank_group *g, int code) {
    if (!g->at) return code;
    rank_leaves(&g->at[0], code);
    for (int i = 0; i < g->here; ++i) {
        rank *const k = &g->at[i];
        const fattn_status synced = k->ctx ? fattn_ctx_sync(k->ctx) : FATTN_OK;
        (void)synced; /* a GPU that fails has been reported */
        fattn_comm_destroy(k->comm);
        fattn_comm_destroy(k->control);
        fattn_ctx_destroy(k->ctx);
        fattn_ctx_destroy(k->host);
    }
    fattn_world_destroy(g->sums);
    fattn_world_destroy(g->control);
    (void)cli_flush();
    if (g->of_mpi) mpi_end();
    /* A launcher that sees a failed process ends the others: the first one's code is enough. */
    if (!rank_leads(&g->at[0]) && g->at[0].is_process) code = CLI_OK;
    cli_keep_messages(NULL, 0);
    free(g->at);
    return code;
}

/* ---- exchanges ---- */

/* ctx has the error messages of a rank. */
static fattn_status told(const rank *k, fattn_status s) {
    return s ? fattn_ctx_fail(k->ctx, s, "%s", fattn_ctx_error(k->host)) : s;
}

fattn_status rank_share(const rank *k, double *values, int64_t n) {
    if (!k->control || n == 0) return FATTN_OK;
    const fattn_tensor t = fattn_tensor_view(values, FATTN_F64, FATTN_CPU, 0, 1, &n);
    return told(k, fattn_comm_all_reduce(k->control, &t));
}

fattn_status rank_agree(const rank *k, const char *const *names, const int64_t *values, int n) {
    return k->control ? told(k, fattn_comm_agree(k->control, names, values, n)) : FATTN_OK;
}
