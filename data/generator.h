/* The parts of the generator of the fixture files. */
#ifndef GENERATOR_H
#define GENERATOR_H

#include <fattn/fattn.h>
#include <fattn/fixture.h>

#include "core/base/internal.h"

/* An open file, and the number of random streams its cases have used: one per tensor. */
typedef struct writer {
    fattn_ctx *ctx;
    fattn_fixture *file;
    uint64_t seed;
    uint32_t stream;
} writer;

/* Normal numbers of the file's next stream, rounded to `exact` (FATTN_F32, ...), as F64. */
fattn_status draw(writer *w, fattn_dtype exact, int ndim, const int64_t *shape, fattn_tensor *out);
/* Puts an F64 tensor, whose values are exact in F32, as F32. */
fattn_status put_f32(writer *w, const char *path, const fattn_tensor *t);

/* Central differences of loss at a sample of the elements of x, with the first and last, without infinite
   elements and those that have no gradient, such as rows past the end of a sequence. Puts
   /cases/<name>/fd/<input>_index and _value. */
typedef struct difference {
    const char *name, *input;
    fattn_tensor x, gradient; /* F64, row-major, one shape */
    fattn_status (*loss)(void *user, double *out);
    void *user;
    /* NULL, or a quotient of higher precision, with its own step, where fp64 would not resolve it. */
    fattn_status (*quotient)(void *user, const double *at, double step, double *out);
    double step; /* of that */
} difference;
fattn_status put_differences(writer *w, const difference *d);

/* Sets a sink, a bias or a row of scores to special values, after everything was drawn. */
typedef struct attention_case attention_case;
typedef void (*adjust_fn)(attention_case *c);

enum { BIAS = 1, OVER_B = 2, OVER_H = 4, OVER_ROWS = 8, OVER_KEYS = 16 }; /* shape of the bias */
enum { MAX_SEQUENCES = 8 };
typedef enum lengths { FULL, PADDED, PADDED_Q, PADDED_K, PACKED } lengths;

typedef struct attention_spec {
    const char *name, *note;
    int64_t B, Hq, Hkv, Sq, Sk, D, Dv; /* 0: B 1, Hq 2, Hkv Hq, Sk Sq, Dv D; packed: B sequences,
                                          bounded by Sq and Sk */
    fattn_dtype exact;                 /* 0: FATTN_F32 */
    const char *layout;                /* NULL: "bhsd" */
    fattn_attention_params params;     /* without struct_size and max_seqlen */
    unsigned bias;
    bool alibi, sink, d_lse, delta, sum_d_o, step;
    bool empty;   /* a size of 0 above is intended */
    bool steep;   /* no differences: the scores are too large for them */
    double far;   /* extremes: scores of this size; scores of the same row differ by multiples of */
    double grain; /* grain / 4, which are exact in F32; 0: of 1/4 */
    lengths lengths;
    int32_t length_q[MAX_SEQUENCES], length_k[MAX_SEQUENCES];
    adjust_fn adjust;
} attention_spec;

enum slot {
    Q,
    K,
    V,
    D_O,
    BIAS_IN,
    ALIBI,
    SINK,
    D_LSE,
    DELTA,
    SEQLENS_Q,
    SEQLENS_K,
    CU_Q,
    CU_K,
    STEP,
    O,
    LSE,
    DQ,
    DK,
    DV,
    D_BIAS,
    D_SINK,
    SLOTS
};
struct attention_case {
    writer *w;
    const attention_spec *spec;
    fattn_attention_params params;
    fattn_attention_io io;       /* points to t */
    fattn_tensor t[SLOTS];       /* F64 or I32, row-major */
    fattn_tensor initial[SLOTS]; /* outputs: the values that MERGE and ACC_* add to; else no memory */
};
/* Draws the inputs, computes the rest with the fp64 reference, puts all of it. */
fattn_status put_attention(writer *w, const attention_spec *spec);

/* The files of the tape's ops: all cases. */
fattn_status put_ops(writer *w);
fattn_status put_blocks(writer *w);

/* A central difference of sum dO O + sum dL L by the reference in 128 bits, where *at is an element of one of
   the inputs: exact scores stay exact, L is not rounded to fp64. */
fattn_status quad_quotient(attention_case *c, const double *at, double step, double *out);

extern const attention_spec small_specs[], mask_specs[], dropout_specs[], extreme_specs[], mean_specs[];
extern const int small_count, mask_count, dropout_count, extreme_count, mean_count;

#endif
