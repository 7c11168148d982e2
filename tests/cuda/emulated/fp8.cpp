/* The kernels of fattn_fp8_quantize (core/fp8/quantize.cu) on the host: fattni_cuda_start for core/fp8/quantize_cuda.c,
   which CMakeLists.txt compiles with that name. fp8_test.c has the tests. */
#include "ptx.h"

static inline unsigned __reduce_max_sync(uint32_t, unsigned x) {
    const unsigned *const all = machine_gather(&x);
    unsigned most = 0;
    for (int lane = 0; lane < 32; ++lane) most = all[lane] > most ? all[lane] : most;
    return most;
}

#define words words_of_values /* its dynamic shared memory: not the type of ptx.h */
static const size_t WORDS_BYTES = 256 * 33 * 4;
__thread uint32_t words_of_values[WORDS_BYTES / 4];
#include "core/fp8/quantize.cu"

static fattni_fp8_args args_of_run;
/* By a part of a name: longer ones come before those that are a part of them. */
static const struct run {
    const char *name;
    void (*kernel)(void);
} runs[] = {
    {"_statistics_rope", [] { emulated_fp8_statistics_rope(args_of_run); }},
    {"_statistics", [] { emulated_fp8_statistics(args_of_run); }},
    {"_scales", [] { emulated_fp8_scales(args_of_run); }},
    {"_codes_int8_rope", [] { emulated_fp8_codes_int8_rope(args_of_run); }},
    {"_codes_int8", [] { emulated_fp8_codes_int8(args_of_run); }},
    {"_codes_rope", [] { emulated_fp8_codes_rope(args_of_run); }},
    {"_codes", [] { emulated_fp8_codes(args_of_run); }},
    {"_means", [] { emulated_fp8_means(args_of_run); }},
};

extern "C" fattn_status emulated_start(fattn_ctx *, const char *name, void (*)(void), int64_t grid, int block,
                                       size_t bytes, const void *a) {
    if (bytes > WORDS_BYTES) machine_fail("more shared memory than a CTA needs");
    args_of_run = *(const fattni_fp8_args *)a;
    const run *r = runs;
    while (!strstr(name, r->name)) ++r;
    for (int64_t n = 0; n < grid; ++n) machine_run((int)(grid - 1 - n), 1, block, (unsigned)n, r->kernel);
    return FATTN_OK;
}
