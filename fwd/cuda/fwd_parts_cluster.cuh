/* fwd_parts.cuh on Hopper: up to FATTNI_PARTS_ADDED CTAs are a cluster and add up their results in shared memory,
   without counters and without a launch that clears them. */
#include "fwd/cuda/fwd_parts.cuh"
