/* softmax: its code on each device. */
#ifndef FATTNI_AUTOGRAD_OPS_NORM_OP_SOFTMAX_H
#define FATTNI_AUTOGRAD_OPS_NORM_OP_SOFTMAX_H

#include "autograd_c/ops/op_device.h"

extern const fattni_code fattni_softmax_cpu, fattni_softmax_cuda;

#endif
