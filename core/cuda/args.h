/* What a CUDA attention kernel is told: plain values, passed by copy. Filled by args.c from
   a fattni_problem; the same for forward and backward. */
#ifndef FATTNI_CORE_CUDA_ARGS_H
#define FATTNI_CORE_CUDA_ARGS_H

#include <stdint.h>

/* Strides in elements per batch, head, row (and column, for a bias). 0 where one element broadcasts. */
typedef struct fattni_view {
    void *p;
    int64_t b, h, row, column;
} fattni_view;

/* One value per head or sequence. */
typedef struct fattni_line {
    void *p;
    int64_t step;
} fattni_line;

enum { FATTNI_FAR = 1 << 30 }; /* a diagonal that masks nothing */

/* Beyond this cap an absolute error of tanh, 3e-7, would be seen in the scores. */
#define FATTNI_LARGE_CAP 1000.0f

typedef struct fattni_cuda_args {
    fattni_view q, k, v, o, lse;
    fattni_view d_o, d_lse, given_delta, dq, dk, dv;
    fattni_view bias, d_bias;
    fattni_line alibi, sink, d_sink;
    fattni_line seqlens_q, seqlens_k, cu_seqlens_q, cu_seqlens_k;
    const int32_t *rng_step;
    int64_t d_bias_n[4]; /* elements of d_bias that are stored */
    int32_t B, Hq, Hkv, group;
    int32_t Sq, Sk, D, Dv;         /* Sq, Sk: bounds over all sequences */
    int32_t rows_q, rows_k;        /* of the buffers */
    int32_t top_left;              /* 1: off = 0, else Sk - Sq of each sequence */
    int32_t shift;                 /* q_pos0 - k_pos0 */
    int32_t left, right;           /* window, FATTNI_FAR = unbounded; causal: right = 0 */
    float scale;                   /* of q k */
    float softcap;                 /* 0 = off */
    uint32_t drop_T;               /* 0 = no dropout */
    float keep_scale;
    double scale_f64, softcap_f64, keep_scale_f64; /* the same for F64 kernels */
    uint64_t seed;
    uint32_t stream, rng_plane0, rng_heads;
    int32_t q_pos0, k_pos0;
    int32_t vector_qkv;            /* q, k, v (and d_o, o) allow 16-byte accesses */
    int32_t o_f32, bias_f32, dq_f32, dk_f32, dv_f32, d_o_f32; /* F32 beside 16-bit q, k, v */
    uint32_t flags;                /* FATTN_MERGE, FATTN_ACC_* */
    /* backward's workspace; rows padded to the row block, one stretch per (sequence, head) */
    float *delta, *lse2, *dq_accumulator; /* delta of F64 kernels is double */
    /* lse2 = lse_factor (L - lse_shift): factor log2(e), or -1/scale (FATTNI_BEGINS_WITH_L). In F16 P and dS are
       e^lse_shift times what they are, a power of two that keeps long rows in the normal range; the scales of
       the gradients, which are scale, keep_scale or 1 else, take it back. */
    float lse_factor, lse_shift;
    float dq_scale, dk_scale, dv_scale, dbias_scale;
    /* bwd_huge.cuh: whether there are huge rows, tasks handed out, row blocks done; per row block whether it has
       any, per row m and log l, per row block its part in dsink; rows of such a block. */
    int32_t *huge, *huge_blocks;
    void *huge_max, *huge_log_sum, *huge_sink;
    int32_t huge_block;
    void *sink_parts;              /* of dsink, per (head, sequence, row block); float or double */
    int32_t *turns;                /* FATTN_DETERMINISTIC: core/device/dq_order.cuh; else NULL */
    fattni_view d_o_copy;          /* d_o in the 16-bit dtype, when it came as F32; else p NULL */
    int32_t padded_rows, row_block; /* row_block: BM of the backward kernel */
    /* The fragment order of the accumulator: so many threads add, warps have that many rows, and the
       float4s of `dq_group` threads follow each other. */
    int32_t dq_threads, dq_warp_rows, dq_group, D_padded;
    int32_t kind;                  /* KIND_F16 or KIND_BF16 */
    int32_t f64;                   /* statistics, bias and gradients are F64 */
    int32_t vector_gradients;      /* dq, dk, dv allow 16-byte accesses */
} fattni_cuda_args;

#endif
