/* Tiles with AVX2 and FMA; empty on other architectures. */
#include "core/cpu/tile.h"

#if defined(__x86_64__)
#define ISA "avx2"
#define TABLE fattni_cpu_avx2
#define VECTOR_BYTES 32
#include "core/cpu/tile.inc"
#endif
