/* Scores up to the largest float, on every instruction set, in both flash algorithms and every dtype. */
#include "huge_scores.h"
#include "thinned.h"

#include <criterion/criterion.h>

static const fattn_dtype dtypes[4] = {FATTN_F64, FATTN_F32, FATTN_F16, FATTN_BF16};

static void check(int isa, int32_t algorithm) {
    for (int threads = 1; threads <= 16; threads += 15) {
        fattn_ctx *const ctx = attention_context_isa(threads, isa);
        if (!ctx) cr_skip_test("this machine has no such instructions");
        for (int n = 0; n < huge_case_count; n += THINNED(13)) {
            attention_case c = huge_case(n, n % 3 ? 16 : 40, dtypes[(n + n / 5) % 4]);
            c.algorithm = algorithm;
            if (threads == 1 || n % 4 == 0) huge_check(ctx, n, &c, LIBRARY, NULL);
        }
        fattn_ctx_destroy(ctx);
    }
}

Test(huge, baseline, .timeout = 600) { check(FATTNI_ISA_BASELINE, FATTN_ALGO_AUTO); }
Test(huge, avx2, .timeout = 600) { check(FATTNI_ISA_AVX2, FATTN_ALGO_AUTO); }
Test(huge, avx512, .timeout = 600) { check(FATTNI_ISA_AVX512, FATTN_ALGO_AUTO); }
Test(huge, flash1, .timeout = 600) { check(FATTNI_ISA_BASELINE, FATTN_ALGO_FLASH1); }

Test(huge, parts) {
    for (int isa = FATTNI_ISA_BASELINE; isa <= FATTNI_ISA_AMXFP16; ++isa) {
        fattn_ctx *const ctx = attention_context_isa(1, isa);
        if (!ctx) continue;
        huge_check_parts(ctx, LIBRARY, NULL);
        fattn_ctx_destroy(ctx);
    }
}
