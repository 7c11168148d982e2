/* fattn/context.h - one device, one stream, one allocator, one error sentence.

   Threads. A context and what was made with it (tapes, optimizers, tensors) belong to no thread: made by
   one, used by others, destroyed by another, but used by one at a time; the caller sees to that, for the
   sentence of fattn_ctx_error, too, which the next failure overwrites. Calls on different contexts run
   at the same time. A fattn_param is the caller's: tapes of different contexts may read its value at
   once, but add to its grad, and optimizers step, one after the other. The library keeps nothing else:
   no state of the process, none of a thread.
   On a GPU a context lives in the CUDA context that is current when it is made, if that is one of its
   device, else in the device's primary one; a stream and memory that it is given must fit that. Calls
   leave the thread's current device and CUDA context as they found them, or without any. What two
   contexts enqueue is ordered by a stream that they share or by the caller's events, by nothing else.
   fork. A context on the CPU, its memory and what was made with it are good in the child. But OpenMP does
   not survive a fork by a thread that has run a team: there a call on several threads never returns
   (GCC's libgomp). So call omp_pause_resource_all(omp_pause_hard) before fork, or fork on a thread that
   has not computed, or compute with cpu_threads 1 in the child. Of a context on a GPU nothing may be used
   in the child, not even fattn_ctx_destroy: CUDA forbids it. */
#ifndef FATTN_CONTEXT_H
#define FATTN_CONTEXT_H

#include <fattn/base.h>

typedef enum fattn_device { FATTN_CPU = 1, FATTN_CUDA = 2 } fattn_device; /* DLPack's codes */
typedef struct CUstream_st *fattn_stream; /* is cudaStream_t; no CUDA header needed */
typedef struct fattn_ctx fattn_ctx;

/* All heap memory of a context comes from here. Never called by a function that was handed a
   workspace. `align` is a power of two; alloc returns NULL when there is no memory. Called by the
   thread that called the library, on a GPU with the context's device current; one allocator of
   several contexts must stand calls at the same time. So must a log function. */
typedef struct fattn_allocator {
    void *(*alloc)(void *user, size_t bytes, size_t align, fattn_stream s);
    void (*free)(void *user, void *p, size_t bytes, fattn_stream s);
    void *user;
} fattn_allocator;

typedef enum fattn_log { FATTN_LOG_ERROR = 1, FATTN_LOG_WARN, FATTN_LOG_INFO } fattn_log;
typedef void (*fattn_log_fn)(void *user, fattn_log level, const char *text);

enum {
    FATTN_CTX_DETERMINISTIC = 1u << 0, /* every call on this context, as if asked for there */
    FATTN_CTX_TUNE = 1u << 1 /* matrix products on a GPU: the first one of a shape tries what cuBLAS
                                offers and waits for the device, later ones take the fastest; runs may
                                differ in their roundings. Not with DETERMINISTIC */
};

typedef struct fattn_ctx_options {
    uint32_t struct_size; /* sizeof(fattn_ctx_options) */
    uint32_t flags;
    int32_t device; /* fattn_device; 0 = FATTN_CPU */
    int32_t device_id;
    fattn_stream stream;  /* 0 = the device's default stream */
    int32_t cpu_threads;  /* 0..4096; 0 = OpenMP's choice now; never calls omp_set_num_threads */
    int32_t arch_cap;     /* tests: 1 = baseline CPU code, 2 = AVX2 at most; 80 = sm_80; 0 = best */
    int32_t sm_limit;     /* persistent kernels use at most this many SMs; 0 = all */
    int32_t reserved;     /* 0 */
    fattn_allocator allocator; /* all zero = malloc, or cudaMallocAsync on a GPU */
    fattn_log_fn log;          /* NULL = silent: the library never prints */
    void *log_user;
} fattn_ctx_options;

/* Bytes that this context holds now, the most it ever held, and the number of allocations. */
typedef struct fattn_mem { size_t live, peak, allocs; } fattn_mem;

/* opt may be NULL: the CPU, all defaults. On failure *out is NULL. A device that this build or
   machine lacks is FATTN_E_UNSUPPORTED; the sentence goes to opt->log, for want of a context. */
FATTN_API FATTN_CHECKED fattn_status fattn_ctx_create(const fattn_ctx_options *opt,
                                                      fattn_ctx **out);
/* Everything allocated through the context must be freed before. NULL is fine. */
FATTN_API void fattn_ctx_destroy(fattn_ctx *ctx);
FATTN_API fattn_device fattn_ctx_device(const fattn_ctx *ctx);
FATTN_API FATTN_CHECKED fattn_status fattn_ctx_set_stream(fattn_ctx *ctx, fattn_stream s);
/* Blocks until all enqueued work is done; reports asynchronous faults. A no-op on the CPU. */
FATTN_API FATTN_CHECKED fattn_status fattn_ctx_sync(fattn_ctx *ctx);
/* The sentence of the last failure, with names and numbers; "" before the first. Never NULL. */
FATTN_API const char *fattn_ctx_error(const fattn_ctx *ctx);
/* For ops and companion libraries: leave a sentence (at most 511 bytes) and return s. */
FATTN_API fattn_status fattn_ctx_fail(fattn_ctx *ctx, fattn_status s, const char *format, ...)
    FATTN_PRINTF(3, 4);
FATTN_API fattn_mem fattn_ctx_mem(const fattn_ctx *ctx);
FATTN_API void fattn_ctx_mem_reset_peak(fattn_ctx *ctx); /* peak = live */

#endif
