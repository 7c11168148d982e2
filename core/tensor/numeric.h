/* 16-bit and 8-bit floating point in software, and element access by dtype. Host and device. */
#ifndef FATTNI_CORE_TENSOR_NUMERIC_H
#define FATTNI_CORE_TENSOR_NUMERIC_H

#include <fattn/tensor.h>

#include <string.h>

#ifdef __CUDACC__
#define FATTNI_INLINE static inline __host__ __device__
#else
#define FATTNI_INLINE static inline
#endif

FATTNI_INLINE uint32_t fattni_float_bits(float x) {
    uint32_t u;
    memcpy(&u, &x, sizeof u);
    return u;
}

FATTNI_INLINE float fattni_bits_float(uint32_t u) {
    float x;
    memcpy(&x, &u, sizeof x);
    return x;
}

FATTNI_INLINE float fattni_bf16_to_float(uint16_t h) { return fattni_bits_float((uint32_t)h << 16); }

/* Round to nearest even; NaN stays a quiet NaN. */
FATTNI_INLINE uint16_t fattni_float_to_bf16(float x) {
    const uint32_t u = fattni_float_bits(x);
    if ((u & 0x7fffffffu) > 0x7f800000u) return (uint16_t)((u >> 16) | 0x40u);
    return (uint16_t)((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
}

FATTNI_INLINE float fattni_f16_to_float(uint16_t h) {
    const uint32_t sign = (uint32_t)(h & 0x8000u) << 16, magnitude = h & 0x7fffu;
    if (magnitude >= 0x7c00u) /* Inf, NaN */
        return fattni_bits_float(sign | 0x7f800000u | ((magnitude & 0x3ffu) << 13));
    if (magnitude >= 0x400u) return fattni_bits_float(sign | ((magnitude << 13) + 0x38000000u));
    const float subnormal = (float)magnitude * 0x1p-24f;
    return sign ? -subnormal : subnormal;
}

FATTNI_INLINE uint16_t fattni_float_to_f16(float x) {
    const uint32_t u = fattni_float_bits(x), sign = (u >> 16) & 0x8000u;
    const uint32_t magnitude = u & 0x7fffffffu;
    if (magnitude > 0x7f800000u) return (uint16_t)(sign | 0x7e00u | ((u >> 13) & 0x1ffu));
    if (magnitude >= 0x477ff000u) return (uint16_t)(sign | 0x7c00u); /* 65520 and up: Inf */
    if (magnitude >= 0x38800000u) {                                  /* normal */
        const uint32_t r = magnitude + 0xfffu + ((magnitude >> 13) & 1u);
        return (uint16_t)(sign | ((r - 0x38000000u) >> 13));
    }
    /* Adding 0.5 aligns the last bit of a half's subnormals with the last bit of the float. */
    const float aligned = fattni_bits_float(magnitude) + 0.5f;
    return (uint16_t)(sign | (fattni_float_bits(aligned) - 0x3f000000u));
}

FATTNI_INLINE float fattni_e4m3_to_float(uint8_t code) {
    const uint32_t sign = (uint32_t)(code & 0x80u) << 24, magnitude = code & 0x7fu;
    if (magnitude == 0x7fu) return fattni_bits_float(sign | 0x7fc00000u);
    if (magnitude >= 8u) return fattni_bits_float(sign | ((magnitude << 20) + 0x3c000000u));
    const float subnormal = (float)magnitude * 0x1p-9f;
    return sign ? -subnormal : subnormal;
}

/* Round to nearest even; beyond 448 it is 448, for E4M3 has no infinity; NaN is 0x7f. */
FATTNI_INLINE uint8_t fattni_float_to_e4m3(float x) {
    const uint32_t u = fattni_float_bits(x), sign = (u >> 24) & 0x80u;
    const uint32_t magnitude = u & 0x7fffffffu;
    if (magnitude > 0x7f800000u) return 0x7fu;
    if (magnitude >= 0x43e00000u) return (uint8_t)(sign | 0x7eu);
    if (magnitude >= 0x3c800000u) { /* normal */
        const uint32_t r = magnitude + 0x7ffffu + ((magnitude >> 20) & 1u);
        return (uint8_t)(sign | ((r - 0x3c000000u) >> 20));
    }
    /* The last bit of floats from 2^14 on is that of E4M3's subnormals. */
    const float aligned = fattni_bits_float(magnitude) + 0x1p14f;
    return (uint8_t)(sign | (fattni_float_bits(aligned) - 0x46800000u));
}

/* In -127..127, round to nearest even. Adding 1.5 2^23 leaves the integer in the low bits. NaN is -127. */
FATTNI_INLINE int8_t fattni_float_to_i8(float x) {
    const float above = x > -127.0f ? x : -127.0f, inside = above < 127.0f ? above : 127.0f;
    return (int8_t)(uint8_t)fattni_float_bits(inside + 0x1.8p23f);
}

/* Double to float by round-to-odd, so that the rounding to a 16-bit or 8-bit type that follows gives the same
   as one rounding from double. */
FATTNI_INLINE float fattni_double_to_float_odd(double x) {
    const float f = (float)x;
    if ((double)f == x || f != f || f - f != 0.0f) return f;
    const double magnitude = x < 0 ? -x : x;
    uint32_t u = fattni_float_bits(f);
    if ((double)fattni_bits_float(u & 0x7fffffffu) > magnitude) u -= 1; /* truncate */
    return fattni_bits_float(u | 1u);
}

/* Element i of an array of dtype t, as double. */
FATTNI_INLINE double fattni_load(const void *p, int32_t t, int64_t i) {
    switch (t) {
    case FATTN_F64: return ((const double *)p)[i];
    case FATTN_F32: return (double)((const float *)p)[i];
    case FATTN_F16: return (double)fattni_f16_to_float(((const uint16_t *)p)[i]);
    case FATTN_BF16: return (double)fattni_bf16_to_float(((const uint16_t *)p)[i]);
    case FATTN_I32: return (double)((const int32_t *)p)[i];
    case FATTN_F8E4M3: return (double)fattni_e4m3_to_float(((const uint8_t *)p)[i]);
    case FATTN_I8: return ((const int8_t *)p)[i];
    default: return (double)((const uint8_t *)p)[i];
    }
}

/* Integers saturate, NaN becomes 0. */
FATTNI_INLINE double fattni_clamp_integer(double x, double low, double high) {
    if (x != x) return 0.0;
    const double r = x < low ? low : x > high ? high : x;
    const double truncated = (double)(int64_t)r;
    const double rest = r - truncated; /* round to nearest even; rint would depend on the rounding mode */
    const int64_t odd = (int64_t)truncated & 1;
    if (rest > 0.5 || (rest == 0.5 && odd)) return truncated + 1.0;
    if (rest < -0.5 || (rest == -0.5 && odd)) return truncated - 1.0;
    return truncated;
}

FATTNI_INLINE void fattni_store(void *p, int32_t t, int64_t i, double x) {
    switch (t) {
    case FATTN_F64: ((double *)p)[i] = x; break;
    case FATTN_F32: ((float *)p)[i] = (float)x; break;
    case FATTN_F16: ((uint16_t *)p)[i] = fattni_float_to_f16(fattni_double_to_float_odd(x)); break;
    case FATTN_BF16: ((uint16_t *)p)[i] = fattni_float_to_bf16(fattni_double_to_float_odd(x)); break;
    case FATTN_I32: ((int32_t *)p)[i] = (int32_t)fattni_clamp_integer(x, -2147483648.0, 2147483647.0); break;
    case FATTN_F8E4M3: ((uint8_t *)p)[i] = fattni_float_to_e4m3(fattni_double_to_float_odd(x)); break;
    case FATTN_I8: ((int8_t *)p)[i] = (int8_t)fattni_clamp_integer(x, -128.0, 127.0); break;
    default: ((uint8_t *)p)[i] = (uint8_t)fattni_clamp_integer(x, 0.0, 255.0); break;
    }
}

#endif
