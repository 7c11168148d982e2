/* Eight elements of a row of F32, F16 or BF16, for kernels that serve all three. */
#ifndef FATTNI_CORE_DEVICE_LOAD_8_H
#define FATTNI_CORE_DEVICE_LOAD_8_H

#include "core/device/helpers.cuh"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

DEVICE void convert_8(float x[8], const uint16_t bits[8], int kind) {
#pragma unroll
    for (int e = 0; e < 8; ++e)
        x[e] = kind == KIND_BF16 ? __bfloat162float(*(const __nv_bfloat16 *)&bits[e])
                                 : __half2float(*(const __half *)&bits[e]);
}

/* From column c on; beyond `width` they are 0. vector: rows are aligned to 16 bytes. */
DEVICE void load_8(float x[8], const void *row, int kind, int c, int width, int vector) {
    if (kind == KIND_F32) {
#pragma unroll
        for (int e = 0; e < 8; ++e) x[e] = c + e < width ? ((const float *)row)[c + e] : 0.0f;
        return;
    }
    uint16_t bits[8];
    if (vector && c + 8 <= width) {
        *(uint4 *)bits = *(const uint4 *)((const uint16_t *)row + c);
    } else {
#pragma unroll
        for (int e = 0; e < 8; ++e) bits[e] = c + e < width ? ((const uint16_t *)row)[c + e] : 0;
    }
    convert_8(x, bits, kind);
}

#endif
