/* ALL_GATHER: every rank has all keys and values, and computes its own rows with them.

   Backward, in general: dQ of its rows, and what its rows add to dK and dV of all keys, in F32; then each rank sums
   what all ranks add to its keys. Deterministic: the sums over rows must have one order, so each rank has all rows,
   too, and computes dK and dV of its own keys from them, apart from dQ: seven products instead of five. */
#include "core/context_parallel/cp.h"

static fattn_tensor whole_of(const fattni_cp_call *c, const fattn_tensor *rows, fattn_dtype dtype) {
    const int64_t shape[4] = {c->B, rows->shape[1], c->cp->N, rows->shape[3]};
    return fattni_cp_view(c->cp, NULL, dtype, 4, shape);
}

static fattni_cp_span everything(const fattn_cp *cp) { return (fattni_cp_span){0, cp->N, 0}; }

static fattn_status own_rows_fwd(fattni_cp_call *c) {
    fattn_attention_io io = c->io;
    fattn_tensor whole[2] = {whole_of(c, io.k, c->dtype), whole_of(c, io.v, c->dtype)};
    FATTNI_TRY(fattni_cp_wholes(c, whole, 2));
    FATTNI_TRY(fattni_cp_to_whole(c, (const fattn_tensor[]){*io.k, *io.v}, 2, whole));
    io.k = &whole[0], io.v = &whole[1];
    fattni_cp_span chunks[FATTNI_CP_CHUNKS];
    const fattni_cp_span keys = everything(c->cp);
    const int n = fattni_cp_chunks(c->cp, c->cp->comm->rank, chunks);
    for (int i = 0; i < n; ++i) FATTNI_TRY(fattni_cp_attend(c, false, &io, &chunks[i], &keys, 0));
    return FATTN_OK;
}

/* On a GPU the 16 rows of a warp choose together when O is rescaled, and a tile whether a block of keys needs a mask: a
   row's bits are those of one device if its tile has the same rows, of the same kernel. Tiles have 64, 128 or 192 rows;
   calls of at most SHORT rows take other kernels. */
enum { TILES = 384, SHORT = 1024 };

/* The tiles of a chunk, and more of them if they would be few. */
static fattni_cp_span tiles_of(const fattn_cp *cp, const fattni_cp_span *chunk) {
    int64_t begin = chunk->begin / TILES * TILES, end = fattni_min(cp->N, fattni_round_up(chunk->end, TILES));
    while (end - begin <= SHORT && (begin > 0 || end < cp->N)) {
        begin = fattni_max(0, begin - TILES);
        end = fattni_min(cp->N, end + TILES);
    }
    return (fattni_cp_span){begin, end, begin};
}

static fattn_status whole_tiles_fwd(fattni_cp_call *c) {
    enum { Q, K, V, O, LSE, TENSORS };
    fattn_attention_io io = c->io;
    const fattn_tensor local[TENSORS] = {*io.q, *io.k, *io.v, *io.o, fattni_cp_rows_4d(io.lse)};
    fattn_tensor whole[TENSORS];
    for (int i = 0; i < TENSORS; ++i) whole[i] = whole_of(c, &local[i], (fattn_dtype)local[i].dtype);
    FATTNI_TRY(fattni_cp_wholes(c, whole, TENSORS));
    FATTNI_TRY(fattni_cp_to_whole(c, local, O, whole));
    fattn_tensor lse = whole[LSE];
    lse.ndim = 3;
    io.q = &whole[Q], io.k = &whole[K], io.v = &whole[V], io.o = &whole[O], io.lse = &lse;
    fattni_cp_span chunks[FATTNI_CP_CHUNKS];
    const fattni_cp_span keys = everything(c->cp);
    const int n = fattni_cp_chunks(c->cp, c->cp->comm->rank, chunks);
    for (int i = 0; i < n; ++i) {
        const fattni_cp_span tiles = tiles_of(c->cp, &chunks[i]);
        if (chunks[i].begin < chunks[i].end) FATTNI_TRY(fattni_cp_attend(c, false, &io, &tiles, &keys, 0));
    }
    FATTNI_TRY(fattni_cp_own_rows(c, &whole[O], &local[O]));
    return fattni_cp_own_rows(c, &whole[LSE], &local[LSE]);
}

fattn_status fattni_cp_gather_fwd(fattni_cp_call *c) {
    const bool tiles = c->deterministic && !c->cp->packed && !c->cp->ctx->ops->on_host;
    return tiles ? whole_tiles_fwd(c) : own_rows_fwd(c);
}

/* dQ and the sinks' share of this rank's rows, from all keys. */
static fattn_status own_rows(fattni_cp_call *c, fattn_attention_io io, uint32_t flags) {
    fattni_cp_span chunks[FATTNI_CP_CHUNKS];
    const fattni_cp_span keys = everything(c->cp);
    const int n = fattni_cp_chunks(c->cp, c->cp->comm->rank, chunks);
    if (!io.dq && !io.d_sink) return FATTN_OK;
    for (int i = 0; i < n; ++i) FATTNI_TRY(fattni_cp_attend(c, true, &io, &chunks[i], &keys, flags));
    return FATTN_OK;
}

static fattn_status zero_keys(fattni_cp_call *c, const fattn_attention_io *io, int64_t from) {
    const fattn_tensor *const given[2] = {io->dk, io->dv};
    for (int i = 0; i < 2; ++i) {
        if (!given[i]) continue;
        const fattn_tensor rest = fattn_tensor_slice(given[i], 2, from, c->cp->N);
        FATTNI_TRY(fattni_cp_zero(c->cp, &rest));
    }
    return FATTN_OK;
}

/* All gradients of this rank's rows, dk and dv of all keys. The last chunk comes first: under a causal mask it reaches
   the most keys, whose dk and dv it writes; the other one adds to them. */
static fattn_status all_gradients(fattni_cp_call *c, const fattn_attention_io *io) {
    fattni_cp_span chunks[FATTNI_CP_CHUNKS];
    const int n = fattni_cp_chunks(c->cp, c->cp->comm->rank, chunks);
    const uint32_t add = FATTN_ACC_DK | FATTN_ACC_DV;
    bool fresh = !c->cp->packed && c->rows > 0;
    if (!fresh) FATTNI_TRY(zero_keys(c, io, 0));
    c->p.flags &= ~add;
    for (int i = n - 1; i >= 0; --i) {
        const fattni_cp_span keys = {0, c->causal && !c->cp->packed ? chunks[i].end : c->cp->N, 0};
        if (chunks[i].begin == chunks[i].end) continue;
        if (fresh) FATTNI_TRY(zero_keys(c, io, keys.end));
        FATTNI_TRY(fattni_cp_attend(c, true, io, &chunks[i], &keys, fresh ? 0 : add));
        fresh = false;
    }
    return FATTN_OK;
}

static fattn_status add_all(fattni_cp_call *c) {
    fattn_attention_io io = c->io;
    fattn_tensor whole[4] = {whole_of(c, io.k, c->dtype), whole_of(c, io.v, c->dtype), whole_of(c, io.k, c->wide),
                             whole_of(c, io.v, c->wide)};
    const fattn_tensor *const dk = io.dk, *const dv = io.dv;
    FATTNI_TRY(fattni_cp_wholes(c, whole, dk || dv ? 4 : 2));
    FATTNI_TRY(fattni_cp_to_whole(c, (const fattn_tensor[]){*io.k, *io.v}, 2, whole));
    io.k = &whole[0], io.v = &whole[1];
    io.dk = dk ? &whole[2] : NULL, io.dv = dv ? &whole[3] : NULL;
    const bool add_k = c->p.flags & FATTN_ACC_DK, add_v = c->p.flags & FATTN_ACC_DV;
    FATTNI_TRY(all_gradients(c, &io));
    if (dk && dv)
        return fattni_cp_sum_rows(c, whole + 2, 2, (const fattn_tensor[]){*dk, *dv}, (const bool[]){add_k, add_v});
    if (dk) return fattni_cp_sum_rows(c, whole + 2, 1, dk, &add_k);
    return dv ? fattni_cp_sum_rows(c, whole + 3, 1, dv, &add_v) : FATTN_OK;
}

/* Without FATTN_MERGE, 16 bits and TF32 centre keys, where dQ is computed: dK and dV would then be those of other
   calls. */
static uint32_t uncentred(const fattni_cp_call *c) {
    const bool tf32 = (c->p.flags & FATTN_TF32) || (c->cp->ctx->flags & FATTN_CTX_TF32);
    const bool rounds = fattn_dtype_size(c->dtype) == 2 || tf32;
    return rounds ? FATTN_MERGE : 0;
}

static fattn_status one_order(fattni_cp_call *c) {
    enum { Q, K, V, O, LSE, D_O, D_LSE, TENSORS };
    fattn_attention_io io = c->io;
    const fattn_tensor *const given[TENSORS] = {io.q, io.k, io.v, io.o, io.lse, io.d_o, io.d_lse};
    fattn_tensor local[TENSORS], whole[TENSORS];
    const int n = io.d_lse ? TENSORS : D_LSE;
    for (int i = 0; i < n; ++i) {
        local[i] = fattni_cp_rows_4d(given[i]);
        whole[i] = whole_of(c, &local[i], (fattn_dtype)local[i].dtype);
    }
    FATTNI_TRY(fattni_cp_wholes(c, whole, n));
    FATTNI_TRY(fattni_cp_to_whole(c, local, n, whole));
    whole[LSE].ndim = whole[D_LSE].ndim = 3;
    const fattn_tensor *const dk = io.dk, *const dv = io.dv;
    io.k = &whole[K], io.v = &whole[V], io.dk = io.dv = NULL;
    FATTNI_TRY(own_rows(c, io, uncentred(c)));
    if (!dk && !dv) return FATTN_OK;
    io.q = &whole[Q], io.o = &whole[O], io.lse = &whole[LSE], io.d_o = &whole[D_O];
    if (io.d_lse) io.d_lse = &whole[D_LSE];
    io.k = c->io.k, io.v = c->io.v;
    io.dq = io.d_sink = NULL, io.dk = dk, io.dv = dv;
    c->p.flags &= ~(uint32_t)FATTN_ACC_DQ;
    fattn_tensor unused;
    if (!c->cp->ctx->ops->on_host) { /* the Hopper kernels have no backward without dQ */
        void *p;
        unused = fattni_cp_view(c->cp, NULL, c->dtype, 4, whole[Q].shape);
        FATTNI_TRY(fattni_cp_room(c->cp, FATTNI_CP_RESULT, fattni_cp_bytes(&unused), &p));
        unused = fattni_cp_view(c->cp, p, c->dtype, 4, whole[Q].shape);
        io.dq = &unused;
    }
    fattni_cp_span chunks[FATTNI_CP_CHUNKS];
    const fattni_cp_span rows = everything(c->cp);
    const int chunk_count = fattni_cp_chunks(c->cp, c->cp->comm->rank, chunks);
    for (int i = 0; i < chunk_count; ++i) FATTNI_TRY(fattni_cp_attend(c, true, &io, &rows, &chunks[i], uncentred(c)));
    return FATTN_OK;
}

fattn_status fattni_cp_gather_bwd(fattni_cp_call *c) {
    const fattn_attention_io *const io = &c->io;
    if (!io->dq && !io->dk && !io->dv && !io->d_sink) return FATTN_OK;
    if (io->d_sink && !(c->p.flags & FATTN_ACC_DSINK)) FATTNI_TRY(fattni_cp_zero(c->cp, io->d_sink));
    c->p.flags |= FATTN_ACC_DSINK; /* the chunks' shares are added */
    return c->deterministic ? one_order(c) : add_all(c);
}
