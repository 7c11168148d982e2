/* The forward kernels of this build, from fwd_kernels.def: CMake writes the names of those that it compiles. */
#include "core/cuda/kernels.h"

#define K(name) extern const fattni_cuda_kernel name##_description;
#include "fwd_kernel_names.def"
#undef K

const fattni_cuda_kernel *const fattni_fwd_cuda_kernels[] = {
#define K(name) &name##_description,
#include "fwd_kernel_names.def"
#undef K
    NULL};
