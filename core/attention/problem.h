/* An attention call after validation, in the form that kernels use. */
#ifndef FATTNI_CORE_ATTENTION_PROBLEM_H
#define FATTNI_CORE_ATTENTION_PROBLEM_H

#include "core/base/internal.h"
#include "core/attention/mask_band.h"

enum fattni_pass { FATTNI_FWD, FATTNI_BWD };

enum { FATTNI_MAX_HEAD_DIM = 256 }; /* of D and Dv */

/* A tensor with normalised strides: 0 where a dimension has one element or broadcasts. */
typedef struct fattni_array {
    void *p;
    int64_t n[4]; /* shape as given: 1 where a dimension broadcasts without a stride */
    int64_t s[4]; /* elements, per (b, h, row, column); missing dimensions have stride 0 */
    int32_t dtype;
    bool present; /* false: the optional tensor was not given */
    bool empty;   /* has no element */
} fattni_array;

/* 8-bit copies of q, k and v (core/fp8/fp8.h). */
typedef struct fattni_fp8 {
    fattni_array q, k, v, q_scale, q_shift, k_scale, v_scale, v_mean, partials;
    float rope_base; /* 0: the quantiser does not turn q and k */
} fattni_fp8;

typedef struct fattni_problem {
    enum fattni_pass pass;
    fattn_dtype dtype;         /* of q, k, v */
    int64_t B, Hq, Hkv, group; /* B counts sequences; group = Hq / Hkv */
    int64_t Sq, Sk, D, Dv;     /* Sq, Sk: bounds over all sequences */
    int64_t rows_q, rows_k;    /* rows of the buffers: totals when packed, else Sq, Sk */
    int64_t max_q, max_k;      /* extents of bias and dropout mask: max_seqlen, else Sq, Sk */
    bool packed, padded;       /* cu_seqlens given; a seqlens given */
    int64_t page;              /* keys of a page; 0: k and v are not in pages */
    uint32_t flags;
    int32_t algorithm;
    double scale, softcap; /* softcap 0 = off */
    int64_t q_pos0, k_pos0;
    int64_t window_left, window_right; /* FATTNI_UNBOUNDED without */
    double unified_max;                /* FATTN_UNIFIED_MAX; never in flags of a backward call */
    uint32_t drop_T;                   /* 0 = no dropout */
    double keep_scale;                 /* 32768 / (32768 - T) */
    fattn_rng rng;
    int64_t rng_batch0, rng_head0, rng_heads;
    fattni_array q, k, v, o, lse, bias, alibi, sink, seqlens_q, seqlens_k, cu_seqlens_q, cu_seqlens_k, rng_step;
    fattni_array page_table; /* with pages k and v are indexed by page in place of the batch: fattni_key_at */
    fattni_fp8 fp8;          /* FATTN_FP8: the caller's copies; none present: they are made in the workspace */
    fattni_array d_o, d_lse, delta, dq, dk, dv, d_bias, d_sink;
    bool has_o_rest; /* `saved` has it (o_rest.h) */
    bool any_d_o;    /* a query without d_o, which is planned like o: the call may pass another one */
    void *saved, *workspace;
    size_t saved_bytes, workspace_bytes;
} fattni_problem;

/* One sequence of the batch. Rows i in [0, band.Sq) of it lie at q.p + batch*s[0] + (q0 + i)*s[2]. */
typedef struct fattni_sequence {
    fattni_band band;
    int64_t b;        /* its number */
    int64_t batch;    /* index along dimension 0 of q..lse: b, or 0 when packed */
    int64_t q0, k0;   /* first row and key in the buffer */
    int64_t diagonal; /* i' + off - j' = i - j + diagonal: ALiBi's distance */
} fattni_sequence;

/* Checks the arguments of a call and makes a problem of them: ABI, ARG, SHAPE, DTYPE, DEVICE with an error
   message. For a query `running` is false: no tensor is read, the workspace is ignored, backward's tensors
   may be missing. Running on the CPU also checks the contents of the length tensors. */
fattn_status fattni_problem_init(fattn_ctx *ctx, const fattn_attention_params *p, const fattn_attention_io *io,
                                 enum fattni_pass pass, bool running, fattni_problem *out);

/* FATTN_EXACT_DELTA's part of `saved`, where it has one; bytes. */
fattni_array fattni_o_rest_of(const fattni_problem *p);
size_t fattni_o_rest_bytes(const fattni_problem *p);

/* The forward call of the same tensors. */
fattni_problem fattni_forward_of(const fattni_problem *bwd);

/* FATTN_E_ARG when a length tensor on the CPU has an invalid value; one on a GPU is not read. */
fattn_status fattni_check_lengths(fattn_ctx *ctx, const fattni_problem *p);

/* FATTN_E_ARG with both names and ranges when addresses prove that a result, the workspace or the saved
   buffer (of the given sizes in bytes) shares memory with another tensor of the call. Address ranges of
   strided tensors may intersect: slices of one buffer are allowed. */
fattn_status fattni_check_overlaps(fattn_ctx *ctx, const fattni_problem *p, size_t workspace, size_t saved);

/* The same for fattn_fp8_quantize, which writes p->fp8. */
fattn_status fattni_check_fp8_overlaps(fattn_ctx *ctx, const fattni_problem *p);

/* Makes it backward's problem: FATTN_FP8 concerns forward only. With FATTN_FP8_RENEW, which stays among the flags,
   o and lse become those of backward's own, which have no address yet. */
void fattni_forget_fp8(fattni_problem *p);

/* Host only: reads the length tensors. */
fattni_sequence fattni_sequence_of(const fattni_problem *p, int64_t b);

/* The plane number in the dropout counter, and *rng_step. */
static inline uint32_t fattni_dropout_plane(const fattni_problem *p, int64_t b, int64_t h) {
    return ((uint32_t)b + (uint32_t)p->rng_batch0) * (uint32_t)p->rng_heads + (uint32_t)h + (uint32_t)p->rng_head0;
}
static inline uint32_t fattni_dropout_step(const fattni_problem *p) {
    return p->rng_step.present ? (uint32_t) * (const int32_t *)p->rng_step.p : 0u;
}

/* k of backward where P and dS are rounded to their dtype. In F16 a P of 1 / Sk is subnormal for Sk > 16384 and loses
   bits: P and dS of long rows are computed times 2^k, with 2^k <= Sk / 2^12, so that a P of 1 does not overflow and dS
   loses as few bits as possible. */
static inline int fattni_p_exponent(const fattni_problem *p) {
    int k = 0;
    while (p->dtype == FATTN_F16 && k < 15 && p->Sk >> (12 + k) > 1) ++k;
    return k;
}

/* Address of element (b, h, row, 0). */
static inline void *fattni_at(const fattni_array *a, int64_t b, int64_t h, int64_t row) {
    const int64_t element = b * a->s[0] + h * a->s[1] + row * a->s[2];
    return (char *)a->p + element * (int64_t)fattn_dtype_size((fattn_dtype)a->dtype);
}
/* Address of key j of head g in a sequence, of `keys`, which is k or v; with pages that of rows j .. the page's end.
   Host only, as it reads the page table. */
static inline void *fattni_key_at(const fattni_problem *p, const fattni_array *keys, const fattni_sequence *s,
                                  int64_t g, int64_t j) {
    if (!p->page) return fattni_at(keys, s->batch, g, s->k0 + j);
    const fattni_array *const t = &p->page_table;
    return fattni_at(keys, ((const int32_t *)t->p)[s->batch * t->s[0] + j / p->page * t->s[1]], g, j % p->page);
}
static inline int32_t fattni_page_log2(const fattni_problem *p) {
    int32_t log2 = 0;
    while ((int64_t)1 << log2 < p->page) log2 += 1;
    return log2;
}
static inline double fattni_get(const fattni_array *a, int64_t b, int64_t h, int64_t i, int64_t j) {
    return fattni_load(a->p, a->dtype, b * a->s[0] + h * a->s[1] + i * a->s[2] + j * a->s[3]);
}
static inline void fattni_set(const fattni_array *a, int64_t b, int64_t h, int64_t i, int64_t j, double x) {
    fattni_store(a->p, a->dtype, b * a->s[0] + h * a->s[1] + i * a->s[2] + j * a->s[3], x);
}

/* Distinct elements along dimension d. */
static inline int64_t fattni_distinct(const fattni_array *a, int d) {
    return a->s[d] ? a->n[d] : fattni_min(a->n[d], 1);
}

/* "q [2,8,77,64] f32, k ..." for dispatch's error messages. */
void fattni_problem_text(const fattni_problem *p, char *buffer, size_t size);

#endif
