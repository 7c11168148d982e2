/* cvt: four floats to E4M3 codes in a register, x0 in the lowest byte; to nearest even, +-448 beyond that. And back.
   Needs sm_89. */
#ifndef FATTNI_CORE_PTX_F8_H
#define FATTNI_CORE_PTX_F8_H

#include <stdint.h>

static __device__ __forceinline__ uint32_t pack_e4m3(float x0, float x1, float x2, float x3) {
    uint32_t codes;
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 890
    asm("{.reg .b16 low, high;\n"
        "cvt.rn.satfinite.e4m3x2.f32 low, %2, %1;\n"
        "cvt.rn.satfinite.e4m3x2.f32 high, %4, %3;\n"
        "mov.b32 %0, {low, high};}"
        : "=r"(codes)
        : "f"(x0), "f"(x1), "f"(x2), "f"(x3));
#else
    codes = 0;
#endif
    return codes;
}

static __device__ __forceinline__ void unpack_e4m3(float x[4], uint32_t codes) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 890
    asm("{.reg .b16 low, high, x0, x1;\n"
        ".reg .b32 pair;\n"
        "mov.b32 {low, high}, %4;\n"
        "cvt.rn.f16x2.e4m3x2 pair, low;\n"
        "mov.b32 {x0, x1}, pair;\n"
        "cvt.f32.f16 %0, x0;\n"
        "cvt.f32.f16 %1, x1;\n"
        "cvt.rn.f16x2.e4m3x2 pair, high;\n"
        "mov.b32 {x0, x1}, pair;\n"
        "cvt.f32.f16 %2, x0;\n"
        "cvt.f32.f16 %3, x1;}"
        : "=f"(x[0]), "=f"(x[1]), "=f"(x[2]), "=f"(x[3])
        : "r"(codes));
#else
    for (int n = 0; n < 4; ++n) x[n] = 0.0f;
    (void)codes;
#endif
}

#endif
