/* fattn/optim.h - AdamW (Loshchilov and Hutter 2019) and SGD with momentum, with float32 moments and, for 16-bit
   parameters, float32 masters; F64 parameters have F64 moments. Learning-rate schedules. */
#ifndef FATTN_OPTIM_H
#define FATTN_OPTIM_H

#include <fattn/tape.h>

typedef struct fattn_adamw fattn_adamw;
/* Zero means zero here: start from fattn_adamw_defaults(&opt). */
typedef struct fattn_adamw_options {
    uint32_t struct_size;
    float beta1, beta2, eps, weight_decay; /* 0.9 0.999 1e-8 0.01 */
    float max_grad_norm;                   /* global 2-norm to clip to; 0 = no clip */
} fattn_adamw_options;

FATTN_API void fattn_adamw_defaults(fattn_adamw_options *opt); /* fills opt->struct_size bytes */
/* Keeps the pointers, which must differ; frozen params are skipped, and must stay frozen.
   Learning rate 1e-3 until set. opt NULL = defaults. */
FATTN_API FATTN_CHECKED fattn_status fattn_adamw_create(fattn_ctx *ctx, const fattn_adamw_options *opt,
                                                        fattn_param *const *params, int n, fattn_adamw **out);
/* lr and the step count are in device memory, so that captured graphs replay correctly. */
FATTN_API FATTN_CHECKED fattn_status fattn_adamw_set_lr(fattn_adamw *a, float lr);
/* Clip, update, zero the gradients: g *= min(1, max_grad_norm/|g|); p *= 1 - lr*weight_decay unless
   NO_DECAY; m = beta1 m + (1-beta1) g; v = beta2 v + (1-beta2) g^2; p -= lr (m/(1-beta1^t)) /
   (sqrt(v/(1-beta2^t)) + eps). Elements of g are clamped to +-1e19 (F64: +-1e154): otherwise v would
   stay infinite. |g| is summed without overflow; when it is not finite, parameters, state and step count
   stay as they are and only the gradients are zeroed; fattn_adamw_grad_norm returns that norm. */
FATTN_API FATTN_CHECKED fattn_status fattn_adamw_step(fattn_adamw *a);
/* 2-norm of all gradients at the last step, before clipping; syncs. STATE before the first. */
FATTN_API FATTN_CHECKED fattn_status fattn_adamw_grad_norm(fattn_adamw *a, double *out);
typedef enum fattn_adam_state { FATTN_ADAM_M = 1, FATTN_ADAM_V, FATTN_ADAM_MASTER } fattn_adam_state;
/* View of the state of params[i], for checkpoints; MASTER exists for 16-bit parameters only. */
FATTN_API FATTN_CHECKED fattn_status fattn_adamw_state(fattn_adamw *a, int i, fattn_adam_state which,
                                                       fattn_tensor *view);
FATTN_API FATTN_CHECKED fattn_status fattn_adamw_get_step(fattn_adamw *a, int64_t *t);
/* t in 0..2^53: the integers that a double represents. */
FATTN_API FATTN_CHECKED fattn_status fattn_adamw_set_step(fattn_adamw *a, int64_t t);
FATTN_API void fattn_adamw_destroy(fattn_adamw *a); /* NULL is allowed */

typedef struct fattn_sgd fattn_sgd;
/* All zero: plain gradient descent. */
typedef struct fattn_sgd_options {
    uint32_t struct_size;
    float momentum;      /* in [0, 1) */
    float weight_decay;  /* added to the gradient: g + weight_decay p */
    float max_grad_norm; /* global 2-norm to clip to; 0 = no clip */
    int32_t nesterov;    /* not 0: look ahead; momentum must be above 0 */
} fattn_sgd_options;

/* As fattn_adamw_create, with the same learning rate until set. */
FATTN_API FATTN_CHECKED fattn_status fattn_sgd_create(fattn_ctx *ctx, const fattn_sgd_options *opt,
                                                      fattn_param *const *params, int n, fattn_sgd **out);
FATTN_API FATTN_CHECKED fattn_status fattn_sgd_set_lr(fattn_sgd *s, float lr); /* in device memory, as AdamW's */
/* Clip, update, zero the gradients: g *= min(1, max_grad_norm/|g|); g += weight_decay p unless NO_DECAY;
   u = momentum u + g, from u = 0; p -= lr u, with nesterov p -= lr (g + momentum u) (Sutskever et al. 2013). Gradients
   whose norm is not finite are zeroed, and nothing else changes, as in fattn_adamw_step. */
FATTN_API FATTN_CHECKED fattn_status fattn_sgd_step(fattn_sgd *s);
FATTN_API FATTN_CHECKED fattn_status fattn_sgd_grad_norm(fattn_sgd *s, double *out); /* as fattn_adamw_grad_norm */
typedef enum fattn_sgd_tensor { FATTN_SGD_MOMENTUM = 1, FATTN_SGD_MASTER } fattn_sgd_tensor;
/* View of u or of the master of params[i], for checkpoints: the whole state. STATE: without momentum there is no u, and
   only 16-bit parameters have masters. */
FATTN_API FATTN_CHECKED fattn_status fattn_sgd_state(fattn_sgd *s, int i, fattn_sgd_tensor which, fattn_tensor *view);
FATTN_API void fattn_sgd_destroy(fattn_sgd *s); /* NULL is allowed */

/* After the warm-up, with r = (step - warmup) / (steps - warmup), and 1 from steps on. */
typedef enum fattn_schedule_kind {
    FATTN_SCHEDULE_CONSTANT = 1, /* lr; steps and min_lr are not used */
    FATTN_SCHEDULE_COSINE,       /* min_lr + (1 + cos(pi r))/2 (lr - min_lr) */
    FATTN_SCHEDULE_LINEAR,       /* min_lr + (1 - r) (lr - min_lr) */
    FATTN_SCHEDULE_WSD           /* warm-up, stable, decay: lr up to step d = floor(0.8 steps), then
                                    min_lr + (1 - sqrt((step - d)/(steps - d))) (lr - min_lr) */
} fattn_schedule_kind;
typedef struct fattn_schedule {
    uint32_t struct_size;
    int32_t kind;   /* fattn_schedule_kind */
    int64_t warmup; /* the first steps, of lr (step + 1) / warmup */
    int64_t steps;  /* of the whole run, warm-up included */
    float lr, min_lr;
} fattn_schedule;
/* *lr = the rate of a step, counted from 0: a function of its arguments alone. ctx receives the error message. ARG:
   unknown kind, rates that are not finite with 0 <= min_lr <= lr, negative counts, warmup > steps. */
FATTN_API FATTN_CHECKED fattn_status fattn_schedule_lr(fattn_ctx *ctx, const fattn_schedule *s, int64_t step,
                                                       float *lr);

#endif
