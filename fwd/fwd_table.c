/* Every forward kernel, best first. */
#include "core/attention/kernel.h"

extern const fattni_kernel fattni_fwd_cpu, fattni_fwd_flash1, fattni_fwd_standard;
#ifdef FATTNI_HAVE_CUDA
extern const fattni_kernel fattni_fwd_cuda, fattni_fwd_flash1_cuda, fattni_fwd_standard_cuda;
#endif

const fattni_kernel *const fattni_fwd_table[] = {
    &fattni_fwd_cpu,
    &fattni_fwd_flash1,
    &fattni_fwd_standard,
#ifdef FATTNI_HAVE_CUDA
    &fattni_fwd_cuda,
    &fattni_fwd_flash1_cuda,
    &fattni_fwd_standard_cuda,
#endif
    NULL,
};
