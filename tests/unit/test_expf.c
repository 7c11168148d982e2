/* The float exponential of the ops' loops against libm's in double. */
#include "autograd_c/ops/exp.h"

#include <criterion/criterion.h>

#include <math.h>

Test(expf, within_one_rounding_and_a_half) {
    double worst = 0;
    for (int i = -873300; i <= 883700; ++i) {
        const float x = (float)i * 1e-4f;
        if (x < -87.33f || x > 88.37f) continue;
        const double want = exp((double)x);
        worst = fmax(worst, fabs((double)fattni_exp_f32(x) - want) / want);
    }
    cr_assert_leq(worst, 1.5 * 0x1p-24, "%g units of 2^-24", worst * 0x1p24);
}

Test(expf, ends) {
    cr_assert_eq(fattni_exp_f32(0), 1.0f);
    cr_assert_eq(fattni_exp_f32(-0.0f), 1.0f);
    cr_assert_eq(fattni_exp_f32(1e-30f), 1.0f);
    const float small[] = {-87.34f, -88, -1000, -1e10f, -3e38f, -INFINITY};
    const float large[] = {88.38f, 89, 1000, 1e10f, 3e38f, INFINITY};
    for (int i = 0; i < 6; ++i) {
        cr_assert_eq(fattni_exp_f32(small[i]), 0.0f, "exp(%g)", (double)small[i]);
        cr_assert_eq(fattni_exp_f32(large[i]), INFINITY, "exp(%g)", (double)large[i]);
    }
    cr_assert(isnan(fattni_exp_f32(NAN)) && isnan(fattni_exp_f32(-NAN)));
}
