/* Few rows over many keys on Hopper (fwd_decode.cuh): how keys are split into parts.

   The parts of a sequence follow from its own rows, keys and mask and from the number of heads; how many of them a CTA
   computes, one after the other, does not show in the bits. Plain C and C++: device code includes it, too. */
#ifndef FATTNI_FWD_CUDA_FWD_DECODE_H
#define FATTNI_FWD_CUDA_FWD_DECODE_H

#include "core/cuda/sm90_args.h"
#include "fwd/cuda/fwd_parts.h"

enum {
    FATTNI_DECODE_LEAST = 128,    /* keys of a part: 16 of each stream */
    FATTNI_DECODE_FEWEST = 4,     /* rows: of more, parts have twice as many */
    FATTNI_DECODE_FEW_KEYS = 512, /* or of a sequence with more */
    FATTNI_DECODE_MANY_HEADS = 5, /* groups of heads: fewer have more parts, in several clusters */
    FATTNI_DECODE_LONG = 8192,    /* keys of a sequence that has MOST parts, at least, and times head_dim: */
    FATTNI_DECODE_LONG_SIZE = 1 << 20,
    FATTNI_DECODE_FEW = 64,            /* keys of a call: four streams have these */
    FATTNI_DECODE_LEAST_OF_MANY = 512, /* where there are more parts than a cluster's */
    FATTNI_DECODE_SLOTS = 8,           /* most CTAs of a cluster, and parts that it adds up where there are several */
    FATTNI_DECODE_MOST = 16,           /* parts of a long sequence, where there is one cluster, or none */
    FATTNI_DECODE_MOST_SIZE = 1024,    /* rows x head_dim of results, of which shared memory holds so many */
    FATTNI_DECODE_GROUPS = 16,         /* most results that are added up through memory: of clusters, or of parts */
    FATTNI_DECODE_KEPT = 32 /* rows of a CTA's parts whose results of warps are kept, to be added up together */
};
/* Bytes of shared memory: fragments of Q, statistics, an mbarrier, and `results` rows of O. */
#define FATTNI_DECODE_SHARED(D, BM, results)                                                                           \
    (2 * (BM) * (D) + 64 * FATTNI_DECODE_KEPT + 8 * FATTNI_DECODE_MOST * (BM) + 16 + 4 * (results) * (D))
/* Whether it has room for the results of so many parts. */
FATTNI_FWD_PARTS int fattni_decode_keeps(int D, int BM, int each, int rows) {
    return each > 1 && each <= FATTNI_DECODE_SLOTS && each * rows <= FATTNI_DECODE_KEPT &&
           (each + 1) * rows <= 2 * BM && D <= 128;
}

typedef struct fattni_fwd_decode_args {
    fattni_fwd_parts_args x;
    uint32_t k_row, v_row; /* bytes from key to key */
    int32_t kept;          /* results of warps are added up when all parts of the CTA are computed */
    int32_t ctas;     /* of a tile: a cluster, or several, or each for itself; the last two's results meet in memory */
    int32_t each;     /* parts of a CTA; 1 with several clusters */
    int32_t slots;    /* results of parts that a cluster's first CTA has room for */
    int32_t streams;  /* that have keys: 8 or, of few keys, 4 */
    int32_t warps;    /* of a CTA */
    int32_t prefetch; /* the first keys' addresses do not depend on the stream's previous kernel */
    int32_t adds;     /* the launch that adds up results in memory: x.parts is CTAs of a tile's rows */
} fattni_fwd_decode_args;

/* Whether the keys of a sequence, which has rows for `heads` groups of heads that share tiles, are split into up to
   MOST parts. */
FATTNI_FWD_PARTS int fattni_decode_is_long(int keys, int heads, int rows, int BM, int D) {
    return heads >= FATTNI_DECODE_MANY_HEADS && keys >= FATTNI_DECODE_LONG && keys >= FATTNI_DECODE_LONG_SIZE / D &&
           (rows < BM ? rows : BM) * D <= FATTNI_DECODE_MOST_SIZE;
}
/* log2 of the most parts of a tile's keys in others of `tiles` tiles. More than SLOTS only where these are many. */
FATTNI_FWD_PARTS int fattni_decode_log2_parts(int keys, int tiles) {
    int log2 = tiles > 4 ? 3 : tiles > 2 ? 5 : tiles > 1 ? 6 : 7;
    while (log2 > 3 && keys < FATTNI_DECODE_LEAST_OF_MANY << log2) --log2;
    return log2;
}
/* The least keys of a part: two tiles of each warp's, but one where there are so few keys that their latency counts. */
FATTNI_FWD_PARTS int fattni_decode_least_part(int keys, int rows) {
    return rows > FATTNI_DECODE_FEWEST || keys > FATTNI_DECODE_FEW_KEYS ? 2 * FATTNI_DECODE_LEAST : FATTNI_DECODE_LEAST;
}
/* Keys of a part, a multiple of 16; rows: of the sequence, of heads that share tiles. */
FATTNI_FWD_PARTS int fattni_decode_keys_of_part(int keys, int heads, int rows, int BM, int D) {
    const int log2 = fattni_decode_log2_parts(keys, heads * ((rows + BM - 1) / BM));
    int part = (keys + (1 << log2) - 1) >> log2;
    if (fattni_decode_is_long(keys, heads, rows, BM, D)) part = (keys + FATTNI_DECODE_MOST - 1) / FATTNI_DECODE_MOST;
    part = (part + 15) & ~15;
    const int least = fattni_decode_least_part(keys, rows);
    return part > least ? part : least;
}
/* The most parts of a tile that sees at most so many keys, of a sequence with at least so many rows. */
FATTNI_FWD_PARTS int fattni_decode_most_parts(int keys, int heads, int rows, int BM, int D) {
    const int log2 = fattni_decode_log2_parts(keys, heads * ((rows + BM - 1) / BM));
    if (log2 > 3) return 1 << log2;
    if (fattni_decode_is_long(keys, heads, rows, BM, D)) return FATTNI_DECODE_MOST;
    const int few = keys < FATTNI_DECODE_FEW_KEYS ? keys : FATTNI_DECODE_FEW_KEYS;
    const int of_few = fattni_cuda_parts_of(few, fattni_decode_least_part(few, rows)),
              of_all = fattni_cuda_parts_of(keys, fattni_decode_least_part(keys, rows));
    const int parts = of_few > of_all ? of_few : of_all;
    return parts < FATTNI_DECODE_SLOTS ? parts : FATTNI_DECODE_SLOTS;
}

/* More rows (fwd_decode_rows.cuh): parts of a sequence's keys, so many that with one sequence about all SMs have some,
   each with keys enough that to store its results costs little. */
enum {
    FATTNI_ROWS_LEAST = 512,  /* keys of a part, at least; parts are multiples of BLOCK */
    FATTNI_ROWS_BLOCK = 128,  /* one of the kernels' blocks, or two */
    FATTNI_ROWS_CLUSTER = 3,  /* CTAs that add up results themselves, at most: of more a second launch does */
    FATTNI_ROWS_ADDING = 128, /* threads of a CTA of the launch that adds up results in memory */
    FATTNI_ROWS_PARTS = 128   /* of all groups of heads of a sequence together, and of 8 and more groups' each 16 */
};

/* How a tile's parts are added up: each half of them one after the other, then both halves, so that two CTAs that have
   a tile have one sum each. What of that items of `each` parts do: the parts that are added up as they are computed are
   [0, first) and [half, second); each of these sums is a result, each other part is one. */
typedef struct fattni_rows_order {
    int32_t half, first, second;
    int32_t results; /* in memory; of items that have a whole tile there are none */
} fattni_rows_order;
FATTNI_FWD_PARTS fattni_rows_order fattni_rows_order_of(int parts, int each) {
    fattni_rows_order x = {(parts + 1) / 2, each, 0, 0};
    if (x.first > x.half) x.first = x.half;
    x.second = (x.half / each + 1) * each;
    if (x.second > parts) x.second = parts;
    x.results = x.half - x.first + 1 + (x.half < parts ? parts - x.second + 1 : 0);
    return x;
}
/* Whether a part is added to the sum of those before it. */
FATTNI_FWD_PARTS int fattni_rows_joins(const fattni_rows_order *x, int part) {
    return part < x->half ? part > 0 && part < x->first : part > x->half && part < x->second;
}
/* Which result a part is, or is added to. */
FATTNI_FWD_PARTS int fattni_rows_result(const fattni_rows_order *x, int part) {
    const int of_first = x->half - x->first + 1; /* results of the first half */
    if (part < x->half) return part < x->first ? 0 : part - x->first + 1;
    return of_first + (part < x->second ? 0 : part - x->second + 1);
}

/* Of tiles with at most so many parts; a multiple of 4, since statistics are read in vectors. */
FATTNI_FWD_PARTS int fattni_rows_most_results(int most_parts, int each) {
    int results = 0;
    for (int parts = each + 1; parts <= most_parts; ++parts) {
        const fattni_rows_order x = fattni_rows_order_of(parts, each);
        if (x.results > results) results = x.results;
    }
    return (results + 3) & ~3;
}

/* Bytes of shared memory in which a CTA adds up so many rows' results in memory, `results` of each. */
#define FATTNI_ROWS_SHARED(rows, results, D) (16 + (rows) * (16 + (results) * (8 + 4 * (D))))

typedef struct fattni_fwd_rows_args {
    CUtensorMap k, v; /* {d, key, head, batch or page}, boxes of 64 columns and BN keys, or a page of fewer */
    fattni_map_step k_step, v_step;
    fattni_fwd_parts_args x;
    int32_t items;   /* of the call: tiles x parts.by */
    int32_t each;    /* parts of an item */
    int32_t most;    /* parts of a tile, at most */
    int32_t groups;  /* results of a tile in memory, at most */
    int32_t at_once; /* rows whose results a CTA adds up at a time */
    int32_t ragged;  /* what lies beyond a sequence's last key need not be a number */
    int32_t adds;    /* the launch that adds up results in memory: x.parts is CTAs of a tile's rows */
} fattni_fwd_rows_args;

/* The most parts of a tile's keys, of a sequence with so many groups of heads that share K and V. */
FATTNI_FWD_PARTS int fattni_rows_most_parts(int heads) {
    return heads >= 8 ? FATTNI_ROWS_PARTS / 8 : heads >= 4 ? FATTNI_ROWS_PARTS / 4 : FATTNI_ROWS_PARTS / heads;
}
FATTNI_FWD_PARTS int fattni_rows_keys_of_part(int keys, int most) {
    const int part = (keys / most + (keys % most != 0) + FATTNI_ROWS_BLOCK - 1) / FATTNI_ROWS_BLOCK * FATTNI_ROWS_BLOCK;
    return part > FATTNI_ROWS_LEAST ? part : FATTNI_ROWS_LEAST;
}

#endif
