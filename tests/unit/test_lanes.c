/* How threads.c orders copies: with lanes that keep account instead of a GPU's streams. Its symbols here take the place
   of the library's, also for run_ranks. */
#define _POSIX_C_SOURCE 200809L /* clocks, nanosleep */
#define fattni_lane_ops_of lane_ops_of
#include "core/comm/threads.c"
#undef fattni_lane_ops_of

#include "comm_checks.h"

#include <criterion/criterion.h>
#include <stdatomic.h>
#include <stddef.h>

enum { MOST = 4, N = 8 };

/* Of each rank, written by it alone. */
static struct {
    _Atomic(const fattni_lane *) lane;
    bool closed;
    int copies, copies_from[MOST];
    int ended[FATTNI_LANE_SLOTS], ended_from[FATTNI_LANE_SLOTS][MOST]; /* of these, before a slot's end */
    int ordered;         /* so many own copies come before what is enqueued on the context's stream */
    int followed[MOST];  /* and so many by that rank of what this one has sent */
    int waits;           /* for other lanes */
    int followed_closed; /* waits for a lane that is no more */
} ranks[MOST];

static int rank_of(const fattni_lane *l) {
    int r = 0;
    while (r < MOST && ranks[r].lane != l) ++r; /* by the address: the lane may be no more */
    cr_assert(r < MOST);
    return r;
}

static fattn_status open_lane(fattni_lane *l) {
    const rank_state *const r = (const rank_state *)((const char *)l - offsetof(rank_state, lane));
    ranks[r->rank].lane = l;
    return FATTN_OK;
}

static void close_lane(fattni_lane *l) { ranks[rank_of(l)].closed = true; }

static bool linked(const fattni_lane *l) { return rank_of(l) == 0; }

static fattn_status begin(fattni_lane *l, int slot) {
    (void)l, (void)slot;
    return FATTN_OK;
}

static fattn_status await(fattni_lane *l, int slot, const fattni_lane *from, int from_slot) {
    (void)l, (void)slot, (void)from, (void)from_slot;
    return FATTN_OK;
}

static fattn_status copy(fattni_lane *l, const fattn_tensor *dst, const fattni_lane *from, const fattn_tensor *src,
                         int n, bool exposed) {
    (void)exposed;
    for (int i = 0; i < n; ++i) { /* here all are runs */
        const size_t bytes = (size_t)fattn_tensor_numel(&src[i]) * fattn_dtype_size((fattn_dtype)src[i].dtype);
        memmove(dst[i].data, src[i].data, bytes);
        ranks[rank_of(l)].copies += 1;
        ranks[rank_of(l)].copies_from[rank_of(from)] += 1;
    }
    return FATTN_OK;
}

static fattn_status end(fattni_lane *l, int slot) {
    const int r = rank_of(l);
    ranks[r].ended[slot] = ranks[r].copies;
    memcpy(ranks[r].ended_from[slot], ranks[r].copies_from, sizeof ranks[r].copies_from);
    return FATTN_OK;
}

static fattn_status follow_lane(fattni_lane *l, const fattni_lane *reader, int reader_slot) {
    const int me = rank_of(l), other = rank_of(reader);
    ranks[me].followed_closed += ranks[other].closed;
    ranks[me].waits += other != me;
    ranks[me].followed[other] = ranks[other].ended_from[reader_slot][me];
    if (other == me) ranks[me].ordered = ranks[me].ended[reader_slot];
    return FATTN_OK;
}

const fattni_lane_ops *lane_ops_of(fattn_device device) {
    static const fattni_lane_ops ops = {open_lane, close_lane, linked, begin, await, copy, end, follow_lane};
    (void)device;
    return &ops;
}

static void pause_for(double seconds) {
    const struct timespec t = {.tv_sec = (time_t)seconds, .tv_nsec = (long)(1e9 * (seconds - (double)(time_t)seconds))};
    nanosleep(&t, NULL);
}

static float sent[MOST][N], received[MOST][MOST * N];

/* Rank 1 receives and leaves; the time limit later rank 0 finishes what it has sent. */
static fattn_status finishes_late(rank_call *c) {
    fattn_message m = {.data = c->rank ? received[1] : sent[0], .bytes = sizeof sent[0], .peer = 1 - c->rank};
    void *opened;
    cr_assert(fattn_comm_linked(c->comm) == (c->rank == 0) && !fattn_comm_linked(NULL)); /* as its lane says */
    FATTNI_TRY(fattni_comm_start(c->comm, &m, c->rank == 0, &m, c->rank == 1, &opened));
    if (c->rank == 0) pause_for(1);
    return fattni_comm_finish(c->comm, opened);
}

Test(lanes, a_receiver_leaves_before_its_sender_follows) {
    const ranks_options o = {.time_limit = 0.3};
    memset(ranks, 0, sizeof ranks);
    for (int i = 0; i < N; ++i) sent[0][i] = (float)(i + 1);
    expect_ranks(2, &o, finishes_late, NULL);
    cr_assert_arr_eq(received[1], sent[0], sizeof sent[0]);
    cr_assert_eq(ranks[0].followed_closed, 0);
}

/* The last rank does not take part. The others' lanes stay open for a while. */
static fattn_status fails_halfway(rank_call *c) {
    const int64_t n = N, all = N * c->size;
    const fattn_tensor in = fattn_tensor_view(sent[c->rank], FATTN_F32, FATTN_CPU, 0, 1, &n);
    const fattn_tensor out = fattn_tensor_view(received[c->rank], FATTN_F32, FATTN_CPU, 0, 1, &all);
    if (c->rank == c->size - 1) {
        pause_for(1.5);
        return FATTN_E_COMM;
    }
    const fattn_status s = fattn_comm_all_gather(c->comm, &in, &out);
    pause_for(0.5);
    return s;
}

static void run_three(fattn_status (*function)(rank_call *c), rank_call calls[3]) {
    const ranks_options o = {.time_limit = 0.3};
    memset(ranks, 0, sizeof ranks);
    run_ranks(3, &o, function, NULL, calls);
}

Test(lanes, copies_of_a_failed_exchange_are_waited_for) {
    rank_call calls[3];
    run_three(fails_halfway, calls);
    for (int r = 0; r < 2; ++r) {
        cr_assert_eq(calls[r].status, FATTN_E_COMM);
        cr_assert_eq(ranks[r].copies, 2);
        cr_assert_eq(ranks[r].ordered, 2, "rank %d may free what is still written", r);
        for (int from = 0; from < 2; ++from)
            cr_assert_eq(ranks[from].followed[r], ranks[r].copies_from[from], "rank %d may free what %d still reads",
                         from, r);
        cr_assert_eq(ranks[r].followed_closed, 0);
    }
}

/* Rank 0 receives from rank 1, and waits for rank 2 in vain. It sends nothing, also not to itself. */
static fattn_status receives_half(rank_call *c) {
    const size_t bytes = N * sizeof(float);
    const fattn_message out = {.data = sent[1], .bytes = bytes, .peer = 0};
    const fattn_message in[] = {{.data = received[0], .bytes = bytes, .peer = 1},
                                {.data = received[0] + N, .bytes = bytes, .peer = 2}};
    void *opened;
    if (c->rank == 2) {
        pause_for(1);
        return FATTN_E_COMM;
    }
    FATTNI_TRY(fattni_comm_start(c->comm, &out, c->rank == 1, in, c->rank == 0 ? 2 : 0, &opened));
    const fattn_status s = fattni_comm_finish(c->comm, opened);
    pause_for(0.2);
    return s;
}

Test(lanes, copies_before_a_failed_one_are_waited_for) {
    rank_call calls[3];
    run_three(receives_half, calls);
    cr_assert_eq(calls[0].status, FATTN_E_COMM);
    cr_assert_eq(ranks[0].copies, 1);
    cr_assert_eq(ranks[0].ordered, 1, "rank 0 may free what is still written");
    cr_assert_eq(ranks[1].followed[0], 1, "rank 1 may free what 0 still reads");
}

/* The same when a rank fails by itself while messages are open that others have received. */
static fattn_status aborts(rank_call *c) {
    fattn_message m = {.data = c->rank ? received[1] : sent[0], .bytes = sizeof sent[0], .peer = 1 - c->rank};
    void *opened;
    FATTNI_TRY(fattni_comm_start(c->comm, &m, c->rank == 0, &m, c->rank == 1, &opened));
    pause_for(c->rank ? 0 : 0.2);
    if (c->rank == 0) fattn_comm_abort(c->comm, "no");
    const int followed = ranks[0].followed[1];
    if (c->rank == 0) return followed == 1 ? FATTN_OK : FATTN_E_MISMATCH;
    FATTNI_TRY(fattni_comm_finish(c->comm, opened));
    pause_for(0.4);
    return FATTN_OK;
}

Test(lanes, an_abort_waits_for_readers) {
    memset(ranks, 0, sizeof ranks);
    expect_ranks(2, NULL, aborts, NULL);
    cr_assert_eq(ranks[0].followed_closed, 0);
}

/* Three messages each way. The first one's copy is enqueued early and not waited for, the second one's is. */
static fattn_status finishes_together(rank_call *c) {
    const int me = c->rank, other = 1 - me;
    void *opened[3];
    for (int i = 0; i < 3; ++i) {
        const fattn_message out = {.data = &sent[me][i], .bytes = sizeof(float), .peer = other};
        const fattn_message in = {.data = &received[me][i], .bytes = sizeof(float), .peer = other};
        FATTNI_TRY(fattni_comm_start(c->comm, &out, 1, &in, 1, &opened[i]));
    }
    FATTNI_TRY(fattni_comm_receive(c->comm, opened[0], false));
    if (ranks[me].copies != 1 || ranks[me].ordered != 0) return FATTN_E_MISMATCH;
    FATTNI_TRY(fattni_comm_receive(c->comm, opened[1], true));
    if (ranks[me].copies != 2 || ranks[me].ordered != 2) return FATTN_E_MISMATCH;
    return fattni_comm_finish_parts(c->comm, opened, 3);
}

Test(lanes, exchanges_that_are_finished_together_wait_once) {
    memset(ranks, 0, sizeof ranks);
    for (int i = 0; i < N; ++i) sent[0][i] = (float)(i + 1), sent[1][i] = (float)-i;
    expect_ranks(2, NULL, finishes_together, NULL);
    for (int r = 0; r < 2; ++r) {
        cr_assert_arr_eq(received[r], sent[1 - r], 3 * sizeof(float));
        cr_assert_eq(ranks[r].copies, 3);
        cr_assert_eq(ranks[r].ordered, 3);
        cr_assert_eq(ranks[r].followed[1 - r], 3, "rank %d may free what %d still reads", r, 1 - r);
        cr_assert_eq(ranks[r].waits, 1);
    }
}
