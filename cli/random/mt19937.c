#include "cli/random/mt19937.h"

#include <math.h>

enum { MIDDLE = 397, BLOCK = 16 };

void mt19937_seed(mt19937 *g, uint32_t seed) {
    g->left = 1;
    g->next = 0;
    g->word[0] = seed;
    for (uint32_t i = 1; i < MT19937_WORDS; ++i) g->word[i] = 1812433253u * (g->word[i - 1] ^ g->word[i - 1] >> 30) + i;
}

static void renew(mt19937 *g) {
    uint32_t *const w = g->word;
    for (int i = 0; i < MT19937_WORDS; ++i) {
        const uint32_t joined = (w[i] & 0x80000000u) | (w[(i + 1) % MT19937_WORDS] & 0x7fffffffu);
        w[i] = w[(i + MIDDLE) % MT19937_WORDS] ^ joined >> 1 ^ (joined % 2 ? 0x9908b0dfu : 0);
    }
    g->left = MT19937_WORDS;
    g->next = 0;
}

uint32_t mt19937_draw(mt19937 *g) {
    if (--g->left <= 0) renew(g);
    uint32_t x = g->word[g->next++];
    x ^= x >> 11;
    x ^= x << 7 & 0x9d2c5680u;
    x ^= x << 15 & 0xefc60000u;
    return x ^ x >> 18;
}

/* ---- normal numbers ---- */

static const double TWO_PI = 2 * 3.14159265358979323846;
static const float TINY = 1e-12f; /* keeps the logarithm finite */

static float uniform(mt19937 *g) { return (float)(mt19937_draw(g) & 0xffffff) * 0x1p-24f; }

static double wide_uniform(mt19937 *g) {
    const uint64_t high = mt19937_draw(g);
    return (double)((high << 32 | mt19937_draw(g)) & ((1ull << 53) - 1)) * 0x1p-53;
}

/* Uniform numbers to normal ones: 0..7 are radii, 8..15 angles. */
static void transform(float x[BLOCK], float std) {
    for (int i = 0; i < BLOCK / 2; ++i) {
        const float radius = sqrtf(-2 * logf(1 - x[i] + TINY));
        const float angle = (float)(TWO_PI * (double)x[i + BLOCK / 2]);
        x[i] = radius * cosf(angle) * std;
        x[i + BLOCK / 2] = radius * sinf(angle) * std;
    }
}

/* Less than a block: pairs, of 53-bit uniforms. */
static void few(mt19937 *g, float *x, int64_t n, float std) {
    for (int64_t i = 0; i < n; i += 2) {
        const float angle = (float)(TWO_PI * (double)(float)wide_uniform(g));
        const float radius = sqrtf(-2 * logf(1 - (float)wide_uniform(g) + TINY));
        x[i] = radius * cosf(angle) * std;
        if (i + 1 < n) x[i + 1] = (float)((double)(radius * sinf(angle)) * (double)std);
    }
}

void mt19937_normal(mt19937 *g, float *x, int64_t n, float std) {
    if (n < BLOCK) {
        few(g, x, n, std);
        return;
    }
    for (int64_t i = 0; i < n; ++i) x[i] = uniform(g);
    for (int64_t i = 0; i + BLOCK <= n; i += BLOCK) transform(x + i, std);
    if (n % BLOCK == 0) return;
    float *const last = x + n - BLOCK;
    for (int i = 0; i < BLOCK; ++i) last[i] = uniform(g);
    transform(last, std);
}

void mt19937_shuffle(mt19937 *g, int32_t *x, int64_t n) {
    for (int64_t i = n - 1; i > 0; --i) {
        const int64_t j = mt19937_draw(g) % (uint32_t)(i + 1);
        const int32_t kept = x[i];
        x[i] = x[j];
        x[j] = kept;
    }
}
