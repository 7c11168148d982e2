/* What CUDA's runtime cannot do: the driver's functions that a context uses, found at run time, so that
   nothing is linked with the driver. */
#ifndef FATTNI_CORE_CUDA_DRIVER_H
#define FATTNI_CORE_CUDA_DRIVER_H

#include <cuda.h>

#define FATTNI_DRIVER_FUNCTIONS(X)               \
    X(get_current, cuCtxGetCurrent)              \
    X(push, cuCtxPushCurrent)                    \
    X(pop, cuCtxPopCurrent)                      \
    X(device_of_current, cuCtxGetDevice)         \
    X(device, cuDeviceGet)                       \
    X(retain, cuDevicePrimaryCtxRetain)          \
    X(encode, cuTensorMapEncodeTiled)

struct fattni_cuda_driver {
    CUcontext context; /* where everything of a fattn_ctx lives */
#define X(name, symbol) __typeof__(symbol) *name;
    FATTNI_DRIVER_FUNCTIONS(X)
#undef X
};

#endif
