/* fwd_add_parts.cuh for 16-bit calls, whose parts are F32. */
#define K_HALF 1
#include "fwd/cuda/fwd_add_parts.cuh"
