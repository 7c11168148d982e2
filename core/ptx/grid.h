/* Kernels of a stream that overlap (PTX ISA, griddepcontrol; CUDA's "programmatic dependent launch"), from sm_90 on. */
#ifndef FATTNI_CORE_PTX_GRID_H
#define FATTNI_CORE_PTX_GRID_H

/* Until the kernel before, on the stream, has ended and what it wrote is to be seen: what one does first that
   fattni_cuda_start_early started. In others, and before sm_90, that is so from the beginning. */
static __device__ __forceinline__ void await_last_grid(void) {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

#endif
