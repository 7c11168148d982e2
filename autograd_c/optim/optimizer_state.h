/* What changes from step to step of an optimizer. On a GPU it lies on the device, so that a captured graph
   replays with the learning rate and step count of the day. Host and device. */
#ifndef FATTNI_AUTOGRAD_OPTIM_OPTIMIZER_STATE_H
#define FATTNI_AUTOGRAD_OPTIM_OPTIMIZER_STATE_H

#include "core/tensor/numeric.h"

#include <math.h>

enum { FATTNI_OPTIMIZER_CHUNK = 8192 }; /* elements of a task; their sums are combined in order */
/* Step counts that a caller may set: pow takes them as they are, and none overflows when it goes on. */
#define FATTNI_OPTIMIZER_STEPS ((int64_t)1 << 53)
/* Squares of larger gradients, and v/(1-beta2^t) made of them, overflow: m and v see them as this. */
#define FATTNI_OPTIMIZER_MOST_F32 1e19f
#define FATTNI_OPTIMIZER_MOST_F64 1e154
/* When squares of F64 gradients overflow, their norm is taken in this unit. */
#define FATTNI_OPTIMIZER_UNIT 0x1p600

/* When the loss scale changes, and how far. */
typedef struct fattni_loss_scaling {
    float minimum, maximum;
    int64_t interval; /* 0: never */
} fattni_loss_scaling;

typedef struct fattni_optimizer_state {
    double lr, norm;                  /* norm of the last step, of the gradients without the scale */
    double factor, rate, correction2; /* of the step in progress: factor = clip/scale, rate = lr/(1-beta1^t) */
    int64_t step;
    int64_t skip;            /* the norm is not finite: the step updates nothing */
    int64_t finite, skipped; /* steps: in a row, since the scale changed; of all */
    float scale;             /* of the loss, and so of the gradients, until the next step; 1: none */
    int32_t arrived;         /* on a GPU: blocks of a launch that have written their norms; 0 between launches */
} fattni_optimizer_state;

/* What a caller sets; what is negative stays as it is. */
typedef struct fattni_optimizer_change {
    double lr;
    int64_t step, finite, skipped;
    float scale;
    int32_t reserved;
} fattni_optimizer_change;

FATTNI_INLINE void fattni_optimizer_apply(fattni_optimizer_state *s, const fattni_optimizer_change *c) {
    if (c->lr >= 0) s->lr = c->lr;
    if (c->step >= 0) s->step = c->step;
    if (c->finite >= 0) s->finite = c->finite;
    if (c->skipped >= 0) s->skipped = c->skipped;
    if (c->scale >= 0) s->scale = c->scale;
}

/* The dynamic rule, after a step whose gradients were, or were not, finite. */
FATTNI_INLINE void fattni_loss_scale_update(fattni_optimizer_state *s, const fattni_loss_scaling *r) {
    s->skipped += s->skip;
    if (r->interval == 0) return;
    s->finite = s->skip ? 0 : s->finite + 1;
    if (s->skip) s->scale = s->scale / 2 > r->minimum ? s->scale / 2 : r->minimum;
    if (s->finite < r->interval) return;
    s->finite = 0;
    s->scale = s->scale * 2 < r->maximum ? s->scale * 2 : r->maximum;
}

/* Between norm, which is that of the scaled gradients, and update. limit 0: no clip. power1, power2: of the betas, to
   the step that this becomes if it is not skipped; a skipped one does not use them. */
FATTNI_INLINE void fattni_optimizer_begin(fattni_optimizer_state *s, double norm, double limit, double power1,
                                          double power2, const fattni_loss_scaling *scaling) {
    s->norm = norm / (double)s->scale;
    s->skip = !(norm - norm == 0);
    if (!s->skip) s->step += 1;
    s->factor = (limit > 0 && s->norm > limit ? limit / s->norm : 1) / (double)s->scale;
    s->rate = s->lr / (1 - power1);
    s->correction2 = 1 / (1 - power2);
    fattni_loss_scale_update(s, scaling);
}

#endif
