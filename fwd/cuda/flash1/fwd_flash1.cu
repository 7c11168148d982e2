/* Forward in FlashAttention-1's order (Dao et al. 2022, algorithm 1), for comparison: one CTA per (sequence, head); the
   outer loop runs over tiles of keys, the inner one over rows, so O, max and sum are read from and written to global
   memory once per tile. A warp takes a row; a lane a key of the tile (Q K^T) or columns of O (P V).

   Dynamic shared memory, sized by the host: K tile [keys][D+1], V tile [keys][Dv], one row of Q per warp [D]. */
#include "fwd/cuda/flash1/fwd_flash1_cuda.h"

#include "core/device/any_dtype.cuh"
#include "core/tensor/philox.h"

enum { FLASH1_THREADS = 256, FLASH1_WARPS = FLASH1_THREADS / 32 };

extern __shared__ double flash1_tiles[];

#define BODY "fwd/cuda/flash1/fwd_flash1_head.inc"
#include "core/device/for_each_real.inc"
