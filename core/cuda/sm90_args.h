/* What a Hopper kernel is told beside fattni_cuda_args: tensor maps for the TMA unit, and its share of
   the persistent schedule. Filled by sm90.c. */
#ifndef FATTNI_CORE_CUDA_SM90_ARGS_H
#define FATTNI_CORE_CUDA_SM90_ARGS_H

#include "core/cuda/args.h"

#include <cuda.h>

/* How a map's head and batch coordinates follow h and b: 1, or 0 where one plane broadcasts. */
typedef struct fattni_map_step {
    int32_t head, batch;
} fattni_map_step;

/* Sections whose accumulators of dQ exist at once; how many sections later one is finished; rows that
   a piece prepares or finishes, a multiple of every row block. */
enum { FATTNI_RING = 5, FATTNI_LAG = 2 };
/* A backward call of so many key blocks per head, a cluster's as one, or fewer is short. */
enum { FATTNI_SHORT_BLOCKS = 8 };
#define FATTNI_ROWS_AT_ONCE(D) ((D) > 128 ? 256 : (D) > 64 ? 512 : 1024)

/* Shared memory of the forward kernels: Q, twice up to d 128, and O there, half of O beyond where keys leave room;
   two stages of K and V; barriers, tiles, a shift of each row. */
#define FATTNI_FWD_SM90_SHARED(D, BM, BN) \
    (((D) + 63) / 64 * 64 * (((D) <= 128 ? 6 : (BN) <= 64 ? 3 : 2) * (BM) + 8 * (BN)) + 320 + 4 * (BM))
/* Rows of Q that are loaded together: above d 128 each consumer's. */
#define FATTNI_FWD_SM90_Q_ROWS(D, BM) ((D) > 128 ? 64 : (BM))
/* Of the backward kernels. */
#define FATTNI_BWD_SM90_SHARED(D, BM, BN)                                                              \
    ((D) > 128 ? (5 * (BN) + 6 * (BM)) * (D) + 12 * (BM) * (BN) + 3 * (BM) * 4 + 160                         \
               : (2 * (BN) + 4 * (BM)) * (((D) + 63) / 64 * 128) + 2 * (BM) * (BN) * 2 + (BM) * (D) * 4 +    \
                     4 * (BM) * 4 + 240)

/* Backward kernels whose S begins with -L / scale instead of 0 (bwd/cuda/bwd_sm90.cuh says why). */
#define FATTNI_BEGINS_WITH_L(plain, D, BM) ((plain) && (D) <= 128 && (BM) == 64)

typedef struct fattni_sm90_args {
    CUtensorMap q, k, v, d_o; /* {d, row, head, batch}, boxes of 64 columns */
    fattni_cuda_args a;
    int32_t *next_tile; /* 0 at the start: tiles handed out after the first of each CTA */
    int32_t tiles, blocks; /* of the whole call; blocks of one (b, h), a cluster's as one */
    int32_t section; /* so many heads are worked on together: their K and V (Q and dO) stay in L2 */
    fattni_map_step q_step, k_step, v_step, d_o_step;
    /* Backward, plain masks (bwd/cuda/bwd_sm90_scheduler.cuh). next_tile counts its pieces, and progress follows it:
       counters, 0 at the start, when the kernel also does what bwd_preprocess.cu and bwd_postprocess.cu beside it are
       for; else NULL. */
    int32_t *progress;
    int32_t pieces, sections;
    int32_t row_pieces, row_chunks, row_heads; /* of a section; of a head; heads of one */
    /* Forward: whether O has a map, too. Boxes of a warp's 16 rows. */
    int32_t o_by_tma;
    float scale_log2; /* scale times log2 e: an operand that takes no register */
    uint32_t zero;    /* 0 */
    fattni_map_step o_step;
    CUtensorMap o;
} fattni_sm90_args;

/* Cuts a backward call whose next_tile, section and padded_rows are set into its pieces; `cluster` CTAs
   share one. progress needs FATTNI_COUNTERS numbers per section. */
enum { FATTNI_COUNTERS = 3 };
static inline void fattni_cut(fattni_sm90_args *s, int32_t cluster) {
    const fattni_cuda_args *const a = &s->a;
    const int32_t rows = FATTNI_ROWS_AT_ONCE(a->D_padded), heads = s->section * a->group;
    s->progress = s->next_tile + 1;
    s->sections = (a->B * a->Hkv + s->section - 1) / s->section;
    s->row_chunks = (a->padded_rows + rows - 1) / rows;
    s->row_heads = s->row_chunks > 1 ? 1 : rows / a->padded_rows;
    s->row_pieces = s->row_chunks * ((heads + s->row_heads - 1) / s->row_heads);
    s->row_pieces = (s->row_pieces + cluster - 1) / cluster;
    s->pieces = (1 + FATTNI_LAG) * s->row_pieces +
                s->sections * (2 * s->row_pieces + s->section * s->blocks);
}

#endif
