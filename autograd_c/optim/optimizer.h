/* What AdamW and SGD are made of: parameters with their state, cut in chunks, and the code for each device. */
#ifndef FATTNI_AUTOGRAD_OPTIM_OPTIMIZER_H
#define FATTNI_AUTOGRAD_OPTIM_OPTIMIZER_H

#include "autograd_c/optim/optimizer_state.h"
#include "core/base/internal.h"

#include <fattn/optim.h>

/* The numbers of a rule. */
typedef struct fattni_optimizer_rule {
    bool is_sgd, nesterov;
    double beta1; /* SGD: its momentum */
    double beta2, eps, weight_decay, max_grad_norm;
    bool is_scaled; /* the caller has asked for a loss scale */
    float first_scale;
    fattni_loss_scaling scaling;
    uint32_t flags; /* FATTN_OPTIM_* */
    uint64_t seed;
} fattni_optimizer_rule;

typedef struct fattni_optimizer fattni_optimizer;

typedef struct fattni_optimizer_slot {
    fattn_param *param;
    fattn_tensor m, v, master; /* SGD: no v, m if there is momentum; of 16-bit values only: master */
    int64_t count, first_chunk;
    int64_t begin, end; /* the elements whose state is here: all, or this rank's */
    fattn_dtype dtype;
    bool frozen; /* at creation: no state, no chunk */
    bool is_half, has_master;
} fattni_optimizer_slot;

/* The code for one device. On a GPU all is enqueued, and but for open nothing is allocated. */
typedef struct fattni_optimizer_code {
    fattn_status (*open)(fattni_optimizer *a); /* the device's state, as `own` is */
    void (*close)(fattni_optimizer *a);        /* also after an open that failed or was not reached */
    fattn_status (*step)(fattni_optimizer *a);
    fattn_status (*set)(fattni_optimizer *a, const fattni_optimizer_change *c);
    /* As it stands after all that is enqueued, for which it waits. */
    fattn_status (*read)(const fattni_optimizer *a, fattni_optimizer_state *out);
} fattni_optimizer_code;

struct fattni_optimizer {
    fattn_ctx *ctx;
    const fattni_optimizer_code *code;
    const char *name; /* in error messages */
    fattni_optimizer_rule rule;
    fattn_reducer *owners;     /* NULL: all state is here */
    bool stepped, scale_asked; /* asked: the caller has the tensor of the scale */
    fattni_optimizer_slot *slots;
    int n;
    int64_t chunks;
    double *partial;                /* [chunks] norms, in the context's memory */
    fattni_optimizer_state own;     /* the CPU's */
    fattni_optimizer_state *device; /* a GPU's, on the device; NULL on the CPU */
};

/* Makes an optimizer of `bytes`, which begins with a fattni_optimizer. Errors as fattn_adamw_create. */
fattn_status fattni_optimizer_create(fattn_ctx *ctx, const char *name, const fattni_optimizer_rule *rule,
                                     fattn_reducer *owners, size_t bytes, fattn_param *const *params, int n,
                                     fattni_optimizer **out);
void fattni_optimizer_destroy(fattni_optimizer *a, size_t bytes); /* NULL is allowed */
fattn_status fattni_optimizer_set_lr(fattni_optimizer *a, float lr);
fattn_status fattni_optimizer_step(fattni_optimizer *a);
/* Between the norms of the chunks and the norm of all: with owners every rank gets those of the others. */
fattn_status fattni_optimizer_share_norms(const fattni_optimizer *a);
/* The rule's part that options describe; NULL: no scale. who: in error messages. ABI, ARG. */
fattn_status fattni_optimizer_take_scaling(fattn_ctx *ctx, const char *who, const fattn_loss_scale_options *opt,
                                           fattni_optimizer_rule *rule);
/* The same for masters and rounding. ARG. */
fattn_status fattni_optimizer_take_rounding(fattn_ctx *ctx, const char *who, uint32_t flags, uint64_t seed,
                                            fattni_optimizer_rule *rule);
fattn_status fattni_optimizer_get_step(fattni_optimizer *a, int64_t *t);
fattn_status fattni_optimizer_set_step(fattni_optimizer *a, int64_t t);
fattn_status fattni_optimizer_scale(fattni_optimizer *a, fattn_tensor *view);
fattn_status fattni_optimizer_get_scale(fattni_optimizer *a, fattn_loss_scale_state *out);
fattn_status fattni_optimizer_set_scale(fattni_optimizer *a, const fattn_loss_scale_state *s);
fattn_status fattni_optimizer_grad_norm(fattni_optimizer *a, double *out);
fattn_status fattni_optimizer_norm_view(fattni_optimizer *a, fattn_tensor *view);
/* params[i]; NULL: there is none. */
fattn_param *fattni_optimizer_param(const fattni_optimizer *a, int i);
/* Slot i, or NULL after an error message. */
const fattni_optimizer_slot *fattni_optimizer_slot_of(fattni_optimizer *a, int i, const fattn_tensor *view,
                                                      fattn_status *s);
/* *view = the master of params[i]; STATE: it has none. */
fattn_status fattni_optimizer_master(const fattni_optimizer *a, int i, fattn_tensor *view);

static inline bool fattni_is_frozen(const fattn_param *p) { return p->flags & FATTN_PARAM_FROZEN; }
/* Whether the gradient stays after a step. */
static inline bool fattni_is_one_pass(const fattn_param *p) { return p->flags & FATTN_PARAM_ONE_PASS; }

#endif
