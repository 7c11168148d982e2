/* Builds the attention problem of a case, runs it with guards around its memory, compares results.

   Every output, workspace, padding and row past a sequence's end is filled with NaN, with a different
   payload at each address, and so are guards before and after each buffer. Each pass is checked to
   change no byte except its results, and to allocate nothing.

   Failures are Criterion assertions that name the case. */
#ifndef TEST_ATTENTION_H
#define TEST_ATTENTION_H

#include "cases.h"

#include <fattn/check.h>

#include "core/attention/problem.h"

enum tensor_id {
    T_Q,
    T_K,
    T_V,
    T_O,
    T_LSE,
    T_BIAS,
    T_ALIBI,
    T_SINK,
    T_SEQLENS_Q,
    T_SEQLENS_K,
    T_CU_Q,
    T_CU_K,
    T_RNG_STEP,
    T_D_O,
    T_D_LSE,
    T_DELTA,
    T_DQ,
    T_DK,
    T_DV,
    T_D_BIAS,
    T_D_SINK,
    T_COUNT
};

/* The order in which results are compared: O, L, then the gradients. */
extern const enum tensor_id attention_outputs[7];
extern const char *const attention_names[T_COUNT];

enum engine {
    LIBRARY,   /* fattn_attention_fwd and _bwd, with the case's algorithm */
    REFERENCE, /* fattni_fwd_ref and fattni_bwd_ref */
    QUAD,      /* the same in 128-bit floating point */
    UNFUSED,   /* the same with S, P, dP and dS stored in the case's 16-bit dtype: the baseline */
    ON_DEVICE  /* the library through a->on_device */
};

/* Memory between guards. */
typedef struct field {
    unsigned char *memory;  /* guard, bytes, guard */
    unsigned char *initial; /* the same as attention_new left it */
    size_t size;            /* of both, guards included */
} field;

typedef struct attention attention;
struct attention {
    attention_case c; /* with its defaults filled in */
    fattn_ctx *ctx;   /* borrowed */
    fattn_attention_params params;
    fattn_attention_io io; /* points to t */
    fattn_attention_plan plan;
    fattn_tensor t[T_COUNT];
    bool present[T_COUNT];
    field fields[T_COUNT], workspace, saved;
    enum tensor_id home[T_COUNT]; /* the tensor whose field holds its memory */
    /* Copies all fields to another device, runs the pass there, copies them back. */
    fattn_status (*on_device)(attention *a, enum fattni_pass pass);
};

/* Tensors filled with normal numbers, the same for every layout and, up to rounding, dtype. */
attention *attention_new(fattn_ctx *ctx, const attention_case *c);
/* The same numbers as a, row-major, in another dtype: F64 for references. */
attention *attention_twin(const attention *a, fattn_dtype dtype);
void attention_free(attention *a);

/* Each refills its outputs first, so that it can be repeated. Backward needs a forward before. */
void attention_forward(attention *a, enum engine by);
void attention_backward(attention *a, enum engine by);
void attention_run(attention *a, enum engine by); /* both */
/* NaN, or the partial result and the gradients to add to: as attention_new left them. */
void attention_reset(attention *a);
/* Makes attention_reset fill one of them with x. */
void attention_start(attention *a, enum tensor_id id, double x);

/* All outputs of got against those of want (fattn_compare). */
void attention_match(const attention *got, const attention *want, const attention *baseline, double factor,
                     fattn_tolerance tol);
/* The same, each output within the rounding errors of arithmetic in got's dtype for these inputs
   (derived in attention.c). */
void attention_match_rounded(const attention *got, const attention *want);
/* An F32 d_o is rounded to 16 bits for products in 16 bits: makes it exact in the dtype. */
void attention_round_d_o(attention *a, fattn_dtype dtype);
/* 16 bits: each output at most 3 times as far off as the unfused computation `low` of the same case
   in that dtype, which rounds S, P, dP and dS. */
void attention_match_16_bits(const attention *got, const attention *want, const attention *low);
/* The outputs, padding and all, of two runs of one case. */
void attention_same_bits(const attention *a, const attention *b);

/* Whether the element is read or written; false past the end of a sequence. */
bool attention_in_use(const attention *a, enum tensor_id id, const int64_t *at);
/* Index number n of the tensor, row-major. */
void attention_index(const fattn_tensor *t, int64_t n, int64_t *at);
double attention_get(const fattn_tensor *t, const int64_t *at);
void attention_set(const fattn_tensor *t, const int64_t *at, double x);

fattn_ctx *attention_context(int threads); /* a CPU context; 0 = default */
/* The same with code for at most that enum fattni_isa; NULL when this machine cannot run it. */
fattn_ctx *attention_context_isa(int threads, int isa);

/* The unfused computations in 16 bits (ref_bf16.c, ref_f16.c). */
fattn_status fwd_ref_bf16(fattn_ctx *ctx, const fattni_problem *p);
fattn_status bwd_ref_bf16(fattn_ctx *ctx, const fattni_problem *p);
fattn_status fwd_ref_f16(fattn_ctx *ctx, const fattni_problem *p);
fattn_status bwd_ref_f16(fattn_ctx *ctx, const fattni_problem *p);

/* The references in 128-bit floating point (ref_quad.c). */
fattn_status fwd_ref_quad(fattn_ctx *ctx, const fattni_problem *p);
fattn_status bwd_ref_quad(fattn_ctx *ctx, const fattni_problem *p);

#endif
