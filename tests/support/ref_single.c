/* The unfused computation in single precision: the yardstick for what float32 kernels may lose. */
#include "fixtures.h"

#define REAL float
#define REAL_FN(name) name##f
#define FWD_REF fwd_ref_single
#define BWD_REF bwd_ref_single
#include "bwd/ref/bwd_ref.inc"
#include "fwd/ref/fwd_ref.inc"
