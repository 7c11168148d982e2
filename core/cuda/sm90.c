/* Tensor maps and the persistent schedule of the Hopper kernels. */
#include "core/cuda/sm90.h"

#include "core/cuda/driver.h"

/* Strides below 2^40 bytes; dimension 2 are rows, which cannot broadcast. */
static bool mappable(const fattni_array *a, int64_t width) {
    if (!fattni_cuda_vector(a, width) || (a->s[2] <= 0 && a->n[2] > 1)) return false;
    for (int d = 0; d < 3; ++d)
        if (a->s[d] < 0 || a->s[d] >= (int64_t)1 << 39) return false;
    return true;
}

/* A gradient is stored by 16 bytes, unless it is F32 or added to. */
static bool storable(const fattni_array *a, int64_t width, bool added) {
    return !a->present || a->dtype == FATTN_F32 || added || fattni_cuda_vector(a, width);
}

/* The kernel always computes dQ, and may divide L by scale. An F32 d_o is copied to a place that fits. */
static bool backward_fits(const fattni_problem *p) {
    return p->scale > 1e-30 && (p->d_o.dtype == FATTN_F32 || mappable(&p->d_o, p->Dv)) && p->dq.present &&
           storable(&p->dk, p->D, p->flags & FATTN_ACC_DK) &&
           storable(&p->dv, p->Dv, p->flags & FATTN_ACC_DV);
}

bool fattni_sm90_fits(const fattni_problem *p) {
    if (p->drop_T && p->pass == FATTNI_FWD && ((p->q_pos0 | p->k_pos0) & 15))
        return false; /* tiles and Philox blocks differ */
    if (p->pass == FATTNI_FWD && p->bias.present && fattni_max(p->D, p->Dv) > 128) return false;
    return p->Sq > 0 && p->Sk > 0 && p->B > 0 && p->rows_q > 0 && p->rows_k > 0 &&
           mappable(&p->q, p->D) && mappable(&p->k, p->D) && mappable(&p->v, p->Dv) &&
           (p->o.dtype == FATTN_F32 || fattni_cuda_vector(&p->o, p->Dv)) &&
           (p->pass == FATTNI_FWD || backward_fits(p));
}

bool fattni_sm90_maps_o(const fattni_problem *p) {
    return p->o.dtype == (int32_t)p->dtype && mappable(&p->o, p->Dv);
}

/* Blocks of one (b, h), a cluster's as one. */
static int64_t blocks_of(const fattni_problem *p, const fattni_cuda_kernel *k) {
    return p->pass == FATTNI_FWD ? fattni_ceil_div(p->Sq, k->BM)
                                 : fattni_ceil_div(p->Sk, (int64_t)k->BN * k->cluster);
}

/* fattni_cut makes at most 7 pieces of rows for each row block of a head, none when packed, and 2 for
   each tile; a cluster of two has one. A task's steps are the row blocks of a group. */
bool fattni_sm90_counts(const fattni_problem *p, const fattni_cuda_kernel *k) {
    const int64_t heads = (p->pass == FATTNI_FWD ? p->Hq : p->Hkv) * p->B;
    const int64_t rows = fattni_ceil_div(p->Sq, k->BM) * (p->packed ? p->group : p->Hq * p->B);
    return blocks_of(p, k) * heads <= 1 << 28 && (p->pass == FATTNI_FWD || rows <= 1 << 26);
}

/* {width, rows, heads, batches} of `a`, boxes of 64 columns and `box` rows. */
static fattn_status map_of(fattn_ctx *ctx, const fattni_array *a, fattn_dtype dtype, int64_t width, int box,
                           CUtensorMap *map, fattni_map_step *step) {
    step->head = a->s[1] != 0;
    step->batch = a->s[0] != 0;
    const cuuint64_t extent[4] = {(cuuint64_t)width, (cuuint64_t)a->n[2],
                                  (cuuint64_t)(step->head ? a->n[1] : 1),
                                  (cuuint64_t)(step->batch ? a->n[0] : 1)};
    const int64_t row = a->s[2] ? a->s[2] : fattni_round_up(width, 8); /* one row */
    const cuuint64_t stride[3] = {(cuuint64_t)row * 2, (cuuint64_t)(step->head ? a->s[1] : row) * 2,
                                  (cuuint64_t)(step->batch ? a->s[0] : row) * 2};
    const cuuint32_t boxes[4] = {64, (cuuint32_t)box, 1, 1}, unit[4] = {1, 1, 1, 1};
    const CUresult result = ctx->gpu.driver->encode(
        map, dtype == FATTN_BF16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16, 4,
        a->p, extent, stride, boxes, unit, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
        CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    if (result == CUDA_SUCCESS) return FATTN_OK;
    return fattn_ctx_fail(ctx, FATTN_E_CUDA,
                          "cuTensorMapEncodeTiled: result %d for extents %lld, %lld, %lld, %lld and "
                          "strides of %lld, %lld, %lld bytes", (int)result, (long long)extent[0],
                          (long long)extent[1], (long long)extent[2], (long long)extent[3],
                          (long long)stride[0], (long long)stride[1], (long long)stride[2]);
}

/* So many heads, a power of two, that what each reads again and again fits half of L2. */
static int64_t section_of(const fattn_ctx *ctx, int64_t bytes_per_head) {
    const int64_t fit = (int64_t)ctx->gpu.l2_bytes * 5 / 8 / fattni_max(bytes_per_head, 1);
    int64_t n = 1;
    while (2 * n <= fit) n *= 2;
    return n;
}

static fattn_status maps_of(fattn_ctx *ctx, const fattni_problem *p, const fattni_cuda_kernel *k,
                            fattni_sm90_args *out) {
    const bool forward = p->pass == FATTNI_FWD;
    FATTNI_TRY(map_of(ctx, &p->q, p->dtype, p->D, forward ? FATTNI_FWD_SM90_Q_ROWS(k->D, k->BM) : k->BM, &out->q,
                      &out->q_step));
    FATTNI_TRY(map_of(ctx, &p->k, p->dtype, p->D, k->BN, &out->k, &out->k_step));
    FATTNI_TRY(map_of(ctx, &p->v, p->dtype, p->Dv, k->BN, &out->v, &out->v_step));
    if (out->o_by_tma) FATTNI_TRY(map_of(ctx, &p->o, p->dtype, p->Dv, 16, &out->o, &out->o_step));
    if (!forward)
        FATTNI_TRY(map_of(ctx, &p->d_o, p->dtype, p->Dv, k->BM, &out->d_o, &out->d_o_step));
    return FATTN_OK;
}

fattn_status fattni_sm90_args_of(fattn_ctx *ctx, const fattni_problem *p,
                                 const fattni_cuda_kernel *k, fattni_sm90_args *out) {
    const bool forward = p->pass == FATTNI_FWD;
    bool entered;
    *out = (fattni_sm90_args){.a = fattni_cuda_args_of(p)};
    out->o_by_tma = forward && fattni_sm90_maps_o(p);
    out->scale_log2 = out->a.scale * 1.4426950408889634f;
    FATTNI_TRY(fattni_cuda_enter(ctx, &entered)); /* the driver encodes for a context */
    const fattn_status s = maps_of(ctx, p, k, out);
    fattni_cuda_leave(ctx, entered);
    FATTNI_TRY(s);
    const int64_t blocks = blocks_of(p, k);
    const int64_t heads = forward ? p->Hq : p->Hkv, tiles = blocks * heads * p->B;
    out->blocks = (int32_t)blocks;
    out->tiles = out->pieces = (int32_t)tiles;
    /* Heads that are worked on together. Forward: their K and V fit L2. Backward: about two waves of CTAs, which are
       sorted, the longest first, and whose accumulators of dQ fit L2; of clusters in short sequences half a wave,
       since their pieces of rows have a CTA each. */
    int64_t section = 1;
    if (forward) {
        section = section_of(ctx, p->Sk * 2 * (p->D + p->Dv)) * p->group;
    } else {
        const int64_t half_waves = k->cluster > 1 && blocks <= FATTNI_SHORT_BLOCKS ? 1 : 5;
        while (2 * (2 * section * blocks * k->cluster) <= half_waves * ctx->gpu.sms) section *= 2;
        /* Key blocks of one head that run at once wait for each other's turns: let there be few. */
        if ((p->flags & FATTN_DETERMINISTIC) && blocks > FATTNI_SHORT_BLOCKS)
            section = fattni_max(section, k->mask == FATTNI_MASK_FULL ? 16 : 32);
    }
    out->section = (int32_t)fattni_min(section, heads * p->B);
    return FATTN_OK;
}
