/* fwd_decode.cuh with four warps, each of which has two streams of keys in turn, so that an SM has more CTAs, some of
   which load while others add up: for more tiles than SMs, of not many keys. The bits are the same. */
#include "fwd/cuda/sm90/fwd_decode.cuh"
