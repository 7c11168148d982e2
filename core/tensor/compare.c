/* fattn_compare: one tensor against another, with a derived bound. */
#include "core/base/internal.h"
#include "core/tensor/numeric.h"

#include <fattn/check.h>

#include <math.h>
#include <stdio.h>
#include <string.h>

/* A few roundings of a value of size 1: two correct computations may differ by that much. */
static fattn_tolerance default_tolerance(int32_t dtype) {
    switch (dtype) {
    case FATTN_F64: return (fattn_tolerance){1e-12, 1e-12, 1e-12};
    case FATTN_F32: return (fattn_tolerance){2e-6, 2e-6, 1e-8};
    case FATTN_F16: return (fattn_tolerance){2e-3, 2e-3, 1e-4};
    case FATTN_BF16: return (fattn_tolerance){1.6e-2, 1.6e-2, 1e-3};
    case FATTN_F8E4M3: return (fattn_tolerance){0.25, 0.25, 1e-2};
    default: return (fattn_tolerance){0, 0, 1e-12};
    }
}

static double unit_roundoff(int32_t dtype) {
    switch (dtype) {
    case FATTN_F64: return 0x1p-53;
    case FATTN_F32: return 0x1p-24;
    case FATTN_F16: return 0x1p-11;
    case FATTN_BF16: return 0x1p-8;
    case FATTN_F8E4M3: return 0x1p-4;
    default: return 0;
    }
}

/* The error of rounding a value of this size to the dtype. |want + 0.3 - 0.3 - want| keeps it above
   zero for results that cancel, such as the gradient of a softmax over one key. */
static double rounding_floor(int32_t dtype, double want) {
    double cell; /* storage for one element of any dtype */
    fattni_store(&cell, dtype, 0, want + 0.3);
    fattni_store(&cell, dtype, 0, fattni_load(&cell, dtype, 0) - 0.3);
    return fmax(fabs(fattni_load(&cell, dtype, 0) - want), unit_roundoff(dtype) * fabs(want));
}

static bool same_shape(const fattn_tensor *a, const fattn_tensor *b) {
    bool same = a->ndim == b->ndim;
    for (int d = 0; same && d < a->ndim; ++d) same = a->shape[d] == b->shape[d];
    return same;
}

/* Row-major next index; false after the last. */
static bool next(const fattn_tensor *t, int64_t *at) {
    for (int d = t->ndim - 1; d >= 0; --d) {
        if (++at[d] < t->shape[d]) return true;
        at[d] = 0;
    }
    return false;
}

static double element(const fattn_tensor *t, const int64_t *at) {
    int64_t offset = 0;
    for (int d = 0; d < t->ndim; ++d) offset += at[d] * t->stride[d];
    return fattni_load(t->data, t->dtype, offset);
}

/* Both NaN, or the same infinity. */
static bool same_nonfinite(double a, double b) { return (isnan(a) && isnan(b)) || a == b; }

static void baseline_bound(const fattn_tensor *want, const fattn_tensor *baseline, int32_t dtype, double *worst,
                           double *floor) {
    *worst = *floor = 0;
    if (fattn_tensor_numel(want) == 0) return;
    int64_t at[FATTN_MAX_DIMS] = {0};
    do {
        const double w = element(want, at), b = element(baseline, at);
        if (isfinite(w) && isfinite(b)) *worst = fmax(*worst, fabs(b - w));
        if (isfinite(w)) *floor = fmax(*floor, 2 * rounding_floor(dtype, w));
    } while (next(want, at));
}

fattn_status fattn_compare(fattn_ctx *ctx, const fattn_tensor *got, const fattn_tensor *want,
                           const fattn_tensor *baseline, double factor, fattn_tolerance tol, fattn_report *out) {
    if (!ctx) return FATTN_E_ARG;
    if (!out) return fattn_ctx_fail(ctx, FATTN_E_ARG, "compare: report is NULL");
    fattn_report r;
    FATTNI_TRY(fattni_take_struct(ctx, "fattn_report", out, &r, sizeof r));
    const uint32_t report_size = r.struct_size;
    FATTNI_TRY(fattni_check_tensor(ctx, "got", got));
    FATTNI_TRY(fattni_check_tensor(ctx, "want", want));
    if (baseline) FATTNI_TRY(fattni_check_tensor(ctx, "baseline", baseline));
    char a[96], b[96];
    if (!same_shape(got, want) || (baseline && !same_shape(baseline, want)))
        return fattn_ctx_fail(ctx, FATTN_E_SHAPE, "compare: got is %s, want is %s%s",
                              fattni_shape_text(got, a, sizeof a), fattni_shape_text(want, b, sizeof b),
                              baseline ? ", baseline must be as want" : "");
    if (ctx->device != FATTN_CPU) return fattn_ctx_fail(ctx, FATTN_E_DEVICE, "compare: tensors must be on the CPU");
    if (!(tol.atol >= 0 && tol.rtol >= 0 && tol.cosine >= 0))
        return fattn_ctx_fail(ctx, FATTN_E_ARG, "compare: tolerances %g, %g, %g: one is negative", tol.atol, tol.rtol,
                              tol.cosine);
    if (baseline && !(factor >= 0)) return fattn_ctx_fail(ctx, FATTN_E_ARG, "compare: factor %g is negative", factor);
    const fattn_tolerance by_dtype = default_tolerance(got->dtype);
    const double atol = tol.atol > 0 ? tol.atol : by_dtype.atol;
    const double rtol = tol.rtol > 0 ? tol.rtol : by_dtype.rtol;
    const double cosine = tol.cosine > 0 ? tol.cosine : by_dtype.cosine;

    r = (fattn_report){.struct_size = report_size};
    double bound = 0, floor = 0, aa = 0, bb = 0, ab = 0, squares = 0, worst = -1;
    if (baseline) {
        baseline_bound(want, baseline, got->dtype, &r.baseline, &floor);
        bound = factor * r.baseline + fmax(floor, tol.atol);
    }
    int64_t at[FATTN_MAX_DIMS] = {0}, finite = 0;
    const int64_t count = fattn_tensor_numel(want);
    if (count > 0) do {
            const double g = element(got, at), w = element(want, at);
            double excess; /* error over bound: the worst element has the largest */
            r.checked += 1;
            if (!isfinite(g) || !isfinite(w)) {
                if (same_nonfinite(g, w)) continue;
                r.nonfinite += 1;
                excess = INFINITY;
            } else {
                const double error = fabs(g - w), limit = baseline ? bound : atol + rtol * fabs(w);
                finite += 1;
                squares += error * error;
                aa += g * g, bb += w * w, ab += g * w;
                r.max_abs = fmax(r.max_abs, error);
                r.max_rel = fmax(r.max_rel, error / fmax(fabs(w), atol));
                excess = limit > 0 ? error / limit : error > 0 ? INFINITY : 0;
            }
            if (excess > 1) r.failed += 1;
            if (excess > worst) {
                worst = excess;
                for (int d = 0; d < want->ndim; ++d) r.worst_at[d] = at[d];
                r.worst_got = g;
                r.worst_want = w;
            }
        } while (next(want, at));
    r.rms = finite ? sqrt(squares / (double)finite) : 0;
    r.cosine = aa + bb > 0 ? 1 - 2 * ab / (aa + bb) : 0;
    /* The cosine distance finds errors that are within their bounds but biased. It is not tested for
       tensors of tiny values and those whose squares overflow (NaN here). */
    const bool aligned = baseline || rtol >= 1 || aa + bb <= 2 * atol * atol * (double)count || !(r.cosine > cosine) ||
                         r.max_abs <= atol;
    r.passed = r.failed == 0 && aligned;
    memcpy(out, &r, report_size < sizeof r ? report_size : sizeof r);
    if (r.passed) return FATTN_OK;
    char limit[40] = "";
    if (!aligned) snprintf(limit, sizeof limit, ", above its limit %.3g", cosine);
    return fattn_ctx_fail(ctx, FATTN_E_MISMATCH,
                          "compare: %lld of %lld differ (%lld non-finite), largest error %.3g, got "
                          "%.9g want %.9g at [%lld,%lld,%lld,%lld], cosine distance %.3g%s",
                          (long long)r.failed, (long long)r.checked, (long long)r.nonfinite, r.max_abs, r.worst_got,
                          r.worst_want, (long long)r.worst_at[0], (long long)r.worst_at[1], (long long)r.worst_at[2],
                          (long long)r.worst_at[3], r.cosine, limit);
}
