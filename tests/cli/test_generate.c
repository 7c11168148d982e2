/* Generation with a cache of keys and values: the logits are those of the whole window, for every architecture, at
   every prefix and beyond the context. With FATTN_TEST_DEVICE=cuda on a GPU, where a token is a
   graph. */
#include <criterion/criterion.h>

#include "cli/base/device.h"
#include "tests/cli/symbols.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { VOCAB = 19, CONTEXT = 21, CHANNELS = 24, LAYERS = 2, WORDS = 3 * CONTEXT };

static const model_config configs[] = {
    {.arch = ARCH_SHIFT, .heads = 2, .kv_heads = 2},
    {.arch = ARCH_SHIFT, .heads = 6, .kv_heads = 2},
    {.arch = ARCH_SHIFT, .heads = 3, .kv_heads = 1, .algorithm = FATTN_ALGO_STANDARD},
    {.arch = ARCH_GPT2, .heads = 4, .kv_heads = 4},
    {.arch = ARCH_GPT2, .heads = 4, .kv_heads = 4, .positions = CONTEXT + 7},
    {.arch = ARCH_SHIFT, .heads = 6, .kv_heads = 2, .dtype = FATTN_BF16},
    {.arch = ARCH_GPT2, .heads = 4, .kv_heads = 4, .dtype = FATTN_BF16},
};
enum { CONFIGS = sizeof configs / sizeof *configs };

static fattn_ctx *ctx;
static fattn_tape *tape;
static model *m;
static generator *g;
static double largest_row; /* largest norm of a row of the embedding */

static void begin(void) {
    static char why[DEVICE_MESSAGE];
    const char *const device = getenv("FATTN_TEST_DEVICE");
    const bool cuda = device && strcmp(device, "cuda") == 0;
    const fattn_status s = device_create(cuda ? ON_CUDA : ON_CPU, 0, 0, why, &ctx);
    if (cuda && s == FATTN_E_UNSUPPORTED) cr_skip_test("%s", why);
    cr_assert_eq(s, FATTN_OK, "%s", why);
}
static void end(void) {
    if (ctx) cr_assert_eq(fattn_ctx_mem(ctx).live, 0);
    fattn_ctx_destroy(ctx);
}
TestSuite(generate, .init = begin, .fini = end);

/* Weights of a size at which every layer matters: the logits have a deviation of about 2. */
static void create(const model_config *which) {
    model_config c = *which;
    int n;
    c.vocab = VOCAB, c.context = CONTEXT, c.channels = CHANNELS, c.layers = LAYERS, c.mlp_ratio = 4, c.seed = 1;
    c.frozen = true;
    cr_assert_eq(model_create(ctx, &c, &m), FATTN_OK, "%s", fattn_ctx_error(ctx));
    fattn_param *const *params = model_params(m, &n);
    for (int i = 0; i < n; ++i)
        if (params[i]->value.ndim == 2)
            cr_assert_eq(
                fattn_tensor_normal(ctx, &params[i]->value, 0, 0.4, (fattn_rng){.seed = 5, .stream = (uint32_t)i}),
                FATTN_OK);
    float row[CHANNELS];
    const fattn_tensor host = fattn_tensor_view(row, FATTN_F32, FATTN_CPU, 0, 2, (int64_t[]){1, CHANNELS});
    largest_row = 0;
    for (int64_t v = 0; v < VOCAB; ++v) {
        const fattn_tensor at = fattn_tensor_slice(&params[0]->value, 0, v, v + 1);
        double sum = 0;
        cr_assert_eq(fattn_tensor_copy(ctx, &host, &at), FATTN_OK);
        for (int i = 0; i < CHANNELS; ++i) sum += (double)row[i] * (double)row[i];
        largest_row = fmax(largest_row, sqrt(sum));
    }
    cr_assert_eq(fattn_tape_create(ctx, &tape), FATTN_OK);
    cr_assert_eq(generator_create(ctx, m, tape, &g), FATTN_OK, "%s", fattn_ctx_error(ctx));
}

static void destroy(void) {
    generator_destroy(g);
    fattn_tape_destroy(tape);
    model_destroy(m);
}

/* A logit is a product of a row of the embedding and a hidden row of norm sqrt(C): its terms sum to at most
   |row| sqrt(C). Both ways compute the same sums, of 4 C terms at most, in other orders: 4 products, attention and a
   norm for each layer, and two more, each with an error of 4 C 2^-24 at most. In BF16 the sums are in F32, and what is
   rounded to BF16, 12 results for each layer and 4 more, may fall to the other side: 2^-8 each. */
static double tolerance(void) {
    const double each = model_get_config(m)->dtype == FATTN_BF16 ? (12 * LAYERS + 4) * 0x1p-8
                                                                 : (6 * LAYERS + 2) * 4 * CHANNELS * 0x1p-24;
    return each * largest_row * sqrt(CHANNELS);
}

/* The logits after symbols[0..n-1], by the tape's forward over all of them. */
static void whole(const int32_t *symbols, int64_t n, float logits[VOCAB]) {
    const fattn_tensor to = fattn_tensor_view(logits, FATTN_F32, FATTN_CPU, 0, 3, (int64_t[]){1, 1, VOCAB});
    fattn_tensor ids, all;
    cr_assert_eq(fattn_tensor_alloc(ctx, FATTN_I32, 2, (int64_t[]){1, n}, &ids), FATTN_OK);
    cr_assert_eq(device_write_i32(ctx, &ids, symbols), FATTN_OK);
    fattn_tape_reset(tape);
    cr_assert_eq(fattn_tape_value(tape, model_logits(m, tape, &ids), &all), FATTN_OK, "%s", fattn_ctx_error(ctx));
    all = fattn_tensor_slice(&all, 1, n - 1, n);
    all = fattn_tensor_slice(&all, 2, 0, VOCAB); /* without the rows of GPT-2 that are no tokens */
    cr_assert_eq(fattn_tensor_copy(ctx, &to, &all), FATTN_OK);
    fattn_tensor_free(ctx, &ids);
}

static void words(int32_t *symbols, int64_t n) {
    uint32_t state = 7;
    for (int64_t i = 0; i < n; ++i) {
        state = state * 1664525u + 1013904223u;
        symbols[i] = (int32_t)((state >> 16) % VOCAB);
    }
}

/* The generator's next logits against those of the window; returns the largest difference over the tolerance. */
static double compare(const int32_t *window, int64_t n, const char *what) {
    const float *got;
    float want[VOCAB];
    double worst = 0;
    cr_assert_eq(generator_logits(g, &got), FATTN_OK, "%s", fattn_ctx_error(ctx));
    whole(window, n, want);
    for (int i = 0; i < VOCAB; ++i) worst = fmax(worst, fabs((double)got[i] - (double)want[i]) / tolerance());
    cr_assert_leq(worst, 1, "%s, %lld tokens: %g of the tolerance", what, (long long)n, worst);
    return worst;
}

/* Token by token after each length of prompt that begins a pass, and by a pass over the whole prefix. */
Test(generate, logits_at_every_prefix) {
    int32_t symbols[CONTEXT];
    words(symbols, CONTEXT);
    for (int i = 0; i < CONFIGS; ++i) {
        create(&configs[i]);
        double worst = 0;
        for (int64_t prompt = 1; prompt <= CONTEXT; prompt += prompt < 3 ? 1 : 6) {
            cr_assert_eq(generator_begin(g, symbols, prompt), FATTN_OK, "%s", fattn_ctx_error(ctx));
            for (int64_t n = prompt; n <= CONTEXT; ++n) {
                worst = fmax(worst, compare(symbols, n, "one by one"));
                if (n < CONTEXT) generator_append(g, symbols[n]);
            }
        }
        for (int64_t n = 1; n <= CONTEXT; ++n) {
            cr_assert_eq(generator_begin(g, symbols, n), FATTN_OK);
            worst = fmax(worst, compare(symbols, n, "prompt"));
        }
        printf("model %d: %.2g of the tolerance %.2g\n", i, worst, tolerance());
        destroy();
    }
}

/* The window of generate.h: full, it begins again with half of the context. */
Test(generate, the_window_begins_again_at_half) {
    int32_t symbols[WORDS];
    words(symbols, WORDS);
    for (int i = 0; i < CONFIGS; ++i) {
        create(&configs[i]);
        int64_t first = 0;
        cr_assert_eq(generator_begin(g, symbols, 2), FATTN_OK);
        for (int64_t n = 2; n < WORDS; ++n) {
            compare(symbols + first, n - first, "beyond the context");
            generator_append(g, symbols[n]);
            if (n + 1 - first > CONTEXT) first = n + 1 - CONTEXT / 2;
        }
        cr_assert_gt(first, CONTEXT);
        cr_assert_eq(generator_begin(g, symbols, WORDS), FATTN_OK); /* of a long prompt the end counts */
        compare(symbols + WORDS - CONTEXT, CONTEXT, "a long prompt");
        destroy();
    }
}

Test(generate, greedy_symbols_are_those_of_the_whole_window) {
    const sample_options greedy = {.temperature = 0};
    for (int i = 0; i < CONFIGS; ++i) {
        if (configs[i].dtype == FATTN_BF16) continue; /* logits of 8 bits have ties */
        create(&configs[i]);
        int32_t symbols[CONTEXT] = {3, 1}, want[CONTEXT] = {3, 1};
        float logits[VOCAB];
        for (int64_t n = 2; n < CONTEXT; ++n) {
            whole(want, n, logits);
            for (int32_t v = 1; v < VOCAB; ++v)
                if (logits[v] > logits[want[n]]) want[n] = v;
        }
        cr_assert_eq(generate_symbols(ctx, m, tape, &greedy, symbols, 2, CONTEXT), FATTN_OK);
        cr_assert_arr_eq(symbols, want, sizeof want, "model %d", i);
        destroy();
    }
}

/* Many at once, one by one, and some at a time, over several windows. */
Test(generate, symbols_do_not_depend_on_how_many_are_asked_for) {
    const sample_options o = {.temperature = 1, .top_k = 12, .top_p = 0.95, .seed = 4};
    int32_t all[WORDS], some[WORDS];
    for (int i = 0; i < CONFIGS; ++i) {
        create(&configs[i]);
        for (int64_t step = 1; step < WORDS; step = 2 * step + 1) {
            int32_t *const to = step == 1 ? all : some;
            to[0] = 1;
            cr_assert_eq(generator_begin(g, to, 1), FATTN_OK);
            for (int64_t n = 1; n < WORDS; n += step)
                cr_assert_eq(generator_next(g, &o, n + step < WORDS ? step : WORDS - n, to + n), FATTN_OK);
            cr_assert_arr_eq(to, all, sizeof all, "model %d, %lld at once", i, (long long)step);
        }
        destroy();
    }
}

Test(generate, a_seed_gives_the_same_symbols) {
    int32_t a[WORDS] = {1}, b[WORDS] = {1}, other[WORDS] = {1};
    const sample_options o = {.temperature = 1, .top_k = 12, .top_p = 0.95, .seed = 4},
                         another = {.temperature = 1, .top_k = 12, .top_p = 0.95, .seed = 5};
    create(&configs[1]);
    cr_assert_eq(generate_symbols(ctx, m, tape, &o, a, 1, WORDS), FATTN_OK);
    cr_assert_eq(generate_symbols(ctx, m, tape, &o, b, 1, WORDS), FATTN_OK);
    cr_assert_eq(generate_symbols(ctx, m, tape, &another, other, 1, WORDS), FATTN_OK);
    cr_assert_arr_eq(a, b, sizeof a);
    cr_assert_neq(memcmp(a, other, sizeof a), 0);
    destroy();
}

/* From the second token on, and from the second window on when passes over half a context come between. */
Test(generate, memory_does_not_grow) {
    const sample_options o = {.temperature = 1, .seed = 4};
    for (int i = 0; i < CONFIGS; ++i) {
        create(&configs[i]);
        int32_t symbol = 1;
        cr_assert_eq(generator_begin(g, &symbol, 1), FATTN_OK);
        for (int n = 0; n < 3; ++n) cr_assert_eq(generator_next(g, &o, 1, &symbol), FATTN_OK);
        size_t before = fattn_ctx_mem(ctx).allocs;
        for (int n = 4; n < CONTEXT; ++n) cr_assert_eq(generator_next(g, &o, 1, &symbol), FATTN_OK);
        cr_assert_eq(fattn_ctx_mem(ctx).allocs, before, "model %d", i);
        for (int n = 0; n < CONTEXT; ++n) cr_assert_eq(generator_next(g, &o, 1, &symbol), FATTN_OK);
        before = fattn_ctx_mem(ctx).allocs;
        for (int n = 0; n < 3 * CONTEXT; ++n) cr_assert_eq(generator_next(g, &o, 1, &symbol), FATTN_OK);
        cr_assert_eq(fattn_ctx_mem(ctx).allocs, before, "model %d", i);
        destroy();
    }
}

static void expect_error(fattn_status got, fattn_status want, const char *message) {
    cr_assert_eq(got, want, "%s", fattn_ctx_error(ctx));
    cr_assert(strstr(fattn_ctx_error(ctx), message), "%s", fattn_ctx_error(ctx));
}

Test(generate, errors_name_the_numbers) {
    int32_t symbols[] = {3, VOCAB, -1}, many[CONTEXT + 1] = {0};
    int n;
    create(&configs[0]);
    expect_error(generator_begin(g, symbols, 0), FATTN_E_ARG, "a prompt of 0 tokens");
    expect_error(generator_begin(g, symbols, 2), FATTN_E_ARG, "token 1 of the prompt is 19, the model has 0..18");
    expect_error(generator_begin(g, symbols + 2, 1), FATTN_E_ARG, "token 0 of the prompt is -1");
    const fattn_tensor ids = fattn_tensor_view(many, FATTN_I32, FATTN_CPU, 0, 2, (int64_t[]){1, CONTEXT + 1});
    model_cache *cache;
    cr_assert_eq(model_cache_create(m, &cache), FATTN_OK);
    fattn_tensor logits;
    fattn_tape_reset(tape);
    expect_error(model_next_logits(m, tape, &ids, cache, &logits), FATTN_E_SHAPE,
                 "22 tokens after 0: the context has 21");
    cr_assert_eq(model_cache_tokens(cache), 0);
    model_cache_destroy(cache);
    fattn_param *const *params = model_params(m, &n);
    const fattn_tensor gain = fattn_tensor_slice(&params[n - 1]->value, 0, 0, 1);
    cr_assert_eq(device_write(ctx, &gain, &(float){INFINITY}), FATTN_OK);
    expect_error(generator_begin(g, symbols, 1), FATTN_E_MISMATCH, "after 1 tokens the logit of token 0 is");
    destroy();
}
