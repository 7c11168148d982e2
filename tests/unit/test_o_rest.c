/* core/attention/o_rest.h: a number, what it is rounded to, the byte between them, and what comes back. */
#include "core/attention/o_rest.h"
#include "core/tensor/numeric.h"

#include <criterion/criterion.h>
#include <inttypes.h>
#include <math.h>

typedef struct format {
    fattn_dtype dtype;
    int bits;
} format;
static const format formats[] = {{FATTN_BF16, FATTNI_O_REST_BF16}, {FATTN_F16, FATTNI_O_REST_F16}};

static float rounded_to(fattn_dtype dtype, float x) {
    return dtype == FATTN_BF16 ? fattni_bf16_to_float(fattni_float_to_bf16(x))
                               : fattni_f16_to_float(fattni_float_to_f16(x));
}

/* Within half a unit, where the rest has one byte; within one unit, where rounding took off half a last place; never
   further than the rounded number. Bits of floats of one sign are in the order of their magnitudes. */
static void check(const format *f, uint32_t exact) {
    const float x = fattni_bits_float(exact), y = rounded_to(f->dtype, x);
    const uint32_t rounded = fattni_float_bits(y);
    const int32_t rest = fattni_o_rest(exact, rounded, f->bits);
    const uint32_t back = fattni_o_exact(rounded, rest, f->bits);
    const float z = fattni_bits_float(back);
    const char *const name = fattn_dtype_name(f->dtype);
    cr_assert(rest >= -128 && rest <= 127, "%s %08" PRIx32 ": the rest is %" PRId32, name, exact, rest);
    if (isnan(x)) {
        cr_assert(isnan(z), "%s %08" PRIx32 ": a NaN became %g", name, exact, (double)z);
        return;
    }
    if (isinf(y)) {
        cr_assert(z == y, "%s %08" PRIx32 ": an infinity became %g", name, exact, (double)z);
        return;
    }
    const double off = fabs((double)z - (double)x), before = fabs((double)y - (double)x);
    cr_assert(off <= before, "%s %a: rounded to %a, back %a, which is further off", name, (double)x, (double)y,
              (double)z);
    const int64_t unit = (int64_t)1 << f->bits, difference = llabs((int64_t)exact - (int64_t)rounded);
    const int64_t error = llabs((int64_t)exact - (int64_t)back);
    if (2 * difference < 255 * unit)
        cr_assert(2 * error <= unit, "%s %a: back %a", name, (double)x, (double)z);
    else if (difference <= 128 * unit)
        cr_assert(error <= unit, "%s %a: back %a", name, (double)x, (double)z);
    const double u = ldexp(1, f->bits - 24); /* half a unit, relative to the power of two */
    const bool normal = fabsf(x) >= (f->dtype == FATTN_BF16 ? 0x1p-126f : 0x1p-14f);
    cr_assert(!normal || off <= 2 * u * fabs((double)x), "%s %a: back %a", name, (double)x, (double)z);
}

static void check_both(uint32_t magnitude) {
    for (int n = 0; n < 4; ++n) check(&formats[n / 2], magnitude | (n % 2 ? 0x80000000u : 0));
}

/* Every exponent, infinity and NaN among them; significands next to each eighth, whose roundings are ties, numbers that
   need none, and the next power of two. */
Test(o_rest, special_numbers) {
    for (uint32_t exponent = 0; exponent < 256; ++exponent)
        for (int shift = 0; shift < 24; ++shift)
            for (uint32_t top = 0; top < 8; ++top)
                for (uint32_t near = 0; near < 9; ++near) {
                    const uint32_t significand = (top << 20) + (1u << shift) + near - 4;
                    check_both(exponent << 23 | (significand & 0x7fffff));
                }
}

Test(o_rest, random_numbers) {
    uint64_t state = 1;
    for (int n = 0; n < 4000000; ++n) {
        state = state * 6364136223846793005ull + 1442695040888963407ull;
        check_both((uint32_t)(state >> 33));
    }
}

Test(o_rest, examples) {
    static const struct {
        int format;
        float exact;
        int32_t rest;
        float back;
    } cases[] = {
        {0, 0, 0, 0},
        {0, 1, 0, 1},
        {0, 1 + 0x1p-8f, 127, 1 + 0x7fp-15f}, /* a tie: down to even */
        {0, 1 + 0x3p-8f, -128, 1 + 0x3p-8f},  /* a tie: up to even */
        {0, 1 + 0x1p-15f, 1, 1 + 0x1p-15f},   /* a unit */
        {0, 1 + 0x1p-17f, 0, 1},              /* less than half of one */
        {0, 2 - 0x1p-10f, -32, 2 - 0x1p-10f}, /* up to the next power of two */
        {0, 0x1.fffp127f, -8, INFINITY},      /* to infinity */
        {1, 1 + 0x1p-18f, 1, 1 + 0x1p-18f},
        {1, 1 + 0x1p-11f, 127, 1 + 0x7fp-18f},
        {1, -2 + 0x1p-13f, -32, -2 + 0x1p-13f},
        {1, 65519, 120, 65519},
        {1, 65520, -128, INFINITY},
        {1, -1e30f, -128, -INFINITY},
    };
    for (size_t n = 0; n < sizeof cases / sizeof *cases; ++n) {
        const format *const f = &formats[cases[n].format];
        const uint32_t exact = fattni_float_bits(cases[n].exact);
        const uint32_t rounded = fattni_float_bits(rounded_to(f->dtype, cases[n].exact));
        const int32_t rest = fattni_o_rest(exact, rounded, f->bits);
        cr_assert_eq(rest, cases[n].rest, "case %zu: %" PRId32, n, rest);
        const float back = fattni_bits_float(fattni_o_exact(rounded, rest, f->bits));
        cr_assert(back == cases[n].back, "case %zu: %a", n, (double)back);
    }
}

Test(o_rest, rows_are_multiples_of_16_bytes) {
    cr_assert(FATTNI_O_REST_PITCH(1) == 16 && FATTNI_O_REST_PITCH(16) == 16 && FATTNI_O_REST_PITCH(17) == 32 &&
              FATTNI_O_REST_PITCH(256) == 256);
}
