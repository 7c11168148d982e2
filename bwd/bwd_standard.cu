/* The textbook backward on the device, between its products: rows (delta, G, keep P), gradients of
   a bias and of the sinks, dX. See bwd_standard_cuda.c for the order. */
#include "core/cuda_standard.h"

#include "cuda_element.h"
#include "huge.h"

#define BODY "bwd/bwd_standard_row.inc"
#include "cuda_reals.inc"
