/* Lanes on GPUs: copies run on a stream of the lane's own, by the copy engines; events order them. */
#include "core/comm/lane.h"
#include "core/cuda/launch.h"

#include <cuda_runtime_api.h>
#include <pthread.h>
#include <string.h>

enum { MOST_DEVICES = 64 };

typedef struct lane_state {
    cudaStream_t copies;
    cudaEvent_t begun[FATTNI_LANE_SLOTS], ended[FATTNI_LANE_SLOTS];
    bool reached[MOST_DEVICES]; /* devices whose memory this one can read */
} lane_state;

static fattn_status checked(fattn_ctx *ctx, cudaError_t error, const char *what) {
    return fattni_cuda_check(ctx, (int)error, what);
}

static fattn_status make(fattn_ctx *ctx, lane_state *s) {
    FATTNI_TRY(checked(ctx, cudaStreamCreateWithFlags(&s->copies, cudaStreamNonBlocking), "cudaStreamCreate"));
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

/* Lets this lane's device read what cudaMalloc gave on the other one without a detour over the host, where the hardware
   can. The copies work without, too. */
static void reach(fattni_lane *l, int device) {
    lane_state *const s = l->state;
    if (device == l->ctx->device_id || device >= MOST_DEVICES || s->reached[device]) return;
    s->reached[device] = true;
    cudaDeviceEnablePeerAccess(device, 0);
    cudaGetLastError(); /* "already enabled", or the hardware cannot */
}

static fattn_status begin(fattni_lane *l, int slot) {
    lane_state *const s = l->state;
    bool entered;
    FATTNI_TRY(fattni_cuda_enter(l->ctx, &entered));
    cudaError_t error = cudaEventRecord(s->begun[slot], l->ctx->stream);
    if (!error) error = cudaStreamWaitEvent(s->copies, s->begun[slot], 0);
    fattni_cuda_leave(l->ctx, entered);
    return checked(l->ctx, error, "cudaEventRecord");
}

static fattn_status copy(fattni_lane *l, int slot, void *dst, const fattni_lane *from, int from_slot, const void *src,
                         size_t bytes) {
    (void)slot;
    lane_state *const s = l->state;
    const lane_state *const f = from->state;
    bool entered;
    FATTNI_TRY(fattni_cuda_enter(l->ctx, &entered));
    reach(l, from->ctx->device_id);
    cudaError_t error = cudaStreamWaitEvent(s->copies, f->begun[from_slot], 0);
    if (!error && dst != src)
        error = from->ctx->device_id == l->ctx->device_id
                    ? cudaMemcpyAsync(dst, src, bytes, cudaMemcpyDeviceToDevice, s->copies)
                    : cudaMemcpyPeerAsync(dst, l->ctx->device_id, src, from->ctx->device_id, bytes, s->copies);
    fattni_cuda_leave(l->ctx, entered);
    return checked(l->ctx, error, "cudaMemcpyAsync");
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
    FATTNI_TRY(checked(l->ctx, error, "cudaEventRecord"));
    return follow(l, l, slot);
}

const fattni_lane_ops fattni_cuda_lane = {open_lane, close_lane, begin, copy, end, follow};
