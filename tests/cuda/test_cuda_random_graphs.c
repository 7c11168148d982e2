/* Random graphs of all ops of the tape on the device: against finite differences, 16 bits against F64. */
#include "case_checks.h"
#include "device.h"
#include "random_graph.h"

#include <criterion/criterion.h>

static void check_graphs(fattn_dtype dtype, int graphs) {
    fattn_ctx *const ctx = device_or_skip();
    for (int n = 0; n < graphs; ++n) {
        if (!mine(n)) continue;
        const bool wide = dtype == FATTN_F64 || dtype == FATTN_F32;
        (wide ? random_graph_check : random_graph_check_16_bits)(ctx, (uint64_t)n, dtype);
        cr_assert_eq(fattn_ctx_mem(ctx).live, 0, "graph %d", n);
    }
    fattn_ctx_destroy(ctx);
}

Test(cuda_random_graphs, f64, .timeout = 600) { check_graphs(FATTN_F64, 300); }
Test(cuda_random_graphs, f32, .timeout = 600) { check_graphs(FATTN_F32, 100); }
Test(cuda_random_graphs, bf16, .timeout = 600) { check_graphs(FATTN_BF16, 1000); }
Test(cuda_random_graphs, f16, .timeout = 600) { check_graphs(FATTN_F16, 500); }
