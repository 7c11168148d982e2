/* Loops (fattni_loop, ops.h) that are worth the widest vectors of the CPU: one function, cloned
   for each instruction set of core/cpu/isa.h. FATTNI_LOOPS_BY_ISA(f) makes f_by_isa[], indexed
   by enum fattni_isa, from a loop f that was defined as `static FATTNI_CLONED void f(...)`. */
#ifndef FATTNI_AUTOGRAD_OPS_ISA_CLONES_H
#define FATTNI_AUTOGRAD_OPS_ISA_CLONES_H

#include "autograd_c/ops/ops.h"
#include "core/cpu/isa.h"

#if defined(__GNUC__)
#define FATTNI_CLONED inline __attribute__((always_inline))
#else
#define FATTNI_CLONED inline
#endif

#define FATTNI_LOOP_CLONE(f, isa)                                                                                      \
    FATTNI_TARGET_##isa static void f##_##isa(void *const *p, const int64_t *step, int64_t n, const void *a) {         \
        f(p, step, n, a);                                                                                              \
    }
#define FATTNI_LOOP_CLONES(f)                                                                                          \
    FATTNI_LOOP_CLONE(f, baseline)                                                                                     \
    FATTNI_LOOP_CLONE(f, avx2)                                                                                         \
    FATTNI_LOOP_CLONE(f, avx512)                                                                                       \
    static const fattni_loop f##_by_isa[] = {                                                                          \
        [FATTNI_ISA_BASELINE] = f##_baseline, [FATTNI_ISA_AVX2] = f##_avx2,  [FATTNI_ISA_AVX512] = f##_avx512,         \
        [FATTNI_ISA_AVX512BF16] = f##_avx512, [FATTNI_ISA_AMX] = f##_avx512, [FATTNI_ISA_AMXFP16] = f##_avx512};
#define FATTNI_LOOPS_BY_ISA(f) FATTNI_LOOP_CLONES(f) /* so that f may be a macro */

#endif
