/* CUDA contexts on several threads and streams, on threads that did not create them, and calls captured in graphs. */
#include "contexts.h"

#include <cuda.h>
#include <fattn/tape.h>
#include <math.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

typedef struct worker {
    uint64_t want[4];
    int wrong;
} worker;

static void *work(void *arg) {
    worker *const w = arg;
    cudaStream_t stream;
    if (cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking) != cudaSuccess) return NULL;
    fattn_ctx *const ctx = context(stream, 0);
    for (int n = 0; n < 40; ++n) {
        const attention_case a = wide_case(8 + n % 4);
        call *const c = call_new(ctx, &a);
        call_run(c);
        w->wrong += call_bits(c, CALL_O, CALL_D_SINK) != w->want[n % 4];
        call_free(c);
    }
    fattn_ctx_destroy(ctx);
    cudaStreamDestroy(stream);
    return w;
}

Test(cuda_threads, contexts_on_threads_and_streams, .timeout = 100) {
    fattn_ctx *const ctx = context_or_skip();
    worker workers[4] = {{{0}, 0}};
    for (int n = 0; n < 4; ++n) {
        const attention_case a = wide_case(8 + n);
        call *const c = call_new(ctx, &a);
        call_run(c);
        const uint64_t bits = call_bits(c, CALL_O, CALL_D_SINK);
        for (int t = 0; t < 4; ++t) workers[t].want[n] = bits;
        call_free(c);
    }
    pthread_t threads[4];
    for (int t = 0; t < 4; ++t) cr_assert_eq(pthread_create(&threads[t], NULL, work, &workers[t]), 0);
    for (int t = 0; t < 4; ++t) {
        void *finished = NULL;
        cr_assert_eq(pthread_join(threads[t], &finished), 0);
        cr_assert(finished);
        cr_assert_eq(workers[t].wrong, 0, "thread %d: %d of 40 calls", t, workers[t].wrong);
    }
    fattn_ctx_destroy(ctx);
}

/* ---- products that are timed ---- */

/* Times products of ones, whose sums are exact whichever candidate is the fastest. Gives how many elements are
   wrong. */
static int wrong_elements(fattn_ctx *ctx, int64_t M, int64_t N, int64_t K) {
    const int64_t shapes[3][2] = {{M, K}, {N, K}, {M, N}};
    float *const host = malloc((size_t)(64 * 1024) * sizeof *host);
    fattn_tensor ones[2], value;
    fattn_tape *tape;
    cr_assert(host);
    for (int n = 0; n < 64 * 1024; ++n) host[n] = 1.0f;
    for (int i = 0; i < 2; ++i) {
        const fattn_tensor from = fattn_tensor_view(host, FATTN_F32, FATTN_CPU, 0, 2, shapes[i]);
        call_must(ctx, fattn_tensor_alloc(ctx, FATTN_F32, 2, shapes[i], &ones[i]), "alloc");
        call_must(ctx, fattn_tensor_copy(ctx, &ones[i], &from), "copy");
    }
    call_must(ctx, fattn_tape_create(ctx, &tape), "tape");
    const fattn_var y = fattn_op_linear(tape, fattn_input(tape, &ones[0]), fattn_input(tape, &ones[1]), (fattn_var){0});
    int wrong = 0;
    if (fattn_tape_status(tape) != FATTN_E_UNSUPPORTED) { /* no cuBLAS */
        call_must(ctx, fattn_tape_value(tape, y, &value), "product");
        const fattn_tensor to = fattn_tensor_view(host, FATTN_F32, FATTN_CPU, 0, 2, shapes[2]);
        call_must(ctx, fattn_tensor_copy(ctx, &to, &value), "copy");
        for (int64_t n = 0; n < M * N; ++n) wrong += host[n] != (float)K;
    }
    fattn_tape_destroy(tape);
    for (int i = 0; i < 2; ++i) fattn_tensor_free(ctx, &ones[i]);
    free(host);
    return wrong;
}
/* *arg: whether the thread has a stream of its own, and then what is wrong. The default stream cannot be captured. */
static void *time_products(void *arg) {
    int *const wrong = arg;
    cudaStream_t stream = NULL;
    fattn_ctx_options o = {.struct_size = sizeof o, .device = FATTN_CUDA, .flags = FATTN_CTX_TUNE};
    fattn_ctx *ctx;
    if (*wrong && cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking) != cudaSuccess) return NULL;
    o.stream = stream;
    if (fattn_ctx_create(&o, &ctx) != FATTN_OK) return NULL;
    *wrong = 0;
    for (int64_t n = 1; n <= 8; ++n)
        *wrong += wrong_elements(ctx, 32 * n, 128, 256) + wrong_elements(ctx, 64, 48 * n, 136);
    *wrong += cudaGetLastError() != cudaSuccess;
    fattn_ctx_destroy(ctx);
    if (stream) cudaStreamDestroy(stream);
    return wrong;
}

Test(cuda_threads, products_are_timed_at_once, .timeout = 100) {
    fattn_ctx_destroy(context_or_skip());
    int wrong[4] = {0, 1, 1, 1};
    pthread_t threads[4];
    for (int n = 0; n < 4; ++n) cr_assert_eq(pthread_create(&threads[n], NULL, time_products, &wrong[n]), 0);
    for (int n = 0; n < 4; ++n) {
        void *finished = NULL;
        cr_assert_eq(pthread_join(threads[n], &finished), 0);
        cr_assert(finished);
        cr_assert_eq(wrong[n], 0, "thread %d: %d wrong elements", n, wrong[n]);
    }
}

/* ---- a context on threads that did not create it ---- */

/* Functions of the driver, which the tests are not linked with. */
typedef struct driver {
    CUresult (*get_current)(CUcontext *), (*create)(CUcontext *, unsigned, CUdevice);
    CUresult (*pop)(CUcontext *), (*destroy)(CUcontext);
} driver;

static void *driver_function(const char *name, unsigned version) {
    void *f = NULL;
    enum cudaDriverEntryPointQueryResult found;
    must(cudaGetDriverEntryPointByVersion(name, &f, version, cudaEnableDefault, &found), name);
    cr_assert_eq(found, cudaDriverEntryPointSuccess, "%s", name);
    return f;
}

static driver open_driver(void) {
    driver d;
    /* cuCtxCreate of CUDA 4 has no parameters that came later. */
    void *const f[] = {driver_function("cuCtxGetCurrent", 12000), driver_function("cuCtxCreate", 4000),
                       driver_function("cuCtxPopCurrent", 12000), driver_function("cuCtxDestroy", 12000)};
    memcpy(&d.get_current, &f[0], sizeof f[0]), memcpy(&d.create, &f[1], sizeof f[1]);
    memcpy(&d.pop, &f[2], sizeof f[2]), memcpy(&d.destroy, &f[3], sizeof f[3]);
    return d;
}

/* An attention call in each dtype, plain and with every feature; a product by cuBLAS; copies. Contexts with the
   same options give the same bits. */
enum { KINDS = 8 };
static uint64_t bits_of_kind(fattn_ctx *ctx, int n) {
    const attention_case a = wide_case(n < 4 ? n : 4 + n);
    call *const c = call_new(ctx, &a);
    call_run(c);
    uint64_t bits = call_bits(c, CALL_O, CALL_D_SINK);
    fattn_tape *tape;
    fattn_tensor value;
    call_must(ctx, fattn_tape_create(ctx, &tape), "tape");
    const fattn_var x = fattn_input(tape, &c->t[CALL_D_O]);
    const fattn_var y = fattn_op_matmul(tape, x, x, 0, 1);
    if (fattn_tape_status(tape) != FATTN_E_UNSUPPORTED) { /* no cuBLAS */
        call_must(ctx, fattn_tape_value(tape, y, &value), "product");
        const fattn_tensor own = c->t[CALL_D_O];
        c->t[CALL_D_O] = value;
        bits ^= call_bits(c, CALL_D_O, CALL_D_O);
        c->t[CALL_D_O] = own;
    }
    fattn_tape_destroy(tape);
    call_free(c);
    return bits;
}

/* A thread that has never called CUDA creates, uses or destroys a context, or all of these. Counts errors: wrong
   bits, and a changed current device or CUDA context. */
enum { MAKE = 1, USE = 2, DESTROY = 4 };
typedef struct visit {
    int what, from, device, wrong;
    const driver *driver;
    const uint64_t *want;
    fattn_stream stream;
    fattn_ctx *ctx;
    pthread_mutex_t *one_at_a_time;
} visit;

static int changed(const visit *v, CUcontext before) {
    CUcontext after = NULL;
    if (v->driver->get_current(&after) != CUDA_SUCCESS || after != before) return 1;
    int device = -1;
    return v->device >= 0 && (cudaGetDevice(&device) != cudaSuccess || device != v->device);
}

static void *visit_context(void *arg) {
    visit *const v = arg;
    CUcontext before = NULL;
    if (v->driver->get_current(&before) != CUDA_SUCCESS) v->wrong += 1;
    if (v->what & MAKE) v->ctx = context(v->stream, 0);
    v->wrong += changed(v, before);
    for (int n = 0; (v->what & USE) && n < KINDS; ++n) {
        const int kind = (v->from + n) % KINDS;
        if (v->one_at_a_time) pthread_mutex_lock(v->one_at_a_time);
        v->wrong += bits_of_kind(v->ctx, kind) != v->want[kind];
        if (v->one_at_a_time) pthread_mutex_unlock(v->one_at_a_time);
        v->wrong += changed(v, before);
    }
    if (v->what & DESTROY) fattn_ctx_destroy(v->ctx);
    v->wrong += changed(v, before);
    return NULL;
}

enum { VISITORS = 4 };
static void visit_at_once(visit *v, int count, const char *what) {
    pthread_t threads[VISITORS];
    for (int n = 0; n < count; ++n) v[n].wrong = 0;
    for (int n = 0; n < count; ++n) cr_assert_eq(pthread_create(&threads[n], NULL, visit_context, &v[n]), 0);
    for (int n = 0; n < count; ++n) cr_assert_eq(pthread_join(threads[n], NULL), 0);
    for (int n = 0; n < count; ++n)
        cr_assert_eq(v[n].wrong, 0, "%s, thread %d: %d of %d checks", what, n, v[n].wrong, 2 * KINDS + 2);
}

static void wanted_bits(uint64_t want[KINDS]) {
    fattn_ctx *const ctx = context_or_skip();
    for (int n = 0; n < KINDS; ++n) want[n] = bits_of_kind(ctx, n);
    fattn_ctx_destroy(ctx);
}

Test(cuda_threads, contexts_move_between_threads, .timeout = 200) {
    uint64_t want[KINDS];
    wanted_bits(want);
    const driver d = open_driver();
    for (int round = 0; round < 5; ++round) {
        visit v[VISITORS];
        cudaStream_t streams[VISITORS] = {NULL}; /* one has the default stream */
        for (int n = 1; n < VISITORS; ++n)
            must(cudaStreamCreateWithFlags(&streams[n], cudaStreamNonBlocking), "stream");
        for (int n = 0; n < VISITORS; ++n)
            v[n] = (visit){.what = MAKE, .from = n, .driver = &d, .want = want, .stream = streams[n]};
        visit_at_once(v, VISITORS, "made");
        for (int pass = 0; pass < 2; ++pass) { /* each on another thread, all at once */
            for (int n = 0; n < VISITORS; ++n) v[n].what = USE, v[n].from = n + pass;
            visit_at_once(v, VISITORS, "used");
        }
        for (int n = 0; n < VISITORS; ++n) v[n].what = DESTROY;
        visit_at_once(v, VISITORS, "destroyed");
        for (int n = 1; n < VISITORS; ++n) must(cudaStreamDestroy(streams[n]), "stream");
    }
}

Test(cuda_threads, one_context_for_alternating_threads, .timeout = 200) {
    uint64_t want[KINDS];
    wanted_bits(want);
    const driver d = open_driver();
    pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
    fattn_ctx *const ctx = context(NULL, 0);
    visit v[VISITORS];
    for (int n = 0; n < VISITORS; ++n)
        v[n] = (visit){.what = USE, .from = 2 * n, .driver = &d, .want = want, .ctx = ctx, .one_at_a_time = &mutex};
    for (int round = 0; round < 5; ++round) visit_at_once(v, VISITORS, "alternating");
    fattn_ctx_destroy(ctx);
}

/* The caller has another device, when there is one; then a CUDA context of its own. */
Test(cuda_threads, the_caller_s_device_stays, .timeout = 200) {
    uint64_t want[KINDS];
    wanted_bits(want);
    const driver d = open_driver();
    fattn_ctx *const ctx = context(NULL, 0);
    int devices = 0, device = 0;
    must(cudaGetDeviceCount(&devices), "devices");
    for (; device < devices && device < 2; ++device) {
        must(cudaSetDevice(device), "cudaSetDevice");
        visit v = {.what = USE, .device = device, .driver = &d, .want = want, .ctx = ctx};
        visit_context(&v);
        cr_assert_eq(v.wrong, 0, "device %d: %d checks", device, v.wrong);
        v = (visit){.what = MAKE | USE | DESTROY, .device = device, .driver = &d, .want = want};
        visit_context(&v);
        cr_assert_eq(v.wrong, 0, "device %d, a context of device 0 made there: %d checks", device, v.wrong);
    }
    CUcontext own;
    must(cudaSetDevice(0), "cudaSetDevice");
    cr_assert_eq(d.create(&own, 0, 0), CUDA_SUCCESS);
    visit v = {.what = USE, .device = -1, .driver = &d, .want = want, .ctx = ctx};
    visit_context(&v);
    cr_assert_eq(v.wrong, 0, "a CUDA context of its own: %d checks", v.wrong);
    v = (visit){.what = MAKE | USE | DESTROY, .device = -1, .driver = &d, .want = want};
    visit_context(&v);
    cr_assert_eq(v.wrong, 0, "made in a CUDA context of the caller's: %d checks", v.wrong);
    cr_assert_eq(d.pop(&own), CUDA_SUCCESS);
    cr_assert_eq(d.destroy(own), CUDA_SUCCESS);
    fattn_ctx_destroy(ctx);
}

/* A stream is captured by a thread without any other CUDA state. */
static void *capture(void *arg) {
    visit *const v = arg;
    const attention_case a = wide_case(8);
    call *const c = call_new(v->ctx, &a);
    call_run(c);
    const uint64_t direct = call_bits(c, CALL_O, CALL_D_SINK);
    for (int mode = 0; mode < 3; ++mode) {
        cudaGraph_t graph;
        cudaGraphExec_t run;
        static const enum cudaStreamCaptureMode modes[] = {
            cudaStreamCaptureModeGlobal, cudaStreamCaptureModeThreadLocal, cudaStreamCaptureModeRelaxed};
        call_fill(c, CALL_O, NAN);
        call_fill(c, CALL_DQ, NAN);
        cudaError_t e = cudaStreamBeginCapture(v->stream, modes[mode]);
        if (e == cudaSuccess) call_run(c);
        if (e == cudaSuccess) e = cudaStreamEndCapture(v->stream, &graph);
        if (e == cudaSuccess) e = cudaGraphInstantiate(&run, graph, 0);
        if (e == cudaSuccess) e = cudaGraphLaunch(run, v->stream);
        v->wrong += e != cudaSuccess || call_bits(c, CALL_O, CALL_D_SINK) != direct;
        if (e != cudaSuccess) break;
        cudaGraphExecDestroy(run);
        cudaGraphDestroy(graph);
    }
    call_free(c);
    return NULL;
}

Test(cuda_threads, captured_by_another_thread, .timeout = 60) {
    fattn_ctx_destroy(context_or_skip());
    visit v = {.what = 0};
    must(cudaStreamCreateWithFlags(&v.stream, cudaStreamNonBlocking), "stream");
    v.ctx = context(v.stream, 0);
    pthread_t thread;
    cr_assert_eq(pthread_create(&thread, NULL, capture, &v), 0);
    cr_assert_eq(pthread_join(thread, NULL), 0);
    cr_assert_eq(v.wrong, 0, "%d of 3 modes", v.wrong);
    fattn_ctx_destroy(v.ctx);
    must(cudaStreamDestroy(v.stream), "stream");
}

/* Captured once, replayed with other rng_steps: the bits of direct calls. */
Test(cuda_threads, graphs_replay_with_rng_step) {
    fattn_ctx_destroy(context_or_skip());
    cudaStream_t stream;
    must(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "stream");
    fattn_ctx *const ctx = context(stream, 0);
    for (int n = 0; n < 4; ++n) {
        attention_case a = wide_case(8 + n);
        a.rng_step = true;
        call *const c = call_new(ctx, &a);
        uint64_t direct[3];
        for (int step = 0; step < 3; ++step) {
            call_fill(c, CALL_RNG_STEP, step);
            call_run(c);
            direct[step] = call_bits(c, CALL_O, CALL_LSE) ^ call_bits(c, CALL_DQ, CALL_D_SINK);
            cr_assert(step == 0 || direct[step] != direct[step - 1], "the step changes the mask");
        }
        cudaGraph_t graph;
        cudaGraphExec_t run;
        must(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal), "capture");
        call_run(c);
        must(cudaStreamEndCapture(stream, &graph), "capture");
        must(cudaGraphInstantiate(&run, graph, 0), "instantiate");
        for (int step = 0; step < 3; ++step) {
            call_fill(c, CALL_RNG_STEP, step);
            call_fill(c, CALL_O, NAN);
            call_fill(c, CALL_DQ, NAN);
            must(cudaGraphLaunch(run, stream), "launch");
            cr_assert_eq(call_bits(c, CALL_O, CALL_LSE) ^ call_bits(c, CALL_DQ, CALL_D_SINK), direct[step],
                         "%s, step %d", fattn_dtype_name(a.dtype), step);
        }
        must(cudaGraphExecDestroy(run), "destroy");
        must(cudaGraphDestroy(graph), "destroy");
        call_free(c);
    }
    fattn_ctx_destroy(ctx);
    must(cudaStreamDestroy(stream), "stream");
}
