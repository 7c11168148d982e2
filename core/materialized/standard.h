/* FATTN_ALGO_STANDARD: what the two passes of the textbook share.

   io.saved holds P [B,Hq,Sq,Sk] in q's dtype; with dropout the keep mask follows, [B,Hq,Sq,Sk]
   bytes. Rows and keys past the end of a sequence are not written. 16-bit inputs are copied to
   floats and all is computed in those: only what backward reads of P has been rounded. */
#ifndef FATTNI_CORE_MATERIALIZED_STANDARD_H
#define FATTNI_CORE_MATERIALIZED_STANDARD_H

#include "core/attention/kernel.h"

enum { FATTNI_STANDARD_ROWS = 64 }; /* rows, or keys, per task */

const char *fattni_standard_refuses(const fattn_ctx *ctx, const fattni_problem *p);
bool fattni_standard_fits(const fattni_problem *p); /* are the elements of P countable? */
size_t fattni_standard_saved(const fattni_problem *p); /* bytes of P and the mask */

/* Elements of P before (b, h, i, 0). */
static inline int64_t fattni_standard_at(const fattni_problem *p, int64_t b, int64_t h, int64_t i) {
    return ((b * p->Hq + h) * p->Sq + i) * p->Sk;
}

/* The keep mask, or NULL without dropout. */
uint8_t *fattni_standard_mask(const fattni_problem *p);

/* Can a BLAS take the rows where they lie? Not when they have 16 bits, broadcast, overlap, or run
   backwards. */
bool fattni_standard_direct(const fattni_array *a, int64_t width);

/* How many scratch areas a pass needs at most: one per thread that finds work. */
int64_t fattni_standard_threads(const fattn_ctx *ctx, const fattni_problem *p);

/* Reserves count elements at the end of a layout, aligned; returns their offset in bytes. */
size_t fattni_standard_reserve(size_t *bytes, int64_t count, size_t element);

#endif
