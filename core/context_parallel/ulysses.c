/* ULYSSES: heads of whole sequences. Every rank's tensors go to Hq / size query heads and Hkv / size key heads of all
   rows, and the results back; between, the call is that of one device. On one rank nothing moves. */
#include "core/context_parallel/cp.h"

enum { MOST = 7 }; /* tensors that move to whole sequences: q, k, v, o, lse, d_o, d_lse */

static const fattn_tensor *heads_of(const fattn_tensor *t, int64_t begin, int64_t end, fattn_tensor *out) {
    if (!t) return NULL;
    *out = fattn_tensor_slice(t, 0, begin, end);
    return out;
}

/* The part of this rank: its heads, their dropout bits, the whole sequences' lengths. */
static void whole_call(const fattni_cp_call *c, fattn_attention_params *p, fattn_attention_io *io, fattn_tensor t[3]) {
    const fattn_cp *const cp = c->cp;
    const int64_t heads = c->Hq / cp->comm->size, first = cp->comm->rank * heads;
    if (p->rng_heads == 0) p->rng_heads = (int32_t)c->Hq;
    p->rng_head0 += (int32_t)first;
    io->alibi = heads_of(io->alibi, first, first + heads, &t[0]);
    io->sink = heads_of(io->sink, first, first + heads, &t[1]);
    io->d_sink = heads_of(io->d_sink, first, first + heads, &t[2]);
    if (!cp->packed) return;
    io->cu_seqlens_q = io->cu_seqlens_k = &cp->cu_seqlens;
    p->max_seqlen_q = p->max_seqlen_k = cp->longest;
}

static fattn_tensor whole_of(const fattni_cp_call *c, const fattn_tensor *rows, fattn_dtype dtype) {
    const int64_t shape[4] = {c->B, rows->shape[1] / c->cp->comm->size, c->cp->N, rows->shape[3]};
    return fattni_cp_view(c->cp, NULL, dtype, 4, shape);
}

static fattn_tensor as_lse(const fattn_tensor *t) {
    fattn_tensor x = *t;
    x.ndim = 3;
    return x;
}

static fattn_status run(const fattni_cp_call *c, bool backward, fattn_attention_io *io) {
    fattn_attention_params p = c->p;
    fattn_tensor t[3];
    whole_call(c, &p, io, t);
    return fattni_cp_call_attention(c, backward, &p, io);
}

fattn_status fattni_cp_ulysses_fwd(fattni_cp_call *c) {
    fattn_attention_io io = c->io;
    if (c->cp->comm->size == 1) return run(c, false, &io);
    const fattn_tensor local[5] = {*io.q, *io.k, *io.v, *io.o, fattni_cp_rows_4d(io.lse)};
    fattn_tensor whole[5];
    for (int i = 0; i < 5; ++i) whole[i] = whole_of(c, &local[i], (fattn_dtype)local[i].dtype);
    FATTNI_TRY(fattni_cp_wholes(c, whole, 5));
    FATTNI_TRY(fattni_cp_to_whole(c, local, 3, true, whole));
    const fattn_tensor lse = as_lse(&whole[4]);
    io.q = &whole[0], io.k = &whole[1], io.v = &whole[2], io.o = &whole[3], io.lse = &lse;
    FATTNI_TRY(run(c, false, &io));
    return fattni_cp_to_rows(c, whole + 3, 2, local + 3);
}

fattn_status fattni_cp_ulysses_bwd(fattni_cp_call *c) {
    fattn_cp *const cp = c->cp;
    fattn_attention_io io = c->io;
    if (io.d_sink && !(c->p.flags & FATTN_ACC_DSINK) && cp->comm->size > 1)
        FATTNI_TRY(fattni_cp_zero(cp, io.d_sink)); /* the other ranks' heads */
    if (cp->comm->size == 1) return run(c, true, &io);

    fattn_tensor local[MOST + 3], whole[MOST + 3];
    const fattn_tensor *gradients[3] = {NULL, NULL, NULL};
    const fattn_tensor *const inputs[MOST] = {io.q, io.k, io.v, io.o, io.lse, io.d_o, io.d_lse};
    const int n = io.d_lse ? MOST : MOST - 1;
    for (int i = 0; i < n; ++i) {
        local[i] = fattni_cp_rows_4d(inputs[i]);
        whole[i] = whole_of(c, &local[i], (fattn_dtype)local[i].dtype);
    }
    /* First those that are added to: they move to whole sequences, too, so that the sums are those of one device. */
    const struct {
        const fattn_tensor **of, *like;
        uint32_t flag;
    } wanted[3] = {{&io.dq, io.q, FATTN_ACC_DQ}, {&io.dk, io.k, FATTN_ACC_DK}, {&io.dv, io.v, FATTN_ACC_DV}};
    int results = 0, added = 0;
    for (int pass = 0; pass < 2; ++pass)
        for (int i = 0; i < 3; ++i) {
            const fattn_tensor *const t = *wanted[i].of;
            const bool adds = c->p.flags & wanted[i].flag;
            if (!t || adds != (pass == 0)) continue;
            const int at = n + results++;
            local[at] = *t;
            whole[at] = whole_of(c, wanted[i].like, (fattn_dtype)t->dtype);
            gradients[i] = &whole[at];
            added += adds;
        }
    io.dq = gradients[0], io.dk = gradients[1], io.dv = gradients[2];
    FATTNI_TRY(fattni_cp_wholes(c, whole, n + results));
    FATTNI_TRY(fattni_cp_to_whole(c, local, n + added, true, whole));
    const fattn_tensor lse = as_lse(&whole[4]), d_lse = as_lse(&whole[n - 1]);
    io.q = &whole[0], io.k = &whole[1], io.v = &whole[2], io.o = &whole[3], io.lse = &lse, io.d_o = &whole[5];
    if (io.d_lse) io.d_lse = &d_lse;
    FATTNI_TRY(run(c, true, &io));
    return results ? fattni_cp_to_rows(c, whole + n, results, local + n) : FATTN_OK;
}
