/* The instruction sets that code for the CPU is compiled for (enum fattni_isa,
   core/base/internal.h):

     baseline   what every CPU of the architecture has: SSE2, NEON; outside of x86-64 the only one
     avx2       AVX2; in files also FMA and F16C
     avx512     AVX-512 F, BW, DQ, VL
     avx512bf16, amx    the same, and the products of BF16 numbers of this name; in files only
     amxfp16    products of F16 numbers by AMX; in files only

   Code exists once for each in one of two ways. A file per set defines ISA as one of these names
   and includes a body (core/cpu/tile.inc); from the file's own name, tile_avx2.c,
   cmake/fattn_flags.cmake knows the compiler's flags. A clone per set of a function has an
   attribute instead (core/base/isa_clones.h). */
#ifndef FATTNI_CORE_BASE_ISA_H
#define FATTNI_CORE_BASE_ISA_H

/* Bytes of a vector register. A wider vector would be taken apart in memory, 27 times slower. */
#define FATTNI_VECTOR_BYTES_baseline 16
#define FATTNI_VECTOR_BYTES_avx2 32
#define FATTNI_VECTOR_BYTES_avx512 64
#define FATTNI_VECTOR_BYTES_avx512bf16 64
#define FATTNI_VECTOR_BYTES_amx 64
#define FATTNI_VECTOR_BYTES_amxfp16 64

/* The attribute of a clone. Files with clones are compiled without contraction: all give the
   same bits. */
#define FATTNI_TARGET_baseline
#if defined(__x86_64__) && defined(__GNUC__)
#define FATTNI_TARGET_avx2 __attribute__((target("avx2")))
#define FATTNI_TARGET_avx512 __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl")))
#else
#define FATTNI_TARGET_avx2
#define FATTNI_TARGET_avx512
#endif

/* prefix##name and "name", where name may be a macro. */
#define FATTNI_JOIN(prefix, name) FATTNI_JOIN_(prefix, name)
#define FATTNI_JOIN_(prefix, name) prefix##name
#define FATTNI_TEXT(name) FATTNI_TEXT_(name)
#define FATTNI_TEXT_(name) #name

#endif
