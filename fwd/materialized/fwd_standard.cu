/* The softmax of materialized attention on the device: from S [B Hq Sq][Sk] P, L and, with
   dropout, keep P. One block per row, three passes over it: scores and their maximum,
   exponentials and their sum, quotients. Keys that a row does not see, and rows past the end of
   a sequence, get P = 0. */
#include "core/materialized/standard_cuda.h"

#include "core/device/any_dtype.cuh"

#define BODY "fwd/materialized/fwd_standard_row.inc"
#include "core/device/for_each_real.inc"
