/* What tests of examples/llm.c and examples/llmq share: tensors laid out as these programs have them, the library's own
   attention on row-major copies of them, and calls that end the program. */
#ifndef TEST_PACKED_QKV_H
#define TEST_PACKED_QKV_H

#include <fattn/fattn.h>

typedef struct packed_qkv {
    fattn_dtype dtype; /* F16 or BF16 */
    int B, T, Hq, Hkv, HS;
    uint16_t *qkv, *dqkv; /* [B,T,Hq+2Hkv,HS] */
    uint16_t *o, *d_o;    /* [B,T,Hq,HS] */
    float *lse;           /* [B,Hq,T] */
} packed_qkv;

/* qkv and d_o are normal numbers, o, lse and dqkv NaN. */
packed_qkv packed_new(fattn_dtype dtype, int B, int T, int Hq, int Hkv, int HS);
void packed_free(packed_qkv *x);
/* Fails unless o and lse, and with `gradients` dqkv, have the bits of fattn_attention_fwd and _bwd, causal. */
void packed_check(const packed_qkv *x, int gradients);

/* Fails unless call(x) ends its process with EXIT_FAILURE and a text on stderr that contains `message`. */
void packed_check_failure(void (*call)(packed_qkv *x), packed_qkv *x, const char *message);

#endif
