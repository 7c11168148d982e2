/* mma.sync m16n8k16: D[16,8] += A[16,16] B[16,8], fp32 accumulators. PTX ISA, "Matrix Fragments for
   mma.m16n8k16". With g = lane/4, t = lane%4: d[0..1] is row g, columns 2t, 2t+1; d[2..3] row g+8. */
#ifndef FATTNI_PTX_MMA_H
#define FATTNI_PTX_MMA_H

#include <stdint.h>

static __device__ __forceinline__ void mma_bf16(float d[4], const uint32_t a[4], uint32_t b0,
                                                uint32_t b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, "
                 "{%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

static __device__ __forceinline__ void mma_f16(float d[4], const uint32_t a[4], uint32_t b0,
                                               uint32_t b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, "
                 "{%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

/* Two floats to one register, `low` in the low half, round to nearest even. */
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

/* 2^x, relative error 2^-22; -inf gives 0. */
static __device__ __forceinline__ float exp2_approx(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

/* *p += x at L2, no return. */
static __device__ __forceinline__ void reduce_add(float *p, float x) {
    asm volatile("red.global.add.f32 [%0], %1;" ::"l"(p), "f"(x) : "memory");
}

/* p[0..3] += x; vector reductions exist from sm_90 on. p: a multiple of 16 bytes. */
static __device__ __forceinline__ void reduce_add_4(float *p, const float x[4]) {
#if __CUDA_ARCH__ >= 900
    asm volatile("red.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(p), "f"(x[0]), "f"(x[1]),
                 "f"(x[2]), "f"(x[3])
                 : "memory");
#else
#pragma unroll
    for (int e = 0; e < 4; ++e) reduce_add(p + e, x[e]);
#endif
}

#endif
