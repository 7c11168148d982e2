/* Order between loads to registers and an arrival at an mbarrier. */
#ifndef FATTNI_CORE_PTX_AFTER_LOADS_H
#define FATTNI_CORE_PTX_AFTER_LOADS_H

#include <stdint.h>

/* `address`, made to depend on a register that was loaded: what uses it is issued when that load is over. An arrival
   alone does not wait for loads of its thread: while wgmma reads shared memory they take as long as its product, and
   what is loaded next may overwrite what they read. The grid's size in y is 1, which the compiler does not know. */
static __device__ __forceinline__ uint32_t after_load(uint32_t address, uint32_t loaded) {
    uint32_t same;
    asm("{.reg .b32 zero;\n"
        "mov.u32 zero, %%nctaid.y;\n"
        "sub.u32 zero, zero, 1;\n"
        "and.b32 zero, zero, %2;\n"
        "add.u32 %0, %1, zero;}"
        : "=r"(same)
        : "r"(address), "r"(loaded));
    return same;
}

#endif
