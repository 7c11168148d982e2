/* rope: what its loops on every device share. */
#ifndef FATTNI_AUTOGRAD_OPS_SEQUENCE_OP_ROPE_H
#define FATTNI_AUTOGRAD_OPS_SEQUENCE_OP_ROPE_H

#include "autograd_c/ops/op_device.h"

typedef struct fattni_rope {
    int64_t position;
    float base;
    int32_t reserved;
} fattni_rope;

extern const fattni_code fattni_rope_cpu, fattni_rope_cuda;

#endif
