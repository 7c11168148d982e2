/* Stores to global memory (PTX ISA, "st"). */
#ifndef FATTNI_CORE_PTX_GLOBAL_H
#define FATTNI_CORE_PTX_GLOBAL_H

#include <stdint.h>

/* Stores 16 bytes if `condition`: one predicated instruction. After a branch around a store ptxas assumes divergence
   and does not overlap it with shuffles and other stores. */
static __device__ __forceinline__ void store_global_4_if(void *to, const uint32_t x[4], int condition) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.s32 p, %5, 0;\n@p st.global.v4.b32 [%0], {%1, %2, %3, %4};\n}" ::"l"(to),
                 "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3]), "r"(condition)
                 : "memory");
}

/* The same of 8 bytes. */
static __device__ __forceinline__ void store_global_2_if(void *to, uint2 x, int condition) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.s32 p, %3, 0;\n@p st.global.v2.b32 [%0], {%1, %2};\n}" ::"l"(to), "r"(x.x),
                 "r"(x.y), "r"(condition)
                 : "memory");
}

#endif
