/* Loads of data that a CTA reads once: past L1, in lines of L2 (PTX ISA, "ld"). Volatile, so that loads are issued in
   the order of the code. */
#ifndef FATTNI_CORE_PTX_LOAD_ONCE_H
#define FATTNI_CORE_PTX_LOAD_ONCE_H

#include <stdint.h>

static __device__ __forceinline__ void load_once_4(uint32_t x[4], const void *from) {
    asm volatile("ld.global.L1::no_allocate.L2::128B.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                 : "l"(from));
}
/* Starts to load the line of 128 bytes that `address` is in into L2. */
static __device__ __forceinline__ void prefetch_line(const void *address) {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(address) : "memory");
}
/* grid_dependency_wait after `address`, which is not 0, has been computed: ptxas moves arithmetic past the wait. */
static __device__ __forceinline__ void grid_dependency_wait_after(uint64_t address) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.u64 p, %0, 0;\n@p griddepcontrol.wait;\n}" ::"l"(address) : "memory");
}

#endif
