/* layernorm and rmsnorm on the device; equations in op_norm.c. */
#include "autograd_c/op_cuda.h"

#include "cuda_element.h"

enum { NORM_PACKS = FATTNI_NORM_PACKS };

#define BODY "autograd_c/op_norm_cuda.inc"
#include "cuda_reals.inc"
