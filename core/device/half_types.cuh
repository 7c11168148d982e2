/* The 16-bit type of a kernel instance. Include after defining K_BF16 (1 or 0). */
#ifndef FATTNI_CORE_DEVICE_HALF_TYPES_H
#define FATTNI_CORE_DEVICE_HALF_TYPES_H

#include "core/attention/o_rest.h"
#include "core/device/helpers.cuh"
#include "core/ptx/mma.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#if K_BF16
typedef __nv_bfloat16 half_type;
DEVICE uint32_t pack(float low, float high) { return pack_bf16(low, high); }
#if FATTNI_SM80
DEVICE void mma(float d[4], const uint32_t a[4], uint32_t b0, uint32_t b1) { mma_bf16(d, a, b0, b1); }
#endif
DEVICE float to_float(half_type x) { return __bfloat162float(x); }
DEVICE half_type to_half(float x) { return __float2bfloat16_rn(x); }
enum { ONES = 0x3f803f80 }; /* two of them */
DEVICE float2 unpack(uint32_t x) { return make_float2(__uint_as_float(x << 16), __uint_as_float(x & 0xffff0000u)); }
enum { O_REST = FATTNI_O_REST_BF16 };
#else
typedef __half half_type;
DEVICE uint32_t pack(float low, float high) { return pack_f16(low, high); }
DEVICE void mma(float d[4], const uint32_t a[4], uint32_t b0, uint32_t b1) { mma_f16(d, a, b0, b1); }
DEVICE float to_float(half_type x) { return __half2float(x); }
DEVICE half_type to_half(float x) { return __float2half_rn(x); }
enum { ONES = 0x3c003c00 };
DEVICE float2 unpack(uint32_t x) { return __half22float2(*(const __half2 *)&x); }
enum { O_REST = FATTNI_O_REST_F16 };
#endif

/* What pack takes off two numbers (o_rest.h), in the low two bytes of the result; the low 16 bits of `above` in the
   others. */
DEVICE uint32_t rest_pair(float low, float high, uint32_t above) {
    const float2 rounded = unpack(pack(low, high));
    return pack_s8(__float_as_int(low) - __float_as_int(rounded.x) + (1 << (O_REST - 1)) >> O_REST,
                   __float_as_int(high) - __float_as_int(rounded.y) + (1 << (O_REST - 1)) >> O_REST, above);
}
/* Two numbers before pack, from the low two bytes of `rest`. */
DEVICE float2 exact_pair(float2 rounded, uint32_t rest) {
    return make_float2(__uint_as_float(fattni_o_exact(__float_as_uint(rounded.x), (int8_t)rest, O_REST)),
                       __uint_as_float(fattni_o_exact(__float_as_uint(rounded.y), (int8_t)(rest >> 8), O_REST)));
}

#endif
