/* Elements of any floating dtype, and sums over a block, for kernels that are not tiled. */
#ifndef FATTNI_CORE_DEVICE_ANY_DTYPE_H
#define FATTNI_CORE_DEVICE_ANY_DTYPE_H

#include "core/attention/o_rest.h"
#include "core/device/sequence.cuh"
#include "core/ptx/grid.h"
#include "core/ptx/mma.h"

#include <fattn/attention.h>

#include <cuda_bf16.h>
#include <cuda_fp16.h>

DEVICE float load_f32(const void *p, int32_t dtype, int64_t i) {
    switch (dtype) {
    case FATTN_F32: return ((const float *)p)[i];
    case FATTN_BF16: return __bfloat162float(((const __nv_bfloat16 *)p)[i]);
    case FATTN_F16: return __half2float(((const __half *)p)[i]);
    default: return (float)((const double *)p)[i];
    }
}
DEVICE double load_f64(const void *p, int32_t dtype, int64_t i) {
    return dtype == FATTN_F64 ? ((const double *)p)[i] : (double)load_f32(p, dtype, i);
}
/* A double kernel writes F64, a float kernel the others. */
DEVICE void store_f32(void *p, int32_t dtype, int64_t i, float x) {
    switch (dtype) {
    case FATTN_F32: ((float *)p)[i] = x; break;
    case FATTN_BF16: ((__nv_bfloat16 *)p)[i] = __float2bfloat16_rn(x); break;
    default: ((__half *)p)[i] = __float2half_rn(x);
    }
}
DEVICE void store_f64(void *p, int32_t, int64_t i, double x) { ((double *)p)[i] = x; }

/* What rounding to F16 or BF16 takes off x (o_rest.h). */
DEVICE int8_t o_rest_of(float x, int32_t dtype) {
    const float rounded =
        dtype == FATTN_BF16 ? __bfloat162float(__float2bfloat16_rn(x)) : __half2float(__float2half_rn(x));
    return (int8_t)fattni_o_rest(__float_as_uint(x), __float_as_uint(rounded),
                                 dtype == FATTN_BF16 ? FATTNI_O_REST_BF16 : FATTNI_O_REST_F16);
}

/* x y, rounded: not fused with the subtraction of a maximum, which has been rounded. */
DEVICE float product_f32(float x, float y) { return __fmul_rn(x, y); }
DEVICE double product_f64(double x, double y) { return __dmul_rn(x, y); }
DEVICE float exp2_f32(float x) { return exp2_approx(x); }
DEVICE double exp2_f64(double x) { return exp2(x); }

/* 1/x within two units of the last place; 0 beyond 2^126. */
DEVICE float inverse_f32(float x) { return __fdividef(1.0f, x); }
DEVICE double inverse_f64(double x) { return 1.0 / x; }

enum { ROW_THREADS = 256 };

/* Over a block of ROW_THREADS, in one order; every thread gets the result. A NaN is lost in a
   maximum, not in a sum. */
#define BODY "core/device/block.inc"
#include "core/device/for_each_real.inc"

#endif
