/* The 16-bit type of a kernel instance. Include after defining K_BF16 (1 or 0). */
#ifndef FATTNI_CORE_DEVICE_HALF_TYPES_H
#define FATTNI_CORE_DEVICE_HALF_TYPES_H

#include "core/device/helpers.cuh"
#include "core/ptx/mma.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#if K_BF16
typedef __nv_bfloat16 half_type;
DEVICE uint32_t pack(float low, float high) { return pack_bf16(low, high); }
DEVICE void mma(float d[4], const uint32_t a[4], uint32_t b0, uint32_t b1) { mma_bf16(d, a, b0, b1); }
DEVICE float to_float(half_type x) { return __bfloat162float(x); }
DEVICE half_type to_half(float x) { return __float2bfloat16_rn(x); }
enum { ONES = 0x3f803f80 }; /* two of them */
DEVICE float2 unpack(uint32_t x) { return make_float2(__uint_as_float(x << 16), __uint_as_float(x & 0xffff0000u)); }
#else
typedef __half half_type;
DEVICE uint32_t pack(float low, float high) { return pack_f16(low, high); }
DEVICE void mma(float d[4], const uint32_t a[4], uint32_t b0, uint32_t b1) { mma_f16(d, a, b0, b1); }
DEVICE float to_float(half_type x) { return __half2float(x); }
DEVICE half_type to_half(float x) { return __float2half_rn(x); }
enum { ONES = 0x3c003c00 };
DEVICE float2 unpack(uint32_t x) { return __half22float2(*(const __half2 *)&x); }
#endif

#endif
