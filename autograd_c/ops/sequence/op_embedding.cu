/* Rows of a table on the device; see op_embedding.c. The host cannot check ids without waiting
   for the stream: an id outside the table gives a row of NaN, and no gradient. */
#include "autograd_c/ops/op_cuda.h"

#include "core/device/any_dtype.cuh"

/* With 32 bits where they suffice, which takes a fifth of the time. */
DEVICE int64_t quotient(int64_t x, int64_t y) { return (x | y) >> 32 ? x / y : (int64_t)((uint32_t)x / (uint32_t)y); }

DEVICE int32_t id_of(const fattni_embedding_args *a, int64_t r) {
    const int64_t row = quotient(r, a->id_columns);
    return a->id[walk_offset(&a->ids, row) + (r - row * a->id_columns) * a->id_step];
}

/* dtable += dy in F32, one thread per four elements, in no particular order. */
extern "C" __global__ void __launch_bounds__(ROW_THREADS)
    fattn_embedding_add4(const __grid_constant__ fattni_embedding_args a) {
    begin_grid();
    const int64_t n = ((int64_t)blockIdx.x * ROW_THREADS + threadIdx.x) * 4;
    if (n >= a.R * a.C) return;
    const int64_t r = quotient(n, a.C), i = n - r * a.C, row = walk_offset(&a.out, r) + i;
    float x[4];
    if (a.rows.dtype == FATTN_F32) {
        *(float4 *)x = *(const float4 *)((const float *)a.rows.p + row);
    } else {
        const uint2 both = *(const uint2 *)((const uint16_t *)a.rows.p + row);
        const uint32_t pair[2] = {both.x, both.y};
#pragma unroll
        for (int e = 0; e < 4; ++e) x[e] = load_f32(pair, a.rows.dtype, e);
    }
    const int32_t id = id_of(&a, r);
    if (id >= 0 && id < a.V) reduce_add_4((float *)a.entries.p + walk_offset(&a.table, id) + i, x);
}

#define BODY "autograd_c/ops/sequence/op_embedding_cuda.inc"
#include "core/device/for_each_real.inc"
