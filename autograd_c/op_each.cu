/* Functions of one or two elements, and sums over what broadcasts: element.h says which. */
#include "autograd_c/element.h"
#include "autograd_c/op_cuda.h"

#include "cuda_element.h"

#define BODY "autograd_c/op_each_cuda.inc"
#include "cuda_reals.inc"
