#include "cli/sample/sample.h"

#include "cli/random/random.h"

#include <math.h>
#include <stdbool.h>
#include <string.h>

/* ---- the most likely symbols ---- */

/* A heap of symbols, the most likely one at its root, or the least likely one. */
typedef struct heap {
    const float *logits;
    int32_t *at;
    int64_t n;
    bool least_first;
} heap;

static bool is_likelier(const float *logits, int64_t a, int64_t b) {
    return logits[a] > logits[b] || (logits[a] == logits[b] && a < b);
}

static bool comes_first(const heap *h, int64_t a, int64_t b) {
    return h->least_first ? is_likelier(h->logits, b, a) : is_likelier(h->logits, a, b);
}

static void sift_down(heap *h, int64_t i) {
    const int32_t symbol = h->at[i];
    for (int64_t child; (child = 2 * i + 1) < h->n; i = child) {
        if (child + 1 < h->n && comes_first(h, h->at[child + 1], h->at[child])) child += 1;
        if (!comes_first(h, h->at[child], symbol)) break;
        h->at[i] = h->at[child];
    }
    h->at[i] = symbol;
}

static void order(heap *h) {
    for (int64_t i = h->n / 2; i-- > 0;) sift_down(h, i);
}

/* Of the k most likely of n symbols. */
static heap heap_of(const float *logits, int64_t n, int64_t k, int32_t *scratch) {
    heap h = {logits, scratch, k, true};
    for (int64_t i = 0; i < k; ++i) scratch[i] = (int32_t)i;
    if (k < n) order(&h);
    for (int64_t i = k; i < n; ++i)
        if (logits[i] > logits[scratch[0]]) { /* of equal ones the first is the more likely */
            scratch[0] = (int32_t)i;
            sift_down(&h, 0);
        }
    h.least_first = false;
    order(&h);
    return h;
}

static int32_t pop(heap *h) {
    const int32_t top = h->at[0];
    h->at[0] = h->at[--h->n];
    if (h->n > 0) sift_down(h, 0);
    return top;
}

/* The least likely symbol that top_k and top_p leave. */
static int64_t least_kept(const float *logits, int64_t n, const sample_options *o, float highest, int32_t *scratch) {
    const int64_t k = o->top_k > 0 && o->top_k < n ? o->top_k : n;
    const bool nucleus = o->top_p > 0 && o->top_p < 1;
    double mass = 0, sum = 0;
    int32_t last = 0;
    heap h = heap_of(logits, n, k, scratch);
    for (int64_t i = 0; i < k && k < n; ++i) {
        last = pop(&h);
        mass += exp(((double)logits[last] - (double)highest) / o->temperature);
    }
    if (!nucleus) return last;
    for (int64_t i = 0; i < n && k == n; ++i) mass += exp(((double)logits[i] - (double)highest) / o->temperature);
    if (k < n) h = heap_of(logits, n, k, scratch);
    for (int64_t i = 0; i < k && sum < o->top_p * mass; ++i) {
        last = pop(&h);
        sum += exp(((double)logits[last] - (double)highest) / o->temperature);
    }
    return last;
}

/* Integers in the order of floats, 0 and -0 the same: so that maxima of them are vector instructions. */
static int32_t ordered(float x) {
    int32_t bits;
    x += 0.0f;
    memcpy(&bits, &x, sizeof bits);
    return bits ^ (bits >> 31 & INT32_MAX);
}

/* The first of the largest. */
static int64_t likeliest(const float *logits, int64_t n) {
    int32_t most = INT32_MIN;
    for (int64_t i = 0; i < n; ++i) {
        const int32_t x = ordered(logits[i]);
        most = x > most ? x : most;
    }
    int64_t best = 0;
    while (ordered(logits[best]) != most) ++best;
    return best;
}

int64_t sample_choose(const float *logits, int64_t n, const sample_options *o, int64_t number, int32_t *scratch) {
    const int64_t best = likeliest(logits, n);
    if (o->temperature <= 0) return best;
    const bool all = (o->top_k <= 0 || o->top_k >= n) && (o->top_p <= 0 || o->top_p >= 1);
    const int64_t last = all ? 0 : least_kept(logits, n, o, logits[best], scratch);
    draws d = draws_at(o->seed, RANDOM_SAMPLE, (uint64_t)number);
    /* Gumbel's trick: the index of the largest logit/temperature - log(-log u) has this distribution. */
    int64_t chosen = best;
    double highest = -INFINITY;
    for (int64_t i = 0; i < n; ++i) {
        const double u = draw_unit(&d) + 0x1p-33; /* in (0, 1) */
        if (!all && is_likelier(logits, last, i)) continue;
        const double scaled = ((double)logits[i] - (double)logits[best]) / o->temperature, y = scaled - highest;
        /* Most cannot win, which takes no logarithm to see: e^y < 1 / (1 - y + y^2 / 2) below 0, and -log u > 1 - u. */
        if (y < 0 && (1 - u) * (1 - y + y * y / 2) > 1) continue;
        const double score = scaled - log(-log(u));
        if (score > highest) {
            highest = score;
            chosen = i;
        }
    }
    return chosen;
}
