/* bwd_huge.cuh in little shared memory: 49 KiB at any head_dim above 64. */
#define K_LEAN 1
#include "bwd/cuda/huge/bwd_huge.cuh"
