/* Every backward kernel, best first. */
#include "kernel.h"

extern const fattni_kernel fattni_bwd_cpu, fattni_bwd_standard;

const fattni_kernel *const fattni_bwd_table[] = {&fattni_bwd_cpu, &fattni_bwd_standard, NULL};
