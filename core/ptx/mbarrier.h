/* mbarriers, in shared memory, which count arrivals and transferred bytes (PTX ISA, "mbarrier"), and named barriers
   ("barrier"). An mbarrier completes one phase after the other; a wait is for the phase of a given parity, and a wait
   for parity 1 on a new mbarrier returns at once. Byte counts and clusters need sm_90, the rest sm_80. */
#ifndef FATTNI_CORE_PTX_MBARRIER_H
#define FATTNI_CORE_PTX_MBARRIER_H

#include <stdint.h>

/* In builds with FATTN_DELAYS every arrival and every wait takes a random time, up to 2 us, so that tests find missing
   synchronisation. Without a branch, which would change the code around it. */
static __device__ __forceinline__ void random_delay(void) {
#ifdef FATTN_DELAYS
    const uint32_t x = ((uint32_t)clock64() ^ threadIdx.x / 32 * 0x9E3779B9u ^ blockIdx.x) * 2654435761u;
    asm volatile("{.reg .pred p;\n"
                 "setp.eq.u32 p, %0, 0;\n"
                 "@p nanosleep.u32 %1;}" ::"r"(x >> 29),
                 "r"(x >> 17 & 2047)
                 : "memory");
#endif
}

static __device__ __forceinline__ void mbarrier_init(uint32_t bar, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(arrivals) : "memory");
}
/* Makes initialised mbarriers visible to the async proxy and to the cluster; a CTA or cluster barrier must follow. */
static __device__ __forceinline__ void mbarrier_init_fence(void) {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
static __device__ __forceinline__ void mbarrier_arrive(uint32_t bar) {
    random_delay();
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(bar) : "memory");
}
/* Arrives if `condition`, without a branch: after a divergent one at the end of a loop the compiler no longer assumes
   that the warp has converged. */
static __device__ __forceinline__ void mbarrier_arrive_if(uint32_t bar, int condition) {
    random_delay();
    asm volatile("{.reg .pred p;\n"
                 "setp.ne.s32 p, %1, 0;\n"
                 "@p mbarrier.arrive.shared::cta.b64 _, [%0];}" ::"r"(bar),
                 "r"(condition)
                 : "memory");
}
/* Arrives, and makes the phase wait for `bytes` of bulk copies, too (expect_tx). */
static __device__ __forceinline__ void mbarrier_expect(uint32_t bar, int bytes) {
    random_delay();
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes) : "memory");
}
/* Sleeps until the phase is complete, or for about 10 ms: gives whether it is. Without this time limit, in ns, the
   hardware polls every 40 cycles, which takes a tenth of the issue slots from the other warps of the scheduler. */
static __device__ __forceinline__ int mbarrier_try(uint32_t bar, uint32_t parity) {
    int done;
    asm volatile("{.reg .pred p;\n"
                 "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2, %3;\n"
                 "selp.b32 %0, 1, 0, p;}"
                 : "=r"(done)
                 : "r"(bar), "r"(parity), "r"(10000000)
                 : "memory");
    return done;
}
/* Whether the phase is complete, without waiting. */
static __device__ __forceinline__ int mbarrier_test(uint32_t bar, uint32_t parity) {
    int done;
    asm volatile("{.reg .pred p;\n"
                 "mbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2;\n"
                 "selp.b32 %0, 1, 0, p;}"
                 : "=r"(done)
                 : "r"(bar), "r"(parity)
                 : "memory");
    return done;
}
static __device__ __forceinline__ void mbarrier_wait(uint32_t bar, uint32_t parity) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
    while (!mbarrier_try(bar, parity)) {}
#else /* no such wait: who asks again and again takes issue slots, too */
    while (!mbarrier_test(bar, parity)) __nanosleep(20);
#endif
    random_delay();
}

/* Named barriers 1..15 of `threads` threads, a multiple of 32: sync arrives and waits, arrive does not wait. */
static __device__ __forceinline__ void named_barrier_sync(int id, int threads) {
    random_delay();
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
static __device__ __forceinline__ void named_barrier_arrive(int id, int threads) {
    random_delay();
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

#endif
