/* The argument of the kernels that make 8-bit copies (quantize.cu). */
#ifndef FATTNI_CORE_FP8_FP8_ARGS_H
#define FATTNI_CORE_FP8_FP8_ARGS_H

#include "core/cuda/args.h"

enum {
    FATTNI_FP8_THREADS = 256,
    FATTNI_FP8_CHANNELS = 512,              /* of k and v, at most: threads of fattn_fp8_scales */
    FATTNI_FP8_ROWS = 4,                    /* of q or k that lanes take at once */
    FATTNI_FP8_KEYS = 128,                  /* of a partial sum: FATTNI_FP8_CHUNK */
    FATTNI_FP8_WORDS = FATTNI_FP8_KEYS / 4, /* of a channel of V^T in shared memory */
    FATTNI_FP8_SCALED = 32,                 /* keys of a scale: FATTNI_FP8_SCALED_KEYS */
    FATTNI_FP8_KEYS_OF_ELEMENT = 8,         /* of k_scale: FATTNI_FP8_KEYS_OF_SCALE */
    FATTNI_FP8_KIND_F32 = 2                 /* KIND_F32: a.kind of F32 q, k and v */
};

typedef struct fattni_fp8_args {
    fattni_attention_args a; /* q, k, v, lengths */
    fattni_view q8, k8, v8;  /* codes; v8: b, h and channel */
    fattni_view q_scale, q_shift, k_scale, v_scale, v_mean;
    fattni_view partials;       /* b, h and chunk: [3][D + Dv] */
    int32_t chunks;             /* of a sequence, at most */
    int32_t lanes_k, lanes_v;   /* that share a row of q or k, and of v: 8 channels each, a power of two */
    int32_t q_blocks, k_blocks; /* of a sequence's head, at most */
    int32_t hadamard, integers; /* FATTN_FP8_HADAMARD, FATTN_FP8_INT8 */
    float hadamard_scale;       /* 1 / sqrt(D) */
    uint64_t frequency[8][FATTNI_FP8_CHANNELS / 16]; /* of channel 8 n + e of q and k: [e][n] (rope.h) */
} fattni_fp8_args;

#endif
