/* Tiles with AVX2, FMA and F16C; empty on other architectures. */
#include "core/cpu/tile.h"

#if defined(__x86_64__)
#define ISA avx2
#include "core/cpu/tile.inc"
#endif
