/* Functions of one or two elements, and sums over what broadcasts: op_device.h says which. */
#include "autograd_c/op_cuda.h"

#include "cuda_element.h"

/* Keep in step with enum fattni_element (op_device.h). */
enum { FILL, PUT, ADD, MUL, GELU, GELU_BACK, SILU, SILU_BACK };

#define BODY "autograd_c/op_each_cuda.inc"
#include "cuda_reals.inc"
