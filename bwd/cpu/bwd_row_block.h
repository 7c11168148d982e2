/* Backward on the CPU, one block of rows: what the passes for dQ, dK and dV (bwd_cpu.c) and for
   dbias and dsink (bwd_bias.c) have in common. */
#ifndef FATTNI_BWD_CPU_BWD_ROW_BLOCK_H
#define FATTNI_BWD_CPU_BWD_ROW_BLOCK_H

#include "core/cpu/scores.h"

#include <stdatomic.h>

enum { WANT_DQ = 1, WANT_DK = 2, WANT_DV = 4, WANT_KEYS = WANT_DK | WANT_DV };

/* Offsets in bytes from a thread's scratch. [..][row] arrays hold one block of rows. */
typedef struct fattni_bwd_layout {
    size_t q, d_o;                    /* Q^T [D], dO^T [Dv] */
    size_t dq;                        /* dQ^T [D]; with keeps_dq in one pass of all row blocks of the group */
    size_t dq_rows;                   /* [row][D], for a dq of 16 bits */
    size_t lse, delta;                /* what P is relative to: kernels->gradient's base, l and its rounding */
    size_t p, ds;                     /* P^T, dS^T [keys] */
    size_t keep, dcap, bias;          /* [keys]: dropout mask, derivative of the softcap, bias */
    size_t q_rows, d_o_rows;          /* [kernels->blocks][row][D_pad], [..][Dv_pad]: operands of add_rows, if copies */
    size_t key, value;                /* of a column block, operands of scores: copies */
    size_t key_transposed;            /* K as an operand of add_keys, where products take 16 bits */
    size_t p_rows, ds_pairs, ds_rows; /* P^T, dS^T as operands, where products take 16 bits; rows: of a column block */
    size_t dk, dv;                    /* [column block][D_pad], [..][Dv_pad] */
    size_t bytes;
} fattni_bwd_layout;

/* A call: delta at the workspace's beginning, then m and log l of huge rows, what a chain shares, and
   the threads' scratch. */
typedef struct fattni_bwd {
    const fattni_problem *p;
    const fattni_cpu_kernels *k;
    fattni_bwd_layout layout;
    size_t max, log_sum;             /* offsets, [batch][h][row]: written for huge rows (huge.h) */
    size_t key_mean;                 /* D + 1 floats per [b][key head], with finds_means */
    size_t huge_heads;               /* with centres_copies: an int per [b][key head], whether it has huge rows */
    size_t capped_sums;              /* with a softcap: per block of rows, see fattni_bwd_capped_sums */
    size_t dq_semaphores, shared_dq; /* with `chained`: an int and dQ^T per block of rows */
    size_t shared_bytes;             /* delta [batch][h][row], unless the caller gave it, and these */
    atomic_bool any_huge;
    unsigned want;
    bool finds_means;                  /* dQ is right for keys with a mean (bwd_key_mean.c) */
    bool centres_copies;               /* by copies of keys less their mean, but in heads with huge rows */
    bool one_pass;                     /* dQ, dK and dV from the same tiles, a task per key head */
    bool chained;                      /* the same with a task per column block: at each block of
                                          rows it waits until the one before has added to dQ */
    bool shares_keys;                  /* several blocks of rows read a column block's keys */
    bool copies_keys;                  /* of another type, or shared and apart */
    bool copy_q, copy_d_o;             /* of another type, apart, or not whole vectors */
    bool keeps_dq;                     /* dq has 16 bits: partial sums of dQ are kept as reals */
    int64_t row_blocks, column_blocks; /* in the longest sequence */
    int64_t head_blocks;               /* of rows of a head, in all sequences where these are packed */
    int64_t columns;                   /* of a column block */
    int64_t D_pad, Dv_pad;             /* whole vectors */
    int64_t row_tasks, column_tasks;   /* of two passes, 0 where the result is not wanted */
    int p_exponent, ds_exponent;       /* P and dS are computed times 2^these, 0 but for F16 products */
    int64_t bias_tasks, threads;       /* threads: those that have scratch */
} fattni_bwd;

fattni_bwd fattni_bwd_plan(const fattn_ctx *ctx, const fattni_problem *p);
size_t fattni_bwd_dq_bytes(const fattni_bwd *w); /* of dQ^T of a block of rows */

static inline char *fattni_bwd_scratch(const fattni_bwd *w, int thread) {
    return (char *)w->p->workspace + w->shared_bytes + (size_t)thread * w->layout.bytes;
}

/* The number of a block of rows that exists among all of the call. Of packed sequences each begins a block, so that
   they have at most one more than their rows need. */
static inline int64_t fattni_bwd_row_block(const fattni_bwd *w, const fattni_sequence *seq, int64_t b, int64_t h,
                                           int64_t i0) {
    const int64_t rows = w->k->rows;
    if (w->p->packed) return h * w->head_blocks + seq->q0 / rows + b + i0 / rows;
    return (b * w->p->Hq + h) * w->head_blocks + i0 / rows;
}

/* Where delta, m and log l of a row lie in their parts of the workspace, in reals. */
int64_t fattni_bwd_row_at(const fattni_problem *p, int64_t batch, int64_t h, int64_t row);
double fattni_bwd_delta(const fattni_bwd *w, int64_t batch, int64_t h, int64_t row);

/* P = exp(unit (s - max) - log_sum) for a score s of fattni_scores: 0 and L, but for huge rows, whose
   max and log_sum fattni_bwd_row_sums has left. */
typedef struct fattni_row_sum {
    double max, log_sum;
} fattni_row_sum;
fattni_row_sum fattni_bwd_row_sum(const fattni_bwd *w, int64_t batch, int64_t h, int64_t row);
/* sink - unit max, for the same formula. */
double fattni_bwd_sink_above(const fattni_bwd *w, double sink, double max);
bool fattni_bwd_has_huge_rows(const fattni_bwd *w, const fattni_sequence *seq, int64_t h, int64_t i0, int64_t rows);
/* The block of rows at i0, when it has huge ones: one pass over its keys. */
void fattni_bwd_row_sums(const fattni_bwd *w, const fattni_sequence *seq, int64_t b, int64_t h, int64_t i0,
                         char *scratch);

/* Rows [i0, i0 + rows) of query head h of sequence b, packed into a thread's scratch. */
typedef struct fattni_bwd_rows {
    const fattni_sequence *seq;
    int64_t b, h, i0, rows;
    char *scratch;
    const void *q, *d_o; /* [row][..] for dK and dV: the caller's, or copies */
    int64_t q_stride, d_o_stride;
} fattni_bwd_rows;

/* Operands of add_rows are those of block n < kernels->blocks; all else takes the place of the block before. */
fattni_bwd_rows fattni_bwd_pack(const fattni_bwd *w, const fattni_sequence *seq, int64_t b, int64_t h, int64_t i0,
                                int64_t n, char *scratch);

/* Whether the call is one that looks for means: 16 bits, in o or in products; o and lse of no other keys, so that a row
   of P (dP - delta) sums to a known number. */
bool fattni_bwd_finds_means(const fattni_problem *p, const fattni_cpu_kernels *k);
/* Finds the mean of one head of one sequence, if w->finds_means. */
void fattni_bwd_find_key_mean(const fattni_bwd *w, int64_t b, int64_t g);
/* D floats; NULL where no mean is looked for, none was found, or it is not used. */
const float *fattni_bwd_key_mean(const fattni_bwd *w, int64_t b, int64_t g);
/* Whether a key head has huge rows, with centres_copies. Tasks set it at the same time. */
atomic_int *fattni_bwd_huge_head(const fattni_bwd *w, int64_t b, int64_t g);
/* With a softcap and a mean: sums over keys, [3][row], of P (dP - delta) times 2^ds_exponent, of P times the
   derivative and p->scale times 2^p_exponent, of dS. */
float *fattni_bwd_capped_sums(const fattni_bwd *w, const fattni_bwd_rows *r);
/* Adds to the sum dQ^T of these rows over all keys, [D][row], what it lacks with a mean, times 2^ds_exponent. */
void fattni_bwd_add_mean(const fattni_bwd *w, const fattni_bwd_rows *r, float *dq);

/* With copies_keys, the keys and values of at most a column block of key head g of sequence b go into scratch for the
   tiles to come; with centres_copies keys are less their mean. */
void fattni_bwd_load_keys(const fattni_bwd *w, const fattni_sequence *seq, int64_t b, int64_t g, fattni_range columns,
                          char *scratch);
/* The tile of these rows and the keys [j, j + keys), in the column block that begins at j0. */
fattni_score_tile fattni_bwd_score_tile(const fattni_bwd *w, const fattni_bwd_rows *r, int64_t j0, int64_t j,
                                        int64_t keys);

/* P^T times 2^p_exponent, and G^T = P (dP - delta) times that and `scale`, into scratch; with dropout the keep mask,
   too, and with a softcap its derivative times p->scale. */
void fattni_bwd_probabilities(const fattni_bwd *w, const fattni_bwd_rows *r, const fattni_score_tile *at, double scale);

/* d_bias, summed over its broadcast dimensions; d_sink. After delta. */
int64_t fattni_bwd_bias_tasks(const fattni_problem *p, const fattni_cpu_kernels *k);
void fattni_bwd_bias(const fattn_ctx *ctx, fattni_bwd *w);
void fattni_bwd_sink(const fattn_ctx *ctx, fattni_bwd *w);

#endif
