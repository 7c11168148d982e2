/* A GPT on the tape: pre-norm blocks, RMSNorm (Zhang and Sennrich 2019), rotary positions (Su et al.
   2021), grouped-query attention, GELU, tied embedding, no biases. Each token is mixed with the one before
   it (token shift, Peng et al. 2023), so that one attention layer can match a key with its value.

       x = E[ids];  x += W_s shift(x);   for each block:  x += W_o attention(rope(q), rope(k), v), q,k,v = W_qkv norm(x)
                                      x += W_down gelu(W_up norm(x))
       logits = norm(x) E^T */
#ifndef FATTNI_CLI_TRAIN_MODEL_H
#define FATTNI_CLI_TRAIN_MODEL_H

#include <fattn/tape.h>

typedef struct model_config {
    int64_t vocab, context, channels; /* channels = heads * head_dim, head_dim even */
    int layers, heads, kv_heads;      /* heads is a multiple of kv_heads */
    int mlp_ratio;                    /* width of the hidden layer / channels */
    int algorithm;                    /* fattn_algorithm */
    int dtype;                        /* fattn_dtype of parameters and activations; 0 = F32. Gradients
                                         of parameters are F32 */
    float dropout;                    /* of attention weights, in training */
    uint64_t seed;                    /* of initialisation and dropout */
} model_config;

typedef struct model model;

/* Weights are normal with standard deviation 1/sqrt(channels), those of projections to the residual stream
   that / sqrt(2 layers) (Radford et al. 2019), the embedding 0.02; gains 1, gradients 0. ctx must outlive
   the model. */
fattn_status model_create(fattn_ctx *ctx, const model_config *config, model **out);
void model_destroy(model *m); /* NULL is allowed */
const model_config *model_get_config(const model *m);
fattn_param *const *model_params(const model *m, int *count);
int64_t model_size(const model *m); /* elements of all parameters */

/* ids, targets: I32 [B,S], S <= context. The mean over targets >= 0 of -log p(target), a scalar.
   `step` selects the dropout masks. In 16 bits attention has FATTN_EXACT_DELTA, unless it is STANDARD. A failure sets
   the tape's status. */
fattn_var model_loss(model *m, fattn_tape *t, const fattn_tensor *ids, const fattn_tensor *targets, int64_t step);
/* The same without dropout, not meant for backward. */
fattn_var model_test_loss(model *m, fattn_tape *t, const fattn_tensor *ids, const fattn_tensor *targets);
/* [B,S,vocab], without dropout. */
fattn_var model_logits(model *m, fattn_tape *t, const fattn_tensor *ids);

#endif
