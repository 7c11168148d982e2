/* mma.sync, and the arithmetic around it: conversions, approximations, reductions.

   m16n8k16: D[16,8] += A[16,16] B[16,8], 16-bit operands, fp32 accumulators. PTX ISA, "Matrix Fragments for
   mma.m16n8k16". With g = lane/4, t = lane%4: d[0..1] is row g, columns 2t, 2t+1; d[2..3] is row g+8.

   sm_75 has m16n8k8 of F16 only, with half of each operand's registers, and conversions of one number at a time. */
#ifndef FATTNI_CORE_PTX_MMA_H
#define FATTNI_CORE_PTX_MMA_H

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <stdint.h>

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
#define FATTNI_SM80 1
#else
#define FATTNI_SM80 0
#endif

#if FATTNI_SM80
static __device__ __forceinline__ void mma_bf16(float d[4], const uint32_t a[4], uint32_t b0, uint32_t b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, "
                 "{%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

static __device__ __forceinline__ void mma_f16(float d[4], const uint32_t a[4], uint32_t b0, uint32_t b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, "
                 "{%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

#else
static __device__ __forceinline__ void mma_f16(float d[4], const uint32_t a[4], uint32_t b0, uint32_t b1) {
    asm volatile(
        "{\nmma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%8}, {%0, %1, %2, %3};"
        "\nmma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%6, %7}, {%9}, {%0, %1, %2, %3};\n}"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
#endif

/* Two integers as bytes, saturated, low first; above them the low 16 bits of `above`. */
static __device__ __forceinline__ uint32_t pack_s8(int low, int high, uint32_t above) {
    uint32_t d;
    asm("cvt.pack.sat.s8.s32.b32 %0, %1, %2, %3;" : "=r"(d) : "r"(high), "r"(low), "r"(above));
    return d;
}

#if FATTNI_SM80
/* m16n8k8: D[16,8] += A[16,8] B[8,8]. a = (g, t), (g + 8, t), (g, t + 4), (g + 8, t + 4); b = (t, g), (t + 4, g); d as
   above. TF32: the low 13 bits of operands are ignored. */
static __device__ __forceinline__ void mma_tf32(float d[4], const float a[4], float b0, float b1) {
    asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, "
                 "{%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(__float_as_uint(a[0])), "r"(__float_as_uint(a[1])), "r"(__float_as_uint(a[2])),
                   "r"(__float_as_uint(a[3])), "r"(__float_as_uint(b0)), "r"(__float_as_uint(b1)));
}
/* x rounded to the nearest TF32 number, ties away from 0. */
static __device__ __forceinline__ float round_tf32(float x) {
    uint32_t r;
    asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(r) : "f"(x));
    return __uint_as_float(r);
}

/* m8n8k4, the only shape of sm_80: D[8,8] += A[8,4] B[4,8], d = (g, 2t), (g, 2t + 1), a = (g, t), b = (t, g). */
static __device__ __forceinline__ void mma_f64_m8n8k4(double d[2], double a, double b) {
    asm volatile("mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64 {%0, %1}, {%2}, {%3}, {%0, %1};"
                 : "+d"(d[0]), "+d"(d[1])
                 : "d"(a), "d"(b));
}
static __device__ __forceinline__ void mma_f64(double d[4], const double a[4], double b0, double b1) {
#if __CUDA_ARCH__ >= 900
    asm volatile("mma.sync.aligned.m16n8k8.row.col.f64.f64.f64.f64 {%0, %1, %2, %3}, "
                 "{%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+d"(d[0]), "+d"(d[1]), "+d"(d[2]), "+d"(d[3])
                 : "d"(a[0]), "d"(a[1]), "d"(a[2]), "d"(a[3]), "d"(b0), "d"(b1));
#else
    mma_f64_m8n8k4(d, a[0], b0);
    mma_f64_m8n8k4(d + 2, a[1], b0);
    mma_f64_m8n8k4(d, a[2], b1);
    mma_f64_m8n8k4(d + 2, a[3], b1);
#endif
}
#endif

/* Two floats as one register of 16-bit numbers, `low` in the low half, rounded to nearest even. */
#if FATTNI_SM80
static __device__ __forceinline__ uint32_t pack_bf16(float low, float high) {
    uint32_t r;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
    return r;
}
static __device__ __forceinline__ uint32_t pack_f16(float low, float high) {
    uint32_t r;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
    return r;
}
#else
static __device__ __forceinline__ uint32_t pack_bf16(float low, float high) {
    const __nv_bfloat162 x = __floats2bfloat162_rn(low, high);
    return *(const uint32_t *)&x;
}
static __device__ __forceinline__ uint32_t pack_f16(float low, float high) {
    const __half2 x = __floats2half2_rn(low, high);
    return *(const uint32_t *)&x;
}
#endif

/* 2^x, relative error 2^-22; -inf and results below 2^-126 give 0. */
static __device__ __forceinline__ float exp2_approx(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

/* 1 / x, relative error 2^-23, and log2 x, relative error 2^-22, but for x between 0.5 and 2 absolute error 2^-22.
   Subnormal x count as 0. */
static __device__ __forceinline__ float reciprocal_approx(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
static __device__ __forceinline__ float log2_approx(float x) {
    float y;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

/* x as it is rounded here: what computed it is not fused with what follows. */
static __device__ __forceinline__ void keep_rounded(float *x) { asm volatile("" : "+f"(*x)); }

/* *p += x in L2, without a result. */
static __device__ __forceinline__ void reduce_add(float *p, float x) {
    asm volatile("red.global.add.f32 [%0], %1;" ::"l"(p), "f"(x) : "memory");
}

static __device__ __forceinline__ void reduce_add(double *p, double x) {
    asm volatile("red.global.add.f64 [%0], %1;" ::"l"(p), "d"(x) : "memory");
}

/* p[0..3] += x; one vector reduction from sm_90 on. p: a multiple of 16 bytes. */
static __device__ __forceinline__ void reduce_add_4(float *p, const float x[4]) {
#if __CUDA_ARCH__ >= 900
    asm volatile("red.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(p), "f"(x[0]), "f"(x[1]), "f"(x[2]), "f"(x[3])
                 : "memory");
#else
#pragma unroll
    for (int e = 0; e < 4; ++e) reduce_add(p + e, x[e]);
#endif
}

#endif
