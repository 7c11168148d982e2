/* The safe and the online softmax, against each other and against long double. */
#include "fwd/cpu/softmax.h"

#include <criterion/criterion.h>
#include <float.h>
#include <math.h>

enum { MOST = 1000 };

/* -8..8, from a small generator; one in `masks` is -inf when masks > 0. */
static void fill(double *s, int64_t n, uint32_t seed, uint32_t masks) {
    for (int64_t j = 0; j < n; ++j) {
        seed = seed * 1664525u + 1013904223u;
        s[j] = (double)(seed >> 8) * 0x1p-20 - 8;
        if (masks && (seed >> 16) % masks == 0) s[j] = -INFINITY;
    }
}

static long double true_lse(const double *s, int64_t n, double sink) {
    long double max = sink, sum = 0;
    for (int64_t j = 0; j < n; ++j) max = s[j] > max ? s[j] : max;
    if (max == -INFINITY) return max;
    for (int64_t j = 0; j < n; ++j) sum += expl(s[j] - max);
    return max + logl(sum + expl(sink - max));
}

static const int64_t sizes[] = {1, 2, 7, 8, 9, 64, 239, MOST};
enum { SIZES = sizeof sizes / sizeof *sizes };

Test(softmax, safe_f64) {
    double s[MOST], P[MOST];
    for (int n = 0; n < SIZES; ++n)
        for (uint32_t masks = 0; masks < 4; ++masks)
            for (int with_sink = 0; with_sink < 2; ++with_sink) {
                const double sink = with_sink ? 3.25 : -INFINITY;
                fill(s, sizes[n], (uint32_t)n + 1, masks);
                const double L = fattni_softmax_f64(s, sizes[n], sink, P);
                const long double want = true_lse(s, sizes[n], sink);
                cr_assert(L == want || fabsl(L - want) < 1e-14L, "%g, not %Lg", L, want);
                for (int64_t j = 0; j < sizes[n]; ++j) {
                    if (s[j] == -INFINITY)
                        cr_assert_eq(P[j], 0);
                    else
                        cr_assert_float_eq(P[j], (double)expl(s[j] - want), 4e-15);
                }
                fattni_softmax_f64(s, sizes[n], sink, s); /* in place */
                for (int64_t j = 0; j < sizes[n]; ++j) cr_assert_eq(s[j], P[j]);
            }
}

Test(softmax, safe_f32) {
    double s[MOST];
    float low[MOST], P[MOST];
    for (int n = 0; n < SIZES; ++n) {
        fill(s, sizes[n], (uint32_t)n + 77, 5);
        for (int64_t j = 0; j < sizes[n]; ++j) s[j] = low[j] = (float)s[j];
        const float L = fattni_softmax_f32(low, sizes[n], 1.5f, P);
        const long double want = true_lse(s, sizes[n], 1.5);
        cr_assert_float_eq(L, (double)want, 16 * (double)FLT_EPSILON);
        for (int64_t j = 0; j < sizes[n]; ++j)
            cr_assert_float_eq(P[j], (double)expl(s[j] - want), 24 * (double)FLT_EPSILON * P[j] + 1e-38);
    }
}

/* A row split at random positions, with parts merged in two orders, gives the same result. */
Test(softmax, online_in_any_split) {
    double s[MOST];
    float low[MOST];
    uint32_t seed = 5;
    for (int round = 0; round < 400; ++round) {
        const int64_t n = sizes[round % SIZES];
        fill(s, n, (uint32_t)round, (uint32_t)round % 4);
        for (int64_t j = 0; j < n; ++j) s[j] = low[j] = (float)s[j];
        fattni_softmax_state_f64 one = fattni_softmax_start_f64(), left = one, right = one;
        fattni_softmax_state_f32 one32 = fattni_softmax_start_f32();
        fattni_softmax_state_f32 left32 = one32, right32 = one32;
        one = fattni_softmax_add_f64(one, s, n);
        one32 = fattni_softmax_add_f32(one32, low, n);
        for (int64_t begin = 0; begin < n;) {
            seed = seed * 1664525u + 1013904223u;
            const int64_t size = fattni_min(n - begin, (seed >> 16) % 40); /* may be empty */
            const fattni_softmax_state_f64 part = fattni_softmax_add_f64(fattni_softmax_start_f64(), s + begin, size);
            const fattni_softmax_state_f32 part32 =
                fattni_softmax_add_f32(fattni_softmax_start_f32(), low + begin, size);
            left = fattni_softmax_merge_f64(left, part);
            right = fattni_softmax_merge_f64(part, right);
            left32 = fattni_softmax_merge_f32(left32, part32);
            right32 = fattni_softmax_merge_f32(part32, right32);
            begin += size;
        }
        const double want = (double)true_lse(s, n, -INFINITY);
        const double got[3] = {fattni_softmax_lse_f64(one), fattni_softmax_lse_f64(left),
                               fattni_softmax_lse_f64(right)};
        const float got32[3] = {fattni_softmax_lse_f32(one32), fattni_softmax_lse_f32(left32),
                                fattni_softmax_lse_f32(right32)};
        for (int way = 0; way < 3; ++way) {
            cr_assert(got[way] == want || fabs(got[way] - want) < 2e-13, "%.17g, not %.17g", got[way], want);
            /* The sum has one rounding per element: n u at most. */
            const double bound = (double)FLT_EPSILON * (8 + (double)n / 2);
            cr_assert((double)got32[way] == want || fabs((double)got32[way] - want) < bound, "%.9g, not %.9g",
                      (double)got32[way], want);
        }
    }
}

Test(softmax, far_from_zero) {
    const double s[3] = {-1e4, -1e4 - 1, -1e300};
    double P[3];
    const double L = fattni_softmax_f64(s, 3, -INFINITY, P);
    cr_assert_float_eq(L, -1e4 + log1p(exp(-1)), 1e-11);
    cr_assert_float_eq(P[0] + P[1], 1, 1e-15);
    cr_assert_eq(P[2], 0);
    const fattni_softmax_state_f64 x = fattni_softmax_add_f64(fattni_softmax_start_f64(), s, 3);
    cr_assert_float_eq(fattni_softmax_lse_f64(x), L, 1e-11);
    const float high[2] = {3e38f, -3e38f};
    float Pf[2];
    cr_assert_eq(fattni_softmax_f32(high, 2, -INFINITY, Pf), 3e38f);
    cr_assert(Pf[0] == 1 && Pf[1] == 0);
}

Test(softmax, nothing_and_everything_masked) {
    const double masked[2] = {-INFINITY, -INFINITY};
    double P[2] = {7, 7};
    const fattni_softmax_state_f64 start = fattni_softmax_start_f64();
    cr_assert_eq(fattni_softmax_f64(NULL, 0, -INFINITY, NULL), -INFINITY);
    cr_assert_eq(fattni_softmax_f64(NULL, 0, 2, NULL), 2);
    cr_assert_eq(fattni_softmax_f64(masked, 2, -INFINITY, P), -INFINITY);
    cr_assert(P[0] == 0 && P[1] == 0);
    cr_assert_eq(fattni_softmax_f64(masked, 2, -5, P), -5);
    cr_assert(P[0] == 0 && P[1] == 0);
    const fattni_softmax_state_f64 none = fattni_softmax_add_f64(start, masked, 2);
    cr_assert_eq(fattni_softmax_lse_f64(none), -INFINITY);
    cr_assert_eq(fattni_softmax_lse_f64(fattni_softmax_merge_f64(none, start)), -INFINITY);
    const double two = 2;
    const fattni_softmax_state_f64 some = fattni_softmax_add_f64(start, &two, 1);
    cr_assert_eq(fattni_softmax_lse_f64(fattni_softmax_merge_f64(none, some)), 2);
    cr_assert_eq(fattni_softmax_lse_f64(fattni_softmax_merge_f64(some, none)), 2);
}

Test(softmax, sinks_at_the_ends) {
    const double s[2] = {1, 2};
    double P[2];
    cr_assert_eq(fattni_softmax_f64(s, 2, INFINITY, P), INFINITY);
    cr_assert(P[0] == 0 && P[1] == 0);
    cr_assert_eq(fattni_softmax_f64(s, 2, 1e38, P), 1e38);
    cr_assert(P[0] == 0 && P[1] == 0);
    cr_assert_eq(fattni_softmax_f64(s, 2, -1e38, P), fattni_softmax_f64(s, 2, -INFINITY, P));
    const double infinite[2] = {1, INFINITY};
    cr_assert_eq(fattni_softmax_f64(infinite, 2, INFINITY, P), INFINITY);
    cr_assert(P[0] == 0 && P[1] == 0);
}

/* Neither hides a NaN or an infinite logit at any position. */
Test(softmax, non_finite_logits_show) {
    const double bad[2] = {NAN, INFINITY};
    for (int kind = 0; kind < 2; ++kind)
        for (int place = 0; place < 3; ++place) {
            double s[3] = {0.5, -INFINITY, 1}, P[3];
            s[place] = bad[kind];
            cr_assert(isnan(fattni_softmax_f64(s, 3, -INFINITY, P)));
            for (int j = 0; j < 3; ++j) cr_assert(s[j] == -INFINITY ? P[j] == 0 : isnan(P[j]) || P[j] == 0);
            cr_assert(isnan(P[place]));
            const fattni_softmax_state_f64 start = fattni_softmax_start_f64();
            const fattni_softmax_state_f64 all = fattni_softmax_add_f64(start, s, 3);
            const fattni_softmax_state_f64 head = fattni_softmax_add_f64(start, s, 1);
            const fattni_softmax_state_f64 tail = fattni_softmax_add_f64(start, s + 1, 2);
            cr_assert(isnan(fattni_softmax_lse_f64(all)));
            cr_assert(isnan(fattni_softmax_lse_f64(fattni_softmax_merge_f64(head, tail))));
            cr_assert(isnan(fattni_softmax_lse_f64(fattni_softmax_merge_f64(tail, head))));
        }
}
