/* Communicators over the threads of one process: every collective for every number of ranks, and failures, which must
   reach every rank. */
#include "comm_checks.h"

#include <criterion/criterion.h>
#include <stdio.h>
#include <string.h>

static void expect_all_sizes(fattn_status (*function)(rank_call *)) {
    static const int sizes[] = {1, 2, 3, 4, 8, 16};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; ++i) expect_ranks(sizes[i], NULL, function, NULL);
}

Test(comm, ring) { expect_all_sizes(check_ring); }
Test(comm, one_way) { expect_all_sizes(check_one_way); }
Test(comm, all_gather) { expect_all_sizes(check_all_gather); }
Test(comm, all_to_all) { expect_all_sizes(check_all_to_all); }
Test(comm, broadcast) { expect_all_sizes(check_broadcast); }
Test(comm, sums_have_one_order) { expect_all_sizes(check_sums); }
Test(comm, sixteen_bits_are_added_in_f32) { expect_all_sizes(check_narrow_sums); }
Test(comm, agreement) { expect_all_sizes(check_agreement); }
Test(comm, several_open) { expect_all_sizes(check_several_open); }

/* ---- failures ---- */

static void expect_failures(int size, const ranks_options *o, fattn_status (*function)(rank_call *), comm_fault fault,
                            fattn_status own, const char *text) {
    rank_call calls[16];
    run_ranks(size, o, function, &fault, calls);
    for (int r = 0; r < size; ++r) {
        if (o && o->absent == r + 1) continue;
        cr_assert_eq(calls[r].status, r == fault.rank ? own : FATTN_E_COMM, "rank %d: %s: %s", r,
                     fattn_status_name(calls[r].status), calls[r].error);
        if (r != fault.rank || own) cr_assert_not_null(strstr(calls[r].error, text), "rank %d: %s", r, calls[r].error);
    }
}

static comm_fault of(int rank) { return (comm_fault){.rank = rank, .sleeps = 1, .n = 32}; }

Test(comm, disagreement) {
    expect_failures(4, NULL, fails_to_agree, of(3), FATTN_E_COMM, "tokens is 7 on rank 3, 64 on rank 0");
    expect_failures(16, NULL, fails_to_agree, of(1), FATTN_E_COMM, "tokens is 7 on rank 1, 64 on rank 0");
}
Test(comm, other_shapes) { expect_failures(4, NULL, fails_by_shape, of(2), FATTN_E_COMM, "expects"); }
Test(comm, bad_argument_of_one_rank) {
    expect_failures(3, NULL, fails_by_argument, of(1), FATTN_E_SHAPE, "x: is not row-major");
}
Test(comm, overlap) {
    expect_failures(3, NULL, fails_by_overlap, of(2), FATTN_E_ARG, "out and in overlap");
    expect_failures(1, NULL, fails_by_overlap, of(0), FATTN_E_ARG, "out and in overlap");
    expect_failures(3, NULL, fails_by_sending, of(1), FATTN_E_ARG, "receive and send overlap");
    expect_failures(1, NULL, fails_by_sending, of(0), FATTN_E_ARG, "receive and send overlap");
}
Test(comm, a_rank_leaves) { expect_failures(4, NULL, fails_by_leaving, of(3), FATTN_OK, "rank 3 has left"); }
Test(comm, a_rank_does_not_answer) {
    const ranks_options o = {.time_limit = 0.3};
    expect_failures(3, &o, fails_to_answer, of(0), FATTN_E_COMM, "rank 0 does not answer within 0.3 s");
}
Test(comm, a_rank_does_not_answer_the_one_that_others_wait_for) {
    const ranks_options o = {.time_limit = 0.3};
    for (int at_fault = 0; at_fault < 4; ++at_fault) {
        char text[64];
        snprintf(text, sizeof text, "rank %d does not answer within 0.3 s, rank %d waits", at_fault,
                 (at_fault + 1) % 4);
        expect_failures(4, &o, fails_in_a_chain, of(at_fault), FATTN_E_COMM, text);
    }
}
Test(comm, a_rank_does_not_come) {
    const ranks_options o = {.time_limit = 0.3, .absent = 2};
    expect_failures(3, &o, check_agreement, of(1), FATTN_OK, "rank 1 has not joined");
}
Test(comm, abort_reaches_all) {
    expect_failures(4, NULL, fails_by_aborting, of(1), FATTN_E_COMM, "rank 1: the file is missing");
}
Test(comm, too_many_open) {
    expect_failures(1, NULL, fails_by_many_open, of(0), FATTN_E_STATE, "8 exchanges are open");
}

Test(comm, arguments) {
    fattn_world *w = NULL;
    fattn_ctx *ctx;
    fattn_comm *a, *b;
    cr_assert_eq(fattn_world_create(0, &w), FATTN_E_ARG);
    cr_assert_eq(fattn_world_create(1025, &w), FATTN_E_ARG);
    cr_assert_eq(fattn_world_create(2, NULL), FATTN_E_ARG);
    cr_assert_eq(fattn_world_create(2, &w), FATTN_OK);
    cr_assert_eq(fattn_ctx_create(NULL, &ctx), FATTN_OK);
    cr_assert_eq(fattn_comm_join(ctx, w, 2, NULL, &a), FATTN_E_ARG);
    cr_assert_not_null(strstr(fattn_ctx_error(ctx), "rank: 2 is not in 0..1"));
    cr_assert_eq(fattn_comm_join(ctx, NULL, 0, NULL, &a), FATTN_E_ARG);
    cr_assert_eq(fattn_comm_join(ctx, w, 0, NULL, NULL), FATTN_E_ARG);
    cr_assert_not_null(strstr(fattn_ctx_error(ctx), "out is NULL"));
    double seconds;
    cr_assert_eq(fattn_comm_time_limit(NULL, NULL, &seconds), FATTN_E_ARG);
    cr_assert_eq(fattn_comm_time_limit(ctx, NULL, NULL), FATTN_E_ARG);
    const fattn_comm_options bad = {.struct_size = sizeof bad, .time_limit = -1};
    cr_assert_eq(fattn_comm_join(ctx, w, 0, &bad, &a), FATTN_E_ARG);
    const fattn_comm_options unknown = {.struct_size = sizeof unknown, .flags = 1u << 31};
    cr_assert_eq(fattn_comm_join(ctx, w, 0, &unknown, &a), FATTN_E_ARG);
    cr_assert_not_null(strstr(fattn_ctx_error(ctx), "unknown flags 0x80000000"));
    cr_assert_eq(fattn_comm_join(ctx, w, 0, NULL, &a), FATTN_OK);
    cr_assert_eq(fattn_comm_join(ctx, w, 0, NULL, &b), FATTN_E_STATE);
    cr_assert_str_eq(fattn_comm_name(a), "threads");
    cr_assert_eq(fattn_comm_rank(a), 0);
    cr_assert_eq(fattn_comm_size(a), 2);
    cr_assert_eq(fattn_comm_barrier(NULL), FATTN_E_ARG);
    fattn_comm_destroy(a);
    fattn_comm_destroy(NULL);
    cr_assert_eq(fattn_ctx_mem(ctx).live, 0);
    fattn_ctx_destroy(ctx);
    fattn_world_destroy(w);
    fattn_world_destroy(NULL);
}

Test(comm, nccl_needs_a_gpu) {
    uint8_t id[FATTN_NCCL_ID] = {0};
    int theirs;
    fattn_ctx *ctx;
    fattn_comm *c;
    cr_assert_eq(fattn_ctx_create(NULL, &ctx), FATTN_OK);
    cr_assert_eq(fattn_comm_nccl_id(ctx, id), FATTN_E_UNSUPPORTED);
    cr_assert_str_eq(fattn_ctx_error(ctx), "NCCL (libnccl.so.2) does not move memory of the CPU");
    cr_assert_eq(fattn_comm_nccl(ctx, id, 0, 1, NULL, &c), FATTN_E_UNSUPPORTED);
    cr_assert_eq(fattn_comm_from_nccl(ctx, &theirs, NULL, &c), FATTN_E_UNSUPPORTED);
    cr_assert_null(c);
    cr_assert_eq(fattn_comm_nccl(ctx, id, 1, 1, NULL, &c), FATTN_E_ARG);
    cr_assert_str_eq(fattn_ctx_error(ctx), "rank 1 of 1: not 0..size-1 of 1..1024");
    cr_assert_eq(fattn_comm_nccl(ctx, NULL, 0, 1, NULL, &c), FATTN_E_ARG);
    cr_assert_eq(fattn_comm_nccl_id(ctx, NULL), FATTN_E_ARG);
    cr_assert_eq(fattn_comm_from_nccl(ctx, NULL, NULL, &c), FATTN_E_ARG);
    cr_assert_eq(fattn_comm_nccl_id(NULL, id), FATTN_E_ARG);
    fattn_ctx_destroy(ctx);
}

/* Messages to oneself, and a rank that fails leaves nothing behind. */
Test(comm, itself) {
    fattn_world *w;
    fattn_ctx *ctx;
    fattn_comm *c;
    float x = 3, y = 0;
    const int64_t one = 1;
    const fattn_tensor from = fattn_tensor_view(&x, FATTN_F32, FATTN_CPU, 0, 1, &one);
    const fattn_tensor to = fattn_tensor_view(&y, FATTN_F32, FATTN_CPU, 0, 1, &one);
    cr_assert_eq(fattn_world_create(1, &w), FATTN_OK);
    cr_assert_eq(fattn_ctx_create(NULL, &ctx), FATTN_OK);
    cr_assert_eq(fattn_comm_join(ctx, w, 0, NULL, &c), FATTN_OK);
    cr_assert_eq(fattn_comm_send_receive(c, &from, 0, &to, 0), FATTN_OK);
    cr_assert_eq(y, 3.0f);
    cr_assert_eq(fattn_comm_send_receive(c, &from, 1, &to, 0), FATTN_E_ARG);
    cr_assert_eq(fattn_comm_barrier(c), FATTN_E_COMM);
    fattn_comm_destroy(c);
    cr_assert_eq(fattn_ctx_mem(ctx).live, 0);
    fattn_ctx_destroy(ctx);
    fattn_world_destroy(w);
}
