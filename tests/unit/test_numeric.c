/* 16-bit and 8-bit floats and element access, exhaustively, against arithmetic in double. */
#include "core/tensor/numeric.h"

#include <criterion/criterion.h>
#include <math.h>

typedef struct format {
    int32_t dtype;
    int mantissa, bias; /* bits stored; exponent bias */
} format;
static const format formats[] = {{FATTN_F16, 10, 15}, {FATTN_BF16, 7, 127}};

/* The value of a bit pattern, by definition of the format. */
static double value_of(const format *f, uint16_t bits) {
    const int exponent = (bits & 0x7fff) >> f->mantissa, top = (0x7fff >> f->mantissa);
    const int fraction = bits & ((1 << f->mantissa) - 1);
    double magnitude;
    if (exponent == top)
        magnitude = fraction ? NAN : INFINITY;
    else if (exponent == 0)
        magnitude = ldexp(fraction, 1 - f->bias - f->mantissa);
    else
        magnitude = ldexp((1 << f->mantissa) + fraction, exponent - f->bias - f->mantissa);
    return bits & 0x8000 ? -magnitude : magnitude;
}

typedef union cell {
    double f64;
    uint16_t u16;
    int32_t i32;
    uint8_t u8;
    int8_t i8;
} cell; /* as large as the largest element */

static uint16_t stored(int32_t dtype, double x) {
    cell c;
    fattni_store(&c, dtype, 0, x);
    return c.u16;
}

static double loaded(int32_t dtype, uint16_t bits) {
    const cell c = {.u16 = bits};
    return fattni_load(&c, dtype, 0);
}

static uint16_t from_float(int32_t dtype, float x) {
    return dtype == FATTN_F16 ? fattni_float_to_f16(x) : fattni_float_to_bf16(x);
}

Test(numeric, every_pattern_means_what_the_format_says_and_survives) {
    for (size_t n = 0; n < 2; ++n)
        for (uint32_t u = 0; u < 0x10000; ++u) {
            const format *const f = &formats[n];
            const uint16_t bits = (uint16_t)u;
            const double want = value_of(f, bits), got = loaded(f->dtype, bits);
            if (isnan(want)) {
                cr_assert(isnan(got), "%04x", bits);
                const uint16_t back = stored(f->dtype, got);
                cr_assert(isnan(value_of(f, back)), "%04x", bits);
                cr_assert_eq(back & 0x8000, bits & 0x8000, "%04x", bits);
                continue;
            }
            cr_assert(got == want && !signbit(got) == !signbit(want), "%04x: %g not %g", bits, got, want);
            cr_assert_eq(stored(f->dtype, got), bits, "%04x", bits);
            cr_assert_eq(from_float(f->dtype, (float)got), bits, "%04x", bits);
        }
}

/* Between two neighbours only the midpoint matters. */
Test(numeric, rounding_is_to_nearest_even_and_happens_once) {
    for (size_t n = 0; n < 2; ++n) {
        const format *const f = &formats[n];
        const uint16_t infinity = (uint16_t)(0x7fff >> f->mantissa << f->mantissa);
        for (uint16_t low = 0; low < infinity; ++low) {
            const uint16_t high = (uint16_t)(low + 1), even = low & 1 ? high : low;
            const double a = value_of(f, low);
            /* Infinity is at the position of the next value. */
            const double b = high == infinity ? 2 * a - value_of(f, (uint16_t)(low - 1)) : value_of(f, high);
            const double middle = a + (b - a) / 2; /* exact */
            for (int sign = -1; sign <= 1; sign += 2) {
                const int s = sign < 0 ? 0x8000 : 0;
                cr_assert_eq(stored(f->dtype, sign * middle), even | s, "%04x", low);
                cr_assert_eq(from_float(f->dtype, (float)(sign * middle)), even | s, "%04x", low);
                /* One double beside it: as a float it would be the middle itself. */
                const double above = nextafter(middle, INFINITY), below = nextafter(middle, 0);
                cr_assert_eq(stored(f->dtype, sign * above), high | s, "%04x", low);
                cr_assert_eq(stored(f->dtype, sign * below), low | s, "%04x", low);
                const float m = (float)middle;
                cr_assert_eq(from_float(f->dtype, (float)sign * nextafterf(m, INFINITY)), high | s);
                cr_assert_eq(from_float(f->dtype, (float)sign * nextafterf(m, 0)), low | s);
            }
        }
    }
}

Test(numeric, the_ends_of_the_range) {
    cr_assert_eq(stored(FATTN_F16, 65504), 0x7bff);
    cr_assert_eq(stored(FATTN_F16, 65519.999999999993), 0x7bff);
    cr_assert_eq(stored(FATTN_F16, 65520), 0x7c00);
    for (size_t n = 0; n < 2; ++n) {
        const int32_t t = formats[n].dtype;
        const uint16_t infinity = (uint16_t)(0x7fff >> formats[n].mantissa << formats[n].mantissa);
        cr_assert_eq(stored(t, 1e300), infinity);
        cr_assert_eq(stored(t, -1e300), infinity | 0x8000);
        cr_assert_eq(stored(t, INFINITY), infinity);
        cr_assert_eq(stored(t, 1e-300), 0);
        cr_assert_eq(stored(t, -1e-300), 0x8000);
        cr_assert_eq(stored(t, -0.0), 0x8000);
        cr_assert(isnan(value_of(&formats[n], stored(t, NAN))));
    }
    cr_assert_eq(stored(FATTN_BF16, 3.4028235677973366e38), 0x7f80, "just above FLT_MAX");
    cr_assert_eq(stored(FATTN_BF16, 3.3961775292304957e38), 0x7f80, "halfway to 2^128");
}

/* A NaN whose payload is in the dropped bits must not become an infinity. */
Test(numeric, nan_stays_nan) {
    for (uint32_t payload = 1; payload < 0x800000; payload = payload * 2 + 1)
        for (int sign = 0; sign < 2; ++sign) {
            const float x = fattni_bits_float(0x7f800000u | payload | (sign ? 0x80000000u : 0));
            cr_assert(isnan(fattni_f16_to_float(fattni_float_to_f16(x))));
            cr_assert(isnan(fattni_bf16_to_float(fattni_float_to_bf16(x))));
        }
}

Test(numeric, integers_saturate_and_round_to_even) {
    static const double values[] = {0,    0.5,  1.5,   2.5,   -0.5,  -1.5,      -2.5,
                                    0.49, 0.51, -0.49, -0.51, 254.5, 255.49999, 1e6 + 0.5};
    for (size_t n = 0; n < sizeof values / sizeof *values; ++n) {
        cell c;
        fattni_store(&c, FATTN_I32, 0, values[n]);
        const int32_t i = c.i32;
        fattni_store(&c, FATTN_U8, 0, values[n]);
        const uint8_t u = c.u8;
        fattni_store(&c, FATTN_I8, 0, values[n]);
        const int8_t s = c.i8;
        cr_assert_eq(i, (int32_t)rint(values[n]), "%g gave %d", values[n], i);
        cr_assert_eq(s, (int8_t)fmin(127, fmax(-128, rint(values[n]))), "%g gave %d", values[n], s);
        cr_assert_eq(u, (uint8_t)fmin(255, fmax(0, rint(values[n]))), "%g gave %u", values[n], u);
    }
    static const struct {
        double x;
        int32_t i;
        uint8_t u;
        int8_t s;
    } ends[] = {
        {1e300, INT32_MAX, 255, 127},
        {-1e300, INT32_MIN, 0, -128},
        {INFINITY, INT32_MAX, 255, 127},
        {-INFINITY, INT32_MIN, 0, -128},
        {NAN, 0, 0, 0},
        {2147483647.4, INT32_MAX, 255, 127},
        {-2147483648.4, INT32_MIN, 0, -128},
        {255.5, 256, 255, 127},
        {-0.6, -1, 0, -1},
        {126.5, 126, 126, 126},
        {-127.6, -128, 0, -128},
    };
    for (size_t n = 0; n < sizeof ends / sizeof *ends; ++n) {
        cell c;
        fattni_store(&c, FATTN_I32, 0, ends[n].x);
        const int32_t i = c.i32;
        fattni_store(&c, FATTN_U8, 0, ends[n].x);
        const uint8_t u = c.u8;
        fattni_store(&c, FATTN_I8, 0, ends[n].x);
        const int8_t s = c.i8;
        cr_assert_eq(i, ends[n].i, "%g gave %d", ends[n].x, i);
        cr_assert_eq(s, ends[n].s, "%g gave %d", ends[n].x, s);
        cr_assert_eq(u, ends[n].u, "%g gave %u", ends[n].x, u);
    }
}

/* Codes of FATTN_FP8_INT8: all quarters, so also ties and numbers next to them. */
Test(numeric, integer_codes) {
    for (int n = -600; n <= 600; ++n)
        for (int side = -1; side <= 1; ++side) {
            const float x = (float)n / 4, y = side ? nextafterf(x, side < 0 ? -INFINITY : INFINITY) : x;
            const int8_t got = fattni_float_to_i8(y);
            cr_assert_eq(got, fmaxf(-127, fminf(127, rintf(y))), "%g gave %d", (double)y, got);
        }
    static const double ends[][2] = {{1e38, 127}, {-1e38, -127}, {INFINITY, 127}, {-INFINITY, -127}, {NAN, -127}};
    for (int n = 0; n < 5; ++n) cr_assert_eq(fattni_float_to_i8((float)ends[n][0]), ends[n][1], "%g", ends[n][0]);
}

Test(numeric, load_and_store_index_by_element) {
    static const int32_t dtypes[] = {FATTN_F64, FATTN_F32, FATTN_F16,    FATTN_BF16,
                                     FATTN_I32, FATTN_U8,  FATTN_F8E4M3, FATTN_I8};
    for (size_t n = 0; n < sizeof dtypes / sizeof *dtypes; ++n) {
        double room[4] = {0};
        for (int i = 0; i < 4; ++i) fattni_store(room, dtypes[n], i, i + 3);
        for (int i = 0; i < 4; ++i) cr_assert_eq(fattni_load(room, dtypes[n], i), i + 3);
    }
}

/* E4M3's 127 values from 0 up by its definition: exponents -6 and up, three bits of fraction, 0x7f is NaN. */
static double e4m3_value(int code) {
    const int exponent = code >> 3, fraction = code & 7;
    return exponent ? ldexp(8 + fraction, exponent - 10) : ldexp(fraction, -9);
}

static uint8_t stored_e4m3(double x) {
    cell c;
    fattni_store(&c, FATTN_F8E4M3, 0, x);
    return c.u8;
}

static double loaded_e4m3(uint8_t code) {
    const cell c = {.u8 = code};
    return fattni_load(&c, FATTN_F8E4M3, 0);
}

Test(numeric, every_code_of_e4m3) {
    static const double some[][2] = {{0x00, 0},     {0x01, 0x1p-9},  {0x07, 0x1.cp-7}, {0x08, 0x1p-6}, {0x38, 1},
                                     {0x39, 1.125}, {0x54, 12},      {0x77, 240},      {0x78, 256},    {0x7e, 448},
                                     {0xb8, -1},    {0x81, -0x1p-9}, {0xfe, -448}};
    for (size_t n = 0; n < sizeof some / sizeof *some; ++n)
        cr_assert_eq(loaded_e4m3((uint8_t)some[n][0]), some[n][1], "%g", some[n][0]);
    for (int code = 0; code < 256; ++code) {
        const double want = e4m3_value(code & 0x7f), got = loaded_e4m3((uint8_t)code);
        if ((code & 0x7f) == 0x7f) {
            cr_assert(isnan(got) && !signbit(got) == !(code & 0x80));
            cr_assert_eq(stored_e4m3(got), 0x7f);
            continue;
        }
        cr_assert(fabs(got) == want && !signbit(got) == !(code & 0x80), "%02x: %g", code, got);
        cr_assert_eq(stored_e4m3(got), code);
        cr_assert_eq(fattni_float_to_e4m3((float)got), code);
    }
}

Test(numeric, e4m3_rounds_to_nearest_even_once) {
    for (int low = 0; low < 0x7e; ++low) {
        const double a = e4m3_value(low), b = e4m3_value(low + 1), middle = (a + b) / 2;
        const int even = low & 1 ? low + 1 : low;
        for (int s = 0; s <= 0x80; s += 0x80) {
            const double sign = s ? -1 : 1;
            cr_assert_eq(stored_e4m3(sign * middle), even | s, "%02x", low);
            cr_assert_eq(stored_e4m3(sign * nextafter(middle, 1e9)), (low + 1) | s, "%02x", low);
            cr_assert_eq(stored_e4m3(sign * nextafter(middle, 0)), low | s, "%02x", low);
            const float m = (float)middle, f = (float)sign;
            cr_assert_eq(fattni_float_to_e4m3(f * m), even | s, "%02x", low);
            cr_assert_eq(fattni_float_to_e4m3(f * nextafterf(m, 1e9f)), (low + 1) | s, "%02x", low);
            cr_assert_eq(fattni_float_to_e4m3(f * nextafterf(m, 0)), low | s, "%02x", low);
        }
    }
}

/* 464 lies between 448 and what would be 480. */
Test(numeric, e4m3_saturates) {
    static const double large[] = {448, 463.9, 464, 464.1, 480, 1e300, INFINITY};
    for (size_t n = 0; n < sizeof large / sizeof *large; ++n) {
        cr_assert_eq(stored_e4m3(large[n]), 0x7e, "%g", large[n]);
        cr_assert_eq(stored_e4m3(-large[n]), 0xfe, "%g", large[n]);
        cr_assert_eq(fattni_float_to_e4m3((float)large[n]), 0x7e, "%g", large[n]);
    }
    cr_assert_eq(stored_e4m3(1e-300), 0);
    cr_assert_eq(stored_e4m3(-1e-300), 0x80);
    cr_assert_eq(stored_e4m3(-0.0), 0x80);
    cr_assert_eq(stored_e4m3(NAN), 0x7f);
    for (uint32_t payload = 1; payload < 0x800000; payload = payload * 2 + 1)
        for (uint32_t sign = 0; sign < 2; ++sign)
            cr_assert_eq(fattni_float_to_e4m3(fattni_bits_float(0x7f800000u | payload | sign << 31)), 0x7f);
}
