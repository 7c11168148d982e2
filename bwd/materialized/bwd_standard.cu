/* Materialized backward on the device, between the products: rows (delta, G, keep P), gradients of
   a bias and of the sinks, dX. See bwd_standard_cuda.c for the order. */
#include "bwd/materialized/bwd_standard_cuda.h"

#include "core/device/any_dtype.cuh"
#include "core/attention/huge.h"

#define BODY "bwd/materialized/bwd_standard_row.inc"
#include "core/device/for_each_real.inc"
