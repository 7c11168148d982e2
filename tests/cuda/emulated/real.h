/* Stand-ins on the host for what the F32 and F64 kernels use of core/ptx/ and CUDA, beyond machine.h. Include before
   the kernel: it defines the include guards of the real wrappers. */
#ifndef EMULATED_REAL_H
#define EMULATED_REAL_H

#include "machine.h"

#define FATTNI_CORE_PTX_ACQUIRE_H
#define FATTNI_CORE_PTX_LDMATRIX_H
#define FATTNI_CORE_PTX_MBARRIER_H
#define FATTNI_CORE_PTX_MMA_H
#define FATTNI_SM80 1

static inline int load_acquire(const int32_t *p) {
    machine_yield();
    return *p;
}
static inline void add_release(int32_t *p, int x) { *p += x; }
static inline void named_barrier_sync(int id, int threads) { machine_meet(id, threads); }

static inline uint32_t shared_address(const void *p) { return (uint32_t)((const unsigned char *)p - memory); }
static inline double __ldg(const double *p) { return *p; }
static inline float __ldg(const float *p) { return *p; }
static inline void atomicAdd(double *p, double x) { *p += x; }
static inline void reduce_add(double *p, double x) { *p += x; }
static inline void reduce_add(float *p, float x) { *p += x; }
static inline void reduce_add_4(float *p, const float x[4]) {
    if ((uintptr_t)p % 16) machine_fail("a vector reduction is not aligned to 16 bytes");
    for (int e = 0; e < 4; ++e) p[e] += x[e];
}
static inline float exp2_approx(float x) { return exp2f(x); }
static inline float round_tf32(float x) { return __int_as_float((int)((__float_as_uint(x) + 0x1000u) & ~0x1fffu)); }

/* d[16,8] += a[16,8] b[8,8] in the fragments of mma.sync m16n8k8. */
static inline void mma_m16n8k8(double d[4], const double a[4], double b0, double b1) {
    const int g = (int)threadIdx.x % 32 / 4, t = (int)threadIdx.x % 4;
    double(*const left)[8] = (double(*)[8])machine_warp_buffer(), (*const right)[8] = left + 16; /* [row], [column] */
    for (int r = 0; r < 4; ++r) left[g + r % 2 * 8][t + r / 2 * 4] = a[r];
    right[g][t] = b0, right[g][t + 4] = b1;
    machine_meet_warp();
    for (int k = 0; k < 8; ++k)
        for (int e = 0; e < 4; ++e) d[e] += left[g + e / 2 * 8][k] * right[2 * t + e % 2][k];
}
static inline void mma_f64(double d[4], const double a[4], double b0, double b1) { mma_m16n8k8(d, a, b0, b1); }
static inline void mma_tf32(float d[4], const float a[4], float b0, float b1) {
    double x[4] = {d[0], d[1], d[2], d[3]};
    const double wide[4] = {a[0], a[1], a[2], a[3]};
    mma_m16n8k8(x, wide, b0, b1);
    for (int e = 0; e < 4; ++e) d[e] = (float)x[e];
}

#endif
