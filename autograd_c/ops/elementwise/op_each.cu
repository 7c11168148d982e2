/* Functions of one or two elements, and sums over what broadcasts: elementwise.h says which. */
#include "autograd_c/ops/elementwise/elementwise.h"
#include "autograd_c/ops/op_cuda.h"

#include "core/device/any_dtype.cuh"

/* Of sum_tall_columns: rows that a thread reads at once, as registers allow. */
enum { TALL_ROWS_f32 = 8, TALL_ROWS_f64 = 4 };

#define BODY "autograd_c/ops/elementwise/op_each_cuda.inc"
#include "core/device/for_each_real.inc"
