#include "cli/tasks/ngram.h"

#include <math.h>
#include <stdlib.h>

/* All grams of all lengths in one open-addressing table. */
typedef struct gram {
    uint64_t key;          /* length and symbols; 0 = free */
    uint32_t count, types; /* occurrences; different symbols seen after it */
} gram;
typedef struct table {
    gram *slots;
    uint64_t mask, used;
} table;

/* The gram of `length` symbols that ends with the low bytes of `recent`. Never 0: length >= 1. */
static uint64_t key_of(uint64_t recent, int length) {
    return (uint64_t)length << 56 | (recent & ((1ull << 8 * length) - 1));
}

static gram *find(const table *t, uint64_t key) {
    uint64_t hash = key * 0x9E3779B97F4A7C15ull;
    hash ^= hash >> 32;
    uint64_t i = hash & t->mask;
    while (t->slots[i].key != 0 && t->slots[i].key != key) i = (i + 1) & t->mask;
    return &t->slots[i];
}

/* The same, inserted if it is missing. */
static gram *claim(table *t, uint64_t key) {
    gram *g = find(t, key);
    t->used += g->key == 0;
    g->key = key;
    return g;
}

/* Keeps at least half of the slots free, with room for one more position's grams and their contexts. */
static bool make_room(table *t) {
    if (t->slots && 2 * (t->used + 2 * NGRAM_ORDERS) <= t->mask) return true;
    const uint64_t old = t->slots ? t->mask + 1 : 0;
    const uint64_t size = old ? 2 * old : 1u << 16;
    table larger = {calloc(size, sizeof(gram)), size - 1, t->used};
    if (!larger.slots) return false;
    for (uint64_t i = 0; i < old; ++i)
        if (t->slots[i].key != 0) *find(&larger, t->slots[i].key) = t->slots[i];
    free(t->slots);
    *t = larger;
    return true;
}

/* The text is treated as circular, so that every gram has a successor: N(h) = sum N(hc). */
static bool count_grams(table *t, gram *root, const uint8_t *text, int64_t n) {
    uint64_t recent = 0;
    for (int64_t i = NGRAM_ORDERS - 1; i > 0; --i) recent = recent << 8 | text[(n - i % n) % n];
    for (int64_t i = 0; i < n; ++i) {
        if (!make_room(t)) return false;
        const uint64_t before = recent;
        recent = recent << 8 | text[i];
        root->count += 1;
        for (int length = 1; length <= NGRAM_ORDERS; ++length) {
            gram *g = claim(t, key_of(recent, length));
            if (g->count == 0) { /* keep the context, which may occur only at the end */
                gram *context = length == 1 ? root : claim(t, key_of(before, length - 1));
                context->types += 1;
            }
            g->count += 1;
        }
    }
    return true;
}

static void measure(const table *t, const gram *root, const uint8_t *text, int64_t n, int vocab,
                    double loss[NGRAM_ORDERS]) {
    double sum[NGRAM_ORDERS] = {0};
    uint64_t recent = text[0];
    for (int64_t i = 1; i < n; ++i) {
        const uint64_t before = recent;
        recent = recent << 8 | text[i];
        double p = 1.0 / vocab;
        for (int order = 1; order <= NGRAM_ORDERS; ++order) {
            const gram *h = order == 1 ? root : find(t, key_of(before, order - 1));
            if (h->count > 0 && order <= i + 1) /* otherwise the shorter context's probability is used */
                p = (find(t, key_of(recent, order))->count + h->types * p) / (h->count + h->types);
            sum[order - 1] -= log(p);
        }
    }
    for (int order = 1; order <= NGRAM_ORDERS; ++order) loss[order - 1] = sum[order - 1] / (double)(n - 1);
}

bool ngram_losses(const uint8_t *train, int64_t n_train, const uint8_t *test, int64_t n_test, int vocab,
                  double loss[NGRAM_ORDERS]) {
    table t = {0};
    gram root = {0};
    const bool counted = count_grams(&t, &root, train, n_train);
    if (counted) measure(&t, &root, test, n_test, vocab, loss);
    free(t.slots);
    return counted;
}
