/* Zeroes counters: of a kernel that may start before they are zero (fattni_sm90_start), and in recordings
   (fattni_cuda_zero). */
#include "core/cuda/sm90_args.h"
#include "core/ptx/grid.h"

extern "C" __global__ void __launch_bounds__(FATTNI_ZERO_THREADS)
    fattn_zero_counters(const __grid_constant__ fattni_zero_args x) {
    begin_grid();
    for (int n = (int)threadIdx.x; n < x.count; n += FATTNI_ZERO_THREADS) x.counters[n] = 0;
}
