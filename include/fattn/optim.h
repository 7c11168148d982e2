/* fattn/optim.h - AdamW (Loshchilov and Hutter 2019) and SGD with momentum, with float32 moments and, for 16-bit
   parameters, float32 masters; F64 parameters have F64 moments. Loss scaling. Learning-rate schedules. */
#ifndef FATTN_OPTIM_H
#define FATTN_OPTIM_H

#include <fattn/parallel.h>

/* Loss scaling (Micikevicius et al. 2018, arXiv 1710.03740, section 3.2), for gradients that F16 cannot hold: it has
   fewer bits below 2^-14 and 0 below 2^-25. Backward begins with the scale instead of 1, so that every gradient is
   multiplied by it, and the optimizer's step divides by it. The scale is in the device's memory, next to the
   optimizer's state: nothing waits, and a captured graph computes with the scale of the replay. A step is

       fattn_tape_backward_from(tape, loss, &scale);
       fattn_adamw_step(adamw);

   with the tensor that fattn_adamw_loss_scale has given once. Between two steps all backward passes have the same
   scale. A step is STATE while nobody has asked for that tensor: gradients without the scale would be divided by it. A
   step whose gradients have an infinity or a NaN is skipped. The dynamic rule: a skipped step halves the scale,
   `interval` steps in a row that are not skipped double it, within minimum and maximum. Skipped steps in a row have no
   limit: look at skipped_steps. Two optimizers of one backward pass need one fixed scale. */
typedef struct fattn_loss_scale_options {
    uint32_t struct_size;
    float initial;          /* 65536: for an F32 or F64 loss; F16 ends at 65504 */
    float minimum, maximum; /* 1, 2^24; 2^-126 <= minimum <= initial <= maximum <= 2^126; powers of two are exact */
    int64_t interval;       /* 2000; 0: the scale stays as it is, steps are still skipped */
} fattn_loss_scale_options;

FATTN_API void fattn_loss_scale_defaults(fattn_loss_scale_options *opt); /* fills opt->struct_size bytes */
typedef struct fattn_loss_scale_state {
    uint32_t struct_size;
    float scale;           /* of the next backward passes; 1 without loss scaling */
    int64_t finite_steps;  /* in a row, since the scale has changed; 0 to interval - 1 */
    int64_t skipped_steps; /* of all, also without loss scaling */
    int64_t interval;      /* of the options; not read by set */
} fattn_loss_scale_state;

/* How 16-bit parameters keep what an update changes. By default each has an F32 master, which is updated, and the value
   is the master rounded to nearest, or, as llm.c has it, stochastically: the first updates, which are below half of the
   distance to the next number, then show in the values at once instead of when they have added up. Without masters, 4
   bytes per parameter less, an update is computed in F32 from the value, and rounded: to nearest, it has no effect as
   long as it is below half of the distance to the next number (in BF16 2^-9 of the parameter); stochastically, up with
   a probability equal to the fraction of that distance, so that its expected value is exact and small updates add up
   (Gupta et al. 2015, arXiv 1502.02551). Infinities and NaN, and numbers beyond the largest finite one, are rounded to
   nearest: chance makes no infinity.

   The random bits are a function of (seed, step count, index of the parameter, element), by Philox: the same on every
   device and on any number of threads and ranks, and after a resume those of an uninterrupted run. The seed may also be
   that of dropout. A step that is skipped takes none. Parameters in F32 and F64 never have masters. */
enum {
    FATTN_OPTIM_NO_MASTERS = 1u << 0,         /* 16-bit parameters are updated themselves */
    FATTN_OPTIM_STOCHASTIC_ROUNDING = 1u << 1 /* of 16-bit parameters, with masters and without */
};

typedef struct fattn_adamw fattn_adamw;
/* Zero means zero here: start from fattn_adamw_defaults(&opt). */
typedef struct fattn_adamw_options {
    uint32_t struct_size;
    float beta1, beta2, eps, weight_decay;      /* 0.9 0.999 1e-8 0.01 */
    float max_grad_norm;                        /* global 2-norm to clip to; 0 = no clip */
    const fattn_loss_scale_options *loss_scale; /* NULL: none; copied */
    fattn_reducer *owners; /* NULL: all state is here. Else a reducer to owners, of the same params */
    uint32_t flags;        /* FATTN_OPTIM_* */
    uint32_t reserved;
    uint64_t seed; /* of stochastic rounding; without it 0 */
} fattn_adamw_options;

FATTN_API void fattn_adamw_defaults(fattn_adamw_options *opt); /* fills opt->struct_size bytes */
/* With owners the ranks divide the state (Rajbhandari et al. 2020, arXiv 1910.02054, stage 1): each keeps moments and
   masters of its own elements (fattn_reducer_share). A step is then collective, after fattn_reducer_finish: the norm of
   each piece of the gradients comes from its owner, and is added up as without owners, to the same bits; so all ranks
   clip, skip and scale alike; owners update their elements, then all get the values. Parameters and state have the same
   bits as without owners. */
/* Keeps the pointers, which must differ; frozen params are skipped, and must stay frozen.
   Learning rate 1e-3 until set. opt NULL = defaults. ABI, ARG: the options are not as described, as are unknown flags,
   or a seed without stochastic rounding; NOMEM. */
FATTN_API FATTN_CHECKED fattn_status fattn_adamw_create(fattn_ctx *ctx, const fattn_adamw_options *opt,
                                                        fattn_param *const *params, int n, fattn_adamw **out);
/* For the steps enqueued from here on, and for replays of captured ones: lr, the step count and the loss scale are in
   device memory. Enqueued; recorded in a graph, it sets this lr in every replay. ARG unless lr is finite and at least
   0. */
FATTN_API FATTN_CHECKED fattn_status fattn_adamw_set_lr(fattn_adamw *a, float lr);
/* Clip, update, zero the gradients but those of FATTN_PARAM_ONE_PASS: g = gradient / loss scale; g *= min(1,
   max_grad_norm/|g|); p *= 1 - lr*weight_decay unless NO_DECAY; m = beta1 m + (1-beta1) g; v = beta2 v + (1-beta2) g^2;
   p -= lr (m/(1-beta1^t)) / (sqrt(v/(1-beta2^t)) + eps). Elements of g are clamped to +-1e19 (F64: +-1e154), or v
   would stay infinite. |g| is summed without overflow; when it is not finite, the step is skipped: parameters, state
   and step count stay as they are and gradients are only zeroed; fattn_adamw_grad_norm returns that norm. Then the loss
   scale follows its rule. STATE: there is one, and nobody has asked for its tensor. */
FATTN_API FATTN_CHECKED fattn_status fattn_adamw_step(fattn_adamw *a);
/* 2-norm of all gradients at the last step, before clipping, without the loss scale; syncs. STATE before the first. */
FATTN_API FATTN_CHECKED fattn_status fattn_adamw_grad_norm(fattn_adamw *a, double *out);
/* View of the same number, F64 of no dimensions on the context's device, for a copy that nobody waits for; valid until
   destroy, not to be written; 0 before the first step. ARG. */
FATTN_API FATTN_CHECKED fattn_status fattn_adamw_norm_view(fattn_adamw *a, fattn_tensor *view);
/* View of the scale, F32 of no dimensions on the context's device, for fattn_tape_backward_from; valid until destroy,
   not to be written. Without loss scaling it is 1. */
FATTN_API FATTN_CHECKED fattn_status fattn_adamw_loss_scale(fattn_adamw *a, fattn_tensor *view);
/* After all steps so far; syncs. */
FATTN_API FATTN_CHECKED fattn_status fattn_adamw_get_loss_scale(fattn_adamw *a, fattn_loss_scale_state *out);
/* Not between backward and its step. ARG: scale is not in minimum..maximum, finite_steps not in 0..interval-1 (interval
   0: not 0), or skipped_steps not in 0..2^53. */
FATTN_API FATTN_CHECKED fattn_status fattn_adamw_set_loss_scale(fattn_adamw *a, const fattn_loss_scale_state *state);
typedef enum fattn_adam_state { FATTN_ADAM_M = 1, FATTN_ADAM_V, FATTN_ADAM_MASTER } fattn_adam_state;
/* View of the state of params[i], for checkpoints; MASTER exists for 16-bit parameters only, without NO_MASTERS.
   STATE: there is none, or there are owners. */
FATTN_API FATTN_CHECKED fattn_status fattn_adamw_state(fattn_adamw *a, int i, fattn_adam_state which,
                                                       fattn_tensor *view);
/* The same as copies: `to` and `from` have the shape of params[i], are row-major, and may be in host memory. With
   owners get is collective, writes on rank 0 only, and does not read the other ranks' `to`; set takes this rank's
   elements. */
FATTN_API FATTN_CHECKED fattn_status fattn_adamw_get_state(fattn_adamw *a, int i, fattn_adam_state which,
                                                           const fattn_tensor *to);
FATTN_API FATTN_CHECKED fattn_status fattn_adamw_set_state(fattn_adamw *a, int i, fattn_adam_state which,
                                                           const fattn_tensor *from);
FATTN_API fattn_reducer *fattn_adamw_owners(const fattn_adamw *a); /* that of the options, as are these */
FATTN_API uint32_t fattn_adamw_flags(const fattn_adamw *a);
FATTN_API uint64_t fattn_adamw_seed(const fattn_adamw *a);
FATTN_API fattn_param *fattn_adamw_param(const fattn_adamw *a, int i); /* params[i]; NULL: i is not in 0..n-1 */
FATTN_API FATTN_CHECKED fattn_status fattn_adamw_get_step(fattn_adamw *a, int64_t *t);
/* t in 0..2^53: the integers that a double represents. */
FATTN_API FATTN_CHECKED fattn_status fattn_adamw_set_step(fattn_adamw *a, int64_t t);
FATTN_API void fattn_adamw_destroy(fattn_adamw *a); /* NULL is allowed */

typedef struct fattn_sgd fattn_sgd;
/* All zero: plain gradient descent. */
typedef struct fattn_sgd_options {
    uint32_t struct_size;
    float momentum;                             /* in [0, 1) */
    float weight_decay;                         /* added to the gradient: g + weight_decay p */
    float max_grad_norm;                        /* global 2-norm to clip to; 0 = no clip */
    int32_t nesterov;                           /* not 0: look ahead; momentum must be above 0 */
    uint32_t flags;                             /* FATTN_OPTIM_* */
    const fattn_loss_scale_options *loss_scale; /* NULL: none; copied */
    uint64_t seed;                              /* of stochastic rounding; without it 0 */
} fattn_sgd_options;

/* As fattn_adamw_create, with the same learning rate until set. */
FATTN_API FATTN_CHECKED fattn_status fattn_sgd_create(fattn_ctx *ctx, const fattn_sgd_options *opt,
                                                      fattn_param *const *params, int n, fattn_sgd **out);
FATTN_API FATTN_CHECKED fattn_status fattn_sgd_set_lr(fattn_sgd *s, float lr); /* as AdamW's */
/* Clip, update, zero the gradients but those of FATTN_PARAM_ONE_PASS: g = gradient / loss scale; g *= min(1,
   max_grad_norm/|g|); g += weight_decay p unless NO_DECAY; u = momentum u + g, from u = 0; p -= lr u, with nesterov
   p -= lr (g + momentum u) (Sutskever et al. 2013). Steps are skipped, and the loss scale changes, as in
   fattn_adamw_step. */
FATTN_API FATTN_CHECKED fattn_status fattn_sgd_step(fattn_sgd *s);
FATTN_API FATTN_CHECKED fattn_status fattn_sgd_grad_norm(fattn_sgd *s, double *out); /* as AdamW's, and so are these */
FATTN_API FATTN_CHECKED fattn_status fattn_sgd_norm_view(fattn_sgd *s, fattn_tensor *view);
FATTN_API FATTN_CHECKED fattn_status fattn_sgd_loss_scale(fattn_sgd *s, fattn_tensor *view);
FATTN_API FATTN_CHECKED fattn_status fattn_sgd_get_loss_scale(fattn_sgd *s, fattn_loss_scale_state *out);
FATTN_API FATTN_CHECKED fattn_status fattn_sgd_set_loss_scale(fattn_sgd *s, const fattn_loss_scale_state *state);
typedef enum fattn_sgd_tensor { FATTN_SGD_MOMENTUM = 1, FATTN_SGD_MASTER } fattn_sgd_tensor;
/* View of u or of the master of params[i], for checkpoints. STATE: without momentum there is no u, and only 16-bit
   parameters have masters, without NO_MASTERS. */
FATTN_API FATTN_CHECKED fattn_status fattn_sgd_state(fattn_sgd *s, int i, fattn_sgd_tensor which, fattn_tensor *view);
FATTN_API uint32_t fattn_sgd_flags(const fattn_sgd *s);
FATTN_API uint64_t fattn_sgd_seed(const fattn_sgd *s);
FATTN_API float fattn_sgd_momentum(const fattn_sgd *s); /* of the options; 0: there is no u */
FATTN_API fattn_param *fattn_sgd_param(const fattn_sgd *s, int i);
/* Of the updates so far, which stochastic rounding counts; as AdamW's. */
FATTN_API FATTN_CHECKED fattn_status fattn_sgd_get_step(fattn_sgd *s, int64_t *t);
FATTN_API FATTN_CHECKED fattn_status fattn_sgd_set_step(fattn_sgd *s, int64_t t);
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
