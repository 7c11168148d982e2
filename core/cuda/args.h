/* The argument of CUDA attention kernels: plain values, passed by copy, filled by args.c from a fattni_problem. Forward
   kernels take it as it is; those of Hopper (fwd/cuda/fwd_args.h) and backward kernels (bwd/cuda/bwd_args.h) take it as
   part of a larger struct. */
#ifndef FATTNI_CORE_CUDA_ARGS_H
#define FATTNI_CORE_CUDA_ARGS_H

#include <stdint.h>

/* A tensor: strides in elements per batch, head and row (and column, for a bias), 0 where it broadcasts. */
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

/* With a larger softcap an absolute error of 3e-7 in tanh would show in the scores. */
#define FATTNI_LARGE_CAP 1000.0f

typedef struct fattni_attention_args {
    fattni_view q, k, v, o, lse;
    fattni_view bias;
    fattni_view o_rest; /* bytes (core/attention/o_rest.h); NULL: none */
    fattni_line alibi, sink;
    fattni_line seqlens_q, seqlens_k, cu_seqlens_q, cu_seqlens_k;
    const int32_t *rng_step;
    int32_t B, Hq, Hkv, group;
    int32_t Sq, Sk, D, Dv;  /* Sq, Sk: bounds over all sequences */
    int32_t rows_q, rows_k; /* of the buffers */
    int32_t top_left;       /* 1: off = 0, else Sk - Sq of each sequence */
    int32_t shift;          /* q_pos0 - k_pos0 */
    int32_t left, right;    /* window, FATTNI_FAR = unbounded; causal: right = 0 */
    float scale;            /* of q.k */
    float softcap;          /* 0 = off */
    uint32_t drop_T;        /* 0 = no dropout */
    float keep_scale;
    double scale_f64, softcap_f64, keep_scale_f64; /* the same, for F64 kernels */
    uint64_t seed;
    uint32_t stream, rng_plane0, rng_heads;
    int32_t q_pos0, k_pos0;
    int32_t vector_qkv;      /* q, k, v and o (backward: and d_o) allow 16-byte accesses */
    int32_t o_f32, bias_f32; /* o, bias are F32 and q, k, v have 16 bits */
    uint32_t flags;          /* FATTN_MERGE, FATTN_ACC_* */
    int32_t kind;            /* KIND_F16 or KIND_BF16 */
    int32_t f64;             /* statistics, bias and gradients are F64 */
    int32_t at_once;         /* planes whose blocks are taken together (core/device/plane_block.cuh); 0: one */
} fattni_attention_args;

#endif
