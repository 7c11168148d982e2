/* All backward kernels, in order of preference. STANDARD on a GPU comes first: of AUTO it takes only calls
   that no fused kernel fits. */
#include "core/attention/kernel.h"
#include "core/base/with_cuda.h"

extern const fattni_kernel fattni_bwd_cpu, fattni_bwd_standard;
extern const fattni_kernel fattni_bwd_cuda, fattni_bwd_cuda_real, fattni_bwd_standard_cuda;

const fattni_kernel *const fattni_bwd_table[] = {
    &fattni_bwd_cpu,
    &fattni_bwd_standard,
    FATTNI_WITH_CUDA(&fattni_bwd_standard_cuda, &fattni_bwd_cuda, &fattni_bwd_cuda_real, ) NULL,
};
