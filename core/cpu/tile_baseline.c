/* Tiles with what every CPU of the architecture has: SSE2, NEON. */
#define ISA baseline
#include "core/cpu/tile.inc"
