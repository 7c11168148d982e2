/* The AVX-512 instructions of the tiles with 16-bit products (core/cpu/tile_narrow.inc, vector.inc) in C, for the
   models of AMX on machines that lack them: compilers take vectors apart. Intel SDM, volume 2. Words of 16 and 32 bits
   lie in memory as in registers. */
#ifndef AVX512_MODEL_H
#define AVX512_MODEL_H

#include "core/tensor/numeric.h"

#include <immintrin.h>
#include <math.h>
#include <string.h>

typedef uint16_t model_halves __attribute__((vector_size(32)));
typedef uint16_t model_words __attribute__((vector_size(64)));
typedef uint32_t model_ints __attribute__((vector_size(64)));
typedef uint8_t model_any512 __attribute__((vector_size(64), aligned(1), may_alias));
typedef uint8_t model_any256 __attribute__((vector_size(32), aligned(1), may_alias));

#define MODEL static inline __attribute__((always_inline))

MODEL __m512i model_load(const void *p) { return (__m512i) * (const model_any512 *)p; }
MODEL void model_store(void *p, __m512i x) { *(model_any512 *)p = (model_any512)x; }
MODEL void model_store_256(void *p, __m256i x) { *(model_any256 *)p = (model_any256)x; }
/* Elements that the mask leaves out are not read. */
MODEL __m512i model_load_some(uint32_t mask, const void *p, int size) {
    uint8_t x[64] = {0};
    for (int n = 0; n < 64 / size && n < 32; ++n)
        if (mask >> n & 1) memcpy(x + n * size, (const uint8_t *)p + n * size, (size_t)size);
    return model_load(x);
}
MODEL __m256i model_half(__m512i x, int n) {
    uint8_t bytes[64];
    model_store(bytes, x);
    return (__m256i) * (const model_any256 *)(bytes + 32 * n);
}
MODEL __m512i model_insert(__m512i x, __m256i y, int n) {
    uint8_t bytes[64];
    model_store(bytes, x);
    model_store_256(bytes + 32 * n, y);
    return model_load(bytes);
}
MODEL __m256i model_truncate(__m512i x) { return (__m256i) __builtin_convertvector((model_ints)x, model_halves); }
MODEL __m512i model_extend(__m256i h) { return (__m512i) __builtin_convertvector((model_halves)h, model_ints); }
MODEL __m512i model_permute(__m512i order, __m512i x) {
    model_words y = {0}, from = (model_words)x;
    for (int n = 0; n < 32; ++n) y[n] = from[((model_words)order)[n] & 31];
    return (__m512i)y;
}
MODEL uint16_t model_not_equal(__m512 x, __m512 y) {
    uint16_t mask = 0;
    for (int n = 0; n < 16; ++n) mask |= (uint16_t)((x[n] != y[n]) << n);
    return mask;
}
MODEL __m512 model_fused(__m512 x, __m512 y, __m512 z) {
    __m512 r = {0};
    for (int n = 0; n < 16; ++n) r[n] = fmaf(x[n], y[n], z[n]);
    return r;
}
MODEL __m512 model_from_f16(__m256i h) {
    __m512 x = {0};
    for (int n = 0; n < 16; ++n) x[n] = fattni_f16_to_float(((model_halves)h)[n]);
    return x;
}
MODEL __m256i model_to_f16(__m512 x) {
    model_halves h = {0};
    for (int n = 0; n < 16; ++n) h[n] = fattni_float_to_f16(x[n]);
    return (__m256i)h;
}
/* VCVTNEPS2BF16 counts subnormal numbers as zero. */
MODEL __m256i model_to_bf16(__m512 x) {
    model_halves h = {0};
    for (int n = 0; n < 16; ++n) h[n] = fattni_float_to_bf16(fabsf(x[n]) < 0x1p-126f ? copysignf(0, x[n]) : x[n]);
    return (__m256i)h;
}
MODEL __m512i model_to_bf16_pair(__m512 high, __m512 low) {
    return model_insert(model_insert((__m512i){0}, model_to_bf16(low), 0), model_to_bf16(high), 1);
}

/* Some are macros, which depends on the compiler. */
#undef _mm512_loadu_si512
#undef _mm512_loadu_ps
#undef _mm512_storeu_si512
#undef _mm512_storeu_ps
#undef _mm256_storeu_si256
#undef _mm512_maskz_loadu_ps
#undef _mm512_maskz_loadu_epi16
#undef _mm256_maskz_loadu_epi16
#undef _mm512_setzero_si512
#undef _mm512_setzero_ps
#undef _mm512_set1_ps
#undef _mm512_or_si512
#undef _mm512_slli_epi32
#undef _mm512_srli_epi32
#undef _mm512_mul_ps
#undef _mm512_fmadd_ps
#undef _mm512_cmpneq_ps_mask
#undef _mm512_castsi256_si512
#undef _mm512_castsi512_si256
#undef _mm512_inserti64x4
#undef _mm512_extracti64x4_epi64
#undef _mm512_cvtepi32_epi16
#undef _mm512_cvtepu16_epi32
#undef _mm512_permutexvar_epi16
#undef _mm512_cvtph_ps
#undef _mm512_cvtps_ph
#undef _mm512_cvtneps_pbh
#undef _mm512_cvtne2ps_pbh
#undef _mm256_zeroupper

#define _mm512_loadu_si512(p) model_load(p)
#define _mm512_loadu_ps(p) ((__m512)model_load(p))
#define _mm512_storeu_si512(p, x) model_store(p, x)
#define _mm512_storeu_ps(p, x) model_store(p, (__m512i)(x))
#define _mm256_storeu_si256(p, x) model_store_256(p, x)
#define _mm512_maskz_loadu_ps(mask, p) ((__m512)model_load_some(mask, p, 4))
#define _mm512_maskz_loadu_epi16(mask, p) model_load_some(mask, p, 2)
#define _mm256_maskz_loadu_epi16(mask, p) model_half(model_load_some(mask, p, 2), 0)
#define _mm512_setzero_si512() ((__m512i){0})
#define _mm512_setzero_ps() ((__m512){0})
#define _mm512_set1_ps(x) ((__m512){0} + (float)(x))
#define _mm512_or_si512(x, y) ((x) | (y))
#define _mm512_slli_epi32(x, n) ((__m512i)((model_ints)(x) << (n)))
#define _mm512_srli_epi32(x, n) ((__m512i)((model_ints)(x) >> (n)))
#define _mm512_mul_ps(x, y) ((x) * (y))
#define _mm512_fmadd_ps(x, y, z) model_fused(x, y, z)
#define _mm512_cmpneq_ps_mask(x, y) model_not_equal(x, y)
#define _mm512_castsi256_si512(x) model_insert((__m512i){0}, x, 0)
#define _mm512_castsi512_si256(x) model_half(x, 0)
#define _mm512_inserti64x4(x, y, n) model_insert(x, y, n)
#define _mm512_extracti64x4_epi64(x, n) model_half(x, n)
#define _mm512_cvtepi32_epi16(x) model_truncate(x)
#define _mm512_cvtepu16_epi32(x) model_extend(x)
#define _mm512_permutexvar_epi16(order, x) model_permute(order, x)
#define _mm512_cvtph_ps(h) model_from_f16(h)
#define _mm512_cvtps_ph(x, rounding) model_to_f16(x)
#define _mm512_cvtneps_pbh(x) model_to_bf16(x)
#define _mm512_cvtne2ps_pbh(high, low) model_to_bf16_pair(high, low)
#define _mm256_zeroupper() ((void)0)

#endif
