/* layernorm and rmsnorm: what their loops on every device share. */
#ifndef FATTNI_AUTOGRAD_OPS_NORM_OP_NORM_H
#define FATTNI_AUTOGRAD_OPS_NORM_OP_NORM_H

#include "autograd_c/ops/op_device.h"

/* What linear_norm asks of a layernorm's backward: the sum over rows of dx, as it is with what it held before. */
typedef struct fattni_norm_sum {
    const fattn_tensor *d; /* [C] */
    bool fresh, done;      /* done: it has been added to d; else the caller does it */
} fattni_norm_sum;

typedef struct fattni_norm {
    float eps;
    int32_t centred;      /* layernorm */
    fattni_norm_sum *sum; /* NULL: not wanted; when planned, any other pointer says that it will be */
} fattni_norm;

enum { FATTNI_NORM_X, FATTNI_NORM_GAIN, FATTNI_NORM_BIAS };

extern const fattni_code fattni_norm_cpu, fattni_norm_cuda;

#endif
