/* fattn_compare: which tensors pass or fail, and the report. */
#include <criterion/criterion.h>
#include <fattn/fattn.h>

#include "core/base/internal.h"

#include <math.h>
#include <string.h>

static fattn_ctx *ctx;
static void open_context(void) { cr_assert_eq(fattn_ctx_create(NULL, &ctx), FATTN_OK); }
static void close_context(void) { fattn_ctx_destroy(ctx); }
TestSuite(compare, .init = open_context, .fini = close_context);

static fattn_tensor row(void *data, fattn_dtype t, int64_t n) {
    return fattn_tensor_view(data, t, FATTN_CPU, 0, 1, &n);
}

static const fattn_tolerance by_dtype = {0, 0, 0};

Test(compare, equal_tensors_pass) {
    double a[6] = {1, -2, 3, 0, 1e-300, -4};
    const fattn_tensor t = row(a, FATTN_F64, 6);
    fattn_report r = {.struct_size = sizeof r};
    cr_assert_eq(fattn_compare(ctx, &t, &t, NULL, 0, by_dtype, &r), FATTN_OK);
    cr_assert(r.passed && r.checked == 6 && r.failed == 0 && r.nonfinite == 0);
    cr_assert(r.max_abs == 0 && r.max_rel == 0 && r.rms == 0 && fabs(r.cosine) < 1e-15);
}

Test(compare, one_element_beyond_its_bound_fails_and_is_named) {
    double a[2][3] = {{1, 2, 3}, {4, 5, 6}}, b[2][3] = {{1, 2, 3}, {4, 5.5, 6}};
    const fattn_tensor want = fattn_tensor_view(a, FATTN_F64, FATTN_CPU, 0, 2, (int64_t[]){2, 3});
    const fattn_tensor got = fattn_tensor_view(b, FATTN_F64, FATTN_CPU, 0, 2, (int64_t[]){2, 3});
    fattn_report r = {.struct_size = sizeof r};
    const fattn_tolerance loose = {.atol = 1e-3, .rtol = 0.0999, .cosine = 1};
    cr_assert_eq(fattn_compare(ctx, &got, &want, NULL, 0, loose, &r), FATTN_OK, "0.5 <= 0.5005");
    const fattn_tolerance tight = {.atol = 1e-3, .rtol = 0.0997, .cosine = 1};
    cr_assert_eq(fattn_compare(ctx, &got, &want, NULL, 0, tight, &r), FATTN_E_MISMATCH);
    cr_assert(!r.passed && r.failed == 1 && r.checked == 6);
    cr_assert(r.worst_at[0] == 1 && r.worst_at[1] == 1 && r.worst_got == 5.5 && r.worst_want == 5);
    cr_assert_float_eq(r.max_abs, 0.5, 1e-15);
    cr_assert_float_eq(r.max_rel, 0.1, 1e-15);
    cr_assert_float_eq(r.rms, sqrt(0.25 / 6), 1e-15);
    cr_assert(strstr(fattn_ctx_error(ctx), "1 of 6 differ") && strstr(fattn_ctx_error(ctx), "[1,1"), "%s",
              fattn_ctx_error(ctx));
}

/* Zeros, ones and nearly-ones: relative bounds must not hide them. */
Test(compare, default_tolerances_are_tight) {
    static const struct {
        fattn_dtype t;
        double step;
    } rows[] = {{FATTN_F64, 5e-12}, {FATTN_F32, 1e-5}, {FATTN_F16, 1e-2}, {FATTN_BF16, 0.1}};
    for (int n = 0; n < 4; ++n) {
        double wide_a[2] = {1, 0}, wide_b[2] = {1, rows[n].step}, room_a[2], room_b[2];
        const fattn_tensor from_a = row(wide_a, FATTN_F64, 2), from_b = row(wide_b, FATTN_F64, 2);
        const fattn_tensor a = row(room_a, rows[n].t, 2), b = row(room_b, rows[n].t, 2);
        cr_assert_eq(fattn_tensor_copy(ctx, &a, &from_a), FATTN_OK);
        cr_assert_eq(fattn_tensor_copy(ctx, &b, &from_b), FATTN_OK);
        fattn_report r = {.struct_size = sizeof r};
        cr_assert_eq(fattn_compare(ctx, &b, &a, NULL, 0, by_dtype, &r), FATTN_E_MISMATCH);
        cr_assert_eq(fattn_compare(ctx, &b, &b, NULL, 0, by_dtype, &r), FATTN_OK);
    }
}

Test(compare, non_finite_values_must_sit_in_the_same_places) {
    static const double cases[][2] = {{NAN, NAN}, {INFINITY, INFINITY}, {-INFINITY, -INFINITY}, {NAN, 1},
                                      {1, NAN},   {INFINITY, 1e308},    {INFINITY, -INFINITY},  {NAN, INFINITY}};
    for (int n = 0; n < 8; ++n) {
        double a[3] = {1, cases[n][0], 2}, b[3] = {1, cases[n][1], 2};
        const fattn_tensor got = row(a, FATTN_F64, 3), want = row(b, FATTN_F64, 3);
        fattn_report r = {.struct_size = sizeof r};
        const int same = n < 3;
        cr_assert_eq(fattn_compare(ctx, &got, &want, NULL, 0, by_dtype, &r), same ? FATTN_OK : FATTN_E_MISMATCH,
                     "case %d", n);
        cr_assert(r.nonfinite == !same && r.failed == !same && r.checked == 3);
        if (!same) cr_assert_eq(r.worst_at[0], 1);
        const fattn_tensor base = row(b, FATTN_F64, 3); /* the rule with a baseline agrees */
        cr_assert_eq(fattn_compare(ctx, &got, &want, &base, 2, by_dtype, &r), same ? FATTN_OK : FATTN_E_MISMATCH,
                     "case %d", n);
    }
}

/* Every element is within 1e-2, but all are 1 % too large: the cosine distance, which depends on scale, finds
   that. 1 - 2<a,b>/(<a,a>+<b,b>) for b = (1+e)a is e^2/(1+(1+e)^2). */
Test(compare, a_common_factor_fails_by_cosine) {
    enum { N = 1000 };
    double a[N], b[N];
    for (int i = 0; i < N; ++i) a[i] = i % 2 ? 1 : -1, b[i] = 1.01 * a[i];
    const fattn_tensor want = row(a, FATTN_F64, N), got = row(b, FATTN_F64, N);
    fattn_report r = {.struct_size = sizeof r};
    const fattn_tolerance elementwise = {.atol = 1e-9, .rtol = 0.02, .cosine = 1e-4};
    cr_assert_eq(fattn_compare(ctx, &got, &want, NULL, 0, elementwise, &r), FATTN_OK);
    cr_assert_float_eq(r.cosine, 1e-4 / (1 + 1.0201), 1e-12);
    const fattn_tolerance both = {.atol = 1e-9, .rtol = 0.02, .cosine = 4e-5};
    cr_assert_eq(fattn_compare(ctx, &got, &want, NULL, 0, both, &r), FATTN_E_MISMATCH);
    cr_assert_eq(r.failed, 0, "no single element fails");
    cr_assert(strstr(fattn_ctx_error(ctx), "cosine distance 4.95e-05, above its limit 4e-05"), "%s",
              fattn_ctx_error(ctx));
}

/* |got - want| <= factor * max|baseline - want| + floor. */
Test(compare, a_baseline_sets_the_bound) {
    double want[4] = {1, 2, 3, 4}, low[4] = {1, 2.01, 3, 3.99}, got[4] = {1.0199, 2, 3, 4};
    const fattn_tensor w = row(want, FATTN_F64, 4), l = row(low, FATTN_F64, 4);
    const fattn_tensor g = row(got, FATTN_F64, 4);
    fattn_report r = {.struct_size = sizeof r};
    cr_assert_eq(fattn_compare(ctx, &g, &w, &l, 2, by_dtype, &r), FATTN_OK);
    cr_assert_float_eq(r.baseline, 0.01, 1e-12);
    got[0] = 1.0201;
    cr_assert_eq(fattn_compare(ctx, &g, &w, &l, 2, by_dtype, &r), FATTN_E_MISMATCH);
    cr_assert_eq(fattn_compare(ctx, &g, &w, &l, 3, by_dtype, &r), FATTN_OK);
    const fattn_tolerance floor = {.atol = 0.02}; /* given: the floor, if larger */
    got[0] = 1.0199;
    cr_assert_eq(fattn_compare(ctx, &g, &w, &w, 2, floor, &r), FATTN_OK);
    got[0] = 1.0201;
    cr_assert_eq(fattn_compare(ctx, &g, &w, &w, 2, floor, &r), FATTN_E_MISMATCH);
}

/* An exact baseline leaves the floor: two roundings of want in got's dtype pass, four do not. */
Test(compare, an_exact_baseline_leaves_the_rounding_floor) {
    static const struct {
        fattn_dtype t;
        double ulp; /* of 1000: two roundings */
    } rows[] = {{FATTN_F64, 0x1p-43}, {FATTN_F32, 0x1p-14}, {FATTN_F16, 0.5}, {FATTN_BF16, 4}};
    for (int n = 0; n < 4; ++n) {
        double want[1] = {1000}, got[1], room[1];
        const fattn_tensor w = row(want, FATTN_F64, 1), from = row(got, FATTN_F64, 1);
        const fattn_tensor g = row(room, rows[n].t, 1);
        fattn_report r = {.struct_size = sizeof r};
        got[0] = 1000 + rows[n].ulp;
        cr_assert_eq(fattn_tensor_copy(ctx, &g, &from), FATTN_OK);
        cr_assert_eq(fattn_compare(ctx, &g, &w, &w, 2, by_dtype, &r), FATTN_OK, "%s", fattn_ctx_error(ctx));
        cr_assert(r.baseline == 0 && r.max_abs == rows[n].ulp);
        got[0] = 1000 + 4 * rows[n].ulp;
        cr_assert_eq(fattn_tensor_copy(ctx, &g, &from), FATTN_OK);
        cr_assert_eq(fattn_compare(ctx, &g, &w, &w, 2, by_dtype, &r), FATTN_E_MISMATCH);
    }
}

Test(compare, integers_are_equal_or_not) {
    int32_t a[2] = {5, -7}, b[2] = {5, -8};
    const fattn_tensor ta = row(a, FATTN_I32, 2), tb = row(b, FATTN_I32, 2);
    fattn_report r = {.struct_size = sizeof r};
    cr_assert_eq(fattn_compare(ctx, &ta, &ta, NULL, 0, by_dtype, &r), FATTN_OK);
    cr_assert_eq(fattn_compare(ctx, &ta, &tb, NULL, 0, by_dtype, &r), FATTN_E_MISMATCH);
    cr_assert(r.failed == 1 && r.worst_at[0] == 1);
}

Test(compare, strides_dtypes_and_sizes) {
    float columns[3][2] = {{1, 4}, {2, 5}, {3, 6}};
    double rows[2][3] = {{1, 2, 3}, {4, 5, 6}};
    const fattn_tensor c = fattn_tensor_view(columns, FATTN_F32, FATTN_CPU, 0, 2, (int64_t[]){3, 2});
    const fattn_tensor got = fattn_tensor_permute(&c, (int[]){1, 0});
    const fattn_tensor want = fattn_tensor_view(rows, FATTN_F64, FATTN_CPU, 0, 2, (int64_t[]){2, 3});
    fattn_report r = {.struct_size = sizeof r};
    cr_assert_eq(fattn_compare(ctx, &got, &want, NULL, 0, by_dtype, &r), FATTN_OK);
    cr_assert_eq(r.checked, 6);

    const fattn_tensor empty = row(NULL, FATTN_F32, 0);
    cr_assert_eq(fattn_compare(ctx, &empty, &empty, &empty, 2, by_dtype, &r), FATTN_OK);
    cr_assert(r.passed && r.checked == 0);

    float one = 7;
    const fattn_tensor scalar = fattn_tensor_view(&one, FATTN_F32, FATTN_CPU, 0, 0, NULL);
    cr_assert_eq(fattn_compare(ctx, &scalar, &scalar, NULL, 0, by_dtype, &r), FATTN_OK);
    cr_assert_eq(r.checked, 1);
}

Test(compare, huge_values_do_not_fail_by_overflow) {
    double a[2] = {1e200, -1e200}, b[2] = {1e200 * (1 + 1e-14), -1e200};
    const fattn_tensor want = row(a, FATTN_F64, 2), got = row(b, FATTN_F64, 2);
    fattn_report r = {.struct_size = sizeof r};
    cr_assert_eq(fattn_compare(ctx, &got, &want, NULL, 0, by_dtype, &r), FATTN_OK);
}

Test(compare, bad_calls_are_rejected_and_leave_the_report_alone) {
    double a[6] = {0};
    const fattn_tensor six = row(a, FATTN_F64, 6), five = row(a, FATTN_F64, 5);
    const fattn_tensor none = row(NULL, FATTN_F64, 5);
    fattn_report r = {.struct_size = sizeof r, .passed = 77};
    cr_assert_eq(fattn_compare(NULL, &six, &six, NULL, 0, by_dtype, &r), FATTN_E_ARG);
    cr_assert_eq(fattn_compare(ctx, &six, &six, NULL, 0, by_dtype, NULL), FATTN_E_ARG);
    cr_assert_eq(fattn_compare(ctx, &six, &five, NULL, 0, by_dtype, &r), FATTN_E_SHAPE);
    cr_assert(strstr(fattn_ctx_error(ctx), "got is [6], want is [5]"), "%s", fattn_ctx_error(ctx));
    cr_assert_eq(fattn_compare(ctx, &six, &six, &five, 2, by_dtype, &r), FATTN_E_SHAPE);
    cr_assert_eq(fattn_compare(ctx, NULL, &six, NULL, 0, by_dtype, &r), FATTN_E_ARG);
    cr_assert_eq(fattn_compare(ctx, &six, NULL, NULL, 0, by_dtype, &r), FATTN_E_ARG);
    cr_assert_eq(fattn_compare(ctx, &none, &five, NULL, 0, by_dtype, &r), FATTN_E_ARG);
    cr_assert_eq(fattn_compare(ctx, &six, &six, &six, -1, by_dtype, &r), FATTN_E_ARG);
    cr_assert(strstr(fattn_ctx_error(ctx), "factor -1"), "%s", fattn_ctx_error(ctx));
    cr_assert_eq(fattn_compare(ctx, &six, &six, &six, NAN, by_dtype, &r), FATTN_E_ARG);
    const fattn_tolerance negative = {.atol = -1}, unknown = {.rtol = NAN};
    cr_assert_eq(fattn_compare(ctx, &six, &six, NULL, 0, negative, &r), FATTN_E_ARG);
    cr_assert_eq(fattn_compare(ctx, &six, &six, NULL, 0, unknown, &r), FATTN_E_ARG);
    cr_assert_eq(r.passed, 77);
    r.struct_size = 0;
    cr_assert_eq(fattn_compare(ctx, &six, &six, NULL, 0, by_dtype, &r), FATTN_E_ABI);
}

/* Tensors on a GPU are not read: no GPU is needed here. */
Test(compare, a_context_of_a_gpu_is_rejected) {
    double a[1] = {1};
    fattn_ctx gpu = {.device = FATTN_CUDA};
    fattn_tensor t = row(a, FATTN_F64, 1);
    t.device = FATTN_CUDA;
    fattn_report r = {.struct_size = sizeof r, .passed = 77};
    cr_assert_eq(fattn_compare(&gpu, &t, &t, NULL, 0, by_dtype, &r), FATTN_E_DEVICE);
    cr_assert(strstr(gpu.error, "compare: tensors must be on the CPU"), "%s", gpu.error);
    cr_assert_eq(r.passed, 77);
}

/* For a caller built with an older, shorter report only its fields are written. */
Test(compare, a_shorter_report_is_filled_as_far_as_it_goes) {
    double a[1] = {1};
    const fattn_tensor t = row(a, FATTN_F64, 1);
    fattn_report r = {.struct_size = offsetof(fattn_report, failed), .failed = 77};
    cr_assert_eq(fattn_compare(ctx, &t, &t, NULL, 0, by_dtype, &r), FATTN_OK);
    cr_assert(r.passed == 1 && r.checked == 1 && r.failed == 77);
}
