/* A common index over the elements of several strided tensors, for elementwise kernels. */
#ifndef FATTNI_CORE_CUDA_GRID_H
#define FATTNI_CORE_CUDA_GRID_H

#include "core/tensor/numeric.h"

enum { FATTNI_GRID_OPERANDS = 4, FATTNI_GRID_THREADS = 256 };

/* Row-major over shape[n]; strides in elements, 0 where an operand broadcasts. Dimensions of one element
   are removed, and neighbouring dimensions are merged when one stride covers both in every operand: when
   all operands are contiguous, n is 0 or 1 and the stride 1. */
typedef struct fattni_grid {
    int64_t count;
    int64_t shape[FATTN_MAX_DIMS + 1];
    int64_t stride[FATTN_MAX_DIMS + 1][FATTNI_GRID_OPERANDS];
    int32_t n, reserved;
} fattni_grid;

/* t[0], and operands that broadcast to it: trailing dimensions aligned, 1 or missing broadcasts. */
fattni_grid fattni_grid_of(const fattn_tensor *const *t, int operands);
/* Blocks of FATTNI_GRID_THREADS threads of `each` elements. */
int64_t fattni_grid_blocks(const fattni_grid *g, int each);

#ifdef __CUDACC__
/* The operands' offsets of element `at`; 32-bit divisions where they suffice. */
static __device__ inline void grid_offsets(const fattni_grid *g, int64_t at, int64_t offset[FATTNI_GRID_OPERANDS]) {
#pragma unroll
    for (int k = 0; k < FATTNI_GRID_OPERANDS; ++k) offset[k] = 0;
    const bool narrow = g->count <= 0x7fffffff;
    for (int d = g->n - 1; d >= 0; --d) {
        int64_t i = at;
        if (d > 0 && narrow) {
            const uint32_t q = (uint32_t)at / (uint32_t)g->shape[d];
            i = (uint32_t)at - q * (uint32_t)g->shape[d];
            at = q;
        } else if (d > 0) {
            i = at % g->shape[d];
            at /= g->shape[d];
        }
#pragma unroll
        for (int k = 0; k < FATTNI_GRID_OPERANDS; ++k) offset[k] += i * g->stride[d][k];
    }
}
#endif

#endif
