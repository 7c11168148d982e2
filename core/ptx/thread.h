/* threadIdx.x, read again here: so the compiler computes what depends on it anew instead of keeping it in registers. */
#ifndef FATTNI_CORE_PTX_THREAD_H
#define FATTNI_CORE_PTX_THREAD_H

static __device__ __forceinline__ int reload_thread_index(void) {
    int x;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(x));
    return x;
}

#endif
