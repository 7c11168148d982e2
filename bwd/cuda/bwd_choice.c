/* Which kernel of bwd_kernels.def runs a call. */
#include "bwd/cuda/bwd_cuda.h"
#include "core/cuda/sm90.h"

#include <string.h>

/* Whether an element of d_bias is a sum over heads, sequences, rows or keys. */
static bool sums_bias(const fattni_problem *p) {
    const int64_t n[4] = {p->B, p->Hq, p->max_q, p->max_k};
    bool sums = false;
    for (int d = 0; d < 4; ++d) sums |= p->d_bias.present && p->d_bias.s[d] == 0 && n[d] > 1;
    return sums;
}

/* A gradient is stored with 16-byte accesses, unless it is F32 or added to. */
static bool can_store(const fattni_array *a, int64_t width, bool added) {
    return !a->present || a->dtype == FATTN_F32 || added || fattni_cuda_vector(a, width);
}

/* The Hopper kernels always compute dQ, and may divide L by scale. An F32 d_o needs no tensor map: it is copied. */
static bool sm90_supports(const fattni_problem *p) {
    return fattni_sm90_maps_inputs(p) && (p->o.dtype == FATTN_F32 || fattni_cuda_vector(&p->o, p->Dv)) &&
           p->scale > 1e-30 && (p->d_o.dtype == FATTN_F32 || fattni_sm90_maps(&p->d_o, p->Dv)) && p->dq.present &&
           can_store(&p->dk, p->D, p->flags & FATTN_ACC_DK) && can_store(&p->dv, p->Dv, p->flags & FATTN_ACC_DV);
}

/* The problem at addresses that allow every kernel. */
static fattni_problem aligned_of(const fattni_problem *p) {
    fattni_problem x = *p;
    fattni_array *const all[] = {&x.q, &x.k, &x.v, &x.o, &x.d_o, &x.dq, &x.dk, &x.dv, &x.bias};
    for (size_t n = 0; n < sizeof all / sizeof all[0]; ++n) all[n]->p = NULL;
    return x;
}

bool fattni_bwd_sm90_packs(const fattni_cuda_kernel *k) {
    return k->variant == FATTNI_VARIANT_BANDED && k->cluster == 1;
}
bool fattni_bwd_by_heads(const fattni_cuda_kernel *k) {
    return k->arch == 90 && (k->variant == FATTNI_VARIANT_SHORT || k->variant == FATTNI_VARIANT_HEADS ||
                             k->variant == FATTNI_VARIANT_HEADS_FULL);
}
int64_t fattni_bwd_sm90_blocks(const fattni_problem *p, const fattni_cuda_kernel *k) {
    if (p->packed && fattni_bwd_sm90_packs(k)) return FATTNI_PACKED_BLOCKS(p->rows_k, k->BN, p->B);
    return fattni_ceil_div(p->Sk, (int64_t)k->BN * k->cluster);
}
int64_t fattni_bwd_sm90_planes(const fattni_problem *p, const fattni_cuda_kernel *k) {
    return p->Hkv * (p->packed && fattni_bwd_sm90_packs(k) ? 1 : p->B);
}

/* Whether all counts fit 32 bits. fattni_schedule_backward makes at most 7 row work items for each row block of a head,
   of packed sequences only where they follow each other, and a work item for each tile, or for each of few parts. A
   task has one step for each row block of a head group. */
static bool counts_fit(const fattni_problem *p, const fattni_cuda_kernel *k) {
    const int64_t blocks = fattni_ceil_div(p->Sq, k->BM), heads = p->packed ? p->group : p->Hq * p->B;
    const int64_t packed =
        p->packed && fattni_bwd_sm90_packs(k) ? (fattni_ceil_div(p->rows_q, k->BM) + p->B) * p->Hq : 0;
    return fattni_sm90_counts(fattni_bwd_sm90_blocks(p, k), fattni_bwd_sm90_planes(p, k)) &&
           fattni_max(blocks * heads, packed) <= 1 << 26;
}

/* Whether DBIAS kernels, which write each element once, can do what the call asks of dbias: what shares an element also
   shares the bias. */
static bool dbias_fits(const fattni_problem *p) {
    const int64_t n[4] = {p->B, p->Hq, p->max_q, p->max_k};
    for (int d = 0; d < 4 && p->d_bias.present; ++d)
        if (p->d_bias.s[d] == 0 && n[d] > 1 && (d > 1 || p->bias.s[d] != 0)) return false;
    return true;
}

/* Whether a CTA for each head is faster. By head_dim, mask and key blocks: the speed of these kernels in percent of the
   others' where heads fill all SMs; and of the others' time what is the same for few heads and for many, in twentieths
   of a wave of heads, whose last one takes as long as a full one (bench/HOPPER.md, 3.17). One key block: as many CTAs
   either way. */
typedef struct heads_speed {
    uint8_t percent, fixed;
} heads_speed;
static bool heads_are_faster(const fattn_ctx *ctx, const fattni_problem *p, bool causal) {
    enum { MOST_BLOCKS = 8, BN = 128 };
    static const heads_speed speeds[2][2][MOST_BLOCKS] = {
        {{{185, 0}, {144, 5}, {123, 8}, {112, 5}, {109, 5}},
         {{200, 0}, {190, 8}, {170, 5}, {145, 5}, {121, 5}, {117, 5}, {108, 5}, {104, 5}}},
        {{{168, 0}, {136, 5}, {113, 8}}, {{166, 0}, {150, 5}, {131, 8}, {121, 5}, {116, 5}, {108, 5}}},
    };
    const int64_t blocks = fattni_ceil_div(p->Sk, BN), heads = p->B * p->Hq, sms = ctx->gpu.sms;
    if (blocks < 1 || blocks > MOST_BLOCKS) return false;
    const heads_speed x = speeds[p->D > 64][causal][blocks - 1];
    /* A head's bits must not depend on how many there are (context_parallel.h). */
    if (p->flags & FATTN_DETERMINISTIC) return x.percent > 0 && blocks <= 4;
    return blocks == 1 || 2100 * fattni_ceil_div(heads, sms) * sms <= x.percent * (20 * heads + x.fixed * sms);
}
/* Short rows as these kernels know them (bwd_sm90_short.cuh): they find delta, and store dK and dV by TMA. */
static bool has_short_rows(const fattn_ctx *ctx, const fattni_problem *p, int variant, bool causal) {
    const fattni_array *const all[] = {&p->q, &p->k, &p->dq, &p->dk, &p->v, &p->o, &p->d_o, &p->dv};
    if (variant != (causal ? FATTNI_VARIANT_CAUSAL : FATTNI_VARIANT_FULL) || p->group > 1 || p->Sq != p->Sk ||
        (causal && p->q_pos0 != p->k_pos0) || p->d_lse.present || p->delta.present ||
        (p->flags & (FATTN_MERGE | FATTN_ACC_DQ | FATTN_ACC_DK | FATTN_ACC_DV)) || !heads_are_faster(ctx, p, causal))
        return false;
    for (int n = 0; n < 8; ++n)
        if (!all[n]->present || all[n]->dtype != (int32_t)p->dtype || !fattni_cuda_vector(all[n], n < 4 ? p->D : p->Dv))
            return false;
    return fattni_sm90_maps(&p->dk, p->D) && fattni_sm90_maps(&p->dv, p->Dv);
}

/* Hopper has separate kernels for a softcap (CAPPED). Its BANDED clusters do not clear what is beyond a sequence. */
static bool matches(const fattn_ctx *ctx, const fattni_cuda_kernel *k, const fattni_problem *p, int variant) {
    switch (k->variant) {
    case FATTNI_VARIANT_SHORT: return p->Sk <= FATTNI_SHORT_KEYS && has_short_rows(ctx, p, variant, true);
    case FATTNI_VARIANT_HEADS: return has_short_rows(ctx, p, variant, true);
    case FATTNI_VARIANT_HEADS_FULL: return has_short_rows(ctx, p, variant, false);
    case FATTNI_VARIANT_CAPPED: return p->softcap > 0 && p->softcap <= FATTNI_LARGE_CAP;
    case FATTNI_VARIANT_BIASED: return fattni_sm90_stages_bias(p) && dbias_fits(p);
    case FATTNI_VARIANT_BANDED: return variant == k->variant && (k->cluster == 1 || !(p->packed || p->padded));
    case FATTNI_VARIANT_GENERAL: return k->arch != 90 || !(p->softcap > 0);
    case FATTNI_VARIANT_PLAIN: return variant == FATTNI_VARIANT_FULL || variant == FATTNI_VARIANT_CAUSAL;
    default: return k->variant == variant;
    }
}

/* mma16 to head_dim 64 has the registers for three CTAs per SM. Where shared memory has room for two, as on an A100,
   mma16_ahead is faster, which has the registers for two (bench/results/cards_h200.txt). */
static bool is_crowded(const fattn_ctx *ctx, const fattni_cuda_kernel *k) {
    const size_t ctas = (ctx->gpu.shared_limit + 1024) / (k->shared + 1024);
    return k->variant == FATTNI_VARIANT_PLAIN && k->D == 64 && k->threads == 128 && k->shared > 60 << 10 && ctas < 3;
}

/* The Hopper kernel of a call, or NULL. */
static const fattni_cuda_kernel *sm90_of(const fattn_ctx *ctx, const fattni_problem *p, int variant) {
    if (!sm90_supports(p)) return NULL;
    for (const fattni_cuda_kernel *const *k = fattni_bwd_cuda_kernels; *k; ++k)
        if ((*k)->arch == 90 && (*k)->variant != FATTNI_VARIANT_HUGE && fattni_cuda_can_run(*k, ctx, p) &&
            matches(ctx, *k, p, variant) && counts_fit(p, *k))
            return *k;
    return NULL;
}

/* The kernel of capped sums that has the tensor maps of the main kernel, or else `portable`. */
static const fattni_cuda_kernel *sums_beside(const fattn_ctx *ctx, const fattni_problem *p,
                                             const fattni_cuda_kernel *main, const fattni_cuda_kernel *portable) {
    for (const fattni_cuda_kernel *const *k = fattni_bwd_cuda_kernels; *k; ++k)
        if ((*k)->variant == FATTNI_VARIANT_SUMS && (*k)->arch == 90 && main->arch == 90 && (*k)->D == main->D &&
            (*k)->Dv == main->Dv && fattni_cuda_can_run(*k, ctx, p))
            return *k;
    return portable;
}

static fattni_bwd_choice choose(const fattn_ctx *ctx, const fattni_problem *p) {
    fattni_bwd_choice c = {0};
    const int variant = fattni_cuda_variant_of(p, false);
    const fattni_problem aligned = aligned_of(p);
    const fattni_cuda_kernel *crowded = NULL;
    for (const fattni_cuda_kernel *const *k = fattni_bwd_cuda_kernels; *k; ++k) {
        if (!fattni_cuda_can_run(*k, ctx, p)) continue;
        if ((*k)->variant == FATTNI_VARIANT_HUGE) {
            if (!c.huge) c.huge = *k;
        } else if ((*k)->variant == FATTNI_VARIANT_SUMS) {
            if (!c.sums && p->softcap > 0 && (*k)->arch != 90) c.sums = *k;
        } else if (matches(ctx, *k, p, variant)) {
            if (is_crowded(ctx, *k))
                crowded = *k;
            else if ((*k)->arch != 90)
                c.portable = fattni_cuda_prefer(ctx, c.portable, *k);
        }
    }
    if (!c.portable) c.portable = crowded;
    c.aligned = sm90_of(ctx, &aligned, variant), c.main = sm90_of(ctx, p, variant);
    if (!c.aligned) c.aligned = c.portable;
    if (!c.main) c.main = c.portable;
    if (c.sums && c.main) c.sums = sums_beside(ctx, p, c.main, c.sums);
    return c;
}

const char *fattni_bwd_cuda_choose(const fattn_ctx *ctx, const fattni_problem *p, fattni_bwd_choice *out) {
    const char *reason = fattni_cuda_why_unsupported(ctx, p);
    if (reason) return reason;
    if ((p->flags & FATTN_DETERMINISTIC) && sums_bias(p))
        return "sums a dbias that broadcasts by atomic adds: it is not deterministic";
    *out = choose(ctx, p);
    if (!out->main || !out->huge) return fattni_cuda_why_no_kernel(p);
    const bool rounds = p->dtype == FATTN_BF16 || p->dtype == FATTN_F16 || out->main->tf32;
    if (p->softcap > 0 && rounds && !out->sums) return fattni_cuda_why_no_kernel(p);
    const int64_t tasks = fattni_bwd_cuda_row_grid(p, out->huge) + fattni_bwd_cuda_key_grid(p, out->huge),
                  sums = out->sums ? fattni_bwd_cuda_row_grid(p, out->sums) : 0;
    return fattni_cuda_why_grid_unsupported(
        fattni_max(fattni_max(tasks, sums),
                   fattni_max(fattni_bwd_cuda_row_grid(p, out->main), fattni_bwd_cuda_key_grid(p, out->main))));
}

void fattni_bwd_cuda_keep_choice(const fattni_bwd_choice *choice, const fattni_problem *p, fattni_kernel_plan *out) {
    out->choice[0] = choice->main;
    out->choice[1] = choice->huge;
    out->choice[2] = choice->sums;
    /* Requested, or neither dQ nor a broadcast dbias, whose terms are added in any order. */
    out->deterministic = (p->flags & FATTN_DETERMINISTIC) || !(p->dq.present || sums_bias(p));
    strncpy(out->name, choice->main->name, sizeof out->name - 1);
}
