/* fattn/attention.h - the fused op. Forward keeps O and L; nothing of size Sq*Sk exists.

   x = scale*q.k, t = softcap(x), s = t - slope*|i'+off-j'| + bias, L = log(sum exp s + exp sink),
   P = exp(s - L), O = (keep*P) V / (1-p). FlashAttention (Dao et al. 2022), FlashAttention-2
   (Dao 2023). i' = i + q_pos0, j' = j + k_pos0, off = Sk - Sq (0 when top-left aligned).

   q.k, x, t, s and dO V must be finite in F32 (F64), whose whole range may be used; a bias of -inf
   masks. A NaN may reach masked rows and keys of the same tile, but none past a sequence's length.
   F16 results are limited to 65504. A merged result weighs its parts by their L, which are rounded
   to F32 (F64). NUMERICS.md: precisions, ranges, NaN, determinism, and every tolerance. */
#ifndef FATTN_ATTENTION_H
#define FATTN_ATTENTION_H

#include <fattn/tensor.h>

enum {
    FATTN_CAUSAL = 1u << 0,          /* bottom-right aligned: key j' <= i' + off */
    FATTN_CAUSAL_TOP_LEFT = 1u << 1, /* key j' <= i' */
    FATTN_WINDOW = 1u << 2,          /* i'+off-left <= j' <= i'+off+right; negative = unbounded */
    FATTN_DETERMINISTIC = 1u << 3,   /* bitwise-repeatable gradients, or FATTN_E_UNSUPPORTED */
    FATTN_TF32 = 1u << 4,            /* F32 on a GPU may round operands to TF32; off = full fp32 */
    FATTN_MERGE = 1u << 5,           /* forward: o (F32 or F64) and lse hold the result over other
                                        keys; update them. backward: they do, so that k and v are a
                                        part of the keys: required then, see below */
    FATTN_EXACT_DELTA = 1u << 6,     /* o of 16 bits: forward keeps in io.saved what rounding takes off it,
                                        a byte per element, for backward's delta; set it in both */
    FATTN_TOP_LEFT = 1u << 7,        /* off is 0 below, whatever Sk - Sq, of windows and ALiBi; beside it
                                        FATTN_CAUSAL is FATTN_CAUSAL_TOP_LEFT */
    FATTN_ACC_DQ = 1u << 8,          /* add into this gradient, do not overwrite it */
    FATTN_ACC_DK = 1u << 9,
    FATTN_ACC_DV = 1u << 10,
    FATTN_ACC_DBIAS = 1u << 11,
    FATTN_ACC_DSINK = 1u << 12,
    FATTN_FP8 = 1u << 13,          /* forward multiplies 8-bit copies of q, k and v: fattn/fp8.h */
    FATTN_FP8_HADAMARD = 1u << 14, /* beside it: copies of q and k are rotated first */
    FATTN_UNIFIED_MAX = 1u << 15,  /* forward of few rows, to compare: exp(s - unified_max) without maxima, see
                                    fattn_attention_fwd; backward ignores it */
    FATTN_FP8_RENEW = 1u << 16,    /* beside FATTN_FP8: backward reads no O and L, it computes them in q's dtype */
    FATTN_FP8_INT8 = 1u << 17      /* beside FATTN_FP8: copies of q and k are integers, k has a scale per 32 keys */
};

/* Auto is the fastest that supports the call. The others are for comparison: same inputs, same
   results within rounding. */
typedef enum fattn_algorithm {
    FATTN_ALGO_AUTO = 0,
    FATTN_ALGO_STANDARD, /* stores P, N x N, in io.saved: the unfused reference, and the baseline
                            for memory */
    FATTN_ALGO_FLASH1,   /* FlashAttention 1 forward: outer loop over K/V blocks, O, l, m in
                            memory; parallel over B*H only */
    FATTN_ALGO_FLASH2    /* row blocks in parallel forward, column blocks backward */
} fattn_algorithm;

/* NULL, or all zero but struct_size: plain attention. */
typedef struct fattn_attention_params {
    uint32_t struct_size;
    uint32_t flags;
    int32_t algorithm;                  /* fattn_algorithm */
    float scale;                        /* 0 = 1/sqrt(D), else finite and > 0 */
    float softcap;                      /* 0 = off; else t = cap*tanh(x/cap) */
    float dropout_p;                    /* probability of dropping; takes effect as T/32768 with
                                           T = lround(32768 p), 1 <= T <= 32767 */
    int32_t window_left, window_right;  /* read only with FATTN_WINDOW */
    int64_t max_seqlen_q, max_seqlen_k; /* packed batches: upper bounds below 2^31, known to the
                                           host */
    int64_t q_pos0, k_pos0;             /* 0..2^29: position of row 0 and key 0 in the whole
                                           sequence: mask, ALiBi, dropout */
    fattn_rng rng;                      /* used only when dropout_p > 0; stream = the call site */
    int32_t rng_batch0, rng_head0;      /* place of this slice in the whole batch */
    int32_t rng_heads;                  /* heads of the whole batch; 0 = Hq */
    float unified_max;                  /* read only with FATTN_UNIFIED_MAX; finite */
} fattn_attention_params;

typedef struct fattn_fp8 fattn_fp8; /* fattn/fp8.h */

/* Fill once: forward reads q to rng_step, backward reads all. Any strides with D contiguous:
   [B,H,S,D], a permuted [B,S,H,D], a slice of [B,S,3,H,D]. Outputs, workspace and saved must not
   overlap inputs or each other: ARG where addresses alone prove it. NULL = absent, unless marked
   required. All tensors are on the context's device. */
typedef struct fattn_attention_io {
    uint32_t struct_size;
    uint32_t reserved;                         /* 0 */
    const fattn_tensor *q;                     /* [B,Hq ,Sq,D]  F64 F32 F16 BF16; required */
    const fattn_tensor *k;                     /* [B,Hkv,Sk,D]  q's dtype; Hq % Hkv == 0; required */
    const fattn_tensor *v;                     /* [B,Hkv,Sk,Dv] q's dtype; required */
    const fattn_tensor *o;                     /* [B,Hq ,Sq,Dv] written by forward: q's dtype or F32; required */
    const fattn_tensor *lse;                   /* [B,Hq ,Sq]    F32 (F64 when q is F64): natural log; required */
    const fattn_tensor *bias;                  /* [B,Hq,Sq,Sk]  q's dtype or F32; dimensions may broadcast (stride 0) */
    const fattn_tensor *alibi;                 /* [Hq] slopes   F32 (F64 when q is F64) */
    const fattn_tensor *sink;                  /* [Hq] logits   F32 (F64 when q is F64) */
    const fattn_tensor *seqlens_q, *seqlens_k; /* [B] I32: rows, keys in use; padded batch */
    const fattn_tensor *cu_seqlens_q, *cu_seqlens_k; /* [Nseq+1] I32, both or neither: packed */
    const fattn_tensor *rng_step;                    /* I32 scalar on the device: captured graphs */
    /* backward */
    const fattn_tensor *d_o;          /* [B,Hq,Sq,Dv] q's dtype, or F32 beside 16 bits; required */
    const fattn_tensor *d_lse;        /* [B,Hq,Sq]    as lse: gradient of the loss with respect to L */
    const fattn_tensor *delta;        /* [B,Hq,Sq]    as lse: sum_d dO*O - dL, when already known */
    const fattn_tensor *dq, *dk, *dv; /* as q, k, v; same dtype or F32; NULL = not wanted */
    const fattn_tensor *d_bias;       /* as bias, reduced over its broadcast dimensions; F32 (F64) */
    const fattn_tensor *d_sink;       /* as sink */
    void *saved;                      /* from forward to backward: STANDARD's P and L, or FATTN_EXACT_DELTA's bytes;
                                         256-byte aligned */
    size_t saved_bytes;
    void *workspace; /* used during the call only; 256-byte aligned */
    size_t workspace_bytes;
    const fattn_tensor *page_table; /* [B,pages of a sequence] I32: k and v lie in pages, see below; forward only */
    const fattn_fp8 *fp8;           /* FATTN_FP8: the copies; NULL: made in the workspace. Forward only */
} fattn_attention_io;

/* Pages: k is [pages,Hkv,page,D] and v [pages,Hkv,page,Dv] with page a power of two, 16 or more. Key j of sequence b is
   row j % page of page_table[b, j / page], so Sk is the table's second dimension times page. seqlens_k is required;
   entries of the table and rows of pages beyond a sequence's length are not read. A page may belong to several
   sequences. An entry in use that is not in 0..pages-1 is FATTN_E_ARG on the CPU, page 0 on a GPU. Not for packed
   batches, STANDARD and FLASH1, nor backward. On a GPU calls of more than 16 rows, in F32 and F64 all, copy them into
   the workspace first: B Hkv Sk (D + Dv) elements. fattn/kv_cache.h writes such keys.

   Packed: q is [1,Hq,total_q,D], b counts sequences, i and j count inside one, bias is
   [Nseq,Hq,max_seqlen_q,max_seqlen_k]. A GPU clamps lengths to max_seqlen and total; the CPU
   rejects invalid ones with FATTN_E_ARG. Rows past the end of a sequence are not touched.

   Sizes. Sq + q_pos0 and Sk + k_pos0 are below 2^31-1; all heads together have at most 2^48 rows. On a
   GPU a sequence or a packed buffer has at most 2^28 rows and keys, and all sequences together at most
   2^31-1 heads and 2^31-1 row blocks (of 16 rows or more); larger calls are FATTN_E_UNSUPPORTED. */

typedef struct fattn_attention_plan {
    uint32_t struct_size;
    uint32_t deterministic;              /* 1 = gradients repeat bitwise */
    size_t fwd_workspace, bwd_workspace; /* bytes: enough for every call with the same tensors
                                             present, shapes, strides, dtypes and params, at any
                                             addresses; a query without d_o covers every valid d_o */
    size_t saved_bytes;                  /* of io.saved: 0 but for STANDARD and EXACT_DELTA */
    size_t lse_bytes;                    /* L */
    size_t materialized_bytes;           /* what N x N storage would take: P, and the keep mask */
    char fwd_kernel[64], bwd_kernel[64]; /* "fattn_bwd_sm90_bf16_d128_causal_64x128" */
} fattn_attention_plan;

/* Pure: reads shapes and strides only, no data. d_o may be NULL here; when no gradient tensor is
   given, all are planned. With pages there is no backward: its fields are 0 and empty. Errors as for _fwd and _bwd,
   except for workspace and saved. */
FATTN_API FATTN_CHECKED fattn_status fattn_attention_query(fattn_ctx *ctx, const fattn_attention_params *p,
                                                           const fattn_attention_io *io, fattn_attention_plan *out);

/* Enqueue only: no allocation, no synchronisation, no host read of device data. Capturable.
   Errors: ARG, ABI, SHAPE, DTYPE, DEVICE, UNSUPPORTED, WORKSPACE; nothing is written then.

   FATTN_UNIFIED_MAX is FlashDecoding++'s softmax (Hong et al. 2023). Keys of few rows are split into parts, of which
   each sums exp(s - max) with a maximum of its own. With the flag all take unified_max, which must be known before,
   and no maximum is looked for. That is right for a part while the log of a row's sum of exp(s) over it is within -55
   to +44 of unified_max (F64: -443 to +354): beyond, or where a row sees no key, a part is computed once more with
   maxima. So unified_max decides the time. O and L are the same within rounding: 2^-24 of |s - unified_max| in place
   of |s - max|, relative in P and absolute in L. UNSUPPORTED: F16, in which P would be right within -1.4 to +10 only;
   more rows than few, which are 16 on a GPU, 8 on a CPU, or 4 where it multiplies BF16 numbers; on a GPU other dtypes
   than BF16, softcap, ALiBi, bias and dropout; on a CPU more than 256 MiB of sums of parts; STANDARD and FLASH1. */
FATTN_API FATTN_CHECKED fattn_status fattn_attention_fwd(fattn_ctx *ctx, const fattn_attention_params *p,
                                                         const fattn_attention_io *io);
/* delta = rowsum(dO*O) - dL, dP = keep*(dO V^T)/(1-p), G = P*(dP - delta); dbias = sum G;
   dX = G*(1-(t/cap)^2), dQ = scale dX K, dK = scale dX^T Q, dV = (keep*P)^T dO/(1-p),
   dsink = -sum exp(sink - L) delta. Reads o and lse as written by forward.

   A row of G sums to dL + exp(sink - L) delta over all keys. In 16 bits and TF32 this serves to keep the
   mean of the keys from multiplying roundings of dS and delta (NUMERICS.md, section 1); with a
   softcap sums of its own tell what a row of dX sums to. Of a part of the keys, merged forward or not,
   neither is true: set FATTN_MERGE then, or give delta.

   delta has the error of a rounded o, the same in a whole row of dS. It multiplies the mean of the keys in
   dQ and of the queries in dK, and grows with the mean of the values: dQ and dK in 16 bits are then off by
   percents. FATTN_EXACT_DELTA, in both calls, makes it 256 times smaller. io.saved then has a byte per
   element of o, rows rounded up to 16 bytes: B Hq Sq round_up(Dv, 16), packed Hq total_q round_up(Dv, 16);
   what forward wrote there must stay until backward. Beside an o in F32 or F64 the flag has no effect and
   needs no memory; a given delta is used as it is, io.saved must be there. UNSUPPORTED for STANDARD with an
   o of 16 bits; DTYPE beside FATTN_MERGE with such an o, which no forward call merges into. */
FATTN_API FATTN_CHECKED fattn_status fattn_attention_bwd(fattn_ctx *ctx, const fattn_attention_params *p,
                                                         const fattn_attention_io *io);

/* keep[b,h,i,j], U8 [B,Hq,Sq,Sk] (packed: [Nseq,Hq,max_q,max_k]): the dropout bits that fwd and bwd
   use for these params and shapes, 1 = kept, any strides but 0; other masks are not applied. They are of Philox4x32
   with seven rounds (Salmon et al. 2011), a function of seed, stream, step, b, h, i and j. io: as for forward, no
   element is read but rng_step. N x N bytes: meant for tests. Errors: those of forward's arguments, and DTYPE, SHAPE,
   DEVICE for keep. */
FATTN_API FATTN_CHECKED fattn_status fattn_dropout_mask(fattn_ctx *ctx, const fattn_attention_params *p,
                                                        const fattn_attention_io *io, const fattn_tensor *keep);

#endif
