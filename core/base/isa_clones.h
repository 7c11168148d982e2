/* Code on the CPU that is worth the widest vectors: one function, cloned for each instruction set of core/base/isa.h.
   FATTNI_TASKS_BY_ISA(f) makes f_by_isa[], indexed by enum fattni_isa, from a task (fattni_task) f that was defined as
   `static FATTNI_CLONED void f(...)`; FATTNI_CLONES does so from any function without a result. What they call is
   FATTNI_CLONED, too. Compilers do not reorder sums: a sum has partial ones side by side, of a row FATTNI_LANES. */
#ifndef FATTNI_CORE_BASE_ISA_CLONES_H
#define FATTNI_CORE_BASE_ISA_CLONES_H

#include "core/base/internal.h"
#include "core/base/isa.h"

#if defined(__GNUC__)
#define FATTNI_CLONED inline __attribute__((always_inline))
#else
#define FATTNI_CLONED inline
#endif

enum { FATTNI_LANES = 16 };
static FATTNI_CLONED double fattni_sum_of_lanes(double *lane) {
    for (int l = 0; l < 8; ++l) lane[l] += lane[l + 8];
    for (int l = 0; l < 4; ++l) lane[l] += lane[l + 4];
    return (lane[0] + lane[2]) + (lane[1] + lane[3]);
}

#define FATTNI_CLONE(f, isa, parameters, arguments)                                                                    \
    FATTNI_TARGET_##isa static void f##_##isa parameters { f arguments; }
#define FATTNI_CLONES(type, f, parameters, arguments)                                                                  \
    FATTNI_CLONE(f, baseline, parameters, arguments)                                                                   \
    FATTNI_CLONE(f, avx2, parameters, arguments)                                                                       \
    FATTNI_CLONE(f, avx512, parameters, arguments)                                                                     \
    static const type f##_by_isa[] = {                                                                                 \
        [FATTNI_ISA_BASELINE] = f##_baseline, [FATTNI_ISA_AVX2] = f##_avx2,  [FATTNI_ISA_AVX512] = f##_avx512,         \
        [FATTNI_ISA_AVX512BF16] = f##_avx512, [FATTNI_ISA_AMX] = f##_avx512, [FATTNI_ISA_AMXFP16] = f##_avx512};
#define FATTNI_TASKS_BY_ISA(f) FATTNI_CLONES(fattni_task, f, (void *arg, int64_t task, int thread), (arg, task, thread))

#endif
