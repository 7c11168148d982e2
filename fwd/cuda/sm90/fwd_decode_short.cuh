/* fwd_decode.cuh with fewer registers, so that an SM has two CTAs, or four of four warps: for more tiles than SMs, of
   not many keys, which would wait for each other's latencies. The bits are the same. */
#include "fwd/cuda/sm90/fwd_decode.cuh"
