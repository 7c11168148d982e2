/* Sums of gradients over the ranks. A bucket goes through two exchanges: each rank gets its part of all ranks'
   gradients and adds them; then all get the sums, unless these stay with their owners. Exchanges are finished in the
   order of their starts, LAG buckets later, so that a GPU computes meanwhile.

   Gradients that are set aside form a binary counter: aside[l] is the sum of 2^l batches if bit l of `batches` is
   set. */
#include "autograd_c/parallel/reducer.h"
#include "autograd_c/tape/tape_nodes.h"
#include "core/base/device.h"
#include "core/comm/comm.h"

#include <string.h>

enum { LEVELS = 40 };                             /* of batches that are set aside */
enum { LAG = 2, PARTS = LAG + 1, MOST_OPEN = 8 }; /* sums: LAG + 1 buckets, gathers: as many, and one at its start */
enum { ALIGNED = 32 }; /* elements: parts of a bucket begin at multiples, for wide accesses */
static const int64_t BUCKET_BYTES = 64000000;

typedef struct slot {
    fattn_param *param;
    const void *grad, *value; /* where they were at creation */
    int64_t count, offset;    /* elements; the first one's place in the bucket */
    int bucket;               /* -1: frozen, or without elements */
    int uses;                 /* in the graph, whose backward has not run */
} slot;

/* Slots first..last, one behind the other in memory. */
typedef struct bucket {
    int first, last;
    fattn_dtype dtype;
    int64_t count;   /* elements */
    int64_t *begins; /* [size + 1]: rank q's part begins at begins[q] */
    size_t aside;    /* where the bucket begins in a level, bytes */
    int waiting;     /* slots with uses */
} bucket;

typedef struct exchange {
    void *request;
    int bucket;
    bool adds; /* it brings the parts of a sum */
} exchange;

struct fattn_reducer {
    fattn_ctx *ctx;
    fattn_comm *comm;
    int rank, size;
    bool to_owners;
    slot *slots;
    bucket *buckets;
    int n, n_buckets;
    int n_prompt; /* buckets before those of the late params */
    int n_held;   /* the first of these: none starts before all are complete */
    int found;    /* the slot that was looked up last */
    int64_t *begins;
    fattn_message *messages; /* [2 size] */
    void **terms;            /* [size], of a sum */
    void *parts[PARTS];
    size_t parts_bytes[PARTS];
    void *aside[LEVELS];
    size_t aside_bytes; /* of a level: 16-byte aligned buckets */
    int64_t batches;    /* set aside in this step */
    exchange open[MOST_OPEN];
    int64_t opened, fetched, closed; /* exchanges, of all time; fetched: whose copies are enqueued */
    int started, added;              /* buckets of this pass */
    bool passed;                     /* there is a pass that has not been finished */
};

/* ---- shares ---- */

static int64_t pieces_of(const slot *s) { return fattni_ceil_div(s->count, FATTNI_SHARE_ELEMENTS); }

/* The element at which piece number `piece` of the bucket begins. Every parameter begins a piece. */
static int64_t element_of(const fattn_reducer *r, const bucket *b, int64_t piece) {
    for (int i = b->first; i <= b->last; piece -= pieces_of(&r->slots[i++]))
        if (piece < pieces_of(&r->slots[i])) return r->slots[i].offset + piece * FATTNI_SHARE_ELEMENTS;
    return b->count;
}

static void divide(fattn_reducer *r, bucket *b) {
    int64_t pieces = 0;
    for (int i = b->first; i <= b->last; ++i) pieces += pieces_of(&r->slots[i]);
    const int64_t part = fattni_round_up(fattni_ceil_div(b->count, r->size), ALIGNED);
    for (int q = 0; q <= r->size; ++q)
        b->begins[q] = r->to_owners ? element_of(r, b, pieces * q / r->size) : fattni_min(b->count, part * q);
}

/* Rank q's elements of the slot. */
static void share_of(const fattn_reducer *r, const slot *s, int q, int64_t *begin, int64_t *end) {
    *begin = 0, *end = s->bucket < 0 || !r->to_owners ? s->count : 0;
    if (s->bucket < 0 || !r->to_owners) return;
    const int64_t *const begins = r->buckets[s->bucket].begins;
    *begin = fattni_min(s->count, fattni_max(0, begins[q] - s->offset));
    *end = fattni_min(s->count, fattni_max(0, begins[q + 1] - s->offset));
}

/* ---- creation ---- */

static char *behind(const fattn_tensor *t) {
    return (char *)t->data + (size_t)fattn_tensor_numel(t) * fattn_dtype_size((fattn_dtype)t->dtype);
}

static bool follows(const fattn_tensor *a, const fattn_tensor *b) {
    return a->dtype == b->dtype && behind(a) == (char *)b->data;
}

static bool is_skipped(const fattn_param *p) {
    return p->flags & FATTN_PARAM_FROZEN || fattn_tensor_numel(&p->value) == 0;
}

/* joined[i]: params i and i + 1 may share a bucket here. */
static void find_joins(const fattn_reducer *r, double *joined) {
    for (int i = 0; i < r->n; ++i) {
        const fattn_param *const p = r->slots[i].param, *const q = i + 1 < r->n ? r->slots[i + 1].param : NULL;
        joined[i] = q && !is_skipped(p) && !is_skipped(q) && follows(&p->grad, &q->grad) &&
                    (!r->to_owners || follows(&p->value, &q->value));
    }
}

/* What is joined on every rank: allocators may place tensors differently. */
static fattn_status agree_on_joins(fattn_reducer *r, double *joined) {
    const int64_t n = r->n;
    const fattn_tensor host = fattn_tensor_view(joined, FATTN_F64, FATTN_CPU, 0, 1, &n);
    fattn_tensor sum;
    FATTNI_TRY(fattn_tensor_alloc(r->ctx, FATTN_F64, 1, &n, &sum));
    fattn_status s = fattn_tensor_copy(r->ctx, &sum, &host);
    if (!s) s = fattn_comm_all_reduce(r->comm, &sum);
    if (!s) s = fattn_tensor_copy(r->ctx, &host, &sum);
    fattn_tensor_free(r->ctx, &sum);
    for (int i = 0; i < r->n; ++i) joined[i] = joined[i] == r->size;
    return s;
}

static int64_t bytes_of(const bucket *b) { return b->count * (int64_t)fattn_dtype_size(b->dtype); }

/* From the last param to the first. */
static void make_buckets(fattn_reducer *r, const double *joined, int64_t most, int late) {
    int64_t bytes = 0;
    for (int i = r->n - 1; i >= 0; --i) {
        slot *const s = &r->slots[i];
        if (is_skipped(s->param)) continue;
        const fattn_dtype dtype = (fattn_dtype)s->param->grad.dtype;
        const int64_t more = s->count * (int64_t)fattn_dtype_size(dtype);
        if (joined[i] == 0 || i + 1 == late || (i >= late && bytes + more > most)) {
            r->buckets[r->n_buckets++] = (bucket){.last = i, .dtype = dtype};
            bytes = 0;
        }
        bytes += more;
        s->bucket = r->n_buckets - 1;
        if (i >= late) r->n_prompt = r->n_buckets;
        r->buckets[s->bucket].first = i;
    }
    for (int k = 0; k < r->n_buckets; ++k) {
        bucket *const b = &r->buckets[k];
        b->begins = r->begins + (int64_t)k * (r->size + 1);
        for (int i = b->first; i <= b->last; ++i) {
            r->slots[i].offset = b->count;
            b->count += r->slots[i].count;
        }
        b->aside = r->aside_bytes;
        r->aside_bytes += ((size_t)bytes_of(b) + 15) / 16 * 16;
        divide(r, b);
    }
}

/* So many of the first prompt buckets as have at most `percent` of their bytes. */
static int count_held(const fattn_reducer *r, int64_t percent) {
    int64_t all = 0, bytes = 0;
    int n = 0;
    for (int k = 0; k < r->n_prompt; ++k) all += bytes_of(&r->buckets[k]);
    for (; n < r->n_prompt; ++n) {
        bytes += bytes_of(&r->buckets[n]);
        if (100 * bytes > percent * all) break;
    }
    return n;
}

static fattn_status check_params(fattn_reducer *r, fattn_param *const *params) {
    for (int i = 0; i < r->n; ++i) {
        FATTNI_TRY(fattni_check_param(r->ctx, params[i]));
        for (int j = 0; j < i; ++j)
            if (params[j] == params[i] ||
                (!is_skipped(params[i]) && !is_skipped(params[j]) && params[j]->grad.data == params[i]->grad.data))
                return fattn_ctx_fail(r->ctx, FATTN_E_ARG,
                                      "reducer: params[%d] and params[%d] are the same, or have one gradient", j, i);
        r->slots[i] = (slot){.param = params[i],
                             .grad = is_skipped(params[i]) ? NULL : params[i]->grad.data,
                             .value = params[i]->value.data,
                             .count = fattn_tensor_numel(&params[i]->value),
                             .bucket = -1};
    }
    return FATTN_OK;
}

/* A number that differs when the counts, dtypes or flags of the params differ, with few exceptions. */
static int64_t digest_of(const fattn_reducer *r) {
    uint64_t h = 0;
    for (int i = 0; i < r->n; ++i) {
        const fattn_param *const p = r->slots[i].param;
        const uint64_t kind = is_skipped(p) ? 0 : (uint64_t)(8 * p->grad.dtype + p->value.dtype);
        h = (h + (uint64_t)r->slots[i].count * 64 + kind) * UINT64_C(0x9e3779b97f4a7c15);
    }
    return (int64_t)(h >> 1);
}

static fattn_status fill(fattn_reducer *r, fattn_param *const *params, const fattn_reducer_options *o) {
    static const char *const names[] = {
        "the reducer's number of params",   "the reducer's flags",
        "the reducer's bucket_bytes",       "the reducer's late",
        "the reducer's number of elements", "the digest of sizes, dtypes and flags of the reducer's params"};
    const size_t n = (size_t)r->n;
    const int64_t bucket_bytes = o->bucket_bytes > 0 ? o->bucket_bytes : BUCKET_BYTES;
    int64_t hold, elements = 0;
    FATTNI_TRY(fattni_host_alloc(r->ctx, (n + 1) * sizeof *r->slots, (void **)&r->slots));
    FATTNI_TRY(fattni_host_alloc(r->ctx, (n + 1) * sizeof *r->buckets, (void **)&r->buckets));
    FATTNI_TRY(fattni_host_alloc(r->ctx, (n + 1) * (size_t)(r->size + 1) * sizeof *r->begins, (void **)&r->begins));
    FATTNI_TRY(fattni_host_alloc(r->ctx, 2 * (size_t)r->size * sizeof *r->messages, (void **)&r->messages));
    FATTNI_TRY(fattni_host_alloc(r->ctx, (size_t)r->size * sizeof *r->terms, (void **)&r->terms));
    FATTNI_TRY(check_params(r, params));
    for (int i = 0; i < r->n; ++i) elements += r->slots[i].count;
    const int64_t values[] = {r->n, r->to_owners, bucket_bytes, o->late, elements, digest_of(r)};
    FATTNI_TRY(fattn_comm_agree(r->comm, names, values, 6));
    FATTNI_TRY(fattni_comm_least(r->comm, o->hold, &hold));
    double *joined;
    FATTNI_TRY(fattni_host_alloc(r->ctx, (n + 1) * sizeof *joined, (void **)&joined));
    find_joins(r, joined);
    const fattn_status s = n ? agree_on_joins(r, joined) : FATTN_OK;
    if (!s) make_buckets(r, joined, bucket_bytes, o->late);
    fattni_host_free(r->ctx, joined, (n + 1) * sizeof *joined);
    FATTNI_TRY(s);
    r->n_held = count_held(r, hold);
    for (int k = 0; r->size > 1 && k < r->n_buckets; ++k) {
        const bucket *const b = &r->buckets[k];
        const size_t bytes = fattni_comm_sum_bytes(r->comm, b->dtype, b->begins[r->rank + 1] - b->begins[r->rank]);
        if (bytes > r->parts_bytes[k % PARTS]) r->parts_bytes[k % PARTS] = bytes;
    }
    for (int i = 0; i < PARTS; ++i) FATTNI_TRY(fattni_alloc(r->ctx, r->parts_bytes[i], &r->parts[i]));
    return FATTN_OK;
}

fattn_status fattn_reducer_create(fattn_ctx *ctx, fattn_comm *comm, const fattn_reducer_options *opt,
                                  fattn_param *const *params, int n, fattn_reducer **out) {
    if (!ctx) return FATTN_E_ARG;
    if (!out) return fattn_ctx_fail(ctx, FATTN_E_ARG, "reducer_create: out is NULL");
    *out = NULL;
    if (!comm || comm->ctx != ctx || n < 0 || (n && !params))
        return fattn_ctx_fail(ctx, FATTN_E_ARG,
                              "reducer_create: comm is NULL or another context's, params is NULL, or n is %d", n);
    fattn_reducer_options o = {.struct_size = sizeof o};
    if (opt) FATTNI_TRY(fattni_take_struct(ctx, "fattn_reducer_options", opt, &o, sizeof o));
    if (o.flags & ~(uint32_t)FATTN_REDUCE_TO_OWNERS || o.bucket_bytes < 0 || o.late < 0 || o.late > n || o.hold > 100)
        return fattn_ctx_fail(ctx, FATTN_E_ARG,
                              "reducer_create: unknown flags 0x%x, bucket_bytes %lld, late %d of %d params, or hold %u "
                              "of 100",
                              o.flags, (long long)o.bucket_bytes, o.late, n, o.hold);
    void *p;
    FATTNI_TRY(fattni_host_alloc(ctx, sizeof(fattn_reducer), &p));
    fattn_reducer *const r = p;
    *r = (fattn_reducer){.ctx = ctx,
                         .comm = comm,
                         .rank = comm->rank,
                         .size = comm->size,
                         .to_owners = o.flags & FATTN_REDUCE_TO_OWNERS,
                         .n = n};
    const fattn_status s = fattni_comm_end(comm, fill(r, params, &o));
    if (s) {
        fattn_reducer_destroy(r);
        return s;
    }
    *out = r;
    return FATTN_OK;
}

/* The group has ended: the transport lets go of all buffers. */
static void abandon(fattn_reducer *r) {
    while (r->closed < r->opened) (void)fattni_comm_finish(r->comm, r->open[r->closed++ % MOST_OPEN].request);
    r->fetched = r->closed;
    r->started = r->added = 0;
    r->passed = false;
    r->batches = 0;
}

void fattn_reducer_destroy(fattn_reducer *r) {
    if (!r) return;
    fattn_ctx *const ctx = r->ctx;
    if (r->closed < r->opened) fattn_comm_abort(r->comm, "its reducer was destroyed with open exchanges");
    abandon(r);
    for (int i = 0; i < PARTS; ++i) fattni_free(ctx, r->parts[i], r->parts_bytes[i]);
    for (int l = 0; l < LEVELS; ++l) fattni_free(ctx, r->aside[l], r->aside[l] ? r->aside_bytes : 0);
    fattni_host_free(ctx, r->terms, (size_t)r->size * sizeof *r->terms);
    fattni_host_free(ctx, r->messages, 2 * (size_t)r->size * sizeof *r->messages);
    fattni_host_free(ctx, r->begins, ((size_t)r->n + 1) * (size_t)(r->size + 1) * sizeof *r->begins);
    fattni_host_free(ctx, r->buckets, ((size_t)r->n + 1) * sizeof *r->buckets);
    fattni_host_free(ctx, r->slots, ((size_t)r->n + 1) * sizeof *r->slots);
    fattni_host_free(ctx, r, sizeof *r);
}

static char *grads_of(const fattn_reducer *r, const bucket *b) { return r->slots[b->first].param->grad.data; }

/* ---- checks ---- */

static fattn_status check_slots(const fattn_reducer *r) {
    for (int i = 0; i < r->n; ++i) {
        const slot *const s = &r->slots[i];
        const fattn_param *const p = s->param;
        const bool frozen = is_skipped(p), was_frozen = s->bucket < 0;
        if (frozen != was_frozen || fattn_tensor_numel(&p->value) != s->count || p->value.data != s->value ||
            (!frozen && p->grad.data != s->grad))
            return fattn_ctx_fail(r->ctx, FATTN_E_STATE,
                                  "reducer: since its creation params[%d] has been frozen or thawed, or its value or "
                                  "gradient have moved",
                                  i);
    }
    return FATTN_OK;
}

fattn_status fattni_reducer_check_idle(const fattn_reducer *r, const char *who) {
    if (!r->passed) return FATTN_OK;
    return fattn_ctx_fail(r->ctx, FATTN_E_STATE, "%s: the backward pass before has no fattn_reducer_finish", who);
}

/* ---- batches before the last ---- */

static fattn_tensor bucket_at(const fattn_reducer *r, const bucket *b, void *data) {
    return fattn_tensor_view(data, b->dtype, r->ctx->device, r->ctx->device_id, 1, &b->count);
}

/* Adds the levels below `below` to the bucket's gradients: the lowest first, as a tree of neighbours does. */
static fattn_status add_aside(const fattn_reducer *r, const bucket *b, int below) {
    const fattn_tensor sum = bucket_at(r, b, grads_of(r, b));
    for (int l = 0; l < below; ++l) {
        if (!(r->batches >> l & 1)) continue;
        const fattn_tensor more = bucket_at(r, b, (char *)r->aside[l] + b->aside);
        FATTNI_TRY(fattn_tensor_add(r->ctx, &sum, &more));
    }
    return FATTN_OK;
}

static fattn_status set_aside(fattn_reducer *r) {
    int level = 0;
    FATTNI_TRY(fattni_reducer_check_idle(r, "reducer_set_aside"));
    FATTNI_TRY(check_slots(r));
    while (r->batches >> level & 1) ++level;
    if (level == LEVELS) return fattn_ctx_fail(r->ctx, FATTN_E_ARG, "reducer_set_aside: 2^%d batches a step", LEVELS);
    for (int k = 0; k < r->n_buckets; ++k)
        if (fattn_dtype_size(r->buckets[k].dtype) == 2)
            return fattn_ctx_fail(r->ctx, FATTN_E_DTYPE, "reducer_set_aside: the gradient of params[%d] is in %s",
                                  r->buckets[k].first, fattn_dtype_name(r->buckets[k].dtype));
    if (!r->aside[level]) FATTNI_TRY(fattni_alloc(r->ctx, r->aside_bytes, &r->aside[level]));
    for (int k = 0; k < r->n_buckets; ++k) {
        const bucket *const b = &r->buckets[k];
        const size_t bytes = (size_t)bytes_of(b);
        const fattn_tensor from = bucket_at(r, b, grads_of(r, b));
        const fattn_tensor to = bucket_at(r, b, (char *)r->aside[level] + b->aside);
        FATTNI_TRY(add_aside(r, b, level));
        FATTNI_TRY(fattn_tensor_copy(r->ctx, &to, &from));
        FATTNI_TRY(r->ctx->ops->zero_rows(r->ctx, grads_of(r, b), bytes, bytes, 1));
    }
    r->batches += 1;
    return FATTN_OK;
}

/* ---- exchanges ---- */

static fattn_message message(void *data, int64_t begin, int64_t end, size_t size, int peer) {
    return (fattn_message){
        .data = (char *)data + (size_t)begin * size, .bytes = (size_t)(end - begin) * size, .peer = peer};
}

/* Where receivers copy, they do not wait until they finish. */
static fattn_status fetch(fattn_reducer *r, int64_t past) {
    for (; r->comm->parts && r->fetched < past; ++r->fetched)
        FATTNI_TRY(fattni_comm_receive(r->comm, r->open[r->fetched % MOST_OPEN].request, false));
    return FATTN_OK;
}

/* The exchange before is fetched: its peers' threads have begun it by now, or almost. */
static fattn_status start(fattn_reducer *r, int bucket_number, bool adds) {
    exchange *const e = &r->open[r->opened % MOST_OPEN];
    *e = (exchange){.bucket = bucket_number, .adds = adds};
    FATTNI_TRY(fattni_comm_start(r->comm, r->messages, r->size, r->messages + r->size, r->size, &e->request));
    r->opened += 1;
    return fetch(r, r->opened - 1);
}

static bool is_narrow(const bucket *b) { return fattn_dtype_size(b->dtype) == 2; }

/* All ranks' gradients from begins[q] on go to rank q: rank p's to parts[p]. The own ones stay where they are, but for
   those in 16 bits, which are all converted there. */
static fattn_status start_sum(fattn_reducer *r, int number) {
    const bucket *const b = &r->buckets[number];
    const size_t size = fattn_dtype_size(b->dtype);
    const int64_t own = b->begins[r->rank + 1] - b->begins[r->rank];
    for (int q = 0; q < r->size; ++q) {
        r->messages[q] = message(grads_of(r, b), b->begins[q], b->begins[q + 1], size, q);
        r->messages[r->size + q] = message(r->parts[number % PARTS], q * own, (q + 1) * own, size, q);
    }
    if (!is_narrow(b)) r->messages[r->rank].bytes = r->messages[r->size + r->rank].bytes = 0;
    return start(r, number, true);
}

/* The order of fattn/comm.h. A pair's sum is stored in the place of the own gradients, if they are in it: in the end
   all are there. */
static fattn_status add_parts(fattn_reducer *r, int number, void *sum) {
    const bucket *const b = &r->buckets[number];
    const int64_t own = b->begins[r->rank + 1] - b->begins[r->rank];
    const size_t bytes = (size_t)own * fattn_dtype_size(b->dtype);
    void *const parts = r->parts[number % PARTS];
    if (is_narrow(b)) return fattni_comm_add(r->comm, parts, b->dtype, own, sum);
    for (int q = 0; q < r->size; ++q) r->terms[q] = q == r->rank ? sum : (char *)parts + (size_t)q * bytes;
    for (int step = 1; step < r->size; step *= 2)
        for (int q = 0; q + step < r->size; q += 2 * step) {
            const bool into_second = r->terms[q + step] == sum;
            const fattn_device device = r->ctx->device;
            const fattn_tensor t[2] = {
                fattn_tensor_view(r->terms[q], b->dtype, device, r->ctx->device_id, 1, &own),
                fattn_tensor_view(r->terms[q + step], b->dtype, device, r->ctx->device_id, 1, &own)};
            FATTNI_TRY(fattn_tensor_add(r->ctx, &t[into_second], &t[!into_second]));
            if (into_second) r->terms[q] = sum;
        }
    return FATTN_OK;
}

/* Rank q's part of data, from begins[q] on, goes to all. */
static fattn_status start_gather(fattn_reducer *r, int number, void *data, size_t size) {
    const int64_t *const begins = r->buckets[number].begins;
    for (int q = 0; q < r->size; ++q) {
        r->messages[q] = message(data, begins[r->rank], begins[r->rank + 1], size, q);
        r->messages[r->size + q] = message(data, begins[q], begins[q + 1], size, q);
    }
    r->messages[r->rank].bytes = r->messages[r->size + r->rank].bytes = 0;
    return start(r, number, false);
}

static fattn_status finish_oldest(fattn_reducer *r) {
    const exchange e = r->open[r->closed++ % MOST_OPEN];
    FATTNI_TRY(fattni_comm_finish(r->comm, e.request));
    r->fetched = fattni_max(r->fetched, r->closed);
    if (!e.adds) return FATTN_OK;
    const bucket *const b = &r->buckets[e.bucket];
    const size_t size = fattn_dtype_size(b->dtype);
    const int64_t begin = b->begins[r->rank], own = b->begins[r->rank + 1] - begin;
    if (own > 0) FATTNI_TRY(add_parts(r, e.bucket, grads_of(r, b) + (size_t)begin * size));
    r->added += 1;
    return r->to_owners ? FATTN_OK : start_gather(r, e.bucket, grads_of(r, b), size);
}

static fattn_status finish_all(fattn_reducer *r) {
    FATTNI_TRY(fetch(r, r->opened));
    while (r->closed < r->opened) FATTNI_TRY(finish_oldest(r));
    return FATTN_OK;
}

/* The bucket up to which all may start now. What has been held is spread over the gradients that are not complete. */
static int startable(const fattn_reducer *r) {
    int complete = r->started;
    int64_t slots = 0;
    while (complete < r->n_buckets && r->buckets[complete].waiting == 0) ++complete;
    for (int k = complete; k < r->n_buckets; ++k) slots += r->buckets[k].waiting;
    if (r->n_held == 0 || slots == 0) return complete;
    return complete < r->n_held ? 0 : r->started + (int)fattni_ceil_div(complete - r->started, 1 + slots);
}

/* Starts what is complete. What it finishes depends on the bucket's number alone, as on the other ranks. Before the
   late buckets, which nothing hides, it finishes one more: its sums would travel between theirs. */
static fattn_status advance(fattn_reducer *r) {
    const int past = startable(r);
    for (; r->started < past; r->started += 1) {
        FATTNI_TRY(add_aside(r, &r->buckets[r->started], LEVELS));
        if (r->size == 1) continue;
        FATTNI_TRY(start_sum(r, r->started));
        const bool late_next = r->started + 1 == r->n_prompt && r->n_prompt < r->n_buckets;
        const int lag = late_next ? LAG - 1 : LAG;
        while (r->added + lag <= r->started) FATTNI_TRY(finish_oldest(r));
    }
    return FATTN_OK;
}

/* ---- passes ---- */

fattn_status fattni_reducer_end(fattn_reducer *r, fattn_status s) {
    if (fattni_comm_end(r->comm, s)) abandon(r);
    return s;
}

static slot *slot_of(fattn_reducer *r, const fattn_param *p) {
    for (int step = 0; p && step < r->n; ++step) { /* backward comes from the last to the first */
        const int i = (r->found + r->n - step) % r->n;
        if (r->slots[i].param == p) return &r->slots[r->found = i];
    }
    return NULL;
}

void fattni_reducer_use(fattn_reducer *r, const fattn_param *p) {
    slot *const s = slot_of(r, p);
    if (!s || s->bucket < 0) return;
    if (s->uses++ == 0) r->buckets[s->bucket].waiting += 1;
}

fattn_status fattni_reducer_begin(fattn_reducer *r) { return advance(r); }

fattn_status fattni_reducer_used(fattn_reducer *r, const fattn_param *p) {
    slot *const s = slot_of(r, p);
    if (!s || s->bucket < 0 || --s->uses > 0) return FATTN_OK;
    r->buckets[s->bucket].waiting -= 1;
    return advance(r);
}

static fattn_status backward(fattn_reducer *r, fattn_tape *t, fattn_var scalar, const fattn_tensor *seed) {
    FATTNI_TRY(fattni_reducer_check_idle(r, "reducer_backward"));
    FATTNI_TRY(check_slots(r));
    for (int i = 0; i < r->n; ++i) r->slots[i].uses = 0;
    for (int k = 0; k < r->n_buckets; ++k) r->buckets[k].waiting = 0;
    r->passed = true;
    t->reducer = r->size > 1 ? r : NULL;
    const fattn_status s = seed ? fattn_tape_backward_from(t, scalar, seed) : fattn_tape_backward(t, scalar);
    t->reducer = NULL;
    return s;
}

fattn_status fattn_reducer_backward(fattn_reducer *r, fattn_tape *t, fattn_var scalar, const fattn_tensor *seed) {
    if (!r) return FATTN_E_ARG;
    if (!t || t->ctx != r->ctx)
        return fattni_reducer_end(
            r, fattn_ctx_fail(r->ctx, FATTN_E_ARG, "reducer_backward: the tape is NULL or another context's"));
    return fattni_reducer_end(r, backward(r, t, scalar, seed));
}

static fattn_status finish(fattn_reducer *r) {
    FATTNI_TRY(check_slots(r));
    for (int k = 0; k < r->n_buckets; ++k) r->buckets[k].waiting = 0;
    FATTNI_TRY(advance(r));
    FATTNI_TRY(finish_all(r));
    r->started = r->added = 0;
    r->passed = false;
    r->batches = 0;
    return FATTN_OK;
}

fattn_status fattn_reducer_finish(fattn_reducer *r) { return r ? fattni_reducer_end(r, finish(r)) : FATTN_E_ARG; }

fattn_status fattn_reducer_set_aside(fattn_reducer *r) { return r ? fattni_reducer_end(r, set_aside(r)) : FATTN_E_ARG; }

fattn_status fattn_reducer_share(const fattn_reducer *r, int i, int64_t *begin, int64_t *past) {
    if (!r) return FATTN_E_ARG;
    if (i < 0 || i >= r->n || !begin || !past)
        return fattn_ctx_fail(r->ctx, FATTN_E_ARG, "reducer_share: %d is not in 0..%d, or a pointer is NULL", i,
                              r->n - 1);
    share_of(r, &r->slots[i], r->rank, begin, past);
    return FATTN_OK;
}

/* ---- owners ---- */

fattn_comm *fattn_reducer_comm(const fattn_reducer *r) { return r ? r->comm : NULL; }

fattn_status fattni_reducer_check(const fattn_reducer *r, fattn_ctx *ctx, const char *who, fattn_param *const *params,
                                  int n) {
    bool same = r->ctx == ctx && r->to_owners && r->n == n;
    for (int i = 0; same && i < n; ++i) same = r->slots[i].param == params[i];
    if (same) return FATTN_OK;
    return fattn_ctx_fail(ctx, FATTN_E_ARG,
                          "%s: owners is a reducer of other params or of another context, or one without "
                          "FATTN_REDUCE_TO_OWNERS",
                          who);
}

/* Whether the bucket's gradients stay after a step (FATTN_PARAM_ONE_PASS). */
static bool stays(const fattn_reducer *r, const bucket *b) {
    bool all = true;
    for (int i = b->first; i <= b->last; ++i) all = all && r->slots[i].param->flags & FATTN_PARAM_ONE_PASS;
    return all;
}

fattn_status fattni_reducer_zero_others(fattn_reducer *r) {
    for (int k = 0; k < r->n_buckets; ++k) {
        const bucket *const b = &r->buckets[k];
        if (stays(r, b)) continue;
        const size_t size = fattn_dtype_size(b->dtype);
        const int64_t begin = b->begins[r->rank], past = b->begins[r->rank + 1];
        const size_t before = (size_t)begin * size, after = (size_t)(b->count - past) * size;
        FATTNI_TRY(r->ctx->ops->zero_rows(r->ctx, grads_of(r, b), before, before, 1));
        FATTNI_TRY(r->ctx->ops->zero_rows(r->ctx, grads_of(r, b) + (size_t)past * size, after, after, 1));
    }
    return FATTN_OK;
}

static fattn_status gather_values(fattn_reducer *r) {
    for (int k = 0; k < r->n_buckets; ++k) {
        const fattn_tensor *const value = &r->slots[r->buckets[k].first].param->value;
        if (r->opened - r->closed == MOST_OPEN) FATTNI_TRY(finish_oldest(r));
        FATTNI_TRY(start_gather(r, k, value->data, fattn_dtype_size((fattn_dtype)value->dtype)));
    }
    return finish_all(r);
}

fattn_status fattni_reducer_gather_values(fattn_reducer *r) {
    return r->size == 1 ? FATTN_OK : fattni_reducer_end(r, gather_values(r));
}

static fattn_status gather_first(fattn_reducer *r, int i, void *data, size_t size) {
    for (int q = 0; q < r->size; ++q) {
        int64_t begin, past;
        share_of(r, &r->slots[i], r->rank, &begin, &past);
        r->messages[q] = message(data, begin, q == 0 && r->rank != 0 ? past : begin, size, q);
        share_of(r, &r->slots[i], q, &begin, &past);
        r->messages[r->size + q] = message(data, begin, r->rank == 0 && q != 0 ? past : begin, size, q);
    }
    FATTNI_TRY(start(r, -1, false));
    return finish_oldest(r);
}

fattn_status fattni_reducer_gather_first(fattn_reducer *r, int i, void *data, size_t size) {
    return r->size == 1 ? FATTN_OK : fattni_reducer_end(r, gather_first(r, i, data, size));
}
