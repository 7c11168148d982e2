/* Few rows over many keys (Flash-Decoding, Dao et al. 2023): keys are split into parts, a CTA each, and the parts are
   added up by the CTAs that finish last (fwd_parts.cuh).

   The parts of a sequence follow from its own rows, keys and mask and from the number of heads: its results do not
   depend on the other sequences of a batch. Plain C and C++: device code includes it, too. */
#ifndef FATTNI_FWD_CUDA_FWD_PARTS_H
#define FATTNI_FWD_CUDA_FWD_PARTS_H

#include "core/cuda/args.h"
#include "core/cuda/divider.h"

#ifdef __CUDACC__
#define FATTNI_FWD_PARTS static __host__ __device__ __forceinline__
#else
#define FATTNI_FWD_PARTS static inline
#endif

enum {
    FATTNI_FEW_ROWS = 16,   /* most rows of a head */
    FATTNI_PARTS_ADDED = 8, /* results that are added up by one CTA */
    /* Stages of K and V: of grids that fill the GPU, and on Hopper, where memory's latency would show otherwise, of
       those with a CTA for each SM, and for every second one. Bits do not depend on them. */
    FATTNI_FEW_STAGES = 2,
    FATTNI_FEW_STAGES_OF_ONE = 3,
    FATTNI_FEW_STAGES_OF_HALF = 6
};

/* Of a sequence that has `tiles` tiles of rows: the most parts of one tile's keys; and the least keys of a part, which
   are 256 KiB of K and V. D: of the kernel. */
FATTNI_FWD_PARTS int fattni_cuda_most_parts(int tiles, int D) {
    const int all = D > 128 ? 256 : 128;
    return tiles < all ? all / tiles : 1;
}
FATTNI_FWD_PARTS int fattni_cuda_least_part(int D) { return 65536 / D; }

/* Keys of a part, a multiple of 64, where each of `tiles` tiles sees so many keys; and the number of such parts. */
FATTNI_FWD_PARTS int fattni_cuda_keys_of_part(int keys, int tiles, int D) {
    const int most = fattni_cuda_most_parts(tiles, D), least = fattni_cuda_least_part(D);
    const int part = (keys / most + (keys % most != 0) + 63) / 64 * 64;
    return part > least ? part : least;
}
FATTNI_FWD_PARTS int fattni_cuda_parts_of(int keys, int part) { return keys > part ? (keys + part - 1) / part : 1; }
/* Counters that adding up so many parts takes: one per CTA that adds. */
FATTNI_FWD_PARTS int fattni_cuda_parts_counters(int parts) {
    int counters = 0;
    while (parts > 1) {
        parts = (parts + FATTNI_PARTS_ADDED - 1) / FATTNI_PARTS_ADDED;
        counters += parts;
    }
    return counters;
}

/* A tile of rows has rows of `tile_heads` neighbouring heads with the same K and V: row r is row r / tile_heads of head
   r % tile_heads of these. */
typedef struct fattni_fwd_parts_args {
    fattni_attention_args a;
    fattni_view
        page_table; /* I32, a row per sequence; NULL: no pages. With pages a.k.b and a.v.b are from page to page */
    int32_t pages;  /* that k and v have */
    int32_t page_log2, page_mask; /* of the keys of a page; mask: - 1, all ones: no pages */
    fattni_divider tile_heads;    /* the group, or 1 where features have values per head */
    fattni_divider heads;         /* Hq / tile_heads */
    fattni_divider tiles, parts; /* bounds: tiles of rows per tile_heads heads, parts per tile, a multiple of cluster */
    int32_t cluster;     /* CTAs that add up their results in shared memory, 1 to FATTNI_PARTS_ADDED; 8 if parts > 8 */
    int32_t rows, width; /* of a part's result: rows of a tile, Dv rounded up to 8 */
    int32_t stages;      /* FATTNI_FEW_STAGES... */
    int32_t counters;    /* of a tile: fattni_cuda_parts_counters(parts) */
    float unified_max;   /* FEW_UNIFIED: in place of maxima of q.k */
    int32_t *arrived;    /* [B, heads, tiles, counters], 0 before the launch */
    float *results;      /* [B, heads, tiles, parts, rows (width + 2)]: O, maxima, sums */
} fattni_fwd_parts_args;

#endif
