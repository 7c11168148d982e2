/* Arguments of AdamW's kernels. */
#ifndef FATTNI_ADAMW_CUDA_H
#define FATTNI_ADAMW_CUDA_H

#include "adamw_state.h"

/* One parameter, or for the kernels of one thread none. */
typedef struct fattni_adamw_args {
    void *value, *grad, *m, *v, *master; /* m, v: F32, F64 for F64 values; master: NULL or F32 */
    fattni_adamw_state *state;
    double *partial;                     /* of the parameter's first chunk; for begin, of all */
    int64_t count, chunks;
    double beta1, beta2, eps, weight_decay, limit;
    double lr;                           /* to set; negative: keep */
    int64_t step;
    int32_t value_dtype, grad_dtype, frozen, reserved;
} fattni_adamw_args;

#endif
