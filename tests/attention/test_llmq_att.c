/* examples/llmq/fattn_att.c on the CPU: its results have the bits of the library's attention, in LLM.Q's order of
   arguments; the workspace that it asks for; the options of its context; errors. */
#define _POSIX_C_SOURCE 200809L
#include "packed_qkv.h"

#include <criterion/criterion.h>

/* The options of the context that the example makes, but for the threads: workspaces grow with them. */
static fattn_ctx_options options;
static int threads = 2;
static fattn_status create_and_keep(const fattn_ctx_options *o, fattn_ctx **out) {
    options = *o;
    options.cpu_threads = threads;
    return fattn_ctx_create(&options, out);
}
#define FATTN_ATT_ON_CPU
#define fattn_ctx_create create_and_keep
#include "examples/llmq/fattn_att.c"
#undef fattn_ctx_create

static void destroy(handle at) {
    fattn_ctx_destroy(at->fattn);
    free(at);
}

/* Exactly the size that LLM.Q allocates for backward, and what it lends forward. */
static void *lent(size_t bytes) {
    void *const p = aligned_alloc(256, (bytes + 255) / 256 * 256);
    cr_assert_not_null(p);
    return p;
}

static handle at; /* of the test */
static char *workspace;

static void call_forward(packed_qkv *x) {
    forward(x->o, x->lse, x->qkv, workspace, at, x->B, x->T, x->Hq, x->Hkv, x->HS, NULL);
}
static void call_backward(packed_qkv *x) {
    backward(x->dqkv, x->lse, x->d_o, x->qkv, x->o, workspace, at, x->B, x->T, x->Hq, x->Hkv, x->HS, NULL);
}

Test(llmq_att, bits_of_the_library) {
    static const int shapes[][5] = {{2, 37, 6, 2, 16}, {1, 1, 1, 1, 8}, {2, 130, 4, 1, 64}, {1, 64, 3, 3, 128}};
    for (int n = 0; n < 4; ++n) {
        const int *const s = shapes[n];
        packed_qkv x = packed_new(FATTN_BF16, s[0], s[1], s[2], s[3], s[4]);
        at = create_cudnn_handle();
        workspace = lent(FORWARD_BYTES);
        call_forward(&x);
        free(workspace);
        const size_t bytes = workspace_bytes(s[0], s[1], s[2], s[3], s[4], at);
        workspace = lent(bytes);
        const size_t allocs = fattn_ctx_mem(at->fattn).allocs;
        for (int run = 0; run < 2; ++run) { /* gradients are overwritten */
            call_backward(&x);
            packed_check(&x, 1);
        }
        cr_assert_eq(fattn_ctx_mem(at->fattn).allocs, allocs);
        cr_assert_eq(fattn_ctx_mem(at->fattn).live, 0);
        free(workspace);
        destroy(at);
        packed_free(&x);
    }
}

/* What LLM.Q reserves is what a call with real tensors needs. */
Test(llmq_att, size_of_the_workspace) {
    packed_qkv x = packed_new(FATTN_BF16, 2, 130, 4, 2, 64);
    at = create_cudnn_handle();
    const sizes s = sizes_of(at, 2, 130, 4, 2, 64);
    call c;
    prepare_backward(&s, &c, x.dqkv, x.lse, x.d_o, x.qkv, x.o);
    query(&s, &c);
    cr_assert_gt(c.plan.bwd_workspace, 0);
    cr_assert_eq(workspace_bytes(2, 130, 4, 2, 64, at), c.plan.bwd_workspace);
    destroy(at);
    packed_free(&x);
}

Test(llmq_att, deterministic_unless_asked) {
    static const struct {
        const char *value;
        uint32_t flags;
    } cases[] = {
        {NULL, FATTN_CTX_DETERMINISTIC}, {"", FATTN_CTX_DETERMINISTIC}, {"0", FATTN_CTX_DETERMINISTIC}, {"1", 0}};
    for (int n = 0; n < 4; ++n) {
        if (cases[n].value)
            setenv("FATTN_ATOMIC", cases[n].value, 1);
        else
            unsetenv("FATTN_ATOMIC");
        destroy(create_cudnn_handle());
        cr_assert_eq(options.flags, cases[n].flags, "case %d: %x", n, options.flags);
    }
}

static void forward_now(packed_qkv *x) { call_forward(x); }
Test(llmq_att, workspace_of_forward_is_limited) {
    packed_qkv x = packed_new(FATTN_BF16, 64, 130, 8, 8, 128);
    threads = 4096;
    at = create_cudnn_handle();
    packed_check_failure(forward_now, &x, "bytes, LLM.Q has 33554432 for it");
    destroy(at);
    packed_free(&x);
}

static void with_stream(packed_qkv *x) {
    forward(x->o, x->lse, x->qkv, workspace, at, x->B, x->T, x->Hq, x->Hkv, x->HS, (fattn_stream)x->qkv);
}
static void backward_with_stream(packed_qkv *x) {
    backward(x->dqkv, x->lse, x->d_o, x->qkv, x->o, workspace, at, x->B, x->T, x->Hq, x->Hkv, x->HS,
             (fattn_stream)x->qkv);
}
static void without_handle(packed_qkv *x) {
    forward(x->o, x->lse, x->qkv, workspace, NULL, x->B, x->T, x->Hq, x->Hkv, x->HS, NULL);
}
static void without_inputs(packed_qkv *x) {
    forward(x->o, x->lse, NULL, workspace, at, x->B, x->T, x->Hq, x->Hkv, x->HS, NULL);
}
static void without_stats(packed_qkv *x) {
    forward(x->o, NULL, x->qkv, workspace, at, x->B, x->T, x->Hq, x->Hkv, x->HS, NULL);
}
static void without_workspace(packed_qkv *x) {
    backward(x->dqkv, x->lse, x->d_o, x->qkv, x->o, NULL, at, x->B, x->T, x->Hq, x->Hkv, x->HS, NULL);
}
static void shifted_workspace(packed_qkv *x) {
    backward(x->dqkv, x->lse, x->d_o, x->qkv, x->o, workspace + 16, at, x->B, x->T, x->Hq, x->Hkv, x->HS, NULL);
}
static void uneven_heads(packed_qkv *x) { workspace_bytes(x->B, x->T, 3, 2, x->HS, at); }
static void negative(packed_qkv *x) { workspace_bytes(-1, x->T, 2, 1, x->HS, at); }

Test(llmq_att, errors) {
    packed_qkv x = packed_new(FATTN_BF16, 2, 7, 4, 2, 16);
    at = create_cudnn_handle();
    workspace = lent(FORWARD_BYTES);
    packed_check_failure(with_stream, &x, "has no streams"); /* a stream reaches the context */
    packed_check_failure(backward_with_stream, &x, "has no streams");
    packed_check_failure(without_handle, &x, "the handle is NULL");
    packed_check_failure(without_inputs, &x, "qkv: NULL");
    packed_check_failure(without_stats, &x, "lse: data is NULL, but it has 56 elements");
    packed_check_failure(without_workspace, &x, "workspace");
    packed_check_failure(shifted_workspace, &x, "workspace");
    packed_check_failure(uneven_heads, &x, "3");
    packed_check_failure(negative, &x, "shape[0] is -1");
    free(workspace);
    destroy(at);
    packed_free(&x);
}
