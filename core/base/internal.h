/* Shared by all files of the library: the context, errors, memory, parallel tasks. */
#ifndef FATTNI_CORE_BASE_INTERNAL_H
#define FATTNI_CORE_BASE_INTERNAL_H

#include <fattn/attention.h>

#include <stdbool.h>

/* Code for the host CPU, fastest last. arch_cap below 10 caps it. */
enum fattni_isa {
    FATTNI_ISA_BASELINE = 1,
    FATTNI_ISA_AVX2 = 2,
    FATTNI_ISA_AVX512 = 3,
    FATTNI_ISA_AVX512BF16 = 4, /* and products of BF16 numbers */
    FATTNI_ISA_AMX = 5,        /* the same by AMX, with AVX512-BF16 */
    FATTNI_ISA_AMXFP16 = 6     /* and products of F16 numbers by AMX */
};

enum { FATTNI_ALIGN = 256, FATTNI_ERROR_BYTES = 512 };
enum { FATTNI_MOST_THREADS = 4096 }; /* of a context: bounds the sizes of per-thread memory */

/* Properties of a context's GPU; zero on the CPU. */
typedef struct fattni_gpu {
    int arch;                /* 90 for sm_90, capped by arch_cap */
    int sms;                 /* capped by sm_limit */
    int all_sms;             /* not capped: for choices that change bits */
    bool overlaps;           /* programmatic dependent launch is available (fattni_cuda_start) */
    size_t shared_limit;     /* of a block, capped by arch_cap */
    size_t shared_of_device; /* not capped */
    size_t l2_bytes;
    int clusters[9]; /* of so many CTAs that run at the same time, plus 1 (fattni_cuda_clusters); 0: unknown */
    struct fattni_cuda_blas *blas; /* NULL: cuBLAS was not found, or did not start */
    int blas_status;               /* a cublasStatus_t: how it started */
    struct fattni_cuda_driver *driver;
} fattni_gpu;

/* Products of BF16 matrices on the CPU (core/cpu/gemm_bf16.h); zero until the first one. */
typedef struct fattni_bf16 {
    void *engine, *plan[4], *product[4]; /* the library's objects; engine NULL: it is not used */
    size_t scratch;                      /* bytes that a product needs */
    bool opened;
    int64_t products; /* how many the library has computed */
} fattni_bf16;

struct fattn_ctx {
    fattn_device device;
    const struct fattni_device_ops *ops; /* the device's (core/base/device.h) */
    int device_id;
    fattn_stream stream;
    fattn_stream unrecorded; /* while recording a graph: the stream before */
    bool recording;
    int cpu_threads;    /* fixed at creation, so that a query and a later call agree */
    int isa;            /* enum fattni_isa */
    bool may_use_amx;   /* the operating system has said so */
    bool f32_by_onednn; /* products of F32 matrices on the CPU (core/cpu/gemm_cpu.h) */
    int arch_cap, sm_limit;
    fattni_gpu gpu;
    fattni_bf16 bf16;
    uint32_t flags;
    fattn_allocator allocator;
    fattn_log_fn log;
    void *log_user;
    fattn_mem mem;
    char error[FATTNI_ERROR_BYTES];
};

#define FATTNI_TRY(expression)                                                                                         \
    do {                                                                                                               \
        const fattn_status try_status = (expression);                                                                  \
        if (try_status != FATTN_OK) return try_status;                                                                 \
    } while (0)

static inline int64_t fattni_min(int64_t a, int64_t b) { return a < b ? a : b; }
static inline int64_t fattni_max(int64_t a, int64_t b) { return a > b ? a : b; }
static inline int64_t fattni_ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
static inline int64_t fattni_round_up(int64_t a, int64_t b) { return fattni_ceil_div(a, b) * b; }

/* Counted memory of the context, at least FATTNI_ALIGN aligned. bytes 0 gives NULL and FATTN_OK. */
fattn_status fattni_alloc(fattn_ctx *ctx, size_t bytes, void **out);
void fattni_free(fattn_ctx *ctx, void *p, size_t bytes);
fattn_allocator fattni_default_allocator(void);
/* Host memory for a context's own records. On the CPU it is counted; with a GPU, where the counters are
   of device memory, it is not. */
fattn_status fattni_host_alloc(fattn_ctx *ctx, size_t bytes, void **out);
void fattni_host_free(fattn_ctx *ctx, void *p, size_t bytes);

/* Copies the first struct_size bytes of an options struct into dst and zeroes the rest. A struct_size
   that is 0, ends inside a field, or is larger than dst_size with non-zero bytes beyond it, is
   FATTN_E_ABI. `name` is for the error message. */
fattn_status fattni_take_struct(fattn_ctx *ctx, const char *name, const void *src, void *dst, size_t dst_size);

/* Bytes of an array of count elements; false when it does not fit in PTRDIFF_MAX. */
bool fattni_bytes(int64_t count, size_t element, size_t *out);
/* Checks ndim, dtype, shape, that extents fit in 62 bits, data and its alignment, device. */
fattn_status fattni_check_tensor(fattn_ctx *ctx, const char *name, const fattn_tensor *t);
bool fattni_is_row_major(const fattn_tensor *t);
/* "[2,8,77,64]" */
const char *fattni_shape_text(const fattn_tensor *t, char *buffer, size_t size);

/* The only user of OpenMP (parallel.c). Runs task 0..count-1 on at most ctx->cpu_threads threads,
   each of which runs its tasks in ascending order; thread is below that number. A task may wait only
   for tasks with lower numbers, and its results must not depend on `thread`, so that results do not
   depend on the number of threads. */
typedef void (*fattni_task)(void *arg, int64_t task, int thread);
void fattni_parallel(const fattn_ctx *ctx, int64_t count, fattni_task run, void *arg);
/* On at most so many of them. */
void fattni_parallel_on(const fattn_ctx *ctx, int64_t most, int64_t count, fattni_task run, void *arg);
/* Iteration n of a loop in which a task waits for one with a lower number. */
void fattni_pause(int n);
int fattni_default_threads(void);

int fattni_cpu_isa(void); /* best enum fattni_isa of this machine */
bool fattni_cpu_is_intel(void);
bool fattni_allow_amx(void); /* asks the operating system to let this process use AMX, which it may refuse */
const char *fattni_isa_name(int isa);

#endif
