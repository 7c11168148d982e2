/* What every file of the library may use: the context, errors, memory, numbered tasks. */
#ifndef FATTNI_CORE_BASE_INTERNAL_H
#define FATTNI_CORE_BASE_INTERNAL_H

#include <fattn/attention.h>

#include <stdbool.h>

/* Code for the host CPU, fastest last. arch_cap below 10 caps it. */
enum fattni_isa { FATTNI_ISA_BASELINE = 1, FATTNI_ISA_AVX2 = 2, FATTNI_ISA_AVX512 = 3 };

enum { FATTNI_ALIGN = 256, FATTNI_ERROR_BYTES = 512 };
enum { FATTNI_MOST_THREADS = 4096 }; /* of a context: per-thread memory stays countable */

/* What a context knows of its GPU; zero on the CPU. */
typedef struct fattni_gpu {
    int arch; /* 90 for sm_90, capped by arch_cap */
    int sms;  /* capped by sm_limit */
    bool overlaps; /* a kernel may begin before the last one's writes are there (fattni_cuda_start_early) */
    size_t shared_limit, l2_bytes;
    struct fattni_cuda_blas *blas; /* NULL: cuBLAS was not found */
    struct fattni_cuda_driver *driver;
} fattni_gpu;

struct fattn_ctx {
    fattn_device device;
    int device_id;
    fattn_stream stream;
    int cpu_threads; /* fixed at creation, so that a query and a later call agree */
    int isa;         /* enum fattni_isa */
    int arch_cap, sm_limit;
    fattni_gpu gpu;
    uint32_t flags;
    fattn_allocator allocator;
    fattn_log_fn log;
    void *log_user;
    fattn_mem mem;
    char error[FATTNI_ERROR_BYTES];
};

#define FATTNI_TRY(expression)                          \
    do {                                                \
        const fattn_status try_status = (expression);   \
        if (try_status != FATTN_OK) return try_status;  \
    } while (0)

static inline int64_t fattni_min(int64_t a, int64_t b) { return a < b ? a : b; }
static inline int64_t fattni_max(int64_t a, int64_t b) { return a > b ? a : b; }
static inline int64_t fattni_ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
static inline int64_t fattni_round_up(int64_t a, int64_t b) { return fattni_ceil_div(a, b) * b; }

/* Counted memory of the context, at least FATTNI_ALIGN aligned. bytes 0 gives NULL and FATTN_OK. */
fattn_status fattni_alloc(fattn_ctx *ctx, size_t bytes, void **out);
void fattni_free(fattn_ctx *ctx, void *p, size_t bytes);
fattn_allocator fattni_default_allocator(void);
/* Memory of the host, for a context's own records: on the CPU counted like any other; beside a GPU,
   whose counters are the device's, from malloc. */
fattn_status fattni_host_alloc(fattn_ctx *ctx, size_t bytes, void **out);
void fattni_host_free(fattn_ctx *ctx, void *p, size_t bytes);

/* Copies an options struct as its caller knew it into dst, the rest zero. A struct_size of 0, one
   that ends inside of a field, or one larger than known with non-zero surplus, is FATTN_E_ABI.
   `name` is for the sentence. */
fattn_status fattni_take_struct(fattn_ctx *ctx, const char *name, const void *src, void *dst,
                                size_t dst_size);

/* Bytes of an array of count elements; false when it does not fit in PTRDIFF_MAX. */
bool fattni_bytes(int64_t count, size_t element, size_t *out);
/* Checks ndim, dtype, shape, that extents fit in 62 bits, data and its alignment, device. */
fattn_status fattni_check_tensor(fattn_ctx *ctx, const char *name, const fattn_tensor *t);
bool fattni_is_row_major(const fattn_tensor *t);
/* fattn_tensor_copy on checked tensors that both lie in the host's memory. */
void fattni_host_copy(const fattn_ctx *ctx, const fattn_tensor *dst, const fattn_tensor *src);
/* "[2,8,77,64]" */
const char *fattni_shape_text(const fattn_tensor *t, char *buffer, size_t size);

/* The only user of OpenMP (parallel.c). Runs task 0..count-1 on at most ctx->cpu_threads threads,
   each of which takes ascending ones; thread is below that number. A task may wait for tasks with
   lower numbers, no others, and results must not depend on the thread: that is what makes bits
   independent of thread counts. */
typedef void (*fattni_task)(void *arg, int64_t task, int thread);
void fattni_parallel(const fattn_ctx *ctx, int64_t count, fattni_task run, void *arg);
/* For a task that waits for one with a lower number: round n of its loop. */
void fattni_pause(int n);
int fattni_default_threads(void);

int fattni_cpu_isa(void); /* best enum fattni_isa of this machine */
const char *fattni_isa_name(int isa);

#endif
