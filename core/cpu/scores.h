/* The scores of one tile, with all that numerics allow between q.k and the softmax, and its dropout
   mask: the same for forward and backward. */
#ifndef FATTNI_CORE_CPU_SCORES_H
#define FATTNI_CORE_CPU_SCORES_H

#include "core/cpu/tile.h"
#include "core/attention/problem.h"

/* A tile of query head h of sequence b: rows from i0, keys from j0 on. */
typedef struct fattni_score_tile {
    const fattni_problem *p;
    const fattni_cpu_kernels *k;
    const fattni_sequence *seq;
    int64_t b, h, i0, j0;
    fattni_tile tile;
    const void *key, *value; /* operands of products: the caller's, or a copy */
    int64_t key_stride, value_stride;
} fattni_score_tile;

/* Key and value are the caller's; of a 16-bit dtype, and in pages, they are not set. */
fattni_score_tile fattni_score_tile_of(const fattni_problem *p, const fattni_cpu_kernels *k, const fattni_sequence *seq,
                                       int64_t b, int64_t h, int64_t i0, int64_t rows, int64_t j0, int64_t keys);

/* The type of all arithmetic, and whether q, k and v are of another, 16-bit one. */
static inline fattn_dtype fattni_real(const fattni_problem *p) { return p->dtype == FATTN_F64 ? FATTN_F64 : FATTN_F32; }
static inline bool fattni_is_narrow(const fattni_problem *p) { return fattni_real(p) != p->dtype; }

/* Bytes of the scratch that fattni_scores uses: a tile of bias. */
size_t fattni_scores_scratch(const fattni_problem *p);
/* Is there a softcap, ALiBi or bias, so that raw products go through kernels->adjust? */
bool fattni_adjusts(const fattni_problem *p);
/* What turns fattni_scores' result into natural units, and into those of log2. */
double fattni_score_unit(const fattni_problem *p);
double fattni_log2_factor(const fattni_problem *p);

/* A logit that is no product, a sink or an earlier L, among fattni_scores' results: rounded, finite. `rest` is
   what that took from it in natural units, or 0 where it is more than sums could hold. */
typedef struct fattni_logit {
    double score, rest;
} fattni_logit;
fattni_logit fattni_logit_of(const fattni_problem *p, const fattni_cpu_kernels *k, double logit);

/* s[key][row] from Q^T; derivative, wanted with a softcap in backward, else NULL, takes
   dt / d(q.k). */
void fattni_scores(const fattni_score_tile *at, const void *q, void *scratch, void *s, void *derivative);
/* The part of it that comes after the products q.k. */
void fattni_adjust(const fattni_score_tile *at, void *scratch, void *s, void *derivative);

/* mask[key][row]: 0 where dropped, else `scale`, which is 1 / (1 - p) or that times a power of two. */
void fattni_keep_mask(const fattni_score_tile *at, double scale, void *mask);
/* 1 / (1 - p) may be 32768, and F16 holds 65504 at most: where P times it is rounded to F16, it is times 2^-e, 0.5 to
   1. Returns e; 0 for other products. */
int fattni_keep_exponent(const fattni_problem *p, const fattni_cpu_kernels *k);

#endif
