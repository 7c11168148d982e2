/* Communicators over NCCL, rank r on GPU r: on a machine with one GPU, of one rank. */
#include "comm_checks.h"
#include "contexts.h"

#include <dlfcn.h>
#include <string.h>

enum { MOST_RANKS = 8 };

static uint8_t id[FATTN_NCCL_ID];

/* Without NCCL only the refusal is tested. */
static int gpus_or_skip(void) {
    int count = 0;
    fattn_ctx *const ctx = context_or_skip();
    const fattn_status s = fattn_comm_nccl_id(ctx, id);
    if (s == FATTN_E_UNSUPPORTED) {
        cr_assert_str_eq(fattn_ctx_error(ctx), "NCCL (libnccl.so.2) was not found");
        cr_skip_test("no NCCL");
    }
    cr_assert_eq(s, FATTN_OK, "%s", fattn_ctx_error(ctx));
    fattn_ctx_destroy(ctx);
    must(cudaGetDeviceCount(&count), "cudaGetDeviceCount");
    ranks_gpus = count;
    return count < MOST_RANKS ? count : MOST_RANKS;
}

static void new_id(void) {
    fattn_ctx *const ctx = context(NULL, 0);
    cr_assert_eq(fattn_comm_nccl_id(ctx, id), FATTN_OK, "%s", fattn_ctx_error(ctx));
    fattn_ctx_destroy(ctx);
}

TestSuite(cuda_nccl, .timeout = 280);

static void expect_collectives(uint32_t flags) {
    const int gpus = gpus_or_skip();
    const ranks_options o = {.device = FATTN_CUDA, .nccl_id = id, .comm_flags = flags};
    for (int size = 1; size <= gpus; ++size) {
#define X(name)                                                                                                        \
    new_id();                                                                                                          \
    expect_ranks(size, &o, check_##name, NULL);
        COMM_CHECKS(X)
#undef X
    }
}
Test(cuda_nccl, collectives) { expect_collectives(0); }
Test(cuda_nccl, collectives_that_wait) { expect_collectives(FATTN_COMM_WAIT); }

static void expect_failures(int size, const ranks_options *o, fattn_status (*function)(rank_call *), comm_fault fault,
                            fattn_status own, const char *own_text, const char *text) {
    rank_call calls[MOST_RANKS];
    new_id();
    run_ranks(size, o, function, &fault, calls);
    for (int r = 0; r < size; ++r) {
        if (o->absent == r + 1) continue;
        const bool at_fault = r == fault.rank;
        cr_assert_eq(calls[r].status, at_fault ? own : FATTN_E_COMM, "rank %d: %s: %s", r,
                     fattn_status_name(calls[r].status), calls[r].error);
        cr_assert_not_null(strstr(calls[r].error, at_fault ? own_text : text), "rank %d: %s", r, calls[r].error);
    }
}

/* A failure is told to its own rank; the others meet the time limit. */
Test(cuda_nccl, failures) {
    const int gpus = gpus_or_skip();
    const ranks_options o = {.device = FATTN_CUDA, .nccl_id = id, .comm_flags = FATTN_COMM_WAIT, .time_limit = 3};
    const comm_fault first = {.n = 50000};
    expect_failures(1, &o, fails_by_many_open, first, FATTN_E_STATE, "8 exchanges are open", "");
    expect_failures(1, &o, fails_by_argument, first, FATTN_E_SHAPE, "x: is not row-major", "");
    if (gpus < 2) return;
    const comm_fault last = {.rank = 1, .n = 50000};
    expect_failures(2, &o, fails_by_argument, last, FATTN_E_SHAPE, "x: is not row-major", "does not answer within 3 s");
    expect_failures(2, &o, fails_by_aborting, last, FATTN_E_COMM, "rank 1: the file is missing",
                    "does not answer within 3 s");
    expect_failures(2, &o, fails_by_leaving, last, FATTN_OK, "", "does not answer within 3 s");
    const ranks_options one = {
        .device = FATTN_CUDA, .nccl_id = id, .comm_flags = FATTN_COMM_WAIT, .time_limit = 3, .absent = 2};
    expect_failures(2, &one, check_ring, last, FATTN_OK, "", "waits in ncclCommInitRank");
}

static fattn_status use(fattn_ctx *ctx, void *theirs) {
    rank_call c = {.ctx = ctx};
    fattn_status s = fattn_comm_from_nccl(ctx, theirs, NULL, &c.comm);
    c.rank = fattn_comm_rank(c.comm), c.size = fattn_comm_size(c.comm);
    if (!s) s = check_ring(&c);
    if (!s) s = check_all_gather(&c);
    free_rank_tensors(&c);
    fattn_comm_destroy(c.comm);
    return s;
}

/* A communicator that the caller has made is used twice, and is still there to be destroyed. */
Test(cuda_nccl, of_the_caller) {
    typedef struct nccl_id {
        uint8_t bytes[FATTN_NCCL_ID];
    } nccl_id;
    gpus_or_skip();
    fattn_ctx *const ctx = context(NULL, 0);
    void *const file = dlopen("libnccl.so.2", RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE), *theirs;
    cr_assert_not_null(file, "fattn has found it, this program has not: set LD_LIBRARY_PATH");
    int (*make)(void **, int, nccl_id, int);
    int (*destroy)(void *);
    void *const functions[] = {dlsym(file, "ncclCommInitRank"), dlsym(file, "ncclCommDestroy")};
    cr_assert(functions[0] && functions[1]);
    memcpy(&make, &functions[0], sizeof make), memcpy(&destroy, &functions[1], sizeof destroy);
    nccl_id own;
    memcpy(&own, id, sizeof own);
    cr_assert_eq(make(&theirs, 1, own, 0), 0);
    for (int n = 0; n < 2; ++n) cr_assert_eq(use(ctx, theirs), FATTN_OK, "%s", fattn_ctx_error(ctx));
    cr_assert_eq(destroy(theirs), 0);
    fattn_ctx_destroy(ctx);
}

Test(cuda_nccl, arguments) {
    gpus_or_skip();
    fattn_ctx *const ctx = context(NULL, 0), *cpu;
    fattn_comm *c;
    const fattn_comm_options unknown = {.struct_size = sizeof unknown, .flags = 1u << 31};
    cr_assert_eq(fattn_comm_nccl(ctx, id, 0, 1, &unknown, &c), FATTN_E_ARG);
    cr_assert_not_null(strstr(fattn_ctx_error(ctx), "unknown flags 0x80000000"));
    cr_assert_eq(fattn_comm_nccl(ctx, id, 2, 2, NULL, &c), FATTN_E_ARG);
    cr_assert_not_null(strstr(fattn_ctx_error(ctx), "rank 2 of 2"));
    cr_assert_eq(fattn_comm_nccl(ctx, NULL, 0, 1, NULL, &c), FATTN_E_ARG);
    cr_assert_eq(fattn_comm_from_nccl(ctx, NULL, NULL, &c), FATTN_E_ARG);
    cr_assert_eq(fattn_ctx_create(NULL, &cpu), FATTN_OK);
    cr_assert_eq(fattn_comm_nccl(cpu, id, 0, 1, NULL, &c), FATTN_E_UNSUPPORTED);
    cr_assert_str_eq(fattn_ctx_error(cpu), "NCCL (libnccl.so.2) does not move memory of the CPU");
    fattn_ctx_destroy(cpu);
    cr_assert_eq(fattn_comm_nccl(ctx, id, 0, 1, NULL, &c), FATTN_OK, "%s", fattn_ctx_error(ctx));
    cr_assert_str_eq(fattn_comm_name(c), "NCCL");
    cr_assert_eq(fattn_comm_size(c), 1);
    fattn_comm_destroy(c);
    fattn_ctx_destroy(ctx);
}
