/* The 8-bit copies of FATTN_FP8: where they lie, their bits, and every call that is refused. */
#include "fp8.h"

#include "core/fp8/fp8.h"
#include "core/fp8/rope.h"
#include "core/tensor/numeric.h"
#include "core/tensor/philox.h"

#include <criterion/criterion.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

/* ---- where they lie ---- */

static size_t to_256(int64_t bytes) { return (size_t)((bytes + 255) / 256 * 256); }

static bool is_at(const fattn_tensor *t, const char *memory, size_t offset, fattn_dtype dtype, int ndim,
                  const int64_t shape[4], int64_t pitch) {
    bool same = t->data == (fattn_tensor_numel(t) ? memory + offset : NULL) && t->dtype == (int32_t)dtype &&
                t->ndim == ndim && t->device == FATTN_CPU;
    int64_t stride = 1;
    for (int d = ndim - 1; d >= 0; --d) {
        same = same && t->shape[d] == shape[d] && (shape[d] <= 1 || t->stride[d] == stride);
        stride = d == ndim - 1 ? pitch : stride * shape[d];
    }
    return same;
}

/* One after the other, each at a multiple of 256 bytes; rows of q8 and k8 at multiples of 16. */
static void check_layout(const attention_case *c, int64_t Rq, int64_t Rk, int64_t chunks) {
    fattn_ctx *const ctx = attention_context(1);
    attention *const a = attention_new(ctx, c);
    fp8_copies copies = fp8_quantize(a);
    const fattn_fp8 *const f = &copies.fp8;
    const int64_t B = c->B, Bt = c->lengths == LENGTHS_PACKED ? 1 : B, Hq = a->c.Hq, Hkv = a->c.Hkv, D = a->c.D,
                  Dv = a->c.Dv, padded = (D + 15) / 16 * 16, columns = 128 * chunks, sums = 3 * (D + Dv);
    const bool integers = c->flags & FATTN_FP8_INT8;
    const fattn_dtype code = integers ? FATTN_I8 : FATTN_F8E4M3;
    const struct {
        const fattn_tensor *t;
        fattn_dtype dtype;
        int ndim;
        int64_t shape[4], pitch;
    } all[] = {
        {&f->q8, code, 4, {Bt, Hq, Rq, D}, padded},
        {&f->k8, code, 4, {Bt, Hkv, Rk, D}, padded},
        {&f->v8, FATTN_F8E4M3, 4, {Bt, Hkv, Dv, columns}, columns},
        {&f->q_scale, FATTN_F32, 3, {Bt, Hq, Rq}, Rq},
        {&f->q_shift, FATTN_F32, 3, {Bt, Hq, Rq}, Rq},
        {&f->k_scale, FATTN_F32, integers ? 3 : 2, {integers ? Bt : B, Hkv, columns / 8}, integers ? columns / 8 : Hkv},
        {&f->v_scale, FATTN_F32, 3, {B, Hkv, Dv}, Dv},
        {&f->v_mean, FATTN_F32, 3, {B, Hkv, Dv}, Dv},
        {&f->partials, FATTN_F32, 4, {Bt, Hkv, chunks, sums}, sums}};
    size_t at = 0;
    cr_assert(f->struct_size == sizeof *f && f->rope_base == 0);
    for (size_t n = 0; n < sizeof all / sizeof *all; ++n) {
        cr_assert(is_at(all[n].t, copies.memory, at, all[n].dtype, all[n].ndim, all[n].shape, all[n].pitch), "%s: %zu",
                  c->name, n);
        int64_t count = all[n].pitch;
        for (int d = 0; d < all[n].ndim - 1; ++d) count *= all[n].shape[d];
        at += to_256(count * (int64_t)fattn_dtype_size(all[n].dtype));
    }
    cr_assert_eq(copies.bytes, at, "%s: %zu bytes, not %zu", c->name, copies.bytes, at);
    fp8_free(&copies);
    attention_free(a);
    fattn_ctx_destroy(ctx);
}

static void check_layouts(uint32_t flags) {
    attention_case c = {
        "padded",      .B = 2, .Hq = 4, .Hkv = 2, .Sq = 7, .Sk = 129, .D = 40, .Dv = 24, .dtype = FATTN_BF16,
        .flags = flags};
    check_layout(&c, 7, 129, 2);
    c.Sk = 128, c.D = 64, c.dtype = FATTN_F32;
    check_layout(&c, 7, 128, 1);
    c.Sk = 0;
    check_layout(&c, 7, 0, 1);
    c.Sq = 0, c.B = 1, c.Sk = 1;
    check_layout(&c, 0, 1, 1);
    c = (attention_case){"packed",
                         .B = 3,
                         .Hq = 2,
                         .Hkv = 1,
                         .Sq = 9,
                         .Sk = 200,
                         .D = 16,
                         .dtype = FATTN_F16,
                         .flags = flags,
                         .lengths = LENGTHS_PACKED,
                         .length_q = {9, 0, 2},
                         .length_k = {200, 1, 130}};
    check_layout(&c, 1 + 11 + 2, 1 + 331 + 2, 334 / 128 + 3); /* with rows of no sequence before and after */
}

Test(fp8_copies, lie_one_after_the_other) {
    check_layouts(FATTN_FP8);
    check_layouts(FATTN_FP8 | FATTN_FP8_INT8);
}

/* Columns of neighbouring sequences are apart, however their lengths lie to the chunks. */
Test(fp8_copies, chunks_of_packed_sequences_do_not_meet) {
    for (int64_t first = 0; first < 300; first += 7)
        for (int64_t length = 0; length < 400; length += 3)
            for (int64_t b = 0; b < 3; ++b) {
                const int64_t begin = first / 128 + b, next = (first + length) / 128 + b + 1;
                cr_assert_leq(begin + (length + 127) / 128, next);
                const fattni_problem p = {.packed = true, .rows_k = first + length, .B = b + 1};
                cr_assert_leq(begin + (length + 127) / 128, fattni_fp8_chunks(&p));
            }
}

/* ---- their bits ---- */

static float load(const fattni_array *a, int64_t b, int64_t h, int64_t row, int64_t d) {
    return (float)fattni_get(a, b, h, row, d);
}

/* A row of q or k at this position. */
static void load_row(const fattni_problem *p, const fattni_array *a, int64_t b, int64_t h, int64_t row,
                     int64_t position, float *x) {
    for (int64_t d = 0; d < p->D; ++d) x[d] = load(a, b, h, row, d);
    for (int64_t d = 0, half = p->D / 2; p->fp8.rope_base > 0 && d < half; ++d) {
        const float u = x[d], v = x[d + half];
        float cosine, sine;
        fattni_fp8_angle(position, fattni_fp8_frequency((double)p->fp8.rope_base, d, half), &cosine, &sine);
        x[d] = fmaf(u, cosine, -(v * sine));
        x[d + half] = fmaf(u, sine, v * cosine);
    }
    if (!(p->flags & FATTN_FP8_HADAMARD)) return;
    for (int64_t d = 0; d < p->D; ++d) {
        const fattni_block counter = {{(uint32_t)(d / 128), 0, p->rng.stream, 0x48414441}};
        if (fattni_philox(p->rng.seed, counter).w[d % 128 / 32] & 1u << d % 32) x[d] = -x[d];
    }
    for (int64_t h2 = 1; h2 < p->D; h2 *= 2) {
        float y[FATTNI_MAX_HEAD_DIM];
        for (int64_t d = 0; d < p->D; ++d) y[d] = d & h2 ? x[d - h2] - x[d] : x[d] + x[d + h2];
        memcpy(x, y, (size_t)p->D * sizeof *x);
    }
    for (int64_t d = 0; d < p->D; ++d) x[d] *= (float)(1 / sqrt((double)p->D));
}

/* Of a channel with `stride` floats from key to key; returns the largest distance from the mean. */
static float center_of(const float *x, int64_t stride, int64_t keys, float *mean) {
    float total = 0, min = INFINITY, max = -INFINITY;
    for (int64_t j0 = 0; j0 < keys; j0 += 128) {
        float sum = 0;
        for (int64_t j = j0; j < keys && j < j0 + 128; ++j) {
            sum += x[j * stride];
            min = fminf(min, x[j * stride]);
            max = fmaxf(max, x[j * stride]);
        }
        total += sum;
    }
    *mean = keys ? total / (float)keys : 0;
    return keys ? fmaxf(*mean - min, max - *mean) : 0;
}

static void put(const fattn_tensor *t, int64_t n0, int64_t n1, int64_t n2, int64_t n3, float x) {
    const int64_t at[4] = {n0, n1, n2, n3};
    int64_t offset = 0;
    for (int d = 0; d < t->ndim; ++d) offset += at[d] * t->stride[d];
    if (t->dtype == FATTN_I8)
        ((int8_t *)t->data)[offset] = (int8_t)rintf(x);
    else if (t->dtype == FATTN_F8E4M3)
        ((uint8_t *)t->data)[offset] = fattni_float_to_e4m3(x);
    else
        ((float *)t->data)[offset] = x;
}

static void restate_keys(const fattni_problem *p, const fattni_sequence *s, int64_t g, const fattn_fp8 *to,
                         float *k_mean) {
    const int64_t keys = s->band.Sk, first = p->packed ? s->k0 / 128 * 128 + 128 * s->b : 0;
    float *const x = malloc((size_t)(keys + 1) * FATTNI_MAX_HEAD_DIM * sizeof *x), of_head = 0;
    const bool integers = p->flags & FATTN_FP8_INT8;
    for (int64_t j = 0; j < keys; ++j) load_row(p, &p->k, s->batch, g, s->k0 + j, p->k_pos0 + j, x + j * p->D);
    for (int64_t d = 0; d < p->D; ++d) of_head = fmaxf(of_head, center_of(x + d, p->D, keys, &k_mean[d]));
    of_head = fmaxf(of_head, 1e-30f);
    if (!integers) put(&to->k_scale, s->b, g, 0, 0, of_head / 448);
    for (int64_t j = 0; j < (keys ? (keys + 127) / 128 * 128 : 128) && integers; j += 8) {
        float most = 1e-30f;
        for (int64_t i = j / 32 * 32; i < j / 32 * 32 + 32 && i < keys; ++i)
            for (int64_t d = 0; d < p->D; ++d) most = fmaxf(most, fabsf(x[i * p->D + d] - k_mean[d]));
        put(&to->k_scale, s->batch, g, (first + j) / 8, 0, most / 127);
        for (int64_t i = j; i < j + 8 && i < keys; ++i)
            for (int64_t d = 0; d < p->D; ++d)
                put(&to->k8, s->batch, g, s->k0 + i, d, (x[i * p->D + d] - k_mean[d]) * (127 / most));
    }
    for (int64_t j = 0; j < keys && !integers; ++j)
        for (int64_t d = 0; d < p->D; ++d)
            put(&to->k8, s->batch, g, s->k0 + j, d, (x[j * p->D + d] - k_mean[d]) * (448 / of_head));
    for (int64_t d = 0; d < p->Dv; ++d) {
        float mean;
        for (int64_t j = 0; j < keys; ++j) x[j] = load(&p->v, s->batch, g, s->k0 + j, d);
        const float size = fmaxf(center_of(x, 1, keys, &mean), 1e-30f);
        put(&to->v_scale, s->b, g, d, 0, size / 448);
        double rest = 0;
        for (int64_t j = 0; j < (keys > 128 ? (keys + 127) / 128 * 128 : 128); ++j) {
            const float y = j < keys ? (x[j] - mean) * (448 / size) : 0;
            put(&to->v8, s->batch, g, d, first + fp8_column(j), y);
            rest += rint(4096 * ((double)y - fp8_round((double)y)));
        }
        put(&to->v_mean, s->b, g, d, 0, keys ? fmaf(size / 448, (float)rest / 4096 / (float)keys, mean) : 0);
    }
    free(x);
}

static void restate_row(const fattni_problem *p, const fattni_sequence *s, int64_t h, int64_t i, const fattn_fp8 *to,
                        const float *k_mean) {
    const int64_t row = s->q0 + i, off = p->flags & FATTN_CAUSAL_TOP_LEFT ? 0 : s->band.Sk - s->band.Sq;
    float x[FATTNI_MAX_HEAD_DIM], most = 0, lane[32] = {0};
    const float largest = p->flags & FATTN_FP8_INT8 ? 127 : 448;
    load_row(p, &p->q, s->batch, h, row, p->q_pos0 + i + off, x);
    for (int64_t d = 0; d < p->D; ++d) most = fmaxf(most, fabsf(x[d]));
    most = fmaxf(most, 1e-30f);
    put(&to->q_scale, s->batch, h, row, 0, most / largest);
    for (int64_t d = 0; d < p->D; ++d) put(&to->q8, s->batch, h, row, d, x[d] * (largest / most));
    for (int t = 0; t < 32; ++t)
        for (int64_t d = 8 * t; d < 8 * t + 8 && d < p->D; ++d) lane[t] = fmaf(x[d], k_mean[d], lane[t]);
    for (int step = 1; step < 32; step *= 2)
        for (int t = 0; t < 32; t += 2 * step) lane[t] = lane[t] + lane[t + step]; /* those that reach lane 0 */
    put(&to->q_shift, s->batch, h, row, 0, lane[0]);
}

static void check_bits(const attention_case *c, int threads, float rope_base) {
    fattn_ctx *const ctx = attention_context(threads);
    attention *const a = attention_new(ctx, c);
    fp8_copies got = fp8_quantize_turned(a, rope_base), want = fp8_quantize(a);
    memset(want.memory, 0xff, want.bytes);
    fattni_problem p;
    cr_assert_eq(fattni_problem_init(ctx, &a->params, &a->io, FATTNI_FWD, true, &p), FATTN_OK);
    p.fp8.rope_base = rope_base;
    for (int64_t b = 0; b < p.B; ++b) {
        const fattni_sequence s = fattni_sequence_of(&p, b);
        for (int64_t g = 0; g < p.Hkv; ++g) {
            float k_mean[FATTNI_MAX_HEAD_DIM];
            restate_keys(&p, &s, g, &want.fp8, k_mean);
            for (int64_t h = g * p.group; h < (g + 1) * p.group; ++h)
                for (int64_t i = 0; i < s.band.Sq; ++i) restate_row(&p, &s, h, i, &want.fp8, k_mean);
        }
    }
    const size_t end = (size_t)((char *)want.fp8.partials.data - (char *)want.memory);
    for (size_t n = 0; n < end; ++n)
        cr_assert_eq(((uint8_t *)got.memory)[n], ((uint8_t *)want.memory)[n], "%s: byte %zu of %zu", c->name, n, end);
    fp8_free(&got), fp8_free(&want);
    attention_free(a);
    fattn_ctx_destroy(ctx);
}

/* The recipe in the simplest loops: every bit of the copies, and nothing else is written. */
Test(fp8_copies, bits) {
    static const fattn_dtype dtypes[3] = {FATTN_BF16, FATTN_F32, FATTN_F16};
    static const int64_t dims[][2] = {{1, 3}, {16, 16}, {40, 64}, {64, 40}, {80, 96}, {128, 128}, {256, 256}, {255, 7}};
    for (int n = 0; n < 96; ++n) {
        attention_case c = {"padded",
                            .B = 3,
                            .Hq = 4,
                            .Hkv = 2,
                            .Sq = 70,
                            .Sk = 300,
                            .flags = FATTN_FP8,
                            .lengths = n % 2 ? LENGTHS_PADDED : LENGTHS_PACKED,
                            .length_q = {70, 0, 31},
                            .length_k = {129, 300, 0}};
        c.dtype = dtypes[n % 3], c.D = dims[n % 8][0], c.Dv = dims[n % 8][1];
        c.layout = n % 4 < 2 ? LAYOUT_BSHD : LAYOUT_PITCH;
        if ((c.D & (c.D - 1)) == 0 && c.D >= 16 && n % 24 < 16) c.flags |= FATTN_FP8_HADAMARD;
        if (n % 5 == 0) c.flags |= FATTN_CAUSAL_TOP_LEFT;
        if (n >= 48) c.flags |= FATTN_FP8_INT8;
        c.q_pos0 = n % 7 * 100, c.k_pos0 = n % 3 * 1000;
        check_bits(&c, 1 + n % 3, n % 48 >= 24 && c.D % 16 == 0 ? 10000 : 0);
    }
}

/* Row i of q or k becomes what `to` says of channel 0, and 0 in others. */
static void fill_channel_0(const attention *a, enum tensor_id id, double (*to)(int64_t row)) {
    int64_t at[FATTN_MAX_DIMS] = {0};
    for (int64_t n = 0; n < fattn_tensor_numel(&a->t[id]); ++n) {
        attention_index(&a->t[id], n, at);
        attention_set(&a->t[id], at, at[3] ? 0 : to(at[2]));
    }
}

/* Of 64 keys, whose mean is 0 and whose largest is 127 among each 32: code = rint. */
static double ties(int64_t row) {
    const double sizes[16] = {127, 0.5, 1.5, 2.5, 126.5, 125.5, 3.5, 4.5, 0, 1, 63.5, 64.5, 0.25, 0.75, 100.5, 101.5};
    return row % 2 ? -sizes[row / 2 % 16] : sizes[row / 2 % 16];
}
static double zero(int64_t row) {
    (void)row;
    return 0;
}
static double seven(int64_t row) {
    (void)row;
    return 7;
}

static attention *new_64_keys(fattn_ctx *ctx) {
    const attention_case c = {"64 keys",
                              .B = 1,
                              .Hq = 1,
                              .Sq = 64,
                              .Sk = 64,
                              .D = 16,
                              .dtype = FATTN_F32,
                              .flags = FATTN_FP8 | FATTN_FP8_INT8};
    return attention_new(ctx, &c);
}

Test(fp8_copies, integers_at_ties) {
    fattn_ctx *const ctx = attention_context(1);
    attention *const a = new_64_keys(ctx);
    fill_channel_0(a, T_Q, ties), fill_channel_0(a, T_K, ties);
    fp8_copies copies = fp8_quantize(a);
    for (int64_t i = 0; i < 64; ++i) {
        const double x = ties(i), q = fp8_get(&copies.fp8.q8, 0, 0, i, 0), k = fp8_get(&copies.fp8.k8, 0, 0, i, 0);
        cr_assert_eq(k, rint(x), "%g of %g", k, x);
        cr_assert_eq(q, x == 0 ? 0 : copysign(127, x), "%g of %g", q, x);
    }
    for (int64_t e = 0; e < 16; ++e)
        cr_assert_eq(fp8_get(&copies.fp8.k_scale, 0, 0, e, 0), e < 8 ? 1 : (double)(1e-30f / 127));
    fp8_free(&copies);
    attention_free(a);
    fattn_ctx_destroy(ctx);
}

/* Rows of zeros, and keys that are their mean: codes of 0, and the least scale. */
Test(fp8_copies, integers_of_nothing) {
    fattn_ctx *const ctx = attention_context(1);
    attention *const a = new_64_keys(ctx);
    fill_channel_0(a, T_Q, zero), fill_channel_0(a, T_K, seven);
    fp8_copies copies = fp8_quantize(a);
    for (int64_t i = 0; i < 64; ++i) {
        cr_assert_eq(fp8_get(&copies.fp8.q_scale, 0, 0, i, 0), (double)(1e-30f / 127));
        for (int64_t d = 0; d < 16; ++d)
            cr_assert(fp8_get(&copies.fp8.q8, 0, 0, i, d) == 0 && fp8_get(&copies.fp8.k8, 0, 0, i, d) == 0);
    }
    for (int64_t e = 0; e < 16; ++e) cr_assert_eq(fp8_get(&copies.fp8.k_scale, 0, 0, e, 0), (double)(1e-30f / 127));
    fp8_forward(a, &copies);
    for (int64_t i = 0; i < 64; ++i) cr_assert_eq(attention_get(&a->t[T_LSE], (int64_t[4]){0, 0, i}), (double)logf(64));
    fp8_free(&copies);
    attention_free(a);
    fattn_ctx_destroy(ctx);
}

/* Two large keys, whose mean is 0, change the scale and the codes of their 32 keys and of no other. */
Test(fp8_copies, outliers_cost_32_keys) {
    enum { KEYS = 300, D = 16 };
    fattn_ctx *const ctx = attention_context(1);
    const attention_case c = {"outliers",
                              .B = 1,
                              .Hq = 1,
                              .Sq = 1,
                              .Sk = KEYS,
                              .D = D,
                              .dtype = FATTN_F32,
                              .flags = FATTN_FP8 | FATTN_FP8_INT8};
    attention *const a = attention_new(ctx, &c);
    for (int64_t j = 0; j < KEYS; ++j) /* integers: sums are exact */
        for (int64_t d = 0; d < D; ++d) {
            const int64_t at[4] = {0, 0, j, d};
            attention_set(&a->t[T_K], at, rint(8 * attention_get(&a->t[T_K], at)));
        }
    fp8_copies before = fp8_quantize(a);
    const int64_t large[2][4] = {{0, 0, 129, 3}, {0, 0, 158, 3}};
    for (int n = 0; n < 2; ++n)
        attention_set(&a->t[T_K], large[n], attention_get(&a->t[T_K], large[n]) + (n ? -4096 : 4096));
    fp8_copies after = fp8_quantize(a);
    for (int64_t j = 0; j < KEYS; ++j) {
        const bool theirs = j / 32 == 129 / 32;
        const double x = fp8_get(&before.fp8.k_scale, 0, 0, j / 8, 0), y = fp8_get(&after.fp8.k_scale, 0, 0, j / 8, 0);
        cr_assert(theirs ? y > 50 * x && y < 34 : y == x && x > 0.1 && x < 1, "key %d: %g, before %g", (int)j, y, x);
        for (int64_t d = 0; d < D && !theirs; ++d)
            cr_assert_eq(fp8_get(&after.fp8.k8, 0, 0, j, d), fp8_get(&before.fp8.k8, 0, 0, j, d));
    }
    cr_assert(fp8_get(&after.fp8.k8, 0, 0, 129, 3) + fp8_get(&after.fp8.k8, 0, 0, 158, 3) <= 1);
    fp8_free(&before), fp8_free(&after);
    attention_free(a);
    fattn_ctx_destroy(ctx);
}

/* Against libm: an angle of position 2^29 has 24 bits behind the point in double, times a turn. */
Test(fp8_copies, angles) {
    static const double bases[] = {10000, 500000, 0.5};
    for (int b = 0; b < 3; ++b)
        for (int64_t half = 8; half <= 128; half *= 2)
            for (int64_t i = 0; i < half; ++i)
                for (int64_t at = -3000; at <= 1 << 29; at += at < 3000 ? 1 : at / 7) {
                    const double angle = (double)at * pow(bases[b], -(double)i / (double)half);
                    const double most = 1e-7 + 2e-16 * fabs(angle) + 1e-16 * fabs((double)at);
                    float cosine, sine;
                    fattni_fp8_angle(at, fattni_fp8_frequency(bases[b], i, half), &cosine, &sine);
                    cr_assert(fabs((double)cosine - cos(angle)) <= most && fabs((double)sine - sin(angle)) <= most,
                              "base %g, pair %d of %d, position %d: %g, %g", bases[b], (int)i, (int)half, (int)at,
                              (double)cosine, (double)sine);
                }
}

/* ---- what is refused ---- */

typedef struct call {
    fattn_attention_params p;
    fattn_attention_io io;
    fattn_fp8 fp8;
    fattn_tensor q, k, v, o, lse, bias, slopes, lengths, pages;
    size_t bytes;
} call;

static fattn_ctx *ctx;
static float zeros[1 << 12];
static int32_t lengths[2] = {4, 4}, pages[4];
static char *memory;

static void open_context(void) {
    cr_assert_eq(fattn_ctx_create(NULL, &ctx), FATTN_OK);
    memory = aligned_alloc(256, 1 << 20);
}
static void close_context(void) {
    fattn_ctx_destroy(ctx);
    free(memory);
}
TestSuite(fp8_refused, .init = open_context, .fini = close_context);

static fattn_tensor tensor(fattn_dtype t, int ndim, const int64_t *shape) {
    return fattn_tensor_view(zeros, t, FATTN_CPU, 0, ndim, shape);
}

static void fill(call *c) {
    *c = (call){.p = {.struct_size = sizeof c->p, .flags = FATTN_FP8}, .io = {.struct_size = sizeof c->io}};
    c->q = c->k = c->v = c->o = tensor(FATTN_BF16, 4, (const int64_t[]){2, 2, 16, 16});
    c->lse = tensor(FATTN_F32, 3, (const int64_t[]){2, 2, 16});
    c->bias = tensor(FATTN_F32, 4, (const int64_t[]){1, 1, 16, 16});
    c->slopes = tensor(FATTN_F32, 1, (const int64_t[]){2});
    c->lengths = fattn_tensor_view(lengths, FATTN_I32, FATTN_CPU, 0, 1, (const int64_t[]){2});
    c->pages = fattn_tensor_view(pages, FATTN_I32, FATTN_CPU, 0, 2, (const int64_t[]){2, 2});
    c->io.q = &c->q, c->io.k = &c->k, c->io.v = &c->v, c->io.o = &c->o, c->io.lse = &c->lse;
    cr_assert_eq(fattn_fp8_layout(ctx, &c->p, &c->io, NULL, &c->bytes, NULL), FATTN_OK, "%s", fattn_ctx_error(ctx));
    cr_assert_eq(fattn_fp8_layout(ctx, &c->p, &c->io, memory, &c->bytes, &c->fp8), FATTN_OK);
    c->io.fp8 = &c->fp8;
}

/* The last arguments make the call invalid for layout (if `everywhere`), quantize, query and forward. */
#define REFUSED(everywhere, status, says, ...)                                                                         \
    do {                                                                                                               \
        call c;                                                                                                        \
        fill(&c);                                                                                                      \
        __VA_ARGS__;                                                                                                   \
        size_t bytes = 77;                                                                                             \
        fattn_attention_plan plan = {.struct_size = sizeof plan};                                                      \
        if (everywhere) {                                                                                              \
            cr_assert_eq(fattn_fp8_layout(ctx, &c.p, &c.io, NULL, &bytes, NULL), status, "%s", fattn_ctx_error(ctx));  \
            cr_assert(bytes == 77 && strstr(fattn_ctx_error(ctx), says), "%s", fattn_ctx_error(ctx));                  \
        }                                                                                                              \
        cr_assert_eq(fattn_fp8_quantize(ctx, &c.p, &c.io), status, "%s", fattn_ctx_error(ctx));                        \
        cr_assert(strstr(fattn_ctx_error(ctx), says), "%s", fattn_ctx_error(ctx));                                     \
        cr_assert_eq(fattn_attention_query(ctx, &c.p, &c.io, &plan), status, "%s", fattn_ctx_error(ctx));              \
        cr_assert(strstr(fattn_ctx_error(ctx), says), "%s", fattn_ctx_error(ctx));                                     \
        cr_assert_eq(fattn_attention_fwd(ctx, &c.p, &c.io), status, "%s", fattn_ctx_error(ctx));                       \
        cr_assert(strstr(fattn_ctx_error(ctx), says), "%s", fattn_ctx_error(ctx));                                     \
    } while (0)

Test(fp8_refused, features) {
    REFUSED(true, FATTN_E_ARG, "FATTN_FP8_HADAMARD is given without FATTN_FP8", c.p.flags = FATTN_FP8_HADAMARD);
    REFUSED(true, FATTN_E_ARG, "FATTN_FP8_RENEW is given without FATTN_FP8", c.p.flags = FATTN_FP8_RENEW);
    REFUSED(true, FATTN_E_ARG, "FATTN_FP8_INT8 is given without FATTN_FP8", c.p.flags = FATTN_FP8_INT8);
    REFUSED(true, FATTN_E_UNSUPPORTED, "FATTN_FP8 has no softcap", c.p.softcap = 2);
    REFUSED(true, FATTN_E_UNSUPPORTED, "FATTN_FP8 has no ALiBi", c.io.alibi = &c.slopes);
    REFUSED(true, FATTN_E_UNSUPPORTED, "FATTN_FP8 has no bias", c.io.bias = &c.bias);
    REFUSED(true, FATTN_E_UNSUPPORTED, "FATTN_FP8 has no dropout", c.p.dropout_p = 0.5f);
    REFUSED(true, FATTN_E_UNSUPPORTED, "FATTN_FP8 has no pages",
            (c.io.page_table = &c.pages, c.io.seqlens_k = &c.lengths));
    REFUSED(true, FATTN_E_UNSUPPORTED, "FATTN_FP8 has no FATTN_MERGE",
            (c.p.flags |= FATTN_MERGE, c.o.dtype = FATTN_F32));
    REFUSED(true, FATTN_E_UNSUPPORTED, "FATTN_FP8 has no FATTN_EXACT_DELTA", c.p.flags |= FATTN_EXACT_DELTA);
    REFUSED(true, FATTN_E_UNSUPPORTED, "FATTN_FP8 has no algorithm STANDARD", c.p.algorithm = FATTN_ALGO_STANDARD);
    REFUSED(true, FATTN_E_UNSUPPORTED, "FATTN_FP8 has no algorithm FLASH1", c.p.algorithm = FATTN_ALGO_FLASH1);
    REFUSED(true, FATTN_E_UNSUPPORTED, "FATTN_FP8 has no F64: q, k and v are f32, f16 or bf16",
            c.q.dtype = c.k.dtype = c.v.dtype = c.o.dtype = c.lse.dtype = FATTN_F64);
    REFUSED(true, FATTN_E_DTYPE, "k: dtype f8e4m3; attention makes 8-bit copies", c.k.dtype = FATTN_F8E4M3);
    REFUSED(true, FATTN_E_DTYPE, "q: dtype i8; attention makes 8-bit copies", c.q.dtype = FATTN_I8);
    REFUSED(true, FATTN_E_UNSUPPORTED, "needs a D that is a power of two of 16..256",
            (c.p.flags |= FATTN_FP8_HADAMARD, c.q.shape[3] = c.k.shape[3] = 12));
    REFUSED(true, FATTN_E_UNSUPPORTED, "needs a D that is a power of two of 16..256",
            (c.p.flags |= FATTN_FP8_HADAMARD, c.q.shape[3] = c.k.shape[3] = 8));
    const int64_t many = (int64_t)1 << 43;
    REFUSED(true, FATTN_E_UNSUPPORTED, "at most 2^50 rows and keys",
            (c.q.shape[0] = c.k.shape[0] = c.v.shape[0] = many, c.q.shape[1] = c.k.shape[1] = c.v.shape[1] = 1,
             c.q.shape[2] = c.k.shape[2] = c.v.shape[2] = 1, c.q.stride[0] = c.k.stride[0] = c.v.stride[0] = 0,
             c.lse.shape[0] = c.o.shape[0] = many, c.lse.shape[1] = c.o.shape[1] = 1,
             c.lse.shape[2] = c.o.shape[2] = 1));
}

Test(fp8_refused, copies) {
    REFUSED(false, FATTN_E_ABI, "fattn_fp8: struct_size is 0", c.fp8.struct_size = 0);
    REFUSED(false, FATTN_E_ARG, "fp8.rope_base: -1 is not finite and positive", c.fp8.rope_base = -1);
    REFUSED(false, FATTN_E_ARG, "fp8.rope_base: inf is not", c.fp8.rope_base = INFINITY);
    REFUSED(false, FATTN_E_ARG, "nan is not finite", c.fp8.rope_base = NAN);
    REFUSED(false, FATTN_E_SHAPE, "fp8.rope_base: 10000, but D=24 is not a multiple of 16",
            (c.fp8.rope_base = 10000, c.q = c.k = c.v = c.o = tensor(FATTN_BF16, 4, (const int64_t[]){2, 2, 16, 24})));
    static const char *const names[9] = {"q8",      "k8",      "v8",     "q_scale", "q_shift",
                                         "k_scale", "v_scale", "v_mean", "partials"};
    for (int n = 0; n < 9; ++n) {
        char says[32] = "fp8.";
        strcat(says, names[n]);
#define ONE (&c.fp8.q8)[n]
        REFUSED(false, FATTN_E_ARG, says, ONE.data = NULL);
        REFUSED(false, FATTN_E_SHAPE, says, ONE.shape[0] += 1);
        REFUSED(false, FATTN_E_SHAPE, says, ONE.shape[ONE.ndim - 1] -= 1);
        REFUSED(false, FATTN_E_SHAPE, says, ONE.ndim -= 1);
        REFUSED(false, FATTN_E_DTYPE, says, ONE.dtype = FATTN_I32);
        REFUSED(false, FATTN_E_DEVICE, says, ONE.device = FATTN_CUDA);
        REFUSED(false, FATTN_E_SHAPE, says, ONE.stride[0] = 0);
        REFUSED(false, FATTN_E_SHAPE, "must be 1", ONE.stride[ONE.ndim - 1] = 2);
        if (n >= 3) continue;
        REFUSED(false, FATTN_E_ARG, "is not aligned to 16 bytes", ONE.data = (char *)ONE.data + 8);
        REFUSED(false, FATTN_E_SHAPE, "not a positive multiple of 16", ONE.stride[2] += 8);
        REFUSED(false, FATTN_E_SHAPE, "not a positive multiple of 16", ONE.stride[1] = -ONE.stride[1]);
#undef ONE
    }
}

static void lay_out_integers(call *c) {
    c->p.flags |= FATTN_FP8_INT8, c->io.fp8 = NULL;
    cr_assert_eq(fattn_fp8_layout(ctx, &c->p, &c->io, NULL, &c->bytes, NULL), FATTN_OK, "%s", fattn_ctx_error(ctx));
    cr_assert_eq(fattn_fp8_layout(ctx, &c->p, &c->io, memory, &c->bytes, &c->fp8), FATTN_OK);
    c->io.fp8 = &c->fp8;
}

/* Copies of one kind where the flag names the other, and what FATTN_FP8_INT8 asks of k_scale. */
Test(fp8_refused, integers) {
    REFUSED(false, FATTN_E_DTYPE, "fp8.q8: dtype f8e4m3, but with FATTN_FP8_INT8 it is i8",
            c.p.flags |= FATTN_FP8_INT8);
    REFUSED(false, FATTN_E_DTYPE, "fp8.q8: dtype i8, but without FATTN_FP8_INT8 it is f8e4m3",
            (lay_out_integers(&c), c.p.flags &= ~(uint32_t)FATTN_FP8_INT8));
    REFUSED(false, FATTN_E_DTYPE, "fp8.k8: dtype f8e4m3, but with FATTN_FP8_INT8 it is i8",
            (lay_out_integers(&c), c.fp8.k8.dtype = FATTN_F8E4M3));
    REFUSED(false, FATTN_E_DTYPE, "fp8.v8: dtype i8, but with FATTN_FP8_INT8 it is f8e4m3",
            (lay_out_integers(&c), c.fp8.v8.dtype = FATTN_I8));
    REFUSED(false, FATTN_E_SHAPE, "fp8.k_scale: has 2 dimensions [2,2], must have 3",
            (lay_out_integers(&c), c.fp8.k_scale = tensor(FATTN_F32, 2, (const int64_t[]){2, 2})));
    REFUSED(false, FATTN_E_SHAPE, "fp8.k_scale: [2,2,4], but dimension 2 must be 16",
            (lay_out_integers(&c), c.fp8.k_scale.shape[2] = 4));
    REFUSED(false, FATTN_E_SHAPE, "fp8.k_scale: stride[2] is 2, must be 1",
            (lay_out_integers(&c), c.fp8.k_scale.stride[2] = 2));
    REFUSED(false, FATTN_E_ARG, "is not aligned to 16 bytes",
            (lay_out_integers(&c), c.fp8.k_scale.data = (float *)c.fp8.k_scale.data + 2));
    REFUSED(false, FATTN_E_SHAPE, "fp8.k_scale: stride[1] is 18, not a positive multiple of 4",
            (lay_out_integers(&c), c.fp8.k_scale.stride[1] = 18));
    REFUSED(false, FATTN_E_SHAPE, "fp8.k_scale: stride[0] is -32, not a positive multiple of 4",
            (lay_out_integers(&c), c.fp8.k_scale.stride[0] = -32));
    REFUSED(false, FATTN_E_ARG, "fp8.k8: data", (lay_out_integers(&c), c.fp8.k8.data = (char *)c.fp8.k8.data + 8));
    REFUSED(false, FATTN_E_SHAPE, "fp8.q8: stride[2] is 24, not a positive multiple of 16",
            (lay_out_integers(&c), c.fp8.q8.stride[2] = 24));
}

/* What only one of the calls takes. */
Test(fp8_refused, arguments) {
    call c;
    fill(&c);
    fattn_fp8 out;
    size_t bytes = c.bytes;
    cr_assert_eq(fattn_fp8_layout(NULL, &c.p, &c.io, NULL, &bytes, NULL), FATTN_E_ARG);
    cr_assert_eq(fattn_fp8_layout(ctx, &c.p, NULL, NULL, &bytes, NULL), FATTN_E_ARG);
    cr_assert_str_eq(fattn_ctx_error(ctx), "fp8_layout: io is NULL");
    cr_assert_eq(fattn_fp8_layout(ctx, &c.p, &c.io, NULL, NULL, NULL), FATTN_E_ARG);
    cr_assert_str_eq(fattn_ctx_error(ctx), "fp8_layout: bytes is NULL");
    cr_assert_eq(fattn_fp8_layout(ctx, &c.p, &c.io, memory, &bytes, NULL), FATTN_E_ARG);
    cr_assert_str_eq(fattn_ctx_error(ctx), "fp8_layout: out is NULL");
    memset(&out, 0x5a, sizeof out);
    const fattn_fp8 untouched = out;
    bytes -= 1;
    cr_assert_eq(fattn_fp8_layout(ctx, &c.p, &c.io, memory, &bytes, &out), FATTN_E_WORKSPACE);
    cr_assert(strstr(fattn_ctx_error(ctx), "bytes needed"), "%s", fattn_ctx_error(ctx));
    bytes += 1;
    cr_assert_eq(fattn_fp8_layout(ctx, &c.p, &c.io, memory + 128, &bytes, &out), FATTN_E_WORKSPACE);
    cr_assert(strstr(fattn_ctx_error(ctx), "is not aligned to 256 bytes"), "%s", fattn_ctx_error(ctx));
    cr_assert_eq(memcmp(&out, &untouched, sizeof out), 0);
    cr_assert_eq(fattn_fp8_quantize(NULL, &c.p, &c.io), FATTN_E_ARG);
    cr_assert_eq(fattn_fp8_quantize(ctx, &c.p, NULL), FATTN_E_ARG);
    c.io.fp8 = NULL;
    cr_assert_eq(fattn_fp8_quantize(ctx, &c.p, &c.io), FATTN_E_ARG);
    cr_assert_str_eq(fattn_ctx_error(ctx), "fp8_quantize: io.fp8 is NULL");
    c.p.flags = 0;
    cr_assert_eq(fattn_fp8_quantize(ctx, &c.p, &c.io), FATTN_E_ARG);
    cr_assert_str_eq(fattn_ctx_error(ctx), "fp8_quantize: params.flags lacks FATTN_FP8");
    cr_assert_eq(fattn_fp8_layout(ctx, &c.p, &c.io, NULL, &bytes, NULL), FATTN_E_ARG);
    cr_assert_str_eq(fattn_ctx_error(ctx), "fp8_layout: params.flags lacks FATTN_FP8");
    const fattn_fp8 nonsense = {.rope_base = -7};
    fattn_attention_plan plan = {.struct_size = sizeof plan};
    c.io.fp8 = &nonsense;
    cr_assert_eq(fattn_attention_query(ctx, &c.p, &c.io, &plan), FATTN_OK, "without the flag it is not read");
}

/* quantize writes all of them, forward o and lse. */
Test(fp8_refused, overlaps) {
    call c;
    for (int n = 0; n < 9; ++n) {
        fill(&c);
        fattn_tensor *const t = &c.fp8.q8 + n;
        const fattn_tensor in = c.v;
        c.v.data = t->data;
        cr_assert_eq(fattn_fp8_quantize(ctx, &c.p, &c.io), FATTN_E_ARG);
        cr_assert(strstr(fattn_ctx_error(ctx), "v and fp8") || strstr(fattn_ctx_error(ctx), "and v overlap"), "%s",
                  fattn_ctx_error(ctx));
        c.v = in;
        fattn_tensor *const other = &c.fp8.q8 + (n + 1) % 9;
        other->data = t->data;
        cr_assert_eq(fattn_fp8_quantize(ctx, &c.p, &c.io), FATTN_E_ARG);
        cr_assert(strstr(fattn_ctx_error(ctx), "overlap"), "%s", fattn_ctx_error(ctx));
        fill(&c);
        fattn_attention_plan plan = {.struct_size = sizeof plan};
        cr_assert_eq(fattn_attention_query(ctx, &c.p, &c.io, &plan), FATTN_OK, "%s", fattn_ctx_error(ctx));
        c.io.workspace = memory + (1 << 19), c.io.workspace_bytes = plan.fwd_workspace;
        c.o.data = t->data;
        cr_assert_eq(fattn_attention_fwd(ctx, &c.p, &c.io), FATTN_E_ARG, "%d", n);
        cr_assert(strstr(fattn_ctx_error(ctx), "o and fp8."), "%s", fattn_ctx_error(ctx));
    }
}

/* Backward with FATTN_FP8_RENEW runs a forward call, so that it refuses what forward with FATTN_FP8 does. */
Test(fp8_refused, renewed) {
    call c;
    fattn_tensor known;
#define NOT_RENEWED(status, says, ...)                                                                                 \
    do {                                                                                                               \
        fattn_attention_plan plan = {.struct_size = sizeof plan};                                                      \
        fill(&c);                                                                                                      \
        fattn_tensor dq = c.q;                                                                                         \
        known = c.lse;                                                                                                 \
        c.io.d_o = &c.v, c.io.dq = &dq, c.p.flags |= FATTN_FP8_RENEW;                                                  \
        __VA_ARGS__;                                                                                                   \
        cr_assert_eq(fattn_attention_bwd(ctx, &c.p, &c.io), status, "%s", fattn_ctx_error(ctx));                       \
        cr_assert(strstr(fattn_ctx_error(ctx), says), "%s", fattn_ctx_error(ctx));                                     \
        cr_assert_eq(fattn_attention_query(ctx, &c.p, &c.io, &plan), status, "%s", fattn_ctx_error(ctx));              \
        cr_assert(strstr(fattn_ctx_error(ctx), says), "%s", fattn_ctx_error(ctx));                                     \
    } while (0)
    NOT_RENEWED(FATTN_E_ARG, "FATTN_FP8_RENEW is given without FATTN_FP8", c.p.flags = FATTN_FP8_RENEW);
    NOT_RENEWED(FATTN_E_ARG, "delta: given beside FATTN_FP8_RENEW", c.io.delta = &known);
    NOT_RENEWED(FATTN_E_UNSUPPORTED, "FATTN_FP8 has no softcap", c.p.softcap = 2);
    NOT_RENEWED(FATTN_E_UNSUPPORTED, "FATTN_FP8 has no dropout", c.p.dropout_p = 0.5f);
    NOT_RENEWED(FATTN_E_UNSUPPORTED, "FATTN_FP8 has no FATTN_EXACT_DELTA", c.p.flags |= FATTN_EXACT_DELTA);
    NOT_RENEWED(FATTN_E_UNSUPPORTED, "FATTN_FP8 has no FATTN_MERGE", (c.p.flags |= FATTN_MERGE, c.o.dtype = FATTN_F32));
    NOT_RENEWED(FATTN_E_UNSUPPORTED, "FATTN_FP8 has no algorithm STANDARD", c.p.algorithm = FATTN_ALGO_STANDARD);
    NOT_RENEWED(FATTN_E_SHAPE, "lse: ", c.lse.shape[2] = 15);
    NOT_RENEWED(FATTN_E_ARG, "o: NULL, but it is required", c.io.o = NULL);
}

/* Flag by flag, backward's call is the one without. */
Test(fp8_refused, backward_ignores_the_flag) {
    call c;
    fill(&c);
    c.io.d_o = &c.o, c.io.dq = &c.lse; /* of a wrong shape */
    c.fp8.rope_base = -1;
    c.p.softcap = 2;
    cr_assert_eq(fattn_attention_bwd(ctx, &c.p, &c.io), FATTN_E_SHAPE);
    cr_assert(strstr(fattn_ctx_error(ctx), "dq"), "%s", fattn_ctx_error(ctx));
}
