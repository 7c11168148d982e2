/* Matrix products of a warpgroup (PTX ISA, "wgmma"): D[64,N] (+)= A[64,16] B[16,N], fp32 accumulators, 16-bit operands:
   BF16 with K_BF16, else F16. Needs sm_90a.

   wgmma_ss_nN      A and B from shared memory, both K-major (rows of B's tile are columns of B)
   wgmma_rs_nN      A from registers (packed accumulators); B from shared memory, MN-major (rows of its tile are rows
                    of B)
   wgmma_st_nN      A and B from shared memory, A K-major, B MN-major
   wgmma_tt_nN      A and B from shared memory, both MN-major
   wgmma_KK_new_nN  D = A B, KK one of the above: D is output only, so its old values need no registers
   wgmma_f8_ss_nN   E4M3 operands, A[64,32] B[32,N], both K-major in shared memory
   wgmma_f8_rs_nN   the same with A from registers: thread x has in a[0] row 16w + g, columns 4t to 4t + 3, in a[1]
                    those of row 16w + g + 8, in a[2] and a[3] the same rows' columns 16 + 4t to 16 + 4t + 3
   wgmma_s8_ss_nN   as f8_ss with operands of signed bytes: d holds 32-bit integers, as they are in memory

   Thread x of the warpgroup, with warp w = x/32, g = x%32/4, t = x%4, holds in d[4i .. 4i+3] row 16w + g,
   columns 8i + 2t, 8i + 2t + 1, and the same of row 16w + g + 8. `accumulate` 0: D = A B.
   Registers of D and A must not be accessed between the product and wgmma_wait. */
#ifndef FATTNI_CORE_PTX_WGMMA_H
#define FATTNI_CORE_PTX_WGMMA_H

#include <stdint.h>

#if K_BF16
#define WGMMA_TYPES "f32.bf16.bf16"
#else
#define WGMMA_TYPES "f32.f16.f16"
#endif

/* Operands 0..N/2-1: the accumulators as text and as constraints, in steps of 8. */
#define R8(a, b, c, d, e, f, g, h) "%" #a ",%" #b ",%" #c ",%" #d ",%" #e ",%" #f ",%" #g ",%" #h
#define T16 R8(0, 1, 2, 3, 4, 5, 6, 7) "," R8(8, 9, 10, 11, 12, 13, 14, 15)
#define T24 T16 "," R8(16, 17, 18, 19, 20, 21, 22, 23)
#define T32                                                                                                            \
    R8(0, 1, 2, 3, 4, 5, 6, 7)                                                                                         \
    "," R8(8, 9, 10, 11, 12, 13, 14, 15) "," R8(16, 17, 18, 19, 20, 21, 22, 23) "," R8(24, 25, 26, 27, 28, 29, 30, 31)
#define T40 T32 "," R8(32, 33, 34, 35, 36, 37, 38, 39)
#define T48 T40 "," R8(40, 41, 42, 43, 44, 45, 46, 47)
#define T56 T48 "," R8(48, 49, 50, 51, 52, 53, 54, 55)
#define T64 T56 "," R8(56, 57, 58, 59, 60, 61, 62, 63)
#define T96                                                                                                            \
    T64 "," R8(64, 65, 66, 67, 68, 69, 70, 71) "," R8(72, 73, 74, 75, 76, 77, 78, 79) "," R8(                          \
        80, 81, 82, 83, 84, 85, 86, 87) "," R8(88, 89, 90, 91, 92, 93, 94, 95)
#define T128                                                                                                           \
    T96 "," R8(96, 97, 98, 99, 100, 101, 102, 103) "," R8(104, 105, 106, 107, 108, 109, 110, 111) "," R8(              \
        112, 113, 114, 115, 116, 117, 118, 119) "," R8(120, 121, 122, 123, 124, 125, 126, 127)
#define C8(i)                                                                                                          \
    "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]),        \
        "+f"(d[i + 7])
#define C16 C8(0), C8(8)
#define C24 C16, C8(16)
#define C32 C8(0), C8(8), C8(16), C8(24)
#define C40 C32, C8(32)
#define C48 C40, C8(40)
#define C56 C48, C8(48)
#define C64 C56, C8(56)
#define C96 C64, C8(64), C8(72), C8(80), C8(88)
#define C128 C96, C8(96), C8(104), C8(112), C8(120)

#define I8(i)                                                                                                          \
    "+r"(x[i]), "+r"(x[i + 1]), "+r"(x[i + 2]), "+r"(x[i + 3]), "+r"(x[i + 4]), "+r"(x[i + 5]), "+r"(x[i + 6]),        \
        "+r"(x[i + 7])
#define I32 I8(0), I8(8), I8(16), I8(24)
#define I48 I32, I8(32), I8(40)
#define I64 I48, I8(48), I8(56)

#define O8(i)                                                                                                          \
    "=f"(d[i]), "=f"(d[i + 1]), "=f"(d[i + 2]), "=f"(d[i + 3]), "=f"(d[i + 4]), "=f"(d[i + 5]), "=f"(d[i + 6]),        \
        "=f"(d[i + 7])
#define O16 O8(0), O8(8)
#define O24 O16, O8(16)
#define O32 O16, O8(16), O8(24)
#define O40 O32, O8(32)
#define O48 O40, O8(40)
#define O56 O48, O8(48)
#define O64 O56, O8(56)
#define O96 O64, O8(64), O8(72), O8(80), O8(88)
#define O128 O96, O8(96), O8(104), O8(112), O8(120)

/* R = N/2 accumulators are operands 0..R-1; X, Y, Z, ... are the numbers of those that follow. */
#define WGMMA_SHARED(KIND, TRANSPOSED_A, TRANSPOSED_B, N, R, X, Y, Z)                                                  \
    static __device__ __forceinline__ void wgmma_##KIND##_n##N(float *d, uint64_t a, uint64_t b, int accumulate) {     \
        asm volatile("{.reg .pred p;\nsetp.ne.b32 p, %" #Z ", 0;\n"                                                    \
                     "wgmma.mma_async.sync.aligned.m64n" #N "k16." WGMMA_TYPES " {" T##R                               \
                     "}, %" #X ", %" #Y ", p, 1, 1, " #TRANSPOSED_A ", " #TRANSPOSED_B ";}"                            \
                     : C##R                                                                                            \
                     : "l"(a), "l"(b), "r"(accumulate));                                                               \
    }
#define WGMMA_NEW(KIND, TRANSPOSED_A, TRANSPOSED_B, N, R, X, Y)                                                        \
    static __device__ __forceinline__ void wgmma_##KIND##_new_n##N(float *d, uint64_t a, uint64_t b) {                 \
        asm volatile("{.reg .pred p;\nsetp.ne.b32 p, 0, 0;\n"                                                          \
                     "wgmma.mma_async.sync.aligned.m64n" #N "k16." WGMMA_TYPES " {" T##R                               \
                     "}, %" #X ", %" #Y ", p, 1, 1, " #TRANSPOSED_A ", " #TRANSPOSED_B ";}"                            \
                     : O##R                                                                                            \
                     : "l"(a), "l"(b));                                                                                \
    }
#define WGMMA_REGISTERS(N, R, W, X, Y, Z, U, V)                                                                        \
    static __device__ __forceinline__ void wgmma_rs_n##N(float *d, const uint32_t *a, uint64_t b, int accumulate) {    \
        asm volatile("{.reg .pred p;\nsetp.ne.b32 p, %" #V ", 0;\n"                                                    \
                     "wgmma.mma_async.sync.aligned.m64n" #N "k16." WGMMA_TYPES " {" T##R                               \
                     "}, {%" #W ", %" #X ", %" #Y ", %" #Z "}, %" #U ", p, 1, 1, 1;}"                                  \
                     : C##R                                                                                            \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate));                           \
    }
#define WGMMA_F8(N, R, W, X, Y, Z, U, V)                                                                               \
    static __device__ __forceinline__ void wgmma_f8_ss_n##N(float *d, uint64_t a, uint64_t b, int accumulate) {        \
        asm volatile("{.reg .pred p;\nsetp.ne.b32 p, %" #Y ", 0;\n"                                                    \
                     "wgmma.mma_async.sync.aligned.m64n" #N "k32.f32.e4m3.e4m3 {" T##R "}, %" #W ", %" #X              \
                                                                                       ", p, 1, 1;}"                   \
                     : C##R                                                                                            \
                     : "l"(a), "l"(b), "r"(accumulate));                                                               \
    }                                                                                                                  \
    static __device__ __forceinline__ void wgmma_f8_rs_n##N(float *d, const uint32_t *a, uint64_t b, int accumulate) { \
        asm volatile("{.reg .pred p;\nsetp.ne.b32 p, %" #V ", 0;\n"                                                    \
                     "wgmma.mma_async.sync.aligned.m64n" #N "k32.f32.e4m3.e4m3 {" T##R                                 \
                     "}, {%" #W ", %" #X ", %" #Y ", %" #Z "}, %" #U ", p, 1, 1;}"                                     \
                     : C##R                                                                                            \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate));                           \
    }
#define WGMMA_S8(N, R, X, Y, Z)                                                                                        \
    static __device__ __forceinline__ void wgmma_s8_ss_n##N(float *d, uint64_t a, uint64_t b, int accumulate) {        \
        int x[R];                                                                                                      \
        for (int i = 0; i < R; ++i) x[i] = __float_as_int(d[i]);                                                       \
        asm volatile("{.reg .pred p;\nsetp.ne.b32 p, %" #Z ", 0;\n"                                                    \
                     "wgmma.mma_async.sync.aligned.m64n" #N "k32.s32.s8.s8 {" T##R "}, %" #X ", %" #Y ", p;}"          \
                     : I##R                                                                                            \
                     : "l"(a), "l"(b), "r"(accumulate));                                                               \
        for (int i = 0; i < R; ++i) d[i] = __int_as_float(x[i]);                                                       \
    }
#define WGMMA(N, R, W, X, Y, Z, U, V)                                                                                  \
    WGMMA_SHARED(ss, 0, 0, N, R, W, X, Y)                                                                              \
    WGMMA_SHARED(st, 0, 1, N, R, W, X, Y)                                                                              \
    WGMMA_SHARED(tt, 1, 1, N, R, W, X, Y)                                                                              \
    WGMMA_NEW(ss, 0, 0, N, R, W, X)                                                                                    \
    WGMMA_NEW(tt, 1, 1, N, R, W, X)                                                                                    \
    WGMMA_NEW(st, 0, 1, N, R, W, X)                                                                                    \
    WGMMA_REGISTERS(N, R, W, X, Y, Z, U, V)
WGMMA(32, 16, 16, 17, 18, 19, 20, 21)
WGMMA(48, 24, 24, 25, 26, 27, 28, 29)
WGMMA(64, 32, 32, 33, 34, 35, 36, 37)
WGMMA(80, 40, 40, 41, 42, 43, 44, 45)
WGMMA(96, 48, 48, 49, 50, 51, 52, 53)
WGMMA(112, 56, 56, 57, 58, 59, 60, 61)
WGMMA(128, 64, 64, 65, 66, 67, 68, 69)
WGMMA(192, 96, 96, 97, 98, 99, 100, 101)
WGMMA(256, 128, 128, 129, 130, 131, 132, 133)
WGMMA_F8(64, 32, 32, 33, 34, 35, 36, 37)
WGMMA_F8(96, 48, 48, 49, 50, 51, 52, 53)
WGMMA_F8(128, 64, 64, 65, 66, 67, 68, 69)
WGMMA_F8(256, 128, 128, 129, 130, 131, 132, 133)
WGMMA_S8(64, 32, 32, 33, 34)
WGMMA_S8(96, 48, 48, 49, 50)
WGMMA_S8(128, 64, 64, 65, 66)

#undef WGMMA
#undef WGMMA_F8
#undef WGMMA_S8
#undef WGMMA_SHARED
#undef WGMMA_NEW
#undef WGMMA_REGISTERS
#undef R8
#undef T16
#undef T24
#undef T32
#undef T40
#undef T48
#undef T56
#undef T64
#undef T96
#undef T128
#undef C8
#undef C16
#undef C24
#undef C32
#undef C40
#undef C48
#undef C56
#undef C64
#undef C96
#undef C128
#undef O8
#undef O16
#undef O24
#undef O32
#undef O40
#undef O48
#undef O56
#undef O64
#undef O96
#undef O128

/* Where nothing reads the results of the products that follow, their operands may be overwritten meanwhile: said to the
   emulation of tests/cuda/emulated, which looks for races. */
static __device__ __forceinline__ void operands_may_change(int results_unread) { (void)results_unread; }
/* Before the first product, and again after registers of D or A have been written. */
static __device__ __forceinline__ void wgmma_fence(void) { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
static __device__ __forceinline__ void wgmma_commit(void) {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
/* Waits until at most the `groups` newest committed groups are pending; a constant. */
#define wgmma_wait(groups) asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(groups) : "memory")

/* x[0..n-1] must be in their registers here: keeps the compiler from moving their uses before a wait. */
#define PIN(x, n) _Pragma("unroll") for (int pin = 0; pin < (n); ++pin) asm volatile("" : "+f"((x)[pin])::"memory")
#define PIN_INTEGERS(x, n)                                                                                             \
    _Pragma("unroll") for (int pin = 0; pin < (n); ++pin) asm volatile("" : "+r"((x)[pin])::"memory")

/* x[0..n-1] are undefined from here on: without this, registers that are only set in a branch stay live from the last
   iteration. */
#define FORGET(x, n) _Pragma("unroll") for (int pin = 0; pin < (n); ++pin) asm volatile("" : "=f"((x)[pin]))

/* setmaxnreg: registers of each thread of this warpgroup, a multiple of 8 in 24..256. */
#define registers_raise(n) asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(n))
#define registers_lower(n) asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(n))

#endif
