/* Tiles with what every CPU of the architecture has: SSE2, NEON; and the choice among all. */
#if defined(__aarch64__)
#define ISA "neon"
#else
#define ISA "baseline"
#endif
#define TABLE fattni_cpu_baseline
#define VECTOR_BYTES 16
#include "core/cpu/tile.inc"

const fattni_cpu_kernels *fattni_cpu_kernels_of(const fattn_ctx *ctx, fattn_dtype dtype) {
    const int type = dtype == FATTN_F64;
#if defined(__x86_64__)
    if (ctx->isa >= FATTNI_ISA_AVX512) return &fattni_cpu_avx512[type];
    if (ctx->isa >= FATTNI_ISA_AVX2) return &fattni_cpu_avx2[type];
#else
    (void)ctx;
#endif
    return &fattni_cpu_baseline[type];
}
