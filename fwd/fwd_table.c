/* All forward kernels, in order of preference. STANDARD on a GPU comes first: of AUTO it takes only calls
   that no fused kernel fits. */
#include "core/attention/kernel.h"
#include "core/base/with_cuda.h"

extern const fattni_kernel fattni_fwd_fp8_cpu, fattni_fwd_parts, fattni_fwd_cpu, fattni_fwd_flash1, fattni_fwd_standard;
extern const fattni_kernel fattni_fwd_fp8_cuda, fattni_fwd_cuda, fattni_fwd_flash1_cuda, fattni_fwd_standard_cuda;

const fattni_kernel *const fattni_fwd_table[] = {
    &fattni_fwd_parts,
    &fattni_fwd_cpu,
    &fattni_fwd_flash1,
    &fattni_fwd_standard,
    &fattni_fwd_fp8_cpu, /* FATTN_FP8 */
    FATTNI_WITH_CUDA(&fattni_fwd_fp8_cuda, &fattni_fwd_standard_cuda, &fattni_fwd_cuda, &fattni_fwd_flash1_cuda, ) NULL,
};
