/* Stochastic rounding to BF16 and F16: the threshold between both neighbours against arithmetic in double, what is
   never rounded by chance, the random bits, and means of many roundings. */
#include "core/tensor/stochastic_rounding.h"

#include <criterion/criterion.h>
#include <float.h>
#include <math.h>

static const int32_t types[] = {FATTN_BF16, FATTN_F16};
static const uint16_t infinities[] = {0x7f80, 0x7c00};

static double value_of(int32_t dtype, uint16_t bits) {
    return (double)(dtype == FATTN_F16 ? fattni_f16_to_float(bits) : fattni_bf16_to_float(bits));
}
static uint16_t nearest(int32_t dtype, float x) {
    return dtype == FATTN_F16 ? fattni_float_to_f16(x) : fattni_float_to_bf16(x);
}

/* x, above the number `low` and below its neighbour: up for exactly fraction 2^32 of all random words. */
static void check(int32_t dtype, uint16_t low, float x) {
    const double a = value_of(dtype, low), b = value_of(dtype, (uint16_t)(low + 1));
    const double wanted = ((double)x - a) / (b - a) * 0x1p32; /* exact: b - a is a power of two */
    const uint32_t up = (uint32_t)wanted;
    cr_assert(wanted < 0x1p32 && (up == wanted || x < 0x1p-33f), "all bits count: %a", (double)x);
    for (int s = 0; s <= 0x8000; s += 0x8000) {
        const float signed_x = s ? -x : x;
        const uint32_t words[] = {0, up - 1, up, UINT32_MAX};
        for (int n = 0; n < 4; ++n) {
            const uint16_t want = (uint16_t)((low + (words[n] < up)) | s);
            const uint16_t got = fattni_half_stochastic(dtype, signed_x, words[n]);
            cr_assert_eq(got, want, "%s %a, %08x: %04x, not %04x", fattn_dtype_name((fattn_dtype)dtype),
                         (double)signed_x, words[n], got, want);
        }
    }
}

/* Between all neighbours: next to either one, at quarters, and at an odd fraction. In the subnormals of F16 this
   reaches 0, where a float may be nearer than 2^-32 of the distance, and F32's own subnormals. */
Test(stochastic_rounding, between_all_neighbours) {
    for (int n = 0; n < 2; ++n)
        for (uint16_t low = 0; low + 1 < infinities[n]; ++low) {
            const double a = value_of(types[n], low), b = value_of(types[n], (uint16_t)(low + 1));
            static const double parts[] = {0.25, 0.5, 0.75, 0x1.6cp-4};
            const float next = nextafterf((float)a, INFINITY);
            check(types[n], low, next);
            check(types[n], low, nextafterf((float)b, 0));
            for (int p = 0; p < 4; ++p) {
                const float x = (float)(a + (b - a) * parts[p]);
                if ((double)x > a && (double)x < b) check(types[n], low, x);
            }
        }
    static const float small[] = {0x1p-149f, 0x1.8p-127f, 0x1p-126f, 0x1.fffffep-57f,
                                  0x1p-56f,  0x1.8p-56f,  0x1p-40f,  0x1.fffffep-34f};
    for (size_t i = 0; i < sizeof small / sizeof *small; ++i) check(FATTN_F16, 0, small[i]);
}

Test(stochastic_rounding, numbers_that_fit_stay) {
    static const uint32_t words[] = {0, 1, 0x80000000u, UINT32_MAX};
    for (int n = 0; n < 2; ++n)
        for (uint32_t u = 0; u < 0x10000; ++u) {
            const float x = (float)value_of(types[n], (uint16_t)u);
            for (int w = 0; w < 4; ++w) {
                const uint16_t got = fattni_half_stochastic(types[n], x, words[w]);
                if (isnan(x))
                    cr_assert(isnan(value_of(types[n], got)) && (got & 0x8000) == (u & 0x8000), "%04x", u);
                else
                    cr_assert_eq(got, u, "%04x became %04x", u, got);
            }
        }
}

/* From the largest finite number on chance plays no part: infinity begins halfway to the next power of two. */
Test(stochastic_rounding, no_overflow_by_chance) {
    static const float largest[] = {0x1.fep127f, 65504}, half_ulp[] = {0x1p119f, 16};
    for (int n = 0; n < 2; ++n) {
        const float middle = n ? largest[n] + half_ulp[n] : 0x1.ffp127f;
        const float numbers[] = {largest[n], nextafterf(largest[n], INFINITY), nextafterf(middle, 0), middle, FLT_MAX,
                                 INFINITY};
        for (int i = 0; i < 6; ++i)
            for (int w = 0; w < 2; ++w)
                for (int s = -1; s <= 1; s += 2) {
                    const uint16_t got = fattni_half_stochastic(types[n], (float)s * numbers[i], w ? UINT32_MAX : 0);
                    cr_assert_eq(got, nearest(types[n], (float)s * numbers[i]), "%a", (double)numbers[i]);
                    cr_assert_eq(isinf(value_of(types[n], got)) != 0, numbers[i] >= middle);
                }
    }
    for (uint32_t payload = 1; payload < 0x800000; payload = payload * 2 + 1)
        for (int n = 0; n < 2; ++n) {
            const float x = fattni_bits_float(0x7f800000u | payload);
            cr_assert(isnan(value_of(types[n], fattni_half_stochastic(types[n], x, UINT32_MAX))));
        }
}

/* The counter as it is documented: files rely on it. */
Test(stochastic_rounding, bits_of_an_element) {
    static const int64_t elements[] = {0, 1, 2, 3, 4, 16383, (INT64_C(1) << 34) + 7};
    for (size_t k = 0; k < sizeof elements / sizeof *elements; ++k)
        for (int32_t param = 0; param < 3; ++param)
            for (int64_t step = 1; step < 4; ++step) {
                const int64_t i = elements[k];
                const fattni_block counter = {{(uint32_t)(i / 4 % 4294967296), (uint32_t)(i / 4 / 4294967296),
                                               4294967294u - (uint32_t)param, (uint32_t)step}};
                const fattni_block want = fattni_philox(77, counter),
                                   four = fattni_rounding_bits(77, step, param, i / 4);
                cr_assert_arr_eq(four.w, want.w, sizeof want.w);
                cr_assert_eq(fattni_rounding_word(77, step, param, i), want.w[i % 4]);
            }
    const fattni_block dropout = fattni_element_counter(0, 1, 0);
    cr_assert_neq(dropout.w[2], 4294967294u, "dropout has other planes");
}

/* n roundings of one number, over elements, over steps, and over parameters, are binomial: their mean is within 5
   standard deviations, sqrt(f (1 - f) / n) of the distance of both neighbours, of the number. Neighbours in each of
   these directions are uncorrelated within 5 / sqrt(n). */
Test(stochastic_rounding, means) {
    enum { N = 1 << 18 };
    static const double fractions[] = {0.5, 0.25, 0.9, 0.001, 0x1p-10};
    static uint8_t up[N];
    for (int n = 0; n < 2; ++n)
        for (size_t k = 0; k < sizeof fractions / sizeof *fractions; ++k)
            for (int way = 0; way < 3; ++way) {
                const double low = n ? 0x1p-15 : 1, ulp = n ? 0x1p-24 : 0x1p-7; /* F16: a subnormal */
                const float x = -(float)(low + fractions[k] * ulp);
                const double f = (-(double)x - low) / ulp;
                double sum = 0, pairs = 0;
                for (int64_t i = 0; i < N; ++i) {
                    const uint32_t word = way == 0   ? fattni_rounding_word(5, 1, 0, i)
                                          : way == 1 ? fattni_rounding_word(5, i, 0, 3)
                                                     : fattni_rounding_word(5, 1, (int32_t)i, 2);
                    const double got = value_of(types[n], fattni_half_stochastic(types[n], x, word));
                    up[i] = got == -(low + ulp);
                    cr_assert(up[i] || got == -low);
                    sum += got;
                }
                cr_assert_leq(fabs(sum / N - (double)x), 5 * ulp * sqrt(f * (1 - f) / N), "way %d, %g: %.9g", way, f,
                              sum / N);
                for (int64_t i = 0; i + 1 < N; ++i) pairs += (up[i] - f) * (up[i + 1] - f);
                cr_assert_leq(fabs(pairs), 5 * f * (1 - f) * sqrt(N), "way %d, %g", way, f);
            }
}
