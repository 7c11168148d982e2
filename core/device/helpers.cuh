/* What every device file uses: inline functions, addresses in shared memory, and the element types of the small kernels
   that serve every dtype. */
#ifndef FATTNI_CORE_DEVICE_HELPERS_H
#define FATTNI_CORE_DEVICE_HELPERS_H

#include <fattn/attention.h>

#include <stddef.h>
#include <stdint.h>

#define DEVICE static __device__ __forceinline__
#define ALL_LANES 0xffffffffu
#define LOG2E 1.4426950408889634f
#define LN2 0.6931471805599453f

/* 32-bit addresses, in the shared state space, of a member of the kernel's struct shared_memory, which starts at
   address `base`, and of element n of a member that is an array. */
#define MEMBER_ADDRESS(base, member) ((base) + (uint32_t)offsetof(shared_memory, member))
#define ELEMENT_ADDRESS(base, member, n)                                                                               \
    ((base) +                                                                                                          \
     ((uint32_t)offsetof(shared_memory, member) + (uint32_t)sizeof(((shared_memory *)0)->member[0]) * (uint32_t)(n)))

/* Where chunk `chunk` of 16 bytes lies in its row, in bytes, under the XOR swizzle of 16-bit tiles, which keeps equal
   chunks of eight rows in different banks; row8: the row modulo 8. In a panel of 64 columns this is the TMA unit's
   128-byte swizzle. */
DEVICE uint32_t swizzled_chunk(int chunk, int row8) { return (uint32_t)((chunk ^ row8) << 4); }

enum { KIND_F16, KIND_BF16, KIND_F32 };

#endif
