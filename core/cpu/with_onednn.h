/* The only check whether this build includes oneDNN: the tables of libraries for products of BF16 and F32 matrices
   (core/cpu/gemm_bf16.c, core/cpu/gemm_cpu.c) wrap oneDNN's row in FATTNI_WITH_ONEDNN(...), which expands to its
   arguments or to nothing. */
#ifndef FATTNI_CORE_CPU_WITH_ONEDNN_H
#define FATTNI_CORE_CPU_WITH_ONEDNN_H

#ifdef FATTNI_HAVE_ONEDNN
#define FATTNI_WITH_ONEDNN(...) __VA_ARGS__
#else
#define FATTNI_WITH_ONEDNN(...)
#endif

#endif
