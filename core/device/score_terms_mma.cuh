/* Score terms for general variants of the 16-bit kernels: softcap, ALiBi, bias and dropout on accumulators of mma and
   wgmma, which have the same elements per thread, and what sink and merge do to a row. Forward and backward.

   x[tiles][4] is a thread's part of S (forward) or of S^T (backward). In S, element e of tile n is row i + 8 (e/2),
   column j + 8 n + e%2; in S^T it is row i + 8 n + e%2, column j + 8 (e/2). The number of tiles is a constant; a kernel
   that is short of registers passes a few tiles at a time. */
#ifndef FATTNI_CORE_DEVICE_SCORE_TERMS_MMA_H
#define FATTNI_CORE_DEVICE_SCORE_TERMS_MMA_H

#include "core/device/dropout.cuh"
#include "core/device/half_types.cuh"
#include "core/ptx/permute.h"

DEVICE int row_of(int transposed, int i, int n, int e) {
    return transposed ? i + 8 * n + (e & 1) : i + (e >= 2 ? 8 : 0);
}
DEVICE int column_of(int transposed, int j, int n, int e) {
    return transposed ? j + (e >= 2 ? 8 : 0) : j + 8 * n + (e & 1);
}

#ifndef HAS_BIAS /* 0 in kernels that have no registers for it, which do not take calls with a bias */
#define HAS_BIAS 1
#endif

/* A "far" score: in units of log2 beyond this floats resolve no better than 1/2, and the rounding of log2(e) times it
   would be as large, and show in the row's P. Then the difference of two scores has to be taken before the product. */
#define FATTNI_FAR_SCORE 4194304.0f
DEVICE int is_far(float x) { return fabsf(x) > FATTNI_FAR_SCORE && fabsf(x) < INFINITY; }

/* Whether a score is more than scale q.k. */
DEVICE int has_terms(const fattni_attention_args *a) { return a->softcap > 0 || a->alibi.p || a->bias.p; }
DEVICE float slope_of(const fattni_attention_args *a, int h) { return a->alibi.p ? float_at(&a->alibi, h) : 0.0f; }

/* tanh(x) = 1 - 2 / (e^2x + 1), with an absolute error of 3e-7 for all x; tanh.approx has 2^-11. */
DEVICE float tanh_of(float x) {
    return fmaf(-2.0f, __fdividef(1.0f, 1.0f + exp2_approx(x * 2.8853900817779268f)), 1.0f);
}
/* x = outer tanh(inner x), with an absolute error of 3e-7 outer. With y = 5 inner x, a warp whose |y| are all below 2
   (most scores are changed by a few per cent) takes a polynomial y Q(y^2) with a relative error of 1e-7, others
   1 - 2 / (2^ky + 1). Floats below 2 do not have the exponent's highest bit set, nor has the OR of their bits. */
DEVICE void cap(float (*x)[4], int tiles, float inner, float outer) {
    uint32_t bits = 0;
#pragma unroll
    for (int n = 0; n < tiles; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            x[n][e] *= 5.0f * inner;
            bits |= __float_as_uint(x[n][e]);
        }
    if (__any_sync(ALL_LANES, bits & 0x40000000u)) {
#pragma unroll
        for (int n = 0; n < tiles; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const float power = exp2_approx(x[n][e] * (2.8853900817779268f / 5.0f));
                x[n][e] = fmaf(-2.0f * outer, __fdividef(1.0f, 1.0f + power), outer);
            }
        return;
    }
    const float q0 = outer * 0.19999997f, q1 = outer * -2.6665090e-3f, q2 = outer * 4.2467127e-5f,
                q3 = outer * -6.0868609e-7f;
#pragma unroll
    for (int n = 0; n < tiles; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            const float z = x[n][e] * x[n][e];
            x[n][e] *= fmaf(z, fmaf(z, fmaf(z, q3, q2), q1), q0);
        }
}

DEVICE void add_bias(float (*x)[4], int tiles, int transposed, const fattni_attention_args *a, const sequence *s, int b,
                     int h, int i, int j) {
    const int64_t plane = b * a->bias.b + h * a->bias.h;
#pragma unroll
    for (int n = 0; n < tiles; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            const int row = row_of(transposed, i, n, e), column = column_of(transposed, j, n, e);
            if (row >= s->Sq || column >= s->Sk) continue;
            const int64_t at = plane + row * a->bias.row + column * a->bias.column;
            x[n][e] += a->bias_f32 ? ((const float *)a->bias.p)[at] : to_float(((const half_type *)a->bias.p)[at]);
        }
}

/* add_bias for S and a bias of the 16-bit dtype in which a thread's two columns are one aligned word
   (pairs_of_bias). */
DEVICE void add_bias_pairs(float (*x)[4], int tiles, const fattni_attention_args *a, const sequence *s, int b, int h,
                           int i, int j) {
    const half_type *const corner =
        (const half_type *)a->bias.p + b * a->bias.b + h * a->bias.h + (int64_t)i * a->bias.row + j;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const half_type *const row = corner + 8 * half * a->bias.row;
        const int columns = i + 8 * half < s->Sq ? s->Sk - j : 0;
#pragma unroll
        for (int n = 0; n < tiles; ++n) {
            uint32_t pair = 0;
            if (8 * n < columns) pair = *(const uint32_t *)(row + 8 * n);
            x[n][2 * half] += to_float(((const half_type *)&pair)[0]);
            x[n][2 * half + 1] += to_float(((const half_type *)&pair)[1]);
        }
    }
}
DEVICE int pairs_of_bias(const fattni_attention_args *a, const sequence *s) {
    const int64_t odd = (int64_t)((uintptr_t)a->bias.p >> 1) | a->bias.b | a->bias.h | a->bias.row | s->Sk;
    return a->bias.column == 1 && !a->bias_f32 && !(odd & 1);
}

/* Scores in natural units: x += bias - slope |i' + off - j'|. */
DEVICE void add_terms(float (*x)[4], int tiles, int transposed, const fattni_attention_args *a, const sequence *s,
                      float slope, int b, int h, int i, int j) {
    if (a->alibi.p) {
        const float corner = slope * (float)(i - j + s->diagonal);
        const uint32_t minus = slope >= 0 ? 0x80000000u : 0u; /* a slope may be negative */
#pragma unroll
        for (int n = 0; n < tiles; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const float y =
                    fmaf(slope, (float)(row_of(transposed, 0, n, e) - column_of(transposed, 0, n, e)), corner);
                x[n][e] += __uint_as_float((__float_as_uint(y) & 0x7fffffffu) | minus);
            }
    }
    if (!HAS_BIAS) return;
    if (!transposed && a->bias.p && pairs_of_bias(a, s))
        add_bias_pairs(x, tiles, a, s, b, h, i, j);
    else if (a->bias.p)
        add_bias(x, tiles, transposed, a, s, b, h, i, j);
}

/* x = outer tanh(scale x / softcap) with a relative error of 3e-7, for softcaps above FATTNI_LARGE_CAP. Where the
   quotient is so small that tanh does not change it, or that it might be subnormal, it is not computed. */
DEVICE void large_cap(float (*x)[4], int tiles, float scale, float softcap, float outer) {
    const float inverse = 1.0f / softcap, linear = outer == softcap ? 1.0f : inverse;
#pragma unroll
    for (int n = 0; n < tiles; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            const float y = scale * x[n][e];
            x[n][e] = fabsf(y) < softcap * 0x1p-14f ? linear * y : outer * tanhf(y * inverse);
        }
}

/* Products q.k to scores in natural units: s = cap(scale x) - slope |i' + off - j'| + bias. `tanhs`, unless NULL, gets
   the values of tanh: backward needs 1 - tanh^2. */
DEVICE void general_scores(float (*x)[4], float (*tanhs)[4], int tiles, int transposed, const fattni_attention_args *a,
                           const sequence *s, float slope, int b, int h, int i, int j) {
    if (a->softcap > FATTNI_LARGE_CAP)
        large_cap(x, tiles, a->scale, a->softcap, tanhs ? 1.0f : a->softcap);
    else if (a->softcap > 0)
        cap(x, tiles, __fdividef(a->scale, a->softcap), tanhs ? 1.0f : a->softcap);
    const float factor = a->softcap > 0 ? a->softcap : a->scale;
    if (tanhs || !(a->softcap > 0))
#pragma unroll
        for (int n = 0; n < tiles; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                if (tanhs) tanhs[n][e] = x[n][e];
                x[n][e] *= factor;
            }
    add_terms(x, tiles, transposed, a, s, slope, b, h, i, j);
}

/* Where keep_tiles has the bit of element e of tile n, in keep[n / 8]: those of low lanes in the lower half, and of
   high lanes, which are the elements with odd e, in the upper one. */
DEVICE int keep_bit(int transposed, int n, int e) {
    const int word = transposed ? n % 2 + e / 2 * 2 : n % 2 * 2 + e / 2;
    return n % 8 / 2 * 4 + word + e % 2 * 16;
}
DEVICE int is_kept(const uint32_t *keep, int transposed, int n, int e) {
    return keep[n / 8] >> keep_bit(transposed, n, e) & 1;
}
/* Elements 2 half and 2 half + 1 of tile n as a mask for two 16-bit numbers. */
DEVICE uint32_t keep_mask(const uint32_t *keep, int transposed, int n, int half) {
    const int bit = keep_bit(transposed, n, 2 * half);                          /* and 16 more */
    return permute(keep[n / 8] << (7 - bit % 8), 0, bit < 8 ? 0xaa88 : 0xbb99); /* signs of bytes 0 and 2, or 1 and 3 */
}

/* Keep bits of `tiles` neighbouring tiles. Where their number is even and the tile's corner lies at a multiple of 16 in
   the whole sequence, a Philox block covers rows {r, r+8} by columns {c, c+1, c+8, c+9}. In S these are a lane's eight
   elements; in S^T two blocks hold the elements of two lanes, whose keys are neighbours, and each lane computes one.
   Elsewhere a block is computed for each element. All lanes of the warp take part. */
DEVICE void keep_tiles(uint32_t *keep, int tiles, const fattni_attention_args *a, const dropout_plane *plane,
                       int transposed, int i, int j) {
    if (tiles % 2 == 0 && ((a->q_pos0 | a->k_pos0) & 15) == 0) { /* a block decides two tiles, from multiples of 16 */
        const int odd = transposed ? j & 1 : 0;
        const keep_rule rule = keep_rule_of(a->drop_T);
        const fattni_block first = dropout_counter(plane, (int64_t)a->q_pos0 + i + odd, (int64_t)a->k_pos0 + j);
#pragma unroll
        for (int word = 0; word < (tiles + 7) / 8; ++word) {
            uint32_t bits = 0;
#pragma unroll 1 /* there are registers for two blocks at a time, not for four */
            for (int n = 8 * word; n < min(tiles, 8 * word + 8); n += 4) {
                uint32_t eight = 0;
#pragma unroll
                for (int m = 0; m < min(tiles, 4); m += 2) {
                    fattni_block c = first;
                    c.w[transposed ? 1 : 0] += (uint32_t)(n + m) * (transposed ? 4 : 2);
                    const fattni_block r = fattni_mask_philox(plane->seed, c);
#pragma unroll
                    for (int k = 0; k < 4; ++k) eight |= keep_mask_of(r.w[k], rule) & 0x00010001u << (2 * m + k);
                }
                bits |= eight << 2 * (n % 8);
            }
            keep[word] = bits;
            if (!transposed) continue;
            const uint32_t other = __shfl_xor_sync(ALL_LANES, odd ? bits : bits >> 16, 4); /* of the other row */
            keep[word] = odd ? __byte_perm(other, bits, 0x7610) : __byte_perm(bits, other, 0x5410);
        }
        return;
    }
#pragma unroll
    for (int word = 0; word < (tiles + 7) / 8; ++word) {
        keep[word] = 0;
#pragma unroll 1
        for (int e = 0; e < 4 * min(8, tiles - 8 * word); ++e) {
            const int n = 8 * word + e / 4;
            keep[word] |=
                (uint32_t)keep_at(a, plane, row_of(transposed, i, n, e % 4), column_of(transposed, j, n, e % 4))
                << keep_bit(transposed, n, e % 4);
        }
    }
}

/* dbias += scale G, G = P (dP - delta), a part of S or S^T. */
DEVICE void add_dbias(const float (*x)[4], int tiles, int transposed, const fattni_view *d_bias, float scale,
                      const sequence *s, int b, int h, int i, int j) {
    float *const plane = (float *)d_bias->p + b * d_bias->b + h * d_bias->h;
#pragma unroll
    for (int n = 0; n < tiles; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            const int row = row_of(transposed, i, n, e), column = column_of(transposed, j, n, e);
            if (row < s->Sq && column < s->Sk && x[n][e] != 0.0f)
                atomicAdd(plane + row * d_bias->row + column * d_bias->column, scale * x[n][e]);
        }
}

/* Backward of the softcap: x (1 - tanh^2). */
DEVICE void softcap_backward(float (*x)[4], const float (*tanhs)[4], int tiles) {
#pragma unroll
    for (int n = 0; n < tiles; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) x[n][e] *= 1.0f - tanhs[n][e] * tanhs[n][e];
}

/* Row epilogue: O = scale * accumulator + keep_old * old O, and the row's logsumexp is L + shift: with far scores
   (is_far) L is relative to a shift, one of the row's scores. */
typedef struct row_result {
    float scale, L, keep_old, shift;
} row_result;

/* The sink as one more term of the row's sum, dropout's scale, and the merge with an earlier partial result. `top` is
   the row's maximum in units of log2, relative to row.shift, `sum` its sum of 2^(s - top). old_lse: NULL outside of the
   sequence. */
DEVICE row_result general_row(const fattni_attention_args *a, row_result row, float top, float sum, int h,
                              const float *old_lse) {
    const float sink = a->sink.p ? float_at(&a->sink, h) : -INFINITY;
    if (sink != -INFINITY) {
        const float above = fmaf(sink - row.shift, LOG2E, -top); /* one rounding, of the difference */
        if (sink == INFINITY || above > FATTNI_FAR_SCORE) {      /* O = 0, and L is the sink */
            row.scale = 0.0f, row.L = 0.0f, row.shift = sink;
        } else {
            const float high = fmaxf(above, 0.0f), weight = exp2f(-high), total = sum * weight + exp2f(above - high);
            row.scale = weight / total;
            row.L = (above > 0 ? sink - row.shift : top * LN2) + logf(total);
        }
    }
    row.scale *= a->keep_scale;
    const float own = (a->flags & FATTN_MERGE) && old_lse ? *old_lse : -INFINITY, old = own - row.shift;
    if (own == -INFINITY || row.shift == INFINITY) return row; /* old O is not read */
    if (is_far(old) && old > 0) {
        row.scale = 0.0f, row.L = 0.0f, row.shift = own, row.keep_old = 1.0f;
        return row;
    }
    const float high = old > row.L ? old : row.L, low = old > row.L ? row.L : old;
    const float L = low == -INFINITY || high == INFINITY ? high : high + log1pf(expf(low - high));
    row.scale *= row.L == L ? 1.0f : expf(row.L - L);
    row.keep_old = old == L ? 1.0f : expf(old - L);
    row.L = L;
    return row;
}

#endif
