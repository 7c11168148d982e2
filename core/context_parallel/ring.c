/* RING: in step s a rank has the keys and values of rank - s, and sends them on while it computes with them. Forward
   merges the parts by L, in F32. In backward dK and dV of other ranks' keys come one step later than the keys: what a
   rank has computed meanwhile is added, and sent on; after the last step they go home.

   Backward's step 0, with the rank's own keys, needs no other rank: it is computed at the end, while the last dK and dV
   go home. Where half of its heads are enough to fill a GPU, the other half is computed at the beginning, while the
   first keys come.

   Every step of a zigzag under a causal mask has the same work: half of all pairs of rows and keys, but for the
   diagonal. */
#include "core/context_parallel/cp.h"

/* Keys and values of one rank, k first. */
typedef struct parcel {
    fattn_tensor k, v;
    size_t bytes;
} parcel;

typedef struct ring {
    fattni_cp_call *c;
    fattni_cp_span own[FATTNI_CP_CHUNKS];
    int n_own, next, previous;
    char *keys[2];      /* of the step, of the next one */
    char *gradients[4]; /* of the own keys; of the step's: computed, sent, received */
    bool keeps_dq;      /* the steps add to the caller's dq */
} ring;

static parcel parcel_at(const fattni_cp_call *c, void *base, int rank, fattn_dtype dtype) {
    const int64_t rows = fattni_cp_rows_of(c->cp, rank);
    const int64_t k[4] = {c->B, c->Hkv, rows, c->D}, v[4] = {c->B, c->Hkv, rows, c->Dv};
    parcel p = {.k = fattni_cp_view(c->cp, base, dtype, 4, k)};
    const size_t offset = (size_t)fattni_round_up((int64_t)fattni_cp_bytes(&p.k), FATTNI_ALIGN);
    p.v = fattni_cp_view(c->cp, base ? (char *)base + offset : NULL, dtype, 4, v);
    p.bytes = offset + (size_t)fattni_round_up((int64_t)fattni_cp_bytes(&p.v), FATTNI_ALIGN);
    return p;
}

static int source_of(const fattn_cp *cp, int step) {
    const int size = cp->comm->size;
    return (cp->comm->rank - step + size) % size;
}

static fattn_status open_ring(fattni_cp_call *c, ring *r) {
    fattn_cp *const cp = c->cp;
    const int size = cp->comm->size;
    *r = (ring){.c = c, .next = (cp->comm->rank + 1) % size, .previous = (cp->comm->rank + size - 1) % size};
    r->n_own = fattni_cp_chunks(cp, cp->comm->rank, r->own);
    size_t most = 0;
    for (int n = 0; n < size; ++n) {
        const size_t bytes = parcel_at(c, NULL, n, c->dtype).bytes;
        if (bytes > most) most = bytes;
    }
    void *p;
    FATTNI_TRY(fattni_cp_room(cp, FATTNI_CP_RING, 2 * most, &p));
    r->keys[0] = p, r->keys[1] = r->keys[0] + most;
    return FATTN_OK;
}

static fattn_status open_gradients(ring *r) {
    fattn_cp *const cp = r->c->cp;
    const int size = cp->comm->size, buffers = size == 1 ? 1 : size == 2 ? 3 : 4;
    size_t most = 0;
    for (int n = 0; n < size; ++n) {
        const size_t bytes = parcel_at(r->c, NULL, n, r->c->wide).bytes;
        if (bytes > most) most = bytes;
    }
    void *p;
    FATTNI_TRY(fattni_cp_room(cp, FATTNI_CP_RING_GRADIENTS, (size_t)buffers * most, &p));
    r->gradients[0] = p;
    if (size > 1) r->gradients[1] = (char *)p + most, r->gradients[3] = (char *)p + 2 * most;
    if (size > 2) r->gradients[2] = (char *)p + 3 * most; /* of two ranks none computes while it sends */
    return FATTN_OK;
}

static fattn_status send_on(const ring *r, const parcel *out, const parcel *in, void **request) {
    const fattn_message send = {.data = out->k.data, .bytes = out->bytes, .peer = r->next};
    const fattn_message receive = {.data = in->k.data, .bytes = in->bytes, .peer = r->previous};
    return fattni_comm_start(r->c->cp->comm, &send, 1, &receive, 1, request);
}

/* Begins to move the keys of this step on. *now: they. Of step 0 they are the caller's, and copied for the journey. */
static fattn_status begin_step(ring *r, int step, parcel *now, void **request) {
    const fattni_cp_call *const c = r->c;
    const int size = c->cp->comm->size;
    *request = NULL;
    *now = parcel_at(c, r->keys[step % 2], source_of(c->cp, step), c->dtype);
    if (step == 0) {
        if (size > 1) {
            const fattni_copy_pair pairs[2] = {{now->k, *c->io.k}, {now->v, *c->io.v}};
            FATTNI_TRY(c->cp->ctx->ops->copy_pairs(c->cp->ctx, pairs, 2));
        } else {
            now->k = *c->io.k, now->v = *c->io.v;
        }
    }
    if (step + 1 == size) return FATTN_OK;
    const parcel next = parcel_at(c, r->keys[(step + 1) % 2], source_of(c->cp, step + 1), c->dtype);
    return send_on(r, now, &next, request);
}

/* One call for rows [q0, q1) of this rank and keys [k0, k1) of the step's, as they lie there. */
static fattn_status block(const ring *r, bool backward, const fattn_attention_io *given, int64_t q0, int64_t q1,
                          int64_t k0, int64_t k1, uint32_t flags, bool causal) {
    fattn_tensor t[FATTNI_CP_ROWS];
    if (q0 >= q1 || k0 >= k1) return FATTN_OK;
    const fattn_attention_io io = fattni_cp_take_rows(given, q0, q1, k0, k1, t);
    return fattni_cp_attend_plain(r->c, backward, &io, flags, causal);
}

/* Neither positions nor sequences matter, but for the causal mask. */
static bool is_plain(const fattni_cp_call *c) {
    return !c->cp->packed && !(c->p.flags & FATTN_WINDOW) && !c->io.alibi && !(c->p.dropout_p > 0);
}

/* All pairs of this rank's rows with the keys of `source`. The first step writes, and has the sink; later ones merge.
   */
static fattn_status step_of(const ring *r, bool backward, const fattn_attention_io *given, int step, uint32_t flags) {
    const fattni_cp_call *const c = r->c;
    const fattn_cp *const cp = c->cp;
    const int source = source_of(cp, step), me = cp->comm->rank;
    fattn_attention_io io = *given, later = *given;
    later.sink = later.d_sink = NULL;
    const uint32_t merge = flags | FATTN_MERGE, first = backward ? merge : flags;
    fattni_cp_span keys[FATTNI_CP_CHUNKS];
    const int n = fattni_cp_chunks(cp, source, keys);
    const int64_t all = fattni_cp_rows_of(cp, source);
    if (!is_plain(c)) {
        for (int i = 0; i < r->n_own; ++i) {
            if (step == 0) FATTNI_TRY(fattni_cp_attend(c, backward, &io, &r->own[i], &keys[i], first));
            for (int k = 0; k < n; ++k)
                if (step > 0 || k != i) FATTNI_TRY(fattni_cp_attend(c, backward, &later, &r->own[i], &keys[k], merge));
        }
        return FATTN_OK;
    }
    if (step == 0) return block(r, backward, &io, 0, c->rows, 0, all, first, c->causal);
    if (!c->causal) return block(r, backward, &later, 0, c->rows, 0, all, merge, false);
    if (source < me) return block(r, backward, &later, 0, c->rows, 0, keys[0].end - keys[0].begin, merge, false);
    if (n == 1) return FATTN_OK; /* contiguous: later keys */
    return block(r, backward, &later, r->own[1].at, c->rows, 0, all, merge, false);
}

/* How many of the step's keys, from the first on, its one call reaches, where positions do not matter; else 0. */
static int64_t reached(const ring *r, int step) {
    const fattni_cp_call *const c = r->c;
    const int source = source_of(c->cp, step), me = c->cp->comm->rank;
    fattni_cp_span keys[FATTNI_CP_CHUNKS];
    const int n = fattni_cp_chunks(c->cp, source, keys);
    const int64_t all = fattni_cp_rows_of(c->cp, source);
    if (!is_plain(c) || c->rows == 0) return 0;
    if (step == 0 || !c->causal) return all;
    if (source < me) return keys[0].end - keys[0].begin;
    return n == 1 || r->own[1].begin == r->own[1].end ? 0 : all;
}

/* Zeros where the step's calls write no dK and dV; what they do not reach at all, if there is one call. */
static fattn_status clear(const ring *r, int step, const parcel *gradients) {
    const int64_t from = reached(r, step);
    const fattn_tensor k = fattn_tensor_slice(&gradients->k, 2, from, gradients->k.shape[2]);
    const fattn_tensor v = fattn_tensor_slice(&gradients->v, 2, from, gradients->v.shape[2]);
    FATTNI_TRY(fattni_cp_zero(r->c->cp, &k));
    return fattni_cp_zero(r->c->cp, &v);
}

/* A tensor of the wide dtype for `given`, in the memory for results; `given` itself if it has that dtype. */
static fattn_status widen(const fattni_cp_call *c, const fattn_tensor *given, fattn_tensor *wide) {
    *wide = *given;
    if (given->dtype == (int32_t)c->wide) return FATTN_OK;
    void *p;
    *wide = fattni_cp_view(c->cp, NULL, c->wide, given->ndim, given->shape);
    FATTNI_TRY(fattni_cp_room(c->cp, FATTNI_CP_RESULT, fattni_cp_bytes(wide), &p));
    *wide = fattni_cp_view(c->cp, p, c->wide, given->ndim, given->shape);
    return FATTN_OK;
}

fattn_status fattni_cp_ring_fwd(fattni_cp_call *c) {
    fattn_attention_io io = c->io;
    fattn_tensor o;
    ring r;
    FATTNI_TRY(open_ring(c, &r));
    FATTNI_TRY(widen(c, c->io.o, &o));
    io.o = &o;
    for (int step = 0; step < c->cp->comm->size; ++step) {
        parcel now;
        void *request;
        FATTNI_TRY(begin_step(&r, step, &now, &request));
        io.k = &now.k, io.v = &now.v;
        const fattn_status s = step_of(&r, false, &io, step, 0);
        if (request) FATTNI_TRY(fattni_comm_finish(c->cp->comm, request));
        FATTNI_TRY(s);
    }
    return o.dtype == c->io.o->dtype ? FATTN_OK : fattni_cp_store(c->cp, c->io.o, &o, false);
}

/* ---- backward ---- */

/* Some of the heads of a call, and of its tensors. */
typedef struct heads {
    fattni_cp_call call;
    fattn_attention_io io;
    fattn_tensor t[13];
} heads;

/* n key heads from `first` on, with their query heads. */
static void take_heads(const fattni_cp_call *c, const fattn_attention_io *given, int64_t first, int64_t n, heads *out) {
    const int64_t group = c->Hq / c->Hkv, at = first * group, count = n * group;
    fattn_tensor *const t = out->t;
    fattn_attention_io *const io = &out->io;
    out->call = *c;
    *io = *given;
    io->q = fattni_cp_slice(given->q, 1, at, at + count, &t[0]),
    io->o = fattni_cp_slice(given->o, 1, at, at + count, &t[1]);
    io->lse = fattni_cp_slice(given->lse, 1, at, at + count, &t[2]),
    io->d_o = fattni_cp_slice(given->d_o, 1, at, at + count, &t[3]);
    io->d_lse = fattni_cp_slice(given->d_lse, 1, at, at + count, &t[4]),
    io->dq = fattni_cp_slice(given->dq, 1, at, at + count, &t[5]);
    io->k = fattni_cp_slice(given->k, 1, first, first + n, &t[6]),
    io->v = fattni_cp_slice(given->v, 1, first, first + n, &t[7]);
    io->dk = fattni_cp_slice(given->dk, 1, first, first + n, &t[8]),
    io->dv = fattni_cp_slice(given->dv, 1, first, first + n, &t[9]);
    io->alibi = fattni_cp_slice(given->alibi, 0, at, at + count, &t[10]);
    io->sink = fattni_cp_slice(given->sink, 0, at, at + count, &t[11]);
    io->d_sink = fattni_cp_slice(given->d_sink, 0, at, at + count, &t[12]);
    if (out->call.p.rng_heads == 0) out->call.p.rng_heads = (int32_t)c->Hq; /* the whole call's dropout bits */
    out->call.p.rng_head0 += (int32_t)at;
}

/* Step 0 of these heads: all rows of this rank with its own keys. `own`: where their dK and dV go. At first dq is
   written if one call writes all of it, else, and at last, added to. */
static fattn_status own_step(const ring *r, const fattn_attention_io *given, const parcel *own, int64_t first,
                             int64_t n, bool at_first) {
    heads part;
    ring some = *r;
    fattn_attention_io io = *given;
    if (n == 0) return FATTN_OK;
    io.k = r->c->io.k, io.v = r->c->io.v;
    io.dk = io.dk ? &own->k : NULL, io.dv = io.dv ? &own->v : NULL;
    take_heads(r->c, &io, first, n, &part);
    some.c = &part.call;
    const bool writes = reached(r, 0) > 0, writes_dq = writes && at_first && !r->keeps_dq;
    const uint32_t add_q = writes_dq ? 0 : FATTN_ACC_DQ;
    return step_of(&some, true, &part.io, 0, FATTN_ACC_DSINK | add_q | (writes ? 0 : FATTN_ACC_DK | FATTN_ACC_DV));
}

/* `gradients`, of this step's keys, += what has come with them; then on to the next rank, the last time home. */
static fattn_status pass_gradients(ring *r, int step, const parcel *gradients, void **request) {
    const fattni_cp_call *const c = r->c;
    fattn_cp *const cp = c->cp;
    if (*request) {
        const parcel come = parcel_at(c, r->gradients[3], source_of(cp, step), c->wide);
        FATTNI_TRY(fattni_comm_finish(cp->comm, *request));
        FATTNI_TRY(fattn_tensor_add(cp->ctx, &gradients->k, &come.k));
        FATTNI_TRY(fattn_tensor_add(cp->ctx, &gradients->v, &come.v));
    }
    /* What was being sent is free, what has come is, too. */
    char *const computed = r->gradients[1];
    r->gradients[1] = r->gradients[2], r->gradients[2] = computed;
    const parcel in = parcel_at(c, r->gradients[3], source_of(cp, step + 1), c->wide);
    return send_on(r, gradients, &in, request);
}

/* dK and dV of the own keys, with what the other ranks have added. */
static fattn_status store_gradients(const fattni_cp_call *c, const parcel *own, const parcel *come, uint32_t flags) {
    if (come) {
        FATTNI_TRY(fattn_tensor_add(c->cp->ctx, &own->k, &come->k));
        FATTNI_TRY(fattn_tensor_add(c->cp->ctx, &own->v, &come->v));
    }
    if (c->io.dk) FATTNI_TRY(fattni_cp_store(c->cp, c->io.dk, &own->k, flags & FATTN_ACC_DK));
    if (c->io.dv) FATTNI_TRY(fattni_cp_store(c->cp, c->io.dv, &own->v, flags & FATTN_ACC_DV));
    return FATTN_OK;
}

/* Zeros in dq where no call writes it before others add: all of it, or the heads from `first` on. */
static fattn_status clear_dq(const ring *r, const fattn_tensor *dq, int64_t first) {
    const fattni_cp_call *const c = r->c;
    const int64_t from = reached(r, 0) > 0 ? first * (c->Hq / c->Hkv) : 0;
    if (r->keeps_dq) return FATTN_OK;
    const fattn_tensor rest = fattn_tensor_slice(dq, 1, from, c->Hq);
    return fattni_cp_zero(c->cp, &rest);
}

/* Key heads whose step 0 is computed at the beginning. */
static int64_t heads_at_first(const fattni_cp_call *c) {
    const bool halves = c->cp->ctx->ops->on_host || fattni_cp_full_parts(c, c->Hkv, c->rows) >= 2;
    return c->cp->comm->size == 1 ? c->Hkv : halves ? c->Hkv - c->Hkv / 2 : 0;
}

fattn_status fattni_cp_ring_bwd(fattni_cp_call *c) {
    fattn_cp *const cp = c->cp;
    const int size = cp->comm->size;
    const int64_t first_heads = heads_at_first(c);
    fattn_attention_io io = c->io;
    fattn_tensor dq = {0};
    ring r;
    void *keys, *moving = NULL;
    const uint32_t given = c->p.flags; /* the steps' calls have flags of their own */
    const bool moves = c->io.dk || c->io.dv;
    c->p.flags &= ~(uint32_t)(FATTN_ACC_DQ | FATTN_ACC_DK | FATTN_ACC_DV | FATTN_ACC_DSINK);
    FATTNI_TRY(open_ring(c, &r));
    FATTNI_TRY(open_gradients(&r));
    const parcel own = parcel_at(c, r.gradients[0], cp->comm->rank, c->wide);
    if (io.d_sink && !(given & FATTN_ACC_DSINK)) FATTNI_TRY(fattni_cp_zero(cp, io.d_sink));
    if (io.dq) {
        FATTNI_TRY(widen(c, io.dq, &dq));
        r.keeps_dq = dq.data == io.dq->data && (given & FATTN_ACC_DQ);
        FATTNI_TRY(clear_dq(&r, &dq, first_heads));
        io.dq = &dq;
    }
    parcel now;
    FATTNI_TRY(begin_step(&r, 0, &now, &keys));
    FATTNI_TRY(clear(&r, 0, &own));
    FATTNI_TRY(own_step(&r, &io, &own, 0, first_heads, true));
    if (keys) FATTNI_TRY(fattni_comm_finish(cp->comm, keys));
    for (int step = 1; step < size; ++step) {
        const parcel gradients = parcel_at(c, r.gradients[1], source_of(cp, step), c->wide);
        FATTNI_TRY(begin_step(&r, step, &now, &keys));
        FATTNI_TRY(clear(&r, step, &gradients));
        io.k = &now.k, io.v = &now.v;
        io.dk = c->io.dk ? &gradients.k : NULL, io.dv = c->io.dv ? &gradients.v : NULL;
        const uint32_t add_k = reached(&r, step) > 0 ? 0 : FATTN_ACC_DK | FATTN_ACC_DV;
        FATTNI_TRY(step_of(&r, true, &io, step, FATTN_ACC_DSINK | FATTN_ACC_DQ | add_k));
        if (moves) FATTNI_TRY(pass_gradients(&r, step, &gradients, &moving));
        if (keys) FATTNI_TRY(fattni_comm_finish(cp->comm, keys));
    }
    FATTNI_TRY(own_step(&r, &io, &own, first_heads, c->Hkv - first_heads, false));
    const parcel come = parcel_at(c, r.gradients[3], cp->comm->rank, c->wide);
    if (moving) FATTNI_TRY(fattni_comm_finish(cp->comm, moving));
    if (c->io.dq && dq.data != c->io.dq->data) FATTNI_TRY(fattni_cp_store(cp, c->io.dq, &dq, given & FATTN_ACC_DQ));
    return store_gradients(c, &own, moving ? &come : NULL, given);
}
