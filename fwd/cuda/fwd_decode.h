/* Few rows over many keys on Hopper (fwd_decode.cuh): how keys are split into parts.

   The parts of a sequence follow from its own rows, keys and mask and from the number of heads; how many of them a CTA
   computes, one after the other, does not show in the bits. Plain C and C++: device code includes it, too. */
#ifndef FATTNI_FWD_CUDA_FWD_DECODE_H
#define FATTNI_FWD_CUDA_FWD_DECODE_H

#include "fwd/cuda/fwd_parts.h"

enum {
    FATTNI_DECODE_LEAST = 128,         /* keys of a part: 16 for each warp; twice as many of more than 8 rows */
    FATTNI_DECODE_LEAST_OF_MANY = 512, /* where there are more parts than a cluster's */
    FATTNI_DECODE_SLOTS = 8,           /* parts that a cluster adds up */
    FATTNI_DECODE_GROUPS = 16,         /* most results of clusters that are added up through memory */
    FATTNI_DECODE_KEPT = 32 /* rows of a CTA's parts whose results of warps are kept, to be added up together */
};
/* Bytes of shared memory: fragments of Q, statistics, an mbarrier, and O of 8 warps for `kept` rows and of 8 parts for
   `rows`. */
#define FATTNI_DECODE_SHARED(D, BM, kept, rows)                                                                        \
    (2 * (BM) * (D) + 64 * FATTNI_DECODE_KEPT + 64 * (BM) + 16 + 32 * ((kept) + (rows)) * (D))
/* Whether it has room for the results of so many parts. */
FATTNI_FWD_PARTS int fattni_decode_keeps(int D, int BM, int each, int rows) {
    return each > 1 && each * rows <= FATTNI_DECODE_KEPT && (each + 1) * rows <= 2 * BM && D <= 128;
}

typedef struct fattni_fwd_decode_args {
    fattni_fwd_parts_args x;
    uint32_t k_row, v_row; /* bytes from key to key */
    int32_t kept;          /* results of warps are added up when all parts of the CTA are computed */
    int32_t each;          /* parts of a CTA: cluster x each = FATTNI_DECODE_SLOTS or fewer; 1 with several clusters */
} fattni_fwd_decode_args;

/* log2 of the most parts of a tile's keys, where a sequence has `tiles` tiles of rows. More than a cluster's only in
   long sequences. */
FATTNI_FWD_PARTS int fattni_decode_log2_parts(int keys, int tiles) {
    int log2 = tiles > 4 ? 3 : tiles > 2 ? 5 : tiles > 1 ? 6 : 7;
    while (log2 > 3 && keys < FATTNI_DECODE_LEAST_OF_MANY << log2) --log2;
    return log2;
}
/* Keys of a part, a multiple of 16; rows: of the sequence, of heads that share tiles. */
FATTNI_FWD_PARTS int fattni_decode_keys_of_part(int keys, int tiles, int rows) {
    const int log2 = fattni_decode_log2_parts(keys, tiles);
    const int part = (((keys + (1 << log2) - 1) >> log2) + 15) & ~15;
    const int least = rows > 8 ? 2 * FATTNI_DECODE_LEAST : FATTNI_DECODE_LEAST;
    return part > least ? part : least;
}

#endif
