/* The CUDA row of the forward table: chooses a kernel of fwd_kernels.def, fills its arguments and launches it. */
#include "fwd/cuda/fwd_cuda.h"

#include "core/attention/kernel.h"
#include "core/cuda/device.h"
#include "core/cuda/sm90.h"
#include "fwd/cuda/fwd_pages.h"
#include "fwd/cuda/fwd_parts.h"
#include "fwd/cuda/fwd_split.h"
#include "fwd/cuda/fwd_decode.h"

#include <string.h>

/* ---- the choice ---- */

/* The properties of a call that kernels are chosen by. */
typedef struct traits {
    int variant;
    bool sm90;     /* the Hopper kernels support it */
    bool maps_o;   /* O has a tensor map */
    bool biased;   /* the bias has one, and there is no other general feature */
    bool few;      /* few rows, whose keys are split */
    bool unified;  /* FATTN_UNIFIED_MAX */
    bool vector;   /* rows are loaded in vectors */
    int64_t tiles; /* of few rows, at least */
    int64_t sms;
} traits;

/* Heads whose rows share tiles, where keys are split. */
static int64_t tile_heads_of(const fattni_problem *p) {
    return p->alibi.present || p->bias.present || p->drop_T ? 1 : p->group;
}

/* Beyond head_dim 128 Hopper's general kernels have no registers left for a bias. */
static bool has_bias(const fattni_cuda_kernel *k) { return k->D <= 128; }

/* o is stored with 16-byte accesses, unless it is F32; positions must be multiples of dropout's 16 x 16 blocks. */
static bool sm90_supports(const fattni_problem *p) {
    if (p->drop_T && ((p->q_pos0 | p->k_pos0) & 15)) return false;
    return fattni_sm90_maps_inputs(p) && (p->o.dtype == FATTN_F32 || fattni_cuda_vector(&p->o, p->Dv));
}

static traits traits_of(const fattn_ctx *ctx, const fattni_problem *p) {
    return (traits){.variant = fattni_cuda_variant_of(p, p->flags & FATTN_MERGE),
                    .sm90 = ctx->gpu.arch == 90 && sm90_supports(p),
                    .maps_o = p->o.dtype == (int32_t)p->dtype && fattni_sm90_maps(&p->o, p->Dv),
                    .biased = fattni_sm90_stages_bias(p),
                    .few = p->Sq <= FATTNI_FEW_ROWS && tile_heads_of(p) * p->Sq <= INT32_MAX, /* rows are ints */
                    .unified = p->flags & FATTN_UNIFIED_MAX,
                    .vector = fattni_cuda_args_of(p).vector_qkv,
                    .tiles = p->B * p->Hkv,
                    .sms = ctx->gpu.sms};
}

static int64_t blocks_of(const fattni_problem *p, const fattni_cuda_kernel *k) { return fattni_ceil_div(p->Sq, k->BM); }

static bool is_few(const fattni_cuda_kernel *k) {
    return k->variant == FATTNI_VARIANT_FEW || k->variant == FATTNI_VARIANT_FEW_GENERAL ||
           k->variant == FATTNI_VARIANT_FEW_UNIFIED;
}

/* Those of fwd_decode.cuh, which load rows in vectors and have no other head_dim than their own; up to 128 in tiles of
   16 rows, too. */
static bool decodes(const fattni_cuda_kernel *k) {
    return is_few(k) && k->args_bytes == sizeof(fattni_fwd_decode_args);
}
/* Those of fwd_decode_rows.cuh, by tensor maps of K and V. */
static bool decodes_rows(const fattni_cuda_kernel *k) {
    return is_few(k) && k->args_bytes == sizeof(fattni_fwd_rows_args);
}
static bool is_short(const fattni_cuda_kernel *k) { return strstr(k->name, "_decode_short_"); }
static bool is_small(const fattni_cuda_kernel *k) { return strstr(k->name, "_decode_small_"); }
static bool fits_row(const fattni_array *a) { return a->s[2] >= 0 && a->s[2] < 1 << 30; }
/* More tiles than fit on the GPU at once, of so few keys that it counts what a CTA does while it loads nothing. */
static bool suits_small(const fattni_cuda_kernel *k, const fattni_problem *p, const traits *t) {
    return k->D > 64 ? t->tiles > t->sms && p->Sk <= 2048 : t->tiles > 2 * t->sms && p->Sk <= 1024;
}
/* Keys for which two CTAs with few registers are faster than others. */
static int most_short(const fattni_cuda_kernel *k) { return k->D > 64 ? FATTNI_DECODE_FEW : k->BM == 8 ? 1024 : 2048; }
static bool can_decode(const fattni_problem *p, const fattni_cuda_kernel *k, const traits *t) {
    if (k->BM == 8 && k->D <= 128 && tile_heads_of(p) * p->Sq > 8) return false;
    if (is_small(k) && !suits_small(k, p, t)) return false;
    if (is_short(k) && !(t->tiles > t->sms && p->Sk <= most_short(k))) return false;
    return p->D == k->D && p->Dv == k->Dv && t->vector && fits_row(&p->k) && fits_row(&p->v);
}

static bool can_decode_rows(const fattni_problem *p, const fattni_cuda_kernel *k, const traits *t) {
    const int64_t rows = tile_heads_of(p) * p->Sq;
    if (rows <= 16 || (rows <= 64) != (k->BM == 64)) return false;
    if (p->Sk < (rows > 32 ? 2048 : 4096)) return false; /* one sequence takes longer than in smaller tiles */
    if (p->B == 0 || p->rows_k == 0) return false;       /* no tensor map is of nothing */
    return p->D == k->D && p->Dv == k->Dv && t->vector && fattni_sm90_maps(&p->k, k->D) &&
           fattni_sm90_maps(&p->v, k->D);
}

static bool matches(const fattni_cuda_kernel *k, const fattni_problem *p, const traits *t) {
    if (k->arch == 90 && !t->maps_o && k->variant < FATTNI_VARIANT_BANDED && FATTNI_FWD_SM90_STAGES_O(k->Dv, k->BN))
        return false; /* these store O only by its tensor map; the banded ones do not need it */
    if (t->unified != (k->variant == FATTNI_VARIANT_FEW_UNIFIED)) return false;
    if (decodes(k) && !can_decode(p, k, t)) return false;
    if (decodes_rows(k) && !can_decode_rows(p, k, t)) return false;
    switch (k->variant) {
    case FATTNI_VARIANT_ADD:
    case FATTNI_VARIANT_PARTS: return false;
    case FATTNI_VARIANT_FEW_UNIFIED:
    case FATTNI_VARIANT_FEW: return t->few && t->variant != FATTNI_VARIANT_GENERAL;
    case FATTNI_VARIANT_FEW_GENERAL: return t->few;
    case FATTNI_VARIANT_SHORT: /* at head_dim 64 also for more rows (sooner) */
        return t->variant == FATTNI_VARIANT_CAUSAL && (p->Sq <= FATTNI_SHORT_ROWS || k->D == 64);
    case FATTNI_VARIANT_BANDED: return t->variant != FATTNI_VARIANT_GENERAL;
    case FATTNI_VARIANT_BIASED: return t->biased;
    case FATTNI_VARIANT_GENERAL: return k->arch != 90 || !p->bias.present || has_bias(k);
    case FATTNI_VARIANT_PLAIN: return t->variant == FATTNI_VARIANT_FULL || t->variant == FATTNI_VARIANT_CAUSAL;
    default: return k->variant == t->variant;
    }
}

/* ---- row blocks whose keys are split (fwd_split.h) ---- */

static bool is_half(const fattni_problem *p) { return p->dtype == FATTN_F16 || p->dtype == FATTN_BF16; }

/* The kernel that adds the parts, or NULL. */
static const fattni_cuda_kernel *adder_of(const fattn_ctx *ctx, const fattni_problem *p) {
    for (const fattni_cuda_kernel *const *k = fattni_fwd_cuda_kernels; *k; ++k)
        if ((*k)->variant == FATTNI_VARIANT_ADD && fattni_cuda_can_run(*k, ctx, p)) return *k;
    return NULL;
}

/* Keys of a part, at least. To store and to add a part's O moves 2 / keys bytes for each operation of its products: the
   faster those are the more keys, so that a batch that fills the GPU without parts loses little. */
static int least_part(const fattni_problem *p) {
    return is_half(p) ? 1024 : p->dtype == FATTN_F32 && (p->flags & FATTN_TF32) ? 512 : 256;
}

/* For plain masks, too, these are the general kernels: there keys that are split have one kernel. */
static bool takes_parts(const fattni_cuda_kernel *k) {
    return k->variant == FATTNI_VARIANT_GENERAL && k->args_bytes == sizeof(fattni_fwd_split_args);
}

/* How a kernel with one CTA per row block runs a call: the fields of fattni_fwd_split_args. */
typedef struct row_split {
    int64_t parts, rows, width, step;
    int least;                       /* keys of a part, at least */
    int64_t ctas;                    /* of the call */
    const fattni_cuda_kernel *adder; /* NULL: keys are not split */
} row_split;

/* Few row blocks over many keys are split: by shapes alone, whatever the addresses, and without B. On Hopper not in 16
   bits: its own kernels are twice as fast where a batch fills the GPU. Some heads of a call (rng_heads) are split as
   all of them, whose bits ranks promise; but those of a ragged batch whose heads together are split have more parts. */
static row_split row_split_of(const fattn_ctx *ctx, const fattni_problem *p, const fattni_cuda_kernel *k) {
    const int64_t blocks = blocks_of(p, k), few = is_half(p) ? 32 : FATTNI_SPLIT_CTAS / 4;
    const int64_t all_heads = fattni_max(p->Hq, p->rng_heads);
    const bool ragged = p->packed || p->padded;
    row_split s = {.parts = 1, .ctas = blocks * p->Hq * p->B, .least = least_part(p)};
    if (!takes_parts(k) || s.ctas == 0 || blocks * all_heads > few) return s;
    if (ctx->gpu.arch == 90 && is_half(p)) return s;
    const fattni_attention_args a = fattni_cuda_args_of(p);
    const int keys = fattni_fwd_most_keys(&a, a.Sk, k->BM, k->BN);
    if (!ragged) s.least = fattni_fwd_keys_of_part(keys, (int)(blocks * all_heads), s.least, k->BN);
    const int parts = fattni_fwd_most_parts(keys, (int)(blocks * p->Hq), s.least, k->BN, ragged);
    if (parts > 1) s.adder = adder_of(ctx, p);
    if (!s.adder) return s;
    s.parts = parts, s.ctas *= parts;
    s.rows = fattni_min(p->Sq, k->BM), s.width = fattni_round_up(p->Dv, 8);
    s.step = fattni_round_up(s.rows * (s.width + 2), 8); /* results are stored in vectors */
    return s;
}

static fattni_fwd_split_args split_args_of(const fattn_ctx *ctx, const fattni_problem *p, const fattni_cuda_kernel *k) {
    const row_split s = row_split_of(ctx, p, k);
    fattni_attention_args a = fattni_cuda_args_of(p);
    const int64_t bytes = p->Sk * (p->D + p->Dv) * (int64_t)fattn_dtype_size(p->dtype);
    if (!s.adder) /* heads of a group share K and V */
        a.at_once =
            (int32_t)(p->group * fattni_cuda_planes_at_once(ctx, &a, bytes, blocks_of(p, k) * p->group, p->B * p->Hkv));
    return (fattni_fwd_split_args){.a = a,
                                   .parts = (int32_t)s.parts,
                                   .least_part = s.least,
                                   .BM = k->BM,
                                   .BN = k->BN,
                                   .rows = (int32_t)s.rows,
                                   .width = (int32_t)s.width,
                                   .step = (int32_t)s.step,
                                   .results = s.adder ? p->workspace : NULL};
}

/* Rows times key blocks of the SM that ends last, about: with tiles of one length in rounds, others the longest
   first. */
static int64_t longest_work(const fattn_ctx *ctx, const fattni_problem *p, const fattni_cuda_kernel *k) {
    const int64_t planes = p->Hq * p->B, sms = ctx->gpu.all_sms, blocks = fattni_ceil_div(p->Sk, k->BN);
    if (k->variant == FATTNI_VARIANT_FULL) return fattni_ceil_div(blocks_of(p, k) * planes, sms) * blocks * k->BM;
    const fattni_band band = fattni_sequence_of(p, 0).band;
    int64_t longest = 0, all = 0;
    for (int64_t i0 = 0; i0 < p->Sq; i0 += k->BM) {
        const int64_t n = fattni_ceil_div(fattni_keys_of(&band, i0, i0 + k->BM).end, k->BN);
        longest = fattni_max(longest, n), all += n * planes;
    }
    return fattni_max(longest, fattni_ceil_div(all, sms)) * k->BM;
}
/* Of two Hopper kernels the first; but of two for the same plain mask, one with tiles of fewer rows and 0.86 of the
   other's rate, that with which the last SM ends sooner. */
static const fattni_cuda_kernel *sooner(const fattn_ctx *ctx, const fattni_problem *p, const fattni_cuda_kernel *first,
                                        const fattni_cuda_kernel *next) {
    enum { ROUNDS = 8 }; /* of tiles, from which on the last one does not matter */
    if (first->D != next->D || first->BM == next->BM || next->variant > FATTNI_VARIANT_CAUSAL) return first;
    if (first->variant == FATTNI_VARIANT_SHORT && p->Sq <= FATTNI_SHORT_ROWS) return first;
    const fattni_cuda_kernel *const less = first->BM < next->BM ? first : next;
    const fattni_cuda_kernel *const more = less == first ? next : first;
    if (blocks_of(p, more) * p->Hq * p->B > ROUNDS * ctx->gpu.all_sms) return more;
    return 8 * longest_work(ctx, p, less) < 7 * longest_work(ctx, p, more) ? less : more;
}

/* Hopper's kernel that divides keys and its parts, where that pays, at any addresses. */
static void find_parts(const fattn_ctx *ctx, const fattni_problem *p, fattni_fwd_choice *x) {
    x->parts.most = x->parts.blocks = 1;
    if (ctx->gpu.arch != 90 || !is_half(p) || (p->flags & FATTN_UNIFIED_MAX) ||
        fattni_cuda_variant_of(p, false) == FATTNI_VARIANT_GENERAL)
        return;
    for (const fattni_cuda_kernel *const *k = fattni_fwd_cuda_kernels; *k && !x->divides; ++k)
        if ((*k)->variant == FATTNI_VARIANT_PARTS && fattni_cuda_can_run(*k, ctx, p)) x->divides = *k;
    if (x->divides) x->parts = fattni_fwd_sm90_parts(ctx, p, x->divides);
    if (x->parts.most == 1) x->divides = NULL;
}

static const fattni_cuda_kernel *choose(const fattn_ctx *ctx, const fattni_problem *p, const traits *t) {
    const fattni_cuda_kernel *sm90 = NULL, *best = NULL, *parts = NULL; /* best: of the others; parts: that take them */
    for (const fattni_cuda_kernel *const *k = fattni_fwd_cuda_kernels; *k; ++k) {
        if ((*k)->arch == 90 && !is_few(*k) && !(t->sm90 && fattni_sm90_counts(blocks_of(p, *k), p->Hq * p->B)))
            continue;
        if (!fattni_cuda_can_run(*k, ctx, p) || !matches(*k, p, t)) continue;
        if (is_few(*k)) return *k;
        if ((*k)->arch == 90)
            sm90 = sm90 ? sooner(ctx, p, sm90, *k) : *k;
        else
            best = fattni_cuda_prefer(ctx, best, *k);
        if (takes_parts(*k)) parts = fattni_cuda_prefer(ctx, parts, *k);
    }
    if (parts && row_split_of(ctx, p, parts).adder) return parts;
    return sm90 ? sm90 : best;
}

fattni_fwd_choice fattni_fwd_cuda_choose(const fattn_ctx *ctx, const fattni_problem *p) {
    const traits t = traits_of(ctx, p);
    fattni_fwd_choice x = {0};
    if (!t.few) find_parts(ctx, p, &x);
    x.kernel = x.divides && t.sm90 ? x.divides : choose(ctx, p, &t);
    return x;
}

/* Where keys of few rows are split: parts and tiles at most, and what they need of the workspace. */
typedef struct split {
    int64_t tile_heads, tiles, parts, all_tiles; /* tiles: per tile_heads heads; all_tiles: of the call */
    int64_t cluster;                             /* parts that are CTAs of a cluster */
    int64_t rows, width;
    size_t results, workspace; /* bytes: of the counters, which come first; of all */
} split;

/* That a tile sees, at most, from a multiple of `aligned` on. */
static int64_t most_keys(const fattni_problem *p, int64_t aligned) {
    const bool causal = p->flags & (FATTN_CAUSAL | FATTN_CAUSAL_TOP_LEFT);
    const int64_t left = p->window_left, right = causal ? 0 : p->window_right;
    return left < p->Sk && right < p->Sk ? fattni_min(p->Sk, left + right + p->Sq + aligned) : p->Sk;
}

static split split_of(const fattni_problem *p, const fattni_cuda_kernel *k) {
    split s = {.tile_heads = tile_heads_of(p), .cluster = 1};
    const int64_t heads = p->Hq / s.tile_heads, rows = s.tile_heads * p->Sq;
    s.tiles = fattni_ceil_div(rows, k->BM), s.all_tiles = p->B * heads * s.tiles;
    const bool ragged = p->packed || p->padded; /* a sequence with fewer tiles has more parts of its keys */
    const int64_t tiles = fattni_max(heads * (ragged ? 1 : s.tiles), 1);
    s.parts = fattni_clamp(fattni_ceil_div(most_keys(p, 16), fattni_cuda_least_part(k->D)), 1,
                           fattni_cuda_most_parts((int)fattni_min(tiles, INT32_MAX), k->D));
    while (k->arch == 90 && s.cluster < fattni_min(s.parts, FATTNI_PARTS_ADDED)) s.cluster *= 2;
    s.parts = fattni_round_up(s.parts, s.cluster);
    s.rows = fattni_min(rows, k->BM), s.width = (p->Dv + 7) / 8 * 8;
    if (s.parts == s.cluster) return s; /* added up in shared memory */
    s.results = (size_t)fattni_round_up(
        s.all_tiles * fattni_cuda_parts_counters((int)s.parts) * (int64_t)sizeof(int32_t), FATTNI_ALIGN);
    s.workspace = s.results;
    s.workspace += (size_t)(s.all_tiles * s.parts * s.rows * (s.width + 2)) * sizeof(float);
    return s;
}

/* The same for fwd_decode.cuh: parts at most. A tile's parts are CTAs of one cluster, or of several, or of none; where
   there is no single one, results are added up through memory. */
static split decode_of(const fattn_ctx *ctx, const fattni_problem *p, const fattni_cuda_kernel *k) {
    enum { IN_MEMORY = 4096 }; /* keys for which a second launch pays */
    split s = {.tile_heads = tile_heads_of(p), .cluster = 1};
    const int64_t heads = p->Hq / s.tile_heads, rows = s.tile_heads * p->Sq;
    s.tiles = fattni_ceil_div(rows, k->BM), s.all_tiles = p->B * heads * s.tiles;
    const bool ragged = p->packed || p->padded; /* a sequence with fewer rows has more parts of its keys */
    const int64_t keys = most_keys(p, 16);
    s.rows = fattni_min(rows, k->BM);
    s.parts = fattni_decode_most_parts((int)keys, (int)fattni_clamp(heads, 1, FATTNI_DECODE_MANY_HEADS),
                                       ragged ? 1 : (int)rows, k->BM, k->D);
    if (heads < FATTNI_DECODE_MANY_HEADS && s.parts > FATTNI_DECODE_SLOTS)
        s.cluster = FATTNI_DECODE_SLOTS;
    else if (keys < IN_MEMORY || 2 * s.all_tiles > ctx->gpu.sms)
        return s;
    s.workspace = (size_t)(s.all_tiles * FATTNI_DECODE_GROUPS * s.rows * (k->D + 2)) * sizeof(float);
    return s;
}

/* The same for fwd_decode_rows.cuh, where `parts` become CTAs of a tile, with `each` parts: one on an SM, if there is
   one for each tile; otherwise they take tiles in turn. results: of a tile, that lie in memory. */
typedef struct rows_split {
    split s;
    int32_t most, each, results;
} rows_split;
static rows_split rows_of(const fattn_ctx *ctx, const fattni_problem *p, const fattni_cuda_kernel *k) {
    rows_split x = {.s = {.tile_heads = tile_heads_of(p), .cluster = 1}, .each = 1};
    split *const s = &x.s;
    const int64_t rows = s->tile_heads * p->Sq;
    s->tiles = fattni_ceil_div(rows, k->BM), s->all_tiles = p->B * (p->Hq / s->tile_heads) * s->tiles;
    s->rows = fattni_min(rows, k->BM);
    const int64_t all_heads = fattni_max(p->Hq, p->rng_heads); /* of ranks together, whose bits are those of one */
    x.most = fattni_rows_most_parts((int)fattni_min(all_heads / s->tile_heads, INT32_MAX));
    const int keys = (int)most_keys(p, k->BN);
    /* Of those a tile has the most that sees this many keys, or fewer. */
    s->parts = fattni_cuda_parts_of((int)fattni_min(keys, x.most * FATTNI_ROWS_LEAST), FATTNI_ROWS_LEAST);
    while (x.each < s->parts && s->all_tiles * fattni_ceil_div(s->parts, x.each) > ctx->gpu.sms) ++x.each;
    x.results = fattni_rows_most_results((int)s->parts, x.each);
    s->parts = fattni_ceil_div(s->parts, x.each);
    if (s->parts > 1) s->workspace = (size_t)(s->all_tiles * x.results * s->rows * (k->D + 2)) * sizeof(float);
    return x;
}

static split few_of(const fattn_ctx *ctx, const fattni_problem *p, const fattni_cuda_kernel *k) {
    return decodes_rows(k) ? rows_of(ctx, p, k).s : decodes(k) ? decode_of(ctx, p, k) : split_of(p, k);
}

/* Of a kernel that is launched once. */
static int64_t grid_of(const fattn_ctx *ctx, const fattni_problem *p, const fattni_cuda_kernel *k) {
    if (is_few(k)) {
        const split s = few_of(ctx, p, k);
        return s.all_tiles * s.parts;
    }
    const int64_t tiles = blocks_of(p, k) * p->Hq * p->B;
    return k->arch == 90 ? fattni_min(tiles, ctx->gpu.sms) : tiles;
}

/* At any addresses, which choose between kernels of the same variant. */
static size_t workspace_of_few(const fattn_ctx *ctx, const fattni_problem *p, const fattni_cuda_kernel *chosen) {
    size_t bytes = 0;
    for (const fattni_cuda_kernel *const *k = fattni_fwd_cuda_kernels; *k; ++k) {
        if ((*k)->variant != chosen->variant || !fattni_cuda_can_run(*k, ctx, p)) continue;
        const size_t own = few_of(ctx, p, *k).workspace;
        if (own > bytes) bytes = own;
    }
    return bytes;
}

/* The tile counter, and what parts need. */
static size_t sm90_workspace(const fattni_problem *p, const fattni_fwd_choice *x) {
    if (!x->divides) return FATTNI_ALIGN;
    return FATTNI_ALIGN + fattni_fwd_parts_stored(p, x->divides, &x->parts) +
           fattni_fwd_parts_rows(p, x->divides, &x->parts) + fattni_fwd_parts_sums(p, x->divides, &x->parts);
}

static const char *plan(const fattn_ctx *ctx, const fattni_problem *p, fattni_kernel_plan *out) {
    const char *const reason = fattni_cuda_why_unsupported(ctx, p);
    if (reason) return reason;
    fattni_fwd_choice choice = fattni_fwd_cuda_choose(ctx, p);
    const fattni_cuda_kernel *k = choice.kernel;
    fattni_problem dense;
    size_t gathered = 0;
    if (p->page && !(k && is_few(k))) { /* only those have a page table */
        const char *const too_many = fattni_cuda_why_grid_unsupported(fattni_pages_blocks(p));
        if (too_many) return too_many;
        dense = fattni_without_pages(p, &gathered);
        p = &dense;
        choice = fattni_fwd_cuda_choose(ctx, p), k = choice.kernel;
    }
    if (!k && (p->flags & FATTN_UNIFIED_MAX))
        return "takes FATTN_UNIFIED_MAX in BF16 only, with 16 rows at most, without softcap, ALiBi, bias and dropout";
    if (!k) return fattni_cuda_why_no_kernel(p);
    const row_split s = row_split_of(ctx, p, k);
    out->choice[0] = k;
    out->choice[1] = s.adder;
    if (k == choice.divides) out->parts[0] = choice.parts.most, out->parts[1] = choice.parts.blocks;
    out->deterministic = true;
    strncpy(out->name, k->name, sizeof out->name - 1);
    if (is_few(k))
        out->workspace = workspace_of_few(ctx, p, k);
    else if (s.adder)
        out->workspace = (size_t)(s.ctas * s.step) * (p->dtype == FATTN_F64 ? sizeof(double) : sizeof(float));
    else if (ctx->gpu.arch == 90) /* for the persistent kernels, always: addresses may choose them */
        out->workspace = sm90_workspace(p, &choice);
    out->workspace += gathered;
    return fattni_cuda_why_grid_unsupported(s.adder ? fattni_max(s.ctas, grid_of(ctx, p, s.adder))
                                                    : grid_of(ctx, p, k));
}

/* ---- arguments, launch ---- */

static fattn_status make_maps(fattn_ctx *ctx, const fattni_problem *p, const fattni_cuda_kernel *k,
                              fattni_fwd_sm90_args *x) {
    const int q_rows = FATTNI_FWD_SM90_Q_ROWS(k->variant, k->D, k->BM);
    if (k->variant == FATTNI_VARIANT_BIASED)
        FATTNI_TRY(fattni_sm90_map(ctx, &p->bias, p->dtype, p->max_k, 64, &x->bias, &x->bias_step));
    FATTNI_TRY(fattni_sm90_map(ctx, &p->q, p->dtype, p->D, q_rows, &x->q, &x->q_step));
    FATTNI_TRY(fattni_sm90_map(ctx, &p->k, p->dtype, p->D, k->BN, &x->k, &x->k_step));
    FATTNI_TRY(fattni_sm90_map(ctx, &p->v, p->dtype, p->Dv, k->BN, &x->v, &x->v_step));
    return x->o_by_tma ? fattni_sm90_map(ctx, &p->o, p->dtype, p->Dv, 16, &x->o, &x->o_step) : FATTN_OK;
}

fattni_fwd_groups fattni_fwd_head_groups(const fattn_ctx *ctx, const fattni_problem *p, int64_t blocks,
                                         int64_t element_bytes) {
    enum { FEW = 8, WAVES = 2 }; /* row blocks; of tiles, in the last group */
    const int64_t fit = fattni_cuda_planes_in_l2(ctx, p->Sk * element_bytes * (p->D + p->Dv));
    if (blocks > FEW) return (fattni_fwd_groups){fattni_cuda_even_group(fit, p->Hkv * p->B) * p->group, 0};
    return (fattni_fwd_groups){p->group, fattni_min(fit * p->group, fattni_ceil_div(WAVES * ctx->gpu.sms, blocks))};
}

fattn_status fattni_fwd_sm90_args_of(fattn_ctx *ctx, const fattni_problem *p, const fattni_cuda_kernel *k,
                                     const fattni_fwd_parts *parts, fattni_fwd_sm90_args *out) {
    bool entered;
    *out = (fattni_fwd_sm90_args){.a = fattni_cuda_args_of(p),
                                  .o_by_tma = p->o.dtype == (int32_t)p->dtype && fattni_sm90_maps(&p->o, p->Dv)};
    out->scale_log2 = out->a.scale * 1.4426950408889634f;
    out->keyless = fattni_fwd_sm90_keyless(p, k);
    const bool divided = parts->most > 1; /* few heads: in one group */
    const fattni_block_order order = fattni_fwd_sm90_order(ctx, p, k, parts);
    const int64_t blocks = blocks_of(p, k) - out->keyless, planes = p->Hq * p->B;
    const fattni_fwd_groups groups =
        divided || order.count ? (fattni_fwd_groups){planes, planes} : fattni_fwd_head_groups(ctx, p, blocks, 2);
    out->schedule = fattni_sm90_schedule_of(blocks, planes, groups.each);
    out->schedule.order = order;
    out->order = fattni_fwd_order_of(&out->schedule, (int)p->Hq, (int)parts->most, k->variant != FATTNI_VARIANT_FULL,
                                     (int)fattni_min(groups.last, planes));
    out->schedule.tiles *= (int32_t)parts->most;
    out->schedule.next_tile = p->workspace;
    char *const stored = (char *)p->workspace + FATTNI_ALIGN;
    char *const rows = stored + fattni_fwd_parts_stored(p, k, parts);
    out->parts_stored = (int32_t *)stored, out->part_rows = (fattni_part_row *)rows;
    out->part_sums = (float *)(rows + fattni_fwd_parts_rows(p, k, parts));
    out->part_blocks = fattni_divider_of((int32_t)parts->blocks);
    FATTNI_TRY(fattni_cuda_enter(ctx, &entered)); /* encoding a tensor map needs a current context */
    const fattn_status s = make_maps(ctx, p, k, out);
    fattni_cuda_leave(ctx, entered);
    return s;
}

static fattn_status run_sm90(fattn_ctx *ctx, const fattni_problem *p, const fattni_cuda_kernel *k,
                             const fattni_kernel_plan *plan) {
    const fattni_fwd_parts parts = {fattni_max(plan->parts[0], 1), fattni_max(plan->parts[1], 1)};
    fattni_fwd_sm90_args x;
    FATTNI_TRY(fattni_fwd_sm90_args_of(ctx, p, k, &parts, &x));
    const int64_t grid = fattni_min(x.schedule.tiles, ctx->gpu.sms);
    /* Up to the rows of parts; where each CTA has one tile, none. */
    const int64_t counters = x.order.parts.by > 1 ? (int32_t *)x.part_rows - x.schedule.next_tile
                                                  : k->variant != FATTNI_VARIANT_FULL && x.schedule.tiles > grid;
    return fattni_sm90_start(ctx, k, grid, &x, sizeof x, x.schedule.next_tile, counters);
}

/* Stages of K and V of so many CTAs; no more than a call of few keys can use, and few in larger clusters, which would
   need as many SMs side by side. */
static int32_t stages_of(const fattn_ctx *ctx, const fattni_problem *p, const fattni_cuda_kernel *k, int64_t cluster,
                         int64_t ctas) {
    if (k->arch < 90 || p->Sk <= FATTNI_FEW_STAGES * k->BN || ctas > ctx->gpu.sms || cluster > 2)
        return FATTNI_FEW_STAGES;
    return 2 * ctas <= ctx->gpu.sms ? FATTNI_FEW_STAGES_OF_HALF : FATTNI_FEW_STAGES_OF_ONE;
}

/* What both kernels of few rows read. */
static fattni_fwd_parts_args parts_args_of(const fattni_problem *p, const split *s) {
    return (fattni_fwd_parts_args){.a = fattni_cuda_args_of(p),
                                   .page_table = fattni_cuda_view_of(&p->page_table),
                                   .pages = (int32_t)p->k.n[0],
                                   .page_log2 = fattni_page_log2(p),
                                   .page_mask = (int32_t)(p->page - 1),
                                   .tile_heads = fattni_divider_of((int32_t)s->tile_heads),
                                   .heads = fattni_divider_of((int32_t)(p->Hq / s->tile_heads)),
                                   .tiles = fattni_divider_of((int32_t)fattni_max(s->tiles, 1)),
                                   .parts = fattni_divider_of((int32_t)s->parts),
                                   .cluster = (int32_t)s->cluster,
                                   .rows = (int32_t)s->rows,
                                   .arrived = p->workspace,
                                   .results = (float *)((char *)p->workspace + s->results)};
}

/* Shares out the parts of fwd_decode.cuh: s->parts become CTAs of a tile, s->cluster of them a cluster. All CTAs run at
   the same time, one on an SM. Where clusters would not, as GPCs differ in size, results meet in memory, or a CTA has
   more parts. */
static fattn_status share_parts(fattn_ctx *ctx, const fattni_cuda_kernel *k, split *s, int32_t *each) {
    const int64_t parts = s->parts;
    *each = 1;
    if (s->cluster > 1) return FATTN_OK; /* several clusters */
    for (;; ++*each) {
        int fit = 0;
        s->parts = s->cluster = fattni_ceil_div(parts, *each);
        if (s->parts == 1) return FATTN_OK;
        if (s->all_tiles * s->parts > ctx->gpu.sms) continue;
        if (s->cluster <= FATTNI_DECODE_SLOTS) FATTNI_TRY(fattni_cuda_clusters(ctx, k, (int)s->cluster, &fit));
        if (s->all_tiles <= fit) return FATTN_OK;
        if (s->workspace) {
            s->cluster = 1;
            return FATTN_OK;
        }
    }
}

static fattn_status run_decode(fattn_ctx *ctx, const fattni_problem *p, const fattni_cuda_kernel *k) {
    enum { STREAMS = 8, FEW_STREAMS = 4, ADDING_WARPS = 4 };
    fattni_fwd_decode_args z = {.k_row = (uint32_t)p->k.s[2] * 2, .v_row = (uint32_t)p->v.s[2] * 2};
    split s = decode_of(ctx, p, k);
    const int64_t parts = s.parts;
    FATTNI_TRY(share_parts(ctx, k, &s, &z.each));
    z.x = parts_args_of(p, &s);
    z.ctas = (int32_t)s.parts;
    z.kept = fattni_decode_keeps(k->D, k->BM, z.each, (int)s.rows);
    z.slots = z.kept ? (int32_t)parts : s.cluster > 1 ? (int32_t)(fattni_min(parts, z.each * s.cluster) - z.each) : 0;
    /* Four warps that are busy, unless they would take turns to add up rows. */
    const bool full = s.all_tiles > ctx->gpu.sms;
    const bool few = p->Sk <= FATTNI_DECODE_FEW && k->BM * k->D <= 1024 && (full || s.rows * k->D <= 512);
    z.streams = few ? FEW_STREAMS : STREAMS;
    z.warps = few ? FEW_STREAMS : k->threads / 32;
    /* Wide rows of all of the call at once are read no sooner if they are asked for twice. */
    z.prefetch = !p->page && !p->packed && !p->padded && !(few && full && k->D > 64);
    const int64_t results = s.rows * (z.streams * (z.kept ? z.each : 1) + z.slots) + (3 * s.rows + 1) / 2;
    FATTNI_TRY(fattni_cuda_launch_clusters(ctx, k, s.all_tiles * s.parts, (int)s.cluster, 32 * z.warps,
                                           (size_t)FATTNI_DECODE_SHARED(k->D, k->BM, (int)results), &z, sizeof z));
    if (s.parts == s.cluster) return FATTN_OK;
    const int64_t adding = fattni_ceil_div(s.rows * k->D, 128); /* warps of a tile: four columns of a thread */
    z.adds = 1, z.warps = (int32_t)fattni_min(adding, ADDING_WARPS);
    z.x.parts = fattni_divider_of((int32_t)fattni_ceil_div(adding, z.warps));
    return fattni_cuda_launch_clusters(ctx, k, s.all_tiles * z.x.parts.by, 1, 32 * z.warps, 0, &z, sizeof z);
}

static fattn_status run_rows(fattn_ctx *ctx, const fattni_problem *p, const fattni_cuda_kernel *k) {
    rows_split rows = rows_of(ctx, p, k);
    split *const s = &rows.s;
    /* A cluster's CTAs are neighbours: where SMs are left idle, CTAs that are not have more of the memory's speed. */
    if (s->parts > 1 && s->parts <= FATTNI_ROWS_CLUSTER && 8 * s->all_tiles * s->parts > 7 * ctx->gpu.sms) {
        int fit = 0;
        FATTNI_TRY(fattni_cuda_clusters(ctx, k, (int)s->parts, &fit));
        if (s->all_tiles <= fit) s->cluster = s->parts;
    }
    const int box = (int)(p->page ? fattni_min(p->page, k->BN) : k->BN);
    const int64_t none = FATTNI_ROWS_SHARED(0, rows.results, k->D),
                  most_at_once = ((int64_t)k->shared - none) / (FATTNI_ROWS_SHARED(1, rows.results, k->D) - none);
    fattni_fwd_rows_args z = {.x = parts_args_of(p, s),
                              .items = (int32_t)(s->all_tiles * s->parts),
                              .each = rows.each,
                              .most = rows.most,
                              .groups = rows.results,
                              .at_once = (int32_t)fattni_min(most_at_once, fattni_ceil_div(s->rows, s->parts)),
                              .ragged = p->page || p->packed || p->padded};
    bool entered;
    FATTNI_TRY(fattni_cuda_enter(ctx, &entered)); /* encoding a tensor map needs a current context */
    fattn_status status = fattni_sm90_map(ctx, &p->k, p->dtype, k->D, box, &z.k, &z.k_step);
    if (status == FATTN_OK) status = fattni_sm90_map(ctx, &p->v, p->dtype, k->D, box, &z.v, &z.v_step);
    fattni_cuda_leave(ctx, entered);
    FATTNI_TRY(status);
    FATTNI_TRY(fattni_cuda_launch_clusters(ctx, k, fattni_min(z.items, ctx->gpu.sms), (int)s->cluster, k->threads,
                                           k->shared, &z, sizeof z));
    if (s->parts == s->cluster) return FATTN_OK;
    z.adds = 1, z.x.parts = fattni_divider_of((int32_t)fattni_ceil_div(s->rows * k->D, 4 * FATTNI_ROWS_ADDING));
    return fattni_cuda_launch_clusters(ctx, k, s->all_tiles * z.x.parts.by, 1, FATTNI_ROWS_ADDING, 0, &z, sizeof z);
}

static fattn_status run_parts(fattn_ctx *ctx, const fattni_problem *p, const fattni_cuda_kernel *k) {
    const split s = split_of(p, k);
    const int64_t ctas = s.all_tiles * s.parts;
    fattni_fwd_parts_args x = parts_args_of(p, &s);
    x.width = (int32_t)s.width, x.stages = stages_of(ctx, p, k, s.cluster, ctas);
    x.counters = fattni_cuda_parts_counters((int)s.parts);
    x.unified_max = (float)(p->unified_max / p->scale);
    if (s.results) FATTNI_TRY(fattni_cuda_zero(ctx, x.arrived, s.results));
    const size_t stage = (size_t)(4 * k->BN * k->D); /* bytes: K and V */
    return fattni_cuda_launch_clusters(ctx, k, ctas, (int)s.cluster, k->threads, (size_t)x.stages * stage, &x,
                                       sizeof x);
}

static fattn_status run(fattn_ctx *ctx, const fattni_problem *p, const fattni_kernel_plan *plan) {
    const fattni_cuda_kernel *const k = plan->choice[0], *const adder = plan->choice[1];
    if (decodes(k)) return run_decode(ctx, p, k);
    if (decodes_rows(k)) return run_rows(ctx, p, k);
    if (is_few(k)) return run_parts(ctx, p, k);
    fattni_problem dense;
    if (p->page) {
        size_t bytes;
        dense = fattni_without_pages(p, &bytes);
        FATTNI_TRY(fattni_gather_pages(ctx, p, &dense));
        p = &dense;
    }
    if (k->arch == 90) return run_sm90(ctx, p, k, plan);
    const fattni_fwd_split_args x = split_args_of(ctx, p, k); /* others take its first member alone */
    FATTNI_TRY(fattni_cuda_launch(ctx, k, grid_of(ctx, p, k) * x.parts, &x,
                                  k->args_bytes < sizeof x ? k->args_bytes : sizeof x));
    return adder ? fattni_cuda_launch(ctx, adder, grid_of(ctx, p, adder), &x, sizeof x) : FATTN_OK;
}

const fattni_kernel fattni_fwd_cuda = {
    .family = "fattn_fwd",
    .device = FATTN_CUDA,
    .algorithms = 1u << FATTN_ALGO_AUTO | 1u << FATTN_ALGO_FLASH2,
    .plan = plan,
    .run = run,
    .unified = true,
};
