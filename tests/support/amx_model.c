#include "amx_model.h"

#ifdef FATTNI_HAVE_BF16_PRODUCTS
#include "core/tensor/numeric.h"

#include <immintrin.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

/* A thread's tiles as palette 1 has them. Intel SDM, volume 1, chapter 18, and volume 2, LDTILECFG to TDPBF16PS. */
static _Thread_local struct {
    int rows[8], bytes[8]; /* bytes of a row; 0 before a configuration is loaded */
    union {
        uint8_t bytes[64];
        uint32_t words[16];
        float sums[16];
    } data[8][16];
} tiles;

static void require(int condition) {
    if (!condition) abort(); /* where the instruction would fault */
}

static void model_loadconfig(const void *config) {
    const uint8_t *const c = config;
    require(c[0] == 1 && c[1] == 0);
    memset(&tiles, 0, sizeof tiles);
    for (int t = 0; t < 8; ++t) {
        tiles.bytes[t] = c[16 + 2 * t] + 256 * c[17 + 2 * t], tiles.rows[t] = c[48 + t];
        require(tiles.bytes[t] <= 64 && tiles.rows[t] <= 16);
    }
}
static void model_release(void) { memset(&tiles, 0, sizeof tiles); }

static void model_zero(int t) {
    require(tiles.rows[t]);
    memset(tiles.data[t], 0, sizeof tiles.data[t]);
}
static void model_loadd(int t, const void *from, size_t stride) {
    model_zero(t);
    for (int m = 0; m < tiles.rows[t]; ++m)
        memcpy(tiles.data[t][m].bytes, (const char *)from + (size_t)m * stride, (size_t)tiles.bytes[t]);
}
static void model_stored(int t, void *to, size_t stride) {
    require(tiles.rows[t]);
    for (int m = 0; m < tiles.rows[t]; ++m)
        memcpy((char *)to + (size_t)m * stride, tiles.data[t][m].bytes, (size_t)tiles.bytes[t]);
}

/* Subnormal operands and results count as zero. */
static float flushed(float x) { return fabsf(x) < 0x1p-126f ? copysignf(0, x) : x; }
static float low(uint32_t word) { return flushed(fattni_bf16_to_float((uint16_t)word)); }
static float high(uint32_t word) { return flushed(fattni_bf16_to_float((uint16_t)(word >> 16))); }

/* The first and the second numbers of the pairs are summed each in a chain of their own. */
static void model_dpbf16ps(int c, int a, int b) {
    const int M = tiles.rows[c], N = tiles.bytes[c] / 4, K = tiles.bytes[a] / 4;
    require(M && tiles.rows[a] == M && tiles.rows[b] == K && tiles.bytes[b] == tiles.bytes[c]);
    for (int m = 0; m < M; ++m)
        for (int n = 0; n < N; ++n) {
            float even = 0, odd = 0;
            for (int k = 0; k < K; ++k) {
                const uint32_t x = tiles.data[a][m].words[k], y = tiles.data[b][k].words[n];
                even = flushed(fmaf(low(x), low(y), even));
                odd = flushed(fmaf(high(x), high(y), odd));
            }
            float *const sum = &tiles.data[c][m].sums[n];
            *sum = flushed(flushed(*sum) + flushed(even + odd));
        }
}

#undef _tile_loadconfig
#undef _tile_release
#undef _tile_zero
#undef _tile_loadd
#undef _tile_stored
#undef _tile_dpbf16ps
#define _tile_loadconfig model_loadconfig
#define _tile_release model_release
#define _tile_zero model_zero
#define _tile_loadd model_loadd
#define _tile_stored model_stored
#define _tile_dpbf16ps model_dpbf16ps

#define FATTNI_VECTOR_BYTES_amx_model 64
#define ISA amx_model
#define ROW_BYTES 128
#define PRODUCT_BF16 "core/cpu/product_amx.inc"
#include "core/cpu/tile.inc"

void amx_model_product(int M, int N, int K, const uint16_t *a, const uint32_t *b, float *c) {
    const product_bf16 p = {a, b, c, .lda = K, .ldb = N, .ldc = N, .M = M, .N = N, .K = K, .beta = ADD};
    begin_products();
    run_product_bf16(&p);
    end_products();
}
#endif
