/* dropout on the device; the mask is the host's (op_dropout.c). */
#include "autograd_c/ops/op_cuda.h"

#include "core/device/any_dtype.cuh"
#include "core/tensor/philox.h"

#define BODY "autograd_c/ops/dropout/op_dropout_cuda.inc"
#include "core/device/for_each_real.inc"
