#ifndef PHILOX_HOST_H
#define PHILOX_HOST_H

#include "core/tensor/philox.h"

/* core/tensor/philox.h as the CPU uses it: Random123. */
#ifdef __cplusplus
extern "C"
#endif
    fattni_block
    philox_host(uint64_t seed, fattni_block counter);

#endif
