/* Which instruction sets this machine can run. */
#if defined(__linux__)
#define _GNU_SOURCE /* syscall */
#endif
#include "core/base/internal.h"

#if defined(__x86_64__) && defined(__GNUC__)
#include <cpuid.h>
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

/* Conversions of halves: not a name that every compiler's builtin knows. */
static bool has_f16c(void) {
    unsigned a, b, c, d;
    return __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C);
}

#ifdef FATTNI_HAVE_NARROW_PRODUCTS /* the compiler knows AVX512-BF16 and AMX */
/* These and AMX-FP16 are too new for all compilers to name them: bits of cpuid's leaf 7. */
static bool has_avx512bf16(void) {
    unsigned a, b, c, d;
    return __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a >> 5 & 1);
}
static bool has_amxfp16(void) { /* beside AMX */
    unsigned a, b, c, d;
    return __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a >> 21 & 1);
}
/* One VDPBF16PS a cycle, which is what two FMAs of F32 do: Intel's cores have as many of these. */
static bool gains_by_avx512bf16(void) { return __builtin_cpu_is("amd"); }

/* The operating system must save the tiles, bits 17 and 18 of XCR0, which exists when AVX does. */
static bool has_amx(void) {
    unsigned a, b, c, d, low, high;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || !(d >> 22 & 1) || !(d >> 24 & 1)) return false;
    __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return (low >> 17 & 3) == 3;
}
#endif
#endif

/* Linux 5.16 and later lets a process use tiles when it has asked: arch_prctl(ARCH_REQ_XCOMP_PERM, 18). All threads
   may then, and asking again is allowed. A refusal: some thread's sigaltstack is too small for the tiles. */
bool fattni_allow_amx(void) {
#if defined(__x86_64__) && defined(__linux__)
    return syscall(SYS_arch_prctl, 0x1023, 18) == 0;
#else
    return false;
#endif
}

int fattni_cpu_isa(void) {
#if defined(__x86_64__) && defined(__GNUC__)
    /* The builtins ask cpuid and the operating system's saved state, once per process. */
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512vl")) {
#ifdef FATTNI_HAVE_NARROW_PRODUCTS
        if (has_avx512bf16() && has_amx()) return has_amxfp16() ? FATTNI_ISA_AMXFP16 : FATTNI_ISA_AMX;
        if (has_avx512bf16() && gains_by_avx512bf16()) return FATTNI_ISA_AVX512BF16;
#endif
        return FATTNI_ISA_AVX512;
    }
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c()) return FATTNI_ISA_AVX2;
#endif
    return FATTNI_ISA_BASELINE;
}

bool fattni_cpu_is_intel(void) {
#if defined(__x86_64__) && defined(__GNUC__)
    __builtin_cpu_init();
    return __builtin_cpu_is("intel");
#else
    return false;
#endif
}

const char *fattni_isa_name(int isa) {
    switch (isa) {
    case FATTNI_ISA_AMXFP16: return "amxfp16";
    case FATTNI_ISA_AMX: return "amx";
    case FATTNI_ISA_AVX512BF16: return "avx512bf16";
    case FATTNI_ISA_AVX512: return "avx512";
    case FATTNI_ISA_AVX2: return "avx2";
    default: return "baseline";
    }
}
