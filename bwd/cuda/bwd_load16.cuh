/* Loads of 16-bit tiles for the kernels of mma.sync. Include after mma16_tile.cuh and the enumerators BM, BN, PITCH
   (columns of a tile) and THREADS. */
#ifndef FATTNI_BWD_CUDA_BWD_LOAD16_H
#define FATTNI_BWD_CUDA_BWD_LOAD16_H

#include "bwd/cuda/bwd_args.h"
#include "core/device/mma16_tile.cuh"

DEVICE const half_type *half_row_at(const fattni_view *v, const sequence *s, int head, int64_t row) {
    return (const half_type *)v->p + s->batch * v->b + head * v->h + row * v->row;
}
/* K and V of the key block at j0. */
DEVICE void load_keys(uint32_t k_tile, uint32_t v_tile, const fattni_attention_args *a, const sequence *s, int hk,
                      int j0) {
    load_tile(k_tile, PITCH, BN, THREADS, half_row_at(&a->k, s, hk, s->k0 + j0), a->k.row, s->Sk - j0, a->D,
              a->vector_qkv);
    load_tile(v_tile, PITCH, BN, THREADS, half_row_at(&a->v, s, hk, s->k0 + j0), a->v.row, s->Sk - j0, a->Dv,
              a->vector_qkv);
}

#endif
