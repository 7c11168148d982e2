/* FATTN_ALGO_STANDARD on the device: what forward and backward share.

   Every operand is first laid out as cuBLAS likes it, dense [B,H,S,D] of q's dtype with zeros past
   the end of a sequence: N x D is nothing beside N x N, and the query heads of one key head are
   then one matrix of group*Sq rows, so that each product of all heads is one call, whatever the
   strides, the lengths or the group. Products are stored in REAL: F64 for F64, else F32. Kernels
   between them have blocks of FATTNI_STANDARD_THREADS.

   A dense row r is (b Hq + h) Sq + i; S, P, dP are [B Hq Sq][Sk]. */
#ifndef FATTNI_CORE_MATERIALIZED_STANDARD_CUDA_H
#define FATTNI_CORE_MATERIALIZED_STANDARD_CUDA_H

#include "core/cuda/args.h"

enum { FATTNI_STANDARD_THREADS = 256 };

typedef struct fattni_standard_args {
    fattni_attention_args a;
    double scale, softcap, keep_scale;
    int32_t dtype, o_dtype, bias_dtype;
    void *S;       /* REAL: scale q.k, then exp(s - max); the place of P when that is REAL, too */
    void *P;       /* dtype */
    uint8_t *keep; /* NULL without dropout */
    void *L;       /* REAL [B Hq Sq]: to which P is relative */
    void *dropped; /* dtype: keep P */
    void *kept;    /* REAL [B Hq Sq]: what a merge leaves of the old o; NULL without */
    void *o_scale; /* REAL [B Hq Sq]: sum of P over sum of the rounded P, which cancels the rounding
                      of a weight that dominates its row; NULL: P is not rounded */
} fattni_standard_args;

/* A dense buffer and the caller's tensor. */
typedef struct fattni_dense_args {
    fattni_attention_args a;
    fattni_view view;
    void *dense;         /* [B,heads,rows,width] */
    const void *kept;    /* REAL per dense row, or NULL: view = scale*dense + kept*view */
    const void *o_scale; /* REAL per dense row that multiplies dense, or NULL */
    double scale;
    int64_t rows, width;
    int32_t view_dtype, dense_dtype;
    int32_t heads;
    int32_t keys;          /* rows are keys: k0 and Sk of a sequence */
    int32_t add, reserved; /* view += scale*dense */
} fattni_dense_args;

#ifndef __CUDACC__
#include "core/cuda/blas/blas.h"
#include "core/materialized/standard.h"

const char *fattni_cuda_standard_why_unsupported(const fattn_ctx *ctx, const fattni_problem *p);
static inline fattn_dtype fattni_standard_real(const fattni_problem *p) {
    return p->dtype == FATTN_F64 ? FATTN_F64 : FATTN_F32;
}
fattni_standard_args fattni_standard_args_of(const fattni_problem *p);

/* One of the caller's tensors on its way to or from a dense buffer. */
typedef struct fattni_dense {
    const fattni_array *array;
    void *dense;
    fattn_dtype dtype; /* of the dense side */
    int64_t width;
    bool keys; /* [B,Hkv,Sk,..], not [B,Hq,Sq,..] */
} fattni_dense;
fattn_status fattni_standard_gather(fattn_ctx *ctx, const fattni_problem *p, const fattni_dense *d);
fattn_status fattni_standard_scatter(fattn_ctx *ctx, const fattni_problem *p, const fattni_dense *d, double scale,
                                     bool add);
/* q, k, v and, with dropout, keep P: what both passes have in their workspace. */
typedef struct fattni_standard_inputs {
    fattni_dense q, k, v;
    void *dropped; /* NULL without dropout */
} fattni_standard_inputs;
/* Byte offsets of these at the end of a workspace of *bytes. */
typedef struct fattni_standard_input_layout {
    size_t q, k, v, dropped;
} fattni_standard_input_layout;
fattni_standard_input_layout fattni_standard_lay_out_inputs(const fattni_problem *p, size_t *bytes);
/* Gathers q, k and v. */
fattn_status fattni_standard_gather_inputs(fattn_ctx *ctx, const fattni_problem *p,
                                           const fattni_standard_input_layout *at, fattni_standard_inputs *out);

/* Starts fattn_name_f32 or fattn_name_f64, by the type in which the problem is computed. */
#define FATTNI_STANDARD_KERNEL(name, args)                                                                             \
    extern void fattn_##name##_f32(args);                                                                              \
    extern void fattn_##name##_f64(args)
#define FATTNI_STANDARD_START(ctx, p, name, grid, x)                                                                   \
    ((p)->dtype == FATTN_F64 ? FATTNI_START(ctx, fattn_##name##_f64, grid, FATTNI_STANDARD_THREADS, x)                 \
                             : FATTNI_START(ctx, fattn_##name##_f32, grid, FATTNI_STANDARD_THREADS, x))

/* o from forward's rows. */
fattn_status fattni_standard_scatter_o(fattn_ctx *ctx, const fattni_problem *p, const fattni_dense *d,
                                       const fattni_standard_args *x);

/* Products of all (b, key head): rows of queries G = group*Sq, keys Sk. a and b have q's dtype, c
   is REAL. */
fattn_status fattni_standard_rows_by_keys(fattn_ctx *ctx, const fattni_problem *p, int64_t width, double alpha,
                                          const void *rows, const void *keys, void *c,
                                          void *workspace); /* c[G,Sk] = alpha rows keys^T */
fattn_status fattni_standard_matrix_by_keys(fattn_ctx *ctx, const fattni_problem *p, int64_t width, const void *matrix,
                                            const void *keys, void *c,
                                            void *workspace); /* c[G,width] = matrix[G,Sk] keys */
fattn_status fattni_standard_matrix_by_rows(fattn_ctx *ctx, const fattni_problem *p, int64_t width, const void *matrix,
                                            const void *rows, void *c,
                                            void *workspace); /* c[Sk,width] = matrix^T rows */
#endif

#endif
