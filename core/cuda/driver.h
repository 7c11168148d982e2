/* The functions of the CUDA driver that a context uses because the runtime lacks them. They are looked up at run
   time, so that the library is not linked with the driver. */
#ifndef FATTNI_CORE_CUDA_DRIVER_H
#define FATTNI_CORE_CUDA_DRIVER_H

#include <cuda.h>

#define FATTNI_DRIVER_FUNCTIONS(X)                                                                                     \
    X(get_current, cuCtxGetCurrent)                                                                                    \
    X(push, cuCtxPushCurrent)                                                                                          \
    X(pop, cuCtxPopCurrent)                                                                                            \
    X(device_of_current, cuCtxGetDevice)                                                                               \
    X(device, cuDeviceGet)                                                                                             \
    X(retain, cuDevicePrimaryCtxRetain)                                                                                \
    X(attribute_of, cuPointerGetAttribute)                                                                             \
    X(encode, cuTensorMapEncodeTiled)

struct fattni_cuda_driver {
    CUcontext context; /* in which everything of a fattn_ctx is created */
#define X(name, symbol) __typeof__(symbol) *name;
    FATTNI_DRIVER_FUNCTIONS(X)
#undef X
};

#endif
