/* fattn in LLM.Q, in place of src/kernels/cudnn_att.cpp: its four functions in BF16. README.md says how.

   o, L = attention(q, k, v), causal, scale 1/sqrt(HS), and its gradients. A row of qkv and dqkv [B,T,Hq+2Hkv,HS] has
   the heads of q, then those of k, then those of v; out and dout are [B,T,Hq,HS], stats is L [B,Hq,T]. Gradients are
   overwritten.

   LLM.Q is C++: the functions have the names that its compiler gives them. A cudnnHandle_t, which LLM.Q makes for each
   GPU and hands to every call, is here a context of fattn.

   Gradients repeat bitwise, as LLM.Q asks of cuDNN. FATTN_ATOMIC=1 in the environment takes an order of additions that
   is faster and differs from run to run. The functions cannot return an error: it goes to stderr and ends the program,
   as cuDNN's do in LLM.Q. */
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

/* The workspace that LLM.Q lends forward, which is cuBLAS's. */
#define FORWARD_BYTES ((size_t)32 << 20)

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

/* What cudnnHandle_t points to. LLM.Q never destroys it; it has no memory on the GPU. */
struct cudnnContext {
    fattn_ctx *fattn;
    int32_t device_id;
};
typedef struct cudnnContext *handle;

/* On the GPU that is current. */
handle create_cudnn_handle(void) __asm__("_Z19create_cudnn_handlev");
handle create_cudnn_handle(void) {
    const char *const atomic = getenv("FATTN_ATOMIC");
    const bool repeats = !atomic || !*atomic || strcmp(atomic, "0") == 0;
    const handle made = malloc(sizeof *made);
    if (!made) check(FATTN_E_NOMEM, __LINE__);
    made->device_id = current_device();
    const fattn_ctx_options o = {.struct_size = sizeof o,
                                 .flags = repeats ? FATTN_CTX_DETERMINISTIC : 0,
                                 .device = DEVICE,
                                 .device_id = made->device_id,
                                 .log = report};
    CHECK(fattn_ctx_create(&o, &made->fattn));
    return made;
}

typedef struct sizes {
    handle at;
    int64_t B, T, Hq, Hkv, HS;
} sizes;

static sizes sizes_of(handle at, int B, int T, int Hq, int Hkv, int HS) {
    if (at) return (sizes){at, B, T, Hq, Hkv, HS};
    fprintf(stderr, "[FATTN ERROR] the handle is NULL: create_cudnn_handle makes one\n");
    exit(EXIT_FAILURE);
}

/* Heads [begin, end) of [B,T,H,HS], as [B,end - begin,T,HS]. */
static fattn_tensor heads(const sizes *s, const char *name, const void *data, int64_t H, int64_t begin, int64_t end) {
    if (!data) CHECK(fattn_ctx_fail(s->at->fattn, FATTN_E_ARG, "%s: NULL", name));
    const fattn_tensor rows = fattn_tensor_view((void *)(uintptr_t)data, FATTN_BF16, DEVICE, s->at->device_id, 4,
                                                (int64_t[]){s->B, s->T, H, s->HS});
    const fattn_tensor all = fattn_tensor_permute(&rows, (int[]){0, 2, 1, 3});
    return fattn_tensor_slice(&all, 1, begin, end);
}

static fattn_tensor statistics(const sizes *s, const float *data) {
    return fattn_tensor_view((void *)(uintptr_t)data, FATTN_F32, DEVICE, s->at->device_id, 3,
                             (int64_t[]){s->B, s->Hq, s->T});
}

static const fattn_attention_params causal = {.struct_size = sizeof causal, .flags = FATTN_CAUSAL};

/* The tensors of a call, io, which points to them, and the plan. */
typedef struct call {
    fattn_tensor q, k, v, o, lse, d_o, dq, dk, dv;
    fattn_attention_io io;
    fattn_attention_plan plan;
} call;

static void slice(const sizes *s, const char *name, const void *qkv, fattn_tensor *q, fattn_tensor *k,
                  fattn_tensor *v) {
    const int64_t keys = s->Hq, values = s->Hq + s->Hkv, H = s->Hq + 2 * s->Hkv;
    *q = heads(s, name, qkv, H, 0, keys);
    *k = heads(s, name, qkv, H, keys, values);
    *v = heads(s, name, qkv, H, values, H);
}

static void prepare_forward(const sizes *s, call *c, const void *out, const float *stats, const void *qkv) {
    slice(s, "qkv", qkv, &c->q, &c->k, &c->v);
    c->o = heads(s, "out", out, s->Hq, 0, s->Hq);
    c->lse = statistics(s, stats);
    c->io = (fattn_attention_io){
        .struct_size = sizeof c->io, .q = &c->q, .k = &c->k, .v = &c->v, .o = &c->o, .lse = &c->lse};
}

static void prepare_backward(const sizes *s, call *c, const void *dqkv, const float *stats, const void *dout,
                             const void *qkv, const void *out) {
    prepare_forward(s, c, out, stats, qkv);
    slice(s, "dqkv", dqkv, &c->dq, &c->dk, &c->dv);
    c->d_o = heads(s, "dout", dout, s->Hq, 0, s->Hq);
    c->io.d_o = &c->d_o, c->io.dq = &c->dq, c->io.dk = &c->dk, c->io.dv = &c->dv;
}

static void query(const sizes *s, call *c) {
    c->plan = (fattn_attention_plan){.struct_size = sizeof c->plan};
    CHECK(fattn_attention_query(s->at->fattn, &causal, &c->io, &c->plan));
}

/* attention_forward_cudnn: out, stats = attention(qkv). */
#define FORWARD                                                                                                        \
    void *out, float *stats, const void *qkv, void *workspace, handle at, int B, int T, int Hq, int Hkv, int HS,       \
        fattn_stream stream
void forward(FORWARD) __asm__("_Z23attention_forward_cudnn"
                              "P13__nv_bfloat16PfPKS_PSt4byteP12cudnnContextiiiiiP11CUstream_st");
void forward(FORWARD) {
    const sizes s = sizes_of(at, B, T, Hq, Hkv, HS);
    call c;
    prepare_forward(&s, &c, out, stats, qkv);
    query(&s, &c);
    if (c.plan.fwd_workspace > FORWARD_BYTES)
        CHECK(fattn_ctx_fail(at->fattn, FATTN_E_WORKSPACE, "forward needs %zu bytes, LLM.Q has %zu for it",
                             c.plan.fwd_workspace, FORWARD_BYTES));
    c.io.workspace = workspace;
    c.io.workspace_bytes = c.plan.fwd_workspace;
    CHECK(fattn_ctx_set_stream(at->fattn, stream));
    CHECK(fattn_attention_fwd(at->fattn, &causal, &c.io));
}

/* attention_backward_cudnn: dqkv, the gradient with respect to qkv. The tensors come in the order of the call in
   attention.cu; kernels.h declares (dqkv, stats, out, dout, qkv), of the same types. */
#define BACKWARD                                                                                                       \
    void *dqkv, const float *stats, const void *dout, const void *qkv, const void *out, void *workspace, handle at,    \
        int B, int T, int Hq, int Hkv, int HS, fattn_stream stream
void backward(BACKWARD) __asm__("_Z24attention_backward_cudnn"
                                "P13__nv_bfloat16PKfPKS_S4_S4_PSt4byteP12cudnnContextiiiiiP11CUstream_st");
void backward(BACKWARD) {
    const sizes s = sizes_of(at, B, T, Hq, Hkv, HS);
    call c;
    prepare_backward(&s, &c, dqkv, stats, dout, qkv, out);
    query(&s, &c);
    c.io.workspace = workspace;
    c.io.workspace_bytes = c.plan.bwd_workspace;
    CHECK(fattn_ctx_set_stream(at->fattn, stream));
    CHECK(fattn_attention_bwd(at->fattn, &causal, &c.io));
}

/* LLM.Q has no tensors yet when it asks for the size of backward's workspace. A plan reads no data, but refuses tensors
   that are NULL or overlap: these have addresses far from each other. */
static void *nowhere(uintptr_t n) { return (void *)(n << 40); }

#define SIZES int B, int T, int Hq, int Hkv, int HS, handle at
size_t workspace_bytes(SIZES) __asm__("_Z24cudnn_get_workspace_sizeiiiiiP12cudnnContext");
size_t workspace_bytes(SIZES) {
    const sizes s = sizes_of(at, B, T, Hq, Hkv, HS);
    call c;
    prepare_backward(&s, &c, nowhere(1), nowhere(2), nowhere(3), nowhere(4), nowhere(5));
    query(&s, &c);
    return c.plan.bwd_workspace;
}
