#ifndef PHILOX_HOST_H
#define PHILOX_HOST_H

#include "core/tensor/philox.h"

#ifdef __cplusplus
extern "C" {
#endif
/* core/tensor/philox.h as the CPU uses it: Random123. */
fattni_block philox_host(uint64_t seed, fattni_block counter);
fattni_block mask_philox_host(uint64_t seed, fattni_block counter);
#ifdef __cplusplus
}
#endif

#endif
