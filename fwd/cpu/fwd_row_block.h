/* Forward on the CPU, one block of rows: what FlashAttention-2 (fwd_cpu.c) and FlashAttention-1
   (fwd_flash1.c), two orders of the same tiles, have in common. */
#ifndef FATTNI_FWD_CPU_FWD_ROW_BLOCK_H
#define FATTNI_FWD_CPU_FWD_ROW_BLOCK_H

#include "core/cpu/scores.h"

/* Rows of K and V of some keys of a tile; strides in elements. */
typedef struct fattni_fwd_keys {
    const void *key, *value;
    int64_t key_stride, value_stride;
} fattni_fwd_keys;

/* Scratch for a tile of them. */
typedef struct fattni_fwd_room {
    void *key, *value; /* operands of 16-bit inputs and 8-bit copies */
    void *gathered;    /* rows from several pages, as they are */
} fattni_fwd_room;

/* Of a tile of K and V that is copied, 16-bit inputs and 8-bit copies; else 0. */
size_t fattni_fwd_key_bytes(const fattni_problem *p, const fattni_cpu_kernels *k);
size_t fattni_fwd_value_bytes(const fattni_problem *p, const fattni_cpu_kernels *k);
/* These keys, of one tile, and their values: where the caller has them, or in `gathered` when that is in several
   pages. */
fattni_fwd_keys fattni_fwd_find_keys(const fattni_problem *p, const fattni_sequence *seq, int64_t g, fattni_range keys,
                                     void *gathered);
/* The same as operands: 16-bit inputs and 8-bit copies are copied into the room. */
fattni_fwd_keys fattni_fwd_load_keys(const fattni_problem *p, const fattni_cpu_kernels *k, const fattni_sequence *seq,
                                     int64_t g, fattni_range keys, const fattni_fwd_room *room);
/* Operands that were copied there before. */
fattni_fwd_keys fattni_fwd_loaded_keys(const fattni_problem *p, const fattni_cpu_kernels *k,
                                       const fattni_fwd_room *room);

/* Offsets in bytes from a thread's scratch. [..][row] arrays hold one block of rows. */
typedef struct fattni_fwd_layout {
    size_t s, decay;       /* S^T [keys]; the factor of the sums so far (tile.h, softmax) */
    size_t extra;          /* for a bias, then for a dropout mask */
    size_t key, value;     /* 16-bit inputs, 8-bit copies: fattni_fwd_room of a tile */
    size_t gathered;       /* pages shorter than a tile: its rows of K, then of V */
    size_t o_rows;         /* for an o of 16 bits, and of 8-bit copies: O, [row][Dv] floats */
    size_t rounded;        /* P^T as an operand, where products take 16 bits */
    size_t q, o, max, sum; /* Q^T [D], O^T [Dv], the online softmax in units of S: of block 0, */
    size_t block;          /* of the next one that many bytes further */
    size_t bytes;
} fattni_fwd_layout;

/* For so many blocks of rows that a task takes through the keys together. */
fattni_fwd_layout fattni_fwd_lay_out(const fattni_problem *p, const fattni_cpu_kernels *k, int64_t blocks);

/* Rows [i0, i0 + rows) of query head h of sequence b, and where their state lies. */
typedef struct fattni_fwd_rows {
    const fattni_problem *p;
    const fattni_cpu_kernels *k;
    const fattni_sequence *seq;
    int64_t b, h, i0, rows;
    fattni_fwd_room room;
    void *q, *s, *o, *max, *sum, *decay, *extra, *o_rows, *rounded;
} fattni_fwd_rows;

/* The block that begins at row i0, its state in scratch as block n; rows <= 0 past the sequence's
   end. */
fattni_fwd_rows fattni_fwd_rows_of(const fattni_problem *p, const fattni_cpu_kernels *k,
                                   const fattni_fwd_layout *layout, const fattni_sequence *seq, int64_t b, int64_t h,
                                   int64_t i0, char *scratch, int64_t n);

/* Before the first key: max = -inf, sum = 0. A sink is a key without value that was there first;
   what FATTN_MERGE continues is one whose value is o. */
void fattni_fwd_start(const fattni_fwd_rows *r);
/* One step of the online softmax, over these keys, which begin where a tile does, as operands. Reads Q^T, updates O^T,
   max and sum. */
void fattni_fwd_tile(const fattni_fwd_rows *r, fattni_range keys, const fattni_fwd_keys *operands);
/* o = O^T / sum, with what rounding took off it (o_rest.h), lse = max + log sum; a row that saw nothing gives 0 and
   -inf. Overwrites O^T. */
void fattni_fwd_finish(const fattni_fwd_rows *r);

/* The rows of p->q, or of its 8-bit copy, into Q^T. */
void fattni_fwd_load_q(const fattni_fwd_rows *r);

#endif
