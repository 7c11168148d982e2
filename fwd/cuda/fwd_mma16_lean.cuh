/* fwd_mma16.cuh in little shared memory: Q stays in registers. */
#define K_LEAN 1
#include "fwd/cuda/fwd_mma16.cuh"
