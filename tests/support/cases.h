/* The cases of the attention tests: shapes, features, layouts. Plain values without pointers except
   names, so that CUDA tests can use the same lists. */
#ifndef TEST_CASES_H
#define TEST_CASES_H

#include <fattn/fattn.h>

#include <stdbool.h>

/* Memory layouts of q, k, v, their gradients, o and lse. d_o is always BHSD, so that its strides differ
   from o's in the other layouts. */
enum layout {
    LAYOUT_BHSD,      /* row-major */
    LAYOUT_BSHD,      /* a permuted [B,S,H,D]; lse a permuted [B,S,H]; broadcast by stride 0 */
    LAYOUT_QKV,       /* slices of one [B,S,3,H,D], gradients too; o as BSHD. Needs equal shapes */
    LAYOUT_PITCH,     /* rows D+1 apart, data aligned to the element only; a dimension of size 1 has an
                     arbitrary stride */
    LAYOUT_REVERSED,  /* rows last to first: a negative stride */
    LAYOUT_REVERSED_O /* rows of o alone; the rest row-major */
};

enum lengths { LENGTHS_NONE, LENGTHS_PADDED_Q, LENGTHS_PADDED_K, LENGTHS_PADDED, LENGTHS_PACKED };

enum {
    BIAS = 1, /* there is one; it broadcasts over the dimensions named */
    BIAS_OVER_B = 2,
    BIAS_OVER_H = 4,
    BIAS_OVER_I = 8,
    BIAS_OVER_J = 16,
    BIAS_MASKS = 32, /* every seventh element is -inf */
    BIAS_F32 = 64    /* F32 beside 16-bit q */
};

enum { NO_DQ = 1, NO_DK = 2, NO_DV = 4, NO_DBIAS = 8, NO_DSINK = 16 };

enum { MAX_SEQUENCES = 8 };

typedef struct attention_case {
    const char *name;
    int64_t B, Hq, Hkv, Sq, Sk, D, Dv; /* Hkv 0 = Hq, Dv 0 = D; packed: B counts sequences, Sq and
                                          Sk bound them */
    fattn_dtype dtype;                 /* 0 = F64 */
    enum layout layout;
    uint32_t flags; /* FATTN_CAUSAL, FATTN_MERGE, FATTN_ACC_DQ, ... */
    int32_t algorithm;
    float scale, softcap, dropout_p;
    int32_t window_left, window_right;
    int64_t q_pos0, k_pos0;
    unsigned bias, omit;
    bool alibi, sink, d_lse, delta, rng_step;
    bool wide;    /* o and the gradients are F32 beside 16-bit q, k, v */
    bool sum_d_o; /* d_o is one row, repeated with stride 0: the gradient of a sum over rows */
    enum lengths lengths;
    int32_t length_q[MAX_SEQUENCES], length_k[MAX_SEQUENCES];
    float unified_max;
} attention_case;

typedef struct attention_shape {
    int64_t Sq, Sk;
} attention_shape;

/* Sequence lengths around every block size in use: 1, BM-1, BM, BM+1, primes, Sq != Sk. */
extern const attention_shape attention_shapes[];
extern const int attention_shape_count;

/* Small cases, F64, plain row-major: every feature alone, many together, every degenerate size.
   A test sets dtype, layout and algorithm in a copy. */
extern const attention_case attention_features[];
extern const int attention_feature_count;

/* Case number n of an endless list of small ones that mix features and sizes. */
attention_case attention_mix(int n);

/* The next number of a reproducible stream, in 0..n-1. */
int cases_below(uint64_t *state, int n);

#endif
