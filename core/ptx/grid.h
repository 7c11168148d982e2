/* Programmatic dependent launch: consecutive kernels of a stream that overlap (PTX ISA, "griddepcontrol"). From sm_90
   on. */
#ifndef FATTNI_CORE_PTX_GRID_H
#define FATTNI_CORE_PTX_GRID_H

/* Waits until the stream's previous kernel has ended and its writes are visible. A kernel launched by
   fattni_cuda_start_early must call it before it reads them; in others it returns at once. Before sm_90 kernels do not
   overlap. */
static __device__ __forceinline__ void grid_dependency_wait(void) {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

#endif
