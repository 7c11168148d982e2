/* What every device file uses: inline functions, and element types of the small kernels that serve
   every dtype. */
#ifndef FATTNI_CORE_DEVICE_HELPERS_H
#define FATTNI_CORE_DEVICE_HELPERS_H

#include <fattn/attention.h>

#define DEVICE static __device__ __forceinline__

enum { KIND_F16, KIND_BF16, KIND_F32 };

#endif
