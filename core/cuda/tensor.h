/* Copies, zeroes, random numbers and dropout masks on the device: host side and the kernels' arguments. */
#ifndef FATTNI_CORE_CUDA_TENSOR_H
#define FATTNI_CORE_CUDA_TENSOR_H

#include "core/cuda/grid.h"

#ifndef __CUDACC__
#include "core/base/device.h"
#include "core/base/internal.h"

/* Of fattni_device_ops (core/base/device.h). */
fattn_status fattni_cuda_copy(fattn_ctx *ctx, const fattn_tensor *dst, const fattn_tensor *src);
fattn_status fattni_cuda_copy_pairs(fattn_ctx *ctx, const fattni_copy_pair *pairs, int n);
/* The same, what consists of pieces of 16 bytes by kernels of at most so many blocks. */
fattn_status fattni_cuda_copy_pairs_on(fattn_ctx *ctx, const fattni_copy_pair *pairs, int n, int64_t blocks);
fattn_status fattni_cuda_add(fattn_ctx *ctx, const fattn_tensor *dst, const fattn_tensor *src);
fattn_status fattni_cuda_normal(fattn_ctx *ctx, const fattn_tensor *dst, double mean, double std, fattn_rng rng);
#endif

/* Operand 0 is written, operand 1 read. */
typedef struct fattni_copy_args {
    fattni_grid grid;
    void *to;
    const void *from;
    int32_t to_dtype, from_dtype;
    int32_t add, reserved; /* to += from */
} fattni_copy_args;

/* Copies of pieces of 16 bytes, which grids count and whose strides they have. Piece n of copy k is of the block
   first_block[k] and those after it. */
enum { FATTNI_COPIES = 12, FATTNI_COPY_PIECES = 4 /* of a thread */ };
typedef struct fattni_copies_args {
    fattni_grid grid[FATTNI_COPIES];
    void *to[FATTNI_COPIES];
    const void *from[FATTNI_COPIES];
    int64_t first_block[FATTNI_COPIES];
    int64_t blocks; /* in all; a CTA has some of them */
    int32_t n, reserved;
} fattni_copies_args;

/* Of one CTA: fattni_cuda_zero in recordings, and counters of a kernel that may start before they are zero
   (fattni_sm90_start). */
enum { FATTNI_ZERO_THREADS = 256 };
typedef struct fattni_zero_args {
    int32_t *counters;
    int32_t count;
} fattni_zero_args;

typedef struct fattni_normal_args {
    fattni_grid grid;
    void *to;
    int32_t dtype, reserved;
    double mean, std;
    fattn_rng rng;
} fattni_normal_args;

typedef struct fattni_mask_args {
    uint8_t *keep;
    int64_t stride[4];
    const int32_t *step;
    uint64_t seed;
    int64_t rows, columns, q_pos0, k_pos0;
    int64_t patches_q, patches_k; /* 16 x 16 patches of whole-sequence positions */
    int64_t planes;               /* B Hq */
    uint32_t stream, plane0, plane_heads, T;
    int32_t Hq, reserved;
} fattni_mask_args;

#endif
