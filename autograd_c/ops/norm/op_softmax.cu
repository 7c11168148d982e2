/* softmax on the device; equations in op_softmax.c. */
#include "autograd_c/ops/op_cuda.h"

#include "core/device/any_dtype.cuh"

#define BODY "autograd_c/ops/norm/op_softmax_cuda.inc"
#include "core/device/for_each_real.inc"
