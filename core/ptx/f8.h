/* cvt: four floats to E4M3 codes in a register, x0 in the lowest byte; to nearest even, +-448 beyond that. Needs
   sm_89. */
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

#endif
