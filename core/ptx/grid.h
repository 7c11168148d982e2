/* Programmatic dependent launch: consecutive kernels of a stream that overlap (PTX ISA, "griddepcontrol"). From sm_90
   on. */
#ifndef FATTNI_CORE_PTX_GRID_H
#define FATTNI_CORE_PTX_GRID_H

/* Waits until the stream's previous kernel has ended and its writes are visible. A kernel launched by
   fattni_cuda_start must call it before it reads or writes memory; in others it returns at once. Before sm_90 kernels
   do not overlap. */
static __device__ __forceinline__ void grid_dependency_wait(void) {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
/* Lets the stream's next kernel start, as soon as all CTAs of this one have called it and there is room. */
static __device__ __forceinline__ void grid_dependents_start(void) {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");
#endif
}
/* What a kernel launched by fattni_cuda_start begins with. */
static __device__ __forceinline__ void begin_grid(void) {
    grid_dependents_start();
    grid_dependency_wait();
}

#endif
