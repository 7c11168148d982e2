/* ULYSSES: heads of whole sequences. Every rank's tensors go to Hq / size query heads and Hkv / size key heads of all
   rows, and the results back; between, the call is that of one device. On one rank nothing moves.

   A rank's heads are computed in groups: on a GPU other groups' tensors come and leave while one is computed. Where the
   transport moves parts, which need no copies before or after, all groups' tensors are on their way from the beginning,
   results leave as they are there, and the call's stream waits once for all that has left. Else there are buffers for
   two groups: the next one's tensors come while one is computed, and the results of the one before leave. */
#include "core/context_parallel/cp.h"

enum { Q, K, V, O, LSE, D_O, D_LSE, INPUTS };
enum { SAVED = LSE + 1 }; /* the first of these */

/* A call over ranks: its tensors as this rank's rows and as whole sequences of this rank's heads. Those from first_in
   to n_in - 1 move, those before are in `saved`; those from first_out on return to rows. */
typedef struct flow {
    const fattni_cp_call *c;
    fattn_tensor local[INPUTS + 3], whole[INPUTS + 3];
    int first_in, n_in, first_out, n;
    int d_lse, dq, dk, dv; /* places; 0: there is none */
    int groups;
    int64_t first_head[FATTNI_CP_GROUPS + 1]; /* of each group, among the rank's key heads; the last: their number */
    bool at_once;                             /* all inputs are on their way from the beginning */
    int streams;                              /* groups are on these by turns */
    fattn_stream main;
} flow;

/* Streams that groups are on by turns, as measured on two H200: backward loses up to 5 % by a second one. */
enum { FORWARD_STREAMS = FATTNI_CP_STREAMS, BACKWARD_STREAMS = 1 };
/* A group never has so few tiles that a kernel splits keys, which gives other bits: at most 64 blocks of rows. */
enum { FEWEST_SMS = 48 };

/* The fewest key heads that fill a GPU evenly. Under a causal mask the tiles of a head go from long to short, and a CTA
   that has had a short one of the first head gets a long one of the next: that takes two tiles for each SM, or so many
   times as many. */
static int64_t even_heads(const fattni_cp_call *c, bool backward) {
    const int64_t rows = !backward && c->D <= 64 ? 192 : 128; /* of a tile, on Hopper; backward: keys */
    const int64_t tiles = c->B * (backward ? 1 : c->Hq / c->Hkv) * fattni_ceil_div(c->cp->N, rows);
    const int64_t wanted = 2 * fattni_max(c->cp->sms, FEWEST_SMS);
    return fattni_ceil_div(wanted - wanted / 16, fattni_max(1, tiles));
}

/* `units` of heads as n groups of about the same size. */
static void split_evenly(flow *f, int64_t units, int64_t n, int64_t unit) {
    f->groups = (int)n;
    for (int64_t g = 0; g < n; ++g) f->first_head[g] = units * g / n * unit;
}

/* What the first group needs and the last one gives moves while nothing is computed: these have one unit each, and what
   is between is one group. Of two groups the larger one moves less. */
static void split_small_ends(flow *f, int64_t units, int64_t unit) {
    const bool less_comes = f->n_in - f->first_in < f->n - f->first_out;
    f->groups = units > 3 ? 3 : 2;
    f->first_head[0] = 0;
    f->first_head[1] = f->groups == 2 && less_comes ? (units - 1) * unit : unit;
    if (f->groups == 3) f->first_head[2] = (units - 1) * unit;
}

/* On a GPU groups are multiples of even_heads, the last has the rest; forward, whose kernels overlap, has many, and
   backward few, because each costs some twenty microseconds. On the CPU, where nothing moves meanwhile, up to three:
   the same order of moves. */
static void choose_groups(flow *f, bool backward) {
    const fattn_cp *const cp = f->c->cp;
    const int64_t heads = f->c->Hkv / cp->comm->size;
    const bool fills = !cp->groups && !cp->ctx->ops->on_host;
    const int64_t unit = fills ? even_heads(f->c, backward) : 1, units = fattni_max(1, heads / unit);
    const int64_t most = cp->groups ? cp->groups : fills ? FATTNI_CP_GROUPS : 3;
    if (fills && backward && units > 1)
        split_small_ends(f, units, unit);
    else
        split_evenly(f, units, fattni_min(fattni_min(most, FATTNI_CP_GROUPS), units), unit);
    f->first_head[f->groups] = heads;
}

/* Rows as [B,H,rows,W]: what a rank's heads of all rows are, without data. */
static fattn_tensor whole_of(const fattn_cp *cp, const fattn_tensor *rows) {
    const int64_t shape[4] = {rows->shape[0], rows->shape[1] / cp->comm->size, cp->N, rows->shape[3]};
    return fattni_cp_view(cp, NULL, (fattn_dtype)rows->dtype, 4, shape);
}

static int add(flow *f, const fattn_tensor *t) {
    const int at = f->n++;
    f->local[at] = fattni_cp_rows_4d(t);
    f->whole[at] = whole_of(f->c->cp, &f->local[at]);
    return at;
}

size_t fattni_cp_saved_bytes(const fattn_cp *cp, fattn_cp_form form, const fattn_attention_io *io) {
    const fattn_tensor *const tensors[SAVED] = {io->q, io->k, io->v, io->o, io->lse};
    fattn_tensor whole[SAVED];
    if (form != FATTN_CP_ULYSSES || cp->comm->size == 1) return 0;
    for (int i = 0; i < SAVED; ++i) {
        const fattn_tensor rows = fattni_cp_rows_4d(tensors[i]);
        whole[i] = whole_of(cp, &rows);
    }
    return fattni_cp_lay_out(whole, SAVED, NULL);
}

static fattni_cp_move move_of(const flow *f, int first, int n, int g, int slot) {
    const int64_t head = f->first_head[g];
    return (fattni_cp_move){.c = f->c,
                            .local = f->local + first,
                            .whole = f->whole + first,
                            .n = n,
                            .by_heads = true,
                            .head = head,
                            .heads = f->first_head[g + 1] - head,
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
    const int64_t head = f->first_head[g], heads = f->first_head[g + 1] - head, group = c->Hq / c->Hkv;
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

/* The moves of a call. `finished` of the results have been. */
typedef struct moves {
    fattni_cp_move in[FATTNI_CP_GROUPS], out[FATTNI_CP_GROUPS];
    int started, finished;
} moves;

static fattn_status start_inputs(flow *f, moves *m, int groups) {
    for (; m->started < fattni_min(groups, f->groups); ++m->started) {
        const int g = m->started;
        m->in[g] = move_of(f, f->first_in, f->n_in - f->first_in, g, f->at_once ? g : g % 2);
        m->in[g].exposed = g == 0;
        FATTNI_TRY(fattni_cp_start_to_whole(&m->in[g]));
    }
    return FATTN_OK;
}

static fattn_status start_results(flow *f, moves *m, int g) {
    m->out[g] = move_of(f, f->first_out, f->n - f->first_out, g, f->at_once ? FATTNI_CP_GROUPS + g : 2 + g % 2);
    m->out[g].exposed = g + 1 == f->groups;
    return fattni_cp_start_to_rows(&m->out[g]);
}

static fattn_status finish_results(const flow *f, moves *m, int groups) {
    for (; f->n > f->first_out && m->finished < groups; ++m->finished)
        FATTNI_TRY(fattni_cp_finish_to_rows(&m->out[m->finished]));
    return FATTN_OK;
}

/* Moves must be finished in the order of their starts: all inputs, then all results; or those of group 0 and 1, then by
   turns results and inputs. */
static fattn_status compute_groups(flow *f, moves *m, bool backward) {
    fattn_ctx *const ctx = f->c->cp->ctx;
    for (int g = 0; g < f->groups; ++g) {
        if (!f->at_once) FATTNI_TRY(start_inputs(f, m, g + 2));
        f->c->cp->on_stream = g % f->streams;
        ctx->stream = g % f->streams ? f->c->cp->side[g % f->streams] : f->main;
        FATTNI_TRY(f->at_once ? fattni_cp_receive_whole(&m->in[g]) : fattni_cp_finish_to_whole(&m->in[g]));
        FATTNI_TRY(run(f, backward, g));
        if (f->n == f->first_out) continue;
        if (!f->at_once) FATTNI_TRY(finish_results(f, m, g));
        FATTNI_TRY(start_results(f, m, g));
    }
    return FATTN_OK;
}

/* A kernel's last tiles leave SMs idle, which those of the next group's kernel fill if it is on another stream; not
   where kernels may have only some SMs. */
static fattn_status fork_streams(flow *f, bool backward) {
    fattn_cp *const cp = f->c->cp;
    fattn_ctx *const ctx = cp->ctx;
    f->main = ctx->stream;
    f->streams = 1;
    if (!ctx->ops->stream_create || !f->at_once || ctx->sm_limit > 0) return FATTN_OK;
    for (; f->streams < fattni_min(f->groups, backward ? BACKWARD_STREAMS : FORWARD_STREAMS); ++f->streams) {
        fattn_stream *const side = &cp->side[f->streams];
        if (!*side) FATTNI_TRY(ctx->ops->stream_create(ctx, side));
        FATTNI_TRY(ctx->ops->stream_order(ctx, f->main, *side));
    }
    return FATTN_OK;
}

/* After failures, too: the caller frees memory on its own stream. */
static fattn_status join_streams(flow *f) {
    fattn_cp *const cp = f->c->cp;
    fattn_status s = FATTN_OK;
    cp->on_stream = 0;
    cp->ctx->stream = f->main;
    for (int i = 1; i < f->streams; ++i) {
        const fattn_status joined = cp->ctx->ops->stream_order(cp->ctx, cp->side[i], f->main);
        if (!s) s = joined;
    }
    return s;
}

static fattn_status flow_through(flow *f, bool backward) {
    const int n_out = f->n - f->first_out, kept = f->c->saved ? SAVED : 0;
    moves m = {.started = 0};
    choose_groups(f, backward);
    f->at_once = f->c->cp->comm->parts != NULL;
    fattni_cp_lay_out(f->whole, kept, f->c->saved);
    FATTNI_TRY(fattni_cp_wholes(f->c, f->whole + kept, f->n - kept));
    fattni_cp_move own = move_of(f, f->first_in, f->n_in - f->first_in, 0, 0);
    fattni_cp_move own_results = move_of(f, f->first_out, n_out, 0, 0);
    own.heads = own_results.heads = f->first_head[f->groups];
    FATTNI_TRY(start_inputs(f, &m, f->at_once ? f->groups : 1));
    FATTNI_TRY(fattni_cp_own_to_whole(&own)); /* while the first group's are under way */
    fattn_status s = fork_streams(f, backward);
    if (!s) s = compute_groups(f, &m, backward);
    const fattn_status joined = join_streams(f);
    if (!s) s = joined;
    if (!s) s = fattni_cp_own_to_rows(&own_results); /* while the last group's leave: not between two kernels */
    if (s) return s;
    return f->at_once ? fattni_cp_finish_all(m.in, f->groups, m.out, n_out ? f->groups : 0)
                      : finish_results(f, &m, f->groups);
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
    flow f = {.c = c, .first_in = c->saved ? D_O : Q};
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
