/* Every forward kernel, best first. */
#include "kernel.h"

const fattni_kernel fattni_fwd_table[] = {{0}};
