/* Tiles with AVX-512 (F, BW, DQ, VL); empty on other architectures. */
#include "core/cpu/tile.h"

#if defined(__x86_64__)
#define ISA avx512
#include "core/cpu/tile.inc"
#endif
