/* Two GPTs on the tape. ARCH_GPT2 is GPT-2 exactly as PyTorch and llm.c train it; model_gpt2.c has its equations.
   ARCH_SHIFT is this program's own: pre-norm blocks, RMSNorm (Zhang and Sennrich 2019), rotary positions (Su et al.
   2021), grouped-query attention, GELU, tied embedding, no biases. Each token is mixed with the one before
   it (token shift, Peng et al. 2023), so that one attention layer can match a key with its value.

       x = E[ids];  x += W_s shift(x);   for each block:  x += W_o attention(rope(q), rope(k), v), q,k,v = W_qkv norm(x)
                                      x += W_down gelu(W_up norm(x))
       logits = norm(x) E^T */
#ifndef FATTNI_CLI_TRAIN_MODEL_H
#define FATTNI_CLI_TRAIN_MODEL_H

#include <fattn/tape.h>

#include <stdbool.h>

enum { ARCH_SHIFT, ARCH_GPT2 };

typedef struct model_config {
    int arch;
    int64_t vocab, context, channels; /* channels = heads * head_dim, head_dim even for ARCH_SHIFT */
    int64_t positions;                /* GPT2: rows of the table of positions, >= context; 0 = context */
    int layers, heads, kv_heads;      /* heads is a multiple of kv_heads, for GPT2 the same */
    int mlp_ratio;                    /* width of the hidden layer / channels */
    int algorithm;                    /* fattn_algorithm */
    int dtype;                        /* fattn_dtype of parameters and activations; 0 = F32. Gradients
                                         of parameters are F32 */
    bool frozen;                      /* parameters without gradients: a model that is not trained */
    bool fp8;                         /* in training: FATTN_FP8; not with STANDARD or dropout */
    bool fp8_renew, fp8_int8;         /* with fp8: FATTN_FP8_RENEW, FATTN_FP8_INT8 */
    float dropout;                    /* of attention weights, in training */
    uint64_t seed;                    /* of initialisation and dropout */
} model_config;

typedef struct model model;

/* Rows of the embedding, which is also the head: vocab; for GPT2 rounded up to a multiple of 128. The rows beyond are
   0 and stay 0: no softmax and no gradient counts them. */
int64_t model_columns(const model_config *c);

/* SHIFT: weights are normal with standard deviation 1/sqrt(channels), those of projections to the residual stream
   that / sqrt(2 layers) (Radford et al. 2019), the embedding 0.02. GPT2: the normal numbers of PyTorch's and llm.c's
   initialisation for this seed, 0.02 and for those projections 0.02 / sqrt(2 layers). Gains 1, biases and gradients 0.
   ctx must outlive the model. */
fattn_status model_create(fattn_ctx *ctx, const model_config *config, model **out);
void model_destroy(model *m); /* NULL is allowed */
const model_config *model_get_config(const model *m);
fattn_param *const *model_params(const model *m, int *count);
int model_late(const model *m);     /* so many of the first params get their gradients last of all (fattn/parallel.h) */
int64_t model_size(const model *m); /* elements of all parameters */

/* ids, targets: I32 [B,S], S <= context. The mean over targets >= 0 of -log p(target), a scalar.
   *step, an I32 number on the context's device, selects the dropout masks; it is read when the pass runs, also when a
   recorded one is launched. NULL: 0. In 16 bits attention has FATTN_EXACT_DELTA, unless it is STANDARD or FP8. A
   failure sets the tape's status. */
fattn_var model_loss(model *m, fattn_tape *t, const fattn_tensor *ids, const fattn_tensor *targets,
                     const fattn_tensor *step);
/* The same without dropout, not meant for backward. */
fattn_var model_test_loss(model *m, fattn_tape *t, const fattn_tensor *ids, const fattn_tensor *targets);
/* The same for each row of ids: losses[B] on the host; 0 for a row without targets. */
fattn_status model_row_losses(model *m, fattn_tape *t, const fattn_tensor *ids, const fattn_tensor *targets,
                              double *losses);
/* [B,S,model_columns], without dropout. */
fattn_var model_logits(model *m, fattn_tape *t, const fattn_tensor *ids);

/* What a model keeps of one sequence to continue it: keys and values of every layer, context tokens at most. A token
   takes 2 layers kv_heads head_dim numbers of the model's dtype. */
typedef struct model_cache model_cache;
fattn_status model_cache_create(model *m, model_cache **out);
void model_cache_destroy(model_cache *cache); /* NULL is allowed; before the model */
void model_cache_clear(model_cache *cache);
int64_t model_cache_tokens(const model_cache *cache);
/* The logits, [1,1,model_columns] of the model's dtype, of the last of ids [1,S], which follow the cache's tokens and
   are added to them: a view into t, valid until it is reset. The same as model_logits of all these tokens, within
   rounding. Not for backward. After a failure, SHAPE when the tokens are more than the context among others, the cache
   must be cleared.

   One token behind others (S 1, the cache not empty) depends on device memory alone, and its work on nothing that
   changes from token to token: on a GPU it can be recorded (fattn/graph.h). Each launch then adds a token, except for
   the first one, which has been counted when it was recorded; model_cache_count_launch says so, SHAPE: the cache is
   full. */
fattn_status model_next_logits(model *m, fattn_tape *t, const fattn_tensor *ids, model_cache *cache,
                               fattn_tensor *logits);
fattn_status model_cache_count_launch(model_cache *cache);

#endif
