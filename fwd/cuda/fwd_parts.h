/* Few rows over many keys (Flash-Decoding, Dao et al. 2023): keys are split into parts, a CTA each, and the parts are
   added up by the CTAs that finish last (fwd_parts.cuh).

   The parts of a sequence follow from its own rows, keys and mask and from the number of heads: its results do not
   depend on the other sequences of a batch. Plain C and C++: device code includes it, too. */
#ifndef FATTNI_FWD_CUDA_FWD_PARTS_H
#define FATTNI_FWD_CUDA_FWD_PARTS_H

#include "core/cuda/args.h"

#ifdef __CUDACC__
#define FATTNI_FWD_PARTS static __host__ __device__ __forceinline__
#else
#define FATTNI_FWD_PARTS static inline
#endif

enum {
    FATTNI_FEW_ROWS = 16,  /* most rows of a head */
    FATTNI_PARTS_ADDED = 8 /* results that are added up by one CTA */
};

/* Keys of a part, a multiple of 64, where `tiles` tiles of rows of a sequence see so many keys each. D: of the
   kernel. */
FATTNI_FWD_PARTS int fattni_cuda_keys_of_part(int keys, int tiles, int D) {
    const int all = D > 128 ? 256 : 128, least = 65536 / D; /* parts of a sequence; 256 KiB of K and V */
    const int most = tiles < all ? all / tiles : 1;
    const int part = (keys / most + (keys % most != 0) + 63) / 64 * 64;
    return part > least ? part : least;
}
FATTNI_FWD_PARTS int fattni_cuda_parts_of(int keys, int tiles, int D) {
    const int part = fattni_cuda_keys_of_part(keys, tiles, D);
    return keys > part ? (keys + part - 1) / part : 1;
}
/* At most, of this many keys and fewer. */
FATTNI_FWD_PARTS int fattni_cuda_most_parts_of(int keys, int tiles, int D) {
    const int all = D > 128 ? 256 : 128, least = 65536 / D;
    const int most = tiles < all ? all / tiles : 1, full = keys / least + (keys % least != 0);
    return full < 1 ? 1 : full < most ? full : most;
}
/* Counters that adding up so many parts takes: one per CTA that adds. */
FATTNI_FWD_PARTS int fattni_cuda_parts_counters(int parts) {
    int counters = 0;
    while (parts > 1) {
        parts = (parts + FATTNI_PARTS_ADDED - 1) / FATTNI_PARTS_ADDED;
        counters += parts;
    }
    return counters;
}

/* A tile of rows has rows of `packed` neighbouring heads with the same K and V: row r is row r / packed of head
   r % packed of these. */
typedef struct fattni_fwd_parts_args {
    fattni_attention_args a;
    int32_t packed;       /* the group, or 1 where features have values per head */
    int32_t tiles, parts; /* bounds: tiles of rows per `packed` heads, parts per tile */
    int32_t rows, width;  /* of a part's result: rows of a tile, Dv rounded up to 8 */
    int32_t *arrived;     /* [B, Hq / packed, tiles, fattni_cuda_parts_counters(parts)], 0 before the launch */
    float *results;       /* [B, Hq / packed, tiles, parts, rows (width + 2)]: O, maxima, sums */
} fattni_fwd_parts_args;

#endif
