/* Which instruction sets this machine can run. */
#include "core/base/internal.h"

#if defined(__x86_64__) && defined(__GNUC__)
#include <cpuid.h>

/* Conversions of halves: not a name that every compiler's builtin knows. */
static bool has_f16c(void) {
    unsigned a, b, c, d;
    return __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C);
}
#endif

int fattni_cpu_isa(void) {
#if defined(__x86_64__) && defined(__GNUC__)
    /* The builtins ask cpuid and the operating system's saved state, once per process. */
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512vl"))
        return FATTNI_ISA_AVX512;
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c()) return FATTNI_ISA_AVX2;
#endif
    return FATTNI_ISA_BASELINE;
}

const char *fattni_isa_name(int isa) {
    switch (isa) {
    case FATTNI_ISA_AVX512: return "avx512";
    case FATTNI_ISA_AVX2: return "avx2";
    default: return "baseline";
    }
}
