/* Every device of this build. */
#include "core/base/device.h"
#include "core/base/with_cuda.h"

extern const fattni_device_ops fattni_cpu_device, fattni_cuda_device;

static const fattni_device_ops *const devices[] = {[FATTN_CPU] = &fattni_cpu_device,
                                                   FATTNI_WITH_CUDA([FATTN_CUDA] = &fattni_cuda_device)};

const fattni_device_ops *fattni_device_ops_of(fattn_device device) {
    const size_t n = (size_t)device;
    return n < sizeof devices / sizeof devices[0] ? devices[n] : NULL;
}
