/* The only check whether this build includes CUDA code: tables of devices and kernels wrap their rows for a GPU in
   FATTNI_WITH_CUDA(...), which expands to its arguments or to nothing. */
#ifndef FATTNI_CORE_BASE_WITH_CUDA_H
#define FATTNI_CORE_BASE_WITH_CUDA_H

#ifdef FATTNI_HAVE_CUDA
#define FATTNI_WITH_CUDA(...) __VA_ARGS__
#else
#define FATTNI_WITH_CUDA(...)
#endif

#endif
