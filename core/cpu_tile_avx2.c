/* Tiles with AVX2 and FMA; empty on other architectures. */
#include "cpu_tile.h"

#if defined(__x86_64__)
#define ISA "avx2"
#define TABLE fattni_cpu_avx2
#define VECTOR_BYTES 32
#include "cpu_tile.inc"
#endif
