/* Every backward kernel, best first. */
#include "kernel.h"

const fattni_kernel *const fattni_bwd_table[] = {NULL};
