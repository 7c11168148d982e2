/* Ranks that are processes of MPI. A message is sent when its receiver has asked for it, with its length, while both
   finish the exchange: so lengths that differ are found before anything is sent, and nothing is under way for an
   exchange that is not being finished. Such requests are one kind of notice. A failure is another: each rank that fails
   tells it to all, so that it comes before any notice that follows from it. A rank that waits for long tells for which
   rank: when one waits for another that waits for a third, the third is to blame, whoever's time ends first. The last
   notice says that its sender has left. */
#include "core/base/internal.h" /* macros and inline functions only */

#include <mpi.h>

#include <fattn/mpi.h>
#include <limits.h>
#include <math.h>
#include <sched.h>
#include <stdio.h>
#include <string.h>

enum { MOST_OPEN = 8, TEXT = 384, DATA = 1, NOTICE = 2 };

/* ASKS: for a message, by its number, counted from 1 for each pair of ranks, and its bytes. FAILS: with a text. WAITS:
   for a rank. LEAVES: after so many messages to the receiver of the notice, and from it. */
enum { ASKS = 1, FAILS, WAITS, LEAVES };

/* Of the time limit: a rank that waits tells it this often; what another has told holds twice as long. */
static const double TELL_EVERY = 0.125;

typedef struct header {
    int64_t kind, values[2];
} header;

typedef struct notice {
    header header;
    char text[TEXT]; /* of FAILS, sent without the final 0 */
} notice;

/* One exchange with one rank. */
typedef struct transfer {
    fattn_message out, in;             /* bytes 0: none; out: or it is being sent */
    int64_t out_number, in_number;     /* of these messages */
    MPI_Request sends, receives, asks; /* MPI_REQUEST_NULL: not begun, or done */
    header request;
} transfer;

typedef struct peer {
    int64_t sent, received;     /* messages to it, from it */
    int64_t asked, asked_bytes; /* its last request */
    bool left;
    int64_t last_sent, last_received; /* by it, when it has left */
    int waits_for;                    /* told at told_at */
    double told_at;
    header last, awaited;             /* notices to it */
    MPI_Request fails, leaves, waits; /* notices to it */
    transfer transfers[MOST_OPEN];
} peer;

typedef struct rank_state {
    fattn_tensor memory; /* this struct */
    MPI_Comm comm;
    double time_limit;
    int rank, size;
    int64_t started, finished;
    bool has_left;
    notice failure; /* its text is "" while all is well; then it does not change, for it is sent from here */
    peer peers[];   /* [size] */
} rank_state;

static fattn_status checked(rank_state *r, fattn_ctx *ctx, int error, const char *what) {
    char text[MPI_MAX_ERROR_STRING] = "";
    int length;
    if (error == MPI_SUCCESS) return FATTN_OK;
    MPI_Error_string(error, text, &length);
    return fattn_ctx_fail(ctx, FATTN_E_COMM, "rank %d: %s: %s", r->rank, what, text);
}

/* ---- notices ---- */

/* The first failure is the one that is told. */
static void end_group(rank_state *r, const char *text) {
    notice *const f = &r->failure;
    if (f->text[0]) return;
    f->header.kind = FAILS;
    snprintf(f->text, sizeof f->text, "%s", text);
    const int bytes = (int)(sizeof f->header + strlen(f->text));
    for (int p = 0; p < r->size && !r->has_left; ++p)
        if (p != r->rank) MPI_Isend(f, bytes, MPI_BYTE, p, NOTICE, r->comm, &r->peers[p].fails);
}

static void leave(rank_state *r) {
    if (r->has_left) return;
    r->has_left = true;
    for (int p = 0; p < r->size; ++p) {
        peer *const q = &r->peers[p];
        q->last = (header){LEAVES, {q->sent, q->received}};
        if (p == r->rank)
            q->left = true;
        else
            MPI_Isend(&q->last, sizeof q->last, MPI_BYTE, p, NOTICE, r->comm, &q->leaves);
    }
}

static fattn_status take_notices(rank_state *r, fattn_ctx *ctx) {
    for (;;) {
        int found;
        MPI_Status status;
        notice n = {0};
        FATTNI_TRY(checked(r, ctx, MPI_Iprobe(MPI_ANY_SOURCE, NOTICE, r->comm, &found, &status), "MPI_Iprobe"));
        if (!found) return FATTN_OK;
        peer *const q = &r->peers[status.MPI_SOURCE];
        FATTNI_TRY(checked(r, ctx,
                           MPI_Recv(&n, sizeof n - 1, MPI_BYTE, status.MPI_SOURCE, NOTICE, r->comm, MPI_STATUS_IGNORE),
                           "MPI_Recv"));
        const int64_t *const values = n.header.values;
        if (n.header.kind == ASKS)
            q->asked = values[0], q->asked_bytes = values[1];
        else if (n.header.kind == FAILS)
            end_group(r, n.text);
        else if (n.header.kind == WAITS)
            q->waits_for = (int)values[0], q->told_at = MPI_Wtime();
        else
            q->left = true, q->last_sent = values[0], q->last_received = values[1];
    }
}

/* ---- messages ---- */

static transfer *transfer_of(rank_state *r, int slot, int p) { return &r->peers[p].transfers[slot]; }

/* A type of that many bytes: MPI counts with an int. */
static int make_type(size_t bytes, MPI_Datatype *out) {
    const int block = 1 << 30, rest = (int)(bytes % (size_t)block);
    MPI_Datatype whole;
    int error = MPI_Type_contiguous(block, MPI_BYTE, &whole);
    if (error) return error;
    error = MPI_Type_create_struct(2, (int[]){(int)(bytes / (size_t)block), rest},
                                   (MPI_Aint[]){0, (MPI_Aint)(bytes - (size_t)rest)}, (MPI_Datatype[]){whole, MPI_BYTE},
                                   out);
    MPI_Type_free(&whole);
    return error ? error : MPI_Type_commit(out);
}

static int begin(bool sends, void *data, size_t bytes, int p, MPI_Comm comm, MPI_Request *out) {
    const bool large = bytes > INT_MAX;
    const int count = large ? 1 : (int)bytes;
    MPI_Datatype type = MPI_BYTE;
    int error = large ? make_type(bytes, &type) : MPI_SUCCESS;
    if (error) return error;
    error = sends ? MPI_Isend(data, count, type, p, DATA, comm, out) : MPI_Irecv(data, count, type, p, DATA, comm, out);
    if (large) MPI_Type_free(&type);
    return error;
}

static fattn_status lengths_differ(fattn_ctx *ctx, int from, size_t sent, int to, size_t expected) {
    return fattn_ctx_fail(ctx, FATTN_E_COMM,
                          "rank %d sends %zu bytes where rank %d expects %zu: their shapes or dtypes differ", from,
                          sent, to, expected);
}

static bool is_active(MPI_Request request) { return request != MPI_REQUEST_NULL; }

static int test(MPI_Request *request) {
    int done;
    return is_active(*request) ? MPI_Test(request, &done, MPI_STATUS_IGNORE) : MPI_SUCCESS;
}

static int test_receive(peer *q, transfer *t) {
    int done, cancelled;
    MPI_Status status;
    if (!is_active(t->receives)) return MPI_SUCCESS;
    const int error = MPI_Test(&t->receives, &done, &status);
    if (error || !done) return error;
    MPI_Test_cancelled(&status, &cancelled);
    q->received += !cancelled;
    return MPI_SUCCESS;
}

/* The rank has left without this message to it, or without sending it. */
static bool out_is_lost(const peer *q, const transfer *t) { return q->left && t->out_number > q->last_received; }
static bool in_is_lost(const peer *q, const transfer *t) { return q->left && t->in_number > q->last_sent; }

static fattn_status ask(rank_state *r, fattn_ctx *ctx, int p, transfer *t) {
    if (t->in.bytes == 0) return FATTN_OK;
    t->in_number = r->peers[p].received + 1;
    t->request = (header){ASKS, {t->in_number, (int64_t)t->in.bytes}};
    FATTNI_TRY(checked(r, ctx, begin(false, t->in.data, t->in.bytes, p, r->comm, &t->receives), "MPI_Irecv"));
    return checked(r, ctx, MPI_Isend(&t->request, sizeof t->request, MPI_BYTE, p, NOTICE, r->comm, &t->asks),
                   "MPI_Isend");
}

/* Sends the message if the rank has asked for it. */
static fattn_status answer(rank_state *r, fattn_ctx *ctx, int p, transfer *t) {
    const peer *const q = &r->peers[p];
    if (t->out.bytes == 0 || q->asked < t->out_number) return FATTN_OK;
    if ((size_t)q->asked_bytes != t->out.bytes)
        return lengths_differ(ctx, r->rank, t->out.bytes, p, (size_t)q->asked_bytes);
    const size_t bytes = t->out.bytes;
    t->out.bytes = 0;
    return checked(r, ctx, begin(true, t->out.data, bytes, p, r->comm, &t->sends), "MPI_Isend");
}

/* *missing: a rank that the exchange waits for, -1 when it is done. */
static fattn_status advance(rank_state *r, fattn_ctx *ctx, int slot, int *missing) {
    *missing = -1;
    for (int p = 0; p < r->size; ++p) {
        peer *const q = &r->peers[p];
        transfer *const t = &q->transfers[slot];
        FATTNI_TRY(answer(r, ctx, p, t));
        FATTNI_TRY(checked(r, ctx, test(&t->sends), "MPI_Isend"));
        FATTNI_TRY(checked(r, ctx, test(&t->asks), "MPI_Isend"));
        FATTNI_TRY(checked(r, ctx, test_receive(q, t), "MPI_Irecv"));
        const bool sends = t->out.bytes > 0 || is_active(t->sends), receives = is_active(t->receives);
        if ((sends && out_is_lost(q, t)) || (receives && in_is_lost(q, t)))
            return fattn_ctx_fail(ctx, FATTN_E_COMM, "rank %d has left, rank %d waits for it", p, r->rank);
        if (*missing < 0 && (sends || receives || is_active(t->asks))) *missing = p;
    }
    return FATTN_OK;
}

static void tell_waits(rank_state *r, int missing) {
    for (int p = 0; p < r->size; ++p) {
        peer *const q = &r->peers[p];
        if (p == r->rank || test(&q->waits) != MPI_SUCCESS || is_active(q->waits)) continue;
        q->awaited = (header){WAITS, {missing}};
        MPI_Isend(&q->awaited, sizeof q->awaited, MPI_BYTE, p, NOTICE, r->comm, &q->waits);
    }
}

/* A rank that waits itself is not to blame, but the one that it waits for; unless they wait in a circle. */
static fattn_status does_not_answer(rank_state *r, fattn_ctx *ctx, int missing) {
    const double oldest = MPI_Wtime() - 2 * TELL_EVERY * r->time_limit;
    int blamed = missing, waiting = r->rank, n = 0;
    for (; n < r->size && r->peers[blamed].told_at > oldest; ++n) waiting = blamed, blamed = r->peers[blamed].waits_for;
    if (n == r->size || blamed == r->rank) blamed = missing, waiting = r->rank;
    return fattn_ctx_fail(ctx, FATTN_E_COMM, "rank %d does not answer within %g s, rank %d waits for it", blamed,
                          r->time_limit, waiting);
}

static fattn_status complete(rank_state *r, fattn_ctx *ctx, int slot) {
    const double since = MPI_Wtime();
    double next = since + TELL_EVERY * r->time_limit;
    for (int p = 0; p < r->size; ++p) FATTNI_TRY(ask(r, ctx, p, transfer_of(r, slot, p)));
    for (;;) {
        int missing;
        FATTNI_TRY(take_notices(r, ctx));
        if (r->failure.text[0]) return fattn_ctx_fail(ctx, FATTN_E_COMM, "%s", r->failure.text);
        FATTNI_TRY(advance(r, ctx, slot, &missing));
        if (missing < 0) return FATTN_OK;
        const double now = MPI_Wtime();
        if (now > since + r->time_limit) return does_not_answer(r, ctx, missing);
        if (now > next) {
            tell_waits(r, missing);
            next = now + TELL_EVERY * r->time_limit;
        }
        sched_yield();
    }
}

/* ---- the end of a group ---- */

static bool is_receiving(rank_state *r, int slot) {
    bool any = false;
    for (int p = 0; p < r->size; ++p) {
        transfer *const t = transfer_of(r, slot, p);
        any |= test_receive(&r->peers[p], t) == MPI_SUCCESS && is_active(t->receives);
        any |= test(&t->asks) == MPI_SUCCESS && is_active(t->asks);
    }
    return any;
}

static bool is_sending(rank_state *r, int slot) {
    bool any = false;
    for (int p = 0; p < r->size; ++p) {
        transfer *const t = transfer_of(r, slot, p);
        any |= test(&t->sends) == MPI_SUCCESS && is_active(t->sends) && !out_is_lost(&r->peers[p], t);
    }
    return any;
}

/* Ends an exchange that has failed, so that its buffers are no longer in use: what this rank has asked for is cancelled
   or comes, then it leaves; what it sends is taken, or its receiver leaves. Waits at most the time limit: a rank that
   has stopped midway may still use the buffers when it goes on. */
static void settle(rank_state *r, fattn_ctx *ctx, int slot) {
    const double end = MPI_Wtime() + r->time_limit;
    for (int p = 0; p < r->size; ++p)
        if (is_active(transfer_of(r, slot, p)->receives)) MPI_Cancel(&transfer_of(r, slot, p)->receives);
    while (is_receiving(r, slot) && MPI_Wtime() < end) sched_yield();
    leave(r);
    while (take_notices(r, ctx) == FATTN_OK && is_sending(r, slot) && MPI_Wtime() < end) sched_yield();
    for (int p = 0; p < r->size; ++p) {
        transfer *const t = transfer_of(r, slot, p);
        if (is_active(t->sends)) MPI_Request_free(&t->sends);
        if (is_active(t->receives)) MPI_Request_free(&t->receives);
    }
}

/* Waits until all ranks have left and have taken the notices, at most the time limit. */
static void wait_for_all(rank_state *r, fattn_ctx *ctx, bool *left, bool *taken) {
    const double end = MPI_Wtime() + r->time_limit;
    for (;;) {
        const bool fails = take_notices(r, ctx) != FATTN_OK || MPI_Wtime() > end;
        *left = *taken = true;
        for (int p = 0; p < r->size; ++p) {
            peer *const q = &r->peers[p];
            *left &= q->left;
            *taken &= test(&q->fails) == MPI_SUCCESS && !is_active(q->fails);
            *taken &= test(&q->leaves) == MPI_SUCCESS && !is_active(q->leaves);
            *taken &= test(&q->waits) == MPI_SUCCESS && !is_active(q->waits);
            for (int n = 0; n < MOST_OPEN; ++n) *taken &= !is_active(q->transfers[n].asks);
        }
        if (fails || (*left && *taken)) return;
        sched_yield();
    }
}

/* ---- the transport ---- */

static fattn_status start(void *state, fattn_ctx *ctx, const fattn_message *sends, int n_sends,
                          const fattn_message *receives, int n_receives, void **request) {
    rank_state *const r = state;
    if (r->failure.text[0]) return fattn_ctx_fail(ctx, FATTN_E_COMM, "%s", r->failure.text);
    if (r->started - r->finished == MOST_OPEN)
        return fattn_ctx_fail(ctx, FATTN_E_STATE, "%d exchanges are open, no more are possible", MOST_OPEN);
    const int slot = (int)(r->started % MOST_OPEN);
    for (int p = 0; p < r->size; ++p) {
        transfer *const t = transfer_of(r, slot, p);
        t->in.bytes = t->out.bytes = 0;
    }
    for (int n = 0; n < n_receives; ++n) transfer_of(r, slot, receives[n].peer)->in = receives[n];
    for (int n = 0; n < n_sends; ++n) {
        transfer *const t = transfer_of(r, slot, sends[n].peer);
        t->out = sends[n];
        t->out_number = ++r->peers[sends[n].peer].sent;
    }
    transfer *const own = transfer_of(r, slot, r->rank);
    if (own->out.bytes != own->in.bytes) return lengths_differ(ctx, r->rank, own->out.bytes, r->rank, own->in.bytes);
    if (own->in.bytes > 0) memmove(own->in.data, own->out.data, own->in.bytes); /* it may stay where it is */
    own->in.bytes = own->out.bytes = 0;
    r->started += 1;
    *request = r;
    return FATTN_OK;
}

static fattn_status finish(void *state, fattn_ctx *ctx, void *request) {
    rank_state *const r = state;
    (void)request; /* they are finished in order */
    const int slot = (int)(r->finished++ % MOST_OPEN);
    const fattn_status s = complete(r, ctx, slot);
    if (s == FATTN_OK) return s;
    end_group(r, fattn_ctx_error(ctx));
    settle(r, ctx, slot);
    return fattn_ctx_fail(ctx, s, "%s", r->failure.text);
}

static void abort_group(void *state, const char *text) {
    rank_state *const r = state;
    char told[TEXT];
    snprintf(told, sizeof told, "rank %d: %s", r->rank, text);
    end_group(r, told);
}

static void close_rank(void *state, fattn_ctx *ctx) {
    rank_state *const r = state;
    fattn_tensor memory = r->memory;
    bool all_left = false, all_taken = true;
    int finalised;
    MPI_Finalized(&finalised);
    if (!finalised) {
        if (r->started != r->finished) abort_group(r, "has left with open exchanges");
        leave(r);
        wait_for_all(r, ctx, &all_left, &all_taken);
    }
    /* A message that nobody has received would be taken for one of a new communicator: MPI reuses their numbers. */
    if (all_left && !r->failure.text[0]) MPI_Comm_free(&r->comm);
    if (all_taken) fattn_tensor_free(ctx, &memory); /* else MPI still reads notices there */
}

/* ---- creation ---- */

/* MPI_Comm_dup with a time limit. */
static fattn_status duplicate(rank_state *r, fattn_ctx *ctx, MPI_Comm comm) {
    const double end = MPI_Wtime() + r->time_limit;
    MPI_Request request;
    int done = 0;
    FATTNI_TRY(checked(r, ctx, MPI_Comm_idup(comm, &r->comm, &request), "MPI_Comm_idup"));
    for (;;) {
        FATTNI_TRY(checked(r, ctx, MPI_Test(&request, &done, MPI_STATUS_IGNORE), "MPI_Comm_idup"));
        if (done) break;
        if (MPI_Wtime() > end)
            return fattn_ctx_fail(ctx, FATTN_E_COMM, "a rank has not joined within %g s, rank %d of %d waits for it",
                                  r->time_limit, r->rank, r->size);
        sched_yield();
    }
    return checked(r, ctx, MPI_Comm_set_errhandler(r->comm, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler");
}

static fattn_status check_comm(fattn_ctx *ctx, MPI_Comm comm) {
    int initialised, finalised, is_inter;
    MPI_Initialized(&initialised);
    MPI_Finalized(&finalised);
    if (!initialised || finalised)
        return fattn_ctx_fail(ctx, FATTN_E_STATE, "MPI %s", finalised ? "has been finalised" : "is not initialised");
    if (comm == MPI_COMM_NULL) return fattn_ctx_fail(ctx, FATTN_E_ARG, "comm: MPI_COMM_NULL");
    if (MPI_Comm_test_inter(comm, &is_inter) == MPI_SUCCESS && is_inter)
        return fattn_ctx_fail(ctx, FATTN_E_ARG, "comm: is an inter-communicator");
    return FATTN_OK;
}

fattn_status fattn_comm_mpi(fattn_ctx *ctx, MPI_Comm comm, const fattn_comm_options *opt, fattn_comm **out) {
    if (!out) return FATTN_E_ARG;
    *out = NULL;
    if (!ctx) return FATTN_E_ARG;
    if (fattn_ctx_device(ctx) != FATTN_CPU)
        return fattn_ctx_fail(ctx, FATTN_E_UNSUPPORTED, "MPI does not move memory of the GPU");
    FATTNI_TRY(check_comm(ctx, comm));
    double time_limit;
    FATTNI_TRY(fattn_comm_time_limit(ctx, opt, &time_limit));
    int rank, size;
    MPI_Comm_rank(comm, &rank);
    MPI_Comm_size(comm, &size);
    fattn_tensor memory;
    const int64_t bytes = (int64_t)(sizeof(rank_state) + (size_t)size * sizeof(peer));
    FATTNI_TRY(fattn_tensor_alloc(ctx, FATTN_U8, 1, &bytes, &memory));
    rank_state *const r = memory.data;
    *r = (rank_state){.memory = memory, .time_limit = time_limit, .rank = rank, .size = size};
    for (int p = 0; p < size; ++p) {
        peer *const q = &r->peers[p];
        *q = (peer){
            .told_at = -HUGE_VAL, .fails = MPI_REQUEST_NULL, .leaves = MPI_REQUEST_NULL, .waits = MPI_REQUEST_NULL};
        for (int n = 0; n < MOST_OPEN; ++n)
            q->transfers[n] =
                (transfer){.sends = MPI_REQUEST_NULL, .receives = MPI_REQUEST_NULL, .asks = MPI_REQUEST_NULL};
    }
    FATTNI_TRY(duplicate(r, ctx, comm)); /* if it fails, MPI may still write to this memory */
    const fattn_transport t = {.struct_size = sizeof t,
                               .rank = rank,
                               .size = size,
                               .devices = 1u << FATTN_CPU,
                               .name = "MPI",
                               .state = r,
                               .start = start,
                               .finish = finish,
                               .abort = abort_group,
                               .close = close_rank};
    const fattn_status s = fattn_comm_create(ctx, &t, out);
    if (s) close_rank(r, ctx);
    return s;
}
