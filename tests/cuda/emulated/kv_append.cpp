/* The kernels of fattn_kv_append (core/kv_cache/kv_append.cu) on the host: fattni_cuda_start for core/kv_cache/
   kv_append_cuda.c, which CMakeLists.txt compiles with that name. kv_append_test.c has the tests. */
#include "real.h"

#undef shared
static inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
static inline double __fma_rn(double a, double b, double c) { return fma(a, b, c); }
#define __CUDACC__
#include "core/kv_cache/kv_append.cu"
#undef __CUDACC__

static fattni_kv_append_args args;
static void run_f64(void) { emulated_kv_append_f64(args); }
static void run_f32(void) { emulated_kv_append_f32(args); }
static void run_f16(void) { emulated_kv_append_f16(args); }
static void run_bf16(void) { emulated_kv_append_bf16(args); }

extern "C" fattn_status emulated_start(fattn_ctx *, const char *name, void (*)(void), int64_t grid, int block, size_t,
                                       const void *a) {
    args = *(const fattni_kv_append_args *)a;
    void (*const run)(void) = strstr(name, "_f64")    ? run_f64
                              : strstr(name, "_f32")  ? run_f32
                              : strstr(name, "_bf16") ? run_bf16
                                                      : run_f16;
    for (int64_t n = 0; n < grid; ++n) machine_run((int)(grid - 1 - n), 1, block, (unsigned)n, run);
    return FATTN_OK;
}
