/* Pieces (see fattni_each) that are worth the host's widest vectors: one body, compiled for each
   instruction set. FATTNI_PIECES(f) makes f_by_isa[], indexed by enum fattni_isa, from a piece f that
   was defined as FATTNI_PIECE_BODY. */
#ifndef FATTNI_AUTOGRAD_OPS_ISA_CLONES_H
#define FATTNI_AUTOGRAD_OPS_ISA_CLONES_H

#include "autograd_c/ops/ops.h"

#if defined(__x86_64__) && defined(__GNUC__)
#define FATTNI_AVX2 __attribute__((target("avx2")))
#define FATTNI_AVX512 __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl")))
#else
#define FATTNI_AVX2
#define FATTNI_AVX512
#endif
#if defined(__GNUC__)
#define FATTNI_PIECE_BODY inline __attribute__((always_inline))
#else
#define FATTNI_PIECE_BODY inline
#endif

#define FATTNI_PIECE_FOR(f, isa, target)                                                           \
    target static void f##_##isa(void *const *p, const int64_t *step, int64_t n, const void *a) {  \
        f(p, step, n, a);                                                                          \
    }
#define FATTNI_PIECES_OF(f)                                                                        \
    FATTNI_PIECE_FOR(f, baseline, )                                                                \
    FATTNI_PIECE_FOR(f, avx2, FATTNI_AVX2)                                                         \
    FATTNI_PIECE_FOR(f, avx512, FATTNI_AVX512)                                                     \
    static const fattni_piece f##_by_isa[] = {                                                     \
        [FATTNI_ISA_BASELINE] = f##_baseline,                                                      \
        [FATTNI_ISA_AVX2] = f##_avx2,                                                              \
        [FATTNI_ISA_AVX512] = f##_avx512,                                                          \
    };
#define FATTNI_PIECES(f) FATTNI_PIECES_OF(f)

#endif
