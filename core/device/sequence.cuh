/* One sequence of the batch: its lengths, which are read on the device, and its mask. */
#ifndef FATTNI_CORE_DEVICE_SEQUENCE_H
#define FATTNI_CORE_DEVICE_SEQUENCE_H

#include "core/cuda/args.h"
#include "core/device/helpers.cuh"

typedef struct sequence {
    int Sq, Sk, q0, k0, batch; /* rows, keys, its first row and key in the buffers, its batch index there */
    int diagonal;              /* i' + off - j' = i - j + diagonal */
    int lo, hi;                /* the band: row i sees keys i + lo .. i + hi */
} sequence;

DEVICE int integer_at(const fattni_line *line, int n) { return ((const int32_t *)line->p)[n * line->step]; }
DEVICE float float_at(const fattni_line *line, int n) { return ((const float *)line->p)[n * line->step]; }

/* `diagonal` of a sequence of Sq rows and Sk keys. */
DEVICE int diagonal_of(const fattni_attention_args *a, int Sq, int Sk) {
    return a->shift + (a->top_left ? 0 : Sk - Sq);
}

/* diagonal, lo and hi from the lengths. */
DEVICE void find_band(const fattni_attention_args *a, sequence *s) {
    s->diagonal = diagonal_of(a, s->Sq, s->Sk);
    s->lo = a->left == FATTNI_FAR ? -FATTNI_FAR : s->diagonal - a->left;
    s->hi = a->right == FATTNI_FAR ? FATTNI_FAR : s->diagonal + a->right;
}

DEVICE sequence sequence_of(const fattni_attention_args *a, int b) {
    sequence s;
    s.Sq = a->Sq, s.Sk = a->Sk, s.q0 = 0, s.k0 = 0, s.batch = b;
    if (a->cu_seqlens_q.p) {
        const int q0 = max(0, min(integer_at(&a->cu_seqlens_q, b), a->rows_q));
        const int k0 = max(0, min(integer_at(&a->cu_seqlens_k, b), a->rows_k));
        s.Sq = max(0, min(min(integer_at(&a->cu_seqlens_q, b + 1), a->rows_q) - q0, a->Sq));
        s.Sk = max(0, min(min(integer_at(&a->cu_seqlens_k, b + 1), a->rows_k) - k0, a->Sk));
        s.q0 = q0, s.k0 = k0, s.batch = 0;
    }
    if (a->seqlens_q.p) s.Sq = max(0, min(integer_at(&a->seqlens_q, b), a->Sq));
    if (a->seqlens_k.p) s.Sk = max(0, min(integer_at(&a->seqlens_k, b), a->Sk));
    find_band(a, &s);
    return s;
}

/* In full and causal variants, where all sequences have Sq rows and Sk keys. */
DEVICE sequence whole_sequence(const fattni_attention_args *a, int b, int causal) {
    const int diagonal = causal ? diagonal_of(a, a->Sq, a->Sk) : FATTNI_FAR;
    const sequence s = {a->Sq, a->Sk, 0, 0, b, diagonal, -FATTNI_FAR, diagonal};
    return s;
}

#endif
