#include "cli/sample/sample.h"

#include "cli/random/random.h"

#include <math.h>
#include <stdbool.h>

/* ---- the most likely symbols ---- */

/* A heap of symbols, the most likely one at its root. */
typedef struct heap {
    const float *logits;
    int32_t *at;
    int64_t n;
} heap;

static bool is_likelier(const float *logits, int64_t a, int64_t b) {
    return logits[a] > logits[b] || (logits[a] == logits[b] && a < b);
}

static void sift_down(heap *h, int64_t i) {
    const int32_t symbol = h->at[i];
    for (int64_t child; (child = 2 * i + 1) < h->n; i = child) {
        if (child + 1 < h->n && is_likelier(h->logits, h->at[child + 1], h->at[child])) child += 1;
        if (!is_likelier(h->logits, h->at[child], symbol)) break;
        h->at[i] = h->at[child];
    }
    h->at[i] = symbol;
}

static heap heap_of(const float *logits, int64_t n, int32_t *scratch) {
    heap h = {logits, scratch, n};
    for (int64_t i = 0; i < n; ++i) scratch[i] = (int32_t)i;
    for (int64_t i = n / 2; i-- > 0;) sift_down(&h, i);
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
    heap h = heap_of(logits, n, scratch);
    for (int64_t i = 0; i < k && k < n; ++i) {
        last = pop(&h);
        mass += exp(((double)logits[last] - (double)highest) / o->temperature);
    }
    if (!nucleus) return last;
    for (int64_t i = 0; i < n && k == n; ++i) mass += exp(((double)logits[i] - (double)highest) / o->temperature);
    h = heap_of(logits, n, scratch);
    for (int64_t i = 0; i < k && sum < o->top_p * mass; ++i) {
        last = pop(&h);
        sum += exp(((double)logits[last] - (double)highest) / o->temperature);
    }
    return last;
}

int64_t sample_choose(const float *logits, int64_t n, const sample_options *o, int64_t number, int32_t *scratch) {
    int64_t best = 0;
    for (int64_t i = 1; i < n; ++i)
        if (logits[i] > logits[best]) best = i;
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
