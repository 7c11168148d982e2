/* Ranks that are threads of one process. A sender posts the address of a message in the mailbox of its pair of ranks;
   the receiver, when it finishes its exchange, copies from there and marks the post as done; the sender's finish waits
   for that. All of it is under one lock, but for the copies. */
#include "core/comm/comm.h"
#include "core/comm/lane.h"

#include <errno.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { MOST_RANKS = 1024, TEXT = 384 };

/* A message on its way. POSTED: in the mailbox. TAKEN: the receiver copies, and will mark it. DONE: nothing more is
   copied; `reader` is set until the sender has enqueued its wait for what has been, also after a failure. */
enum post_state { POSTED, TAKEN, DONE };

typedef struct post {
    fattni_parts parts;
    int peer, slot;
    const fattni_lane *lane, *reader; /* the sender's, the receiver's */
    int reader_slot;
    enum post_state state;
} post;

/* From one rank to another. Posts `taken`..`sent`-1 wait to be copied. */
typedef struct mailbox {
    post *posts[FATTNI_LANE_SLOTS];
    int64_t sent, taken;
} mailbox;

struct fattn_world {
    pthread_mutex_t lock;
    pthread_cond_t changed;
    int size, joined_device; /* fattn_device of the ranks, 0 before the first */
    char failure[TEXT];      /* "" while all is well */
    bool *joined, *left;     /* [size] */
    bool *closed;            /* [size]: the rank's lane is no more */
    int *waits_for;          /* [size]: a rank, or -1 */
    int *waits;              /* [size][FATTNI_LANE_SLOTS]: posts whose `reader` is this slot of this rank */
    mailbox *boxes;          /* [size][size]: from, to */
};

typedef struct request {
    fattni_parts *receives;
    post *posts;           /* the sends */
    fattn_tensor *tensors; /* of both */
    int n_receives, n_posts;
    bool received, copied; /* the copies are enqueued, if there are any; there are */
} request;

typedef struct rank_state {
    fattn_world *world;
    const fattni_lane_ops *ops;
    fattni_lane lane;
    int rank;
    double time_limit;
    request requests[FATTNI_LANE_SLOTS];
    int64_t started, finished;
} rank_state;

/* ---- the world ---- */

fattn_status fattn_world_create(int ranks, fattn_world **out) {
    if (!out) return FATTN_E_ARG;
    *out = NULL;
    if (ranks < 1 || ranks > MOST_RANKS) return FATTN_E_ARG;
    const size_t n = (size_t)ranks;
    fattn_world *const w = calloc(1, sizeof *w);
    if (!w) return FATTN_E_NOMEM;
    w->size = ranks;
    w->joined = calloc(3 * n, sizeof *w->joined);
    w->boxes = calloc(n * n, sizeof *w->boxes);
    pthread_condattr_t clock;
    w->waits = calloc(n * (1 + FATTNI_LANE_SLOTS), sizeof *w->waits);
    bool ok = w->joined && w->boxes && w->waits && pthread_condattr_init(&clock) == 0;
    if (ok) {
        ok = pthread_condattr_setclock(&clock, CLOCK_MONOTONIC) == 0 && pthread_cond_init(&w->changed, &clock) == 0;
        pthread_condattr_destroy(&clock);
    }
    if (ok && pthread_mutex_init(&w->lock, NULL) != 0) {
        pthread_cond_destroy(&w->changed);
        ok = false;
    }
    if (!ok) {
        free(w->joined);
        free(w->boxes);
        free(w->waits);
        free(w);
        return FATTN_E_NOMEM;
    }
    w->left = w->joined + n, w->closed = w->left + n;
    w->waits_for = w->waits + n * FATTNI_LANE_SLOTS;
    for (int p = 0; p < ranks; ++p) w->waits_for[p] = -1;
    *out = w;
    return FATTN_OK;
}

void fattn_world_destroy(fattn_world *w) {
    if (!w) return;
    pthread_mutex_destroy(&w->lock);
    pthread_cond_destroy(&w->changed);
    free(w->joined);
    free(w->boxes);
    free(w->waits);
    free(w);
}

static mailbox *box_of(fattn_world *w, int from, int to) { return &w->boxes[from * w->size + to]; }
static int *waits_of(fattn_world *w, int rank, int slot) { return &w->waits[rank * FATTNI_LANE_SLOTS + slot]; }

static struct timespec deadline(double seconds) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    const double most = 1e9, whole = seconds < most ? seconds : most;
    t.tv_sec += (time_t)whole;
    t.tv_nsec += (long)(1e9 * (whole - (double)(time_t)whole));
    if (t.tv_nsec >= 1000000000) t.tv_nsec -= 1000000000, t.tv_sec += 1;
    return t;
}

/* Under the lock. The first failure is the one that is told. */
static void fail_world(fattn_world *w, const char *format, ...) FATTN_PRINTF(2, 3);
static void fail_world(fattn_world *w, const char *format, ...) {
    if (w->failure[0]) return;
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(w->failure, sizeof w->failure, format, arguments);
    va_end(arguments);
    pthread_cond_broadcast(&w->changed);
}

/* Unlocks, and returns the world's failure as this rank's. */
static fattn_status failed(rank_state *r, fattn_ctx *ctx) {
    char text[TEXT];
    memcpy(text, r->world->failure, sizeof text);
    pthread_mutex_unlock(&r->world->lock);
    return fattn_ctx_fail(ctx, FATTN_E_COMM, "%s", text);
}

/* Under the lock. A rank that waits itself is not to blame, but the one that it waits for, whoever's time ends first;
   unless they wait in a circle. */
static void blame(rank_state *r, int peer) {
    fattn_world *const w = r->world;
    int blamed = peer, waiting = r->rank, n = 0;
    for (; n < w->size && w->waits_for[blamed] >= 0; ++n) waiting = blamed, blamed = w->waits_for[blamed];
    if (n == w->size) blamed = peer, waiting = r->rank;
    fail_world(w, "rank %d %s within %g s, rank %d waits for it", blamed,
               w->joined[blamed] ? "does not answer" : "has not joined", r->time_limit, waiting);
}

/* Under the lock: waits for a change, at most until `end`; false when the world has failed, which a rank that has left
   or does not answer makes it. */
static bool wait_for(rank_state *r, int peer, const struct timespec *end) {
    fattn_world *const w = r->world;
    if (!w->failure[0] && w->left[peer]) fail_world(w, "rank %d has left, rank %d waits for it", peer, r->rank);
    w->waits_for[r->rank] = peer;
    if (!w->failure[0] && pthread_cond_timedwait(&w->changed, &w->lock, end) == ETIMEDOUT) blame(r, peer);
    w->waits_for[r->rank] = -1;
    return !w->failure[0];
}

/* ---- the transport ---- */

/* Under the lock, so that the reader's lane stays: what is enqueued from now on runs after the reader's copies, unless
   it `will` run after later ones of that reader, and the sender needs nothing more of it. A lane that is closed has
   none that still run. */
static fattn_status follow_reader(rank_state *r, post *p, bool will) {
    fattn_world *const w = r->world;
    const fattni_lane *const reader = p->reader;
    p->reader = NULL;
    if (!reader || w->closed[p->peer]) return FATTN_OK;
    int *const waits = waits_of(w, p->peer, p->reader_slot);
    if (--*waits == 0) pthread_cond_broadcast(&w->changed);
    return will ? FATTN_OK : r->ops->follow(&r->lane, reader, p->reader_slot);
}

/* Under the lock, the world has failed or all posts are done: what the request has sent may be freed on the context's
   stream. After a failure no post is taken any more; one that has been taken is marked as soon as its copy ends. */
static void settle(rank_state *r, request *q) {
    for (int n = 0; n < q->n_posts; ++n) {
        while (q->posts[n].state == TAKEN) pthread_cond_wait(&r->world->changed, &r->world->lock);
        (void)follow_reader(r, &q->posts[n], false); /* of a failure the first error is told */
    }
}

/* The caller may then free what it has sent. */
static void abort_world(void *state, const char *text) {
    rank_state *const r = state;
    fattn_world *const w = r->world;
    pthread_mutex_lock(&w->lock);
    fail_world(w, "rank %d: %s", r->rank, text);
    for (int n = 0; n < FATTNI_LANE_SLOTS; ++n) settle(r, &r->requests[n]);
    pthread_mutex_unlock(&w->lock);
}

static void free_request(request *q) {
    free(q->receives);
    free(q->posts);
    free(q->tensors);
    *q = (request){NULL};
}

/* The request's memory and buffers are no longer used by others. */
static void close_request(rank_state *r, request *q) {
    pthread_mutex_lock(&r->world->lock);
    settle(r, q);
    pthread_mutex_unlock(&r->world->lock);
    free_request(q);
}

static int slot_of(const rank_state *r, const request *q) { return (int)(q - r->requests); }

static size_t tensors_of(const fattni_parts *p, int n) {
    size_t count = 0;
    for (int i = 0; i < n; ++i) count += (size_t)p[i].n;
    return count;
}

/* The same parts, with the tensors at *at, which moves on. */
static fattni_parts keep(const fattni_parts *p, fattn_tensor **at) {
    const fattni_parts kept = {.t = *at, .n = p->n, .peer = p->peer, .exposed = p->exposed};
    memcpy(*at, p->t, (size_t)p->n * sizeof *p->t);
    *at += p->n;
    return kept;
}

static fattn_status open_request(fattn_ctx *ctx, request *q, const rank_state *r, int slot, const fattni_parts *sends,
                                 int n_sends, const fattni_parts *receives, int n_receives) {
    *q = (request){.posts = calloc((size_t)n_sends + 1, sizeof *q->posts),
                   .receives = calloc((size_t)n_receives + 1, sizeof *q->receives),
                   .tensors =
                       calloc(tensors_of(sends, n_sends) + tensors_of(receives, n_receives) + 1, sizeof *q->tensors)};
    if (!q->posts || !q->receives || !q->tensors) {
        free_request(q);
        return fattn_ctx_fail(ctx, FATTN_E_NOMEM, "no memory for %d messages", n_sends + n_receives);
    }
    fattn_tensor *at = q->tensors;
    q->n_posts = n_sends;
    q->n_receives = n_receives;
    for (int n = 0; n < n_sends; ++n)
        q->posts[n] = (post){.parts = keep(&sends[n], &at), .peer = sends[n].peer, .slot = slot, .lane = &r->lane};
    for (int n = 0; n < n_receives; ++n) q->receives[n] = keep(&receives[n], &at);
    return FATTN_OK;
}

/* Until the senders have enqueued their waits for the slot's last copies, its event must not be recorded anew. */
static fattn_status reuse_slot(rank_state *r, fattn_ctx *ctx, int slot) {
    fattn_world *const w = r->world;
    const int *const waits = waits_of(w, r->rank, slot);
    const struct timespec end = deadline(r->time_limit);
    pthread_mutex_lock(&w->lock);
    while (*waits > 0 && !w->failure[0])
        if (pthread_cond_timedwait(&w->changed, &w->lock, &end) == ETIMEDOUT)
            fail_world(w, "a rank that rank %d has received from does not answer within %g s", r->rank, r->time_limit);
    if (w->failure[0]) return failed(r, ctx);
    pthread_mutex_unlock(&w->lock);
    return FATTN_OK;
}

static fattn_status start_parts(void *state, fattn_ctx *ctx, const fattni_parts *sends, int n_sends,
                                const fattni_parts *receives, int n_receives, void **out) {
    rank_state *const r = state;
    fattn_world *const w = r->world;
    if (r->started - r->finished == FATTNI_LANE_SLOTS)
        return fattn_ctx_fail(ctx, FATTN_E_STATE, "%d exchanges are open, no more are possible", FATTNI_LANE_SLOTS);
    const int slot = (int)(r->started % FATTNI_LANE_SLOTS);
    request *const q = &r->requests[slot];
    FATTNI_TRY(reuse_slot(r, ctx, slot));
    FATTNI_TRY(r->ops->begin(&r->lane, slot));
    FATTNI_TRY(open_request(ctx, q, r, slot, sends, n_sends, receives, n_receives));
    pthread_mutex_lock(&w->lock);
    for (int n = 0; n < n_sends; ++n) {
        mailbox *const box = box_of(w, r->rank, sends[n].peer);
        box->posts[box->sent++ % FATTNI_LANE_SLOTS] = &q->posts[n]; /* one per exchange: there is room */
    }
    pthread_cond_broadcast(&w->changed);
    pthread_mutex_unlock(&w->lock);
    r->started += 1;
    *out = q;
    return FATTN_OK;
}

/* A message is a row of bytes. */
static void as_parts(const fattn_ctx *ctx, const fattn_message *m, int n, fattn_tensor *t, fattni_parts *out) {
    for (int i = 0; i < n; ++i) {
        const int64_t bytes = (int64_t)m[i].bytes;
        t[i] = fattn_tensor_view(m[i].data, FATTN_U8, ctx->device, ctx->device_id, 1, &bytes);
        out[i] = (fattni_parts){.t = &t[i], .n = 1, .peer = m[i].peer};
    }
}

static fattn_status start(void *state, fattn_ctx *ctx, const fattn_message *sends, int n_sends,
                          const fattn_message *receives, int n_receives, void **out) {
    const size_t n = (size_t)(n_sends + n_receives) + 1;
    fattn_tensor *const t = calloc(n, sizeof *t);
    fattni_parts *const parts = calloc(n, sizeof *parts);
    fattn_status s;
    if (t && parts) {
        as_parts(ctx, sends, n_sends, t, parts);
        as_parts(ctx, receives, n_receives, t + n_sends, parts + n_sends);
        s = start_parts(state, ctx, parts, n_sends, parts + n_sends, n_receives, out);
    } else {
        s = fattn_ctx_fail(ctx, FATTN_E_NOMEM, "no memory for %d messages", n_sends + n_receives);
    }
    free(t);
    free(parts);
    return s;
}

static size_t bytes_of(const fattni_parts *p) {
    size_t bytes = 0;
    for (int i = 0; i < p->n; ++i)
        bytes += (size_t)fattn_tensor_numel(&p->t[i]) * fattn_dtype_size((fattn_dtype)p->t[i].dtype);
    return bytes;
}

static bool fit(const fattni_parts *a, const fattni_parts *b) {
    bool same = a->n == b->n;
    for (int i = 0; i < a->n && same; ++i) {
        same = a->t[i].ndim == b->t[i].ndim && a->t[i].dtype == b->t[i].dtype;
        for (int k = 0; k < a->t[i].ndim && same; ++k) same = a->t[i].shape[k] == b->t[i].shape[k];
    }
    return same;
}

/* Under the lock: false if the peer sends something else, which the world fails with. */
static bool check_post(rank_state *r, const post *p, const fattni_parts *m) {
    const size_t sent = bytes_of(&p->parts), expected = bytes_of(m);
    if (sent != expected)
        fail_world(r->world, "rank %d sends %zu bytes where rank %d expects %zu: their shapes or dtypes differ",
                   m->peer, sent, r->rank, expected);
    else if (!fit(&p->parts, m))
        fail_world(r->world, "rank %d sends %zu bytes as rank %d expects, but their shapes or dtypes differ", m->peer,
                   sent, r->rank);
    return !r->world->failure[0];
}

/* Waits for the peer's post and copies it. */
static fattn_status receive(rank_state *r, fattn_ctx *ctx, int slot, const fattni_parts *m, const struct timespec *end,
                            post **taken) {
    fattn_world *const w = r->world;
    mailbox *const box = box_of(w, m->peer, r->rank);
    pthread_mutex_lock(&w->lock);
    while (box->sent == box->taken && wait_for(r, m->peer, end)) {}
    if (w->failure[0]) return failed(r, ctx);
    post *const p = box->posts[box->taken % FATTNI_LANE_SLOTS];
    if (!check_post(r, p, m)) return failed(r, ctx);
    box->taken += 1;
    p->state = TAKEN;
    *taken = p;
    pthread_mutex_unlock(&w->lock);
    FATTNI_TRY(r->ops->await(&r->lane, slot, p->lane, p->slot));
    return r->ops->copy(&r->lane, m->t, p->lane, p->parts.t, m->n, m->exposed);
}

/* Once, and the device's stream does not wait. */
static fattn_status receive_all(rank_state *r, fattn_ctx *ctx, request *q, const struct timespec *end) {
    const int slot = slot_of(r, q);
    fattn_world *const w = r->world;
    if (q->n_receives == 0 || q->received) return FATTN_OK;
    q->received = true;
    post **const taken = calloc((size_t)q->n_receives, sizeof(post *));
    if (!taken) return fattn_ctx_fail(ctx, FATTN_E_NOMEM, "no memory for %d messages", q->n_receives);
    fattn_status s = FATTN_OK;
    for (int n = 0; n < q->n_receives && !s; ++n) s = receive(r, ctx, slot, &q->receives[n], end, &taken[n]);
    /* Copies that are enqueued must end before this rank frees their targets, and the senders what was copied. */
    const fattn_status ended = taken[0] ? r->ops->end(&r->lane, slot) : FATTN_OK;
    q->copied = taken[0] && !ended;
    if (!s) s = ended;
    pthread_mutex_lock(&w->lock);
    for (int n = 0; n < q->n_receives && taken[n]; ++n) {
        if (q->copied) {
            taken[n]->reader = &r->lane;
            taken[n]->reader_slot = slot;
            *waits_of(w, r->rank, slot) += 1;
        }
        taken[n]->state = DONE;
    }
    pthread_cond_broadcast(&w->changed);
    pthread_mutex_unlock(&w->lock);
    free(taken);
    return s;
}

/* What is enqueued from now on runs after the copies so far, also where a later one has failed. */
static fattn_status follow_own(rank_state *r, const request *last, fattn_status s) {
    const fattn_status followed = last ? r->ops->follow(&r->lane, &r->lane, slot_of(r, last)) : FATTN_OK;
    return s ? s : followed;
}

static fattn_status receive_early(void *state, fattn_ctx *ctx, void *opened, bool waits) {
    rank_state *const r = state;
    request *const q = opened;
    const struct timespec end = deadline(r->time_limit);
    const fattn_status s = receive_all(r, ctx, q, &end);
    return follow_own(r, q->copied && (waits || s) ? q : NULL, s);
}

/* Waits until the peer has copied the post. */
static fattn_status wait_until_done(rank_state *r, fattn_ctx *ctx, const post *p, const struct timespec *end) {
    fattn_world *const w = r->world;
    pthread_mutex_lock(&w->lock);
    while (p->state != DONE && wait_for(r, p->peer, end)) {}
    if (w->failure[0]) return failed(r, ctx);
    pthread_mutex_unlock(&w->lock);
    return FATTN_OK;
}

/* Of two posts for one reader, which copies in the order of its requests, the later one's copies are the last. */
static bool posts_to(const request *q, int peer) {
    for (int n = 0; n < q->n_posts; ++n)
        if (q->posts[n].peer == peer) return true;
    return false;
}

static fattn_status follow_readers(rank_state *r, void *const *opened, int n) {
    fattn_status s = FATTN_OK;
    pthread_mutex_lock(&r->world->lock);
    for (int i = 0; i < n; ++i) {
        request *const q = opened[i];
        for (int k = 0; k < q->n_posts; ++k) {
            bool will = q->posts[k].peer == r->rank; /* follow_own has */
            for (int later = i + 1; later < n && !will; ++later) will = posts_to(opened[later], q->posts[k].peer);
            const fattn_status followed = follow_reader(r, &q->posts[k], will);
            if (!s) s = followed;
        }
    }
    pthread_mutex_unlock(&r->world->lock);
    return s;
}

static fattn_status finish_parts(void *state, fattn_ctx *ctx, void *const *opened, int n) {
    rank_state *const r = state;
    const struct timespec end = deadline(r->time_limit);
    const request *last = NULL;
    fattn_status s = FATTN_OK;
    for (int i = 0; i < n && !s; ++i) {
        request *const q = opened[i];
        s = receive_all(r, ctx, q, &end);
        if (q->copied) last = q;
    }
    s = follow_own(r, last, s);
    for (int i = 0; i < n && !s; ++i) {
        const request *const q = opened[i];
        for (int k = 0; k < q->n_posts && !s; ++k) s = wait_until_done(r, ctx, &q->posts[k], &end);
    }
    if (!s) s = follow_readers(r, opened, n);
    if (s) abort_world(r, fattn_ctx_error(ctx)); /* so that no post of these requests is taken from now on */
    for (int i = 0; i < n; ++i) close_request(r, opened[i]);
    r->finished += n;
    return s;
}

static fattn_status finish(void *state, fattn_ctx *ctx, void *opened) { return finish_parts(state, ctx, &opened, 1); }

static void close_rank(void *state, fattn_ctx *ctx) {
    rank_state *const r = state;
    fattn_world *const w = r->world;
    const struct timespec end = deadline(r->time_limit);
    if (r->started != r->finished) abort_world(r, "has left with open exchanges");
    for (int n = 0; n < FATTNI_LANE_SLOTS; ++n) close_request(r, &r->requests[n]);
    pthread_mutex_lock(&w->lock);
    w->left[r->rank] = true;
    pthread_cond_broadcast(&w->changed);
    int status = 0;
    for (int n = 0; n < FATTNI_LANE_SLOTS; ++n)
        while (*waits_of(w, r->rank, n) > 0 && !w->failure[0] && status != ETIMEDOUT)
            status = pthread_cond_timedwait(&w->changed, &w->lock, &end);
    w->closed[r->rank] = true; /* senders that come later need not wait: fattn_comm_destroy asks for ended copies */
    pthread_mutex_unlock(&w->lock);
    r->ops->close(&r->lane);
    fattni_host_free(ctx, r, sizeof *r);
}

static fattn_status join(fattn_world *w, fattn_ctx *ctx, int rank) {
    fattn_status s = FATTN_OK;
    pthread_mutex_lock(&w->lock);
    if (w->failure[0])
        s = fattn_ctx_fail(ctx, FATTN_E_COMM, "%s", w->failure);
    else if (w->joined[rank])
        s = fattn_ctx_fail(ctx, FATTN_E_STATE, "rank %d has joined this world before", rank);
    else if (w->joined_device && w->joined_device != (int)ctx->device)
        s = fattn_ctx_fail(ctx, FATTN_E_DEVICE, "rank %d is on device %d, the ranks before it are on %d", rank,
                           (int)ctx->device, w->joined_device);
    if (!s) {
        w->joined[rank] = true;
        w->joined_device = (int)ctx->device;
        pthread_cond_broadcast(&w->changed);
    }
    pthread_mutex_unlock(&w->lock);
    return s;
}

static const fattni_parts_transport parts_transport = {
    .start = start_parts, .receive = receive_early, .finish = finish_parts};

fattn_status fattn_comm_join(fattn_ctx *ctx, fattn_world *w, int rank, const fattn_comm_options *opt,
                             fattn_comm **out) {
    if (out) *out = NULL;
    if (!ctx) return FATTN_E_ARG;
    if (!out) return fattn_ctx_fail(ctx, FATTN_E_ARG, "comm: out is NULL");
    if (!w) return fattn_ctx_fail(ctx, FATTN_E_ARG, "world: NULL");
    if (rank < 0 || rank >= w->size)
        return fattn_ctx_fail(ctx, FATTN_E_ARG, "rank: %d is not in 0..%d", rank, w->size - 1);
    double time_limit;
    FATTNI_TRY(fattn_comm_time_limit(ctx, opt, &time_limit));
    if (ctx->flags & FATTN_CTX_PLAN_ONLY) return fattn_ctx_fail(ctx, FATTN_E_STATE, "comm: the context only plans");
    void *p;
    FATTNI_TRY(fattni_host_alloc(ctx, sizeof(rank_state), &p));
    rank_state *const r = p;
    *r = (rank_state){.world = w,
                      .ops = fattni_lane_ops_of(ctx->device),
                      .lane = {.ctx = ctx},
                      .rank = rank,
                      .time_limit = time_limit};
    fattn_status s = r->ops->open(&r->lane);
    if (!s) s = join(w, ctx, rank);
    if (s) {
        r->ops->close(&r->lane);
        fattni_host_free(ctx, r, sizeof *r);
        return s;
    }
    const fattn_transport t = {.struct_size = sizeof t,
                               .rank = rank,
                               .size = w->size,
                               .devices = 1u << FATTN_CPU | 1u << FATTN_CUDA,
                               .name = "threads",
                               .state = r,
                               .start = start,
                               .finish = finish,
                               .abort = abort_world,
                               .close = close_rank};
    s = fattn_comm_create(ctx, &t, out);
    if (s)
        close_rank(r, ctx);
    else
        (*out)->parts = &parts_transport, (*out)->linked = r->ops->linked(&r->lane);
    return s;
}
