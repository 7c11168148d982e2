/* The kernel of fattn_sample (core/sampling/sample.cu) on the host: fattni_cuda_start_clusters for core/sampling/
   sample_cuda.c, which CMakeLists.txt compiles with that name. sample_test.c has the tests. */
#include "ptx.h"

#include "core/tensor/philox.h"

#define shared memory /* what the kernel calls its dynamic shared memory */
#define __CUDACC__
#include "core/sampling/sample.cu"
#undef __CUDACC__

static fattni_sample_args args;
static void run(void) { emulated_sample_rows(args); }

extern "C" fattn_status emulated_start(fattn_ctx *, const char *, void (*)(void), int64_t grid, int cluster, int block,
                                       size_t, const void *a, bool) {
    args = *(const fattni_sample_args *)a;
    for (int64_t n = 0; n < grid; n += cluster) machine_run((int)n, cluster, block, (unsigned)n, run);
    return FATTN_OK;
}
