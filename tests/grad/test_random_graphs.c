/* Random graphs of all ops against finite differences. FATTN_TEST_SEED: the first seed, FATTN_TEST_SEEDS: how many. */
#include "random_graph.h"
#include "suite.h"
#include "thinned.h"

#include <stdlib.h>

TestSuite(random_graphs, .timeout = 600);

static uint64_t number(const char *name, uint64_t otherwise) {
    const char *const given = getenv(name);
    return given ? strtoull(given, NULL, 10) : otherwise;
}

static void check_all(void (*one)(fattn_ctx *ctx, uint64_t seed, fattn_dtype dtype), fattn_dtype dtype,
                      uint64_t seeds) {
    const uint64_t first = number("FATTN_TEST_SEED", 0), end = first + number("FATTN_TEST_SEEDS", seeds);
    open_context(1); /* fresh memory is NaN */
    for (uint64_t seed = first; seed < end; ++seed) one(ctx, seed, dtype);
    close_context();
}
static void check(fattn_dtype dtype, uint64_t seeds) {
    const bool wide = dtype == FATTN_F64 || dtype == FATTN_F32;
    check_all(wide ? random_graph_check : random_graph_check_16_bits, dtype, seeds);
}

Test(random_graphs, f64) { check(FATTN_F64, 300 / THINNED(3)); }
Test(random_graphs, f32) { check(FATTN_F32, 100 / THINNED(3)); }
Test(random_graphs, bf16) { check(FATTN_BF16, 1000 / THINNED(3)); }
Test(random_graphs, f16) { check(FATTN_F16, 500 / THINNED(3)); }
Test(random_graphs, gradients_are_stored) {
    static const fattn_dtype dtypes[4] = {FATTN_F64, FATTN_F32, FATTN_BF16, FATTN_F16};
    for (int i = 0; i < 4; ++i) check_all(random_graph_check_one_pass, dtypes[i], 400 / THINNED(3));
}
