/* The AMX tiles (core/cpu/product_amx.inc) compiled with a model in C of the tile instructions, for tests on machines
   that have AVX512-BF16 but not AMX. */
#ifndef AMX_MODEL_H
#define AMX_MODEL_H

#include "core/cpu/tile.h"

#ifdef FATTNI_HAVE_BF16_PRODUCTS
extern const fattni_cpu_kernels fattni_cpu_amx_model;

/* One product on memory without padding, c += a b (tile_bf16.inc), by the model. M, N: 16 or 32; K: 32, 64, ... */
void amx_model_product(int M, int N, int K, const uint16_t *a, const uint32_t *b, float *c);
#endif

#endif
