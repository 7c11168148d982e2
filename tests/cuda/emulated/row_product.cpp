/* The kernels of products with one row (autograd_c/ops/matrix/row_product.cu) on the host: fattni_cuda_start for
   row_product_cuda.c, which CMakeLists.txt compiles with that name. row_product_test.c has the tests. */
#include "ptx.h"

#define shared memory /* what the kernel calls its dynamic shared memory */
#define __CUDACC__
#include "autograd_c/ops/matrix/row_product.cu"
#undef __CUDACC__

static fattni_row_product_args args;
/* By a part of a name: longer ones come before those that are a part of them. */
static const struct run {
    const char *name;
    void (*kernel)(void);
} runs[] = {
    {"_norm_f32", [] { emulated_row_product_norm_f32(args); }},
    {"_norm_f16", [] { emulated_row_product_norm_f16(args); }},
    {"_norm_bf16", [] { emulated_row_product_norm_bf16(args); }},
    {"_f32", [] { emulated_row_product_f32(args); }},
    {"_bf16", [] { emulated_row_product_bf16(args); }},
    {"_f16", [] { emulated_row_product_f16(args); }},
};

extern "C" fattn_status emulated_start(fattn_ctx *, const char *name, void (*)(void), int64_t grid, int block, size_t,
                                       const void *a) {
    args = *(const fattni_row_product_args *)a;
    const run *r = runs;
    while (!strstr(name, r->name)) ++r;
    for (int64_t n = 0; n < grid; ++n) machine_run((int)(grid - 1 - n), 1, block, (unsigned)n, r->kernel);
    return FATTN_OK;
}
