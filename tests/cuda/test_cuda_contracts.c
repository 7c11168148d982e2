/* Contracts of a CUDA context other than accuracy: determinism, streams, threads, graphs, conventions for rows
   without keys. */
#include "call.h"

#include <criterion/criterion.h>
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <fattn/tape.h>
#include <math.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

static const fattn_dtype dtypes[4] = {FATTN_BF16, FATTN_F32, FATTN_F64, FATTN_F16};

static void must(cudaError_t e, const char *what) {
    cr_assert_eq(e, cudaSuccess, "%s: %s", what, cudaGetErrorString(e));
}

/* On device 0; NULL without one. */
static fattn_ctx *context_of(fattn_stream stream, int sm_limit, int arch_cap) {
    int count = 0;
    if (cudaGetDeviceCount(&count) != cudaSuccess || count == 0) return NULL;
    const fattn_ctx_options o = {
        .struct_size = sizeof o, .device = FATTN_CUDA, .stream = stream, .sm_limit = sm_limit, .arch_cap = arch_cap};
    fattn_ctx *ctx;
    cr_assert_eq(fattn_ctx_create(&o, &ctx), FATTN_OK);
    return ctx;
}
static fattn_ctx *context(fattn_stream stream, int sm_limit) { return context_of(stream, sm_limit, 0); }

static fattn_ctx *context_or_skip(void) {
    fattn_ctx *const ctx = context(NULL, 0);
    if (!ctx) cr_skip_test("no CUDA device");
    return ctx;
}

/* Many key blocks for few rows each, several waves of them; each kind in every dtype. */
enum { WIDE_CASES = 24 };
static attention_case wide_case(int n) {
    static const int64_t dims[] = {64, 80, 64, 80, 256, 128};
    attention_case c = {.name = "many blocks",
                        .dtype = dtypes[n % 4],
                        .B = 3,
                        .Hq = 8,
                        .Hkv = 2,
                        .Sq = 500,
                        .Sk = 700,
                        .D = dims[n / 4],
                        .flags = FATTN_DETERMINISTIC};
    if (n / 4 == 1) c.flags |= FATTN_CAUSAL;
    if (n / 4 == 2) {
        c.flags |= FATTN_WINDOW;
        c.window_left = 90, c.window_right = 33, c.Sq = 250, c.Sk = 350;
        c.bias = BIAS, c.sink = true, c.dropout_p = 0.2f, c.softcap = 3;
    }
    if (n / 4 == 3)
        c.Sq = 300, c.Sk = 310, c.flags |= FATTN_CAUSAL, c.lengths = LENGTHS_PACKED, c.sink = true,
        memcpy(c.length_q, (int32_t[]){300, 0, 177}, 12), memcpy(c.length_k, (int32_t[]){211, 5, 310}, 12);
    if (n / 4 == 4) c.Sq = 200, c.Sk = 330, c.flags |= FATTN_CAUSAL;
    if (n / 4 == 5) c.flags |= FATTN_CAUSAL_TOP_LEFT, c.alibi = true;
    return c;
}

Test(cuda_contracts, deterministic_gradients_repeat, .timeout = 200) {
    fattn_ctx *const ctx = context_or_skip();
    cudaStream_t other;
    must(cudaStreamCreateWithFlags(&other, cudaStreamNonBlocking), "stream");
    fattn_ctx *const beside = context(other, 0);
    attention_case load = wide_case(0); /* keeps the GPU busy, unevenly */
    load.flags = 0;
    call *const busy = call_new(beside, &load);
    for (int n = 0; n < WIDE_CASES; ++n) {
        const attention_case a = wide_case(n);
        call *const c = call_new(ctx, &a);
        cr_assert_eq(c->plan.deterministic, 1);
        call_run(c);
        const uint64_t first = call_bits(c, CALL_DQ, CALL_D_SINK);
        for (int k = 0; k < 50; ++k) {
            if (k % 3 == 0) call_run(busy);
            call_fill(c, CALL_DQ, NAN);
            call_backward(c);
            cr_assert_eq(call_bits(c, CALL_DQ, CALL_D_SINK), first, "case %d, repetition %d", n, k);
        }
        call_free(c);
    }
    call_free(busy);
    fattn_ctx_destroy(beside);
    fattn_ctx_destroy(ctx);
    must(cudaStreamDestroy(other), "stream");
}

/* Results that one CTA writes are deterministic without the flag, too: a race would show. */
Test(cuda_contracts, results_of_one_cta_repeat, .timeout = 200) {
    fattn_ctx *const ctx = context_or_skip();
    for (int n = 0; n < WIDE_CASES; ++n) {
        attention_case a = wide_case(n);
        a.flags &= ~(uint32_t)FATTN_DETERMINISTIC;
        call *const c = call_new(ctx, &a);
        uint64_t first = 0;
        for (int k = 0; k < 60; ++k) {
            call_fill(c, CALL_O, NAN);
            call_fill(c, CALL_DK, NAN);
            call_run(c);
            const uint64_t bits = call_bits(c, CALL_O, CALL_LSE) ^ call_bits(c, CALL_DK, CALL_DV) ^
                                  call_bits(c, CALL_D_SINK, CALL_D_SINK);
            if (k == 0) first = bits;
            cr_assert_eq(bits, first, "%s, repetition %d", c->plan.bwd_kernel, k);
        }
        call_free(c);
    }
    fattn_ctx_destroy(ctx);
}

/* Sums of at most 22 blocks in two orders, each addition with an error of half a unit; 16-bit results are rounded once
   more. */
static void assert_same_sums(call *a, call *b, fattn_dtype dtype, enum call_tensor id, bool same_kernel, int n) {
    double *const x = call_read(a, id), *const y = call_read(b, id);
    const double unit = dtype == FATTN_F64 ? 0x1p-53 : 0x1p-24;
    const double rounding = dtype == FATTN_F16 ? 0x1p-10 : dtype == FATTN_BF16 ? 0x1p-7 : 0;
    double most = 0, off = 0;
    for (int64_t e = 0; e < fattn_tensor_numel(&a->t[id]); ++e) {
        cr_assert(isfinite(x[e]) && isfinite(y[e]), "case %d", n);
        most = fmax(most, fabs(x[e]));
        off = fmax(off, fabs(x[e] - y[e]));
    }
    cr_assert(!same_kernel || off <= (22 * unit + rounding) * most, "case %d, tensor %d: %g apart, %g at most", n,
              (int)id, off, most);
    free(x);
    free(y);
}

Test(cuda_contracts, deterministic_and_atomic_sums_agree, .timeout = 100) {
    fattn_ctx *const ctx = context_or_skip();
    for (int n = 0; n < WIDE_CASES; ++n) {
        attention_case a = wide_case(n);
        call *const fixed = call_new(ctx, &a);
        a.flags &= ~(uint32_t)FATTN_DETERMINISTIC;
        call *const any = call_new(ctx, &a);
        cr_assert_eq(any->plan.deterministic, 0);
        call_run(fixed);
        call_run(any);
        const bool same = strcmp(fixed->plan.bwd_kernel, any->plan.bwd_kernel) == 0;
        cr_assert_eq(call_bits(fixed, CALL_D_SINK, CALL_D_SINK), call_bits(any, CALL_D_SINK, CALL_D_SINK));
        for (int id = CALL_DQ; id <= CALL_DV; ++id)
            assert_same_sums(fixed, any, a.dtype, (enum call_tensor)id, same, n);
        call_free(fixed);
        call_free(any);
    }
    fattn_ctx_destroy(ctx);
}

Test(cuda_contracts, nondeterministic_calls_are_rejected) {
    fattn_ctx *const ctx = context_or_skip();
    attention_case a = wide_case(1);
    a.bias = BIAS | BIAS_OVER_B, a.flags = 0;
    call *const c = call_new(ctx, &a);
    c->params.flags = FATTN_DETERMINISTIC;
    cr_assert_eq(fattn_attention_query(ctx, &c->params, &c->io, &c->plan), FATTN_E_UNSUPPORTED);
    cr_assert(strstr(fattn_ctx_error(ctx), "dbias"), "%s", fattn_ctx_error(ctx));
    c->io.d_bias = NULL;
    cr_assert_eq(fattn_attention_query(ctx, &c->params, &c->io, &c->plan), FATTN_OK);
    call_free(c);
    fattn_ctx_destroy(ctx);
}

Test(cuda_contracts, sm_limit_changes_no_bits) {
    fattn_ctx *const all = context_or_skip(), *const few = context(NULL, 2);
    for (int n = 0; n < 12; ++n) {
        const attention_case a = wide_case(n);
        call *const c = call_new(all, &a), *const d = call_new(few, &a);
        call_run(c);
        call_run(d);
        cr_assert_eq(call_bits(c, CALL_O, CALL_LSE), call_bits(d, CALL_O, CALL_LSE));
        cr_assert_eq(call_bits(c, CALL_DQ, CALL_D_SINK), call_bits(d, CALL_DQ, CALL_D_SINK));
        call_free(c);
        call_free(d);
    }
    fattn_ctx_destroy(few);
    fattn_ctx_destroy(all);
}

static void all_finite(call *c, enum call_tensor first, enum call_tensor last) {
    for (int id = (int)first; id <= (int)last; ++id) {
        if (!c->t[id].dtype) continue;
        double *const x = call_read(c, (enum call_tensor)id);
        for (int64_t n = 0; n < fattn_tensor_numel(&c->t[id]); ++n)
            cr_assert(isfinite(x[n]), "%s: tensor %d, element %lld is %g",
                      fattn_dtype_name((fattn_dtype)c->t[CALL_Q].dtype), id, (long long)n, x[n]);
        free(x);
    }
}

/* A query with aligned tensors and without d_o: its sizes suffice when one or all tensors are moved by an
   element, and for an F32 d_o. */
Test(cuda_contracts, workspace_of_a_query_suffices_anywhere, .timeout = 100) {
    fattn_ctx *const ctx = context_or_skip();
    static const enum call_tensor moved[] = {CALL_Q, CALL_K, CALL_V, CALL_O, CALL_D_O, CALL_DQ, CALL_DK, CALL_DV};
    enum { MOVED = 8 };
    for (int n = 0; n < 8; ++n) {
        const attention_case a = {.name = "places",
                                  .dtype = dtypes[n % 4],
                                  .B = 2,
                                  .Hq = 4,
                                  .Hkv = 2,
                                  .Sq = 513,
                                  .Sk = 513,
                                  .D = n < 4 ? 64 : 256,
                                  .flags = FATTN_CAUSAL};
        call *const c = call_new(ctx, &a);
        fattn_attention_plan plan = {.struct_size = sizeof plan};
        fattn_attention_io without = c->io;
        without.d_o = NULL;
        call_must(ctx, fattn_attention_query(ctx, &c->params, &without, &plan), "query");
        fattn_tensor memory, wide, aside[MOVED], best[MOVED];
        call_must(ctx, fattn_tensor_alloc(ctx, FATTN_U8, 1, (int64_t[]){(int64_t)plan.bwd_workspace}, &memory),
                  "workspace");
        call_run(c);
        c->io.workspace = memory.data, c->io.workspace_bytes = plan.bwd_workspace;
        const bool narrow = a.dtype == FATTN_BF16 || a.dtype == FATTN_F16;
        call_must(ctx, fattn_tensor_alloc(ctx, narrow ? FATTN_F32 : a.dtype, 4, c->t[CALL_D_O].shape, &wide), "d_o");
        call_must(ctx, fattn_tensor_copy(ctx, &wide, &c->t[CALL_D_O]), "copy");
        for (int k = 0; k < MOVED; ++k) {
            best[k] = c->t[moved[k]];
            call_must(ctx,
                      fattn_tensor_alloc(ctx, (fattn_dtype)best[k].dtype, 1,
                                         (int64_t[]){fattn_tensor_numel(&best[k]) + 1}, &aside[k]),
                      "aside");
        }
        for (int k = 0; k < 2 * (MOVED + 2); ++k) { /* none, one, all */
            for (int i = 0; i < MOVED; ++i) {
                c->t[moved[i]] = best[i];
                if (k / 2 != i && k / 2 != MOVED) continue;
                c->t[moved[i]].data = (char *)aside[i].data + fattn_dtype_size((fattn_dtype)best[i].dtype);
                call_must(ctx, fattn_tensor_copy(ctx, &c->t[moved[i]], &best[i]), "copy");
            }
            c->io.d_o = k % 2 ? &wide : &c->t[CALL_D_O];
            for (int i = 5; i < MOVED; ++i) call_fill(c, moved[i], NAN);
            call_backward(c);
            all_finite(c, CALL_DQ, CALL_DV);
        }
        for (int k = 0; k < MOVED; ++k) c->t[moved[k]] = best[k], fattn_tensor_free(ctx, &aside[k]);
        fattn_tensor_free(ctx, &wide);
        call_free(c);
        fattn_tensor_free(ctx, &memory);
    }
    fattn_ctx_destroy(ctx);
}

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

Test(cuda_contracts, contexts_on_threads_and_streams, .timeout = 100) {
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

Test(cuda_contracts, contexts_move_between_threads, .timeout = 200) {
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

Test(cuda_contracts, one_context_for_alternating_threads, .timeout = 200) {
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
Test(cuda_contracts, the_caller_s_device_stays, .timeout = 200) {
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

Test(cuda_contracts, captured_by_another_thread, .timeout = 60) {
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
Test(cuda_contracts, graphs_replay_with_rng_step) {
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

/* --- conventions ------------------------------------------------------------------------------ */

Test(cuda_contracts, merging_into_nothing_does_not_read_o) {
    fattn_ctx *const ctx = context_or_skip();
    for (int n = 0; n < 4; ++n) {
        const attention_case a = {.name = "merge",
                                  .dtype = dtypes[n],
                                  .B = 2,
                                  .Hq = 2,
                                  .Sq = 90,
                                  .Sk = 100,
                                  .D = 64,
                                  .wide = true,
                                  .flags = FATTN_MERGE | FATTN_CAUSAL};
        uint64_t bits[2];
        for (int k = 0; k < 2; ++k) {
            call *const c = call_new(ctx, &a);
            call_fill(c, CALL_O, k ? NAN : 0);
            call_fill(c, CALL_LSE, -INFINITY);
            call_forward(c);
            all_finite(c, CALL_O, CALL_LSE);
            bits[k] = call_bits(c, CALL_O, CALL_LSE);
            call_free(c);
        }
        cr_assert_eq(bits[0], bits[1], "%s", fattn_dtype_name(a.dtype));
    }
    fattn_ctx_destroy(ctx);
}

/* Causal with more rows than keys: the first rows have no keys and L = -inf. */
Test(cuda_contracts, rows_without_keys_ignore_d_lse) {
    fattn_ctx *const ctx = context_or_skip();
    for (int n = 0; n < 4; ++n) {
        const attention_case a = {.name = "tall",
                                  .dtype = dtypes[n],
                                  .B = 1,
                                  .Hq = 2,
                                  .Sq = 150,
                                  .Sk = 100,
                                  .D = 64,
                                  .d_lse = true,
                                  .flags = FATTN_CAUSAL | FATTN_DETERMINISTIC};
        uint64_t bits[2];
        for (int k = 0; k < 2; ++k) {
            call *const c = call_new(ctx, &a);
            double *const d_lse = call_read(c, CALL_D_LSE);
            for (int i = 0; i < 100; ++i) d_lse[i / 50 * 150 + i % 50] = k ? NAN : 0;
            call_write(c, CALL_D_LSE, d_lse);
            call_run(c);
            all_finite(c, CALL_DQ, CALL_DV);
            bits[k] = call_bits(c, CALL_DQ, CALL_DV);
            free(d_lse);
            call_free(c);
        }
        cr_assert_eq(bits[0], bits[1], "%s", fattn_dtype_name(a.dtype));
    }
    fattn_ctx_destroy(ctx);
}

/* A sink of +inf takes everything: O = 0, L = +inf, and only dsink = sum dL is left. */
Test(cuda_contracts, a_sink_of_infinity) {
    fattn_ctx *const ctx = context_or_skip();
    for (int n = 0; n < 4; ++n) {
        const attention_case a = {.name = "sink",
                                  .dtype = dtypes[n],
                                  .B = 3,
                                  .Hq = 2,
                                  .Sq = 150,
                                  .Sk = 70,
                                  .D = 40,
                                  .d_lse = true,
                                  .sink = true};
        call *const c = call_new(ctx, &a);
        call_fill(c, CALL_SINK, INFINITY);
        call_fill(c, CALL_D_LSE, 0.5);
        call_run(c);
        for (int id = CALL_O; id <= CALL_D_SINK; ++id) {
            if (!c->t[id].dtype || (id > CALL_LSE && id < CALL_DQ)) continue;
            const double want = id == CALL_LSE ? INFINITY : id == CALL_D_SINK ? 0.5 * 3 * 150 : 0;
            double *const x = call_read(c, (enum call_tensor)id);
            for (int64_t e = 0; e < fattn_tensor_numel(&c->t[id]); ++e)
                cr_assert(x[e] == want, "%s: tensor %d, element %lld is %g, not %g", fattn_dtype_name(a.dtype), id,
                          (long long)e, x[e], want);
            free(x);
        }
        call_free(c);
    }
    fattn_ctx_destroy(ctx);
}

/* Lengths are read on the device, which cannot report errors: they are clamped. */
Test(cuda_contracts, lengths_are_clamped) {
    fattn_ctx *const ctx = context_or_skip();
    static const double wrong[4][4] = {{900, -7, 70}, {500, 40, -1}, {-5, 50, 90, 5000}, {0, 30, 999, 999}};
    static const double right[4][4] = {{80, 0, 70}, {90, 40, 0}, {0, 50, 90, 150}, {0, 30, 150, 150}};
    for (int n = 0; n < 8; ++n) {
        attention_case a = {.name = "lengths",
                            .dtype = dtypes[n % 4],
                            .B = 3,
                            .Hq = 2,
                            .Sq = 80,
                            .Sk = 90,
                            .D = 64,
                            .flags = FATTN_CAUSAL | FATTN_DETERMINISTIC,
                            .length_q = {50, 50, 50},
                            .length_k = {50, 50, 50}};
        a.lengths = n < 4 ? LENGTHS_PADDED : LENGTHS_PACKED;
        uint64_t bits[2];
        for (int k = 0; k < 2; ++k) {
            call *const c = call_new(ctx, &a);
            const double(*const lengths)[4] = k ? right : wrong;
            call_write(c, n < 4 ? CALL_SEQLENS_Q : CALL_CU_Q, lengths[n < 4 ? 0 : 2]);
            call_write(c, n < 4 ? CALL_SEQLENS_K : CALL_CU_K, lengths[n < 4 ? 1 : 3]);
            call_run(c);
            bits[k] = call_bits(c, CALL_O, CALL_LSE) ^ call_bits(c, CALL_DQ, CALL_DV);
            call_free(c);
        }
        cr_assert_eq(bits[0], bits[1], "%s, case %d", fattn_dtype_name(a.dtype), n);
    }
    fattn_ctx_destroy(ctx);
}

Test(cuda_contracts, too_many_rows) {
    fattn_ctx *const ctx = context_or_skip();
    const int64_t rows = (1 << 28) + 1, shape[4] = {1, 1, rows, 8}, keys[4] = {1, 1, 64, 8};
    fattn_tensor q = fattn_tensor_view((void *)256, FATTN_F32, FATTN_CUDA, 0, 4, shape);
    fattn_tensor k = fattn_tensor_view((void *)256, FATTN_F32, FATTN_CUDA, 0, 4, keys);
    const fattn_tensor lse = fattn_tensor_view((void *)256, FATTN_F32, FATTN_CUDA, 0, 3, shape);
    const fattn_attention_io io = {.struct_size = sizeof io, .q = &q, .k = &k, .v = &k, .o = &q, .lse = &lse};
    for (int n = 0; n < 4; ++n) {
        q.dtype = k.dtype = (int32_t)dtypes[n];
        if (dtypes[n] == FATTN_F64) continue; /* L would be F64 */
        fattn_attention_plan plan = {.struct_size = sizeof plan};
        cr_assert_eq(fattn_attention_query(ctx, NULL, &io, &plan), FATTN_E_UNSUPPORTED);
        cr_assert(strstr(fattn_ctx_error(ctx), "2^28"), "%s", fattn_ctx_error(ctx));
    }
    fattn_ctx_destroy(ctx);
}

/* Element numbers beyond 2^31: the second sequence lies 2^31 elements behind the first. */
Test(cuda_contracts, far_strides, .timeout = 60) {
    fattn_ctx *const ctx = context_or_skip();
    const attention_case a = {.name = "far",
                              .dtype = FATTN_F32,
                              .B = 2,
                              .Hq = 2,
                              .Sq = 130,
                              .Sk = 90,
                              .D = 64,
                              .flags = FATTN_CAUSAL | FATTN_DETERMINISTIC};
    attention_case half = a;
    half.dtype = FATTN_BF16;
    for (int n = 0; n < 2; ++n) {
        const attention_case *const c = n ? &half : &a;
        call *const near = call_new(ctx, c), *const far = call_new(ctx, c);
        const int64_t apart = ((int64_t)1 << 31) + 64, size[1] = {2 * apart};
        fattn_tensor memory;
        call_must(ctx, fattn_tensor_alloc(ctx, far->t[CALL_Q].dtype, 1, size, &memory), "memory");
        static const enum call_tensor moved[] = {CALL_Q, CALL_K, CALL_D_O, CALL_DQ, CALL_O, CALL_DV};
        fattn_tensor before[6];
        for (int k = 0; k < 6; ++k) {
            fattn_tensor *const t = &far->t[moved[k]];
            before[k] = *t;
            t->data = (char *)memory.data + (size_t)k * 65536 * 4; /* a sequence has fewer */
            t->stride[0] = apart;
            call_must(ctx, fattn_tensor_copy(ctx, t, &before[k]), "copy");
        }
        call_run(near);
        call_run(far);
        cr_assert_eq(call_bits(near, CALL_O, CALL_LSE), call_bits(far, CALL_O, CALL_LSE));
        cr_assert_eq(call_bits(near, CALL_DQ, CALL_DV), call_bits(far, CALL_DQ, CALL_DV));
        for (int k = 0; k < 6; ++k) far->t[moved[k]] = before[k];
        call_free(near);
        call_free(far);
        fattn_tensor_free(ctx, &memory);
    }
    fattn_ctx_destroy(ctx);
}

/* As tests/unit/test_overlaps.c: overlaps that addresses prove are rejected before anything is enqueued. */
Test(cuda_contracts, results_that_share_memory_are_rejected) {
    fattn_ctx *const ctx = context_or_skip();
    for (int n = 0; n < 4; ++n) {
        const attention_case a = {.name = "overlaps",
                                  .dtype = dtypes[n],
                                  .B = 2,
                                  .Hq = 2,
                                  .Sq = 64,
                                  .Sk = 64,
                                  .D = 64,
                                  .bias = BIAS,
                                  .sink = true};
        call *const c = call_new(ctx, &a);
        call_run(c);
        for (int out = 0; out < CALL_COUNT; ++out)
            for (int in = 0; in < CALL_COUNT; ++in) {
                const bool forward = out == CALL_O || out == CALL_LSE;
                const bool backward = out >= CALL_DQ && out <= CALL_D_SINK;
                if (out == in || !(forward || backward) || (forward && in >= CALL_D_O)) continue;
                if (!c->t[out].dtype || !c->t[in].dtype) continue;
                void *const own = c->t[out].data;
                c->t[out].data = c->t[in].data;
                const fattn_status s = forward ? fattn_attention_fwd(ctx, &c->params, &c->io)
                                               : fattn_attention_bwd(ctx, &c->params, &c->io);
                c->t[out].data = own;
                cr_assert_eq(s, FATTN_E_ARG, "tensor %d at %d", out, in);
                cr_assert(strstr(fattn_ctx_error(ctx), " overlap: bytes 0x"), "%s", fattn_ctx_error(ctx));
            }
        call_run(c);
        call_free(c);
    }
    fattn_ctx_destroy(ctx);
}

/* The largest positions: results that depend only on their difference are those near 0; a window covers it. */
Test(cuda_contracts, far_positions) {
    fattn_ctx *const ctx = context_or_skip();
    const int64_t far = (int64_t)1 << 29;
    for (int n = 0; n < 12; ++n) {
        attention_case near = {.name = "positions",
                               .dtype = dtypes[n % 4],
                               .B = 2,
                               .Hq = 2,
                               .Sq = 200,
                               .Sk = 230,
                               .D = 64,
                               .flags = FATTN_WINDOW | FATTN_DETERMINISTIC,
                               .window_left = 40,
                               .window_right = 30,
                               .alibi = n < 4,
                               .q_pos0 = 16};
        attention_case away = near;
        if (n / 4 == 0) away.q_pos0 = far, away.k_pos0 = far - 16;
        if (n / 4 == 1) away.q_pos0 = far, away.window_left += (int32_t)far - 16, near.window_right = -1;
        if (n / 4 == 2) away.k_pos0 = far, away.window_right += (int32_t)far, near.window_left = -1;
        call *const c = call_new(ctx, &near), *const d = call_new(ctx, &away);
        call_run(c);
        call_run(d);
        cr_assert_eq(call_bits(c, CALL_O, CALL_LSE), call_bits(d, CALL_O, CALL_LSE), "case %d", n);
        cr_assert_eq(call_bits(c, CALL_DQ, CALL_DV), call_bits(d, CALL_DQ, CALL_DV), "case %d", n);
        d->params.q_pos0 = far + 1;
        cr_assert_eq(fattn_attention_fwd(ctx, &d->params, &d->io), FATTN_E_ARG);
        cr_assert_eq(fattn_attention_bwd(ctx, &d->params, &d->io), FATTN_E_ARG);
        cr_assert(strstr(fattn_ctx_error(ctx), "536870913"), "%s", fattn_ctx_error(ctx));
        call_free(c);
        call_free(d);
    }
    fattn_ctx_destroy(ctx);
}

/* A rejected call has not cleared d_bias; its other tensors have no memory. */
Test(cuda_contracts, a_rejected_call_writes_nothing) {
    fattn_ctx *const ctx = context_or_skip();
    for (int n = 0; n < 4; ++n)
        for (int algorithm = FATTN_ALGO_AUTO; algorithm <= FATTN_ALGO_FLASH2; ++algorithm) {
            const fattn_dtype statistic = dtypes[n] == FATTN_F64 ? FATTN_F64 : FATTN_F32;
            const int64_t rows[4] = {1, 1 << 20, 1 << 20, 8}, keys[4] = {1, 1 << 20, 64, 8}, one[4] = {1, 1, 1, 1};
            void *const nowhere = (void *)((uintptr_t)1 << 50);
            const fattn_tensor q = fattn_tensor_view(nowhere, dtypes[n], FATTN_CUDA, 0, 4, rows);
            const fattn_tensor k = fattn_tensor_view(nowhere, dtypes[n], FATTN_CUDA, 0, 4, keys);
            const fattn_tensor lse = fattn_tensor_view(nowhere, statistic, FATTN_CUDA, 0, 3, rows);
            const fattn_attention_params p = {.struct_size = sizeof p, .algorithm = algorithm};
            fattn_tensor bias, dq = q, dk = k, dv = k, o = q;
            void **const apart[] = {&dq.data, &dk.data, &dv.data, &o.data};
            for (int i = 0; i < 4; ++i) *apart[i] = (void *)((uintptr_t)(i + 2) << 50);
            double x = 7;
            fattn_tensor host = fattn_tensor_view(&x, FATTN_F64, FATTN_CPU, 0, 4, one);
            call_must(ctx, fattn_tensor_alloc(ctx, statistic, 4, one, &bias), "bias");
            call_must(ctx, fattn_tensor_copy(ctx, &bias, &host), "bias");
            const fattn_tensor bias_in = fattn_tensor_view(nowhere, statistic, FATTN_CUDA, 0, 4, one);
            const fattn_attention_io io = {.struct_size = sizeof io,
                                           .q = &q,
                                           .k = &k,
                                           .v = &k,
                                           .o = &o,
                                           .lse = &lse,
                                           .bias = &bias_in,
                                           .d_o = &q,
                                           .dq = &dq,
                                           .dk = &dk,
                                           .dv = &dv,
                                           .d_bias = &bias,
                                           .workspace = (void *)((uintptr_t)1 << 60),
                                           .workspace_bytes = (size_t)1 << 60,
                                           .saved = (void *)((uintptr_t)1 << 61),
                                           .saved_bytes = (size_t)1 << 60};
            cr_assert_eq(fattn_attention_bwd(ctx, &p, &io), FATTN_E_UNSUPPORTED);
            x = 0;
            call_must(ctx, fattn_tensor_copy(ctx, &host, &bias), "bias");
            cr_assert_eq(x, 7, "algorithm %d, %s", algorithm, fattn_dtype_name(dtypes[n]));
            fattn_tensor_free(ctx, &bias);
        }
    fattn_ctx_destroy(ctx);
}

/* ---- sequences with more than 2^31 elements ---- */

static fattn_tensor room(fattn_ctx *ctx, fattn_dtype dtype, int64_t rows, int64_t D, uint32_t stream) {
    fattn_tensor t;
    call_must(ctx, fattn_tensor_alloc(ctx, dtype, D ? 4 : 3, (int64_t[]){1, 1, rows, D}, &t), "room");
    if (stream)
        call_must(ctx, fattn_tensor_normal(ctx, &t, 0, 1, (fattn_rng){.seed = 5, .stream = stream}), "room");
    else
        must(cudaMemset(t.data, 0xff, (size_t)fattn_tensor_numel(&t) * fattn_dtype_size(dtype)), "memset");
    return t;
}

/* Rows [begin, begin + count), row-major, as double; the caller frees them. */
static double *rows_of(fattn_ctx *ctx, const fattn_tensor *t, int64_t begin, int64_t count) {
    const fattn_tensor part = fattn_tensor_slice(t, 2, begin, begin + count);
    double *const x = malloc((size_t)fattn_tensor_numel(&part) * sizeof *x);
    const fattn_tensor host = fattn_tensor_view(x, FATTN_F64, FATTN_CPU, 0, t->ndim, part.shape);
    call_must(ctx, fattn_tensor_copy(ctx, &host, &part), "rows");
    return x;
}

static void run_both(fattn_ctx *ctx, fattn_attention_io io) {
    fattn_attention_plan plan = {.struct_size = sizeof plan};
    call_must(ctx, fattn_attention_query(ctx, NULL, &io, &plan), "query");
    const size_t bytes = plan.fwd_workspace > plan.bwd_workspace ? plan.fwd_workspace : plan.bwd_workspace;
    fattn_tensor memory;
    call_must(ctx, fattn_tensor_alloc(ctx, FATTN_U8, 1, (int64_t[]){(int64_t)bytes}, &memory), "workspace");
    io.workspace = memory.data, io.workspace_bytes = bytes;
    call_must(ctx, fattn_attention_fwd(ctx, NULL, &io), plan.fwd_kernel);
    call_must(ctx, fattn_attention_bwd(ctx, NULL, &io), plan.bwd_kernel);
    call_must(ctx, fattn_ctx_sync(ctx), plan.bwd_kernel);
    fattn_tensor_free(ctx, &memory);
}

enum { FEW = 128 };
static void need_memory(size_t bytes) {
    size_t free_bytes = 0, all = 0;
    must(cudaMemGetInfo(&free_bytes, &all), "cudaMemGetInfo");
    if (free_bytes < bytes) cr_skip_test("%zu bytes of %zu are free", free_bytes, bytes);
}

/* Every row sees the same FEW keys, so that rows of a long call equal those of a short one. */
static void check_long_rows(fattn_dtype dtype, int64_t D, int64_t S, int arch_cap) {
    need_memory((size_t)90 << 30);
    fattn_ctx *const ctx = context_of(NULL, 0, arch_cap);
    const fattn_dtype statistic = dtype == FATTN_F64 ? FATTN_F64 : FATTN_F32;
    const fattn_tensor k = room(ctx, dtype, FEW, D, 1), v = room(ctx, dtype, FEW, D, 2);
    const fattn_tensor q = room(ctx, dtype, S, D, 3); /* d_o, too */
    fattn_tensor t[] = {q,
                        k,
                        v,
                        room(ctx, dtype, S, D, 0),
                        room(ctx, statistic, S, 0, 0),
                        room(ctx, dtype, S, D, 0),
                        room(ctx, dtype, FEW, D, 0),
                        room(ctx, dtype, FEW, D, 0)};
    run_both(ctx, (fattn_attention_io){.struct_size = sizeof(fattn_attention_io),
                                       .q = &q,
                                       .k = &k,
                                       .v = &v,
                                       .o = &t[3],
                                       .lse = &t[4],
                                       .d_o = &q,
                                       .dq = &t[5],
                                       .dk = &t[6],
                                       .dv = &t[7]});
    const int64_t begins[] = {0, ((int64_t)1 << 31) / D - FEW / 2, S / 2, S - FEW};
    for (int n = 0; n < 4; ++n) {
        const fattn_tensor part = fattn_tensor_slice(&q, 2, begins[n], begins[n] + FEW);
        fattn_tensor few[] = {room(ctx, dtype, FEW, D, 0), room(ctx, statistic, FEW, 0, 0), room(ctx, dtype, FEW, D, 0),
                              room(ctx, dtype, FEW, D, 0), room(ctx, dtype, FEW, D, 0)};
        run_both(ctx, (fattn_attention_io){.struct_size = sizeof(fattn_attention_io),
                                           .q = &part,
                                           .k = &k,
                                           .v = &v,
                                           .o = &few[0],
                                           .lse = &few[1],
                                           .d_o = &part,
                                           .dq = &few[2],
                                           .dk = &few[3],
                                           .dv = &few[4]});
        for (int i = 0; i < 3; ++i) {
            double *const got = rows_of(ctx, &t[3 + i], begins[n], FEW), *const want = rows_of(ctx, &few[i], 0, FEW);
            const double unit = dtype == FATTN_BF16  ? 0x1p-8
                                : dtype == FATTN_F16 ? 0x1p-11
                                : dtype == FATTN_F32 ? 0x1p-20
                                                     : 0x1p-45;
            double most = 0;
            for (int64_t e = 0; e < fattn_tensor_numel(&few[i]); ++e) most = fmax(most, fabs(want[e]));
            for (int64_t e = 0; e < fattn_tensor_numel(&few[i]); ++e)
                cr_assert(fabs(got[e] - want[e]) <= 4 * unit * most, "%s d %lld, tensor %d, row %lld: %g, not %g",
                          fattn_dtype_name(dtype), (long long)D, i, (long long)(begins[n] + e / (i == 1 ? 1 : D)),
                          got[e], want[e]);
            free(got);
            free(want);
        }
        for (int i = 0; i < 5; ++i) fattn_tensor_free(ctx, &few[i]);
    }
    for (int i = 0; i < 8; ++i) fattn_tensor_free(ctx, &t[i]);
    call_must(ctx, fattn_ctx_sync(ctx), "free");
    fattn_ctx_destroy(ctx);
}

enum { RAGGED = 5000 };
Test(cuda_contracts, long_rows_bf16_d64, .timeout = 60) {
    fattn_ctx_destroy(context_or_skip());
    check_long_rows(FATTN_BF16, 64, (1 << 27) + RAGGED, 0);
}
Test(cuda_contracts, long_rows_f16_d128, .timeout = 60) {
    fattn_ctx_destroy(context_or_skip());
    check_long_rows(FATTN_F16, 128, (1 << 26) + RAGGED, 0);
}
Test(cuda_contracts, long_rows_bf16_d256, .timeout = 60) {
    fattn_ctx_destroy(context_or_skip());
    check_long_rows(FATTN_BF16, 256, (1 << 25) + RAGGED, 0);
}
Test(cuda_contracts, long_rows_portable, .timeout = 60) {
    fattn_ctx_destroy(context_or_skip());
    check_long_rows(FATTN_BF16, 64, (1 << 27) + RAGGED, 80);
}
Test(cuda_contracts, long_rows_f32, .timeout = 60) {
    fattn_ctx_destroy(context_or_skip());
    check_long_rows(FATTN_F32, 64, (1 << 26) + RAGGED, 0);
}
Test(cuda_contracts, long_rows_f64, .timeout = 60) {
    fattn_ctx_destroy(context_or_skip());
    check_long_rows(FATTN_F64, 64, (1 << 25) + RAGGED, 0);
}

/* Few rows and very many keys: L is that of as many normal scores, and gradients reach the last key. */
Test(cuda_contracts, long_keys, .timeout = 60) {
    fattn_ctx_destroy(context_or_skip());
    need_memory((size_t)75 << 30);
    for (int arch_cap = 0; arch_cap <= 80; arch_cap += 80) {
        fattn_ctx *const ctx = context_of(NULL, 0, arch_cap);
        const int64_t S = (1 << 27) + RAGGED, D = 64;
        const fattn_dtype dtype = FATTN_BF16;
        fattn_tensor t[] = {room(ctx, dtype, FEW, D, 1), room(ctx, dtype, S, D, 2),       room(ctx, dtype, S, D, 3),
                            room(ctx, dtype, FEW, D, 0), room(ctx, FATTN_F32, FEW, 0, 0), room(ctx, dtype, FEW, D, 0),
                            room(ctx, dtype, S, D, 0),   room(ctx, dtype, S, D, 0)};
        run_both(ctx, (fattn_attention_io){.struct_size = sizeof(fattn_attention_io),
                                           .q = &t[0],
                                           .k = &t[1],
                                           .v = &t[2],
                                           .o = &t[3],
                                           .lse = &t[4],
                                           .d_o = &t[0],
                                           .dq = &t[5],
                                           .dk = &t[6],
                                           .dv = &t[7]});
        double *const L = rows_of(ctx, &t[4], 0, FEW);
        for (int i = 0; i < FEW; ++i) cr_assert(L[i] > 18.7 && L[i] < 21, "row %d: L %g", i, L[i]);
        free(L);
        const int64_t begins[] = {0, S / 2, S - FEW};
        for (int n = 0; n < 6; ++n) {
            double *const x = rows_of(ctx, &t[6 + n / 3], begins[n % 3], FEW);
            for (int64_t e = 0; e < FEW * D; ++e)
                cr_assert(isfinite(x[e]), "%s of key %lld: %g", n / 3 ? "dv" : "dk", (long long)(begins[n % 3] + e / D),
                          x[e]);
            free(x);
        }
        for (int i = 0; i < 8; ++i) fattn_tensor_free(ctx, &t[i]);
        call_must(ctx, fattn_ctx_sync(ctx), "free");
        fattn_ctx_destroy(ctx);
    }
}
