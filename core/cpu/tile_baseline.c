/* Tiles with what every CPU of the architecture has: SSE2, NEON; and the choice among all. */
#define ISA baseline
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
