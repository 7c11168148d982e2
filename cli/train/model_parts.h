/* What the architectures of model.h share: parameters made from a table, attention with and without a cache, and the
   four functions that differ. For model*.c alone. */
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

/* What a forward pass is for: training, where attention drops weights with masks of `step`, or generation, where the
   tokens follow those of a cache. */
typedef struct model_pass {
    bool training;
    const fattn_tensor *step; /* in training; NULL: 0 */
    model_cache *cache;       /* NULL: the tokens begin a sequence */
} model_pass;

typedef struct model_arch {
    int (*count)(const model_config *c); /* of parameters; number 0 is the embedding */
    int late;                            /* of the first, whose gradients backward completes with its last ops */
    param_shape (*shape)(const model_config *c, int index);
    /* Normal numbers for the parameters with std > 0; the others have their mean. */
    fattn_status (*init)(model *m);
    /* ids [B,S] to the last norm's output [B,S,C]. */
    fattn_var (*trunk)(model *m, fattn_tape *t, const fattn_tensor *ids, fattn_var embedding, const model_pass *pass);
} model_arch;

struct model {
    fattn_ctx *ctx;
    model_config config;
    const model_arch *arch;
    int n_params;
    fattn_param *params;        /* n_params of them, embedding first */
    fattn_param **list;         /* their addresses */
    fattn_tensor values, grads; /* the memory of all of them, one behind the other: ranks add up gradients that lie so
                                   together */
    char (*names)[MODEL_NAME_BYTES];
    fattn_tensor positions; /* GPT2: I32 [positions], 0, 1, ... */
};

extern const model_arch model_gpt2;

typedef struct model_kv {
    fattn_tensor k, v; /* [1,G,context,D] */
} model_kv;

/* What a token changes is on the device, so that a recorded pass of one token can be launched for each. */
struct model_cache {
    fattn_ctx *ctx;
    int layers;
    model_kv *kv;               /* [layers] */
    fattn_tensor before;        /* SHIFT: the last token's embedding, [1,1,C]; 0 in the beginning */
    fattn_tensor length, after; /* I32 [1]: tokens before and after a pass */
    int64_t n;                  /* the host's copy of `length` */
};

/* Before and after a pass of S tokens; add moves `length` on. */
fattn_status model_cache_open(model_cache *cache, int64_t S);
fattn_status model_cache_add(model_cache *cache, int64_t S);
/* I32 [S]: the positions of a pass's tokens. */
fattn_tensor model_positions(const model *m, const model_pass *pass, int64_t S);

/* q [B,H,S,D], k, v [B,G,S,D]: causal attention, in training with the config's dropout and, where o has 16 bits, an
   exact delta, unless it is STANDARD. rope_base: q and k are turned by their positions before; 0: they are not. With a
   cache k and v are appended to it, and q attends to all it then has. */
fattn_var model_attend(const model *m, fattn_tape *t, fattn_var q, fattn_var k, fattn_var v, float rope_base,
                       const model_pass *pass, int layer);

#endif
