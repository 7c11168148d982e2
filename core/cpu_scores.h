/* The scores of one tile, with all that numerics allow between q.k and the softmax, and its dropout
   mask: the same for forward and backward. */
#ifndef FATTNI_CPU_SCORES_H
#define FATTNI_CPU_SCORES_H

#include "cpu_tile.h"
#include "problem.h"

/* A tile of query head h of sequence b: rows from i0, keys from j0 on. */
typedef struct fattni_place {
    const fattni_problem *p;
    const fattni_cpu_kernels *k;
    const fattni_sequence *seq;
    int64_t b, h, i0, j0;
    fattni_tile tile;
} fattni_place;

fattni_place fattni_place_of(const fattni_problem *p, const fattni_cpu_kernels *k,
                             const fattni_sequence *seq, int64_t b, int64_t h, int64_t i0,
                             int64_t rows, int64_t j0, int64_t keys);

/* Is there a softcap, ALiBi or bias, so that raw products go through kernels->adjust? */
bool fattni_adjusts(const fattni_problem *p);
/* What turns fattni_scores' result into units of log2. */
double fattni_log2_factor(const fattni_problem *p);

/* s[key][row] from Q^T; scratch, a tile, is used when there is a bias. derivative, wanted with a softcap
   in backward, else NULL, takes dt / d(q.k). */
void fattni_scores(const fattni_place *at, const void *q, void *scratch, void *s, void *derivative);

/* mask[key][row]: 0 where dropped, else 1 / (1 - p). */
void fattni_keep_mask(const fattni_place *at, void *mask);

#endif
