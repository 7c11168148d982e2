/* What changes from step to step of an optimizer. On a GPU it lies on the device, so that a captured graph
   replays with the learning rate and step count of the day. Host and device. */
#ifndef FATTNI_AUTOGRAD_OPTIM_OPTIMIZER_STATE_H
#define FATTNI_AUTOGRAD_OPTIM_OPTIMIZER_STATE_H

#include "core/tensor/numeric.h"

#include <math.h>

enum { FATTNI_OPTIMIZER_CHUNK = 16384 }; /* elements of a task; their sums are combined in order */
/* Step counts that a caller may set: pow takes them as they are, and none overflows when it goes on. */
#define FATTNI_OPTIMIZER_STEPS ((int64_t)1 << 53)
/* Squares of larger gradients, and v/(1-beta2^t) made of them, overflow: m and v see them as this. */
#define FATTNI_OPTIMIZER_MOST_F32 1e19f
#define FATTNI_OPTIMIZER_MOST_F64 1e154
/* When squares of F64 gradients overflow, their norm is taken in this unit. */
#define FATTNI_OPTIMIZER_UNIT 0x1p600

typedef struct fattni_optimizer_state {
    double lr, norm;                /* norm of the last step */
    double clip, rate, correction2; /* of the step in progress: rate = lr/(1-beta1^t) */
    int64_t step;
    int64_t skip; /* the norm is not finite: the step only zeroes the gradients */
} fattni_optimizer_state;

/* Between norm and update. limit 0: no clip. */
FATTNI_INLINE void fattni_optimizer_begin(fattni_optimizer_state *s, double norm, double limit, double beta1,
                                          double beta2) {
    s->norm = norm;
    s->skip = !(s->norm - s->norm == 0);
    if (!s->skip) s->step += 1;
    s->clip = limit > 0 && s->norm > limit ? limit / s->norm : 1;
    s->rate = s->lr / (1 - pow(beta1, (double)s->step));
    s->correction2 = 1 / (1 - pow(beta2, (double)s->step));
}

#endif
