/* cross_entropy and linear_cross_entropy: what their loops on every device share. */
#ifndef FATTNI_AUTOGRAD_OPS_LOSS_OP_LOSS_H
#define FATTNI_AUTOGRAD_OPS_LOSS_OP_LOSS_H

#include "autograd_c/ops/op_device.h"

enum { FATTNI_LOSS_LOGITS = 0, FATTNI_LOSS_X = 0, FATTNI_LOSS_W = 1 };
enum { FATTNI_CROSS_ENTROPY_TARGET = 1, FATTNI_LINEAR_CROSS_ENTROPY_TARGET = 2 };

/* Of linear_cross_entropy. The first field is cross_entropy's whole attribute. */
typedef struct fattni_linear_loss {
    int32_t ignore, all; /* all: each row of w is a class */
    int64_t classes;     /* else the first ones */
} fattni_linear_loss;

static inline int64_t fattni_loss_classes(const fattn_op_call *c) {
    const fattni_linear_loss *const attr = c->attr;
    return attr->all ? c->in[FATTNI_LOSS_W].shape[0] : attr->classes;
}

extern const fattni_code fattni_cross_entropy_cpu, fattni_cross_entropy_cuda, fattni_linear_cross_entropy_cpu,
    fattni_linear_cross_entropy_cuda;

#endif
