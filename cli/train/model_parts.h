/* What the architectures of model.h share: parameters made from a table, attention's parameters, and the four functions
   that differ. For model.c and model_gpt2.c alone. */
#ifndef FATTNI_CLI_TRAIN_MODEL_PARTS_H
#define FATTNI_CLI_TRAIN_MODEL_PARTS_H

#include "cli/train/model.h"

#include <stdbool.h>

enum { MODEL_NAME_BYTES = 32 };

typedef struct param_shape {
    int ndim;
    int64_t size[2];
    double mean, std; /* of its first values; std 0: a gain or a bias, without weight decay */
    char name[MODEL_NAME_BYTES];
} param_shape;

typedef struct model_arch {
    int (*count)(const model_config *c); /* of parameters; number 0 is the embedding */
    param_shape (*shape)(const model_config *c, int index);
    /* Normal numbers for the parameters with std > 0; the others have their mean. */
    fattn_status (*init)(model *m);
    /* ids [B,S] to the last norm's output [B,S,C]. training: attention drops weights with masks of `step`. */
    fattn_var (*trunk)(model *m, fattn_tape *t, const fattn_tensor *ids, fattn_var embedding, bool training,
                       int64_t step);
} model_arch;

struct model {
    fattn_ctx *ctx;
    model_config config;
    const model_arch *arch;
    int n_params;
    fattn_param *params; /* n_params of them, embedding first */
    fattn_param **list;  /* their addresses */
    char (*names)[MODEL_NAME_BYTES];
    fattn_tensor positions; /* GPT2: I32 [positions], 0, 1, ... */
};

extern const model_arch model_gpt2;

/* Causal; in training with the config's dropout and, where o has 16 bits, an exact delta, unless it is STANDARD. */
fattn_attention_params model_attention(const model_config *c, bool training, int64_t step, int layer);

#endif
