#include "cli/sample/sample.h"

#include "cli/random/random.h"

#include <math.h>
#include <stdbool.h>
#include <string.h>

enum { BLOCK = 64 };

static bool is_likelier(const float *logits, int64_t a, int64_t b) {
    return logits[a] > logits[b] || (logits[a] == logits[b] && a < b);
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

/* ---- those that top_k and top_p leave ---- */

static void swap(int32_t *a, int32_t *b) {
    const int32_t x = *a;
    *a = *b, *b = x;
}

/* Moves those of at[0..n-1] that are likelier than the one in the middle to the front, that one behind them. Returns
   its place. */
static int64_t divide(const float *logits, int32_t *at, int64_t n) {
    int64_t front = 0;
    swap(&at[n / 2], &at[n - 1]);
    for (int64_t i = 0; i < n - 1; ++i)
        if (is_likelier(logits, at[i], at[n - 1])) swap(&at[front++], &at[i]);
    swap(&at[front], &at[n - 1]);
    return front;
}

/* Moves the k most likely of at[0..n-1] to the front. */
static void select_likeliest(const float *logits, int32_t *at, int64_t n, int64_t k) {
    while (n > k && k > 0) {
        const int64_t front = divide(logits, at, n), passed = front < k ? front + 1 : 0;
        n = front < k ? n - passed : front;
        at += passed, k -= passed;
    }
}

/* Of n symbols those that are not below the k likeliest, a superset of these that is not much larger: none of them is
   below k blocks' maxima. Returns how many are in `at`. */
static int64_t candidates(const float *logits, int64_t n, int64_t k, int32_t *at) {
    const int64_t blocks = n / BLOCK;
    float least = -INFINITY;
    int64_t count = 0;
    if (k <= blocks / 2) {
        for (int64_t b = 0; b < blocks; ++b) at[b] = (int32_t)(b * BLOCK + likeliest(logits + b * BLOCK, BLOCK));
        select_likeliest(logits, at, blocks, k);
        least = INFINITY;
        for (int64_t b = 0; b < k; ++b) least = fminf(least, logits[at[b]]);
    }
    for (int64_t i = 0; i < n; ++i)
        if (logits[i] >= least) at[count++] = (int32_t)i;
    return count;
}

static double weight(const float *logits, int64_t i, float highest, double temperature) {
    return exp(((double)logits[i] - (double)highest) / temperature);
}

/* Moves the likeliest of at[0..n-1] whose weights first sum to `wanted` to the front. Returns how many they are. */
static int64_t select_mass(const float *logits, int32_t *at, int64_t n, double wanted, float highest,
                           double temperature) {
    int64_t kept = 0;
    while (n > 0 && wanted > 0) {
        const int64_t front = divide(logits, at, n);
        double sum = 0;
        for (int64_t i = 0; i < front; ++i) sum += weight(logits, at[i], highest, temperature);
        if (sum >= wanted) {
            n = front;
            continue;
        }
        wanted -= sum + weight(logits, at[front], highest, temperature);
        kept += front + 1, at += front + 1, n -= front + 1;
    }
    return kept;
}

/* Nats below the likeliest symbol in steps of 1/16; what is further below is in the last one. */
enum { STEPS_OF_NAT = 16, STEPS = 1024 };
static int step_of(double below) { return (int)fmin(below * STEPS_OF_NAT, STEPS - 1); }

/* select_mass of all symbols at[0..n-1], `part` of their weights: whole steps are kept, of one step some. */
static int64_t keep_mass(const float *logits, int32_t *at, int64_t n, double part, float highest, double temperature) {
    double mass[STEPS] = {0}, wanted = 0;
    int64_t kept = 0, some = 0;
    int last = 0;
    for (int64_t i = 0; i < n; ++i) {
        const double below = ((double)highest - (double)logits[at[i]]) / temperature;
        mass[step_of(below)] += exp(-below);
    }
    for (int k = 0; k < STEPS; ++k) wanted += part * mass[k];
    while (last < STEPS - 1 && wanted > mass[last]) wanted -= mass[last++];
    for (int64_t i = 0; i < n; ++i) {
        const int k = step_of(((double)highest - (double)logits[at[i]]) / temperature);
        if (k > last) continue;
        swap(&at[i], &at[kept + some]);
        if (k < last)
            swap(&at[kept + some], &at[kept]), kept += 1;
        else
            some += 1;
    }
    return kept + select_mass(logits, at + kept, some, wanted, highest, temperature);
}

/* Returns how many are left; they are in `at`. */
static int64_t keep(const float *logits, int64_t n, const sample_options *o, float highest, int32_t *at) {
    const int64_t k = o->top_k > 0 && o->top_k < n ? o->top_k : n;
    select_likeliest(logits, at, candidates(logits, n, k, at), k);
    return o->top_p > 0 && o->top_p < 1 ? keep_mass(logits, at, k, o->top_p, highest, o->temperature) : k;
}

/* ---- the choice ---- */

/* Gumbel's trick: the index of the largest logit/temperature - log(-log u) has this distribution. */
typedef struct contest {
    const float *logits;
    double temperature, top; /* top: the largest logit */
    int64_t chosen;
    double highest;
} contest;

static void enter(contest *c, int64_t i, uint32_t word) {
    const double u = word * 0x1p-32 + 0x1p-33; /* in (0, 1) */
    const double scaled = ((double)c->logits[i] - c->top) / c->temperature, y = scaled - c->highest;
    /* Most cannot win, which takes no logarithm to see: e^y < 1 / (1 - y + y^2 / 2) below 0, and -log u > 1 - u. */
    if (y < 0 && (1 - u) * (1 - y + y * y / 2) > 1) return;
    const double score = scaled - log(-log(u));
    if (score < c->highest || (score == c->highest && i > c->chosen)) return;
    c->highest = score;
    c->chosen = i;
}

int64_t sample_choose(const float *logits, int64_t n, const sample_options *o, int64_t number, int32_t *scratch) {
    const int64_t best = likeliest(logits, n);
    if (o->temperature <= 0) return best;
    contest c = {logits, o->temperature, (double)logits[best], best, -INFINITY};
    draws d = draws_at(o->seed, RANDOM_SAMPLE, (uint64_t)number);
    if ((o->top_k <= 0 || o->top_k >= n) && (o->top_p <= 0 || o->top_p >= 1)) {
        for (int64_t i = 0; i < n; ++i) enter(&c, i, draw_word(&d));
        return c.chosen;
    }
    const int64_t kept = keep(logits, n, o, logits[best], scratch);
    for (int64_t i = 0; i < kept; ++i) enter(&c, scratch[i], draw_word_at(&d, (uint64_t)scratch[i]));
    return c.chosen;
}
