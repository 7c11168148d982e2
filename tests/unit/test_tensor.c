/* Tensors: views, allocation, copy between all dtypes and strides, normal numbers, errors. */
#include "core/tensor/numeric.h"
#include "core/tensor/philox.h"

#include <criterion/criterion.h>
#include <fattn/fattn.h>

#include <math.h>
#include <stdlib.h>
#include <string.h>

static fattn_ctx *ctx;
static void open_context(void) { cr_assert_eq(fattn_ctx_create(NULL, &ctx), FATTN_OK); }
static void close_context(void) {
    cr_assert_eq(fattn_ctx_mem(ctx).live, 0);
    fattn_ctx_destroy(ctx);
}
TestSuite(tensor, .init = open_context, .fini = close_context);

static const fattn_dtype dtypes[] = {FATTN_F64, FATTN_F32, FATTN_F16,    FATTN_BF16,
                                     FATTN_I32, FATTN_U8,  FATTN_F8E4M3, FATTN_I8};
enum { DTYPES = sizeof dtypes / sizeof *dtypes };
#define SHAPE(...) ((const int64_t[]){__VA_ARGS__})

static fattn_tensor view(void *data, fattn_dtype t, int ndim, const int64_t *shape) {
    return fattn_tensor_view(data, t, FATTN_CPU, 0, ndim, shape);
}

Test(tensor, dtypes_have_sizes_and_names) {
    static const size_t sizes[] = {8, 4, 2, 2, 4, 1, 1, 1};
    static const char *const names[] = {"f64", "f32", "f16", "bf16", "i32", "u8", "f8e4m3", "i8"};
    for (int n = 0; n < DTYPES; ++n) {
        cr_assert_eq(fattn_dtype_size(dtypes[n]), sizes[n]);
        cr_assert_str_eq(fattn_dtype_name(dtypes[n]), names[n]);
    }
    cr_assert_eq(fattn_dtype_size((fattn_dtype)0), 0);
    cr_assert_eq(fattn_dtype_size((fattn_dtype)9), 0);
    cr_assert_str_eq(fattn_dtype_name((fattn_dtype)-1), "?");
}

Test(tensor, a_view_is_row_major) {
    float data[24];
    const fattn_tensor t = view(data, FATTN_F32, 3, SHAPE(2, 3, 4));
    cr_assert(t.data == data && t.ndim == 3 && t.dtype == FATTN_F32);
    cr_assert(t.device == FATTN_CPU && t.device_id == 0);
    cr_assert(t.stride[0] == 12 && t.stride[1] == 4 && t.stride[2] == 1);
    cr_assert_eq(fattn_tensor_numel(&t), 24);
    const fattn_tensor scalar = view(data, FATTN_F32, 0, NULL);
    cr_assert_eq(fattn_tensor_numel(&scalar), 1);
    const int64_t huge = (int64_t)1 << 40;
    const fattn_tensor empty = view(NULL, FATTN_F32, 4, SHAPE(huge, huge, 0, huge));
    cr_assert_eq(fattn_tensor_numel(&empty), 0);
}

Test(tensor, permute_and_slice_move_no_data) {
    float data[2][3][4];
    const fattn_tensor t = view(data, FATTN_F32, 3, SHAPE(2, 3, 4));
    const fattn_tensor p = fattn_tensor_permute(&t, (int[]){2, 0, 1});
    cr_assert(p.shape[0] == 4 && p.shape[1] == 2 && p.shape[2] == 3);
    cr_assert(p.stride[0] == 1 && p.stride[1] == 12 && p.stride[2] == 4 && p.data == data);
    const fattn_tensor s = fattn_tensor_slice(&p, 2, 1, 3);
    cr_assert(s.shape[0] == 4 && s.shape[2] == 2 && s.data == &data[0][1][0]);
    const fattn_tensor clamped = fattn_tensor_slice(&t, 1, -5, 99);
    cr_assert(clamped.shape[1] == 3 && clamped.data == data);
    const fattn_tensor none = fattn_tensor_slice(&t, 1, 2, 1);
    cr_assert_eq(none.shape[1], 0);
    const fattn_tensor beyond = fattn_tensor_slice(&t, 1, 7, 9);
    cr_assert_eq(beyond.shape[1], 0);
    cr_assert(none.data == data && beyond.data == data, "where t is");
}

/* Heads of a packed [B,S,3,H,D] projection as inputs of attention. */
Test(tensor, a_packed_projection_is_sliced_and_permuted) {
    enum { B = 2, S = 3, H = 2, D = 4 };
    float data[B][S][3][H][D];
    const fattn_tensor t = view(data, FATTN_F32, 5, SHAPE(B, S, 3, H, D));
    fattn_tensor k = fattn_tensor_slice(&t, 2, 1, 2);
    k = fattn_tensor_permute(&k, (int[]){0, 3, 1, 4, 2});
    cr_assert_eq(k.shape[4], 1);
    k.ndim = 4;
    for (int64_t b = 0; b < B; ++b)
        for (int64_t h = 0; h < H; ++h)
            for (int64_t s = 0; s < S; ++s)
                for (int64_t d = 0; d < D; ++d)
                    cr_assert((float *)k.data + b * k.stride[0] + h * k.stride[1] + s * k.stride[2] + d * k.stride[3] ==
                              &data[b][s][1][h][d]);
}

Test(tensor, alloc_gives_aligned_counted_memory) {
    fattn_tensor t;
    cr_assert_eq(fattn_tensor_alloc(ctx, FATTN_BF16, 3, SHAPE(3, 5, 7), &t), FATTN_OK);
    cr_assert_eq((uintptr_t)t.data % 256, 0);
    cr_assert_eq(fattn_ctx_mem(ctx).live, 210);
    memset(t.data, 1, 210);
    fattn_tensor_free(ctx, &t);
    cr_assert_null(t.data);
    fattn_tensor_free(ctx, &t);
    fattn_tensor_free(ctx, NULL);
    const int64_t huge = (int64_t)1 << 62;
    cr_assert_eq(fattn_tensor_alloc(ctx, FATTN_F64, 4, SHAPE(huge, huge, 0, huge), &t), FATTN_OK);
    cr_assert_null(t.data);
    fattn_tensor_free(ctx, &t);
    cr_assert_eq(fattn_tensor_alloc(ctx, FATTN_F64, 0, NULL, &t), FATTN_OK);
    cr_assert_eq(fattn_ctx_mem(ctx).live, 8);
    fattn_tensor_free(ctx, &t);
}

/* Small integers are exact in every dtype, so every pair must agree exactly. */
Test(tensor, copy_between_all_dtypes_and_strides) {
    enum { A = 3, B = 5, C = 300 }; /* 4500 rows when C comes first: several tasks */
    static const int orders[][3] = {{0, 1, 2}, {2, 1, 0}, {1, 2, 0}};
    for (int from = 0; from < DTYPES; ++from)
        for (int to = 0; to < DTYPES; ++to)
            for (int o = 0; o < 3; ++o) {
                fattn_tensor wide, src, dst;
                cr_assert_eq(fattn_tensor_alloc(ctx, dtypes[from], 3, SHAPE(2 * A, B, C), &src), FATTN_OK);
                cr_assert_eq(fattn_tensor_alloc(ctx, dtypes[to], 4, SHAPE(A, B, C, 2), &wide), FATTN_OK);
                for (int64_t e = 0; e < 2 * A * B * C; ++e) {
                    fattni_store(src.data, src.dtype, e, (double)(e * 7 % 17));
                    fattni_store(wide.data, wide.dtype, e, 96);
                }
                fattn_tensor every_second = src; /* rows 1, 3, 5, backwards */
                every_second.shape[0] = A;
                every_second.stride[0] *= -2;
                every_second.data = (char *)src.data + 5 * B * C * fattn_dtype_size(dtypes[from]);
                dst = wide; /* leaves a gap after each element */
                dst.ndim = 3;
                const fattn_tensor in = fattn_tensor_permute(&every_second, orders[o]);
                const fattn_tensor out = fattn_tensor_permute(&dst, orders[o]);
                cr_assert_eq(fattn_tensor_copy(ctx, &out, &in), FATTN_OK);
                for (int64_t a = 0; a < A; ++a)
                    for (int64_t b = 0; b < B; ++b)
                        for (int64_t c = 0; c < C; ++c) {
                            const int64_t e = ((5 - 2 * a) * B + b) * C + c;
                            const int64_t at = 2 * ((a * B + b) * C + c);
                            cr_assert_eq(fattni_load(wide.data, wide.dtype, at), e * 7 % 17);
                            cr_assert_eq(fattni_load(wide.data, wide.dtype, at + 1), 96, "the gap");
                        }
                fattn_tensor_free(ctx, &src);
                fattn_tensor_free(ctx, &wide);
            }
}

Test(tensor, copy_of_one_dtype_keeps_the_bits) {
    const uint32_t bits[] = {0x7fc12345, 0xff800001, 0x80000000, 0x00000001, 0x7f7fffff};
    uint32_t out[5] = {0};
    const fattn_tensor src = view((void *)(uintptr_t)bits, FATTN_F32, 1, SHAPE(5));
    const fattn_tensor dst = view(out, FATTN_F32, 1, SHAPE(5));
    cr_assert_eq(fattn_tensor_copy(ctx, &dst, &src), FATTN_OK);
    cr_assert_arr_eq(out, bits, sizeof bits);
}

Test(tensor, copy_broadcasts_its_source_and_takes_scalars_and_nothing) {
    double row[3] = {1, 2, 3}, out[2][3];
    fattn_tensor src = view(row, FATTN_F64, 2, SHAPE(2, 3));
    src.stride[0] = 0;
    const fattn_tensor dst = view(out, FATTN_F64, 2, SHAPE(2, 3));
    cr_assert_eq(fattn_tensor_copy(ctx, &dst, &src), FATTN_OK);
    for (int i = 0; i < 6; ++i) cr_assert_eq(out[i / 3][i % 3], row[i % 3]);

    double one = 5, other = 0;
    const fattn_tensor from = view(&one, FATTN_F64, 0, NULL), to = view(&other, FATTN_F64, 0, NULL);
    cr_assert_eq(fattn_tensor_copy(ctx, &to, &from), FATTN_OK);
    cr_assert_eq(other, 5);

    const fattn_tensor empty = view(NULL, FATTN_F64, 2, SHAPE(0, 3));
    cr_assert_eq(fattn_tensor_copy(ctx, &empty, &empty), FATTN_OK);
}

/* Box-Muller over Philox as specified in tensor.h: element e from counter e/2. */
static double normal_by_formula(fattn_rng rng, int64_t e) {
    const fattni_block counter = {{(uint32_t)(e / 2), (uint32_t)(e / 2 >> 32), 0, rng.stream}};
    const fattni_block r = fattni_philox(rng.seed, counter);
    const double u = (ldexp(r.w[0], 20) + (r.w[1] >> 12) + 1) / 4503599627370496.0;
    const double v = (ldexp(r.w[2], 20) + (r.w[3] >> 12)) / 4503599627370496.0;
    const double radius = sqrt(-2 * log(u)), angle = 2 * 3.14159265358979323846 * v;
    return radius * (e % 2 ? sin(angle) : cos(angle));
}

Test(tensor, normal_is_box_muller_over_philox) {
    double x[101];
    const fattn_rng rng = {.seed = 0xfeedface12345678u, .stream = 5};
    const fattn_tensor t = view(x, FATTN_F64, 1, SHAPE(101));
    cr_assert_eq(fattn_tensor_normal(ctx, &t, 3, 2, rng), FATTN_OK);
    for (int64_t e = 0; e < 101; ++e) cr_assert_float_eq(x[e], 3 + 2 * normal_by_formula(rng, e), 1e-13);
}

/* Sample moments of n numbers against their standard errors, five sigma: 1/sqrt(n) for the mean,
   sqrt(2/n) for the variance, sqrt(6/n) for the skewness, sqrt(24/n) for the kurtosis. */
Test(tensor, normal_has_the_moments_of_a_normal_distribution) {
    enum { N = 1 << 20 };
    fattn_tensor t;
    cr_assert_eq(fattn_tensor_alloc(ctx, FATTN_F64, 2, SHAPE(1024, 1024), &t), FATTN_OK);
    cr_assert_eq(fattn_tensor_normal(ctx, &t, 0, 1, (fattn_rng){.seed = 1}), FATTN_OK);
    const double *const x = t.data;
    double moment[5] = {0}, pairs = 0;
    for (int64_t e = 0; e < N; ++e) {
        for (int k = 1; k <= 4; ++k) moment[k] += pow(x[e], k) / N;
        if (e % 2) pairs += x[e] * x[e - 1] / (N / 2);
    }
    cr_assert_lt(fabs(moment[1]), 5 / sqrt(N));
    cr_assert_lt(fabs(moment[2] - 1), 5 * sqrt(2.0 / N));
    cr_assert_lt(fabs(moment[3]), 5 * sqrt(15.0 / N), "E x^6 = 15");
    cr_assert_lt(fabs(moment[4] - 3), 5 * sqrt(96.0 / N), "E x^8 - 9 = 96");
    cr_assert_lt(fabs(pairs), 5 / sqrt(N / 2), "the two of a pair are independent");
    fattn_tensor_free(ctx, &t);
}

Test(tensor, normal_is_the_same_for_every_dtype_stride_and_thread_count) {
    enum { R = 700, C = 9 };
    const fattn_rng rng = {.seed = 7, .stream = 2};
    double want[R][C];
    const fattn_tensor w = view(want, FATTN_F64, 2, SHAPE(R, C));
    cr_assert_eq(fattn_tensor_normal(ctx, &w, 0.5, 3, rng), FATTN_OK);
    static const int threads[] = {1, 2, 3, 8, 16};
    for (int n = 0; n < 5; ++n)
        for (int d = 0; d < 4; ++d) {
            const fattn_ctx_options o = {.struct_size = sizeof o, .cpu_threads = threads[n]};
            fattn_ctx *other;
            cr_assert_eq(fattn_ctx_create(&o, &other), FATTN_OK);
            fattn_tensor columns;
            cr_assert_eq(fattn_tensor_alloc(other, dtypes[d], 2, SHAPE(C, R), &columns), FATTN_OK);
            const fattn_tensor t = fattn_tensor_permute(&columns, (int[]){1, 0});
            cr_assert_eq(fattn_tensor_normal(other, &t, 0.5, 3, rng), FATTN_OK);
            for (int64_t r = 0; r < R; ++r)
                for (int64_t c = 0; c < C; ++c) {
                    double cell;
                    fattni_store(&cell, dtypes[d], 0, want[r][c]);
                    cr_assert_eq(fattni_load(columns.data, columns.dtype, c * R + r), fattni_load(&cell, dtypes[d], 0));
                }
            fattn_tensor_free(other, &columns);
            fattn_ctx_destroy(other);
        }
}

Test(tensor, normal_streams_and_seeds_differ) {
    double a[8], b[8], c[8];
    const fattn_tensor ta = view(a, FATTN_F64, 1, SHAPE(8)), tb = view(b, FATTN_F64, 1, SHAPE(8)),
                       tc = view(c, FATTN_F64, 1, SHAPE(8));
    cr_assert_eq(fattn_tensor_normal(ctx, &ta, 0, 1, (fattn_rng){.seed = 1}), FATTN_OK);
    cr_assert_eq(fattn_tensor_normal(ctx, &tb, 0, 1, (fattn_rng){.seed = 1, .stream = 1}), FATTN_OK);
    cr_assert_eq(fattn_tensor_normal(ctx, &tc, 0, 1, (fattn_rng){.seed = (uint64_t)1 << 32}), FATTN_OK);
    for (int i = 0; i < 8; ++i) cr_assert(a[i] != b[i] && a[i] != c[i] && b[i] != c[i]);
}

/* Runs `call`, which must fail with `status` and an error message that contains `says`. */
#define REJECTED(status, says, call)                                                                                   \
    do {                                                                                                               \
        cr_assert_eq(call, status, "%s", fattn_ctx_error(ctx));                                                        \
        cr_assert(strstr(fattn_ctx_error(ctx), says), "%s", fattn_ctx_error(ctx));                                     \
    } while (0)

Test(tensor, every_error_of_alloc) {
    fattn_tensor t = {.data = &t};
    const int64_t big = (int64_t)1 << 31;
    cr_assert_eq(fattn_tensor_alloc(NULL, FATTN_F32, 0, NULL, &t), FATTN_E_ARG);
    REJECTED(FATTN_E_ARG, "NULL", fattn_tensor_alloc(ctx, FATTN_F32, 0, NULL, NULL));
    REJECTED(FATTN_E_ARG, "NULL", fattn_tensor_alloc(ctx, FATTN_F32, 1, NULL, &t));
    REJECTED(FATTN_E_ARG, "6 is not in 0..5", fattn_tensor_alloc(ctx, FATTN_F32, 6, SHAPE(1, 1, 1, 1, 1, 1), &t));
    REJECTED(FATTN_E_ARG, "-1 is not in 0..5", fattn_tensor_alloc(ctx, FATTN_F32, -1, SHAPE(1), &t));
    REJECTED(FATTN_E_DTYPE, "dtype 9", fattn_tensor_alloc(ctx, (fattn_dtype)9, 1, SHAPE(1), &t));
    REJECTED(FATTN_E_ARG, "shape[1] is -2", fattn_tensor_alloc(ctx, FATTN_F32, 2, SHAPE(1, -2), &t));
    REJECTED(FATTN_E_NOMEM, "overflows", fattn_tensor_alloc(ctx, FATTN_F32, 3, SHAPE(big, big, big), &t));
    REJECTED(FATTN_E_NOMEM, "overflows", fattn_tensor_alloc(ctx, FATTN_F64, 2, SHAPE(big, big / 2), &t));
    REJECTED(FATTN_E_NOMEM, "4611686018427387904 bytes", fattn_tensor_alloc(ctx, FATTN_U8, 2, SHAPE(big, big), &t));
    cr_assert_eq(t.data, &t, "outputs are written on success only");
}

Test(tensor, every_error_of_a_tensor_argument) {
    double data[8] = {0}, out[8];
    const fattn_tensor good = view(data, FATTN_F64, 2, SHAPE(2, 4));
    const fattn_tensor to = view(out, FATTN_F64, 2, SHAPE(2, 4));
    const int64_t far = (int64_t)1 << 61;
    memset(out, 0x5a, sizeof out);
    fattn_tensor t;
#define SPOILED(status, says, spoil)                                                                                   \
    do {                                                                                                               \
        t = good;                                                                                                      \
        spoil;                                                                                                         \
        REJECTED(status, "src: " says, fattn_tensor_copy(ctx, &to, &t));                                               \
        REJECTED(status, "dst: " says, fattn_tensor_copy(ctx, &t, &to));                                               \
        REJECTED(status, "dst: " says, fattn_tensor_normal(ctx, &t, 0, 1, (fattn_rng){0}));                            \
    } while (0)
    SPOILED(FATTN_E_SHAPE, "ndim 6 is not in 0..5", t.ndim = 6);
    SPOILED(FATTN_E_SHAPE, "ndim -1 is not in 0..5", t.ndim = -1);
    SPOILED(FATTN_E_DTYPE, "unknown dtype 0", t.dtype = 0);
    SPOILED(FATTN_E_DEVICE, "is on device 2:0, the context on 1:0", t.device = FATTN_CUDA);
    SPOILED(FATTN_E_DEVICE, "is on device 1:3, the context on 1:0", t.device_id = 3);
    SPOILED(FATTN_E_SHAPE, "shape[1] is -4", t.shape[1] = -4);
    SPOILED(FATTN_E_SHAPE, "its extent does not fit in 62 bits", t.shape[0] = t.shape[1] = far);
    SPOILED(FATTN_E_SHAPE, "its extent does not fit in 62 bits", t.stride[0] = far);
    SPOILED(FATTN_E_SHAPE, "its extent does not fit in 62 bits", t.stride[0] = INT64_MIN);
    SPOILED(FATTN_E_SHAPE, "its extent does not fit in 62 bits", (t.shape[0] = 9, t.stride[0] = INT64_MAX / 4));
    SPOILED(FATTN_E_ARG, "data is NULL, but it has 8 elements", t.data = NULL);
#undef SPOILED
    t = good, t.data = (char *)data + 4;
    REJECTED(FATTN_E_ARG, "is not aligned to its 8-byte elements", fattn_tensor_copy(ctx, &to, &t));
    REJECTED(FATTN_E_ARG, "rng.reserved is 3", fattn_tensor_normal(ctx, &to, 0, 1, (fattn_rng){.reserved = 3}));
    REJECTED(FATTN_E_ARG, "src: NULL", fattn_tensor_copy(ctx, &to, NULL));
    REJECTED(FATTN_E_ARG, "dst: NULL", fattn_tensor_copy(ctx, NULL, &good));
    t = to, t.stride[0] = 0;
    REJECTED(FATTN_E_SHAPE, "dst: stride[0] is 0", fattn_tensor_copy(ctx, &t, &good));
    REJECTED(FATTN_E_SHAPE, "dst: stride[0] is 0", fattn_tensor_normal(ctx, &t, 0, 1, (fattn_rng){0}));
    t = good, t.shape[1] = 3;
    REJECTED(FATTN_E_SHAPE, "dst is [2,4], src is [2,3]", fattn_tensor_copy(ctx, &to, &t));
    t = good, t.ndim = 1;
    REJECTED(FATTN_E_SHAPE, "dst is [2,4], src is [2]", fattn_tensor_copy(ctx, &to, &t));
    t = to, t.dtype = FATTN_I32;
    REJECTED(FATTN_E_DTYPE, "i32", fattn_tensor_normal(ctx, &t, 0, 1, (fattn_rng){0}));
    t.dtype = FATTN_F8E4M3;
    REJECTED(FATTN_E_DTYPE, "f8e4m3, not f64", fattn_tensor_normal(ctx, &t, 0, 1, (fattn_rng){0}));
    REJECTED(FATTN_E_DTYPE, "dst is f8e4m3, not f64", fattn_tensor_add(ctx, &t, &t));
    t.dtype = FATTN_I8;
    REJECTED(FATTN_E_DTYPE, "i8, not f64", fattn_tensor_normal(ctx, &t, 0, 1, (fattn_rng){0}));
    REJECTED(FATTN_E_DTYPE, "dst is i8, not f64", fattn_tensor_add(ctx, &t, &t));
    REJECTED(FATTN_E_ARG, "mean nan, std 1", fattn_tensor_normal(ctx, &to, NAN, 1, (fattn_rng){0}));
    REJECTED(FATTN_E_ARG, "mean 0, std -1", fattn_tensor_normal(ctx, &to, 0, -1, (fattn_rng){0}));
    REJECTED(FATTN_E_ARG, "mean 0, std inf", fattn_tensor_normal(ctx, &to, 0, INFINITY, (fattn_rng){0}));
    cr_assert_eq(fattn_tensor_copy(NULL, &to, &good), FATTN_E_ARG);
    cr_assert_eq(fattn_tensor_normal(NULL, &to, 0, 1, (fattn_rng){0}), FATTN_E_ARG);
    for (size_t i = 0; i < sizeof out; ++i) cr_assert_eq(((unsigned char *)out)[i], 0x5a);
}

/* A dimension of one element, or an empty tensor, may have any strides and data. */
Test(tensor, strides_that_are_not_used_do_not_matter) {
    double data[3] = {1, 2, 3}, out[3] = {0};
    fattn_tensor src = view(data, FATTN_F64, 2, SHAPE(1, 3)), dst = view(out, FATTN_F64, 2, SHAPE(1, 3));
    src.stride[0] = INT64_MIN, dst.stride[0] = 0;
    cr_assert_eq(fattn_tensor_copy(ctx, &dst, &src), FATTN_OK);
    cr_assert_eq(out[2], 3);
    fattn_tensor none = view((char *)data + 1, FATTN_F64, 2, SHAPE(0, 3));
    none.stride[0] = INT64_MAX;
    cr_assert_eq(fattn_tensor_copy(ctx, &none, &none), FATTN_OK);
}

/* Against the definition, for every pair of floating types, with and without strides. */
Test(tensor, add) {
    static const fattn_dtype types[] = {FATTN_F64, FATTN_F32, FATTN_F16, FATTN_BF16};
    for (int n = 0; n < 32; ++n) {
        const fattn_dtype to = types[n % 4], from = types[n / 4 % 4];
        const int64_t shape[2] = {3, 5};
        double sum[15], more[15], want[15];
        fattn_tensor d = fattn_tensor_view(sum, to, FATTN_CPU, 0, 2, shape);
        fattn_tensor x = fattn_tensor_view(more, from, FATTN_CPU, 0, 2, shape);
        if (n >= 16) x.stride[0] = 1, x.stride[1] = 3;
        for (int i = 0; i < 15; ++i) {
            fattni_store(sum, to, i, 0.37 * i - 2);
            fattni_store(more, from, i, 1.9 - 0.21 * i * i);
        }
        for (int i = 0; i < 15; ++i) {
            const int64_t at = n >= 16 ? i / 5 + i % 5 * 3 : i;
            fattni_store(want, to, i, fattni_load(sum, to, i) + fattni_load(more, from, at));
        }
        cr_assert_eq(fattn_tensor_add(ctx, &d, &x), FATTN_OK);
        cr_assert_eq(memcmp(sum, want, 15 * fattn_dtype_size(to)), 0, "%s += %s", fattn_dtype_name(to),
                     fattn_dtype_name(from));
        x.shape[1] = 4;
        cr_assert_eq(fattn_tensor_add(ctx, &d, &x), FATTN_E_SHAPE);
        d.dtype = FATTN_I32;
        cr_assert_eq(fattn_tensor_add(ctx, &d, &x), FATTN_E_DTYPE);
    }
}

/* The end of a view may lie behind what it views. */
Test(tensor, empty_slices_keep_their_address) {
    float numbers[12];
    fattn_tensor t = fattn_tensor_view(numbers, FATTN_F32, FATTN_CPU, 0, 2, (const int64_t[]){4, 3});
    t = fattn_tensor_slice(&t, 1, 1, 3);
    for (int64_t begin = 0; begin <= 4; ++begin) cr_assert_eq(fattn_tensor_slice(&t, 0, begin, begin).data, t.data);
}

/* Shapes without memory: counts saturate, and slices keep their address. */
Test(tensor, shapes_that_no_memory_holds) {
    const int64_t shape[] = {(int64_t)1 << 40, (int64_t)1 << 40, 3};
    fattn_tensor t = fattn_tensor_view(NULL, FATTN_F32, FATTN_CPU, 0, 3, shape);
    cr_assert_eq(fattn_tensor_numel(&t), INT64_MAX);
    t.shape[2] = 0, t.stride[0] = t.stride[1] = INT64_MAX;
    cr_assert_eq(fattn_tensor_numel(&t), 0);
    cr_assert_null(fattn_tensor_slice(&t, 0, (int64_t)1 << 39, (int64_t)1 << 40).data);
}
