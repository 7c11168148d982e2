/* One attention layer on random numbers: its plan, which needs no memory, its tensors and its passes. Uses the
   public attention calls only. */
#ifndef FATTNI_CLI_MEASURE_LAYER_H
#define FATTNI_CLI_MEASURE_LAYER_H

#include <fattn/attention.h>

#include <stdbool.h>

typedef struct layer_shape {
    fattn_dtype dtype;
    int64_t batch, heads, kv_heads, rows, keys, head_dim;
} layer_shape;

enum { LAYER_Q, LAYER_K, LAYER_V, LAYER_O, LAYER_LSE, LAYER_SAVED, LAYER_FORWARD };
enum { LAYER_DO = LAYER_FORWARD, LAYER_DQ, LAYER_DK, LAYER_DV, LAYER_TENSORS };

typedef struct layer { /* points into itself: do not copy */
    fattn_ctx *ctx;
    fattn_attention_params params;
    fattn_attention_io io;
    fattn_attention_plan plan;
    fattn_tensor tensor[LAYER_TENSORS]; /* below LAYER_FORWARD: kept from forward to backward */
    fattn_tensor workspace;
    size_t predicted_peak; /* bytes of a step: layer_start, _forward, _backward */
} layer;

/* Fills plan and predicted_peak; allocates nothing. Causal keys are bottom-right aligned. */
fattn_status layer_plan(layer *l, fattn_ctx *ctx, const layer_shape *shape, fattn_algorithm algorithm, uint32_t flags);
/* Allocates and fills q, k, v. */
fattn_status layer_start(layer *l);
/* Allocates o, lse, saved once, and the workspace for this call only. */
fattn_status layer_forward(layer *l);
/* The same with dO (random) and the gradients. */
fattn_status layer_backward(layer *l);
void layer_free(layer *l); /* also after a failure */

#endif
