/* layernorm and rmsnorm: what their loops on every device share. */
#ifndef FATTNI_AUTOGRAD_OPS_NORM_OP_NORM_H
#define FATTNI_AUTOGRAD_OPS_NORM_OP_NORM_H

#include "autograd_c/ops/op_device.h"

typedef struct fattni_norm {
    float eps;
    int32_t centred; /* layernorm */
} fattni_norm;

enum { FATTNI_NORM_X, FATTNI_NORM_GAIN, FATTNI_NORM_BIAS };

extern const fattni_code fattni_norm_cpu, fattni_norm_cuda;

#endif
