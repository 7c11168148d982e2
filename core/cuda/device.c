#include "core/cuda/device.h"

#include "core/base/device.h"
#include "core/cuda/blas/blas.h"
#include "core/cuda/driver.h"
#include "core/cuda/graph.h"
#include "core/cuda/kernels.h"
#include "core/cuda/overlap.h"
#include "core/cuda/tensor.h"
#include "core/fp8/fp8.h"
#include "core/kv_cache/kv_append.h"
#include "core/sampling/sample.h"

#include <cuda_runtime_api.h>
#include <stdio.h>
#include <string.h>

fattn_status fattni_cuda_check(fattn_ctx *ctx, int error, const char *what) {
    if (error == cudaSuccess) return FATTN_OK;
    cudaGetLastError(); /* the error message is ctx's: the caller's next check of CUDA's own need not find it again */
    return fattn_ctx_fail(ctx, FATTN_E_CUDA, "%s: %s", what, cudaGetErrorString((cudaError_t)error));
}

fattn_status fattni_cuda_enter(fattn_ctx *ctx, bool *entered) {
    const struct fattni_cuda_driver *const d = ctx->gpu.driver;
    CUcontext current = NULL;
    *entered = false;
    if (!d) return fattn_ctx_fail(ctx, FATTN_E_STATE, "the context has FATTN_CTX_PLAN_ONLY: it has no device");
    if (d->get_current(&current) == CUDA_SUCCESS && current == d->context) return FATTN_OK;
    const CUresult result = d->push(d->context);
    if (result != CUDA_SUCCESS)
        return fattn_ctx_fail(ctx, FATTN_E_CUDA, "cuCtxPushCurrent of device %d: result %d", ctx->device_id,
                              (int)result);
    *entered = true;
    return FATTN_OK;
}

void fattni_cuda_leave(const fattn_ctx *ctx, bool entered) {
    CUcontext popped;
    if (entered) ctx->gpu.driver->pop(&popped);
}

static void *device_alloc(void *user, size_t bytes, size_t align, fattn_stream s) {
    (void)user, (void)align; /* CUDA's pools align to 512 bytes */
    void *p = NULL;
    if (cudaMallocAsync(&p, bytes, s) == cudaSuccess) return p;
    cudaGetLastError(); /* clears the pending error: out of memory is reported as a status */
    return NULL;
}

static void device_free(void *user, void *p, size_t bytes, fattn_stream s) {
    (void)user, (void)bytes;
    cudaFreeAsync(p, s);
}

static fattn_allocator device_allocator(void) { return (fattn_allocator){.alloc = device_alloc, .free = device_free}; }

/* CUDA's C interface takes object pointers to kernels, to which ISO C does not convert function pointers. */
static const void *pointer_of(fattni_cuda_any f) {
    const void *p;
    _Static_assert(sizeof p == sizeof f, "function and object pointers");
    memcpy(&p, &f, sizeof p);
    return p;
}

enum { STATIC_SHARED = 1024 }; /* of any kernel it is less */

size_t fattni_cuda_most_shared(const fattn_ctx *ctx) { return ctx->gpu.shared_limit - STATIC_SHARED; }

static fattn_status set_limit(fattn_ctx *ctx, const char *name, fattni_cuda_any kernel, size_t bytes) {
    return fattni_cuda_check(
        ctx, cudaFuncSetAttribute(pointer_of(kernel), cudaFuncAttributeMaxDynamicSharedMemorySize, (int)bytes), name);
}

fattn_status fattni_cuda_allow_shared(fattn_ctx *ctx, const char *name, fattni_cuda_any kernel) {
    bool entered;
    FATTNI_TRY(fattni_cuda_enter(ctx, &entered));
    const fattn_status s = set_limit(ctx, name, kernel, ctx->gpu.shared_of_device - STATIC_SHARED);
    fattni_cuda_leave(ctx, entered);
    return s;
}

/* griddepcontrol exists only in code for 9.0 or later: whether one kernel for huge rows has such code tells it of all.
   Graphs support programmatic launches from CUDA 12.3 on. */
static fattn_status detect_overlap(fattn_ctx *ctx, const fattni_cuda_kernel *k) {
    struct cudaFuncAttributes code;
    int driver = 0;
    FATTNI_TRY(fattni_cuda_check(ctx, cudaFuncGetAttributes(&code, pointer_of(k->stub)), k->name));
    FATTNI_TRY(fattni_cuda_check(ctx, cudaDriverGetVersion(&driver), "cudaDriverGetVersion"));
    ctx->gpu.overlaps = code.ptxVersion >= 90 && driver >= 12030;
    return FATTN_OK;
}

/* Whether the driver compiles this build's PTX for the device, which takes about a second for each kernel: machine code
   is there for 7.5, 8.x, 9.0 and 12.x (cmake/fattn_cuda.cmake). */
static bool compiles_late(const fattn_ctx *ctx) { return ctx->gpu.arch >= 100 && ctx->gpu.arch / 10 != 12; }

/* Raises the limit of dynamic shared memory. Kernels for huge rows get the device's maximum, since they are launched
   with as much as the kernel before them (fattni_bwd_cuda_huge), and the limit is one for all contexts of a process. */
static fattn_status raise_limit(fattn_ctx *ctx, const fattni_cuda_kernel *k) {
    const bool huge = k->variant == FATTNI_VARIANT_HUGE;
    const size_t bytes = huge ? ctx->gpu.shared_of_device - STATIC_SHARED : k->shared;
    return set_limit(ctx, k->name, k->stub, bytes);
}

/* For each kernel that this device can run, unless that would compile them all. */
static fattn_status raise_limits(fattn_ctx *ctx, const fattni_cuda_kernel *const *list) {
    bool detected = ctx->gpu.arch < 90;
    for (; *list; ++list) {
        const fattni_cuda_kernel *const k = *list;
        if (!fattni_cuda_has_code(k, ctx) || k->shared > ctx->gpu.shared_limit) continue;
        if (!compiles_late(ctx)) FATTNI_TRY(raise_limit(ctx, k));
        if (k->variant == FATTNI_VARIANT_HUGE && !detected) FATTNI_TRY(detect_overlap(ctx, k));
        detected |= k->variant == FATTNI_VARIANT_HUGE;
    }
    return FATTN_OK;
}

fattn_status fattni_cuda_ready(fattn_ctx *ctx, const fattni_cuda_kernel *k) {
    if (!compiles_late(ctx)) return FATTN_OK;
    bool entered;
    FATTNI_TRY(fattni_cuda_enter(ctx, &entered));
    const fattn_status s = raise_limit(ctx, k);
    fattni_cuda_leave(ctx, entered);
    return s;
}

fattn_status fattni_cuda_clusters(fattn_ctx *ctx, const fattni_cuda_kernel *k, int cluster, int *count) {
    int *const known = &ctx->gpu.clusters[cluster];
    if (*known == 0) {
        bool entered;
        FATTNI_TRY(fattni_cuda_ready(ctx, k)); /* its limit of shared memory counts */
        FATTNI_TRY(fattni_cuda_enter(ctx, &entered));
        cudaLaunchAttribute size = {.id = cudaLaunchAttributeClusterDimension,
                                    .val.clusterDim = {(unsigned)cluster, 1, 1}};
        const cudaLaunchConfig_t config = {.gridDim = {(unsigned)cluster, 1, 1}, /* a multiple */
                                           .blockDim = {(unsigned)k->threads, 1, 1},
                                           .dynamicSmemBytes = k->shared,
                                           .attrs = &size,
                                           .numAttrs = 1};
        int most = 0;
        const cudaError_t error = cudaOccupancyMaxActiveClusters(&most, pointer_of(k->stub), &config);
        fattni_cuda_leave(ctx, entered);
        FATTNI_TRY(fattni_cuda_check(ctx, error, "cudaOccupancyMaxActiveClusters"));
        *known = most + 1;
    }
    *count = *known - 1;
    return FATTN_OK;
}

static fattn_status read_properties(fattn_ctx *ctx) {
    int major = 0, minor = 0, sms = 0, shared = 0, l2 = 0;
    const int id = ctx->device_id;
    const struct {
        int *value;
        enum cudaDeviceAttr which;
    } wanted[] = {
        {&major, cudaDevAttrComputeCapabilityMajor},
        {&minor, cudaDevAttrComputeCapabilityMinor},
        {&sms, cudaDevAttrMultiProcessorCount},
        {&shared, cudaDevAttrMaxSharedMemoryPerBlockOptin},
        {&l2, cudaDevAttrL2CacheSize},
    };
    for (size_t n = 0; n < sizeof wanted / sizeof wanted[0]; ++n)
        FATTNI_TRY(fattni_cuda_check(ctx, cudaDeviceGetAttribute(wanted[n].value, wanted[n].which, id),
                                     "cudaDeviceGetAttribute"));
    const int arch = 10 * major + minor;
    if (arch < FATTNI_CUDA_OLDEST)
        return fattn_ctx_fail(ctx, FATTN_E_UNSUPPORTED, "device %d is sm_%d, the kernels need sm_%d", id, arch,
                              FATTNI_CUDA_OLDEST);
    const bool capped = ctx->arch_cap >= FATTNI_CUDA_OLDEST && ctx->arch_cap < arch;
    ctx->gpu.arch = capped ? ctx->arch_cap : arch;
    ctx->gpu.sms = ctx->sm_limit > 0 && ctx->sm_limit < sms ? ctx->sm_limit : sms;
    ctx->gpu.all_sms = sms;
    ctx->gpu.shared_limit = ctx->gpu.shared_of_device = (size_t)shared;
    if (capped && fattni_cuda_shared_of(ctx->arch_cap) < ctx->gpu.shared_limit)
        ctx->gpu.shared_limit = fattni_cuda_shared_of(ctx->arch_cap);
    ctx->gpu.l2_bytes = (size_t)l2;
    FATTNI_TRY(raise_limits(ctx, fattni_fwd_cuda_kernels));
    FATTNI_TRY(raise_limits(ctx, fattni_bwd_cuda_kernels));
    return FATTN_OK;
}

static fattn_status driver_function(fattn_ctx *ctx, const char *symbol, void *to) {
    void *f = NULL;
    enum cudaDriverEntryPointQueryResult found;
    FATTNI_TRY(
        fattni_cuda_check(ctx, cudaGetDriverEntryPointByVersion(symbol, &f, 12000, cudaEnableDefault, &found), symbol));
    if (found != cudaDriverEntryPointSuccess)
        return fattn_ctx_fail(ctx, FATTN_E_CUDA, "the driver has no %s (result %d)", symbol, (int)found);
    memcpy(to, &f, sizeof f);
    return FATTN_OK;
}

/* The CUDA context that is current, if it belongs to this device, else the device's primary one. That is
   never released: CUDA's runtime keeps it, too. The thread's current context is restored. */
static fattn_status find_context(fattn_ctx *ctx) {
    struct fattni_cuda_driver *const d = ctx->gpu.driver;
    CUdevice wanted = 0, device = -1;
    CUresult result = d->device(&wanted, ctx->device_id);
    if (!result) result = d->get_current(&d->context);
    if (!result && d->context) result = d->device_of_current(&device);
    if (!result && (!d->context || device != wanted)) result = d->retain(&d->context, wanted);
    if (result == CUDA_SUCCESS) return FATTN_OK;
    return fattn_ctx_fail(ctx, FATTN_E_CUDA, "no CUDA context on device %d: result %d", ctx->device_id, (int)result);
}

static fattn_status open_driver(fattn_ctx *ctx) {
    void *p;
    FATTNI_TRY(fattni_host_alloc(ctx, sizeof(struct fattni_cuda_driver), &p));
    memset(p, 0, sizeof(struct fattni_cuda_driver));
    struct fattni_cuda_driver *const d = ctx->gpu.driver = p;
#define X(name, symbol) FATTNI_TRY(driver_function(ctx, #symbol, &d->name));
    FATTNI_DRIVER_FUNCTIONS(X)
#undef X
    return find_context(ctx);
}

/* A GPU of which only the architecture is known. No size of a plan depends on the number of SMs or on L2. */
static fattn_status plan_only(fattn_ctx *ctx) {
    static const int known[] = {75, 80, 86, 87, 89, 90, 100, 103, 120, 121};
    for (size_t n = 0; n < sizeof known / sizeof *known; ++n)
        if (ctx->arch_cap == known[n]) ctx->gpu.arch = known[n];
    if (!ctx->gpu.arch)
        return fattn_ctx_fail(ctx, FATTN_E_ARG,
                              "FATTN_CTX_PLAN_ONLY: arch_cap %d is none of 75, 80, 86, 87, 89, 90, "
                              "100, 103, 120, 121",
                              ctx->arch_cap);
    ctx->gpu.sms = ctx->sm_limit > 0 ? ctx->sm_limit : 1;
    ctx->gpu.all_sms = 132; /* of an H100 or H200: of others nothing depends on it */
    ctx->gpu.shared_limit = fattni_cuda_shared_of(ctx->gpu.arch);
    return FATTN_OK;
}

/* Fills ctx->gpu for device ctx->device_id and sets the limit of dynamic shared memory of every kernel in
   both tables, once. UNSUPPORTED when there is no such device or it is older than sm_75; CUDA for
   faults. */
static fattn_status open_gpu(fattn_ctx *ctx) {
    int devices = 0;
    bool entered;
    if (ctx->flags & FATTN_CTX_PLAN_ONLY) return plan_only(ctx);
    if (cudaGetDeviceCount(&devices) != cudaSuccess) {
        cudaGetLastError();
        devices = 0;
    }
    if (ctx->device_id < 0 || ctx->device_id >= devices)
        return fattn_ctx_fail(ctx, FATTN_E_UNSUPPORTED, "CUDA device %d: not found, this machine has %d",
                              ctx->device_id, devices);
    FATTNI_TRY(open_driver(ctx));
    FATTNI_TRY(fattni_cuda_enter(ctx, &entered));
    fattn_status s = read_properties(ctx);
    if (!s) s = fattni_cuda_blas_open(ctx);
    fattni_cuda_leave(ctx, entered);
    return s;
}

static void close_gpu(fattn_ctx *ctx) {
    bool entered;
    if (ctx->gpu.blas && !fattni_cuda_enter(ctx, &entered)) {
        fattni_cuda_blas_close(ctx);
        fattni_cuda_leave(ctx, entered);
    }
    fattni_host_free(ctx, ctx->gpu.driver, sizeof(struct fattni_cuda_driver));
}

fattn_status fattni_cuda_sync(fattn_ctx *ctx) {
    bool entered;
    FATTNI_TRY(fattni_cuda_enter(ctx, &entered));
    const cudaError_t error = cudaStreamSynchronize(ctx->stream);
    fattni_cuda_leave(ctx, entered);
    return fattni_cuda_check(ctx, error, "cudaStreamSynchronize");
}

static fattn_status describe(fattn_ctx *ctx, char *text, size_t bytes) {
    const fattni_gpu *const g = &ctx->gpu;
    const unsigned shared = (unsigned)(g->shared_limit >> 10);
    if (!g->driver) {
        snprintf(text, bytes, "plans for sm_%d, %u KiB of shared memory per block", g->arch, shared);
        return FATTN_OK;
    }
    struct cudaDeviceProp p;
    int driver = 0;
    FATTNI_TRY(fattni_cuda_check(ctx, cudaGetDeviceProperties(&p, ctx->device_id), "cudaGetDeviceProperties"));
    FATTNI_TRY(fattni_cuda_check(ctx, cudaDriverGetVersion(&driver), "cudaDriverGetVersion"));
    snprintf(text, bytes, "%s, sm_%d%d%s, %d SMs, %.1f GiB, %u KiB of shared memory per block, driver for CUDA %d.%d",
             p.name, p.major, p.minor, g->arch == 10 * p.major + p.minor ? "" : " capped", g->sms,
             (double)p.totalGlobalMem / (1 << 30), shared, driver / 1000, driver % 1000 / 10);
    return FATTN_OK;
}

static fattn_status start(fattn_ctx *ctx, const char *name, fattni_cuda_any kernel, int64_t grid, int block,
                          size_t shared, const void *args, bool early, int cluster) {
    if (grid == 0) return FATTN_OK;
    if (grid > INT32_MAX)
        return fattn_ctx_fail(ctx, FATTN_E_UNSUPPORTED, "%s: %lld blocks exceed CUDA's limit of 2^31-1", name,
                              (long long)grid);
    bool entered;
    FATTNI_TRY(fattni_cuda_enter(ctx, &entered));
    void *arguments[] = {(void *)(uintptr_t)args};
    cudaLaunchAttribute attributes[2];
    unsigned n = 0;
    if (early && ctx->gpu.overlaps) {
        attributes[n].id = cudaLaunchAttributeProgrammaticStreamSerialization;
        attributes[n++].val.programmaticStreamSerializationAllowed = 1;
    }
    if (cluster > 1) {
        attributes[n].id = cudaLaunchAttributeClusterDimension;
        attributes[n].val.clusterDim.x = (unsigned)cluster;
        attributes[n].val.clusterDim.y = attributes[n].val.clusterDim.z = 1, ++n;
    }
    const cudaLaunchConfig_t config = {.gridDim = {(unsigned)grid, 1, 1},
                                       .blockDim = {(unsigned)block, 1, 1},
                                       .dynamicSmemBytes = shared,
                                       .stream = ctx->stream,
                                       .attrs = attributes,
                                       .numAttrs = n};
    const cudaError_t error = cudaLaunchKernelExC(&config, pointer_of(kernel), arguments);
    fattni_cuda_leave(ctx, entered);
    return fattni_cuda_check(ctx, error, name);
}

fattn_status fattni_cuda_start(fattn_ctx *ctx, const char *name, fattni_cuda_any kernel, int64_t grid, int block,
                               size_t shared, const void *args) {
    return start(ctx, name, kernel, grid, block, shared, args, true, 1);
}
fattn_status fattni_cuda_start_clusters(fattn_ctx *ctx, const char *name, fattni_cuda_any kernel, int64_t grid,
                                        int cluster, int block, size_t shared, const void *args, bool waits) {
    return start(ctx, name, kernel, grid, block, shared, args, waits, cluster);
}

fattn_status fattni_cuda_move(fattn_ctx *ctx, void *dst, const void *src, size_t bytes) {
    if (bytes == 0) return FATTN_OK;
    bool entered;
    FATTNI_TRY(fattni_cuda_enter(ctx, &entered));
    const cudaError_t error = cudaMemcpyAsync(dst, src, bytes, cudaMemcpyDefault, ctx->stream);
    fattni_cuda_leave(ctx, entered);
    return fattni_cuda_check(ctx, error, "cudaMemcpyAsync");
}

fattn_status fattni_cuda_move_rows(fattn_ctx *ctx, void *dst, int64_t dst_pitch, const void *src, int64_t src_pitch,
                                   size_t width, int64_t rows) {
    if (width == 0 || rows == 0) return FATTN_OK;
    bool entered;
    FATTNI_TRY(fattni_cuda_enter(ctx, &entered));
    const cudaError_t error = cudaMemcpy2DAsync(dst, (size_t)dst_pitch, src, (size_t)src_pitch, width, (size_t)rows,
                                                cudaMemcpyDeviceToDevice, ctx->stream);
    fattni_cuda_leave(ctx, entered);
    return fattni_cuda_check(ctx, error, "cudaMemcpy2DAsync");
}

void fattn_zero_counters(fattni_zero_args x);

/* In a graph a memset waits for the kernel before it, and the next kernel waits 4 us for the memset: what is small is
   zeroed by a kernel there (bench/results/small_models_h100.txt). */
enum { MOST_ZEROED_BY_KERNEL = 16 << 10 };

static bool is_zeroed_by_kernel(const void *p, size_t bytes) {
    return bytes <= MOST_ZEROED_BY_KERNEL && bytes % 4 == 0 && (uintptr_t)p % 4 == 0;
}
static fattn_status zero_by_kernel(fattn_ctx *ctx, void *p, size_t bytes) {
    const fattni_zero_args zero = {p, (int32_t)(bytes / 4)};
    return FATTNI_START(ctx, fattn_zero_counters, 1, FATTNI_ZERO_THREADS, &zero);
}

fattn_status fattni_cuda_zero_beside(fattn_ctx *ctx, void *p, size_t bytes) {
    const bool by_kernel = bytes > 0 && ctx->gpu.overlaps && is_zeroed_by_kernel(p, bytes);
    return by_kernel ? zero_by_kernel(ctx, p, bytes) : fattni_cuda_zero(ctx, p, bytes);
}

fattn_status fattni_cuda_zero(fattn_ctx *ctx, void *p, size_t bytes) {
    if (bytes == 0) return FATTN_OK;
    if (ctx->recording && is_zeroed_by_kernel(p, bytes)) return zero_by_kernel(ctx, p, bytes);
    bool entered;
    FATTNI_TRY(fattni_cuda_enter(ctx, &entered));
    const cudaError_t error = cudaMemsetAsync(p, 0, bytes, ctx->stream);
    fattni_cuda_leave(ctx, entered);
    return fattni_cuda_check(ctx, error, "cudaMemsetAsync");
}

fattn_status fattni_cuda_zero_rows(fattn_ctx *ctx, void *p, size_t pitch, size_t width, int64_t rows) {
    if (width == 0 || rows == 0) return FATTN_OK;
    if (rows == 1 || width == pitch) return fattni_cuda_zero(ctx, p, width * (size_t)rows);
    bool entered;
    FATTNI_TRY(fattni_cuda_enter(ctx, &entered));
    const cudaError_t error = cudaMemset2DAsync(p, pitch, 0, width, (size_t)rows, ctx->stream);
    fattni_cuda_leave(ctx, entered);
    return fattni_cuda_check(ctx, error, "cudaMemset2DAsync");
}

const fattni_device_ops fattni_cuda_device = {
    .name = "GPU",
    .has_streams = true,
    .default_allocator = device_allocator,
    .open = open_gpu,
    .close = close_gpu,
    .sync = fattni_cuda_sync,
    .describe = describe,
    .enter = fattni_cuda_enter,
    .leave = fattni_cuda_leave,
    .copy = fattni_cuda_copy,
    .copy_pairs = fattni_cuda_copy_pairs,
    .add = fattni_cuda_add,
    .normal = fattni_cuda_normal,
    .zero_rows = fattni_cuda_zero_rows,
    .dropout_mask = fattni_cuda_mask,
    .kv_append = fattni_cuda_kv_append,
    .sample = fattni_cuda_sample,
    .fp8_quantize = fattni_fp8_quantize_cuda,
    .graph_begin = fattni_cuda_graph_begin,
    .graph_end = fattni_cuda_graph_end,
    .graph_launch = fattni_cuda_graph_launch,
    .graph_destroy = fattni_cuda_graph_destroy,
    .pinned_alloc = fattni_cuda_pinned_alloc,
    .pinned_free = fattni_cuda_pinned_free,
    .mark_create = fattni_cuda_mark_create,
    .mark_set = fattni_cuda_mark_set,
    .mark_wait = fattni_cuda_mark_wait,
    .mark_destroy = fattni_cuda_mark_destroy,
    .stream_create = fattni_cuda_stream_create,
    .stream_order = fattni_cuda_stream_order,
    .stream_destroy = fattni_cuda_stream_destroy,
};
