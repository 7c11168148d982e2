/* Which keys a row may attend to ("sees"): integer predicates shared by all kernels, host and device.

   Causal masks and windows, with positions and either alignment, are all one band: row i sees the keys
   j with i + lo <= j <= i + hi, inside [0, Sk). */
#ifndef FATTNI_CORE_ATTENTION_MASK_BAND_H
#define FATTNI_CORE_ATTENTION_MASK_BAND_H

#include "core/tensor/numeric.h"

/* Far from every position, and safe to add positions to. */
#define FATTNI_UNBOUNDED ((int64_t)1 << 60)

typedef struct fattni_band {
    int64_t Sq, Sk; /* rows and keys of this sequence */
    int64_t lo, hi; /* the diagonals; -+FATTNI_UNBOUNDED when there is none */
} fattni_band;

typedef struct fattni_range {
    int64_t begin, end;
} fattni_range; /* end <= begin: empty */

FATTNI_INLINE int64_t fattni_clamp(int64_t x, int64_t low, int64_t high) { return x < low ? low : x > high ? high : x; }

FATTNI_INLINE int fattni_visible(const fattni_band *m, int64_t i, int64_t j) {
    return j >= i + m->lo && j <= i + m->hi && j < m->Sk;
}

/* Keys that some row of [i0, i1) sees; i1 > i0. */
FATTNI_INLINE fattni_range fattni_keys_of(const fattni_band *m, int64_t i0, int64_t i1) {
    fattni_range r;
    r.begin = fattni_clamp(i0 + m->lo, 0, m->Sk);
    r.end = fattni_clamp(i1 + m->hi, 0, m->Sk);
    return r;
}

/* Rows that see some key of [j0, j1); j1 > j0. */
FATTNI_INLINE fattni_range fattni_band_rows(const fattni_band *m, int64_t j0, int64_t j1) {
    fattni_range r;
    r.begin = fattni_clamp(j0 - m->hi, 0, m->Sq);
    r.end = fattni_clamp(j1 - m->lo, 0, m->Sq);
    return r;
}

/* Every row of [i0, i1) sees every key of [j0, j1): no element test needed. */
FATTNI_INLINE int fattni_all_visible(const fattni_band *m, int64_t i0, int64_t i1, int64_t j0, int64_t j1) {
    return j0 >= i1 - 1 + m->lo && j1 - 1 <= i0 + m->hi && j1 <= m->Sk;
}

#endif
