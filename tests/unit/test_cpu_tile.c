/* The tile kernels one by one, for every instruction set and type of products. */
#include "amx_model.h"
#include "attention.h"
#include "core/cpu/tile.h"
#include "core/tensor/philox.h"

#include <criterion/criterion.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

static const double poison = 12345;

static void each(void (*test)(const fattni_cpu_kernels *k)) {
    for (int isa = FATTNI_ISA_BASELINE; isa <= FATTNI_ISA_AMXFP16; ++isa) {
        fattn_ctx *const ctx = attention_context_isa(1, isa);
        if (!ctx) continue;
        const fattni_cpu_kernels *const f32 = fattni_cpu_kernels_of(ctx, FATTN_F32);
        const fattni_cpu_kernels *const bf16 = fattni_cpu_kernels_of(ctx, FATTN_BF16);
        const fattni_cpu_kernels *const f16 = fattni_cpu_kernels_of(ctx, FATTN_F16);
        test(f32);
        test(fattni_cpu_kernels_of(ctx, FATTN_F64));
        cr_assert_eq(bf16 != f32, isa >= FATTNI_ISA_AVX512BF16);
        cr_assert_eq(f16 != f32, isa >= FATTNI_ISA_AMXFP16);
        if (bf16 != f32 && (isa < FATTNI_ISA_AMX || fattni_allow_amx())) test(bf16);
        if (f16 != f32 && fattni_allow_amx()) test(f16);
        fattn_ctx_destroy(ctx);
    }
#ifdef FATTNI_HAVE_NARROW_PRODUCTS
    test(&fattni_cpu_amx_model);
    test(&fattni_cpu_amxfp16_model);
#endif
}

Test(cpu_tile, f32_products) {
    const fattn_ctx_options o = {.struct_size = sizeof o, .flags = FATTN_CTX_F32_PRODUCTS};
    fattn_ctx *ctx;
    cr_assert_eq(fattn_ctx_create(&o, &ctx), FATTN_OK);
    cr_assert_eq(fattni_cpu_kernels_of(ctx, FATTN_BF16), fattni_cpu_kernels_of(ctx, FATTN_F32));
    cr_assert_eq(fattni_cpu_kernels_of(ctx, FATTN_F16), fattni_cpu_kernels_of(ctx, FATTN_F32));
    fattn_ctx_destroy(ctx);
}

/* An array of reals, aligned only to one of them. */
typedef struct reals {
    const fattni_cpu_kernels *k;
    char *p;
    int64_t count;
} reals;

static reals reals_new(const fattni_cpu_kernels *k, int64_t count, double x) {
    const size_t size = fattn_dtype_size(k->dtype);
    reals r = {k, (char *)malloc((size_t)(count + 1) * size) + size, count};
    for (int64_t n = 0; n < count; ++n) fattni_store(r.p, k->dtype, n, x);
    return r;
}
static void reals_free(reals r) { free(r.p - fattn_dtype_size(r.k->dtype)); }
static double at(reals r, int64_t n) { return fattni_load(r.p, r.k->dtype, n); }
static void set(reals r, int64_t n, double x) { fattni_store(r.p, r.k->dtype, n, x); }
static char *from(reals r, int64_t n) { return r.p + n * (int64_t)fattn_dtype_size(r.k->dtype); }

/* Where a diagonal cuts a tile, elements outside of the band are not used. */
static bool seen(const fattni_tile *t, int64_t i, int64_t j) {
    return i < t->rows && j < t->keys && j >= i + t->lo && j <= i + t->hi;
}

static void transposes(const fattni_cpu_kernels *k) {
    static const int64_t columns[] = {1, 3, 16, 17, 64, 111};
    for (int c = 0; c < 6; ++c)
        for (int64_t rows = 1; rows <= k->rows; rows += rows % 8 ? 1 : 7) {
            const int64_t width = columns[c], stride = width + 3;
            reals x = reals_new(k, k->rows * stride, NAN), packed = reals_new(k, width * k->rows, NAN);
            for (int64_t i = 0; i < rows; ++i)
                for (int64_t d = 0; d < width; ++d) set(x, i * stride + d, (double)(i * 1000 + d));
            k->pack(rows, width, k->dtype, x.p, stride, NULL, packed.p);
            for (int64_t i = 0; i < k->rows; ++i)
                for (int64_t d = 0; d < width; ++d)
                    cr_assert_eq(at(packed, d * k->rows + i), i < rows ? (double)(i * 1000 + d) : 0);

            reals back = reals_new(k, k->rows * stride, poison), factor = reals_new(k, k->rows, 0);
            for (int64_t i = 0; i < k->rows; ++i) set(factor, i, (double)(i % 3));
            reals weighted = reals_new(k, packed.count, NAN);
            for (int64_t d = 0; d < width && rows > 3; ++d) set(x, 3 * stride + d, NAN); /* weighs 0 */
            k->pack(rows, width, k->dtype, x.p, stride, factor.p, weighted.p);
            for (int64_t e = 0; e < packed.count; ++e)
                cr_assert_eq(at(weighted, e), at(packed, e) * (double)(e % k->rows % 3));
            reals_free(weighted);
            const int64_t first = rows / 3;
            k->unpack(first, rows, width, packed.p, rows % 2 ? factor.p : NULL, back.p, stride);
            for (int64_t n = 0; n < back.count; ++n) {
                const int64_t i = n / stride, d = n % stride;
                const bool written = i >= first && i < rows && d < width;
                const double f = rows % 2 ? (double)(i % 3) : 1;
                cr_assert_eq(at(back, n), written ? (double)(i * 1000 + d) * f : poison);
            }
            reals_free(x), reals_free(packed), reals_free(back), reals_free(factor);
        }
}
Test(cpu_tile, pack_and_unpack) { each(transposes); }

static void puts_and_dots(const fattni_cpu_kernels *k) {
    const int64_t rows = 5, width = 37, x_stride = 40, y_stride = 41;
    reals x = reals_new(k, rows * x_stride, 3), y = reals_new(k, rows * y_stride, poison);
    k->put(rows, width, x.p, x_stride, false, k->dtype, y.p, y_stride);
    k->put(rows, width, x.p, x_stride, true, k->dtype, y.p, y_stride);
    for (int64_t n = 0; n < y.count; ++n) cr_assert_eq(at(y, n), n % y_stride < width ? 6 : poison);
    reals out = reals_new(k, rows + 1, poison);
    for (int64_t i = 0; i < rows; ++i) set(y, i * y_stride + width - 1, (double)i);
    k->dots(rows, width, k->dtype, x.p, x_stride, k->dtype, y.p, y_stride, out.p);
    for (int64_t i = 0; i < rows; ++i) cr_assert_eq(at(out, i), 3 * 6 * 36 + 3 * (double)i);
    cr_assert_eq(at(out, rows), poison);
    reals_free(x), reals_free(y), reals_free(out);
}
Test(cpu_tile, put_and_dots) { each(puts_and_dots); }

static const fattn_dtype narrow[2] = {FATTN_F16, FATTN_BF16};
static float value(fattn_dtype t, int h) {
    return t == FATTN_F16 ? fattni_f16_to_float((uint16_t)h) : fattni_bf16_to_float((uint16_t)h);
}
static uint16_t rounded(fattn_dtype t, float x) {
    return t == FATTN_F16 ? fattni_float_to_f16(x) : fattni_float_to_bf16(x);
}

/* Every 16-bit number becomes the float that numeric.h says; columns beyond become zero. */
static void widens(const fattni_cpu_kernels *k) {
    if (k->dtype != FATTN_F32) return;
    enum { WIDTH = 131, STRIDE = 137, PITCH = 144 };
    for (int n = 0; n < 2; ++n)
        for (int first = 0; first < 65536; first += WIDTH) {
            uint16_t x[2 * STRIDE];
            float y[2 * PITCH + 1];
            for (int i = 0; i < 2; ++i)
                for (int d = 0; d < STRIDE; ++d) x[i * STRIDE + d] = (uint16_t)(first + d + i * 4099);
            y[2 * PITCH] = 3;
            k->widen(2, WIDTH, narrow[n], x, STRIDE, y, PITCH);
            for (int e = 0; e < 2 * PITCH; ++e) {
                const int d = e % PITCH;
                const float want = d < WIDTH ? value(narrow[n], x[e / PITCH * STRIDE + d]) : 0;
                cr_assert(isnan(want) ? isnan(y[e]) : memcmp(&y[e], &want, sizeof want) == 0,
                          "%s %s: column %d gives %g, not %g", k->isa, fattn_dtype_name(narrow[n]), d, (double)y[e],
                          (double)want);
            }
            cr_assert_eq(y[2 * PITCH], 3);
        }
}
Test(cpu_tile, widen_every_16_bit_number) { each(widens); }

/* As in a program linked with -ffast-math: subnormal floats are 0. */
static void flush_subnormals(bool on) {
#if defined(__SSE__)
    const unsigned both = 0x8040, now = __builtin_ia32_stmxcsr();
    __builtin_ia32_ldmxcsr(on ? now | both : now & ~both);
#elif defined(__aarch64__)
    uint64_t now;
    const uint64_t fz = 1u << 24;
    __asm__ volatile("mrs %0, fpcr" : "=r"(now));
    __asm__ volatile("msr fpcr, %0" : : "r"(on ? now | fz : now & ~fz));
#else
    (void)on;
#endif
}

Test(cpu_tile, widen_every_16_bit_number_where_subnormals_are_flushed) {
    const volatile float least = 0x1p-149f;
    flush_subnormals(true);
    const volatile float twice = least * 2;
    const bool flushed = fattni_float_bits(twice) == 0;
    if (flushed) each(widens);
    flush_subnormals(false);
    if (!flushed) cr_skip_test("subnormal floats are not flushed here");
}

/* 16-bit numbers are packed as floats of the same value. */
static void packs_halves(const fattni_cpu_kernels *k) {
    if (k->dtype != FATTN_F32) return;
    enum { STRIDE = 67, MOST = 48 };
    static uint16_t x[MOST * STRIDE];
    static float wide[MOST * STRIDE], want[64 * MOST], got[64 * MOST];
    for (int n = 0; n < 2; ++n)
        for (int64_t rows = 1; rows <= k->rows; ++rows)
            for (int64_t width = 59; width <= 64; width += 5) {
                for (int e = 0; e < MOST * STRIDE; ++e) {
                    x[e] = (uint16_t)(e * 37 % 0x7c00); /* finite */
                    wide[e] = e < rows * STRIDE ? value(narrow[n], x[e]) : NAN;
                }
                k->pack(rows, width, narrow[n], x, STRIDE, NULL, got);
                k->pack(rows, width, FATTN_F32, wide, STRIDE, NULL, want);
                cr_assert_eq(memcmp(got, want, (size_t)(width * k->rows) * sizeof(float)), 0, "%s %s: %lld rows",
                             k->isa, fattn_dtype_name(narrow[n]), (long long)rows);
            }
}
Test(cpu_tile, pack_16_bits) { each(packs_halves); }

/* The halfway points between neighbours, the floats next to them, and floats of all sizes are rounded bitwise
   as in numeric.h; nothing beyond the columns is written. */
static void narrows(const fattni_cpu_kernels *k) {
    if (k->dtype != FATTN_F32) return;
    enum { WIDTH = 67 };
    for (int n = 0; n < 2; ++n)
        for (uint32_t first = 0; first < 1u << 19; first += WIDTH) {
            float x[WIDTH];
            uint16_t y[WIDTH + 1];
            y[WIDTH] = 0x1234;
            for (uint32_t d = 0; d < WIDTH; ++d) {
                const int h = (int)((first + d) >> 2);
                const float middle = value(narrow[n], h) / 2 + value(narrow[n], h + 1) / 2;
                const uint32_t kind = (first + d) & 3;
                x[d] = kind == 3 ? fattni_bits_float((first + d) * 2654435761u)
                                 : fattni_bits_float(fattni_float_bits(middle) + kind - 1);
            }
            k->put(1, WIDTH, x, WIDTH, false, narrow[n], y, WIDTH);
            for (int d = 0; d < WIDTH; ++d) {
                const uint16_t want = rounded(narrow[n], x[d]);
                cr_assert_eq(y[d], want, "%s %s: %a gives %x, not %x", k->isa, fattn_dtype_name(narrow[n]),
                             (double)x[d], y[d], want);
            }
            cr_assert_eq(y[WIDTH], 0x1234);
        }
}
Test(cpu_tile, put_rounds_to_16_bits) { each(narrows); }

static void puts_and_dots_of_halves(const fattni_cpu_kernels *k) {
    if (k->dtype != FATTN_F32) return;
    enum { WIDTH = 37 };
    for (int n = 0; n < 2; ++n) {
        float x[WIDTH], out[2];
        uint16_t y[WIDTH];
        for (int d = 0; d < WIDTH; ++d) {
            x[d] = (float)(d % 5) - 2;
            y[d] = rounded(narrow[n], (float)d);
        }
        k->put(1, WIDTH, x, WIDTH, true, narrow[n], y, WIDTH);
        double sum = 0;
        for (int d = 0; d < WIDTH; ++d) {
            cr_assert_eq(value(narrow[n], y[d]), x[d] + (float)d);
            sum += (double)x[d] * ((double)x[d] + d);
        }
        k->dots(1, WIDTH, FATTN_F32, x, WIDTH, narrow[n], y, WIDTH, out);
        k->dots(1, WIDTH, narrow[n], y, WIDTH, FATTN_F32, x, WIDTH, out + 1);
        cr_assert(out[0] == (float)sum && out[1] == (float)sum);
    }
}
Test(cpu_tile, put_and_dots_of_halves) { each(puts_and_dots_of_halves); }

/* Rows of x as an operand that one of the table's functions makes, in memory without a byte too much; columns are
   those of the operand's rows. Reals may be multiplied where they are: NULL. */
typedef void load_operand(int64_t rows, int64_t columns, fattn_dtype from, const void *x, int64_t stride, void *out,
                          int64_t width);
static void *operand(const fattni_cpu_kernels *k, load_operand *load, int64_t rows, int64_t columns, reals x,
                     int64_t stride, int64_t width) {
    if (!k->round) return NULL;
    const int64_t whole = load == k->load_transposed ? FATTNI_TILE_KEYS : load == k->load_rows ? k->rows : 16;
    void *const out = malloc((size_t)(fattni_round_up(rows, whole) * width) * fattn_dtype_size(k->operand));
    load(rows, columns, k->dtype, x.p, stride, out, width);
    return out;
}

/* Small integers, so that sums are exact: every band, every ragged size. Rows beyond the tile's hold anything. */
static void products(const fattni_cpu_kernels *k) {
    const int64_t keys_most = FATTNI_TILE_KEYS, D = 2 * k->lanes + 3, stride = D + 2;
    const int64_t pad = fattni_round_up(D, k->lanes), width = fattni_operand_width(k, D);
    reals a = reals_new(k, keys_most * stride, 0), q = reals_new(k, k->rows * stride, 0);
    reals x = reals_new(k, k->rows * pad, 0), decay = reals_new(k, k->rows, 0), mean = reals_new(k, D, 0);
    for (int64_t n = 0; n < a.count; ++n) set(a, n, (double)(n * 7 % 11 - 5));
    for (int64_t n = 0; n < q.count; ++n) set(q, n, (double)(n * 5 % 13 - 6));
    for (int64_t n = 0; n < x.count; ++n) set(x, n, n % pad < D ? (double)(n * 3 % 17 - 8) : 0);
    for (int64_t n = 0; n < decay.count; ++n) set(decay, n, (double)(n % 4));
    for (int64_t n = 0; n < mean.count; ++n) set(mean, n, (double)(n % 3));
    char *const packed = malloc((size_t)k->rows * fattni_operand_bytes(k, D));
    char *const pairs = malloc(FATTNI_PAIRS_BYTES), *const rounded = malloc(FATTNI_ROWS_BYTES);
    if (k->begin) k->begin();
    for (int n = 0; n < 200; ++n) {
        const fattni_tile t = {.rows = 1 + n * 31 % k->rows,
                               .keys = 1 + n * 17 % keys_most,
                               .lo = n % 5 ? -FATTNI_UNBOUNDED : n % 70 - 60,
                               .hi = n % 3 ? FATTNI_UNBOUNDED : n % 70 - 60 + n % 50};
        void *const key = operand(k, k->load_keys, t.keys, D, a, stride, width);
        void *const transposed = operand(k, k->load_transposed, t.keys, D, a, stride, width);
        void *const rows = operand(k, k->load_rows, t.rows, D, x, pad, pad);
        reals s = reals_new(k, keys_most * k->rows, 0), keys_sum = reals_new(k, width * k->rows, 1);
        reals rows_sum = reals_new(k, keys_most * pad, 1);
        k->load_packed(t.rows, D, k->dtype, q.p, stride, packed);
        k->scores(&t, D, key ? key : a.p, key ? width : stride, packed, s.p);
        for (int64_t j = 0; j < keys_most; ++j)
            for (int64_t i = 0; i < k->rows; ++i) {
                double want = 0;
                for (int64_t d = 0; d < D; ++d) want += at(a, j * stride + d) * at(q, i * stride + d);
                if (seen(&t, i, j)) cr_assert_eq(at(s, j * k->rows + i), want, "%s n %d", k->isa, n);
                const double next = seen(&t, i, j) ? (double)((j * 3 + i) % 9 - 4) : 0; /* as softmax and gradient */
                set(s, j * k->rows + i, i >= t.rows && k->round ? NAN : next);
            }
        if (k->round) k->round(&t, s.p, pairs, rounded);
        k->add_keys(&t, D, transposed ? transposed : a.p, key ? width : stride, k->round ? pairs : s.p,
                    n % 2 ? decay.p : NULL, keys_sum.p);
        k->add_rows(&t, 1, pad, k->round ? rounded : s.p, rows ? rows : x.p, pad, rows_sum.p);
        for (int64_t i = 0; i < t.rows; ++i) {
            const bool sees = i + t.hi >= 0 && i + t.lo < t.keys;
            for (int64_t d = 0; sees && d < D; ++d) {
                double want = n % 2 ? (double)(i % 4) : 1;
                for (int64_t j = 0; j < t.keys; ++j) want += at(a, j * stride + d) * at(s, j * k->rows + i);
                cr_assert_eq(at(keys_sum, d * k->rows + i), want, "%s n %d", k->isa, n);
            }
        }
        for (int64_t j = 0; j < keys_most; ++j)
            for (int64_t d = 0; d < pad; ++d) {
                double want = 1;
                for (int64_t i = 0; i < t.rows; ++i) want += at(s, j * k->rows + i) * at(x, i * pad + d);
                cr_assert_eq(at(rows_sum, j * pad + d), want, "%s n %d", k->isa, n);
            }
        if (k->remove_mean) {
            reals less = reals_new(k, D * k->rows, 1);
            k->remove_mean(&t, D, mean.p, pairs, less.p);
            for (int64_t i = 0; i < t.rows; ++i)
                for (int64_t d = 0; d < D; ++d) {
                    double want = 1;
                    for (int64_t j = 0; j < t.keys; ++j) want -= at(mean, d) * at(s, j * k->rows + i);
                    cr_assert_eq(at(less, d * k->rows + i), want, "%s n %d", k->isa, n);
                }
            reals_free(less);
        }
        reals_free(s), reals_free(keys_sum), reals_free(rows_sum);
        free(key), free(transposed), free(rows);
    }
    if (k->end) k->end();
    reals_free(a), reals_free(q), reals_free(x), reals_free(decay), reals_free(mean);
    free(packed), free(pairs), free(rounded);
}
Test(cpu_tile, products) { each(products); }

/* Blocks of rows that are added together give the bits of one after another, for any band; what a key of one block
   is not seen by may be NaN in the other's rows. */
static void blocks(const fattni_cpu_kernels *k) {
    if (k->blocks == 1) return;
    enum { MOST = 4, ROWS = 32 };
    const int64_t pad = 2 * k->lanes;
    static uint16_t s[FATTNI_ROWS_BYTES / 2], x[MOST * ROWS * 256];
    static float sums[2][FATTNI_TILE_KEYS * 256];
    cr_assert_leq(k->blocks, MOST);
    uint64_t r = 1;
    for (int64_t e = 0; e < MOST * ROWS * pad; ++e) x[e] = rounded(k->operand, (float)cases_below(&r, 2001) / 1000 - 1);
    if (k->begin) k->begin();
    for (int n = 0; n < 200; ++n) {
        const int64_t count = 2 + n % (k->blocks - 1);
        fattni_tile t[MOST];
        memset(s, 0xff, sizeof s); /* NaN */
        for (int64_t m = 0; m < count; ++m) {
            const int64_t keys = cases_below(&r, 4) ? 1 + cases_below(&r, FATTNI_TILE_KEYS) : 0;
            t[m] =
                (fattni_tile){1 + cases_below(&r, ROWS), keys, cases_below(&r, 160) - 140, cases_below(&r, 160) - 30};
            float p[FATTNI_TILE_KEYS * ROWS];
            for (int e = 0; e < FATTNI_TILE_KEYS * ROWS; ++e)
                p[e] = seen(t + m, e % ROWS, e / ROWS) ? (float)cases_below(&r, 1000) / 1000 : 0;
            if (keys) k->round(t + m, p, NULL, s + m * ROWS);
        }
        for (int64_t e = 0; e < FATTNI_TILE_KEYS * pad; ++e) sums[0][e] = sums[1][e] = (float)cases_below(&r, 1000);
        k->add_rows(t, count, pad, s, x, pad, sums[0]);
        for (int64_t m = 0; m < count; ++m) k->add_rows(t + m, 1, pad, s + m * ROWS, x + m * ROWS * pad, pad, sums[1]);
        cr_assert_eq(memcmp(sums[0], sums[1], sizeof sums[0]), 0, "%s %d", k->isa, n);
    }
    if (k->end) k->end();
}
Test(cpu_tile, blocks_of_rows) { each(blocks); }

/* Sums of products of all sizes that the type has, F16's subnormal ones among them, beside those in F64. Products of
   two such numbers are exact in F32, and D roundings at most are on the way of each to its sum. */
static void sums(const fattni_cpu_kernels *k) {
    enum { D = 96, ROWS = 32 };
    if (!k->round) return;
    static uint16_t key[FATTNI_TILE_KEYS * D], q[ROWS * D], packed[ROWS * D];
    static float s[FATTNI_TILE_KEYS * ROWS];
    const bool f16 = k->operand == FATTN_F16;
    const fattni_tile t = {ROWS, FATTNI_TILE_KEYS, .lo = -FATTNI_UNBOUNDED, .hi = FATTNI_UNBOUNDED};
    uint64_t r = 1;
    if (k->begin) k->begin();
    for (int n = 0; n < 20; ++n) {
        /* n % 4 = 0: subnormal F16, 1: all finite F16, 2 and 3: some sizes; BF16 without those whose products are not
           normal numbers. */
        static const int most[4] = {0x400, 0x7c00, 0x5000, 0x3c00};
        for (int e = 0; e < FATTNI_TILE_KEYS * D; ++e) {
            const int sign = cases_below(&r, 2) << 15, other = cases_below(&r, 2) << 15;
            key[e] = (uint16_t)(sign | (f16 ? cases_below(&r, most[n % 4]) : 0x3000 + cases_below(&r, 0x1000)));
            if (e < ROWS * D)
                q[e] = (uint16_t)(other | (f16 ? cases_below(&r, most[n % 4]) : 0x3000 + cases_below(&r, 0x1000)));
        }
        k->load_packed(ROWS, D, k->operand, q, D, packed);
        k->scores(&t, D, key, D, packed, s);
        for (int j = 0; j < FATTNI_TILE_KEYS; ++j)
            for (int i = 0; i < ROWS; ++i) {
                double want = 0, size = 0;
                for (int d = 0; d < D; ++d) {
                    const double x =
                        (double)value(k->operand, key[j * D + d]) * (double)value(k->operand, q[i * D + d]);
                    want += x, size += fabs(x);
                }
                const double error = fabs((double)s[j * ROWS + i] - want);
                cr_assert(error <= D * 0x1p-24 * size, "%s %d: %a, not %a", k->isa, n, (double)s[j * ROWS + i], want);
            }
    }
    if (k->end) k->end();
}
Test(cpu_tile, sums) { each(sums); }

/* P and dS in 16 bits: to the nearest, ties to even, as numeric.h, in F16 infinity beyond its range; both orders hold
   the same numbers. */
static void rounds(const fattni_cpu_kernels *k) {
    if (!k->round) return;
    const fattni_tile t = {k->rows, FATTNI_TILE_KEYS, .lo = -FATTNI_UNBOUNDED, .hi = FATTNI_UNBOUNDED};
    static uint16_t pairs[FATTNI_PAIRS_BYTES / 2], rows[FATTNI_ROWS_BYTES / 2];
    for (uint32_t n = 0; n < 40; ++n) {
        float x[FATTNI_TILE_KEYS * 32];
        for (uint32_t e = 0; e < FATTNI_TILE_KEYS * 32; ++e) {
            const uint32_t bits = 0x00800000 + (n * FATTNI_TILE_KEYS * 32 + e) * 24989u % 0x7f000000; /* normal */
            const uint32_t tie = k->operand == FATTN_F16 ? (bits & 0xffffe000) | 0x1000 : (bits & 0xffff0000) | 0x8000;
            x[e] = fattni_bits_float(e % 4 ? bits : tie) * (e % 3 ? 1 : -1);
            if (k->operand == FATTN_F16 && e % 2) x[e] = ldexpf(frexpf(x[e], &(int){0}), (int)(e / 2 % 45) - 27);
        }
        k->round(&t, x, pairs, rows);
        for (int j = 0; j < FATTNI_TILE_KEYS; ++j)
            for (int i = 0; i < 32; ++i) {
                const uint16_t want = rounded(k->operand, x[j * 32 + i]), pair = pairs[j / 2 * 64 + 2 * i + j % 2];
                const uint16_t row = rows[j * k->blocks * 32 + i];
                cr_assert(row == want && pair == want, "%s: %a gives %x and %x, not %x", k->isa, (double)x[j * 32 + i],
                          row, pair, want);
            }
    }
}
Test(cpu_tile, round) { each(rounds); }

/* Codes as floats, rows as they lie and columns in the order of fattn/fp8.h, and P in units of 1/64. */
static void e4m3(const fattni_cpu_kernels *k) {
    if (!k->load_e4m3) return;
    enum { KEYS = 64, COLUMNS = 70, PITCH = 80 };
    static uint8_t codes[COLUMNS][PITCH];
    static float out[KEYS + 1][COLUMNS], p[FATTNI_TILE_KEYS * 48];
    for (int d = 0; d < COLUMNS; ++d)
        for (int j = 0; j < PITCH; ++j) codes[d][j] = (uint8_t)(d * 37 + j * 11 + d * j);
    for (int n = 1; n <= COLUMNS; ++n) {
        const int keys = 1 + n * 29 % KEYS;
        memset(out, 0x55, sizeof out);
        k->load_e4m3(keys, n, codes[0], PITCH, out[0], COLUMNS);
        for (int i = 0; i <= KEYS; ++i)
            for (int d = 0; d < COLUMNS; ++d) {
                const float want = fattni_e4m3_to_float(codes[i][d]), kept = fattni_bits_float(0x55555555);
                const uint32_t bits = fattni_float_bits(i < keys && d < n ? want : kept);
                cr_assert_eq(fattni_float_bits(out[i][d]), bits, "%s %d: %d %d", k->isa, n, i, d);
            }
        memset(out, 0x55, sizeof out);
        k->load_e4m3_columns(keys, n, codes[0], PITCH, out[0], COLUMNS);
        for (int j = 0; j <= KEYS; ++j)
            for (int d = 0; d < COLUMNS; ++d) {
                const int column = j / 16 * 16 + j % 8 / 2 * 4 + j / 8 % 2 * 2 + j % 2;
                const float want = fattni_e4m3_to_float(codes[d][column]), kept = fattni_bits_float(0x55555555);
                const uint32_t bits = fattni_float_bits(j < keys && d < n ? want : kept);
                cr_assert_eq(fattni_float_bits(out[j][d]), bits, "%s %d: %d %d", k->isa, n, j, d);
            }
    }
    const int64_t count = FATTNI_TILE_KEYS * k->rows;
    const fattni_tile t = {k->rows, FATTNI_TILE_KEYS, .lo = -FATTNI_UNBOUNDED, .hi = FATTNI_UNBOUNDED};
    for (int n = 0; n < 60; ++n) { /* 2^-19 and up, ties among them */
        float x[FATTNI_TILE_KEYS * 48];
        for (int64_t e = 0; e < count; ++e) {
            const uint32_t bits = 0x36000000 + (uint32_t)(n * count + e) * 2467u % 0x09800000;
            x[e] = p[e] = fattni_bits_float(e % 3 ? bits : (bits & 0xfff00000) | 0x80000);
        }
        x[7] = p[7] = 1, x[8] = p[8] = 0, x[9] = p[9] = NAN;
        k->round_e4m3(&t, p);
        for (int64_t e = 0; e < count; ++e) {
            const float want = fattni_e4m3_to_float(fattni_float_to_e4m3(64 * x[e])) / 64;
            cr_assert(e == 9 ? isnan(p[e]) : p[e] == want, "%s: %a gives %a, not %a", k->isa, (double)x[e],
                      (double)p[e], (double)want);
        }
    }
}
Test(cpu_tile, e4m3) { each(e4m3); }

#ifdef FATTNI_HAVE_NARROW_PRODUCTS
/* The model of the instructions gives their bits, where the machine has them: numbers of all signs and many sizes,
   subnormal ones among them. */
static void check_model(int isa, fattn_dtype dtype) {
    fattn_ctx *const ctx = attention_context_isa(1, isa);
    if (!ctx || !fattni_allow_amx()) cr_skip("no AMX for %s", fattn_dtype_name(dtype));
    const fattni_cpu_kernels *const k = fattni_cpu_kernels_of(ctx, dtype);
    enum { KEYS = 32, ROWS = 32, D = 64 };
    static uint16_t key[KEYS * D], packed[ROWS * D];
    static float got[KEYS * ROWS], want[KEYS * ROWS];
    uint64_t r = 1;
    for (int n = 0; n < 100; ++n) {
        const uint32_t exponents = n % 3 ? 40 : 150; /* with many, sums are of few numbers and may be subnormal */
        for (int e = 0; e < KEYS * D; ++e) {
            const int random = cases_below(&r, 1 << 30);
            key[e] = (uint16_t)((random & 0x807f) | (uint32_t)(random >> 16) % exponents << 7);
            const int other = cases_below(&r, 1 << 30);
            packed[e] = (uint16_t)((other & 0x807f) | (130 + (uint32_t)(other >> 16) % (exponents / 4)) << 7);
            if (dtype == FATTN_F16)
                key[e] = (uint16_t)(random % 0x7c00 | (random >> 15 & 0x8000)),
                packed[e] = (uint16_t)(other % 0x7c00 | (other >> 15 & 0x8000));
        }
        const fattni_tile t = {ROWS, KEYS, .lo = -FATTNI_UNBOUNDED, .hi = FATTNI_UNBOUNDED};
        k->begin();
        k->scores(&t, D, key, D, packed, got);
        k->end();
        memset(want, 0, sizeof want);
        if (dtype == FATTN_F16)
            amxfp16_model_product(KEYS, ROWS, D, key, (const uint32_t *)packed, want);
        else
            amx_model_product(KEYS, ROWS, D, key, (const uint32_t *)packed, want);
        cr_assert_eq(memcmp(got, want, sizeof got), 0, "%d", n);
    }
    fattn_ctx_destroy(ctx);
}
Test(cpu_tile, model_of_amx) { check_model(FATTNI_ISA_AMX, FATTN_BF16); }
Test(cpu_tile, model_of_amxfp16) { check_model(FATTNI_ISA_AMXFP16, FATTN_F16); }
#endif

static void adjusts(const fattni_cpu_kernels *k) {
    const double eps = k->dtype == FATTN_F64 ? 0x1p-52 : 0x1p-23;
    reals bias = reals_new(k, FATTNI_TILE_KEYS * k->rows, 0), s = reals_new(k, bias.count, 0);
    reals dcap = reals_new(k, bias.count, 0), x = reals_new(k, bias.count, 0);
    for (int n = 0; n < 16; ++n) {
        const fattni_tile t = {
            .rows = k->rows - n % 5, .keys = FATTNI_TILE_KEYS - n, .lo = -1000, .hi = n % 2 ? 1000 : 3};
        const fattni_adjustment a = {.scale = 0.7,
                                     .cap = n & 2 ? 1.5 : 0,
                                     .slope = n & 4 ? 0.25 : 0,
                                     .distance = n - 30,
                                     .bias = n & 8 ? bias.p : NULL,
                                     .derivative = n & 2 ? dcap.p : NULL};
        for (int64_t e = 0; e < s.count; ++e) {
            const double size = pow(10, (double)(e % 9) - 6); /* 1e-6 to 100 */
            set(x, e, (e % 2 ? -1 : 1) * size * (1 + (double)(e % 13) / 17));
            set(s, e, at(x, e));
            set(bias, e, (double)(e % 7) / 3);
        }
        k->adjust(&t, &a, s.p);
        for (int64_t e = 0; e < s.count; ++e) {
            const int64_t j = e / k->rows, i = e % k->rows;
            if (!seen(&t, i, j)) continue;
            const double raw = 0.7 * at(x, e), u = tanh(raw / 1.5);
            const double soft = a.cap > 0 ? 1.5 * u : raw;
            const double far = a.slope * fabs((double)(i - j + a.distance));
            const double add = a.bias ? at(bias, e) : 0, want = soft - far + add;
            const double most = 6 * eps * (fabs(soft) + far + fabs(add)); /* a dozen roundings */
            cr_assert_float_eq(at(s, e), want, most, "%s %d: %g for %g, %g", k->isa, n, at(s, e), want,
                               fabs(at(s, e) - want) / most);
            const double slope = 0.7 * (1 - u) * (1 + u); /* tiny where tanh is 1 up to rounding */
            if (a.cap > 0) cr_assert_float_eq(at(dcap, e), slope, 8 * eps * slope + 4 * eps);
        }
    }
    reals_free(bias), reals_free(s), reals_free(dcap), reals_free(x);
}
Test(cpu_tile, softcap_alibi_bias) { each(adjusts); }

/* The mask of a tile at any position equals that of philox.h for each element. */
static void keeps(const fattni_cpu_kernels *k) {
    reals mask = reals_new(k, FATTNI_TILE_KEYS * k->rows, 0);
    for (int n = 0; n < 40; ++n) {
        const fattni_tile t = {.rows = 1 + n * 13 % k->rows,
                               .keys = 1 + n * 29 % FATTNI_TILE_KEYS,
                               .lo = -FATTNI_UNBOUNDED,
                               .hi = FATTNI_UNBOUNDED};
        const fattni_dropout d = {.seed = 0x1234567890abcdefu + (uint64_t)n,
                                  .stream = 3,
                                  .step = 5,
                                  .plane = (uint32_t)n,
                                  .T = n % 3 ? 7000 : 20000,
                                  .i = n * 7 % 97,
                                  .j = n % 4 ? n * 11 % 101 : 2000000000 + n,
                                  .scale = 1.25};
        for (int64_t e = 0; e < mask.count; ++e) set(mask, e, poison);
        k->keep(&t, &d, mask.p);
        for (int64_t e = 0; e < mask.count; ++e) {
            const int64_t j = e / k->rows, i = e % k->rows;
            double want = poison;
            if (i < t.rows && j < t.keys) want = 1.25 * fattni_keep(d.seed, 3, 5, d.plane, d.i + i, d.j + j, d.T);
            cr_assert_eq(at(mask, e), want, "%d: %d %d", n, (int)i, (int)j);
        }
    }
    reals_free(mask);
}
Test(cpu_tile, dropout_mask) { each(keeps); }

static void elementwise(const fattni_cpu_kernels *k) {
    reals x = reals_new(k, FATTNI_TILE_KEYS * k->rows, 0), y = reals_new(k, x.count, 0);
    static const int64_t strides[][2] = {{100, 1}, {1, 50}, {1, 0}, {0, 1}, {0, 0}, {0, 3}};
    for (int n = 0; n < 24; ++n) {
        const fattni_tile t = {.rows = k->rows - n, .keys = 40 + n, .lo = n % 3 ? -1000 : -9, .hi = n % 2 ? 1000 : 5};
        for (int64_t e = 0; e < x.count; ++e) set(x, e, (double)(e % 11)), set(y, e, (double)(e % 5));
        k->multiply(&t, y.p, x.p);
        for (int64_t e = 0; e < x.count; ++e)
            if (seen(&t, e % k->rows, e / k->rows)) cr_assert_eq(at(x, e), (double)(e % 11) * (double)(e % 5));
        const int64_t row = strides[n % 6][0], column = strides[n % 6][1];
        reals sum = reals_new(k, 100 * 64, 1), want = reals_new(k, sum.count, 1);
        k->add_elements(&t, x.p, sum.p, row, column);
        for (int64_t j = 0; j < t.keys; ++j)
            for (int64_t i = 0; i < t.rows; ++i) {
                const int64_t to = i * row + j * column;
                set(want, to, at(want, to) + at(x, j * k->rows + i));
            }
        for (int64_t e = 0; e < sum.count; ++e) cr_assert_eq(at(sum, e), at(want, e), "%d", n);
        reals_free(sum), reals_free(want);
    }
    reals_free(x), reals_free(y);
}
Test(cpu_tile, multiply_and_add_elements) { each(elementwise); }

/* Sums of integers, beside what they are added to. */
static void sums_of_rows(const fattni_cpu_kernels *k) {
    reals x = reals_new(k, FATTNI_TILE_KEYS * k->rows, 0), y = reals_new(k, x.count, 0), p = reals_new(k, x.count, 0);
    for (int n = 0; n < 24; ++n) {
        const fattni_tile t = {.rows = k->rows - n, .keys = 40 + n, .lo = n % 3 ? -1000 : -9, .hi = n % 2 ? 1000 : 5};
        for (int64_t e = 0; e < x.count; ++e) {
            const bool sees = seen(&t, e % k->rows, e / k->rows);
            set(x, e, sees ? (double)(e % 11 - 5) : 0), set(p, e, sees ? (double)(e % 7) : 0);
            set(y, e, (double)(e % 5));
        }
        reals sums = reals_new(k, 3 * k->rows, 1), products = reals_new(k, x.count, 0);
        memcpy(products.p, x.p, (size_t)x.count * fattn_dtype_size(k->dtype));
        k->multiply(&t, y.p, products.p);
        k->multiply_and_sum(&t, p.p, y.p, x.p, sums.p);
        for (int64_t i = 0; i < t.rows; ++i) {
            double want[3] = {1, 1, 1};
            for (int64_t e = i; e < t.keys * k->rows; e += k->rows) {
                if (!seen(&t, i, e / k->rows)) continue;
                want[0] += (double)(e % 11 - 5);
                want[1] += (double)(e % 7 * (e % 5));
                want[2] += (double)((e % 11 - 5) * (e % 5));
                cr_assert_eq(at(x, e), at(products, e));
            }
            for (int64_t m = 0; m < 3; ++m)
                cr_assert_eq(at(sums, m * k->rows + i), want[m], "%s %d: %d %d", k->isa, n, (int)i, (int)m);
        }
        reals_free(sums), reals_free(products);
    }
    reals_free(x), reals_free(y), reals_free(p);
}
Test(cpu_tile, multiply_and_sum) { each(sums_of_rows); }

/* 2^x through `gradient`, as p with factor 1 and L = 0. */
static double power(const fattni_cpu_kernels *k, double x) {
    static double p[48], ds[48], zero[144];
    const fattni_tile t = {.rows = 1, .keys = 1, .lo = -FATTNI_UNBOUNDED, .hi = FATTNI_UNBOUNDED};
    memset(p, 0, sizeof p);
    fattni_store(p, k->dtype, 0, x);
    k->gradient(&t, 1, 1, zero, zero, p, ds);
    return fattni_load(p, k->dtype, 0);
}

static void exponential(const fattni_cpu_kernels *k) {
    const bool wide = k->dtype == FATTN_F64;
    /* The polynomial's error and a rounding per step; the exponent is rounded to an integer, so that results
       near the end of the range are already infinite. */
    const double low = wide ? -1022 : -126, high = wide ? 1023.5 : 127.5, most = wide ? 4e-16 : 2e-7;
    double worst = 0;
    for (int n = 0; n <= 20000; ++n) {
        double x = low + (high - low) * n / 20001;
        if (!wide) x = (double)(float)x;
        const double want = exp2(x), got = power(k, x);
        worst = fmax(worst, fabs(got / want - 1));
    }
    cr_assert_lt(worst, most, "%s: %g", k->isa, worst);
    cr_assert_eq(power(k, 0), 1);
    cr_assert_eq(power(k, -0.0), 1);
    for (int n = -60; n < 60; ++n) cr_assert_eq(power(k, n), ldexp(1, n));
    cr_assert_eq(power(k, low - 1), 0);
    cr_assert_eq(power(k, -1e30), 0);
    cr_assert_eq(power(k, -INFINITY), 0);
    cr_assert_eq(power(k, high + 0.5), INFINITY);
    cr_assert_eq(power(k, 1e30), INFINITY);
    cr_assert_eq(power(k, INFINITY), INFINITY, "%g", power(k, INFINITY));
    cr_assert(isnan(power(k, NAN)));
}
Test(cpu_tile, exponential) { each(exponential); }

/* Masked elements of a tile give exactly 0 for any value, here NaN and infinities. */
static void masked(const fattni_cpu_kernels *k) {
    reals p = reals_new(k, FATTNI_TILE_KEYS * k->rows, 0), ds = reals_new(k, p.count, 0);
    reals max = reals_new(k, k->rows, -INFINITY), sum = reals_new(k, k->rows, 0);
    reals decay = reals_new(k, k->rows, NAN), lse = reals_new(k, 3 * k->rows, 0);
    for (int64_t i = 0; i < k->rows; ++i) set(lse, i, -10010), set(lse, k->rows + i, 9), set(lse, 2 * k->rows + i, 1);
    const fattni_tile t = {.rows = k->rows, .keys = FATTNI_TILE_KEYS, .lo = 2, .hi = 4};
    static const double junk[] = {NAN, INFINITY, -INFINITY, 1e30};
    for (int n = 0; n < 2; ++n) {
        for (int64_t e = 0; e < p.count; ++e) {
            const int64_t j = e / k->rows, i = e % k->rows;
            set(p, e, seen(&t, i, j) ? -1e4 : junk[e % 4]);
            set(ds, e, seen(&t, i, j) ? 1 : junk[e / 3 % 4]);
        }
        if (n == 0)
            k->softmax(&t, 1, p.p, max.p, sum.p, decay.p);
        else
            k->gradient(&t, 1, 1, lse.p, from(sum, 0), p.p, ds.p); /* delta = sum = keys seen */
        for (int64_t e = 0; e < p.count; ++e) {
            const int64_t j = e / k->rows, i = e % k->rows;
            const double keys = (double)fattni_clamp(FATTNI_TILE_KEYS - i - 2, 0, 3);
            if (n == 0 && !seen(&t, i, j)) continue; /* softmax may skip keys that no row of a vector sees */
            cr_assert_eq(at(p, e), seen(&t, i, j), "%s %d: %g", k->isa, n, at(p, e));
            if (n == 1) cr_assert_eq(at(ds, e), seen(&t, i, j) ? 1 - keys : 0);
        }
        for (int64_t i = 0; i < k->rows; ++i) {
            const double keys = (double)fattni_clamp(FATTNI_TILE_KEYS - i - 2, 0, 3);
            cr_assert_eq(at(sum, i), keys);
            cr_assert_eq(at(max, i), keys > 0 ? -1e4 : -INFINITY);
        }
    }
    reals_free(p), reals_free(ds), reals_free(max), reals_free(sum), reals_free(decay), reals_free(lse);
}
Test(cpu_tile, masked_elements_are_zero) { each(masked); }
