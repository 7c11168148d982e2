/* bwd_mma16_mid.cuh with a second tile of dO, where shared memory has room for it. */
#define K_AHEAD 1
#include "bwd/cuda/bwd_mma16_mid.cuh"
