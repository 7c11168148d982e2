/* Every backward kernel, best first. */
#include "core/attention/kernel.h"

extern const fattni_kernel fattni_bwd_cpu, fattni_bwd_standard;
#ifdef FATTNI_HAVE_CUDA
extern const fattni_kernel fattni_bwd_cuda, fattni_bwd_cuda_simt, fattni_bwd_standard_cuda;
#endif

const fattni_kernel *const fattni_bwd_table[] = {
    &fattni_bwd_cpu,
    &fattni_bwd_standard,
#ifdef FATTNI_HAVE_CUDA
    &fattni_bwd_cuda,
    &fattni_bwd_cuda_simt,
    &fattni_bwd_standard_cuda,
#endif
    NULL,
};
