/* Attention calls made from bytes: sizes, features, layouts, and hostile edits of them. */
#ifndef FUZZ_CALL_H
#define FUZZ_CALL_H

#include "fuzz.h"

#include <fattn/attention.h>

#include <stdbool.h>

enum fuzz_tensor {
    Q, K, V, O, LSE, BIAS, ALIBI, SINK, SEQLENS_Q, SEQLENS_K, CU_Q, CU_K, RNG_STEP, D_O, D_LSE,
    DELTA, DQ, DK, DV, D_BIAS, D_SINK, TENSORS
};

typedef struct fuzz_call {
    fattn_ctx *ctx;
    fattn_attention_params *params; /* on the heap, as long as its struct_size says */
    fattn_attention_io io;          /* points to t */
    fattn_tensor t[TENSORS];
    void *memory[TENSORS]; /* just what t spans, when runnable; else t.data may not be touched */
    void *before[TENSORS]; /* its bytes before the call */
    size_t bytes[TENSORS];
    bool edited;   /* something does not fit the rest any more */
    bool runnable; /* all tensors are small */
    double work;   /* multiplications of a pass, about */
} fuzz_call;

const char *fuzz_tensor_name(int tensor);
bool fuzz_is_output(int tensor);

/* Never fails: what cannot be had is absent. Inputs are normal numbers, but where they are spoiled. */
void fuzz_call_open(fuzz_call *c, fuzz_input *in);
void fuzz_call_close(fuzz_call *c);

#endif
