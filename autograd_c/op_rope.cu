/* Rotary positions on the device; equations in op_rope.c. Angles in double, as on the host. */
#include "autograd_c/op_cuda.h"

#include "cuda_element.h"

#define BODY "autograd_c/op_rope_cuda.inc"
#include "cuda_reals.inc"
