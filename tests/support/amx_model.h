/* The AMX tiles (core/cpu/product_amx.inc) compiled with models in C of the tile instructions and of AVX-512
   (avx512_model.h): the bits of a CPU with AMX, on any x86-64. */
#ifndef AMX_MODEL_H
#define AMX_MODEL_H

#include "core/cpu/tile.h"

#ifdef FATTNI_HAVE_NARROW_PRODUCTS
extern const fattni_cpu_kernels fattni_cpu_amx_model, fattni_cpu_amxfp16_model;

/* One product on memory without padding, c += a b (tile_narrow.inc), of BF16 and of F16 numbers. M, N: 16 or 32;
   K: 32, 64, ... */
void amx_model_product(int M, int N, int K, const uint16_t *a, const uint32_t *b, float *c);
void amxfp16_model_product(int M, int N, int K, const uint16_t *a, const uint32_t *b, float *c);
#endif

#endif
