/* Every forward kernel, best first. */
#include "kernel.h"

const fattni_kernel *const fattni_fwd_table[] = {NULL};
