/* Ranks whose GPUs exchange messages by NCCL 2.14 or later, on a stream of the communicator's own. NCCL is loaded when
   a communicator is made, never linked, and its calls do not block: what takes long runs in the background, and its
   result is asked for until the time limit. */
#include "core/comm/lane.h"
#include "core/comm/nccl.h"
#include "core/cuda/launch.h"
#include "core/cuda/library.h"

#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <sched.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

/* ---- NCCL's interface, from its documentation ---- */

enum { NCCL_SUCCESS = 0, NCCL_IN_PROGRESS = 7, NCCL_BYTE = 1 /* ncclUint8 */ };
typedef int nccl_result; /* ncclResult_t and ncclDataType_t are enumerations */
typedef struct ncclComm *nccl_comm;

typedef struct nccl_id {
    char bytes[FATTN_NCCL_ID];
} nccl_id;

/* The first version's; later ones have more behind it, and read no more than `version` has. */
typedef struct nccl_config {
    size_t size;
    unsigned int magic, version;
    int blocking;
} nccl_config;

#define FUNCTIONS(X)                                                                                                   \
    X(nccl_result, get_id, ncclGetUniqueId, (nccl_id *))                                                               \
    X(nccl_result, open, ncclCommInitRankConfig, (nccl_comm *, int, nccl_id, int, nccl_config *))                      \
    X(nccl_result, finalize, ncclCommFinalize, (nccl_comm))                                                            \
    X(nccl_result, destroy, ncclCommDestroy, (nccl_comm))                                                              \
    X(nccl_result, abort, ncclCommAbort, (nccl_comm))                                                                  \
    X(nccl_result, result_of, ncclCommGetAsyncError, (nccl_comm, nccl_result *))                                       \
    X(nccl_result, count, ncclCommCount, (nccl_comm, int *))                                                           \
    X(nccl_result, rank, ncclCommUserRank, (nccl_comm, int *))                                                         \
    X(nccl_result, device, ncclCommCuDevice, (nccl_comm, int *))                                                       \
    X(nccl_result, begin, ncclGroupStart, (void))                                                                      \
    X(nccl_result, end, ncclGroupEnd, (void))                                                                          \
    X(nccl_result, send, ncclSend, (const void *, size_t, int, int, nccl_comm, cudaStream_t))                          \
    X(nccl_result, receive, ncclRecv, (void *, size_t, int, int, nccl_comm, cudaStream_t))                             \
    X(const char *, text, ncclGetErrorString, (nccl_result))

typedef struct library {
    void *file;
#define X(result, name, symbol, arguments) result(*name) arguments;
    FUNCTIONS(X)
#undef X
} library;

static fattn_status load(fattn_ctx *ctx, library *l) {
    const fattni_symbol wanted[] = {
#define X(result, name, symbol, arguments) {#symbol, &l->name},
        FUNCTIONS(X)
#undef X
    };
    const char *missing;
    l->file = fattni_library_open(FATTNI_NCCL_FILE, wanted, sizeof wanted / sizeof *wanted, &missing);
    if (l->file) return FATTN_OK;
    if (!missing) return fattn_ctx_fail(ctx, FATTN_E_UNSUPPORTED, "NCCL (" FATTNI_NCCL_FILE ") was not found");
    return fattn_ctx_fail(ctx, FATTN_E_UNSUPPORTED, "NCCL (" FATTNI_NCCL_FILE ") has no %s: it is older than 2.14",
                          missing);
}

/* ---- state ---- */

typedef struct nccl_state {
    library l;
    fattn_ctx *ctx;
    nccl_comm comm; /* NULL: not yet, or aborted */
    bool is_ours, waits, failed;
    int rank, size;
    double time_limit;
    cudaStream_t moves;
    cudaEvent_t begun, ended[FATTNI_LANE_SLOTS];
    int64_t started, finished;
    char failure[FATTNI_ERROR_BYTES];
} nccl_state;

static double seconds(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static fattn_status checked(nccl_state *s, nccl_result result, const char *what) {
    if (result == NCCL_SUCCESS) return FATTN_OK;
    return fattn_ctx_fail(s->ctx, FATTN_E_COMM, "rank %d: %s: %s", s->rank, what, s->l.text(result));
}

static fattn_status checked_cuda(nccl_state *s, cudaError_t error, const char *what) {
    return fattni_cuda_check(s->ctx, (int)error, what);
}

/* The result of a call that may go on in the background. */
static fattn_status wait_for(nccl_state *s, nccl_result result, const char *what) {
    const double end = seconds() + s->time_limit;
    while (result == NCCL_IN_PROGRESS) {
        FATTNI_TRY(checked(s, s->l.result_of(s->comm, &result), "ncclCommGetAsyncError"));
        if (result == NCCL_IN_PROGRESS && seconds() > end)
            return fattn_ctx_fail(s->ctx, FATTN_E_COMM, "a rank does not answer within %g s, rank %d of %d waits in %s",
                                  s->time_limit, s->rank, s->size, what);
        sched_yield();
    }
    return checked(s, result, what);
}

/* ---- the transport ---- */

static void abort_rank(void *state, const char *text) {
    nccl_state *const s = state;
    bool entered;
    if (!s->failed) snprintf(s->failure, sizeof s->failure, "rank %d: %s", s->rank, text);
    s->failed = true;
    if (!s->comm || fattni_cuda_enter(s->ctx, &entered)) return;
    if (s->is_ours) s->l.abort(s->comm); /* ends what waits on the GPU, too */
    s->comm = NULL;
    /* The caller may free buffers of open exchanges, on the context's stream. */
    if (!cudaEventRecord(s->begun, s->moves)) cudaStreamWaitEvent(s->ctx->stream, s->begun, 0);
    fattni_cuda_leave(s->ctx, entered);
}

static fattn_status check_state(nccl_state *s) {
    if (s->failed) return fattn_ctx_fail(s->ctx, FATTN_E_COMM, "%s", s->failure);
    return wait_for(s, NCCL_IN_PROGRESS, "an earlier call of NCCL");
}

/* What this rank sends to itself is copied: it may stay where it is. */
static fattn_status move_own(nccl_state *s, const fattn_message *out, const fattn_message *in) {
    const size_t sent = out ? out->bytes : 0, expected = in ? in->bytes : 0;
    if (sent != expected)
        return fattn_ctx_fail(s->ctx, FATTN_E_COMM,
                              "rank %d sends itself %zu bytes and expects %zu: their shapes or dtypes differ", s->rank,
                              sent, expected);
    if (sent == 0 || out->data == in->data) return FATTN_OK;
    return checked_cuda(s, cudaMemcpyAsync(in->data, out->data, sent, cudaMemcpyDeviceToDevice, s->moves),
                        "cudaMemcpyAsync");
}

static bool is_well(nccl_result result) { return result == NCCL_SUCCESS || result == NCCL_IN_PROGRESS; }

static nccl_result enqueue(nccl_state *s, const fattn_message *sends, int n_sends, const fattn_message *receives,
                           int n_receives) {
    nccl_result result = s->l.begin();
    if (!is_well(result)) return result;
    for (int n = 0; n < n_sends && is_well(result); ++n)
        if (sends[n].peer != s->rank)
            result = s->l.send(sends[n].data, sends[n].bytes, NCCL_BYTE, sends[n].peer, s->comm, s->moves);
    for (int n = 0; n < n_receives && is_well(result); ++n)
        if (receives[n].peer != s->rank)
            result = s->l.receive(receives[n].data, receives[n].bytes, NCCL_BYTE, receives[n].peer, s->comm, s->moves);
    const nccl_result ended = s->l.end();
    return is_well(result) ? ended : result;
}

static const fattn_message *of_peer(const fattn_message *m, int n, int peer) {
    for (int i = 0; i < n; ++i)
        if (m[i].peer == peer) return &m[i];
    return NULL;
}

static fattn_status start_on_device(nccl_state *s, const fattn_message *sends, int n_sends,
                                    const fattn_message *receives, int n_receives) {
    FATTNI_TRY(check_state(s));
    FATTNI_TRY(checked_cuda(s, cudaEventRecord(s->begun, s->ctx->stream), "cudaEventRecord"));
    FATTNI_TRY(checked_cuda(s, cudaStreamWaitEvent(s->moves, s->begun, 0), "cudaStreamWaitEvent"));
    const fattn_message *const out = of_peer(sends, n_sends, s->rank), *const in =
                                                                           of_peer(receives, n_receives, s->rank);
    FATTNI_TRY(move_own(s, out, in));
    if (n_sends > (out != NULL) || n_receives > (in != NULL))
        FATTNI_TRY(wait_for(s, enqueue(s, sends, n_sends, receives, n_receives), "ncclGroupEnd"));
    return checked_cuda(s, cudaEventRecord(s->ended[s->started % FATTNI_LANE_SLOTS], s->moves), "cudaEventRecord");
}

static fattn_status start(void *state, fattn_ctx *ctx, const fattn_message *sends, int n_sends,
                          const fattn_message *receives, int n_receives, void **request) {
    nccl_state *const s = state;
    bool entered;
    if (s->started - s->finished == FATTNI_LANE_SLOTS)
        return fattn_ctx_fail(ctx, FATTN_E_STATE, "%d exchanges are open, no more are possible", FATTNI_LANE_SLOTS);
    FATTNI_TRY(fattni_cuda_enter(ctx, &entered));
    const fattn_status status = start_on_device(s, sends, n_sends, receives, n_receives);
    fattni_cuda_leave(ctx, entered);
    if (status) return status;
    s->started += 1;
    *request = s;
    return FATTN_OK;
}

/* Until the GPU has reached the event. */
static fattn_status wait_on_host(nccl_state *s, cudaEvent_t event) {
    const double end = seconds() + s->time_limit;
    cudaError_t reached;
    while ((reached = cudaEventQuery(event)) == cudaErrorNotReady) {
        if (seconds() > end)
            return fattn_ctx_fail(s->ctx, FATTN_E_COMM,
                                  "a rank does not answer within %g s, rank %d of %d waits for it", s->time_limit,
                                  s->rank, s->size);
        FATTNI_TRY(check_state(s));
        sched_yield();
    }
    return checked_cuda(s, reached, "cudaEventQuery");
}

static fattn_status finish_on_device(nccl_state *s, cudaEvent_t ended) {
    FATTNI_TRY(check_state(s));
    FATTNI_TRY(checked_cuda(s, cudaStreamWaitEvent(s->ctx->stream, ended, 0), "cudaStreamWaitEvent"));
    return s->waits ? wait_on_host(s, ended) : FATTN_OK;
}

static fattn_status finish(void *state, fattn_ctx *ctx, void *request) {
    nccl_state *const s = state;
    bool entered;
    (void)request; /* they are finished in order */
    const int slot = (int)(s->finished++ % FATTNI_LANE_SLOTS);
    FATTNI_TRY(fattni_cuda_enter(ctx, &entered));
    const fattn_status status = finish_on_device(s, s->ended[slot]);
    fattni_cuda_leave(ctx, entered);
    return status;
}

static void close_on_device(nccl_state *s) {
    if (s->comm && s->is_ours) {
        if (!s->failed && wait_for(s, s->l.finalize(s->comm), "ncclCommFinalize") == FATTN_OK)
            s->l.destroy(s->comm);
        else
            s->l.abort(s->comm);
    }
    if (s->moves) cudaStreamDestroy(s->moves);
    if (s->begun) cudaEventDestroy(s->begun);
    for (int n = 0; n < FATTNI_LANE_SLOTS; ++n)
        if (s->ended[n]) cudaEventDestroy(s->ended[n]);
}

static void close_rank(void *state, fattn_ctx *ctx) {
    nccl_state *const s = state;
    bool entered;
    if (!fattni_cuda_enter(ctx, &entered)) {
        close_on_device(s);
        fattni_cuda_leave(ctx, entered);
    }
    dlclose(s->l.file);
    fattni_host_free(ctx, s, sizeof *s);
}

/* ---- creation ---- */

static fattn_status make_id(fattn_ctx *ctx, uint8_t *id) {
    nccl_state s = {.ctx = ctx};
    nccl_id made;
    bool entered;
    FATTNI_TRY(load(ctx, &s.l));
    fattn_status status = fattni_cuda_enter(ctx, &entered);
    if (!status) {
        status = checked(&s, s.l.get_id(&made), "ncclGetUniqueId");
        fattni_cuda_leave(ctx, entered);
    }
    if (!status) memcpy(id, &made, sizeof made);
    dlclose(s.l.file);
    return status;
}

/* Of a communicator that the caller has made. */
static fattn_status take_theirs(nccl_state *s, void *theirs) {
    int device;
    s->comm = theirs;
    FATTNI_TRY(checked(s, s->l.rank(s->comm, &s->rank), "ncclCommUserRank"));
    FATTNI_TRY(checked(s, s->l.count(s->comm, &s->size), "ncclCommCount"));
    FATTNI_TRY(checked(s, s->l.device(s->comm, &device), "ncclCommCuDevice"));
    if (device == s->ctx->device_id) return FATTN_OK;
    return fattn_ctx_fail(s->ctx, FATTN_E_DEVICE, "nccl_comm is of device %d, the context is on device %d", device,
                          s->ctx->device_id);
}

static fattn_status open_on_device(nccl_state *s, const fattni_nccl_join *j) {
    FATTNI_TRY(checked_cuda(s, cudaStreamCreateWithFlags(&s->moves, cudaStreamNonBlocking), "cudaStreamCreate"));
    FATTNI_TRY(checked_cuda(s, cudaEventCreateWithFlags(&s->begun, cudaEventDisableTiming), "cudaEventCreate"));
    for (int n = 0; n < FATTNI_LANE_SLOTS; ++n)
        FATTNI_TRY(checked_cuda(s, cudaEventCreateWithFlags(&s->ended[n], cudaEventDisableTiming), "cudaEventCreate"));
    if (!j->id) return take_theirs(s, j->theirs);
    nccl_config config = {.size = sizeof config, .magic = 0xcafebeef, .version = 21400, .blocking = 0};
    nccl_id id;
    memcpy(&id, j->id, sizeof id);
    s->is_ours = true;
    return wait_for(s, s->l.open(&s->comm, j->size, id, j->rank, &config), "ncclCommInitRank");
}

static fattn_status open_rank(fattn_ctx *ctx, const fattni_nccl_join *j, fattn_transport *out) {
    library l;
    void *p;
    bool entered;
    FATTNI_TRY(load(ctx, &l));
    fattn_status status = fattni_host_alloc(ctx, sizeof(nccl_state), &p);
    if (status) {
        dlclose(l.file);
        return status;
    }
    nccl_state *const s = p;
    *s = (nccl_state){
        .l = l, .ctx = ctx, .waits = j->waits, .rank = j->rank, .size = j->size, .time_limit = j->time_limit};
    status = fattni_cuda_enter(ctx, &entered);
    if (!status) {
        status = open_on_device(s, j);
        fattni_cuda_leave(ctx, entered);
    }
    if (status) {
        s->failed = true; /* so that closing does not wait for other ranks */
        close_rank(s, ctx);
        return status;
    }
    *out = (fattn_transport){.struct_size = sizeof *out,
                             .rank = s->rank,
                             .size = s->size,
                             .devices = 1u << FATTN_CUDA,
                             .name = "NCCL",
                             .state = s,
                             .start = start,
                             .finish = finish,
                             .abort = abort_rank,
                             .close = close_rank};
    return FATTN_OK;
}

const fattni_nccl_ops fattni_cuda_nccl = {make_id, open_rank};
