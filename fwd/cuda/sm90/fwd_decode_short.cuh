/* fwd_decode.cuh with fewer registers, so that an SM has two or three CTAs: for more tiles of few keys than SMs, which
   would wait for each other's latencies. The bits are the same. */
#include "fwd/cuda/sm90/fwd_decode.cuh"
