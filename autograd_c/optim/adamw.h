/* AdamW's inside, for its loops on every device. */
#ifndef FATTNI_AUTOGRAD_OPTIM_ADAMW_H
#define FATTNI_AUTOGRAD_OPTIM_ADAMW_H

#include "autograd_c/optim/adamw_state.h"
#include "core/base/internal.h"

#include <fattn/optim.h>

typedef struct fattni_adamw_slot {
    fattn_param *param;
    fattn_tensor m, v, master; /* of 16-bit values only: master */
    int64_t count, first_chunk;
    fattn_dtype dtype;
    bool frozen; /* at creation: no state, no chunk */
} fattni_adamw_slot;

/* The code for one device. On a GPU all is enqueued, and but for open nothing is allocated. */
typedef struct fattni_adamw_code {
    fattn_status (*open)(fattn_adamw *a); /* the device's state, as `own` is */
    void (*close)(fattn_adamw *a);        /* also after an open that failed or was not reached */
    fattn_status (*step)(fattn_adamw *a);
    fattn_status (*set)(fattn_adamw *a, double lr, int64_t step); /* negative: keep */
    /* As it stands after all that is enqueued, for which it waits. */
    fattn_status (*read)(const fattn_adamw *a, fattni_adamw_state *out);
} fattni_adamw_code;

struct fattn_adamw {
    fattn_ctx *ctx;
    const fattni_adamw_code *code;
    fattn_adamw_options opt;
    bool stepped;
    fattni_adamw_slot *slots;
    int n;
    int64_t chunks;
    double *partial;            /* [chunks] norms, in the context's memory */
    fattni_adamw_state own;     /* the CPU's */
    fattni_adamw_state *device; /* a GPU's, on the device; NULL on the CPU */
};

static inline bool fattni_is_frozen(const fattn_param *p) { return p->flags & FATTN_PARAM_FROZEN; }

#endif
