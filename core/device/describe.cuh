/* DESCRIBE_KERNEL(type of the kernel's argument, bytes of dynamic shared memory, CTAs of a cluster) is the last line of
   a kernel's file; DESCRIBE_KERNEL_THAT_WAITS of one that calls grid_dependency_wait. It defines <name>_description,
   which the host finds through the pass's list of kernels. The other fields come from the kernel's line in that list,
   by the macros of cmake/instance.cu.in. */
#ifndef FATTNI_CORE_DEVICE_DESCRIBE_H
#define FATTNI_CORE_DEVICE_DESCRIBE_H

#include "core/cuda/kernel.h"

/* The name of a kernel's dynamic shared memory. Kernels that are compiled together (fattn_bundles.cmake) would
   otherwise have one symbol in common, and each would be translated a little differently than alone, some with more
   spills. */
#ifndef SHARED_MEMORY
#define SHARED_MEMORY_OF_(name) name##_shared_memory
#define SHARED_MEMORY_OF(name) SHARED_MEMORY_OF_(name)
#define SHARED_MEMORY SHARED_MEMORY_OF(K_NAME)
#endif

#define DESCRIPTION_OF_(name) name##_description
#define DESCRIPTION_OF(name) DESCRIPTION_OF_(name)
#define TEXT_OF_(x) #x
#define TEXT_OF(x) TEXT_OF_(x)

#define DESCRIBE_(args, shared_bytes, ctas_of_cluster, waits)                                                          \
    extern "C" __attribute__((visibility("hidden"))) const fattni_cuda_kernel DESCRIPTION_OF(K_NAME) = {               \
        TEXT_OF(K_NAME),                                                                                               \
        (fattni_cuda_any)K_NAME,                                                                                       \
        sizeof(args),                                                                                                  \
        shared_bytes,                                                                                                  \
        K_ARCH,                                                                                                        \
        K_DTYPE,                                                                                                       \
        K_TF32,                                                                                                        \
        K_D,                                                                                                           \
        K_DV,                                                                                                          \
        K_VARIANT,                                                                                                     \
        K_BM,                                                                                                          \
        K_BN,                                                                                                          \
        32 * K_WARPS,                                                                                                  \
        ctas_of_cluster,                                                                                               \
        waits}
#define DESCRIBE_KERNEL(args, shared_bytes, ctas_of_cluster) DESCRIBE_(args, shared_bytes, ctas_of_cluster, 0)
#define DESCRIBE_KERNEL_THAT_WAITS(args, shared_bytes, ctas_of_cluster)                                                \
    DESCRIBE_(args, shared_bytes, ctas_of_cluster, 1)

#endif
