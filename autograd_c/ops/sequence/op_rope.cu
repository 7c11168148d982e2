/* Rotary positions on the device; equations in op_rope.c. Angles in double, as on the host. */
#include "autograd_c/ops/op_cuda.h"

#include "core/device/any_dtype.cuh"
#include "core/device/rotate.cuh"

#define BODY "autograd_c/ops/sequence/op_rope_cuda.inc"
#include "core/device/for_each_real.inc"
