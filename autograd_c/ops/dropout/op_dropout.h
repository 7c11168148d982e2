/* dropout: what its loops on every device share. */
#ifndef FATTNI_AUTOGRAD_OPS_DROPOUT_OP_DROPOUT_H
#define FATTNI_AUTOGRAD_OPS_DROPOUT_OP_DROPOUT_H

#include "autograd_c/ops/op_device.h"

typedef struct fattni_dropout {
    fattn_rng rng;
    float p;
    uint32_t T; /* an element is dropped when its 16 random bits are below; set by infer */
    double scale;
} fattni_dropout;

enum { FATTNI_DROPOUT_X, FATTNI_DROPOUT_STEP };

extern const fattni_code fattni_dropout_cpu, fattni_dropout_cuda;

#endif
