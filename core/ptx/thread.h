/* threadIdx.x, read where it is needed: what is computed from it is not kept in registers in between. */
#ifndef FATTNI_CORE_PTX_THREAD_H
#define FATTNI_CORE_PTX_THREAD_H

static __device__ __forceinline__ int thread_again(void) {
    int x;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(x));
    return x;
}

#endif
