/* fattn/context.h - one device, one stream, one allocator, one error message.

   Threads. A context and the objects made with it (tapes, optimizers, tensors) are not bound to a thread,
   but only one thread at a time may use them. The caller must ensure that, also for the error message of
   fattn_ctx_error, which the next failure overwrites. Different contexts can be used concurrently. A
   fattn_param belongs to the caller: tapes of different contexts may read its value concurrently, but
   adding to its grad and optimizer steps must be serialised. The library has no other state: none of the
   process, none of a thread (but for a note, on a thread that multiplies matrices on the CPU, that OpenBLAS has its
   memory).
   On a GPU a context uses the CUDA context that is current when it is created, if that belongs to its
   device, else the device's primary context; the stream and memory that it is given must belong to the
   same. Calls restore the thread's current device and CUDA context. Work of two contexts is ordered only
   by a stream that they share or by the caller's events.
   fork. A context on the CPU, its memory and the objects made with it can be used in the child. But GCC's OpenMP does
   not survive a fork by a thread that has run a parallel region: in the child a call on several threads never
   returns. So call omp_pause_resource_all(omp_pause_hard) before fork, or fork from a thread that has not computed, or
   compute with cpu_threads 1 in the child. LLVM's survives it, but not (version 14) after omp_pause_resource_all. A
   context on a GPU must not be used in the child, not even by fattn_ctx_destroy: CUDA does not allow it. */
#ifndef FATTN_CONTEXT_H
#define FATTN_CONTEXT_H

#include <fattn/base.h>

typedef enum fattn_device { FATTN_CPU = 1, FATTN_CUDA = 2 } fattn_device; /* DLPack's codes */
typedef struct CUstream_st *fattn_stream;                                 /* is cudaStream_t; no CUDA header needed */
typedef struct fattn_ctx fattn_ctx;

/* All heap memory of a context comes from here. A function that takes a workspace does not allocate.
   `align` is a power of two; alloc returns NULL when there is no memory. Called by the thread that
   called the library, on a GPU with the context's device current. An allocator or log function that
   several contexts share must be thread-safe. */
typedef struct fattn_allocator {
    void *(*alloc)(void *user, size_t bytes, size_t align, fattn_stream s);
    void (*free)(void *user, void *p, size_t bytes, fattn_stream s);
    void *user;
} fattn_allocator;

typedef enum fattn_log { FATTN_LOG_ERROR = 1, FATTN_LOG_WARN, FATTN_LOG_INFO } fattn_log;
typedef void (*fattn_log_fn)(void *user, fattn_log level, const char *text);

enum {
    FATTN_CTX_DETERMINISTIC = 1u << 0, /* as if every call on this context had FATTN_DETERMINISTIC */
    FATTN_CTX_TUNE = 1u << 1,          /* matrix products on a GPU: the first product of a shape times cuBLASLt's
                                candidates and waits for the device, later ones use the fastest; results
                                may differ in rounding from run to run. Not with DETERMINISTIC */
    FATTN_CTX_F32_PRODUCTS = 1u << 2,  /* CPU: 16-bit tensors are multiplied as F32 numbers, for gradient checks.
                                Without it BF16 tensors on a CPU with AMX, or an AMD one with AVX512-BF16, and F16
                                tensors on one with AMX-FP16 (beside AMX: Granite Rapids) are multiplied as they are:
                                P and dS of attention are rounded to their dtype for the products with V, dO, K and Q,
                                and sums are F32, as in all GPU kernels. Errors are those of a GPU, and AMX is two to
                                three times as fast in BF16; and with either oneDNN multiplies the tape's BF16 tensors.
                                Other CPUs always multiply F32 numbers. On a GPU: FATTN_E_UNSUPPORTED. The first such
                                call, or product of F32 matrices by oneDNN, asks Linux to let the process use AMX; from
                                then on sigaltstack refuses stacks smaller than getauxval(AT_MINSIGSTKSZ), 12 KB. If a
                                thread has a smaller one before, AMX is refused, and the log says so. With this flag, or
                                an arch_cap below AMX, nothing asks: OpenBLAS multiplies F32 matrices there */
    FATTN_CTX_TF32 = 1u << 4,          /* F32 on a GPU may round operands of products to TF32: as if every call on this
                                context had FATTN_TF32, and the tape's matrix products, too. On the CPU it changes
                                nothing */
    FATTN_CTX_PLAN_ONLY = 1u << 3      /* a GPU that this machine need not have, of architecture arch_cap (75, 80, 86,
                                87, 89, 90, 100, 103, 120 or 121): fattn_attention_query says which kernels would run
                                there and the memory that they need (90: with 132 SMs). Everything that allocates or
                                runs is FATTN_E_STATE */
};

typedef struct fattn_ctx_options {
    uint32_t struct_size; /* sizeof(fattn_ctx_options) */
    uint32_t flags;
    int32_t device; /* fattn_device; 0 = FATTN_CPU */
    int32_t device_id;
    fattn_stream stream;       /* 0 = the device's default stream */
    int32_t cpu_threads;       /* 0..4096; 0 = OpenMP's choice now; never calls omp_set_num_threads */
    int32_t arch_cap;          /* tests: CPU code at most 1 = baseline, 2 = AVX2, 3 = AVX-512, 4 = AVX512-BF16, 5 = AMX;
                                  on a GPU 75, 80, 86 or 89 = kernels and shared memory of such a GPU; 0 = best */
    int32_t sm_limit;          /* persistent kernels use at most this many SMs; 0 = all */
    int32_t reserved;          /* 0 */
    fattn_allocator allocator; /* all zero = malloc, or cudaMallocAsync on a GPU */
    fattn_log_fn log;          /* NULL = silent: the library never prints */
    void *log_user;
} fattn_ctx_options;

/* Bytes allocated by this context now, their peak, and the number of allocations. */
typedef struct fattn_mem {
    size_t live, peak, allocs;
} fattn_mem;

/* opt may be NULL: the CPU, all defaults. On failure *out is NULL. A device that this build or
   machine lacks is FATTN_E_UNSUPPORTED; the error message goes to opt->log, as there is no context. */
FATTN_API FATTN_CHECKED fattn_status fattn_ctx_create(const fattn_ctx_options *opt, fattn_ctx **out);
/* Everything allocated through the context must be freed before. NULL is allowed. */
FATTN_API void fattn_ctx_destroy(fattn_ctx *ctx);
FATTN_API fattn_device fattn_ctx_device(const fattn_ctx *ctx);
/* What the context's device is, in words, to `text` of `bytes` bytes, with a 0 at the end, cut to fit: "NVIDIA H200,
   sm_90, 132 SMs, 139.8 GiB, 227 KiB of shared memory per block, driver for CUDA 13.0" or "avx512, 16 threads". A
   device that does not answer is FATTN_E_CUDA. */
FATTN_API FATTN_CHECKED fattn_status fattn_ctx_describe(fattn_ctx *ctx, char *text, size_t bytes);
/* Later calls enqueue on s; 0 is the default stream. It orders nothing: a context's tape, optimizer and scratch memory
   are those of before, so let s wait for the old stream's work first (cudaEventRecord, cudaStreamWaitEvent, or
   fattn_ctx_sync before this call). The caller destroys a stream after its work and another set_stream. ARG: a stream
   on the CPU. */
FATTN_API FATTN_CHECKED fattn_status fattn_ctx_set_stream(fattn_ctx *ctx, fattn_stream s);
/* Blocks until all enqueued work is done; reports asynchronous faults. A no-op on the CPU. */
FATTN_API FATTN_CHECKED fattn_status fattn_ctx_sync(fattn_ctx *ctx);
/* The error message of the last failure, with names and numbers; "" before the first. Never NULL. */
FATTN_API const char *fattn_ctx_error(const fattn_ctx *ctx);
/* For ops and companion libraries: sets the error message (at most 511 bytes) and returns s. */
FATTN_API fattn_status fattn_ctx_fail(fattn_ctx *ctx, fattn_status s, const char *format, ...) FATTN_PRINTF(3, 4);
FATTN_API fattn_mem fattn_ctx_mem(const fattn_ctx *ctx);
FATTN_API void fattn_ctx_mem_reset_peak(fattn_ctx *ctx); /* peak = live */

#endif
