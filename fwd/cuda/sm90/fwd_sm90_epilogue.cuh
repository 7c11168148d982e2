/* The end of a tile in fwd_sm90.cuh, which includes this where its types are known: L and the factors of O from the
   softmax's state, then the store of O, during the next tile's first softmax. */
#ifndef FATTNI_FWD_CUDA_SM90_FWD_SM90_EPILOGUE_H
#define FATTNI_FWD_CUDA_SM90_FWD_SM90_EPILOGUE_H

/* O += weight times `row` of the earlier O, in F32; lane t of a quad has columns 8c + 2t, 8c + 2t + 1. */
DEVICE void merge_row(float o[DV / 2], const float *row, float weight, int width) {
#pragma unroll
    for (int c = 0; c < DV / 8; ++c)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            const int d = 8 * c + 2 * ((int)threadIdx.x % 4) + e;
            if (d < width) o[4 * c + e] += weight * row[d];
        }
}

/* Factors of a quad's two rows of O when they are stored: of the accumulators in lanes 0 and 1, of the earlier O in
   lanes 2 and 3. One register: they are kept until the next tile's first softmax. */
typedef float o_scale;
DEVICE o_scale o_scale_of(const float scale[2], const float keep_old[2]) {
    const int lane = (int)threadIdx.x % 4;
    const float own = lane == 0 ? scale[0] : scale[1];
    return BANDS && lane > 1 ? (lane == 2 ? keep_old[0] : keep_old[1]) : own;
}
DEVICE float scale_of(o_scale x, int e) { return __shfl_sync(ALL_LANES, x, e, 4); }
DEVICE float keep_old_of(o_scale x, int e) { return BANDS ? __shfl_sync(ALL_LANES, x, 2 + e, 4) : 0.0f; }
/* F8, whose calls do not merge: how much of a row's weight is on keys, in the place of keep_old. */
DEVICE float whole_of(o_scale x, int e) { return BANDS ? keep_old_of(x, e) : scale_of(x, e) == 0.0f ? 0.0f : 1.0f; }
/* log2 x for x > 0, with an absolute error of 2^-21 plus the rounding of the result; NaN stays NaN. */
DEVICE float log2_of(float x) {
    const int exponent = (__float_as_int(x) - 0x3f3504f3) & 0xff800000; /* x = 2^k times 0.7 to 1.4 */
    return fmaf(0.0f, x, (float)(exponent >> 23)) + log2_approx(__int_as_float(__float_as_int(x) - exponent));
}
/* The end of a thread's two rows, which have seen all keys: stores L, gives the factors of O. sum: of P relative to m;
   shift: what their scores are relative to, in natural units. A row without keys gives O = 0, L = -inf. Both rows at
   once and in few instructions: the next tile's S is ready before they end. */
DEVICE o_scale end_rows(const fattni_attention_args *a, const volatile tile_slot *from, int64_t lse, int row0,
                        const float m[2], const float sum[2], const float shift[2], int shifted) {
    int Sq = a->Sq;
    if (BANDS) Sq = from->Sq; /* not by ?:, which would read a->Sq as volatile, too, from a copy */
    const int i = from->i0 + row0;
    float *const to = (float *)a->lse.p + lse + row0 * a->lse.row;
    float scale[2], keep_old[2];
#pragma unroll
    for (int e = 0; e < 2; ++e) {
        const float inverse = reciprocal_approx(sum[e]), L = fmaf(m[e], LN2, LN2 * (log2_of(sum[e]) - P_LOG2));
        row_result result = {sum[e] == 0.0f ? 0.0f : inverse, sum[e] == 0.0f ? -INFINITY : L, 0.0f, shift[e]};
        float *const row_lse = to + 8 * e * a->lse.row;
        const int inside = i + 8 * e < Sq;
        if (BANDS) {
            result = general_row(a, result, m[e] - P_LOG2, sum[e], from->h, inside ? row_lse : 0);
            __syncwarp(); /* all threads of the row have read the old L */
        }
        if (BANDS || F8 || shifted) result.L += result.shift;
        scale[e] = result.scale, keep_old[e] = result.keep_old;
        if (F8) keep_old[e] = a->sink.p ? result.scale * sum[e] : sum[e] == 0.0f ? 0.0f : 1.0f;
        if (threadIdx.x % 4 == 0 && inside) *row_lse = result.L;
    }
    return o_scale_of(scale, keep_old);
}
#if TAKES_PARTS
#include "fwd/cuda/sm90/fwd_sm90_parts.cuh"
#endif
/* Row epilogue of a tile that has seen all its keys. */
DEVICE o_scale finish_rows(const fattni_fwd_sm90_args *p, const volatile tile_slot *from, int64_t lse, int row0,
                           const row_state *r, const logit_scale *logits, shared_memory *smem,
                           const tile_scales *scales) {
    const fattni_attention_args *const a = &p->a;
    /* For both rows, which takes fewer instructions. */
    const float too_large = fmaxf(r->m[0], r->m[1]) > LARGEST_MAX ? NAN : 0.0f;
    const float sum[2] = {quad_sum(r->l[0]) + too_large, quad_sum(r->l[1]) + too_large};
    float shift[2] = {0.0f, 0.0f};
#if TAKES_PARTS
    if (from->parts > 1) {
        store_rows(p, from, row0, r, sum, smem);
        return 0.0f;
    }
#endif
#pragma unroll
    for (int e = 0; e < 2; ++e) {
        if (has_shifts(r))
            shift[e] = smem->shifts[row0 + 8 * e] * (F8 ? logits->row_unit[e] * LN2
                                                     : BIASED || (GENERAL && logits->unit == LOG2E) ? 1.0f
                                                                                                    : a->scale);
        if (F8) shift[e] = fmaf(scales->q_shift[row0 + 8 * e], a->scale, shift[e]);
    }
    return end_rows(a, from, lse, row0, r->m, sum, shift, has_shifts(r));
}

/* The store of the last tile's O. Two steps with other work in between: by stmatrix to this warp's buffer, and from
   there by TMA. Or one step, from registers, 16 bytes per thread: where O has no buffer, some of the warp's 16 rows
   belong to another sequence, O is F32, or no tensor map takes its strides. */
typedef struct epilogue_state {
    const fattni_fwd_sm90_args *p;
    const volatile tile_slot *from;
    uint32_t shared;
    int row0, pending; /* pending: there is an O to store */
    o_scale scale;
    const tile_scales *scales;   /* F8 */
    const volatile int64_t *lse; /* TAKES_PARTS */
    shared_memory *smem;         /* TAKES_PARTS */
} epilogue_state;
/* Whether a warp's rows are stored by TMA. ptxas must know that all its threads agree: after a branch that it takes for
   divergent, wgmma's descriptors go through vector registers in every block, which at head_dim 128 takes a tenth
   longer. At 64 without a bias there are no registers for it. */
DEVICE int by_tma(const epilogue_state *x) {
    if (!BANDS) return STAGED_O;
    const int own = x->row0 / 16 * 16, row = D > 64 || BIASED ? from_leader(own) : own;
    return STAGED_O && x->p->o_by_tma && x->from->i0 + row + 16 <= x->from->Sq;
}
DEVICE uint32_t o_of_warp(const epilogue_state *x) { return MEMBER_ADDRESS(x->shared, o) + x->row0 / 16 * O_BYTES; }

/* What rounding takes off row i of O (o_rest.h). */
DEVICE void store_rest_of_row(const fattni_attention_args *a, const sequence *s, const tile *t, int i, const float *o,
                              float scale) {
    const int64_t at = s->batch * a->o_rest.b + t->h * a->o_rest.h + (int64_t)(s->q0 + i) * a->o_rest.row;
    store_rest((char *)a->o_rest.p + at, o, DV / 8, scale, i < s->Sq, a->Dv);
}
/* Both rows, of an O that is stored by TMA. */
DEVICE void store_rest_of_o(const epilogue_state *x, const float o[DV / 2]) {
    const tile t = {x->from->i0, x->from->h, x->from->b, 0, 0, 0, 1};
    const sequence s = read_sequence(&x->p->a, x->from, t.b);
#pragma unroll
    for (int e = 0; e < 2; ++e)
        store_rest_of_row(&x->p->a, &s, &t, t.i0 + x->row0 + 8 * e, o + 2 * e, scale_of(x->scale, e));
}

DEVICE void store_from_registers(const epilogue_state *x, float o[DV / 2]) {
    const fattni_attention_args *const a = &x->p->a;
    const tile t = read_tile(x->from);
    const sequence s = read_sequence(a, x->from, t.b);
#pragma unroll
    for (int e = 0; e < 2; ++e) {
        const int i = t.i0 + x->row0 + 8 * e;
        const int64_t at = s.batch * a->o.b + t.h * a->o.h + (int64_t)(s.q0 + i) * a->o.row;
        const float keep_old = F8 ? 0.0f : keep_old_of(x->scale, e);
        float scale = scale_of(x->scale, e);
        if (keep_old > 0) { /* then O is F32 */
#pragma unroll
            for (int c = 0; c < DV / 2; ++c)
                if ((c & 2) == 2 * e) o[c] *= scale;
            merge_row(o + 2 * e, (const float *)a->o.p + at, keep_old, a->Dv);
            scale = 1.0f;
        }
        void *const to = (char *)a->o.p + at * (a->o_f32 ? 4 : 2);
        if (F8)
            store_scaled_row(to, o + 2 * e, scale, whole_of(x->scale, e), x->scales, i < s.Sq, a);
        else
            store_row(to, o + 2 * e, DV / 8, scale, i < s.Sq, a->Dv, a->o_f32, 0);
        if (!STAGED_O && a->o_rest.p) store_rest_of_row(a, &s, &t, i, o + 2 * e, scale);
    }
}
/* A part of O to this warp's buffer. */
DEVICE void stage_part(const epilogue_state *x, const float o[DV / 2 / O_PARTS], int part) {
    /* d 64 without bands has registers to keep what depends on the lane alone, and is faster with that. */
    const int lane = (D == 64 && !BANDS ? (int)threadIdx.x : reload_thread_index()) % 32;
    const uint32_t row = o_of_warp(x) + reload_thread_index() % 16 * 128;
    const float scale[2] = {scale_of(x->scale, 0), scale_of(x->scale, 1)};
    const float whole[2] = {F8 ? whole_of(x->scale, 0) : 0.0f, F8 ? whole_of(x->scale, 1) : 0.0f};
    if (is_leader()) bulk_wait_read(); /* the part before has been read */
    __syncwarp();
#pragma unroll
    for (int n = 0; n < DV / 16 / O_PARTS; ++n) { /* 16 columns */
        uint32_t r[4];
        if (F8)
            pack_scaled(r, o + 8 * n, scale, whole, x->scales, 16 * n + part * (DV / O_PARTS), x->p->a.kind);
        else
#pragma unroll
            for (int i = 0; i < 4; ++i)
                r[i] = pack(o[8 * n + 2 * i] * scale[i % 2], o[8 * n + 2 * i + 1] * scale[i % 2]);
        stmatrix_x4(row + n / 4 * 2048 + swizzled_chunk(2 * (n % 4) + lane / 16, lane % 8), r);
    }
}
/* The buffer to global memory, by TMA. */
DEVICE void store_part(const epilogue_state *x, int part) {
    async_proxy_fence();
    __syncwarp();
    if (!is_leader()) return;
    const tile t = {x->from->i0, x->from->h, x->from->b, 0, 0, 0, 1};
    const sequence s = read_sequence(&x->p->a, x->from, t.b);
    for (int n = 0; n < O_PANELS; ++n)
        tma_store(&x->p->o, o_of_warp(x) + n * 2048, 64 * (part * O_PANELS + n), s.q0 + t.i0 + x->row0 / 16 * 16,
                  t.h * x->p->o_step.head, s.batch * x->p->o_step.batch);
    bulk_commit();
}
DEVICE void begin_store(epilogue_state *x, float o[DV / 2]) {
    if (!x->pending) return;
#if TAKES_PARTS
    if (x->from->parts > 1) join_parts(x->p, x->smem, x->shared, x->from, x->row0, *x->lse, &x->pending, &x->scale, o);
    if (!x->pending) return;
#endif
    if (STAGED_O && !BANDS && !F8 && x->p->a.o_rest.p) store_rest_of_o(x, o);
    if (!by_tma(x)) return;
    stage_part(x, o, 0);
    if (O_PARTS > 1) store_part(x, 0);
}
DEVICE void end_store(const epilogue_state *x, float o[DV / 2]) {
    if (!x->pending) return;
    if (STAGED_O && BANDS && !F8 && x->p->a.o_rest.p) store_rest_of_o(x, o);
    if (!by_tma(x)) {
        store_from_registers(x, o);
        return;
    }
    if (O_PARTS > 1) stage_part(x, o + DV / 4, 1);
    store_part(x, O_PARTS - 1);
}

#endif
