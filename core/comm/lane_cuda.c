/* Lanes on GPUs: copies run on a stream of the lane's own, by the copy engines, or, where nothing else runs meanwhile,
   by a kernel that reads the other GPU's memory; events order them. */
#include "core/comm/lane.h"
#include "core/cuda/driver.h"
#include "core/cuda/launch.h"
#include "core/cuda/tensor.h"

#include <cuda_runtime_api.h>
#include <pthread.h>
#include <string.h>

enum { MOST_DEVICES = 64, MOST_PAIRS = 20 };

typedef struct lane_state {
    cudaStream_t copies;
    cudaEvent_t begun[FATTNI_LANE_SLOTS], ended[FATTNI_LANE_SLOTS];
    bool asked[MOST_DEVICES], reached[MOST_DEVICES]; /* devices whose memory this one can read */
} lane_state;

static fattn_status checked(fattn_ctx *ctx, cudaError_t error, const char *what) {
    return fattni_cuda_check(ctx, (int)error, what);
}

static fattn_status make(fattn_ctx *ctx, lane_state *s) {
    int least, most;
    FATTNI_TRY(checked(ctx, cudaDeviceGetStreamPriorityRange(&least, &most), "cudaDeviceGetStreamPriorityRange"));
    /* What others wait for comes before what else could run. */
    FATTNI_TRY(checked(ctx, cudaStreamCreateWithPriority(&s->copies, cudaStreamNonBlocking, most), "cudaStreamCreate"));
    for (int n = 0; n < FATTNI_LANE_SLOTS; ++n) {
        cudaEvent_t *const two[2] = {&s->begun[n], &s->ended[n]};
        for (int i = 0; i < 2; ++i)
            FATTNI_TRY(checked(ctx, cudaEventCreateWithFlags(two[i], cudaEventDisableTiming), "cudaEventCreate"));
    }
    return FATTN_OK;
}

/* The pool is the process's. */
static pthread_mutex_t granting = PTHREAD_MUTEX_INITIALIZER;

/* Lets other devices read what cudaMallocAsync gives on this one, where the hardware can. If that changes while kernels
   run on this device, they may fail or read other numbers (seen with CUDA 13.0 on two H100): so it waits for them. */
static fattn_status grant(fattn_ctx *ctx) {
    struct cudaMemAccessDesc access[MOST_DEVICES];
    size_t missing = 0;
    int devices = 0;
    cudaMemPool_t pool;
    FATTNI_TRY(checked(ctx, cudaGetDeviceCount(&devices), "cudaGetDeviceCount"));
    FATTNI_TRY(checked(ctx, cudaDeviceGetMemPool(&pool, ctx->device_id), "cudaDeviceGetMemPool"));
    for (int d = 0; d < devices && d < MOST_DEVICES; ++d) {
        struct cudaMemLocation reader = {cudaMemLocationTypeDevice, d};
        enum cudaMemAccessFlags has = cudaMemAccessFlagsProtNone;
        int can = 0;
        if (d == ctx->device_id || cudaDeviceCanAccessPeer(&can, d, ctx->device_id) || !can) continue;
        FATTNI_TRY(checked(ctx, cudaMemPoolGetAccess(&has, pool, &reader), "cudaMemPoolGetAccess"));
        if (has == cudaMemAccessFlagsProtNone)
            access[missing++] = (struct cudaMemAccessDesc){reader, cudaMemAccessFlagsProtReadWrite};
    }
    if (missing == 0) return FATTN_OK;
    FATTNI_TRY(checked(ctx, cudaDeviceSynchronize(), "cudaDeviceSynchronize"));
    return checked(ctx, cudaMemPoolSetAccess(pool, access, missing), "cudaMemPoolSetAccess");
}

static fattn_status open_lane(fattni_lane *l) {
    bool entered;
    FATTNI_TRY(fattni_host_alloc(l->ctx, sizeof(lane_state), &l->state));
    memset(l->state, 0, sizeof(lane_state));
    FATTNI_TRY(fattni_cuda_enter(l->ctx, &entered));
    fattn_status s = make(l->ctx, l->state);
    if (!s) {
        pthread_mutex_lock(&granting);
        s = grant(l->ctx);
        pthread_mutex_unlock(&granting);
    }
    fattni_cuda_leave(l->ctx, entered);
    return s;
}

static void close_lane(fattni_lane *l) {
    lane_state *const s = l->state;
    bool entered;
    if (!s) return;
    if (!fattni_cuda_enter(l->ctx, &entered)) {
        if (s->copies) cudaStreamDestroy(s->copies);
        for (int n = 0; n < FATTNI_LANE_SLOTS; ++n) {
            if (s->begun[n]) cudaEventDestroy(s->begun[n]);
            if (s->ended[n]) cudaEventDestroy(s->ended[n]);
        }
        fattni_cuda_leave(l->ctx, entered);
    }
    fattni_host_free(l->ctx, s, sizeof *s);
    l->state = NULL;
}

/* Atomic operations on another GPU's memory are NVLink's; PCIe has none. */
static bool linked(const fattni_lane *l) {
    int devices = 0, native = 1;
    if (cudaGetDeviceCount(&devices)) return false;
    for (int d = 0; d < devices && native; ++d) {
        if (d == l->ctx->device_id) continue;
        if (!cudaDeviceGetP2PAttribute(&native, cudaDevP2PAttrNativeAtomicSupported, l->ctx->device_id, d)) continue;
        cudaGetLastError(); /* it is not the caller's */
        native = 0;
    }
    return devices > 1 && native;
}

/* Lets this lane's device read what cudaMalloc gave on the other one without a detour over the host, where the hardware
   can. The copies work without, too. */
static void reach(fattni_lane *l, int device) {
    lane_state *const s = l->state;
    if (device >= MOST_DEVICES || s->asked[device]) return;
    s->asked[device] = s->reached[device] = true;
    if (device == l->ctx->device_id) return;
    const cudaError_t error = cudaDeviceEnablePeerAccess(device, 0);
    s->reached[device] = !error || error == cudaErrorPeerAccessAlreadyEnabled;
    cudaGetLastError(); /* "already enabled", or the hardware cannot */
}

/* This lane's device reads what lies at p on the other one as its own memory: after reach, what cudaMalloc gave, and of
   a pool with access; not what else the driver's functions map. */
static bool reads(const fattni_lane *l, const fattni_lane *from, const void *p) {
    const lane_state *const s = l->state;
    const struct fattni_cuda_driver *const d = l->ctx->gpu.driver;
    const int device = from->ctx->device_id;
    if (device == l->ctx->device_id) return true;
    if (device >= MOST_DEVICES || !s->reached[device]) return false;
    cudaMemPool_t pool = NULL;
    int by_malloc = 0;
    if (d->attribute_of(&pool, CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE, (CUdeviceptr)(uintptr_t)p)) return false;
    if (pool) {
        struct cudaMemLocation reader = {cudaMemLocationTypeDevice, l->ctx->device_id};
        enum cudaMemAccessFlags has = cudaMemAccessFlagsProtNone;
        return !cudaMemPoolGetAccess(&has, pool, &reader) && has != cudaMemAccessFlagsProtNone;
    }
    return !d->attribute_of(&by_malloc, CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE, (CUdeviceptr)(uintptr_t)p) &&
           by_malloc;
}

static fattn_status begin(fattni_lane *l, int slot) {
    lane_state *const s = l->state;
    bool entered;
    FATTNI_TRY(fattni_cuda_enter(l->ctx, &entered));
    const cudaError_t error = cudaEventRecord(s->begun[slot], l->ctx->stream);
    fattni_cuda_leave(l->ctx, entered);
    return checked(l->ctx, error, "cudaEventRecord");
}

static fattn_status await(fattni_lane *l, int slot, const fattni_lane *from, int from_slot) {
    const lane_state *const s = l->state, *const f = from->state;
    bool entered;
    FATTNI_TRY(fattni_cuda_enter(l->ctx, &entered));
    reach(l, from->ctx->device_id);
    cudaError_t error = cudaStreamWaitEvent(s->copies, s->begun[slot], 0);
    if (!error) error = cudaStreamWaitEvent(s->copies, f->begun[from_slot], 0);
    fattni_cuda_leave(l->ctx, entered);
    return checked(l->ctx, error, "cudaStreamWaitEvent");
}

/* A copy as rows of bytes that are runs in both tensors. n[0] is of the dimension whose elements lie closest; pitches
   are in bytes. */
typedef struct runs {
    size_t width;
    int64_t n[4], to[4], from[4];
} runs;

static runs runs_of(const fattn_tensor *to, const fattn_tensor *from) {
    const int64_t size = (int64_t)fattn_dtype_size((fattn_dtype)to->dtype);
    runs r = {.width = (size_t)size, .n = {1, 1, 1, 1}};
    int dims = 0;
    for (int i = to->ndim - 1; i >= 0; --i) {
        const int64_t n = to->shape[i], a = to->stride[i] * size, b = from->stride[i] * size, last = dims - 1;
        if (n == 1) continue;
        if (dims == 0 && a == (int64_t)r.width && b == a) {
            r.width *= (size_t)n;
        } else if (dims > 0 && a == r.n[last] * r.to[last] && b == r.n[last] * r.from[last]) {
            r.n[last] *= n;
        } else {
            r.n[dims] = n, r.to[dims] = a, r.from[dims] = b;
            dims += 1;
        }
    }
    return r;
}

typedef struct ends {
    int to, from; /* devices */
    cudaStream_t stream;
} ends;

static cudaError_t copy_rows(const ends *e, char *to, size_t to_pitch, const char *from, size_t from_pitch,
                             size_t width, size_t rows) {
    if (rows == 1)
        return e->to == e->from ? cudaMemcpyAsync(to, from, width, cudaMemcpyDeviceToDevice, e->stream)
                                : cudaMemcpyPeerAsync(to, e->to, from, e->from, width, e->stream);
    if (e->to == e->from)
        return cudaMemcpy2DAsync(to, to_pitch, from, from_pitch, width, rows, cudaMemcpyDeviceToDevice, e->stream);
    const struct cudaMemcpy3DPeerParms p = {.dstPtr = {to, to_pitch, width, rows},
                                            .dstDevice = e->to,
                                            .srcPtr = {(void *)(uintptr_t)from, from_pitch, width, rows},
                                            .srcDevice = e->from,
                                            .extent = {width, rows, 1}};
    return cudaMemcpy3DPeerAsync(&p, e->stream);
}

/* CUDA's copies take pitches up to 2^31 - 1 bytes, of at least a row. */
static bool has_pitch(const runs *r, int64_t pitch) { return pitch >= (int64_t)r->width && pitch <= INT32_MAX; }

static cudaError_t copy_runs(const ends *e, const runs *r, char *to, const char *from) {
    const bool together = has_pitch(r, r->to[0]) && has_pitch(r, r->from[0]);
    const int64_t each = together ? r->n[0] : 1, n[4] = {r->n[0] / each, r->n[1], r->n[2], r->n[3]};
    cudaError_t error = cudaSuccess;
    for (int64_t i = 0; i < n[0] * n[1] * n[2] * n[3] && !error; ++i) {
        int64_t rest = i, a = 0, b = 0;
        for (int k = 0; k < 4; ++k) {
            a += rest % n[k] * r->to[k], b += rest % n[k] * r->from[k];
            rest /= n[k];
        }
        error = copy_rows(e, to + a, (size_t)r->to[0], from + b, (size_t)r->from[0], r->width, (size_t)each);
    }
    return error;
}

static cudaError_t by_engines(const fattni_lane *l, const fattn_tensor *dst, const fattni_lane *from,
                              const fattn_tensor *src, int n) {
    const lane_state *const s = l->state;
    const ends e = {l->ctx->device_id, from->ctx->device_id, s->copies};
    cudaError_t error = cudaSuccess;
    for (int i = 0; i < n && !error; ++i) {
        const runs r = runs_of(&dst[i], &src[i]);
        if (dst[i].data != src[i].data) error = copy_runs(&e, &r, dst[i].data, src[i].data);
    }
    return error;
}

/* One kernel: each copy by an engine takes three microseconds more than its bytes need. It has two blocks of an SM, so
   that a rank's copies of its own rows run beside: 4 MB are on their way, more than the link takes in its latency. */
static fattn_status by_kernel(fattni_lane *l, const fattn_tensor *dst, const fattn_tensor *src, int n) {
    const lane_state *const s = l->state;
    const fattn_stream stream = l->ctx->stream;
    fattni_copy_pair pairs[MOST_PAIRS];
    fattn_status status = FATTN_OK;
    l->ctx->stream = s->copies;
    for (int begin = 0; begin < n && !status; begin += MOST_PAIRS) {
        const int count = n - begin < MOST_PAIRS ? n - begin : MOST_PAIRS;
        for (int i = 0; i < count; ++i) pairs[i] = (fattni_copy_pair){dst[begin + i], src[begin + i]};
        status = fattni_cuda_copy_pairs_on(l->ctx, pairs, count, 2 * l->ctx->gpu.sms);
    }
    l->ctx->stream = stream;
    return status;
}

static fattn_status copy(fattni_lane *l, const fattn_tensor *dst, const fattni_lane *from, const fattn_tensor *src,
                         int n, bool exposed) {
    bool entered, reachable = exposed;
    FATTNI_TRY(fattni_cuda_enter(l->ctx, &entered));
    for (int i = 0; i < n && reachable; ++i) reachable = reads(l, from, src[i].data);
    const fattn_status status =
        reachable ? by_kernel(l, dst, src, n) : checked(l->ctx, by_engines(l, dst, from, src, n), "cudaMemcpyAsync");
    fattni_cuda_leave(l->ctx, entered);
    return status;
}

static fattn_status follow(fattni_lane *l, const fattni_lane *reader, int reader_slot) {
    const lane_state *const r = reader->state;
    bool entered;
    FATTNI_TRY(fattni_cuda_enter(l->ctx, &entered));
    const cudaError_t error = cudaStreamWaitEvent(l->ctx->stream, r->ended[reader_slot], 0);
    fattni_cuda_leave(l->ctx, entered);
    return checked(l->ctx, error, "cudaStreamWaitEvent");
}

static fattn_status end(fattni_lane *l, int slot) {
    lane_state *const s = l->state;
    bool entered;
    FATTNI_TRY(fattni_cuda_enter(l->ctx, &entered));
    const cudaError_t error = cudaEventRecord(s->ended[slot], s->copies);
    fattni_cuda_leave(l->ctx, entered);
    return checked(l->ctx, error, "cudaEventRecord");
}

const fattni_lane_ops fattni_cuda_lane = {open_lane, close_lane, linked, begin, await, copy, end, follow};
