/* A CTA, or a cluster of CTAs, on the host: device threads are fibers that run until they wait for each other; warps
   run in random order and with random pauses. And host versions of the CUDA built-ins that the kernels use. */
#ifndef EMULATED_MACHINE_H
#define EMULATED_MACHINE_H

#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <deque>
#include <functional>

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include "races.h"

#undef __align__
#undef __cluster_dims__
#undef __global__
#undef __grid_constant__
#undef __launch_bounds__
#undef __shared__
#define __align__(n)
#define __cluster_dims__(...)
#define __noinline__
#define __global__
#define __grid_constant__
#define __launch_bounds__(...)
#define __shared__ __thread /* a CTA is a thread of the host */

typedef struct index1 {
    unsigned x;
} index1;
extern __thread index1 threadIdx, blockIdx;
extern index1 gridDim;
extern __thread unsigned char memory[]; /* shared memory; its addresses are offsets */
#define SHARED_MEMORY memory
enum { MEMORY_BYTES = 227 * 1024, MOST_THREADS = 1024 };

/* Runs `kernel` as a cluster of `ctas` CTAs, from blockIdx `block` on, of `threads` threads each. Shared memory starts
   as 0xff in all bytes, which are NaN. Exits with an error message on a deadlock. `seed` chooses the order of warps,
   together with the environment's EMULATED_SEED, a number. */
void machine_run(int block, int ctas, int threads, unsigned seed, void (*kernel)(void));

/* Before each CTA's threads start: makes what they share, though each has its part of it. Gives 0. */
int machine_prepare(void (*work)(void));

int machine_threads(void);
void machine_yield(void);
int machine_coin(void);                                      /* 0 or 1, at random */
void machine_wait(const volatile int8_t *phase, int8_t old); /* while *phase is `old` */
void machine_fail(const char *why);
/* Barriers: of all lanes of the calling warp; a named one of `threads` threads; of all threads of the cluster. */
void machine_meet_warp(void);
void machine_arrive(int barrier, int threads);
void machine_meet(int barrier, int threads);
void machine_meet_cluster(void);
/* Shared memory of the cluster's CTA `rank`. */
unsigned char *machine_memory(int rank);
/* For asynchronous copies: does `work` some time later, in any order, whichever CTA runs then. */
void machine_later(std::function<void()> work);

/* For a race detector: the asynchronous proxies of the calling thread's warp, of shared and of global memory. What
   happens before an event: for threads, and as far as fences reach for these. */
enum { OF_SHARED, OF_GLOBAL, PROXIES };
typedef struct machine_event {
    char for_threads, for_proxies[PROXIES];
} machine_event;
void machine_release(machine_event *event);
void machine_acquire(machine_event *event);
/* The proxy sees what the thread has seen; the thread waits for what the proxies have done. */
void machine_fence_proxy(int proxy);
void machine_wait_for_proxies(void);
/* Between these two the thread is a proxy. */
void machine_enter_proxy(int proxy);
void machine_leave_proxy(void);
/* A proxy reads or writes memory; multiples of 16 bytes. */
void machine_proxy_reads(int proxy, const void *from, size_t bytes);
void machine_proxy_writes(int proxy, void *to, size_t bytes);

/* What lanes of a warp give each other: each fills its part, then all meet and read, until their next meeting. */
typedef struct warp_buffer {
    alignas(16) unsigned char bytes[32 * 48];
} warp_buffer;
void *machine_warp_buffer(void);
/* Each lane gives an x and gets those of all lanes, until its next meeting. */
template <class T> static inline const T *machine_gather(const T *x) {
    static_assert(32 * sizeof(T) <= sizeof(warp_buffer), "of 32 lanes");
    T *const all = (T *)machine_warp_buffer();
    all[threadIdx.x % 32] = *x;
    machine_meet_warp();
    return all;
}

static inline int min(int a, int b) { return a < b ? a : b; }
static inline int max(int a, int b) { return a > b ? a : b; }
static inline float __fdividef(float a, float b) { return a / b; }
static inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
template <class T> static inline T load_atomic(const T *p) {
    T x;
    __atomic_load(p, &x, __ATOMIC_RELAXED);
    return x;
}
template <class T> static inline void add_atomic(T *p, T x) { /* one thread runs at a time */
    x += load_atomic(p);
    __atomic_store(p, &x, __ATOMIC_RELAXED);
}
static inline void atomicAdd(float *p, float x) { add_atomic(p, x); }
static inline int atomicOr(int *p, int x) { return __atomic_fetch_or(p, x, __ATOMIC_RELAXED); }
static inline int atomicAdd(int *p, int x) { return __atomic_fetch_add(p, x, __ATOMIC_RELAXED); }
static inline int __float_as_int(float x) {
    int bits;
    memcpy(&bits, &x, 4);
    return bits;
}
static inline uint32_t __float_as_uint(float x) { return (uint32_t)__float_as_int(x); }
static inline float __int_as_float(int bits) {
    float x;
    memcpy(&x, &bits, 4);
    return x;
}
/* Byte n of the result is byte (selector >> 4 n) % 8 of y above x. */
static inline uint32_t __byte_perm(uint32_t x, uint32_t y, uint32_t selector) {
    const uint64_t both = (uint64_t)y << 32 | x;
    uint32_t r = 0;
    for (int n = 0; n < 4; ++n) r |= (uint32_t)(both >> 8 * (selector >> 4 * n & 7) & 0xff) << 8 * n;
    return r;
}
static inline float __uint_as_float(uint32_t bits) { return __int_as_float((int)bits); }
static inline int __vimax3_s32(int a, int b, int c) { return max(max(a, b), c); }
static inline uint32_t __vimax3_u32(uint32_t a, uint32_t b, uint32_t c) {
    const uint32_t d = a > b ? a : b;
    return d > c ? d : c;
}
static inline float __fmul_rn(float a, float b) { return a * b; }
static inline double __dmul_rn(double a, double b) { return a * b; }
static inline void __syncthreads(void) { machine_meet(0, machine_threads()); }
static inline UNSEEN int __syncthreads_or(int x) {
    static thread_local int any, calls;
    if (calls++ % machine_threads() == 0) any = 0;
    any |= x != 0;
    __syncthreads();
    const int result = any;
    __syncthreads(); /* all have read it */
    return result;
}
static inline void __syncwarp(void) { machine_meet_warp(); }
static inline void __threadfence(void) { races_fence(); }
static inline void __threadfence_block(void) { races_fence(); }
static inline void __stcg(float4 *p, float4 x) { *p = x; }
template <class T> static inline T __ldcg(const T *p) { return *p; }
static inline uint32_t __shfl_sync(uint32_t, uint32_t x, int lane, int width = 32) {
    return machine_gather(&x)[(int)(threadIdx.x % 32) / width * width + lane % width];
}
static inline int __shfl_sync(uint32_t, int x, int lane, int width = 32) {
    return (int)__shfl_sync(0, (uint32_t)x, lane, width);
}
static inline float __shfl_sync(uint32_t, float x, int lane, int width = 32) {
    return __int_as_float((int)__shfl_sync(0, (uint32_t)__float_as_int(x), lane, width));
}
static inline uint32_t __shfl_xor_sync(uint32_t, uint32_t x, int mask) {
    return __shfl_sync(0, x, (int)(threadIdx.x % 32) ^ mask);
}
static inline double __shfl_xor_sync(uint32_t, double x, int mask) {
    return machine_gather(&x)[(int)(threadIdx.x % 32) ^ mask];
}
static inline float __shfl_xor_sync(uint32_t, float x, int mask) {
    return __int_as_float((int)__shfl_xor_sync(0, (uint32_t)__float_as_int(x), mask));
}
static inline uint32_t __ballot_sync(uint32_t, int x) {
    const int *const all = machine_gather(&x);
    uint32_t bits = 0;
    for (int lane = 0; lane < 32; ++lane) bits |= (uint32_t)(all[lane] != 0) << lane;
    return bits;
}
static inline int __popc(uint32_t x) { return __builtin_popcount(x); }
static inline int __any_sync(uint32_t, int x) {
    const int *const all = machine_gather(&x);
    int any = 0;
    for (int lane = 0; lane < 32; ++lane) any |= all[lane] != 0;
    return any;
}

/* cp.async: takes effect at once, or not before its thread waits for it. */
#define FATTNI_CORE_PTX_CP_ASYNC_H
typedef struct pending_copy {
    uint32_t to;
    const void *from;
    int width, bytes, group;
} pending_copy;
static thread_local std::deque<pending_copy> copies_of_thread[MOST_THREADS];
static thread_local int copy_groups[MOST_THREADS]; /* committed by each thread */
static const int copies_prepared = machine_prepare([] { copies_of_thread[0].clear(); });
static inline void finish_copy(const pending_copy *c) {
    memset(memory + c->to, 0, (size_t)c->width);
    memcpy(memory + c->to, c->from, (size_t)c->bytes);
}
static inline void start_copy(uint32_t to, const void *from, int width, int bytes) {
    const pending_copy c = {to, from, width, bytes, copy_groups[threadIdx.x]};
    if (((uintptr_t)from | to) % (unsigned)width) machine_fail("cp.async is not aligned");
    if (machine_coin())
        finish_copy(&c);
    else
        copies_of_thread[threadIdx.x].push_back(c);
}
static inline void cp_async_16(uint32_t to, const void *from, int bytes) { start_copy(to, from, 16, bytes); }
static inline void cp_async_4(uint32_t to, const void *from, int bytes) { start_copy(to, from, 4, bytes); }
static inline void cp_async_commit(void) { ++copy_groups[threadIdx.x]; }
static inline void finish_copies(void) { /* of this thread */
    std::deque<pending_copy> *const queue = &copies_of_thread[threadIdx.x];
    for (; !queue->empty(); queue->pop_front()) finish_copy(&queue->front());
}
static inline void cp_async_wait(int left) {
    std::deque<pending_copy> *const queue = &copies_of_thread[threadIdx.x];
    for (; !queue->empty() && queue->front().group < copy_groups[threadIdx.x] - left; queue->pop_front())
        finish_copy(&queue->front());
}

#endif
