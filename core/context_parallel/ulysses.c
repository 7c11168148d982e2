/* ULYSSES: heads of whole sequences. Every rank's tensors go to Hq / size query heads and Hkv / size key heads of all
   rows, and the results back; between, the call is that of one device. On one rank nothing moves.

   A rank's heads are computed in groups: on a GPU the next one's tensors come while one is computed, and the results of
   the one before leave. */
#include "core/context_parallel/cp.h"

enum { Q, K, V, O, LSE, D_O, D_LSE, INPUTS, MOST_GROUPS = 4 };

/* A call over ranks: its tensors as this rank's rows and as whole sequences of this rank's heads. Those from first_out
   on return to rows. */
typedef struct flow {
    const fattni_cp_call *c;
    fattn_tensor local[INPUTS + 3], whole[INPUTS + 3];
    int n_in, first_out, n;
    int d_lse, dq, dk, dv; /* places; 0: there is none */
    int groups;
} flow;

/* On a GPU as many as leave each group enough tiles to fill it. On the CPU, where nothing moves meanwhile, two: the
   same order of moves. */
static int groups_of(const fattni_cp_call *c, bool backward) {
    const int64_t heads = c->Hkv / c->cp->comm->size, of_tiles = backward ? heads : c->Hq / c->cp->comm->size;
    if (c->cp->ctx->ops->on_host) return heads > 1 ? 2 : 1;
    const int64_t n = fattni_cp_full_parts(c, of_tiles, c->cp->N);
    return (int)fattni_max(1, fattni_min(fattni_min(heads, MOST_GROUPS), n));
}

/* A rank's key heads of group g. */
static int64_t first_head(const flow *f, int g) { return f->c->Hkv / f->c->cp->comm->size * g / f->groups; }

static int add(flow *f, const fattn_tensor *t) {
    const fattn_cp *const cp = f->c->cp;
    const int at = f->n++;
    fattn_tensor *const local = &f->local[at];
    *local = fattni_cp_rows_4d(t);
    const int64_t shape[4] = {f->c->B, local->shape[1] / cp->comm->size, cp->N, local->shape[3]};
    f->whole[at] = fattni_cp_view(cp, NULL, (fattn_dtype)t->dtype, 4, shape);
    return at;
}

static fattni_cp_move move_of(const flow *f, int first, int n, int g, int slot) {
    const int64_t head = first_head(f, g);
    return (fattni_cp_move){.c = f->c,
                            .local = f->local + first,
                            .whole = f->whole + first,
                            .n = n,
                            .by_heads = true,
                            .head = head,
                            .heads = first_head(f, g + 1) - head,
                            .slot = slot};
}

/* These of the whole call's query heads: what there is of each head, and the dropout bits. */
static void take_heads(const fattni_cp_call *c, int64_t first, int64_t n, fattn_attention_params *p,
                       fattn_attention_io *io, fattn_tensor t[3]) {
    const fattn_cp *const cp = c->cp;
    if (p->rng_heads == 0) p->rng_heads = (int32_t)c->Hq;
    p->rng_head0 += (int32_t)first;
    io->alibi = fattni_cp_slice(io->alibi, 0, first, first + n, &t[0]);
    io->sink = fattni_cp_slice(io->sink, 0, first, first + n, &t[1]);
    io->d_sink = fattni_cp_slice(io->d_sink, 0, first, first + n, &t[2]);
    if (!cp->packed) return;
    io->cu_seqlens_q = io->cu_seqlens_k = &cp->cu_seqlens;
    p->max_seqlen_q = p->max_seqlen_k = cp->longest;
}

/* One device's call, of group g. */
static fattn_status run(const flow *f, bool backward, int g) {
    const fattni_cp_call *const c = f->c;
    const int64_t head = first_head(f, g), heads = first_head(f, g + 1) - head, group = c->Hq / c->Hkv;
    fattn_attention_params p = c->p;
    fattn_attention_io io = c->io;
    fattn_tensor of_heads[3], t[INPUTS + 3];
    take_heads(c, (c->cp->comm->rank * (c->Hkv / c->cp->comm->size) + head) * group, heads * group, &p, &io, of_heads);
    for (int i = 0; i < f->n; ++i) {
        const int64_t each = f->local[i].shape[1] / c->Hkv;
        fattni_cp_slice(&f->whole[i], 1, head * each, (head + heads) * each, &t[i]);
    }
    t[LSE].ndim = 3;
    if (f->d_lse) t[f->d_lse].ndim = 3;
    io.q = &t[Q], io.k = &t[K], io.v = &t[V], io.o = &t[O], io.lse = &t[LSE];
    if (backward) io.d_o = &t[D_O];
    io.d_lse = f->d_lse ? &t[f->d_lse] : NULL;
    io.dq = f->dq ? &t[f->dq] : NULL, io.dk = f->dk ? &t[f->dk] : NULL, io.dv = f->dv ? &t[f->dv] : NULL;
    return fattni_cp_call_attention(c, backward, &p, &io);
}

/* Moves are finished in the order of their starts: those of group 0 and 1, then by turns results and inputs. */
static fattn_status flow_through(flow *f, bool backward) {
    fattni_cp_move in[2], out[2];
    const int n_out = f->n - f->first_out;
    f->groups = groups_of(f->c, backward);
    FATTNI_TRY(fattni_cp_wholes(f->c, f->whole, f->n));
    in[0] = move_of(f, 0, f->n_in, 0, 0);
    FATTNI_TRY(fattni_cp_start_to_whole(&in[0]));
    for (int g = 0; g < f->groups; ++g) {
        if (g + 1 < f->groups) {
            in[(g + 1) % 2] = move_of(f, 0, f->n_in, g + 1, (g + 1) % 2);
            FATTNI_TRY(fattni_cp_start_to_whole(&in[(g + 1) % 2]));
        }
        FATTNI_TRY(fattni_cp_finish_to_whole(&in[g % 2]));
        FATTNI_TRY(run(f, backward, g));
        if (n_out == 0) continue;
        if (g > 0) FATTNI_TRY(fattni_cp_finish_to_rows(&out[(g - 1) % 2]));
        out[g % 2] = move_of(f, f->first_out, n_out, g, 2 + g % 2);
        FATTNI_TRY(fattni_cp_start_to_rows(&out[g % 2]));
    }
    return n_out ? fattni_cp_finish_to_rows(&out[(f->groups - 1) % 2]) : FATTN_OK;
}

/* On one rank: the call as it is, with the sequences' lengths. */
static fattn_status run_alone(const fattni_cp_call *c, bool backward) {
    fattn_attention_params p = c->p;
    fattn_attention_io io = c->io;
    fattn_tensor t[3];
    take_heads(c, 0, c->Hq, &p, &io, t);
    return fattni_cp_call_attention(c, backward, &p, &io);
}

fattn_status fattni_cp_ulysses_fwd(fattni_cp_call *c) {
    const fattn_attention_io *const io = &c->io;
    flow f = {.c = c};
    if (c->cp->comm->size == 1) return run_alone(c, false);
    const fattn_tensor *const tensors[] = {io->q, io->k, io->v, io->o, io->lse};
    for (int i = 0; i < 5; ++i) add(&f, tensors[i]);
    f.n_in = f.first_out = O;
    return flow_through(&f, false);
}

fattn_status fattni_cp_ulysses_bwd(fattni_cp_call *c) {
    const fattn_attention_io *const io = &c->io;
    flow f = {.c = c};
    if (c->cp->comm->size == 1) return run_alone(c, true);
    if (io->d_sink && !(c->p.flags & FATTN_ACC_DSINK))
        FATTNI_TRY(fattni_cp_zero(c->cp, io->d_sink)); /* the other ranks' heads */
    const fattn_tensor *const tensors[] = {io->q, io->k, io->v, io->o, io->lse, io->d_o};
    for (int i = 0; i < D_LSE; ++i) add(&f, tensors[i]);
    if (io->d_lse) f.d_lse = add(&f, io->d_lse);
    /* First those that are added to: they move to whole sequences, too, so that the sums are those of one device. */
    const struct {
        const fattn_tensor *t;
        int *place;
        uint32_t flag;
    } wanted[3] = {{io->dq, &f.dq, FATTN_ACC_DQ}, {io->dk, &f.dk, FATTN_ACC_DK}, {io->dv, &f.dv, FATTN_ACC_DV}};
    f.first_out = f.n_in = f.n;
    for (int pass = 0; pass < 2; ++pass)
        for (int i = 0; i < 3; ++i) {
            const bool adds = c->p.flags & wanted[i].flag;
            if (!wanted[i].t || adds != (pass == 0)) continue;
            *wanted[i].place = add(&f, wanted[i].t);
            f.n_in += adds;
        }
    return flow_through(&f, true);
}
