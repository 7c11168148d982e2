/* Context parallelism: creation, the layout of rows, checks and the choice of a form. */
#include "core/context_parallel/cp.h"

#include <string.h>

static const int64_t MOST_ROWS = (int64_t)1 << 29; /* positions of attention calls */

/* ---- layout ---- */

/* A chunk has at least as many rows as a call needs that does not split keys, which gives other bits; but N may be
   less. */
enum { FEWEST_ROWS = 17 };

static int64_t border(const fattn_cp *cp, int64_t length, int64_t chunk) {
    const int64_t at = chunk * length;
    return cp->N - at < FEWEST_ROWS && chunk > 0 ? cp->N : at;
}

int fattni_cp_chunks(const fattn_cp *cp, int rank, fattni_cp_span *out) {
    const int size = cp->comm->size, n = cp->layout == FATTN_CP_ZIGZAG ? 2 : 1;
    const int64_t length = fattni_max(FEWEST_ROWS, fattni_ceil_div(cp->N, n * size));
    const int numbers[FATTNI_CP_CHUNKS] = {rank, 2 * size - 1 - rank};
    int64_t at = 0;
    for (int i = 0; i < n; ++i) {
        const int64_t begin = border(cp, length, numbers[i]), end = border(cp, length, numbers[i] + 1);
        out[i] = (fattni_cp_span){begin, end, at};
        at += end - begin;
    }
    return n;
}

int64_t fattni_cp_rows_of(const fattn_cp *cp, int rank) {
    fattni_cp_span chunks[FATTNI_CP_CHUNKS];
    const int n = fattni_cp_chunks(cp, rank, chunks);
    const fattni_cp_span *const last = &chunks[n - 1];
    return last->at + last->end - last->begin;
}

int64_t fattn_cp_rows(const fattn_cp *cp) { return cp ? fattni_cp_rows_of(cp, cp->comm->rank) : 0; }

void fattn_cp_positions(const fattn_cp *cp, int32_t *positions) {
    fattni_cp_span chunks[FATTNI_CP_CHUNKS];
    if (!cp || !positions) return;
    const int n = fattni_cp_chunks(cp, cp->comm->rank, chunks);
    for (int i = 0; i < n; ++i) {
        int s = 0;
        for (int64_t row = chunks[i].begin; row < chunks[i].end; ++row) {
            while (row >= cp->starts[s + 1]) ++s;
            positions[chunks[i].at + row - chunks[i].begin] = (int32_t)(row - cp->starts[s]);
        }
    }
}

/* ---- memory ---- */

fattn_status fattni_cp_room(fattn_cp *cp, enum fattni_cp_use use, size_t bytes, void **out) {
    FATTNI_TRY(fattni_comm_grow(cp->ctx, &cp->memory[use], &cp->bytes[use], bytes));
    *out = cp->memory[use];
    return FATTN_OK;
}

fattn_tensor fattni_cp_view(const fattn_cp *cp, void *data, fattn_dtype dtype, int ndim, const int64_t *shape) {
    fattn_tensor t = fattn_tensor_view(data, dtype, cp->ctx->device, cp->ctx->device_id, ndim, shape);
    if (fattn_tensor_numel(&t) == 0) t.data = NULL;
    return t;
}

size_t fattni_cp_bytes(const fattn_tensor *t) {
    return (size_t)fattn_tensor_numel(t) * fattn_dtype_size((fattn_dtype)t->dtype);
}

fattn_status fattni_cp_zero(fattn_cp *cp, const fattn_tensor *t) {
    fattn_tensor zero = *t;
    memset(zero.stride, 0, sizeof zero.stride);
    zero.data = cp->zero;
    zero.dtype = FATTN_F64;
    if (fattn_tensor_numel(t) == 0) return FATTN_OK;
    if (fattni_is_row_major(t)) return cp->ctx->ops->zero_rows(cp->ctx, t->data, 0, fattni_cp_bytes(t), 1);
    return fattn_tensor_copy(cp->ctx, t, &zero);
}

fattn_status fattni_cp_store(fattn_cp *cp, const fattn_tensor *to, const fattn_tensor *from, bool add) {
    return add ? fattn_tensor_add(cp->ctx, to, from) : fattn_tensor_copy(cp->ctx, to, from);
}

/* ---- creation ---- */

static fattn_status check_options(fattn_ctx *ctx, const fattn_cp_options *o) {
    if (o->form < FATTN_CP_AUTO || o->form > FATTN_CP_ULYSSES)
        return fattn_ctx_fail(ctx, FATTN_E_ARG, "cp: form %d is not in %d..%d", o->form, FATTN_CP_AUTO,
                              FATTN_CP_ULYSSES);
    if (o->layout < FATTN_CP_ZIGZAG || o->layout > FATTN_CP_CONTIGUOUS)
        return fattn_ctx_fail(ctx, FATTN_E_ARG, "cp: layout %d is not in %d..%d", o->layout, FATTN_CP_ZIGZAG,
                              FATTN_CP_CONTIGUOUS);
    if (o->save < 0 || o->save > 1 || o->reserved)
        return fattn_ctx_fail(ctx, FATTN_E_ARG, "cp: save %d is not 0 or 1, or reserved %d is not 0", o->save,
                              o->reserved);
    if (o->rows < 0 || o->rows > MOST_ROWS)
        return fattn_ctx_fail(ctx, FATTN_E_ARG, "cp: rows %lld is not in 0..2^29", (long long)o->rows);
    if (o->n_sequences < 0 || (o->n_sequences > 0) != (o->cu_seqlens != NULL))
        return fattn_ctx_fail(ctx, FATTN_E_ARG, "cp: n_sequences is %d, cu_seqlens is %s", o->n_sequences,
                              o->cu_seqlens ? "given" : "NULL");
    for (int i = 0; i < o->n_sequences; ++i)
        if (o->cu_seqlens[i] > o->cu_seqlens[i + 1] || (i == 0 && o->cu_seqlens[0] != 0))
            return fattn_ctx_fail(ctx, FATTN_E_ARG,
                                  "cp: cu_seqlens[%d] = %d, cu_seqlens[%d] = %d: not ascending from 0", i,
                                  o->cu_seqlens[i], i + 1, o->cu_seqlens[i + 1]);
    if (o->n_sequences > 0 && o->cu_seqlens[o->n_sequences] != o->rows)
        return fattn_ctx_fail(ctx, FATTN_E_ARG, "cp: cu_seqlens ends at %d, rows is %lld",
                              o->cu_seqlens[o->n_sequences], (long long)o->rows);
    return FATTN_OK;
}

/* The sequences are compared by a hash (FNV-1a). */
static fattn_status agree(const fattn_cp *cp, const fattn_cp_options *o) {
    uint64_t hash = 14695981039346656037u;
    for (int i = 0; i <= cp->n_sequences; ++i) hash = (hash ^ (uint32_t)cp->starts[i]) * 1099511628211u;
    static const char *const names[] = {"form", "layout", "rows", "n_sequences", "a hash of cu_seqlens", "save"};
    const int64_t values[] = {o->form, o->layout, o->rows, o->n_sequences, (int64_t)(hash >> 1), o->save};
    return fattn_comm_agree(cp->comm, names, values, 6);
}

static size_t most_pairs(const fattn_cp *cp) { return (size_t)(FATTNI_CP_TENSORS * FATTNI_CP_CHUNKS * cp->comm->size); }

static size_t parts_bytes(const fattn_cp *cp) { return 2 * (size_t)cp->comm->size * sizeof *cp->parts; }
static size_t tensors_bytes(const fattn_cp *cp) { return 2 * most_pairs(cp) * sizeof *cp->tensors; }

static fattn_status fill(fattn_cp *cp, const fattn_cp_options *o) {
    fattn_ctx *const ctx = cp->ctx;
    const int64_t n = cp->n_sequences + 1;
    FATTNI_TRY(fattni_host_alloc(ctx, (size_t)n * sizeof *cp->starts, (void **)&cp->starts));
    cp->starts[0] = 0;
    for (int i = 1; i <= cp->n_sequences; ++i) {
        cp->starts[i] = cp->packed ? o->cu_seqlens[i] : (int32_t)o->rows;
        const int32_t length = cp->starts[i] - cp->starts[i - 1];
        if (length > cp->longest) cp->longest = length;
    }
    FATTNI_TRY(fattni_host_alloc(ctx, 2 * (size_t)cp->comm->size * sizeof *cp->messages, (void **)&cp->messages));
    FATTNI_TRY(fattni_host_alloc(ctx, most_pairs(cp) * sizeof *cp->pairs, (void **)&cp->pairs));
    FATTNI_TRY(fattni_host_alloc(ctx, parts_bytes(cp), (void **)&cp->parts));
    FATTNI_TRY(fattni_host_alloc(ctx, tensors_bytes(cp), (void **)&cp->tensors));
    FATTNI_TRY(fattni_alloc(ctx, sizeof(double), &cp->zero));
    FATTNI_TRY(ctx->ops->zero_rows(ctx, cp->zero, 0, sizeof(double), 1));
    if (cp->packed) {
        const fattn_tensor host = fattn_tensor_view(cp->starts, FATTN_I32, FATTN_CPU, 0, 1, &n);
        FATTNI_TRY(fattn_tensor_alloc(ctx, FATTN_I32, 1, &n, &cp->cu_seqlens));
        FATTNI_TRY(fattn_tensor_copy(ctx, &cp->cu_seqlens, &host));
    }
    FATTNI_TRY(agree(cp, o));
    return fattni_comm_least(cp->comm, ctx->gpu.sms, &cp->sms);
}

fattn_status fattn_cp_create(fattn_comm *comm, const fattn_cp_options *opt, fattn_cp **out) {
    if (!out) return FATTN_E_ARG;
    *out = NULL;
    if (!comm) return FATTN_E_ARG;
    fattn_ctx *const ctx = comm->ctx;
    fattn_cp_options o = {.struct_size = sizeof o};
    fattn_status s = FATTN_OK;
    if (!opt) s = fattn_ctx_fail(ctx, FATTN_E_ARG, "cp: the options are NULL");
    if (!s) s = fattni_take_struct(ctx, "fattn_cp_options", opt, &o, sizeof o);
    if (!s) s = check_options(ctx, &o);
    void *p = NULL;
    if (!s) s = fattni_host_alloc(ctx, sizeof(fattn_cp), &p);
    if (s) return fattni_comm_end(comm, s);
    fattn_cp *const cp = p;
    *cp = (fattn_cp){.comm = comm,
                     .ctx = ctx,
                     .form = o.form,
                     .layout = o.layout,
                     .save = o.save,
                     .N = o.rows,
                     .n_sequences = o.cu_seqlens ? o.n_sequences : 1,
                     .packed = o.cu_seqlens != NULL};
    s = fill(cp, &o);
    if (s) {
        fattn_cp_destroy(cp);
        return fattni_comm_end(comm, s);
    }
    *out = cp;
    return FATTN_OK;
}

void fattn_cp_destroy(fattn_cp *cp) {
    if (!cp) return;
    fattn_ctx *const ctx = cp->ctx;
    for (int i = 0; i < FATTNI_CP_USES; ++i) fattni_free(ctx, cp->memory[i], cp->bytes[i]);
    fattn_tensor_free(ctx, &cp->cu_seqlens);
    fattni_free(ctx, cp->zero, sizeof(double));
    for (int i = 0; i < FATTNI_CP_STREAMS; ++i)
        if (cp->side[i]) ctx->ops->stream_destroy(ctx, cp->side[i]);
    fattni_host_free(ctx, cp->tensors, tensors_bytes(cp));
    fattni_host_free(ctx, cp->parts, parts_bytes(cp));
    fattni_host_free(ctx, cp->pairs, most_pairs(cp) * sizeof *cp->pairs);
    fattni_host_free(ctx, cp->messages, 2 * (size_t)cp->comm->size * sizeof *cp->messages);
    fattni_host_free(ctx, cp->starts, ((size_t)cp->n_sequences + 1) * sizeof *cp->starts);
    fattni_host_free(ctx, cp, sizeof *cp);
}

/* ---- rows ---- */

static fattn_status check_rows(fattn_cp *cp, const fattn_tensor *whole, int dim, const fattn_tensor *local) {
    if (!whole || !local) return fattn_ctx_fail(cp->ctx, FATTN_E_ARG, "cp: whole or local is NULL");
    if (dim < 0 || dim >= whole->ndim || whole->ndim != local->ndim)
        return fattn_ctx_fail(cp->ctx, FATTN_E_ARG, "cp: dim %d of a tensor with %d dimensions, the other has %d", dim,
                              whole->ndim, local->ndim);
    if (whole->shape[dim] != cp->N || local->shape[dim] != fattn_cp_rows(cp))
        return fattn_ctx_fail(
            cp->ctx, FATTN_E_SHAPE, "cp: dimension %d has %lld whole and %lld local rows, not %lld, %lld", dim,
            (long long)whole->shape[dim], (long long)local->shape[dim], (long long)cp->N, (long long)fattn_cp_rows(cp));
    return FATTN_OK;
}

fattn_status fattn_cp_take(fattn_cp *cp, const fattn_tensor *whole, int dim, const fattn_tensor *local) {
    fattni_cp_span chunks[FATTNI_CP_CHUNKS];
    if (!cp) return FATTN_E_ARG;
    FATTNI_TRY(check_rows(cp, whole, dim, local));
    const int n = fattni_cp_chunks(cp, cp->comm->rank, chunks);
    for (int i = 0; i < n; ++i) {
        const fattni_cp_span *const c = &chunks[i];
        const fattn_tensor from = fattn_tensor_slice(whole, dim, c->begin, c->end);
        const fattn_tensor to = fattn_tensor_slice(local, dim, c->at, c->at + c->end - c->begin);
        FATTNI_TRY(fattn_tensor_copy(cp->ctx, &to, &from));
    }
    return FATTN_OK;
}

static fattn_status gather(fattn_cp *cp, const fattn_tensor *local, int dim, const fattn_tensor *whole) {
    FATTNI_TRY(check_rows(cp, whole, dim, local));
    const int size = cp->comm->size;
    int64_t most = 0;
    for (int r = 0; r < size; ++r) most = fattni_max(most, fattni_cp_rows_of(cp, r));
    fattn_tensor part = *whole;
    part.shape[dim] = most;
    const size_t room = (size_t)fattni_round_up((int64_t)fattni_cp_bytes(&part), FATTNI_ALIGN);
    void *received, *sent;
    FATTNI_TRY(fattni_cp_room(cp, FATTNI_CP_SEND, room, &sent));
    FATTNI_TRY(fattni_cp_room(cp, FATTNI_CP_RECEIVE, room * (size_t)size, &received));
    const fattn_tensor packed = fattni_cp_view(cp, sent, (fattn_dtype)whole->dtype, local->ndim, local->shape);
    FATTNI_TRY(fattn_tensor_copy(cp->ctx, &packed, local));
    fattn_message *const sends = cp->messages, *const receives = sends + size;
    for (int r = 0; r < size; ++r) {
        part.shape[dim] = fattni_cp_rows_of(cp, r);
        sends[r] = (fattn_message){.data = packed.data, .bytes = fattni_cp_bytes(&packed), .peer = r};
        receives[r] =
            (fattn_message){.data = (char *)received + (size_t)r * room, .bytes = fattni_cp_bytes(&part), .peer = r};
    }
    void *request;
    FATTNI_TRY(fattni_comm_start(cp->comm, sends, size, receives, size, &request));
    FATTNI_TRY(fattni_comm_finish(cp->comm, request));
    for (int r = 0; r < size; ++r) {
        fattni_cp_span chunks[FATTNI_CP_CHUNKS];
        const int n = fattni_cp_chunks(cp, r, chunks);
        part.shape[dim] = fattni_cp_rows_of(cp, r);
        const fattn_tensor from =
            fattni_cp_view(cp, (char *)received + (size_t)r * room, (fattn_dtype)whole->dtype, part.ndim, part.shape);
        for (int i = 0; i < n; ++i) {
            const fattni_cp_span *const c = &chunks[i];
            const fattn_tensor rows = fattn_tensor_slice(&from, dim, c->at, c->at + c->end - c->begin);
            const fattn_tensor to = fattn_tensor_slice(whole, dim, c->begin, c->end);
            FATTNI_TRY(fattn_tensor_copy(cp->ctx, &to, &rows));
        }
    }
    return FATTN_OK;
}

fattn_status fattn_cp_gather(fattn_cp *cp, const fattn_tensor *local, int dim, const fattn_tensor *whole) {
    return cp ? fattni_comm_end(cp->comm, gather(cp, local, dim, whole)) : FATTN_E_ARG;
}

/* ---- calls ---- */

fattn_cp_form fattn_cp_form_of(const fattn_cp *cp, int64_t Hq, int64_t Hkv, const fattn_attention_params *p) {
    if (!cp || Hkv < 1) return FATTN_CP_AUTO;
    if (cp->form != FATTN_CP_AUTO) return (fattn_cp_form)cp->form;
    const uint32_t flags = p ? p->flags : 0;
    const bool deterministic = (flags & FATTN_DETERMINISTIC) || (cp->ctx->flags & FATTN_CTX_DETERMINISTIC);
    const int64_t t = cp->N / cp->comm->size, tiles = Hkv / cp->comm->size * (cp->N / 128); /* of keys, of ULYSSES */
    if (Hkv % cp->comm->size == 0)
        return tiles < 2 * cp->sms && !cp->packed && !deterministic ? FATTN_CP_ALL_GATHER : FATTN_CP_ULYSSES;
    return cp->packed || deterministic || t * Hq < 4096 * Hkv ? FATTN_CP_ALL_GATHER : FATTN_CP_RING;
}

static fattn_status check_params(fattn_ctx *ctx, const fattn_attention_params *p) {
    if (p->q_pos0 || p->k_pos0 || p->max_seqlen_q || p->max_seqlen_k)
        return fattn_ctx_fail(ctx, FATTN_E_ARG,
                              "cp: q_pos0 %lld, k_pos0 %lld, max_seqlen_q %lld, max_seqlen_k %lld: not 0, they follow "
                              "from the ranks' rows",
                              (long long)p->q_pos0, (long long)p->k_pos0, (long long)p->max_seqlen_q,
                              (long long)p->max_seqlen_k);
    if (p->flags & (FATTN_MERGE | FATTN_EXACT_DELTA | FATTN_FP8))
        return fattn_ctx_fail(ctx, FATTN_E_UNSUPPORTED,
                              "cp: flags 0x%x: FATTN_MERGE, FATTN_EXACT_DELTA and FATTN_FP8 are not for it", p->flags);
    if (p->algorithm == FATTN_ALGO_STANDARD)
        return fattn_ctx_fail(ctx, FATTN_E_UNSUPPORTED, "cp: FATTN_ALGO_STANDARD stores N x N, which no rank has");
    return FATTN_OK;
}

static fattn_status check_io(fattn_ctx *ctx, const fattn_cp *cp, const fattn_attention_io *io, bool backward) {
    const struct {
        const char *name;
        const fattn_tensor *t;
    } given[] = {{"q", io->q},     {"k", io->k},         {"v", io->v},   {"o", io->o},   {"lse", io->lse},
                 {"d_o", io->d_o}, {"d_lse", io->d_lse}, {"dq", io->dq}, {"dk", io->dk}, {"dv", io->dv}};
    const int required = backward ? 6 : 5, read = backward ? 10 : 5;
    const int64_t rows = fattn_cp_rows(cp);
    for (int i = 0; i < read; ++i) {
        const fattn_tensor *const t = given[i].t;
        if (i >= required && !t) continue;
        FATTNI_TRY(fattni_check_tensor(ctx, given[i].name, t));
        const int ndim = i == 4 || i == 6 ? 3 : 4;
        if (t->ndim != ndim || t->shape[2] != rows || (cp->packed && t->shape[0] != 1)) {
            char text[96];
            return fattn_ctx_fail(ctx, FATTN_E_SHAPE, "%s: %s, not %d dimensions with %lld rows in dimension 2%s",
                                  given[i].name, fattni_shape_text(t, text, sizeof text), ndim, (long long)rows,
                                  cp->packed ? " and 1 in dimension 0: a packed batch" : "");
        }
    }
    if (io->bias || io->d_bias || io->seqlens_q || io->seqlens_k || io->cu_seqlens_q || io->cu_seqlens_k || io->delta ||
        io->page_table || io->fp8)
        return fattn_ctx_fail(
            ctx, FATTN_E_UNSUPPORTED,
            "cp: bias, lengths, pages, 8-bit copies and delta cannot be given; lengths are those of fattn_cp_create");
    if (io->workspace || io->workspace_bytes)
        return fattn_ctx_fail(ctx, FATTN_E_ARG, "cp: workspace must be NULL, it has memory of its own");
    return FATTN_OK;
}

static fattn_status prepare(fattn_cp *cp, const fattn_attention_params *p, const fattn_attention_io *io, bool backward,
                            fattni_cp_call *c) {
    fattn_ctx *const ctx = cp->ctx;
    *c = (fattni_cp_call){.cp = cp, .p = {.struct_size = sizeof c->p}};
    if (!io) return fattn_ctx_fail(ctx, FATTN_E_ARG, "io: NULL");
    FATTNI_TRY(fattni_take_struct(ctx, "fattn_attention_io", io, &c->io, sizeof c->io));
    if (p) FATTNI_TRY(fattni_take_struct(ctx, "fattn_attention_params", p, &c->p, sizeof c->p));
    c->p.struct_size = sizeof c->p, c->io.struct_size = sizeof c->io;
    FATTNI_TRY(check_params(ctx, &c->p));
    FATTNI_TRY(check_io(ctx, cp, &c->io, backward));
    c->dtype = (fattn_dtype)c->io.q->dtype;
    c->wide = c->dtype == FATTN_F64 ? FATTN_F64 : FATTN_F32;
    c->B = c->io.q->shape[0], c->Hq = c->io.q->shape[1], c->Hkv = c->io.k->shape[1];
    c->D = c->io.q->shape[3], c->Dv = c->io.v->shape[3], c->rows = fattn_cp_rows(cp);
    if (c->Hq < 1 || c->Hkv < 1 || c->Hq % c->Hkv)
        return fattn_ctx_fail(ctx, FATTN_E_SHAPE, "q has %lld heads, k has %lld: not a positive multiple",
                              (long long)c->Hq, (long long)c->Hkv);
    c->causal = c->p.flags & (FATTN_CAUSAL | FATTN_CAUSAL_TOP_LEFT);
    c->deterministic = (c->p.flags & FATTN_DETERMINISTIC) || (ctx->flags & FATTN_CTX_DETERMINISTIC);
    c->form = fattn_cp_form_of(cp, c->Hq, c->Hkv, &c->p);
    if (c->form == FATTN_CP_ULYSSES && c->Hkv % cp->comm->size)
        return fattn_ctx_fail(ctx, FATTN_E_UNSUPPORTED, "cp: ULYSSES needs key heads that %d ranks divide, not %lld",
                              cp->comm->size, (long long)c->Hkv);
    return FATTN_OK;
}

/* Keeps the caller's saved for the form: the attention calls that it makes have none. */
static fattn_status take_saved(fattni_cp_call *c) {
    fattn_ctx *const ctx = c->cp->ctx;
    const size_t needed = fattni_cp_saved_bytes(c->cp, c->form, &c->io);
    if (c->io.saved && (uintptr_t)c->io.saved % FATTNI_ALIGN)
        return fattn_ctx_fail(ctx, FATTN_E_WORKSPACE, "cp: saved %p is not aligned to %d bytes", c->io.saved,
                              FATTNI_ALIGN);
    if (c->io.saved && c->io.saved_bytes < needed)
        return fattn_ctx_fail(ctx, FATTN_E_WORKSPACE, "cp: saved has %zu bytes, %zu are needed", c->io.saved_bytes,
                              needed);
    c->saved = needed ? c->io.saved : NULL;
    c->io.saved = NULL, c->io.saved_bytes = 0;
    return FATTN_OK;
}

fattn_status fattn_cp_saved(fattn_cp *cp, const fattn_attention_params *p, const fattn_attention_io *io,
                            size_t *bytes) {
    fattni_cp_call c;
    if (!cp) return FATTN_E_ARG;
    if (!bytes) return fattn_ctx_fail(cp->ctx, FATTN_E_ARG, "cp: bytes is NULL");
    FATTNI_TRY(prepare(cp, p, io, false, &c));
    *bytes = fattni_cp_saved_bytes(cp, c.form, &c.io);
    return FATTN_OK;
}

static fattn_status run(fattn_cp *cp, const fattn_attention_params *p, const fattn_attention_io *io, bool backward) {
    static fattn_status (*const forms[][2])(fattni_cp_call *) = {
        [FATTN_CP_RING] = {fattni_cp_ring_fwd, fattni_cp_ring_bwd},
        [FATTN_CP_ALL_GATHER] = {fattni_cp_gather_fwd, fattni_cp_gather_bwd},
        [FATTN_CP_ULYSSES] = {fattni_cp_ulysses_fwd, fattni_cp_ulysses_bwd}};
    fattni_cp_call c;
    FATTNI_TRY(prepare(cp, p, io, backward, &c));
    FATTNI_TRY(take_saved(&c));
    return forms[c.form][backward](&c);
}

fattn_status fattn_cp_fwd(fattn_cp *cp, const fattn_attention_params *p, const fattn_attention_io *io) {
    return cp ? fattni_comm_end(cp->comm, run(cp, p, io, false)) : FATTN_E_ARG;
}

fattn_status fattn_cp_bwd(fattn_cp *cp, const fattn_attention_params *p, const fattn_attention_io *io) {
    return cp ? fattni_comm_end(cp->comm, run(cp, p, io, true)) : FATTN_E_ARG;
}
