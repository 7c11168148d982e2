/* FATTN_ALGO_STANDARD, attention that stores S and P [B,Hq,Sq,Sk]: what forward and backward share.

   io.saved holds P [B,Hq,Sq,Sk] in q's dtype; with dropout the keep mask follows, [B,Hq,Sq,Sk]
   bytes; then L [B,Hq,Sq] as forward left it, to which P is relative: backward of a part of the keys
   (FATTN_MERGE) has the L of all. Rows and keys past the end of a sequence are not written. 16-bit inputs are copied to
   floats and all is computed in those: only what backward reads of P has been rounded. */
#ifndef FATTNI_CORE_MATERIALIZED_STANDARD_H
#define FATTNI_CORE_MATERIALIZED_STANDARD_H

#include "core/attention/kernel.h"
#include "core/cpu/tile.h"

/* NULL, or why: P has too many elements to be counted. */
const char *fattni_standard_why_unsupported(const fattni_problem *p);
/* fattni_kernel.plan, but for the workspace's bytes, which the caller knows. */
void fattni_standard_plan(const fattni_problem *p, const char *family, size_t workspace, fattni_kernel_plan *out);

/* Elements of P before (b, h, i, 0). */
static inline int64_t fattni_standard_at(const fattni_problem *p, int64_t b, int64_t h, int64_t i) {
    return ((b * p->Hq + h) * p->Sq + i) * p->Sk;
}

/* The keep mask, or NULL without dropout. */
uint8_t *fattni_standard_mask(const fattni_problem *p);
/* L [B,Hq,Sq], reals. */
void *fattni_standard_L(const fattni_problem *p);

/* Appends count elements to a workspace of *bytes; returns their offset. */
static inline size_t fattni_standard_reserve(size_t *bytes, int64_t count, size_t element) {
    return fattni_append(bytes, (size_t)count * element);
}

/* ---- on the CPU ---- */

enum { FATTNI_STANDARD_ROWS = 64 }; /* rows, or keys, per task */

/* How many scratch areas a pass needs at most: one per thread that finds work. */
int64_t fattni_standard_threads(const fattn_ctx *ctx, const fattni_problem *p);

/* Rows of reals as a BLAS takes them, `ld` apart. */
typedef struct fattni_matrix {
    const void *p;
    int64_t ld;
} fattni_matrix;

/* Can a BLAS take the rows where they lie? Not when they have 16 bits, broadcast, overlap, or run
   backwards. */
bool fattni_standard_direct(const fattni_array *a, int64_t width);
/* Rows [row, row + count) of head h of batch b: where they lie when that is possible, else
   copied to copy[count, width]. */
fattni_matrix fattni_standard_rows(const fattni_cpu_kernels *k, const fattni_array *a, int64_t b, int64_t h,
                                   int64_t row, int64_t count, int64_t width, void *copy);

/* Products of one block, as tasks need them; all operands are reals of k's dtype. */
/* c[M, N] = alpha a b^T, K columns each; `ldc` apart. */
void fattni_standard_a_bt(const fattn_ctx *ctx, fattn_dtype dtype, int64_t M, int64_t N, int64_t K, double alpha,
                          fattni_matrix a, fattni_matrix b, void *c, int64_t ldc);
/* c[M, N] = alpha a[M, K] b[K, N] */
void fattni_standard_a_b(const fattn_ctx *ctx, fattn_dtype dtype, int64_t M, int64_t N, int64_t K, double alpha,
                         fattni_matrix a, fattni_matrix b, void *c);
/* c[M, N] += alpha a[K, M]^T b[K, N] */
void fattni_standard_add_at_b(const fattn_ctx *ctx, fattn_dtype dtype, int64_t M, int64_t N, int64_t K, double alpha,
                              fattni_matrix a, fattni_matrix b, void *c);

/* out[rows, keys] = P where kept, else 0. P is of that dtype; its rows and the mask's are `ld`
   elements apart; keep NULL: all. */
void fattni_standard_drop(const fattni_cpu_kernels *k, fattn_dtype dtype, const void *P, const uint8_t *keep,
                          int64_t ld, int64_t rows, int64_t keys, void *out);

#endif
