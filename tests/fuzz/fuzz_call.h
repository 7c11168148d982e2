/* Attention calls made from bytes: sizes, features, layouts, and hostile edits of them. */
#ifndef FUZZ_CALL_H
#define FUZZ_CALL_H

#include "fuzz.h"

#include <fattn/attention.h>

#include <stdbool.h>

enum fuzz_tensor {
    Q,
    K,
    V,
    O,
    LSE,
    BIAS,
    ALIBI,
    SINK,
    SEQLENS_Q,
    SEQLENS_K,
    CU_Q,
    CU_K,
    RNG_STEP,
    D_O,
    D_LSE,
    DELTA,
    DQ,
    DK,
    DV,
    D_BIAS,
    D_SINK,
    TENSORS
};

typedef struct fuzz_call {
    fattn_ctx *ctx;
    fattn_attention_params *params; /* on the heap, struct_size bytes */
    fattn_attention_io io;          /* points to t */
    fattn_tensor t[TENSORS];
    void *memory[TENSORS]; /* exactly the span of t, when runnable; else t.data must not be accessed */
    void *before[TENSORS]; /* its bytes before the call */
    size_t bytes[TENSORS];
    bool edited;   /* a field may be inconsistent with the others */
    bool runnable; /* all tensors are small */
    double work;   /* multiplications of a pass, about */
} fuzz_call;

const char *fuzz_tensor_name(int tensor);
bool fuzz_is_output(int tensor);

/* Never fails: tensors that cannot be made are absent. Inputs are normal numbers, except those that were edited. */
void fuzz_call_open(fuzz_call *c, fuzz_input *in);
void fuzz_call_close(fuzz_call *c);

#endif
