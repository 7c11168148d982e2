/* The sizes of a query suffice for the call, on the CPU; tests/cuda/host_launch.c tests the same for a GPU. */
#include "attention.h"
#include "plans.h"
#include "thinned.h"

#include <criterion/criterion.h>

Test(plan, sizes_do_not_depend_on_addresses_or_d_o, .timeout = 120) {
    static const struct {
        int threads, isa;
    } ways[] = {{1, FATTNI_ISA_AVX512}, {4, FATTNI_ISA_BASELINE}, {16, FATTNI_ISA_AVX512}};
    for (int n = 0; n < 3; n += THINNED(2)) {
        fattn_ctx *ctx = attention_context_isa(ways[n].threads, ways[n].isa);
        if (!ctx) ctx = attention_context(ways[n].threads); /* a CPU without it */
        cr_assert_gt(plans_check(ctx), 100000);
        fattn_ctx_destroy(ctx);
    }
}
