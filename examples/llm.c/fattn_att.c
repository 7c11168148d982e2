/* fattn in llm.c, in place of llmc/cudnn_att.cpp: the four functions of llmc/cudnn_att.h. README.md says how.

   o, L = attention(q, k, v), causal, scale 1/sqrt(HS), and its gradients. qkvr and dqkvr are [B,T,3,NH,HS], out, o and
   dout [B,T,NH,HS], stats is L [B,NH,T]; C = NH HS. Gradients are overwritten.

   llm.c is C++: the functions have the names that its compiler gives them. Forward and backward are here for both
   16-bit types of llm.c's floatX, and a build of llm.c takes those of its own.

   Gradients repeat bitwise, as llm.c asks of cuDNN. FATTN_ATOMIC=1 in the environment takes an order of additions that
   is faster and differs from run to run. The functions cannot return an error: it goes to stderr and ends the program,
   as cuDNN's do in llm.c. */
#include <fattn/fattn.h>

#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#ifdef FATTN_ATT_ON_CPU /* tensors in host memory, for a test */
#define DEVICE FATTN_CPU
static int current_device(void) { return 0; }
#else
#include <cuda_runtime_api.h>
#define DEVICE FATTN_CUDA
static int current_device(void) {
    int device = 0;
    const cudaError_t error = cudaGetDevice(&device);
    if (error == cudaSuccess) return device;
    fprintf(stderr, "[FATTN ERROR] cudaGetDevice: %s\n", cudaGetErrorString(error));
    exit(EXIT_FAILURE);
}
#endif

static fattn_ctx *ctx; /* of the one GPU that a process of llm.c has */
static int device_id;
static fattn_tensor workspace, unwanted_stats; /* as large as the largest call needed */

static void report(void *user, fattn_log level, const char *text) {
    (void)user;
    if (level != FATTN_LOG_INFO)
        fprintf(stderr, "[FATTN %s] %s\n", level == FATTN_LOG_ERROR ? "ERROR" : "WARNING", text);
}

static void check(fattn_status s, int line) {
    if (s == FATTN_OK) return;
    fprintf(stderr, "[FATTN ERROR] at file %s:%d: %s\n", __FILE__, line, fattn_status_name(s));
    exit(EXIT_FAILURE);
}
#define CHECK(call) check(call, __LINE__)

void create_cudnn(void) __asm__("_Z12create_cudnnv");
void create_cudnn(void) {
    const char *const atomic = getenv("FATTN_ATOMIC");
    const bool repeats = !atomic || !*atomic || strcmp(atomic, "0") == 0;
    device_id = current_device();
    const fattn_ctx_options o = {.struct_size = sizeof o,
                                 .flags = repeats ? FATTN_CTX_DETERMINISTIC : 0,
                                 .device = DEVICE,
                                 .device_id = device_id,
                                 .log = report};
    if (!ctx) CHECK(fattn_ctx_create(&o, &ctx));
}

void destroy_cudnn(void) __asm__("_Z13destroy_cudnnv");
void destroy_cudnn(void) {
    if (!ctx) return;
    CHECK(fattn_ctx_set_stream(ctx, NULL)); /* llm.c has destroyed its stream before */
    fattn_tensor_free(ctx, &workspace);
    fattn_tensor_free(ctx, &unwanted_stats);
    fattn_ctx_destroy(ctx);
    ctx = NULL;
}

/* The tensor's memory, of this many bytes at least. A larger call moves it: the largest runs before a CUDA graph is
   captured. */
static void *grow(fattn_tensor *t, size_t bytes) {
    const int64_t wanted = (int64_t)bytes;
    if (!t->data || t->shape[0] < wanted) {
        fattn_tensor_free(ctx, t);
        CHECK(fattn_tensor_alloc(ctx, FATTN_U8, 1, &wanted, t));
    }
    return t->data;
}

typedef struct sizes {
    fattn_dtype dtype;
    int64_t B, T, NH, HS;
} sizes;

static sizes sizes_of(fattn_dtype dtype, int B, int T, int NH, int C) {
    if (!ctx) {
        fprintf(stderr, "[FATTN ERROR] attention outside create_cudnn and destroy_cudnn\n");
        exit(EXIT_FAILURE);
    }
    if (NH <= 0 || C % NH) CHECK(fattn_ctx_fail(ctx, FATTN_E_SHAPE, "C %d is not a multiple of NH %d", C, NH));
    return (sizes){dtype, B, T, NH, C / NH};
}

/* NH heads of [B,T,slices NH,HS], from slice `n` on, as [B,NH,T,HS]. */
static fattn_tensor heads(const char *name, void *data, const sizes *s, int slices, int n) {
    const int64_t shape[] = {s->B, s->T, slices * s->NH, s->HS};
    if (!data) CHECK(fattn_ctx_fail(ctx, FATTN_E_ARG, "%s: NULL", name));
    const fattn_tensor rows = fattn_tensor_view(data, s->dtype, DEVICE, device_id, 4, shape);
    const fattn_tensor all = fattn_tensor_permute(&rows, (int[]){0, 2, 1, 3});
    return fattn_tensor_slice(&all, 1, n * s->NH, (n + 1) * s->NH);
}

static fattn_tensor statistics(float *data, const sizes *s) {
    return fattn_tensor_view(data, FATTN_F32, DEVICE, device_id, 3, (int64_t[]){s->B, s->NH, s->T});
}

static const fattn_attention_params causal = {.struct_size = sizeof causal, .flags = FATTN_CAUSAL};

static void forward(sizes s, void *out, float *stats, void *qkvr, fattn_stream stream) {
    CHECK(fattn_ctx_set_stream(ctx, stream));
    if (!stats) stats = grow(&unwanted_stats, (size_t)(s.B * s.NH * s.T) * sizeof *stats);
    const fattn_tensor q = heads("qkvr", qkvr, &s, 3, 0), k = heads("qkvr", qkvr, &s, 3, 1),
                       v = heads("qkvr", qkvr, &s, 3, 2), o = heads("out", out, &s, 1, 0), lse = statistics(stats, &s);
    fattn_attention_io io = {.struct_size = sizeof io, .q = &q, .k = &k, .v = &v, .o = &o, .lse = &lse};
    fattn_attention_plan plan = {.struct_size = sizeof plan};
    CHECK(fattn_attention_query(ctx, &causal, &io, &plan));
    io.workspace_bytes = plan.fwd_workspace;
    io.workspace = grow(&workspace, io.workspace_bytes);
    CHECK(fattn_attention_fwd(ctx, &causal, &io));
}

static void backward(sizes s, void *dqkvr, void *dout, void *qkvr, void *out, float *stats, fattn_stream stream) {
    CHECK(fattn_ctx_set_stream(ctx, stream));
    const fattn_tensor q = heads("qkvr", qkvr, &s, 3, 0), k = heads("qkvr", qkvr, &s, 3, 1),
                       v = heads("qkvr", qkvr, &s, 3, 2), o = heads("o", out, &s, 1, 0), lse = statistics(stats, &s),
                       d_o = heads("dout", dout, &s, 1, 0), dq = heads("dqkvr", dqkvr, &s, 3, 0),
                       dk = heads("dqkvr", dqkvr, &s, 3, 1), dv = heads("dqkvr", dqkvr, &s, 3, 2);
    fattn_attention_io io = {.struct_size = sizeof io,
                             .q = &q,
                             .k = &k,
                             .v = &v,
                             .o = &o,
                             .lse = &lse,
                             .d_o = &d_o,
                             .dq = &dq,
                             .dk = &dk,
                             .dv = &dv};
    fattn_attention_plan plan = {.struct_size = sizeof plan};
    CHECK(fattn_attention_query(ctx, &causal, &io, &plan));
    io.workspace_bytes = plan.bwd_workspace;
    io.workspace = grow(&workspace, io.workspace_bytes);
    CHECK(fattn_attention_bwd(ctx, &causal, &io));
}

/* attention_forward_cudnn and attention_backward_cudnn for floatX = __nv_bfloat16 and floatX = __half. */
#define FORWARD void *out, float *stats, void *qkvr, int B, int T, int NH, int C, fattn_stream stream
#define BACKWARD                                                                                                       \
    void *dqkvr, void *dout, void *qkvr, void *o, float *stats, int B, int T, int NH, int C, fattn_stream stream

void forward_bf16(FORWARD) __asm__("_Z23attention_forward_cudnnP13__nv_bfloat16PfS0_iiiiP11CUstream_st");
void forward_f16(FORWARD) __asm__("_Z23attention_forward_cudnnP6__halfPfS0_iiiiP11CUstream_st");
void backward_bf16(BACKWARD) __asm__("_Z24attention_backward_cudnnP13__nv_bfloat16S0_S0_S0_PfiiiiP11CUstream_st");
void backward_f16(BACKWARD) __asm__("_Z24attention_backward_cudnnP6__halfS0_S0_S0_PfiiiiP11CUstream_st");

void forward_bf16(FORWARD) { forward(sizes_of(FATTN_BF16, B, T, NH, C), out, stats, qkvr, stream); }
void forward_f16(FORWARD) { forward(sizes_of(FATTN_F16, B, T, NH, C), out, stats, qkvr, stream); }
void backward_bf16(BACKWARD) { backward(sizes_of(FATTN_BF16, B, T, NH, C), dqkvr, dout, qkvr, o, stats, stream); }
void backward_f16(BACKWARD) { backward(sizes_of(FATTN_F16, B, T, NH, C), dqkvr, dout, qkvr, o, stats, stream); }
