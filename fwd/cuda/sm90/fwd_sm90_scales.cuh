/* What E4M3 operands add to fwd_sm90.cuh: scales of rows and channels, P as codes, V^T as K-major operand. Without F8
   there is only what keeps the common code short.

   Scales      S q_scale k_scale are the products. O is (P V^T) v_scale + v_mean, L gets scale q_shift. The producer
               copies those of a tile beside Q.
   P           times 2^P_LOG2, so that small weights keep their bits; m is at most P_SLACK below the maximum, as codes
               end at 448. Accumulators of O and l have that factor, too, until a tile ends.
   V^T         D rows of V_COLUMNS keys to a panel. The keys' order within 16 (fp8.h) is that in which a thread has P.

   INT8        sums of S begin at ORIGIN, so that their bits are those of the float ORIGIN + sum: integers need no
               conversion, and are in the order of floats. Scales of 32 keys come with K, by bulk copies.

   Include after TILE_SLOTS is defined. */
#ifndef FATTNI_FWD_CUDA_SM90_FWD_SM90_SCALES_H
#define FATTNI_FWD_CUDA_SM90_FWD_SM90_SCALES_H

#include "fwd/cuda/sm90/fwd_sm90_general.cuh"
#include "core/ptx/cp_async.h"
#include "core/ptx/f8.h"

#if INT8
#define PRODUCT_S wgmma_s8_ss_n
#else
#define PRODUCT_S PRODUCT(ss)
#endif
#if F8
#define PRODUCT(kind) wgmma_f8_##kind##_n
#define P_LOG2 6.0f
#define P_SLACK 2.75f
#else
#define PRODUCT(kind) wgmma_##kind##_n
#define P_LOG2 0.0f
#define P_SLACK 8.0f
#endif

enum {
    V_COLUMNS = FATTNI_FWD_F8_KEYS(BN),
    P_WORDS = F8 ? BN / 8 : BN / 4, /* of a thread's P */
    KEYS_OF_SCALE = 8,              /* INT8: of an element of k_scale; four are equal */
    SCALE_STAGES = 4                /* INT8: blocks whose scales are kept: K of a block is released before them */
};
static_assert(!INT8 || BN % 32 == 0, "keys of a scale");

/* Of a tile. */
typedef struct __align__(16) tile_scales {
    float q_scale[BM], q_shift[BM], v_scale[DV], v_mean[DV];
    float k_scale;
}
tile_scales;

/* The first column of sequence b in v8, of a packed batch. */
DEVICE int first_column(int k0, int b) { return (k0 & ~127) + 128 * b; }
/* 32 `step` keys further in V^T, in a descriptor's units. */
DEVICE uint32_t advance_keys(int step) {
    return (uint32_t)(step * 32 / V_COLUMNS * (DV * V_COLUMNS / 16) + step * 32 % V_COLUMNS / 16);
}

DEVICE void load_line(float *to, const float *from, int64_t step, int n, int count) {
    for (int x = (int)threadIdx.x % 32; x < n; x += 32)
        cp_async_4(shared_address(to + x), from + (x < count ? x * step : 0), x < count ? 4 : 0);
}
DEVICE void load_scales(const fattni_fwd_sm90_args *p, tile_scales *to, const sequence *s, int b, int h, int i0) {
    const fattni_f8_args *const f = &p->f8;
    const int g = h / p->a.group;
    const int64_t row = (int64_t)(s->q0 + i0),
                  first = s->batch * f->q_scale.b + h * f->q_scale.h + row * f->q_scale.row,
                  shift = s->batch * f->q_shift.b + h * f->q_shift.h + row * f->q_shift.row;
    load_line(to->q_scale, (const float *)f->q_scale.p + first, f->q_scale.row, BM, s->Sq - i0);
    load_line(to->q_shift, (const float *)f->q_shift.p + shift, f->q_shift.row, BM, s->Sq - i0);
    load_line(to->v_scale, (const float *)f->v_scale.p + b * f->v_scale.b + g * f->v_scale.h, 1, DV, p->a.Dv);
    load_line(to->v_mean, (const float *)f->v_mean.p + b * f->v_mean.b + g * f->v_mean.h, 1, DV, p->a.Dv);
    if (!INT8 && threadIdx.x % 32 == 0)
        cp_async_4(shared_address(&to->k_scale), (const float *)f->k_scale.p + b * f->k_scale.b + g * f->k_scale.h, 4);
}

/* ---- INT8 ---- */

#define ORIGIN 12582912.0f /* 1.5 2^23: sums of up to 256 products of codes stay within 2^22 of it */

/* Scales of a key head: where those of column 0 of v8 are, and the column at which a sequence's end. */
typedef struct key_scales {
    const float *of_0;
    int end;
} key_scales;
DEVICE key_scales key_scales_of(const fattni_view *k_scale, const sequence *s, int g, int first_column) {
    key_scales x = {0, 0};
    if (!INT8) return x;
    x.of_0 = (const float *)k_scale->p + s->batch * k_scale->b + g * k_scale->h;
    x.end = first_column + max((s->Sk + 127) / 128, 1) * 128;
    return x;
}
/* Of a block's scales, those that there are: the last block may reach beyond them. */
DEVICE int bytes_of_scales(const key_scales *x, int column) {
    return min((int)BN, x->end - column) / KEYS_OF_SCALE * 4;
}
DEVICE void read_key_scales(logit_scale *to, const float *scales) {
#pragma unroll
    for (int n = 0; n < BN / 32; ++n) to->key_unit[n] = ((const volatile float *)scales)[n * (32 / KEYS_OF_SCALE)];
}

DEVICE void begin_sums(float s[BN / 2]) {
#pragma unroll
    for (int n = 0; n < BN / 2; ++n) s[n] = ORIGIN;
    PIN(s, BN / 2); /* before the fence */
}
/* Sums become products of k as scaled. */
DEVICE void scale_sums(float s[BN / 2], const logit_scale *logits) {
#pragma unroll
    for (int n = 0; n < BN / 2; ++n) s[n] = (s[n] - ORIGIN) * logits->key_unit[n / 16];
}
/* The unit of a sum, of row e and 8 keys, number n. */
DEVICE float sum_unit(const logit_scale *logits, int e, int n) { return logits->row_unit[e] * logits->key_unit[n / 4]; }
/* The largest of this thread's scores in row e, in units of log2. */
DEVICE float largest_of_sums(const float s[BN / 2], const logit_scale *logits, int e) {
    float high = -INFINITY;
#pragma unroll
    for (int g = 0; g < BN / 32; ++g) {
        const float *const x = s + 16 * g + 2 * e; /* two of each 8 keys */
        int most = max(__float_as_int(x[0]), __float_as_int(x[1]));
#pragma unroll
        for (int n = 4; n < 16; n += 4) most = __vimax3_s32(most, __float_as_int(x[n]), __float_as_int(x[n + 1]));
        const float unit = sum_unit(logits, e, 4 * g);
        high = fmaxf(high, fmaf(__int_as_float(most), unit, -ORIGIN * unit));
    }
    return high;
}

/* ---- scales of rows and channels ---- */

/* The units of a thread's two rows. */
DEVICE void read_units(logit_scale *to, const tile_scales *scales, int row0, float scale_log2) {
    const float unit = (INT8 ? 1.0f : ((const volatile tile_scales *)scales)->k_scale) * scale_log2;
#pragma unroll
    for (int e = 0; e < 2; ++e) to->row_unit[e] = ((const volatile tile_scales *)scales)->q_scale[row0 + 8 * e] * unit;
}
DEVICE float unit_of(const logit_scale *logits, int e) { return F8 ? logits->row_unit[e] : logits->unit; }

/* P as codes, in the layout of wgmma_f8_rs. */
DEVICE void pack_codes(uint32_t p[P_WORDS], const float s[BN / 2]) {
#pragma unroll
    for (int i = 0; i < P_WORDS; ++i) {
        const float *const x = s + i / 2 * 8 + i % 2 * 2;
        p[i] = pack_e4m3(x[0], x[1], x[4], x[5]);
    }
}

/* Two columns of O, from column c on, of one row; `whole`: how much of its weight is on keys, 1 without a sink. */
DEVICE float2 scaled_pair(const float o[2], float scale, float whole, const tile_scales *scales, int c) {
    const float2 by = *(const float2 *)&scales->v_scale[c], mean = *(const float2 *)&scales->v_mean[c];
    return make_float2(fmaf(o[0] * scale, by.x, whole * mean.x), fmaf(o[1] * scale, by.y, whole * mean.y));
}
DEVICE uint32_t pack_kind(float2 x, int kind) { return kind == KIND_BF16 ? pack_bf16(x.x, x.y) : pack_f16(x.x, x.y); }
/* 16 columns of O, from column c0 on, for stmatrix. */
DEVICE void pack_scaled(uint32_t r[4], const float o[8], const float scale[2], const float whole[2],
                        const tile_scales *scales, int c0, int kind) {
    const int c = c0 + (int)threadIdx.x % 4 * 2;
#pragma unroll
    for (int i = 0; i < 4; ++i)
        r[i] = pack_kind(scaled_pair(o + 2 * i, scale[i % 2], whole[i % 2], scales, c + i / 2 * 8), kind);
}
/* store_row (core/device/quad.cuh), in F32 or the 16-bit type of the call; 16 bytes at a time where o allows that. */
DEVICE void store_scaled_row(void *row, const float *o, float scale, float whole, const tile_scales *scales, int inside,
                             const fattni_attention_args *a) {
    const int t = (int)threadIdx.x % 4;
#pragma unroll
    for (int c = 0; c < DV / 8; c += 4) {
        uint32_t r[4];
#pragma unroll
        for (int n = 0; n < 4; ++n) {
            const int d = 8 * (c + n) + 2 * t;
            const float2 x = scaled_pair(o + 4 * (c + n), scale, whole, scales, d);
            r[n] = pack_kind(x, a->kind);
            if (a->o_f32 && inside) {
                if (d < a->Dv) ((float *)row)[d] = x.x;
                if (d + 1 < a->Dv) ((float *)row)[d + 1] = x.y;
            } else if (!a->vector_qkv && inside) {
                if (d < a->Dv) ((uint16_t *)row)[d] = (uint16_t)r[n];
                if (d + 1 < a->Dv) ((uint16_t *)row)[d + 1] = (uint16_t)(r[n] >> 16);
            }
        }
        transpose_quad(r);
        store_global_4_if((char *)row + 16 * (c + t), r, inside && !a->o_f32 && a->vector_qkv && 8 * (c + t) < a->Dv);
    }
}

#endif
