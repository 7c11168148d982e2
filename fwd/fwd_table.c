/* Every forward kernel, best first. */
#include "kernel.h"

extern const fattni_kernel fattni_fwd_cpu, fattni_fwd_flash1;
extern const fattni_kernel fattni_fwd_standard;

const fattni_kernel *const fattni_fwd_table[] = {&fattni_fwd_cpu, &fattni_fwd_flash1,
                                                 &fattni_fwd_standard, NULL};
