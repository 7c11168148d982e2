/* Into how many tiles a Hopper forward kernel divides the keys of a row block: parts run on several SMs, and cost the
   exchange of their O (fwd_sm90_parts.cuh). A call of few heads has fewer row blocks than there are SMs, or is as slow
   as the longest of them below a diagonal. And in which order whole row blocks below a diagonal are claimed
   (core/cuda/order.c). */
#include "core/cuda/device.h"
#include "core/cuda/sm90.h"
#include "fwd/cuda/fwd_cuda.h"

/* In tenths of a step (a key block), measured at head_dim 64, 128 and 256: what a tile takes beside its steps, what a
   part takes to store its O, and what the last one takes to wait for the others and to add each; and what the kernel
   that divides takes more than the others, beside a sixteenth of all. */
enum { STEP = 10, TILE = 30, STORE = 30, WAIT = 40, ADD = 6, START = 13 };
enum { NEXT_TILE = 10 }; /* TILE where SMs have several: the loads of one are beside the steps of the last */
/* ROUNDS: of parts on all SMs, which bounds the workspace. */
enum { MOST_SMS = 256, MOST_BLOCKS = 3 * MOST_SMS / 2, MOST_PARTS = 16, ROUNDS = 4 };

/* A call's row blocks: of each of `planes` heads `count`, which see so many key blocks. */
typedef struct row_blocks {
    int32_t count, planes, longest;
    int32_t keys[MOST_BLOCKS];
} row_blocks;

static int32_t parts_of(int32_t blocks, int32_t most) { return blocks > most ? (blocks + most - 1) / most : 1; }

/* When the last tile ends, about, with parts of at most `most` key blocks: with more tiles than SMs these share the
   work, and the last to start ends half of the longest tile later. work: of an SM. */
static int32_t end_of(const row_blocks *x, int32_t most, int32_t sms, int32_t *work) {
    const int32_t parts = parts_of(x->longest, most);
    const int32_t longest =
        STEP * ((x->longest + parts - 1) / parts) + TILE + (parts > 1 ? WAIT + ADD * (parts - 1) : 0);
    int32_t all = 0, tiles = 0;
    for (int32_t n = 0; n < x->count; ++n) {
        const int32_t own = parts_of(x->keys[n], most);
        all += STEP * x->keys[n] + TILE * own + (own > 1 ? (STORE + ADD) * (own - 1) + WAIT : 0), tiles += own;
    }
    *work = all * x->planes / sms;
    if (tiles * x->planes <= sms) return longest;
    return (int32_t)fattni_max(longest, *work + longest / 2);
}
/* Key blocks of a part, at most: of the longest row block's in one part, two, three, ... those with which a call ends
   soonest. */
static int32_t part_blocks(const row_blocks *x, int32_t sms) {
    int32_t work, best = x->longest, end = (end_of(x, best, sms, &work) - START) * 16 / 17;
    for (int32_t parts = 2; parts <= MOST_PARTS && parts <= x->longest; ++parts) {
        if (parts * x->count * x->planes > ROUNDS * sms) break;
        const int32_t most = (x->longest + parts - 1) / parts, with = end_of(x, most, sms, &work);
        if (with < end) best = most, end = with;
        if (work >= end) break;
    }
    return best;
}

/* At most MOST_BLOCKS of a head. */
static row_blocks row_blocks_of_call(const fattni_problem *p, const fattni_cuda_kernel *k) {
    fattni_problem longest = *p; /* lengths are on the device */
    longest.seqlens_q.present = longest.seqlens_k.present = false;
    const fattni_band band = fattni_sequence_of(&longest, 0).band;
    row_blocks rows = {.planes = (int32_t)(p->Hq * p->B)};
    for (int64_t i0 = 0; i0 < p->Sq; i0 += k->BM) {
        const fattni_range keys = fattni_keys_of(&band, i0, i0 + k->BM);
        const int64_t blocks = keys.end > keys.begin ? fattni_ceil_div(keys.end, k->BN) - keys.begin / k->BN : 1;
        rows.keys[rows.count++] = (int32_t)blocks;
        rows.longest = (int32_t)fattni_max(rows.longest, blocks);
    }
    return rows;
}

fattni_fwd_parts fattni_fwd_sm90_parts(const fattn_ctx *ctx, const fattni_problem *p, const fattni_cuda_kernel *k) {
    const int64_t planes = p->Hq * p->B, count = fattni_ceil_div(p->Sq, k->BM), all = count * planes;
    const int64_t sms = ctx->gpu.all_sms;
    fattni_fwd_parts x = {.most = 1, .blocks = 1};
    /* Deterministic calls: the bits of a head do not depend on how many there are. */
    if (k->variant != FATTNI_VARIANT_PARTS || p->packed || all == 0 || 2 * all > 3 * sms || sms > MOST_SMS ||
        p->Sk > 1 << 20 || (p->flags & FATTN_DETERMINISTIC))
        return x;
    const row_blocks rows = row_blocks_of_call(p, k);
    const int32_t blocks = part_blocks(&rows, (int32_t)sms);
    if (blocks >= rows.longest) return x;
    x.most = parts_of(rows.longest, blocks), x.blocks = blocks;
    return x;
}

static bool is_causal(const fattni_cuda_kernel *k) {
    return k->variant == FATTNI_VARIANT_CAUSAL || k->variant == FATTNI_VARIANT_SHORT;
}
int32_t fattni_fwd_sm90_keyless(const fattni_problem *p, const fattni_cuda_kernel *k) {
    if (!is_causal(k) || p->o.dtype != (int32_t)p->dtype || !fattni_sm90_maps(&p->o, p->Dv)) return 0;
    return fattni_fwd_keyless((int32_t)fattni_sequence_of(p, 0).diagonal, k->BM,
                              (int32_t)fattni_ceil_div(p->Sq, k->BM));
}

fattni_block_order fattni_fwd_sm90_order(const fattn_ctx *ctx, const fattni_problem *p, const fattni_cuda_kernel *k,
                                         const fattni_fwd_parts *parts) {
    const int64_t planes = p->Hq * p->B, count = fattni_ceil_div(p->Sq, k->BM) - fattni_fwd_sm90_keyless(p, k);
    if (!is_causal(k) || parts->most > 1 || p->Sk > 1 << 20 || !fattni_sm90_may_order(count, planes, ctx->gpu.sms))
        return (fattni_block_order){0};
    const row_blocks rows = row_blocks_of_call(p, k);
    int32_t times[FATTNI_ORDERED_BLOCKS];
    for (int32_t n = 0; n < count; ++n)
        times[n] = STEP * rows.keys[rows.count - 1 - n] + NEXT_TILE; /* last rows first */
    return fattni_sm90_order_of(times, count, planes, ctx->gpu.sms);
}

static int64_t row_blocks_of(const fattni_problem *p, const fattni_cuda_kernel *k) {
    return fattni_ceil_div(p->Sq, k->BM) * p->Hq * p->B;
}
size_t fattni_fwd_parts_stored(const fattni_problem *p, const fattni_cuda_kernel *k, const fattni_fwd_parts *x) {
    return x->most > 1 ? (size_t)fattni_round_up(row_blocks_of(p, k) * (int64_t)sizeof(int32_t), FATTNI_ALIGN) : 0;
}
size_t fattni_fwd_parts_rows(const fattni_problem *p, const fattni_cuda_kernel *k, const fattni_fwd_parts *x) {
    return x->most > 1 ? (size_t)(row_blocks_of(p, k) * x->most * k->BM) * sizeof(fattni_part_row) : 0;
}
size_t fattni_fwd_parts_sums(const fattni_problem *p, const fattni_cuda_kernel *k, const fattni_fwd_parts *x) {
    return (size_t)(row_blocks_of(p, k) * (x->most - 1) * k->BM * k->Dv) * sizeof(float);
}
