/* Witten-Bell n-grams against the definition, implemented with plain counting. */
#include <criterion/criterion.h>

#include "cli/tasks/ngram.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* Occurrences of gram g[0..length-1] in the circular text. */
static int occurrences(const uint8_t *text, int n, const uint8_t *g, int length) {
    int count = 0;
    for (int i = 0; i < n; ++i) {
        int same = 1;
        for (int j = 0; j < length && same; ++j) same = text[(i + j) % n] == g[j];
        count += same;
    }
    return count;
}

/* p(c | the `length` symbols h) by the recursion of ngram.h. */
static double probability(const uint8_t *text, int n, const uint8_t *h, int length, uint8_t c, int vocab) {
    double p = 1.0 / vocab;
    for (int k = 0; k <= length; ++k) {
        uint8_t gram[NGRAM_ORDERS];
        memcpy(gram, h + length - k, (size_t)k);
        int total = 0, types = 0, with_c = 0;
        for (int v = 0; v < vocab; ++v) {
            gram[k] = (uint8_t)v;
            const int count = occurrences(text, n, gram, k + 1);
            total += count;
            types += count > 0;
            if (v == c) with_c = count;
        }
        if (total > 0) p = (with_c + types * p) / (total + types);
    }
    return p;
}

static void fill(uint8_t *text, int n, int vocab, uint32_t seed) {
    for (int i = 0; i < n; ++i) {
        seed = seed * 1664525u + 1013904223u;
        const int fresh = (int)(seed >> 24) % vocab;
        text[i] = (uint8_t)(i > 2 && (seed >> 16) % 4 ? (text[i - 1] + 2 * text[i - 3]) % vocab : fresh);
    }
}

/* Symbols are multiples of `apart`. */
static void check_against_definition(int n_symbols, int apart, int vocab) {
    enum { TRAIN = 300, HELD_OUT = 60 };
    uint8_t train[TRAIN], test[HELD_OUT];
    double loss[NGRAM_ORDERS];
    fill(train, TRAIN, n_symbols, 1);
    fill(test, HELD_OUT, n_symbols, 2);
    for (int i = 0; i < TRAIN; ++i) train[i] = (uint8_t)(train[i] * apart);
    for (int i = 0; i < HELD_OUT; ++i) test[i] = (uint8_t)(test[i] * apart);
    cr_assert(ngram_losses(train, TRAIN, test, HELD_OUT, vocab, loss));
    for (int order = 1; order <= NGRAM_ORDERS; ++order) {
        double want = 0;
        for (int i = 1; i < HELD_OUT; ++i) {
            const int length = order - 1 < i ? order - 1 : i;
            want -= log(probability(train, TRAIN, test + i - length, length, test[i], vocab));
        }
        want /= HELD_OUT - 1;
        cr_assert_float_eq(loss[order - 1], want, 1e-12, "order %d: %.15g, not %.15g", order, loss[order - 1], want);
    }
}

Test(ngram, equals_the_definition) { check_against_definition(5, 1, 5); }
/* 0, 64, 128, 192: a key with fewer bits per symbol would mix some of them up. */
Test(ngram, symbols_are_whole_bytes) { check_against_definition(4, 64, NGRAM_MAX_VOCAB); }

Test(ngram, probabilities_sum_to_one) {
    enum { TRAIN = 200, VOCAB = 4 };
    uint8_t train[TRAIN];
    fill(train, TRAIN, VOCAB, 3);
    for (int context = 0; context < 64; ++context) {
        double sum[NGRAM_ORDERS] = {0};
        for (int c = 0; c < VOCAB; ++c) {
            uint8_t test[4] = {(uint8_t)(context & 3), (uint8_t)(context >> 2 & 3), (uint8_t)(context >> 4),
                               (uint8_t)c};
            double whole[NGRAM_ORDERS], part[NGRAM_ORDERS];
            cr_assert(ngram_losses(train, TRAIN, test, 4, VOCAB, whole));
            cr_assert(ngram_losses(train, TRAIN, test, 3, VOCAB, part));
            for (int i = 0; i < NGRAM_ORDERS; ++i) sum[i] += exp(2 * part[i] - 3 * whole[i]);
        }
        for (int i = 0; i < NGRAM_ORDERS; ++i) cr_assert_float_eq(sum[i], 1, 1e-12);
    }
}

/* A gram that occurs only at the text's end is followed by the text's start: also when the table grows meanwhile. */
Test(ngram, the_text_is_circular) {
    enum { N = 60000, VOCAB = 256 };
    uint8_t *text = malloc(N);
    fill(text, N - 8, VOCAB - 8, 5);
    for (int i = 0; i < 8; ++i) text[N - 8 + i] = (uint8_t)(VOCAB - 8 + i);
    const uint8_t test[] = {252, 253, 254, 255, 17, 18, 252, 253, 254, 255, 19};
    double loss[NGRAM_ORDERS];
    cr_assert(ngram_losses(text, N, test, sizeof test, VOCAB, loss));
    for (int order = 1; order <= NGRAM_ORDERS; ++order)
        cr_assert(isfinite(loss[order - 1]) && loss[order - 1] < 12, "order %d: %g", order, loss[order - 1]);
    free(text);
}

/* More grams than fit in the first table. */
Test(ngram, a_long_periodic_text_is_predicted) {
    enum { N = 1 << 18, PERIOD = 50021, VOCAB = 96 };
    uint8_t *text = malloc(N);
    fill(text, PERIOD, VOCAB, 5);
    for (int i = PERIOD; i < N; ++i) text[i] = text[i - PERIOD];
    double loss[NGRAM_ORDERS];
    cr_assert(ngram_losses(text, N, text, N, VOCAB, loss));
    cr_assert_lt(loss[5], 0.7); /* about 5 occurrences of a context: -log(5/6) and a little */
    cr_assert_lt(loss[5], loss[2]);
    cr_assert_float_eq(loss[0], log(VOCAB), 0.1);
    free(text);
}
