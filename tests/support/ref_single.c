/* The unfused computation in single precision: the baseline for the errors of float32 kernels. */
#include "fixtures.h"

#define REAL float
#define FN(name) name##_single
#define MATH(name) name##f
#include "bwd/ref/bwd_ref.c"
#include "fwd/ref/fwd_ref.c"
