/* Forward on the CPU for sequences with few rows (decoding): their keys in parts, each with an O, maximum and sum of
   its own, which are put together in order. Flash-Decoding (Dao, Haziza, Massa, Sizov 2023). fwd/README.md.

   A sequence is computed so when it has at most `few` rows of its own, and parts begin at multiples of
   FATTNI_PART_KEYS of its own keys. So its bits depend neither on the other sequences nor on threads. */
#ifndef FATTNI_FWD_CPU_FWD_PARTS_H
#define FATTNI_FWD_CPU_FWD_PARTS_H

#include "fwd/cpu/fwd_row_block.h"

enum { FATTNI_PART_KEYS = 8 * FATTNI_TILE_KEYS };

/* At most so many rows are few: beyond, tiles are faster when all threads have heads. 16-bit products take no longer
   for 16 rows than for one. */
int64_t fattni_few_rows(const fattn_ctx *ctx, const fattni_problem *p);

/* Heads of a group that share keys are rows of one tile: `heads` of them, where no feature differs between heads. */
typedef struct fattni_parts {
    const fattni_problem *p;
    const fattni_cpu_kernels *k; /* of reals: 16-bit keys are widened in registers */
    int64_t few;                 /* fattni_few_rows */
    int64_t heads, tiles;        /* of a tile; tiles for all heads that are computed together */
    int64_t q_width, o_width;    /* of rows of Q and O */
    fattni_fwd_layout layout;    /* of a thread's scratch */
    size_t q, o;                 /* in it, too: Q of all heads; O of one */
    size_t max, sum;             /* offsets in the state of a tile's rows, which begins with O */
    size_t state_bytes;          /* of one tile's rows */
    size_t bytes;                /* of a thread's scratch */
} fattni_parts;

/* For `together` neighbouring heads of a group. */
fattni_parts fattni_parts_of(const fattn_ctx *ctx, const fattni_problem *p, int64_t together);

/* Is this sequence computed in parts? */
static inline bool fattni_in_parts(const fattni_parts *f, const fattni_sequence *seq) { return seq->band.Sq <= f->few; }

/* O and L of head h of such a sequence, one part after the other. Scratch has `bytes` + `state_bytes`. */
void fattni_parts_attend(const fattni_parts *f, const fattni_sequence *seq, int64_t b, int64_t h, char *scratch);

#endif
