#include "cuda_device.h"

#include "cuda_blas.h"
#include "cuda_kernels.h"
#include "cuda_sm90.h"

#include <cuda_runtime_api.h>
#include <string.h>

fattn_status fattni_cuda_check(fattn_ctx *ctx, int error, const char *what) {
    if (error == cudaSuccess) return FATTN_OK;
    return fattn_ctx_fail(ctx, FATTN_E_CUDA, "%s: %s", what,
                          cudaGetErrorString((cudaError_t)error));
}

/* Runs what follows on the context's device, whatever the caller's current one is. */
static fattn_status enter(fattn_ctx *ctx, int *previous) {
    FATTNI_TRY(fattni_cuda_check(ctx, cudaGetDevice(previous), "cudaGetDevice"));
    if (*previous == ctx->device_id) return FATTN_OK;
    return fattni_cuda_check(ctx, cudaSetDevice(ctx->device_id), "cudaSetDevice");
}

static void leave(const fattn_ctx *ctx, int previous) {
    if (previous != ctx->device_id) cudaSetDevice(previous);
}

static void *device_alloc(void *user, size_t bytes, size_t align, fattn_stream s) {
    (void)user, (void)align; /* CUDA's pools align to 512 bytes */
    void *p = NULL;
    if (cudaMallocAsync(&p, bytes, s) == cudaSuccess) return p;
    cudaGetLastError(); /* out of memory is our caller's status, not a pending error */
    return NULL;
}

static void device_free(void *user, void *p, size_t bytes, fattn_stream s) {
    (void)user, (void)bytes;
    cudaFreeAsync(p, s);
}

fattn_allocator fattni_cuda_allocator(void) {
    return (fattn_allocator){.alloc = device_alloc, .free = device_free};
}

/* CUDA's C interface takes functions as objects, which ISO C does not convert. */
static const void *pointer_of(fattni_cuda_any f) {
    const void *p;
    _Static_assert(sizeof p == sizeof f, "function and object pointers");
    memcpy(&p, &f, sizeof p);
    return p;
}

static fattn_status look(fattn_ctx *ctx) {
    int major = 0, minor = 0, sms = 0, shared = 0, l2 = 0;
    const int id = ctx->device_id;
    const struct { int *value; enum cudaDeviceAttr which; } wanted[] = {
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
    if (arch < 80)
        return fattn_ctx_fail(ctx, FATTN_E_UNSUPPORTED, "device %d is sm_%d, the kernels need sm_80",
                              id, arch);
    ctx->gpu.arch = ctx->arch_cap >= 80 && ctx->arch_cap < arch ? ctx->arch_cap : arch;
    ctx->gpu.sms = ctx->sm_limit > 0 && ctx->sm_limit < sms ? ctx->sm_limit : sms;
    ctx->gpu.shared_limit = (size_t)shared;
    ctx->gpu.l2_bytes = (size_t)l2;
    for (const fattni_cuda_kernel *k = fattni_cuda_kernels; k->name; ++k) {
        if (k->shared > ctx->gpu.shared_limit) continue;
        FATTNI_TRY(fattni_cuda_check(
            ctx, cudaFuncSetAttribute(pointer_of(k->kernel), cudaFuncAttributeMaxDynamicSharedMemorySize,
                                      (int)k->shared),
            k->name));
    }
    return ctx->gpu.arch == 90 ? fattni_sm90_open(ctx) : FATTN_OK;
}

fattn_status fattni_cuda_open(fattn_ctx *ctx) {
    int devices = 0, previous = 0;
    if (cudaGetDeviceCount(&devices) != cudaSuccess) {
        cudaGetLastError();
        devices = 0;
    }
    if (ctx->device_id < 0 || ctx->device_id >= devices)
        return fattn_ctx_fail(ctx, FATTN_E_UNSUPPORTED, "CUDA device %d: this machine has %d",
                              ctx->device_id, devices);
    FATTNI_TRY(enter(ctx, &previous));
    fattn_status s = look(ctx);
    if (!s) s = fattni_cuda_blas_open(ctx);
    leave(ctx, previous);
    return s;
}

void fattni_cuda_close(fattn_ctx *ctx) {
    int previous = 0;
    if (!ctx->gpu.blas || enter(ctx, &previous)) return;
    fattni_cuda_blas_close(ctx);
    leave(ctx, previous);
}

fattn_status fattni_cuda_sync(fattn_ctx *ctx) {
    int previous = 0;
    FATTNI_TRY(enter(ctx, &previous));
    const cudaError_t error = cudaStreamSynchronize(ctx->stream);
    leave(ctx, previous);
    return fattni_cuda_check(ctx, error, "cudaStreamSynchronize");
}

fattn_status fattni_cuda_start(fattn_ctx *ctx, const char *name, fattni_cuda_any kernel,
                               int64_t grid, int block, size_t shared, const void *args) {
    if (grid == 0) return FATTN_OK;
    if (grid > INT32_MAX)
        return fattn_ctx_fail(ctx, FATTN_E_UNSUPPORTED, "%s: %lld blocks exceed CUDA's 2^31-1", name,
                              (long long)grid);
    int previous = 0;
    FATTNI_TRY(enter(ctx, &previous));
    void *arguments[] = {(void *)(uintptr_t)args};
    const cudaError_t error = cudaLaunchKernel(pointer_of(kernel), (dim3){(unsigned)grid, 1, 1},
                                               (dim3){(unsigned)block, 1, 1}, arguments, shared,
                                               ctx->stream);
    leave(ctx, previous);
    return fattni_cuda_check(ctx, error, name);
}

fattn_status fattni_cuda_move(fattn_ctx *ctx, void *dst, const void *src, size_t bytes) {
    if (bytes == 0) return FATTN_OK;
    int previous = 0;
    FATTNI_TRY(enter(ctx, &previous));
    const cudaError_t error = cudaMemcpyAsync(dst, src, bytes, cudaMemcpyDefault, ctx->stream);
    leave(ctx, previous);
    return fattni_cuda_check(ctx, error, "cudaMemcpyAsync");
}

fattn_status fattni_cuda_move_rows(fattn_ctx *ctx, void *dst, int64_t dst_pitch, const void *src,
                                   int64_t src_pitch, size_t width, int64_t rows) {
    if (width == 0 || rows == 0) return FATTN_OK;
    int previous = 0;
    FATTNI_TRY(enter(ctx, &previous));
    const cudaError_t error =
        cudaMemcpy2DAsync(dst, (size_t)dst_pitch, src, (size_t)src_pitch, width, (size_t)rows,
                          cudaMemcpyDeviceToDevice, ctx->stream);
    leave(ctx, previous);
    return fattni_cuda_check(ctx, error, "cudaMemcpy2DAsync");
}

fattn_status fattni_cuda_zero(fattn_ctx *ctx, void *p, size_t bytes) {
    if (bytes == 0) return FATTN_OK;
    int previous = 0;
    FATTNI_TRY(enter(ctx, &previous));
    const cudaError_t error = cudaMemsetAsync(p, 0, bytes, ctx->stream);
    leave(ctx, previous);
    return fattni_cuda_check(ctx, error, "cudaMemsetAsync");
}

fattn_status fattni_cuda_zero_rows(fattn_ctx *ctx, void *p, size_t pitch, size_t width,
                                   int64_t rows) {
    if (width == 0 || rows == 0) return FATTN_OK;
    if (rows == 1 || width == pitch) return fattni_cuda_zero(ctx, p, width * (size_t)rows);
    int previous = 0;
    FATTNI_TRY(enter(ctx, &previous));
    const cudaError_t error = cudaMemset2DAsync(p, pitch, 0, width, (size_t)rows, ctx->stream);
    leave(ctx, previous);
    return fattni_cuda_check(ctx, error, "cudaMemset2DAsync");
}
