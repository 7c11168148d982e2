/* The host's Philox for philox.cu: Random123 and cuRAND cannot share a translation unit, both
   define mulhilo32. */
#include "philox_host.h"

fattni_block philox_host(uint64_t seed, fattni_block counter) { return fattni_philox(seed, counter); }
fattni_block mask_philox_host(uint64_t seed, fattni_block counter) { return fattni_mask_philox(seed, counter); }
