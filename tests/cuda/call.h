/* One attention call with its own row-major tensors, without a reference: for tests that compare runs with
   each other. Fails with an error message and exit(1), so that programs without Criterion can use it, too.
   Works on any context. */
#ifndef TEST_CUDA_CALL_H
#define TEST_CUDA_CALL_H

#include "cases.h"

#include <stdbool.h>
#include <stddef.h>

/* FATTN_TEST_ARCH of the environment, 75, 80, 86 or 89, or 0: for arch_cap, so that contexts have the kernels and the
   shared memory of such a GPU. Whether it, or device 0, takes BF16. */
int call_arch(void);
bool call_has_bf16(void);

enum call_tensor {
    CALL_Q,
    CALL_K,
    CALL_V,
    CALL_O,
    CALL_LSE,
    CALL_BIAS,
    CALL_ALIBI,
    CALL_SINK,
    CALL_SEQLENS_Q,
    CALL_SEQLENS_K,
    CALL_CU_Q,
    CALL_CU_K,
    CALL_RNG_STEP,
    CALL_D_O,
    CALL_D_LSE,
    CALL_DELTA,
    CALL_DQ,
    CALL_DK,
    CALL_DV,
    CALL_D_BIAS,
    CALL_D_SINK,
    CALL_COUNT
};

typedef struct call {
    fattn_ctx *ctx;
    fattn_attention_params params;
    fattn_attention_io io; /* points to t */
    fattn_attention_plan plan;
    fattn_tensor t[CALL_COUNT], workspace, saved;
} call;

/* Of the case's fields: sizes, dtype, flags, numbers, bias, alibi, sink, d_lse, rng_step, wide,
   lengths. Inputs are normal numbers, outputs and the workspace NaN. */
call *call_new(fattn_ctx *ctx, const attention_case *c);
void call_free(call *c);

void call_forward(call *c);
void call_backward(call *c);
void call_run(call *c); /* both */

/* All elements of a tensor, row-major, as double; the caller frees them. Waits for the stream. */
double *call_read(call *c, enum call_tensor id);
void call_write(call *c, enum call_tensor id, const double *x);
void call_fill(call *c, enum call_tensor id, double x);

/* A number made of all bits of the tensors first to last. Waits for the stream. */
uint64_t call_bits(call *c, enum call_tensor first, enum call_tensor last);

/* Exits with the context's error message unless s is FATTN_OK. */
void call_must(fattn_ctx *ctx, fattn_status s, const char *what);

#endif
