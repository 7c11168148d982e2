/* The optimizers' kernels (autograd_c/optim/optimizer.cu) on the host: what autograd_c/optim/optimizer_cuda.c, which
   CMakeLists.txt compiles with these names, calls. optimizer_test.c has the tests. */
#include "real.h"

#include "core/tensor/stochastic_rounding.h" /* with the host's Philox */

#include <vector_functions.h>

#undef shared
static inline int64_t min(int64_t a, int64_t b) { return a < b ? a : b; }
#define __CUDACC__
#include "autograd_c/optim/optimizer.cu"
#undef __CUDACC__

static fattni_optimizer_args args;
static fattni_optimizer_set_args set_args;
static void run_norm(void) { emulated_optimizer_norm(args); }
static void run_begin(void) { emulated_optimizer_begin(args); }
static void run_set(void) { emulated_optimizer_set(set_args); }
static void run_adamw_f32(void) { emulated_adamw_update_f32(args); }
static void run_adamw_f64(void) { emulated_adamw_update_f64(args); }
static void run_sgd_f32(void) { emulated_sgd_update_f32(args); }
static void run_sgd_f64(void) { emulated_sgd_update_f64(args); }

static const struct {
    const char *name;
    void (*run)(void);
} kernels[] = {{"optimizer_norm", run_norm},        {"optimizer_begin", run_begin},
               {"optimizer_set", run_set},          {"adamw_update_f32", run_adamw_f32},
               {"adamw_update_f64", run_adamw_f64}, {"sgd_update_f32", run_sgd_f32},
               {"sgd_update_f64", run_sgd_f64}};

extern "C" fattn_status emulated_start(fattn_ctx *, const char *name, void (*)(void), int64_t grid, int block, size_t,
                                       const void *a) {
    void (*run)(void) = NULL;
    for (const auto &k : kernels)
        if (strstr(name, k.name)) run = k.run;
    if (run == run_set)
        set_args = *(const fattni_optimizer_set_args *)a;
    else
        args = *(const fattni_optimizer_args *)a;
    if (block == 1) run(); /* the machine has whole warps */
    gridDim.x = (unsigned)grid;
    for (int64_t n = 0; n < grid && block > 1; ++n) machine_run((int)(grid - 1 - n), 1, block, (unsigned)n, run);
    return FATTN_OK;
}
extern "C" fattn_status emulated_move(fattn_ctx *, void *to, const void *from, size_t bytes) {
    memcpy(to, from, bytes);
    return FATTN_OK;
}
extern "C" fattn_status emulated_zero(fattn_ctx *, void *p, size_t bytes) {
    memset(p, 0, bytes);
    return FATTN_OK;
}
extern "C" fattn_status emulated_sync(fattn_ctx *) { return FATTN_OK; }
