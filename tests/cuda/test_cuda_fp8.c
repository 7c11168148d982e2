/* FATTN_FP8's forward on Hopper: against fp64 on the copies, beside the CPU's emulation; the same bits with explicit
   copies and in graphs. Its other promises: test_cuda_fp8_calls.c. Other devices skip all.

   What O may be off by, of a row with weights p of its keys and values v = v_scale v8, from exact sums of p v:
   - 64 P is rounded to 3 fraction bits: a weight by 1/17 of it or less, or, where that is no normal number, by 2^-16
     of the largest weight. Many such errors are 0.0265 of the weights (rms).
   - The tensor core aligns the 32 products of a step, and the sum so far, to the largest of them and cuts them to 13
     fraction bits: 33 errors, of random signs in a score, so that their root is left: 2^-11 of M in each of D / 32
     steps, M the largest product that numbers of the row and of a key could have, or the largest score. Typical ones
     are half of that and add up as squares. O may lose 2^-11 of its sum of |p v| in each of Sk / 32 steps.
   - O is rounded to its dtype.
   L is off by what the scores are off by, and by F32's roundings. */
#include "contexts.h"
#include "device.h"
#include "fp8.h"
#include "pair.h"

#include "core/base/internal.h"
#include "core/tensor/numeric.h"
#include "fwd/cuda/fwd_cuda.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const fattn_dtype dtypes[3] = {FATTN_BF16, FATTN_F32, FATTN_F16};
static const enum layout layouts[4] = {LAYOUT_BHSD, LAYOUT_BSHD, LAYOUT_PITCH, LAYOUT_REVERSED};

static bool is_power(int64_t D) { return (D & (D - 1)) == 0 && D >= 16; }

/* ---- forward ---- */

/* Exact sums over the codes, and the bounds of the head comment. */
typedef struct row_model {
    double L, L_far, L_typical;
    double o[FATTNI_MAX_HEAD_DIM], far[FATTNI_MAX_HEAD_DIM], square[FATTNI_MAX_HEAD_DIM]; /* square: of rms errors */
} row_model;

static double largest_of(const double *x, int64_t n) {
    double most = 0;
    for (int64_t e = 0; e < n; ++e) most = fmax(most, fabs(x[e]));
    return most;
}

/* By what part e^x is larger than 1; finite, so that 0 of it is 0. */
static double growth(double x) { return fmin(expm1(x), 1e30); }

/* score: room for Sk numbers; k_most: the largest number of the head's keys, a code times its scale. */
static void model_row(const fattni_problem *p, const fattni_sequence *s, int64_t h, int64_t i, const fp8_numbers *n,
                      double k_most, double *score, row_model *m) {
    const int64_t g = h / p->group, head = s->b * p->Hkv + g, row = (s->batch * p->Hq + h) * p->rows_q + s->q0 + i;
    const int64_t key0 = (s->batch * p->Hkv + g) * p->rows_k + s->k0, Sk = s->band.Sk;
    const double *const q = n->q8 + row * p->D, unit = p->scale * n->q_scale[row];
    const double steps = ceil((double)p->D / 32), shift = p->scale * n->q_shift[row];
    const double u = p->o.dtype == FATTN_BF16 ? 0x1p-8 : p->o.dtype == FATTN_F16 ? 0x1p-11 : 0x1p-22;
    double max = -INFINITY, sum = 0, size = unit * largest_of(q, p->D) * k_most;
    double weight[FATTNI_MAX_HEAD_DIM] = {0}, all[FATTNI_MAX_HEAD_DIM] = {0}, most[FATTNI_MAX_HEAD_DIM] = {0};
    *m = (row_model){.L = -INFINITY};
    for (int64_t j = 0; j < Sk; ++j) {
        double dot = 0;
        score[j] = -INFINITY;
        if (!fattni_visible(&s->band, i, j)) continue;
        for (int64_t d = 0; d < p->D; ++d) dot += q[d] * n->k8[(key0 + j) * p->D + d];
        score[j] = unit * n->k_scale[key0 + j] * dot;
        max = fmax(max, score[j]);
        size = fmax(size, fabs(score[j]));
    }
    for (int64_t j = 0; j < Sk; ++j) {
        if (score[j] == -INFINITY) continue;
        const double e = exp(score[j] - max), *const v = n->v8 + (key0 + j) * p->Dv;
        sum += e;
        for (int64_t d = 0; d < p->Dv; ++d) {
            m->o[d] += e * v[d];
            m->square[d] += e * e * v[d] * v[d];
            weight[d] += e * fabs(v[d]), all[d] += fabs(v[d]), most[d] = fmax(most[d], fabs(v[d]));
        }
    }
    const double sink = p->sink.present ? fattni_get(&p->sink, h, 0, 0, 0) : -INFINITY;
    const double own = sum > 0 ? max + log(sum) + shift : -INFINITY, larger = fmax(own, sink);
    m->L = isinf(larger) ? larger : larger + log(exp(own - larger) + exp(sink - larger));
    const double typical = 0x1p-12 * sqrt(steps) * size, far = 0x1p-11 * steps * size + 0x1p-21 * size;
    const double rounding = 0x1p-21 * (fabs(max) + fabs(shift) + fabs(m->L)) + 2e-5;
    const double part = sum > 0 ? (m->L == INFINITY ? 0 : exp(own - m->L)) : 0;
    m->L_far = far + rounding, m->L_typical = typical + rounding;
    for (int64_t d = 0; d < p->Dv; ++d) {
        const int64_t at = head * p->Dv + d;
        const double scale = n->v_scale[at], mean = n->v_mean[at], x = sum > 0 ? 1 / sum : 0;
        const double of_p = weight[d] * x / 17 + 0x1p-16 * all[d] * x,
                     of_scores = fmin(growth(2 * (far + rounding)) * weight[d] * x, 2.1 * most[d]),
                     of_sums = 0x1p-11 * ((double)Sk / 32 + 2) * weight[d] * x;
        m->o[d] = part * (m->o[d] * x * scale + mean);
        m->square[d] *= part * part * x * x * scale * scale * (0.0265 * 0.0265 + typical * typical);
        m->far[d] = part * 1.01 * (of_p + of_scores + of_sums) * scale + (u + 0x1p-21) * fabs(m->o[d]) +
                    part * 0x1p-21 * fabs(mean) + growth(rounding) * fabs(m->o[d]) + 0x1p-25;
        /* Beside a sink, an error of the scores changes what the keys weigh. */
        m->far[d] += (1 - part) * growth(far + rounding) * fabs(m->o[d]);
        m->square[d] += u * u / 3 * m->o[d] * m->o[d];
    }
}

/* Margins of a test, printed at its end: the largest errors in units of what is allowed. */
static struct {
    double o, L, o_all, L_all;
    int cases;
} used;

static void print_used(const char *name) {
    printf("%s: %d cases; of its bound at most O %.2f, all O %.2f, L %.2f, all L %.2f\n", name, used.cases, used.o,
           used.o_all, used.L, used.L_all);
}

static bool same_number(double x, double y) { return x == y || (isnan(x) && isnan(y)); }

/* The device's O and L against exact sums over the codes, within the bounds; together at most 1.05 times as far off as
   the CPU or, where that happens to be less, as P's rounding leads one to expect, and three standard deviations of
   such a root of a mean of squares more, which of n rows are less than 1 / sqrt(n) each. Rows are left out where there
   are many. `structured`: P's errors are not random, and only have bounds. */
static void compare(attention *got, attention *cpu, bool structured) {
    const attention_case *const c = &got->c;
    fp8_copies copies = fp8_quantize(cpu);
    fp8_numbers numbers = fp8_numbers_read(cpu, &copies);
    fattni_problem p;
    cr_assert_eq(fattni_problem_init(cpu->ctx, &cpu->params, &cpu->io, FATTNI_FWD, true, &p), FATTN_OK);
    double *const score = malloc((size_t)(p.Sk + 1) * sizeof *score);
    const double cost = (double)(p.B * p.Hq * p.Sq) * (double)p.Sk * (double)(p.D + 5 * p.Dv);
    const int64_t step = cost > 4e8 ? (int64_t)(cost / 4e8) + 1 : 1;
    double off = 0, off_cpu = 0, expected = 0, L_off = 0, L_expected = 0;
    int64_t rows = 0;
    for (int64_t b = 0; b < p.B; ++b)
        for (int64_t h = 0; h < p.Hq; ++h) {
            const fattni_sequence s = fattni_sequence_of(&p, b);
            const int64_t key0 = (s.batch * p.Hkv + h / p.group) * p.rows_k + s.k0;
            double k_most = 0;
            for (int64_t j = key0; j < key0 + s.band.Sk; ++j)
                k_most = fmax(k_most, numbers.k_scale[j] * largest_of(numbers.k8 + j * p.D, p.D));
            for (int64_t i = (b * p.Hq + h) % step; i < s.band.Sq; i += step, ++rows) {
                row_model m;
                model_row(&p, &s, h, i, &numbers, k_most, score, &m);
                int64_t at[4] = {s.batch, h, s.q0 + i, 0};
                const double L = attention_get(&got->t[T_LSE], at), by = fabs(L - m.L);
                cr_assert(same_number(L, m.L) || by <= m.L_far,
                          "%s, %s, D %d, Dv %d, sequence %d, head %d, row %d: L is %g, not %g: %g apart, not %g",
                          c->name, device_plan()->fwd_kernel, (int)p.D, (int)p.Dv, (int)b, (int)h, (int)i, L, m.L, by,
                          m.L_far);
                if (isfinite(m.L)) {
                    used.L = fmax(used.L, by / m.L_far);
                    L_off += by * by, L_expected += m.L_typical * m.L_typical;
                }
                for (int64_t d = 0; d < p.Dv; ++d) {
                    at[3] = d;
                    const double o = attention_get(&got->t[T_O], at), apart = fabs(o - m.o[d]);
                    const double of_cpu = attention_get(&cpu->t[T_O], at) - m.o[d];
                    cr_assert(
                        same_number(o, m.o[d]) || apart <= m.far[d],
                        "%s, %s, D %d, Dv %d, sequence %d, head %d, row %d: O[%d] is %g, not %g: %g apart, not %g",
                        c->name, device_plan()->fwd_kernel, (int)p.D, (int)p.Dv, (int)b, (int)h, (int)i, (int)d, o,
                        m.o[d], apart, m.far[d]);
                    used.o = fmax(used.o, apart / m.far[d]);
                    off += apart * apart, off_cpu += of_cpu * of_cpu, expected += m.square[d];
                }
            }
        }
    if (rows && !structured) {
        const double scatter = 1 + 3 / sqrt((double)rows), allowed = 1.05 * scatter * sqrt(fmax(off_cpu, expected));
        cr_assert(sqrt(off) <= allowed + 1e-12, "%s, %s: O is off by %g, the CPU by %g; expected are %g", c->name,
                  device_plan()->fwd_kernel, sqrt(off), sqrt(off_cpu), sqrt(expected));
        cr_assert(L_off <= scatter * scatter * L_expected, "%s, %s: L is off by %g, expected are %g", c->name,
                  device_plan()->fwd_kernel, sqrt(L_off), sqrt(L_expected));
        if (allowed > 0) used.o_all = fmax(used.o_all, sqrt(off) / allowed);
        if (L_expected > 0) used.L_all = fmax(used.L_all, sqrt(L_off / L_expected) / scatter);
    }
    used.cases += 1;
    free(score);
    fp8_numbers_free(&numbers);
    fp8_free(&copies);
}

typedef void change(attention *a);

static attention *run_on_device(fattn_ctx *cpu, const attention_case *c, change *to) {
    attention *const a = attention_new(cpu, c);
    if (to) to(a);
    a->on_device = device_run;
    attention_forward(a, ON_DEVICE);
    return a;
}

static void check_changed(fattn_ctx *cpu, const attention_case *c, change *to, bool structured) {
    attention *const got = run_on_device(cpu, c, to), *const emulated = attention_new(cpu, c);
    if (to) to(emulated);
    attention_forward(emulated, LIBRARY);
    compare(got, emulated, structured);
    attention_free(got), attention_free(emulated);
}
static void check(fattn_ctx *cpu, const attention_case *c) { check_changed(cpu, c, NULL, false); }

static const attention_case features[] = {
    {"full", .B = 2, .Hq = 4, .Sq = 300, .Sk = 421},
    {"causal", .B = 2, .Hq = 4, .Sq = 421, .Sk = 421, .flags = FATTN_CAUSAL},
    {"causal, more keys", .B = 1, .Hq = 4, .Hkv = 2, .Sq = 200, .Sk = 519, .flags = FATTN_CAUSAL},
    {"causal, more rows", .B = 1, .Hq = 4, .Hkv = 1, .Sq = 519, .Sk = 200, .flags = FATTN_CAUSAL},
    {"causal, sink", .B = 1, .Hq = 4, .Hkv = 1, .Sq = 419, .Sk = 300, .flags = FATTN_CAUSAL, .sink = true},
    {"top left", .B = 1, .Hq = 3, .Sq = 300, .Sk = 513, .flags = FATTN_CAUSAL_TOP_LEFT},
    {"top left, more rows", .B = 1, .Hq = 3, .Sq = 513, .Sk = 130, .flags = FATTN_CAUSAL_TOP_LEFT},
    {"window", .B = 1, .Hq = 4, .Hkv = 2, .Sq = 600, .Sk = 600, .flags = FATTN_WINDOW, .window_left = 130,
     .window_right = 33},
    {"window left", .B = 1, .Hq = 2, .Sq = 411, .Sk = 700, .flags = FATTN_WINDOW | FATTN_CAUSAL, .window_left = 64,
     .window_right = -1},
    {"window right", .B = 1, .Hq = 2, .Sq = 411, .Sk = 300, .flags = FATTN_WINDOW, .window_left = -1,
     .window_right = 17, .sink = true},
    {"narrow window", .B = 1, .Hq = 2, .Sq = 333, .Sk = 333, .flags = FATTN_WINDOW, .window_left = 0,
     .window_right = 1},
    {"window of other keys", .B = 1, .Hq = 2, .Sq = 300, .Sk = 100, .flags = FATTN_WINDOW | FATTN_CAUSAL_TOP_LEFT,
     .window_left = 20, .window_right = -1},
    {"positions", .B = 1, .Hq = 2, .Sq = 140, .Sk = 400, .flags = FATTN_CAUSAL, .q_pos0 = 100, .k_pos0 = 7},
    {"groups of 8", .B = 1, .Hq = 16, .Hkv = 2, .Sq = 130, .Sk = 257},
    {"groups of 4, causal", .B = 2, .Hq = 8, .Hkv = 2, .Sq = 193, .Sk = 257, .flags = FATTN_CAUSAL},
    {"sink", .B = 2, .Hq = 4, .Hkv = 2, .Sq = 193, .Sk = 300, .sink = true},
    {"padded", .B = 5, .Hq = 2, .Sq = 300, .Sk = 400, .lengths = LENGTHS_PADDED, .length_q = {300, 0, 1, 177, 64},
     .length_k = {127, 400, 0, 129, 1}},
    {"padded, causal, sink", .B = 4, .Hq = 4, .Hkv = 2, .Sq = 270, .Sk = 300, .flags = FATTN_CAUSAL, .sink = true,
     .lengths = LENGTHS_PADDED, .length_q = {270, 192, 5, 128}, .length_k = {300, 16, 0, 144}},
    {"padded keys", .B = 4, .Hq = 2, .Hkv = 1, .Sq = 133, .Sk = 400, .lengths = LENGTHS_PADDED_K,
     .length_k = {1, 128, 257, 399}},
    {"padded rows", .B = 3, .Hq = 2, .Hkv = 1, .Sq = 260, .Sk = 150, .flags = FATTN_CAUSAL, .lengths = LENGTHS_PADDED_Q,
     .length_q = {259, 16, 0}},
    {"packed", .B = 8, .Hq = 2, .Hkv = 1, .Sq = 200, .Sk = 400, .lengths = LENGTHS_PACKED,
     .length_q = {16, 31, 0, 200, 5, 1, 127, 64}, .length_k = {15, 33, 128, 0, 127, 129, 1, 400}},
    {"packed, causal, sink", .B = 6, .Hq = 4, .Hkv = 2, .Sq = 400, .Sk = 400, .flags = FATTN_CAUSAL, .sink = true,
     .lengths = LENGTHS_PACKED, .length_q = {1, 15, 17, 400, 33, 0}, .length_k = {16, 17, 31, 400, 32, 97}},
    {"packed, window", .B = 3, .Hq = 2, .Sq = 300, .Sk = 300, .flags = FATTN_WINDOW, .window_left = 70,
     .window_right = 20, .lengths = LENGTHS_PACKED, .length_q = {300, 190, 64}, .length_k = {290, 190, 201}},
    {"packed of nothing", .B = 2, .Hq = 1, .Sq = 10, .Sk = 10, .lengths = LENGTHS_PACKED, .length_q = {0, 0},
     .length_k = {0, 0}},
    {"one row", .B = 3, .Hq = 8, .Hkv = 2, .Sq = 1, .Sk = 777},
    {"one key", .B = 2, .Hq = 2, .Sq = 200, .Sk = 1},
    {"one key, causal", .B = 2, .Hq = 2, .Sq = 200, .Sk = 1, .flags = FATTN_CAUSAL},
    {"one of each", .B = 1, .Hq = 1, .Sq = 1, .Sk = 1},
    {"no keys", .B = 1, .Hq = 2, .Sq = 5, .Sk = 0, .sink = true},
    {"no rows", .B = 1, .Hq = 2, .Sq = 0, .Sk = 5},
    {"large scores", .B = 1, .Hq = 2, .Sq = 200, .Sk = 300, .scale = 4},
    {"large scores, causal", .B = 1, .Hq = 2, .Sq = 200, .Sk = 300, .scale = 4, .flags = FATTN_CAUSAL, .sink = true},
    {"huge scores", .B = 1, .Hq = 2, .Sq = 200, .Sk = 300, .scale = 1e6f},
    {"huge scores, causal", .B = 1, .Hq = 2, .Sq = 200, .Sk = 300, .scale = 1e6f, .flags = FATTN_CAUSAL},
};
enum { FEATURES = sizeof features / sizeof *features };
static const int64_t head_dims[] = {64, 128, 256, 16, 40, 80, 96, 192, 112, 17, 59, 200};

/* Variant k of a feature. Plain kernels need a 16-bit O with rows of whole 16 bytes: k = 0 has one. */
static attention_case feature_case(int n, int k) {
    attention_case c = features[n];
    c.D = head_dims[k ? (n + 5 * k) % 12 : n % 3];
    c.Dv = k == 2 ? head_dims[(n + 3) % 12] : c.D;
    c.dtype = k == 0 ? (n % 2 ? FATTN_F16 : FATTN_BF16) : dtypes[(n + k) % 3];
    c.wide = k == 3;
    c.layout = k == 0 ? LAYOUT_BHSD : layouts[(n + k) % 4];
    c.algorithm = k % 2 ? FATTN_ALGO_FLASH2 : FATTN_ALGO_AUTO;
    c.flags |= FATTN_FP8;
    if (k % 2 && is_power(c.D)) c.flags |= FATTN_FP8_HADAMARD;
    return c;
}

Test(cuda_fp8, features, .timeout = 900) {
    fattn_ctx *const gpu = hopper_or_skip(), *const cpu = attention_context(0);
    for (int n = 0; n < FEATURES; ++n)
        for (int k = 0; k < 8; ++k) {
            attention_case c = feature_case(n, k % 4);
            if (k >= 4) c.flags |= FATTN_FP8_INT8;
            check(cpu, &c);
        }
    print_used("features");
    fattn_ctx_destroy(cpu);
    fattn_ctx_destroy(gpu);
}

/* Sequence lengths around all block sizes; every line of families sm90_f8 and sm90_i8 is chosen for some of these. */
Test(cuda_fp8, shapes_and_kernels, .timeout = 900) {
    static const int64_t lengths[] = {1, 63, 64, 65, 95, 96, 97, 127, 128, 129, 191, 192, 193, 255, 257, 385, 641};
    static const uint32_t masks[] = {0, FATTN_CAUSAL, FATTN_WINDOW};
    enum { LENGTHS = sizeof lengths / sizeof *lengths, MOST = 256 };
    fattn_ctx *const gpu = hopper_or_skip(), *const cpu = attention_context(0);
    bool chosen[MOST] = {false};
    for (int n = 0; n < 9 * LENGTHS; ++n) {
        attention_case c = {.name = "shape",
                            .B = 1,
                            .Hq = 2,
                            .Hkv = 1 + n % 2,
                            .Sq = lengths[n / 9],
                            .Sk = lengths[(n / 9 + 5 * n) % LENGTHS],
                            .D = head_dims[n % 3],
                            .dtype = n % 2 ? FATTN_BF16 : FATTN_F16,
                            .layout = n % 4 < 2 ? LAYOUT_BHSD : LAYOUT_BSHD,
                            .flags = FATTN_FP8 | masks[n / 3 % 3],
                            .window_left = 3 * n,
                            .window_right = n / 2};
        for (int integers = 0; integers < 2; ++integers) {
            if (integers) c.flags |= FATTN_FP8_INT8;
            check(cpu, &c);
            for (int k = 0; k < MOST && fattni_fwd_cuda_kernels[k]; ++k)
                chosen[k] |= strcmp(device_plan()->fwd_kernel, fattni_fwd_cuda_kernels[k]->name) == 0;
        }
    }
    for (int k = 0; k < MOST && fattni_fwd_cuda_kernels[k]; ++k) {
        const int32_t codes = fattni_fwd_cuda_kernels[k]->dtype;
        cr_assert((codes != FATTN_F8E4M3 && codes != FATTN_I8) || chosen[k], "%s was not chosen",
                  fattni_fwd_cuda_kernels[k]->name);
    }
    print_used("shapes");
    fattn_ctx_destroy(cpu);
    fattn_ctx_destroy(gpu);
}

/* Several tiles for each CTA, of sequences of many blocks. */
Test(cuda_fp8, many_tiles, .timeout = 900) {
    fattn_ctx *const gpu = hopper_or_skip(), *const cpu = attention_context(0);
    static const attention_case cases[] = {
        {"many tiles", .B = 2, .Hq = 40, .Hkv = 20, .Sq = 700, .Sk = 650},
        {"many tiles, causal", .B = 2, .Hq = 40, .Hkv = 20, .Sq = 650, .Sk = 650, .flags = FATTN_CAUSAL},
        {"many tiles, window", .B = 2, .Hq = 40, .Hkv = 8, .Sq = 700, .Sk = 700, .flags = FATTN_WINDOW,
         .window_left = 100, .window_right = 30, .sink = true},
        {"many tiles, packed", .B = 8, .Hq = 24, .Hkv = 8, .Sq = 900, .Sk = 900, .flags = FATTN_CAUSAL,
         .lengths = LENGTHS_PACKED, .length_q = {900, 1, 300, 0, 577, 64, 129, 700},
         .length_k = {900, 50, 300, 20, 600, 64, 0, 700}},
        {"long", .B = 1, .Hq = 2, .Hkv = 1, .Sq = 1100, .Sk = 8111},
        {"long, causal", .B = 1, .Hq = 2, .Hkv = 1, .Sq = 2100, .Sk = 4099, .flags = FATTN_CAUSAL},
    };
    for (int n = 0; n < 36; ++n) {
        attention_case c = cases[n / 6];
        c.D = head_dims[n % 3];
        c.dtype = n % 2 ? FATTN_F16 : FATTN_BF16;
        c.flags |= FATTN_FP8 | (n / 3 % 2 ? FATTN_FP8_INT8 : 0u);
        check(cpu, &c);
    }
    print_used("many tiles");
    fattn_ctx_destroy(cpu);
    fattn_ctx_destroy(gpu);
}

/* ---- structured inputs ---- */

static void fill(attention *a, enum tensor_id id, double x) {
    int64_t at[FATTN_MAX_DIMS] = {0};
    for (int64_t n = 0; n < fattn_tensor_numel(&a->t[id]); ++n) {
        attention_index(&a->t[id], n, at);
        if (attention_in_use(a, id, at)) attention_set(&a->t[id], at, x);
    }
}

static void set(attention *a, enum tensor_id id, int64_t row, int64_t d, double x) {
    for (int64_t b = 0; b < a->t[id].shape[0]; ++b)
        for (int64_t h = 0; h < a->t[id].shape[1]; ++h) attention_set(&a->t[id], (const int64_t[4]){b, h, row, d}, x);
}

static void add_means(attention *a) {
    for (int id = T_K; id <= T_V; ++id) {
        const fattn_tensor *const t = &a->t[id];
        int64_t at[FATTN_MAX_DIMS] = {0};
        for (int64_t n = 0; n < fattn_tensor_numel(t); ++n) {
            attention_index(t, n, at);
            const double by = id == T_V ? 0.5 : at[3] % 32 == 5 ? (at[3] % 64 < 32 ? 10 : -10) : 0;
            attention_set(t, at, attention_get(t, at) + by);
        }
    }
}
/* One in a thousand has ten times the size. */
static void add_outliers(attention *a) {
    for (int id = T_Q; id <= T_V; ++id) {
        const fattn_tensor *const t = &a->t[id];
        int64_t at[FATTN_MAX_DIMS] = {0};
        for (int64_t n = 0; n < fattn_tensor_numel(t); n += 997) {
            attention_index(t, n, at);
            attention_set(t, at, 10 * attention_get(t, at));
        }
    }
}
/* The first token: most of every row's weight, and a small value. */
static void sink_at_key_0(attention *a) {
    for (int64_t i = 0; i < a->c.Sq; ++i) set(a, T_Q, i, 3, 10);
    set(a, T_K, 0, 3, 8);
    for (int64_t d = 0; d < a->c.Dv; ++d) set(a, T_V, 0, d, 0.01);
}
static double rise; /* of the maximum at key 130, after and before keys of equal scores */
static void key_above_others(attention *a) {
    for (int64_t i = 0; i < a->c.Sq; ++i) set(a, T_Q, i, 0, 8);
    for (int64_t j = 0; j < a->c.Sk; ++j) set(a, T_K, j, 0, j == 130 ? rise * sqrt((double)a->c.D) / 8 : 0);
}
static int64_t large_key;
static void small_weights(attention *a) {
    fill(a, T_Q, 1), fill(a, T_K, 0), fill(a, T_V, 1);
    for (int64_t d = 0; d < a->c.D; ++d) set(a, T_K, large_key, d, 10 / sqrt((double)a->c.D)); /* a score of 10 */
    for (int64_t d = 0; d < a->c.Dv; ++d) set(a, T_V, large_key, d, 0);
}
/* Far above or below 0, and nearly the same for all keys. */
static void alike_keys(attention *a) {
    for (int64_t i = 0; i < a->c.Sq; ++i) set(a, T_Q, i, 1, i % 2 ? 100 : -100);
    for (int64_t j = 0; j < a->c.Sk; ++j) set(a, T_K, j, 1, 50);
}

Test(cuda_fp8, structured_inputs, .timeout = 900) {
    fattn_ctx *const gpu = hopper_or_skip(), *const cpu = attention_context(0);
    static const uint32_t masks[] = {0, FATTN_CAUSAL};
    static const double rises[] = {1, 5, 12, 60};
    for (int n = 0; n < 24; ++n) {
        attention_case c = {.B = 1,
                            .Hq = 2,
                            .Hkv = 1,
                            .Sq = 200,
                            .Sk = 500,
                            .D = head_dims[n % 3],
                            .dtype = dtypes[n % 3],
                            .wide = n % 4 == 1,
                            .flags = FATTN_FP8 | masks[n / 3 % 2] | (n / 6 % 2 ? FATTN_FP8_HADAMARD : 0u) |
                                     (n / 12 ? FATTN_FP8_INT8 : 0u)};
        c.name = "means", check_changed(cpu, &c, add_means, false);
        c.name = "outliers", check_changed(cpu, &c, add_outliers, true);
        c.name = "alike keys", check_changed(cpu, &c, alike_keys, true);
        c.name = "sink at key 0", check_changed(cpu, &c, sink_at_key_0, true);
        for (int k = 0; k < 4; ++k) {
            c.name = "a key above all others", rise = rises[k];
            check_changed(cpu, &c, key_above_others, true);
        }
        c.Sk = 4096, c.Sq = 16;
        c.name = "small weights", large_key = n % 2 ? 0 : 4000;
        check_changed(cpu, &c, small_weights, true);
    }
    print_used("structured inputs");
    fattn_ctx_destroy(cpu);
    fattn_ctx_destroy(gpu);
}

/* Sums of no code but 0 are 0: O is the mean, exactly. */
Test(cuda_fp8, equal_values_are_exact, .timeout = 200) {
    fattn_ctx *const gpu = hopper_or_skip(), *const cpu = attention_context(0);
    static const double values[3] = {1, -0.75, 384};
    for (int n = 0; n < 24; ++n) {
        attention_case c = {.name = "equal values",
                            .B = 2,
                            .Hq = 2,
                            .Sq = 200,
                            .Sk = 1000,
                            .D = head_dims[n % 4],
                            .dtype = dtypes[n % 3],
                            .wide = n % 4 == 1,
                            .flags = FATTN_FP8 | (n % 2 ? FATTN_CAUSAL : 0u) | (n / 12 ? FATTN_FP8_INT8 : 0u)};
        if (n % 5 == 3) c.flags |= FATTN_WINDOW, c.window_left = 100, c.window_right = 100;
        attention *const a = attention_new(cpu, &c);
        fill(a, T_V, values[n % 3]);
        a->on_device = device_run;
        attention_forward(a, ON_DEVICE);
        int64_t at[FATTN_MAX_DIMS] = {0};
        for (int64_t e = 0; e < fattn_tensor_numel(&a->t[T_O]); ++e) {
            attention_index(&a->t[T_O], e, at);
            const double o = attention_get(&a->t[T_O], at);
            cr_assert_eq(o, values[n % 3], "%s: %g, not %g", device_plan()->fwd_kernel, o, values[n % 3]);
        }
        attention_free(a);
    }
    fattn_ctx_destroy(cpu);
    fattn_ctx_destroy(gpu);
}

/* Row i sees only key i, by a window or by scores, up to such as floats do not resolve, and its value is a column of
   ones: a key or a column in the wrong place gives 0 where 1 should be. */
Test(cuda_fp8, one_hot_keys_and_columns, .timeout = 200) {
    enum { N = 300 };
    fattn_ctx *const gpu = hopper_or_skip(), *const cpu = attention_context(0);
    static const float scales[] = {0, 1, 1000, 1e6f};
    for (int n = 0; n < 48; ++n) {
        const float scale = scales[n % 4];
        const attention_case c = {.name = "one hot",
                                  .B = 1,
                                  .Hq = 2,
                                  .Hkv = 1,
                                  .Sq = N,
                                  .Sk = N,
                                  .D = head_dims[n / 4 % 3],
                                  .dtype = FATTN_BF16,
                                  .wide = n / 12 % 2,
                                  .scale = scale,
                                  .flags =
                                      FATTN_FP8 | (scale > 0 ? 0u : FATTN_WINDOW) | (n / 24 ? FATTN_FP8_INT8 : 0u)};
        attention *const a = attention_new(cpu, &c);
        fill(a, T_V, 0);
        for (int64_t i = 0; i < N; ++i) {
            set(a, T_V, i, i * 7 % c.D, 1);
            uint64_t bits = (uint64_t)i + 1;
            for (int64_t d = 0; d < c.D && scale > 0; ++d) { /* D for the same words, else about sqrt(D) */
                const int sign = cases_below(&bits, 2) ? 1 : -1;
                set(a, T_K, i, d, sign), set(a, T_Q, i, d, sign);
            }
        }
        a->on_device = device_run;
        attention_forward(a, ON_DEVICE);
        for (int64_t h = 0; h < 2; ++h)
            for (int64_t i = 0; i < N; ++i)
                for (int64_t d = 0; d < c.D; ++d) {
                    const int64_t at[4] = {0, h, i, d};
                    const double want = d == i * 7 % c.D ? 1 : 0, o = attention_get(&a->t[T_O], at);
                    cr_assert(fabs(o - want) < 0.04, "%s, scale %g: row %d, column %d: %g", device_plan()->fwd_kernel,
                              (double)scale, (int)i, (int)d, o);
                }
        attention_free(a);
    }
    fattn_ctx_destroy(cpu);
    fattn_ctx_destroy(gpu);
}

/* Sinks at the ends of their range, of rows with keys and without. */
Test(cuda_fp8, sinks_at_the_ends) {
    fattn_ctx *const gpu = hopper_or_skip(), *const cpu = attention_context(0);
    static const double sinks[4] = {-INFINITY, INFINITY, 0.5, 80};
    for (int n = 0; n < 6; ++n) {
        const attention_case c = {.name = "sinks",
                                  .B = 1,
                                  .Hq = 4,
                                  .Sq = 200,
                                  .Sk = 130, /* the first 70 rows see no key */
                                  .D = head_dims[n % 3],
                                  .dtype = dtypes[n % 3],
                                  .sink = true,
                                  .flags = FATTN_FP8 | FATTN_CAUSAL | (n / 3 ? FATTN_FP8_INT8 : 0u)};
        attention *const got = attention_new(cpu, &c), *const emulated = attention_new(cpu, &c);
        for (int64_t h = 0; h < 4; ++h)
            attention_set(&got->t[T_SINK], &h, sinks[h]), attention_set(&emulated->t[T_SINK], &h, sinks[h]);
        got->on_device = device_run;
        attention_forward(got, ON_DEVICE), attention_forward(emulated, LIBRARY);
        compare(got, emulated, true);
        for (int64_t h = 0; h < 4; ++h)
            for (int64_t i = 0; i < 200; ++i)
                if (i < 70 || h == 1) cr_assert_eq(attention_get(&got->t[T_O], (const int64_t[4]){0, h, i, 0}), 0);
        attention_free(got), attention_free(emulated);
    }
    fattn_ctx_destroy(cpu);
    fattn_ctx_destroy(gpu);
}

/* ---- random configurations ---- */

static attention_case random_case(int n) {
    static const int64_t lengths[] = {1, 2, 15, 33, 64, 100, 127, 128, 129, 190, 193, 250, 300, 385, 450, 577};
    static const uint32_t masks[] = {0, 0, FATTN_CAUSAL, FATTN_CAUSAL, FATTN_CAUSAL_TOP_LEFT};
    static const int64_t groups[] = {1, 1, 2, 3, 4, 8};
    uint64_t r = (uint64_t)n * 7368787u + 1;
    attention_case c = {.name = "random"};
    c.B = 1 + cases_below(&r, 3);
    c.Hkv = 1 + cases_below(&r, 2);
    c.Hq = c.Hkv * groups[cases_below(&r, 6)];
    c.Sq = lengths[cases_below(&r, 16)], c.Sk = lengths[cases_below(&r, 16)];
    c.D = head_dims[cases_below(&r, 12)];
    c.Dv = cases_below(&r, 3) ? c.D : head_dims[cases_below(&r, 12)];
    c.flags = FATTN_FP8 | masks[cases_below(&r, 5)];
    if (cases_below(&r, 3) == 0) {
        c.flags |= FATTN_WINDOW;
        c.window_left = cases_below(&r, 200) - 1, c.window_right = cases_below(&r, 100) - 1;
    }
    if (cases_below(&r, 4) == 0) c.q_pos0 = cases_below(&r, 200), c.k_pos0 = cases_below(&r, 60);
    if (cases_below(&r, 3) == 0) c.scale = (0.5f + (float)cases_below(&r, 4)) / sqrtf((float)c.D);
    c.sink = cases_below(&r, 3) == 0;
    c.lengths = cases_below(&r, 2) ? LENGTHS_NONE : (enum lengths)cases_below(&r, LENGTHS_PACKED + 1);
    if (c.lengths != LENGTHS_NONE) c.B += cases_below(&r, 5);
    for (int b = 0; b < MAX_SEQUENCES; ++b) {
        c.length_q[b] = cases_below(&r, (int)c.Sq + 1);
        c.length_k[b] = cases_below(&r, (int)c.Sk + 1);
    }
    c.dtype = dtypes[cases_below(&r, 3)];
    c.wide = cases_below(&r, 4) == 0;
    c.layout = cases_below(&r, 2) ? LAYOUT_BHSD : layouts[cases_below(&r, 4)];
    c.algorithm = cases_below(&r, 2) ? FATTN_ALGO_AUTO : FATTN_ALGO_FLASH2;
    if (is_power(c.D) && cases_below(&r, 2)) c.flags |= FATTN_FP8_HADAMARD;
    if (cases_below(&r, 2)) c.flags |= FATTN_FP8_INT8;
    return c;
}

/* FATTN_TEST_SEED of the environment: where the list begins. */
Test(cuda_fp8, random_configurations, .timeout = 1500) {
    fattn_ctx *const gpu = hopper_or_skip(), *const cpu = attention_context(0);
    const char *const given = getenv("FATTN_TEST_SEED");
    const int seed = given ? atoi(given) : 1;
    printf("FATTN_TEST_SEED=%d\n", seed);
    for (int n = 0; n < 200; ++n) {
        attention_case c = random_case(seed + n);
        char name[32];
        snprintf(name, sizeof name, "random %d", seed + n);
        c.name = name;
        device_copies(n % 2);
        device_capture(n % 5 == 0);
        check_changed(cpu, &c, n % 3 == 0 ? add_means : NULL, false);
    }
    print_used("random configurations");
    fattn_ctx_destroy(cpu);
    fattn_ctx_destroy(gpu);
}

/* ---- the same bits ---- */

static void forget_gradients(attention *a) {
    for (int n = 2; n < 7; ++n) a->present[attention_outputs[n]] = false;
}

/* Copies in the workspace, of the caller, and both in a graph; the workspace shrinks by the copies. */
Test(cuda_fp8, explicit_copies_and_graphs, .timeout = 600) {
    fattn_ctx *const gpu = hopper_or_skip(), *const cpu = attention_context(0);
    for (int n = 0; n < 2 * FEATURES; ++n) {
        attention_case c = feature_case(n / 2, n / 2 % 4);
        if (n % 2) c.flags |= FATTN_FP8_INT8;
        attention *a[4];
        size_t workspace[2], bytes;
        for (int k = 0; k < 4; ++k) {
            device_copies(k % 2), device_capture(k / 2);
            a[k] = run_on_device(cpu, &c, NULL);
            if (k < 2) workspace[k] = device_plan()->fwd_workspace;
            forget_gradients(a[k]);
            if (k) attention_same_bits(a[0], a[k]);
        }
        MUST(cpu, fattn_fp8_layout(cpu, &a[0]->params, &a[0]->io, NULL, &bytes, NULL));
        if (c.Sk > 0) cr_assert_eq(workspace[0] - workspace[1], bytes, "%s", c.name);
        for (int k = 0; k < 4; ++k) attention_free(a[k]);
    }
    fattn_ctx_destroy(cpu);
    fattn_ctx_destroy(gpu);
}
