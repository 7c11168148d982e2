/* The rarer features as inline steps on mma accumulators: the GENERAL variants call them, forward and
   backward.

   x[tiles][4] is a thread's part of S (forward) or of S^T (backward). In S, element e of tile n is row
   i + 8 (e/2), column j + 8 n + e%2; in S^T it is row i + 8 n + e%2, column j + 8 (e/2). */
#ifndef FATTNI_SM80_GENERAL_H
#define FATTNI_SM80_GENERAL_H

#include "cuda_dropout.h"
#include "sm80_tile.h"

#include <fattn/attention.h>

DEVICE float bias_at(const fattni_cuda_args *a, int b, int h, int i, int j) {
    const int64_t at = b * a->bias.b + h * a->bias.h + i * a->bias.row + j * a->bias.column;
    return a->bias_f32 ? ((const float *)a->bias.p)[at] : to_float(((const half_type *)a->bias.p)[at]);
}

DEVICE int row_of(int transposed, int i, int n, int e) {
    return transposed ? i + 8 * n + (e & 1) : i + (e >= 2 ? 8 : 0);
}
DEVICE int column_of(int transposed, int j, int n, int e) {
    return transposed ? j + (e >= 2 ? 8 : 0) : j + 8 * n + (e & 1);
}

/* Raw products to scores in natural units: s = cap(scale x) - slope |i' + off - j'| + bias. With
   `tanhs` the value of tanh is kept: backward needs 1 - tanh^2. */
DEVICE void general_scores(float (*x)[4], float (*tanhs)[4], int tiles, int transposed,
                           const fattni_cuda_args *a, const sequence *s, int b, int h, int i, int j) {
    const float slope = a->alibi.p ? float_at(&a->alibi, h) : 0.0f;
    const float inverse = a->softcap > 0 ? 1.0f / a->softcap : 0.0f;
#pragma unroll
    for (int n = 0; n < tiles; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            const int row = row_of(transposed, i, n, e), column = column_of(transposed, j, n, e);
            float y = x[n][e] * a->scale;
            if (a->softcap > 0) {
                const float t = tanhf(y * inverse);
                if (tanhs) tanhs[n][e] = t;
                y = a->softcap * t;
            }
            if (a->alibi.p) y -= slope * fabsf((float)(row - column + s->diagonal));
            if (a->bias.p && row < s->Sq && column < s->Sk) y += bias_at(a, b, h, row, column);
            x[n][e] = y;
        }
}

/* Keep bits of two neighbouring tiles n, n + 1: bit e is element e%4 of tile n + e/4. A block covers
   rows {r, r+8} by columns {c, c+1, c+8, c+9}: all eight elements of S, four of S^T, as long as the
   tile's corner lies at a multiple of 16 in the whole sequence; else each element asks for itself. */
DEVICE uint32_t keep_bits(const fattni_cuda_args *a, const dropout_plane *plane, int transposed, int i,
                          int j, int n) {
    uint32_t keep = 0;
    fattni_block r;
    if (((a->q_pos0 | a->k_pos0) & 15) == 0) {
        const int64_t I = a->q_pos0 + row_of(transposed, i, n, 0);
        const int64_t J = a->k_pos0 + column_of(transposed, j, n, 0);
#pragma unroll
        for (int half = 0; half < (transposed ? 2 : 1); ++half) {
            r = dropout_block(plane, I + half, J);
#pragma unroll
            for (int e = 0; e < 8; ++e) {
                if (transposed && (e & 1) != half) continue;
                /* lane: 4 (j bit 3) + 2 (i bit 3) + (j bit 0) */
                const uint32_t low = fattni_lane16(r, transposed ? (e & 2) * 2 + (e >> 2) * 2 : e);
                const uint32_t high = fattni_lane16(r, transposed ? (e & 2) * 2 + (e >> 2) * 2 + 1 : e);
                keep |= (uint32_t)((transposed && (J & 1) ? high : low) >= a->drop_T) << e;
            }
        }
        return keep;
    }
#pragma unroll 1
    for (int e = 0; e < 8; ++e)
        keep |= (uint32_t)keep_at(a, plane, row_of(transposed, i, n + e / 4, e % 4),
                                  column_of(transposed, j, n + e / 4, e % 4))
                << e;
    return keep;
}

/* G = P (dP - delta) of a part of S^T: dbias += G, then dX = G (1 - tanh^2). */
DEVICE void general_gradients(float (*x)[4], const float (*tanhs)[4], int tiles,
                              const fattni_cuda_args *a, const sequence *s, int b, int h, int i, int j) {
#pragma unroll
    for (int n = 0; n < tiles; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            const int row = row_of(1, i, n, e), column = column_of(1, j, n, e);
            if (a->d_bias.p && row < s->Sq && column < s->Sk && x[n][e] != 0.0f)
                atomicAdd((float *)a->d_bias.p + b * a->d_bias.b + h * a->d_bias.h +
                              row * a->d_bias.row + column * a->d_bias.column,
                          x[n][e]);
            if (a->softcap > 0) x[n][e] *= 1.0f - tanhs[n][e] * tanhs[n][e];
        }
}

/* How a row leaves: O = scale * accumulator + keep_old * old O, and its L. */
typedef struct row_result { float scale, L, keep_old; } row_result;

/* Adds the sink's mass, dropout's scale and the merge with an earlier partial result. `top` is the
   row's maximum in log2 units, `sum` its sum of 2^(s - top). */
DEVICE row_result general_row(const fattni_cuda_args *a, row_result row, float top, float sum, int h,
                              const float *old_lse) {
    if (a->sink.p) {
        const float sink = float_at(&a->sink, h) * 1.4426950408889634f, both = fmaxf(top, sink);
        if (sink == INFINITY) {
            row.scale = 0.0f, row.L = INFINITY;
        } else if (both > -INFINITY) {
            const float weight = exp2f(top - both), total = sum * weight + exp2f(sink - both);
            row.scale = weight / total;
            row.L = both * 0.6931471805599453f + logf(total);
        }
    }
    row.scale *= a->keep_scale;
    if (!(a->flags & FATTN_MERGE) || !old_lse) return row;
    const float old = *old_lse;
    if (old == -INFINITY) return row; /* whose O is not read */
    const float high = old > row.L ? old : row.L, low = old > row.L ? row.L : old;
    const float L = low == -INFINITY || high == INFINITY ? high : high + log1pf(expf(low - high));
    row.scale *= row.L == L ? 1.0f : expf(row.L - L);
    row.keep_old = old == L ? 1.0f : expf(old - L);
    row.L = L;
    return row;
}

#endif
