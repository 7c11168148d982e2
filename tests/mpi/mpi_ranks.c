/* Communicators over MPI. mpirun -n SIZE mpi_ranks WHAT: collectives, failures, arguments, absent (one rank does not
   join), killed (one rank dies), bytes N (a ring of messages of N bytes). Exit status 0: all is as expected on all
   ranks. */
#include "comm_checks.h"

#include <mpi.h>

#include <fattn/mpi.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int rank, size, wrong;

static void complain(const char *what, fattn_status s, const char *error) {
    fprintf(stderr, "rank %d of %d: %s: %s: %s\n", rank, size, what, fattn_status_name(s), error);
    wrong = 1;
}

static rank_call run(fattn_status (*function)(rank_call *), MPI_Comm comm, double time_limit, void *arg) {
    const fattn_ctx_options one_thread = {.struct_size = sizeof one_thread, .cpu_threads = 1};
    const fattn_comm_options o = {.struct_size = sizeof o, .time_limit = time_limit};
    rank_call c = {.arg = arg};
    c.status = fattn_ctx_create(&one_thread, &c.ctx);
    if (!c.status) c.status = fattn_comm_mpi(c.ctx, comm, &o, &c.comm);
    c.rank = fattn_comm_rank(c.comm), c.size = fattn_comm_size(c.comm);
    if (!c.status) c.status = function(&c);
    snprintf(c.error, sizeof c.error, "%s", fattn_ctx_error(c.ctx));
    free_rank_tensors(&c);
    fattn_comm_destroy(c.comm);
    if (c.comm && fattn_ctx_mem(c.ctx).live > 0) complain("memory has not been freed", c.status, c.error);
    if (c.comm) fattn_ctx_destroy(c.ctx); /* else MPI may still use memory of it */
    MPI_Barrier(MPI_COMM_WORLD);
    return c;
}

static void expect(const char *name, fattn_status (*function)(rank_call *)) {
    const rank_call c = run(function, MPI_COMM_WORLD, 60, NULL);
    if (c.status) complain(name, c.status, c.error);
}

static void collectives(void) {
#define X(name) expect(#name, check_##name);
    COMM_CHECKS(X)
#undef X
    for (int n = 0; n < 300; ++n) expect("many communicators", check_agreement);
}

/* own: of the rank at fault. text has its number. */
static void expect_failure(const char *name, fattn_status (*function)(rank_call *), comm_fault fault, double time_limit,
                           fattn_status own, const char *text) {
    char want[100];
    const char *const number = strchr(text, '#');
    snprintf(want, sizeof want, "%.*s%d%s", (int)(number - text), text, fault.rank, number + 1);
    const rank_call c = run(function, MPI_COMM_WORLD, time_limit, &fault);
    const bool at_fault = rank == fault.rank;
    if (c.status != (at_fault ? own : FATTN_E_COMM)) complain(name, c.status, c.error);
    if (!at_fault && !strstr(c.error, want)) complain(want, c.status, c.error);
    expect("after a failure", check_ring);
}

static void failures(void) {
    static const int64_t lengths[] = {32, 50000}; /* short ones are sent at once, long ones wait for the receiver */
    for (int i = 0; i < 2; ++i)
        for (int at_fault = 0; at_fault < size; at_fault += size - 1) {
            const comm_fault f = {.rank = at_fault, .sleeps = 2, .n = lengths[i]};
            expect_failure("shape", fails_by_shape, f, 60, FATTN_E_COMM, "rank #");
            expect_failure("argument", fails_by_argument, f, 60, FATTN_E_SHAPE, "rank #: x: is not row-major");
            expect_failure("leaves", fails_by_leaving, f, 60, FATTN_OK, "rank # has left");
            expect_failure("aborts", fails_by_aborting, f, 60, FATTN_E_COMM, "rank #: the file is missing");
            expect_failure("agreement", fails_to_agree, f, 60, FATTN_E_COMM, "on rank #");
            expect_failure("sleeps", fails_to_answer, f, 1, FATTN_E_COMM, "rank # does not answer within 1 s");
            if (i == 0)
                expect_failure("chain", fails_in_a_chain, f, 1, FATTN_E_COMM, "rank # does not answer within 1 s");
        }
}

/* Two communicators at once, whose calls interleave. */
static fattn_status two_at_once(rank_call *c) {
    fattn_comm *const first = c->comm, *second;
    fattn_status s = fattn_comm_mpi(c->ctx, MPI_COMM_WORLD, NULL, &second);
    for (int n = 0; n < 6 && !s; ++n) {
        c->comm = n % 2 ? first : second;
        s = check_ring(c);
    }
    fattn_comm_destroy(second);
    c->comm = first;
    return s;
}

static void arguments(void) {
    const fattn_comm_options bad = {.struct_size = sizeof bad, .time_limit = -1};
    const fattn_ctx_options plan = {
        .struct_size = sizeof plan, .flags = FATTN_CTX_PLAN_ONLY, .device = FATTN_CUDA, .arch_cap = 90};
    fattn_ctx *ctx;
    fattn_comm *c;
    if (fattn_ctx_create(NULL, &ctx)) abort();
#define EXPECT(call, status, text)                                                                                     \
    do {                                                                                                               \
        const fattn_status s = (call);                                                                                 \
        if (s != (status) || !strstr(fattn_ctx_error(ctx), text)) complain(#call, s, fattn_ctx_error(ctx));            \
    } while (0)
    EXPECT(fattn_comm_mpi(ctx, MPI_COMM_NULL, NULL, &c), FATTN_E_ARG, "comm: MPI_COMM_NULL");
    EXPECT(fattn_comm_mpi(ctx, MPI_COMM_WORLD, &bad, &c), FATTN_E_ARG, "time_limit -1");
    EXPECT(fattn_comm_mpi(ctx, MPI_COMM_WORLD, NULL, NULL), FATTN_E_ARG, "");
    EXPECT(fattn_comm_mpi(NULL, MPI_COMM_WORLD, NULL, &c), FATTN_E_ARG, "");
    EXPECT(fattn_comm_mpi_nccl(ctx, MPI_COMM_WORLD, NULL, &c), FATTN_E_UNSUPPORTED,
           "NCCL does not move memory of the CPU");
    EXPECT(fattn_comm_mpi_nccl(ctx, MPI_COMM_NULL, NULL, &c), FATTN_E_ARG, "comm: MPI_COMM_NULL");
    if (size > 1) { /* one process, and the others */
        MPI_Comm half, both;
        MPI_Comm_split(MPI_COMM_WORLD, rank > 0, rank, &half);
        MPI_Intercomm_create(half, 0, MPI_COMM_WORLD, rank > 0 ? 0 : 1, 7, &both);
        EXPECT(fattn_comm_mpi(ctx, both, NULL, &c), FATTN_E_ARG, "comm: is an inter-communicator");
        MPI_Comm_free(&both);
        const rank_call parts = run(check_sums, half, 60, NULL);
        if (parts.status) complain("parts of the processes", parts.status, parts.error);
        MPI_Comm_free(&half);
    }
    EXPECT(fattn_comm_mpi(ctx, MPI_COMM_SELF, NULL, &c), FATTN_OK, "");
    if (strcmp(fattn_comm_name(c), "MPI") != 0 || fattn_comm_rank(c) != 0 || fattn_comm_size(c) != 1)
        complain("name, rank, size", FATTN_OK, fattn_comm_name(c));
    fattn_comm_destroy(c);
    fattn_ctx_destroy(ctx);
    if (fattn_ctx_create(&plan, &ctx) == FATTN_OK) { /* a library with CUDA */
        EXPECT(fattn_comm_mpi(ctx, MPI_COMM_WORLD, NULL, &c), FATTN_E_UNSUPPORTED,
               "MPI does not move memory of the GPU");
        fattn_ctx_destroy(ctx);
    }
    expect("two at once", two_at_once);
    comm_fault alone = {.n = 50000};
    const rank_call many = run(fails_by_many_open, MPI_COMM_SELF, 60, &alone);
    if (many.status != FATTN_E_STATE || !strstr(many.error, "8 exchanges are open"))
        complain("many open", many.status, many.error);
}

static void absent(void) {
    if (rank == size - 1) {
        MPI_Barrier(MPI_COMM_WORLD);
        return;
    }
    const rank_call c = run(check_ring, MPI_COMM_WORLD, 0.3, NULL);
    if (c.status != FATTN_E_COMM || !strstr(c.error, "a rank has not joined within 0.3 s"))
        complain("absent", c.status, c.error);
}

static fattn_status dies(rank_call *c) {
    const fattn_status s = fattn_comm_barrier(c->comm);
    if (c->rank == c->size - 1) raise(SIGKILL);
    return s ? s : fattn_comm_barrier(c->comm);
}

static fattn_status move_bytes(rank_call *c) {
    const int64_t n = *(const int64_t *)c->arg;
    fattn_tensor *const t = c->tensors;
    for (; c->n_tensors < 2; ++c->n_tensors) {
        const fattn_status s = fattn_tensor_alloc(c->ctx, FATTN_U8, 1, &n, &t[c->n_tensors]);
        if (s) return s;
    }
    unsigned char *const in = t[0].data, *const out = t[1].data;
    memset(in, c->rank, (size_t)n);
    in[n - 1] = 99;
    const int last = (c->rank + c->size - 1) % c->size;
    const fattn_status s = fattn_comm_send_receive(c->comm, &t[0], (c->rank + 1) % c->size, &t[1], last);
    for (int64_t i = 0; i < n && !s; ++i)
        if (out[i] != (i < n - 1 ? last : 99))
            return fattn_ctx_fail(c->ctx, FATTN_E_MISMATCH, "byte %lld is %d", (long long)i, out[i]);
    return s;
}

static void expect_state(const char *text) {
    fattn_ctx *ctx;
    fattn_comm *c;
    if (fattn_ctx_create(NULL, &ctx)) abort();
    const fattn_status s = fattn_comm_mpi(ctx, MPI_COMM_WORLD, NULL, &c);
    if (s != FATTN_E_STATE || !strstr(fattn_ctx_error(ctx), text)) complain(text, s, fattn_ctx_error(ctx));
    fattn_ctx_destroy(ctx);
}

int main(int argc, char **argv) {
    const char *const what = argc > 1 ? argv[1] : "";
    int64_t bytes = argc > 2 ? strtoll(argv[2], NULL, 10) : 0;
    expect_state("MPI is not initialised");
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &size);
    if (strcmp(what, "collectives") == 0)
        collectives();
    else if (strcmp(what, "failures") == 0 && size > 1)
        failures();
    else if (strcmp(what, "arguments") == 0)
        arguments();
    else if (strcmp(what, "absent") == 0)
        absent();
    else if (strcmp(what, "killed") == 0)
        run(dies, MPI_COMM_WORLD, 60, NULL);
    else if (strcmp(what, "bytes") == 0 && bytes > 0) {
        const rank_call c = run(move_bytes, MPI_COMM_WORLD, 60, &bytes);
        if (c.status) complain("bytes", c.status, c.error);
    } else
        complain("no such test", FATTN_E_ARG, what);
    MPI_Finalize();
    expect_state("MPI has been finalised");
    return wrong;
}
