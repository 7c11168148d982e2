/* What a call costs the host: nanoseconds per fattn_attention_query, _fwd, _bwd and per recorded op, the
   least of 9 rounds. Calls go into a captured stream, so nothing runs on the device; the capture's own cost, that of
   adding a node per launch, is in the figures of both sides of a comparison.

   cc -O2 -std=c11 -D_POSIX_C_SOURCE=200809L -Iinclude -I/usr/local/cuda/include bench/host_cost.c -o host_cost \
      -Lbuild/release/lib -lfattn -L/usr/local/cuda/lib64 -lcudart -Wl,-rpath,build/release/lib
   LD_LIBRARY_PATH=<folder of another libfattn.so> ./host_cost     (two libraries, one program) */
#include <cuda_runtime_api.h>
#include <fattn/fattn.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

enum { CALLS = 2000, ROUNDS = 9 };

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return 1e9 * (double)t.tv_sec + (double)t.tv_nsec;
}
static void check(fattn_ctx *ctx, int s, const char *what) {
    if (!s) return;
    fprintf(stderr, "host_cost: %s: %d %s\n", what, s, ctx ? fattn_ctx_error(ctx) : "");
    exit(1);
}

typedef struct call {
    fattn_ctx *ctx;
    cudaStream_t stream;
    fattn_tensor x[8], lse, workspace; /* q k v o d_o dq dk dv */
    fattn_attention_params params;
    fattn_attention_io io;
    fattn_attention_plan plan;
    fattn_tape *tape;
} call;

static void query(call *c) {
    c->plan = (fattn_attention_plan){.struct_size = sizeof c->plan};
    check(c->ctx, (int)fattn_attention_query(c->ctx, &c->params, &c->io, &c->plan), "query");
}
static void forward(call *c) { check(c->ctx, (int)fattn_attention_fwd(c->ctx, &c->params, &c->io), "fwd"); }
static void backward(call *c) { check(c->ctx, (int)fattn_attention_bwd(c->ctx, &c->params, &c->io), "bwd"); }
static void record(call *c) { /* q, k, v as inputs, attention's forward; the tape is reset now and then */
    const fattn_var o = fattn_op_attention(c->tape, fattn_input(c->tape, &c->x[0]), fattn_input(c->tape, &c->x[1]),
                                           fattn_input(c->tape, &c->x[2]), &c->params);
    check(c->ctx, (int)fattn_tape_status(c->tape), o.id ? "op" : "no op");
}

static double time_of(call *c, void (*run)(call *), int resets) {
    double best = 1e30;
    for (int round = 0; round < ROUNDS; ++round) {
        cudaGraph_t graph;
        double spent = 0;
        check(NULL, cudaStreamBeginCapture(c->stream, cudaStreamCaptureModeRelaxed), "begin capture");
        for (int n = 0; n < CALLS; n += resets) {
            if (resets < CALLS) fattn_tape_reset(c->tape);
            const double begin = now();
            for (int m = 0; m < resets; ++m) run(c);
            spent += now() - begin;
        }
        check(NULL, cudaStreamEndCapture(c->stream, &graph), "end capture");
        cudaGraphDestroy(graph);
        if (spent / CALLS < best) best = spent / CALLS;
    }
    return best;
}

static void row(fattn_dtype dtype, int64_t D, uint32_t flags) {
    call c = {.params = {.struct_size = sizeof c.params, .flags = flags}, .io = {.struct_size = sizeof c.io}};
    const int64_t shape[] = {2, 8, 512, D};
    check(NULL, cudaStreamCreateWithFlags(&c.stream, cudaStreamNonBlocking), "stream");
    check(NULL,
          (int)fattn_ctx_create(
              &(fattn_ctx_options){.struct_size = sizeof(fattn_ctx_options), .device = FATTN_CUDA, .stream = c.stream},
              &c.ctx),
          "context");
    for (int n = 0; n < 8; ++n) check(c.ctx, (int)fattn_tensor_alloc(c.ctx, dtype, 4, shape, &c.x[n]), "alloc");
    check(c.ctx, (int)fattn_tensor_alloc(c.ctx, dtype == FATTN_F64 ? FATTN_F64 : FATTN_F32, 3, shape, &c.lse), "alloc");
    c.io.q = &c.x[0], c.io.k = &c.x[1], c.io.v = &c.x[2], c.io.o = &c.x[3], c.io.lse = &c.lse;
    c.io.d_o = &c.x[4], c.io.dq = &c.x[5], c.io.dk = &c.x[6], c.io.dv = &c.x[7];
    query(&c);
    const int64_t bytes[] = {
        (int64_t)(c.plan.fwd_workspace > c.plan.bwd_workspace ? c.plan.fwd_workspace : c.plan.bwd_workspace)};
    check(c.ctx, (int)fattn_tensor_alloc(c.ctx, FATTN_U8, 1, bytes, &c.workspace), "alloc");
    c.io.workspace = c.workspace.data, c.io.workspace_bytes = (size_t)bytes[0];
    forward(&c), backward(&c); /* kernels are loaded here, not in a capture */
    check(c.ctx, (int)fattn_tape_create(c.ctx, &c.tape), "tape");
    for (int n = 0; n < 200; ++n) { /* until the tape's memory is one piece */
        if (n % 50 == 0) fattn_tape_reset(c.tape);
        record(&c);
    }
    check(c.ctx, (int)fattn_ctx_sync(c.ctx), "sync");
    printf("%-5s d %-3d %-6s query %6.0f  fwd %6.0f  bwd %6.0f  op %6.0f   %s, %s\n", fattn_dtype_name(dtype), (int)D,
           flags ? "causal" : "full", time_of(&c, query, CALLS), time_of(&c, forward, CALLS),
           time_of(&c, backward, CALLS), time_of(&c, record, 50), c.plan.fwd_kernel, c.plan.bwd_kernel);
    fattn_tape_destroy(c.tape);
    for (int n = 0; n < 8; ++n) fattn_tensor_free(c.ctx, &c.x[n]);
    fattn_tensor_free(c.ctx, &c.lse), fattn_tensor_free(c.ctx, &c.workspace);
    fattn_ctx_destroy(c.ctx);
    cudaStreamDestroy(c.stream);
}

int main(void) {
    printf("host: ns per call\n");
    row(FATTN_BF16, 64, 0), row(FATTN_BF16, 128, FATTN_CAUSAL), row(FATTN_BF16, 256, FATTN_CAUSAL);
    row(FATTN_F32, 64, FATTN_CAUSAL);
    return 0;
}
