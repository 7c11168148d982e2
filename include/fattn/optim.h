/* fattn/optim.h - AdamW (Loshchilov and Hutter 2019) with float32 moments and, for 16-bit
   parameters, float32 masters; F64 parameters have F64 moments. */
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

#endif
