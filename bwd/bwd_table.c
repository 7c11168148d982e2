/* Every backward kernel, best first. */
#include "kernel.h"

const fattni_kernel fattni_bwd_table[] = {{0}};
