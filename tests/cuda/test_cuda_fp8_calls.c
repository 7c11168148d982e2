/* Calls with FATTN_FP8 on Hopper: the copies have the CPU's bits; results are the same in every run and in graphs; what
   backward does with the flag; refusals elsewhere, which alone run on other devices. */
#include "contexts.h"
#include "device.h"
#include "fp8.h"
#include "pair.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

static const fattn_dtype dtypes[3] = {FATTN_BF16, FATTN_F32, FATTN_F16};
static const enum layout layouts[4] = {LAYOUT_BHSD, LAYOUT_BSHD, LAYOUT_PITCH, LAYOUT_REVERSED};

static bool is_power(int64_t D) { return (D & (D - 1)) == 0 && D >= 16; }

/* ---- the copies ---- */

/* `got` and `want`: the memory that has the copies, want_tensor in `want`. */
static void same_bytes(const attention_case *c, const char *name, const fattn_tensor *want_tensor,
                       const unsigned char *want, const unsigned char *got) {
    const size_t size = fattn_dtype_size((fattn_dtype)want_tensor->dtype);
    int64_t at[FATTN_MAX_DIMS] = {0};
    for (int64_t n = 0; n < fattn_tensor_numel(want_tensor); ++n) {
        attention_index(want_tensor, n, at);
        int64_t offset = 0;
        for (int d = 0; d < want_tensor->ndim; ++d) offset += at[d] * want_tensor->stride[d];
        const unsigned char *const w = (const unsigned char *)want_tensor->data + (size_t)offset * size;
        const unsigned char *const g = got + (w - want);
        if (memcmp(g, w, size) == 0) continue;
        cr_assert_fail("%s %s, D %d, Dv %d: %s[%d, %d, %d, %d] is %g, the CPU has %g", c->name,
                       fattn_dtype_name(c->dtype), (int)c->D, (int)c->Dv, name, (int)at[0], (int)at[1], (int)at[2],
                       (int)at[3], fattni_load(g, want_tensor->dtype, 0), fattni_load(w, want_tensor->dtype, 0));
    }
}

/* All elements, also those that no sequence has, which both leave as they were; scratch is not compared. */
static void check_copies(fattn_ctx *gpu, fattn_ctx *cpu, const attention_case *given, float rope_base) {
    attention *const a = attention_new(cpu, given);
    const attention_case *const c = &a->c;
    fp8_copies want = fp8_quantize_turned(a, rope_base);
    device_tensors x;
    size_t bytes = 0;
    fattn_fp8 on_device;
    device_upload(a, &x);
    MUST(gpu, fattn_fp8_layout(gpu, &a->params, &x.io, NULL, &bytes, NULL));
    cr_assert_eq(bytes, want.bytes, "%s", c->name);
    unsigned char *const memory = device_memory(bytes), *const got = malloc(bytes + 1);
    MUST(gpu, fattn_fp8_layout(gpu, &a->params, &x.io, memory, &bytes, &on_device));
    x.io.fp8 = &on_device;
    on_device.rope_base = rope_base;
    for (int run = 0; run < 2; ++run) { /* the second one finds the first one's scratch */
        MUST(gpu, fattn_fp8_quantize(gpu, &a->params, &x.io));
        MUST(gpu, fattn_ctx_sync(gpu));
        must(cudaMemcpy(got, memory, bytes, cudaMemcpyDeviceToHost), "copies");
        static const char *const names[8] = {"q8", "k8", "v8", "q_scale", "q_shift", "k_scale", "v_scale", "v_mean"};
        for (int n = 0; n < 8; ++n) {
            const fattn_tensor *const w = &want.fp8.q8 + n, *const g = &on_device.q8 + n;
            if (fattn_tensor_numel(w) == 0) continue;
            cr_assert_eq((unsigned char *)g->data - memory, (unsigned char *)w->data - (unsigned char *)want.memory);
            same_bytes(c, names[n], w, want.memory, got);
        }
    }
    device_memory_check(c->name, memory, bytes, "the copies");
    device_download(a, &x);
    free(got);
    fp8_free(&want);
    attention_free(a);
}

/* A Dv of another size than D, sequences around blocks of 16 and 128 keys and around a block of rows. */
static attention_case copies_case(int n) {
    static const int64_t dims[] = {64, 8, 128, 40, 256, 80, 16, 96, 192, 32, 17, 111};
    static const int64_t lengths[] = {1, 15, 16, 17, 127, 128, 129, 1000, 4097, 257, 63};
    const int64_t Sk = lengths[n % 11], Sq = lengths[n / 3 % 7];
    const bool long_one = Sk >= 1000;
    attention_case c = {.name = "copies",
                        .B = long_one ? 1 : 1 + n % 3,
                        .Hkv = 1 + n % 2,
                        .Sq = Sq,
                        .Sk = Sk,
                        .D = dims[n % 12],
                        .Dv = dims[n % 3 ? n % 12 : n / 5 % 12],
                        .dtype = dtypes[n % 3],
                        .wide = n % 4 == 1,
                        .layout = layouts[n / 3 % 4],
                        .flags = FATTN_FP8 | (n % 5 == 0 ? FATTN_CAUSAL : 0u)};
    c.Hq = c.Hkv * (long_one ? 1 : 1 + n / 2 % 3);
    if (n % 4 == 3) c.lengths = n % 8 == 3 ? LENGTHS_PADDED : LENGTHS_PACKED, c.B = long_one ? 3 : 6;
    for (int b = 0; b < MAX_SEQUENCES; ++b) {
        c.length_q[b] = (int32_t)(b == 1 ? 0 : Sq / (1 + b % 3));
        c.length_k[b] = (int32_t)(b == 2 ? 0 : b == 0 ? Sk : Sk * (b + 1) / (2 * b + 3));
    }
    if (n % 13 == 6) c.layout = LAYOUT_QKV, c.Hkv = c.Hq, c.Dv = c.D, c.Sq = c.Sk, c.lengths = LENGTHS_NONE;
    if (n % 2 && is_power(c.D)) c.flags |= FATTN_FP8_HADAMARD;
    c.q_pos0 = n % 5 * 1000, c.k_pos0 = n % 3 * 100;
    return c;
}

Test(cuda_fp8_calls, copies_have_the_bits_of_the_cpu, .timeout = 600) {
    fattn_ctx *const gpu = hopper_or_skip(), *const cpu = attention_context(0);
    for (int n = 0; n < 600; ++n) {
        attention_case c = copies_case(n);
        if (n >= 300) c.flags |= FATTN_FP8_INT8;
        check_copies(gpu, cpu, &c, n % 4 < 2 && c.D % 16 == 0 ? 10000 : 0);
    }
    static const int64_t nothing[][2] = {{0, 5}, {5, 0}, {0, 0}};
    for (int n = 0; n < 6; ++n) {
        const attention_case c = {.name = "nothing",
                                  .B = 2,
                                  .Hq = 2,
                                  .Sq = nothing[n / 2][0],
                                  .Sk = nothing[n / 2][1],
                                  .D = 64,
                                  .dtype = FATTN_BF16,
                                  .flags = FATTN_FP8 | (n % 2 ? FATTN_FP8_INT8 : 0u)};
        check_copies(gpu, cpu, &c, n / 2 ? 500 : 0);
    }
    fattn_ctx_destroy(cpu);
    fattn_ctx_destroy(gpu);
}

/* ---- the same bits ---- */

static const attention_case busy_cases[] = {
    {.name = "full", .dtype = FATTN_BF16, .B = 3, .Hq = 20, .Hkv = 10, .Sq = 900, .Sk = 1000, .D = 128},
    {.name = "causal", .dtype = FATTN_F16, .B = 3, .Hq = 20, .Sq = 900, .Sk = 900, .D = 64, .flags = FATTN_CAUSAL},
    {.name = "causal, d 256",
     .dtype = FATTN_BF16,
     .B = 2,
     .Hq = 20,
     .Sq = 700,
     .Sk = 700,
     .D = 256,
     .flags = FATTN_CAUSAL},
    {.name = "window",
     .dtype = FATTN_BF16,
     .B = 3,
     .Hq = 20,
     .Hkv = 5,
     .Sq = 900,
     .Sk = 900,
     .D = 128,
     .flags = FATTN_WINDOW,
     .window_left = 200,
     .window_right = 50,
     .sink = true},
    {.name = "packed",
     .dtype = FATTN_F32,
     .B = 4,
     .Hq = 20,
     .Sq = 900,
     .Sk = 900,
     .D = 80,
     .flags = FATTN_CAUSAL,
     .lengths = LENGTHS_PACKED,
     .length_q = {900, 3, 500, 64},
     .length_k = {900, 30, 400, 129}},
};
enum { BUSY_CASES = sizeof busy_cases / sizeof *busy_cases };

static call *busy_call(fattn_ctx *ctx, int n, uint32_t flags) {
    attention_case c = busy_cases[n];
    c.flags |= FATTN_FP8 | (n % 2 ? FATTN_FP8_HADAMARD : 0u) | flags;
    if (!is_power(c.D)) c.flags &= ~(uint32_t)FATTN_FP8_HADAMARD;
    return call_new(ctx, &c);
}

Test(cuda_fp8_calls, repeats_have_the_same_bits, .timeout = 200) {
    fattn_ctx *const gpu = hopper_or_skip(), *const few = context(NULL, 2);
    for (int m = 0; m < 2 * BUSY_CASES; ++m) {
        const int n = m / 2;
        const uint32_t flags = m % 2 ? FATTN_FP8_INT8 : 0;
        call *const x = busy_call(gpu, n, flags), *const y = busy_call(few, n, flags);
        call_forward(x), call_forward(y);
        const uint64_t first = call_bits(x, CALL_O, CALL_LSE);
        cr_assert_eq(call_bits(y, CALL_O, CALL_LSE), first, "%s: other bits on two SMs", busy_cases[n].name);
        for (int k = 0; k < 20; ++k) {
            call_fill(x, CALL_O, NAN), call_fill(x, CALL_LSE, NAN);
            call_forward(x);
            cr_assert_eq(call_bits(x, CALL_O, CALL_LSE), first, "%s, run %d", busy_cases[n].name, k);
        }
        call_free(x), call_free(y);
    }
    fattn_ctx_destroy(few);
    fattn_ctx_destroy(gpu);
}

/* Each launch reads the inputs of its time. */
Test(cuda_fp8_calls, a_graph_replays, .timeout = 200) {
    fattn_ctx *const gpu = hopper_or_skip();
    for (int m = 0; m < 2 * BUSY_CASES; ++m) {
        const int n = m / 2;
        call *const x = busy_call(gpu, n, m % 2 ? FATTN_FP8_INT8 : 0);
        fattn_graph *graph;
        uint64_t bits[2];
        double *const q[2] = {call_read(x, CALL_Q), call_read(x, CALL_Q)};
        for (int64_t e = 0; e < fattn_tensor_numel(&x->t[CALL_Q]); ++e) q[0][e] *= -0.5;
        for (int k = 0; k < 2; ++k) {
            call_write(x, CALL_Q, q[k]);
            call_forward(x);
            bits[k] = call_bits(x, CALL_O, CALL_LSE);
        }
        cr_assert_neq(bits[0], bits[1]);
        MUST(gpu, fattn_graph_begin(gpu));
        call_forward(x);
        MUST(gpu, fattn_graph_end(gpu, &graph));
        for (int k = 0; k < 6; ++k) {
            call_write(x, CALL_Q, q[k % 2]);
            call_fill(x, CALL_O, NAN), call_fill(x, CALL_LSE, NAN);
            MUST(gpu, fattn_graph_launch(gpu, graph));
            cr_assert_eq(call_bits(x, CALL_O, CALL_LSE), bits[k % 2], "%s, launch %d", busy_cases[n].name, k);
        }
        fattn_graph_destroy(gpu, graph);
        free(q[0]), free(q[1]);
        call_free(x);
    }
    fattn_ctx_destroy(gpu);
}

/* Backward with the flag has the bits of one without, given the same O and L. */
Test(cuda_fp8_calls, backward_ignores_the_flag, .timeout = 200) {
    fattn_ctx *const gpu = hopper_or_skip();
    for (int n = 0; n < 4; ++n) {
        attention_case c = {.name = "backward",
                            .dtype = FATTN_BF16,
                            .B = 2,
                            .Hq = 4,
                            .Hkv = n % 2 ? 2 : 4,
                            .Sq = 500,
                            .Sk = 500,
                            .D = n % 2 ? 64 : 128,
                            .flags = FATTN_DETERMINISTIC | (n / 2 ? FATTN_CAUSAL : 0u)};
        call *const plain = call_new(gpu, &c);
        c.flags |= FATTN_FP8 | (n ? FATTN_FP8_HADAMARD : 0u);
        call *const x = call_new(gpu, &c);
        call_forward(x), call_forward(plain);
        cr_assert_neq(call_bits(x, CALL_O, CALL_LSE), call_bits(plain, CALL_O, CALL_LSE));
        for (int id = CALL_O; id <= CALL_LSE; ++id) {
            double *const values = call_read(x, (enum call_tensor)id);
            call_write(plain, (enum call_tensor)id, values);
            free(values);
        }
        call_backward(x), call_backward(plain);
        cr_assert_str_eq(x->plan.bwd_kernel, plain->plan.bwd_kernel);
        cr_assert_eq(call_bits(x, CALL_DQ, CALL_DV), call_bits(plain, CALL_DQ, CALL_DV), "case %d", n);
        call_free(x), call_free(plain);
    }
    fattn_ctx_destroy(gpu);
}

/* With FATTN_FP8_RENEW it has the bits of both passes without FATTN_FP8; O and L are not read. So has a graph. */
Test(cuda_fp8_calls, renewed_gradients_are_those_without_fp8, .timeout = 200) {
    static const fattn_dtype types[3] = {FATTN_BF16, FATTN_F16, FATTN_F32};
    fattn_ctx *const gpu = hopper_or_skip();
    for (int n = 0; n < 3 * BUSY_CASES; ++n) {
        attention_case c = busy_cases[n % BUSY_CASES];
        c.dtype = types[n / BUSY_CASES];
        c.d_lse = n % 2;
        c.flags |= FATTN_DETERMINISTIC;
        call *const plain = call_new(gpu, &c);
        c.flags |= FATTN_FP8 | FATTN_FP8_RENEW;
        call *const x = call_new(gpu, &c);
        call_forward(x), call_forward(plain);
        call_fill(x, CALL_O, NAN), call_fill(x, CALL_LSE, NAN);
        call_backward(x), call_backward(plain);
        cr_assert_str_eq(x->plan.bwd_kernel, plain->plan.bwd_kernel);
        const uint64_t want = call_bits(plain, CALL_DQ, CALL_DV);
        cr_assert_eq(call_bits(x, CALL_DQ, CALL_DV), want, "%s, %s", c.name, fattn_dtype_name(c.dtype));
        fattn_graph *graph;
        MUST(gpu, fattn_graph_begin(gpu));
        call_backward(x);
        MUST(gpu, fattn_graph_end(gpu, &graph));
        for (int id = CALL_DQ; id <= CALL_DV; ++id) call_fill(x, (enum call_tensor)id, NAN);
        MUST(gpu, fattn_graph_launch(gpu, graph));
        cr_assert_eq(call_bits(x, CALL_DQ, CALL_DV), want, "%s, as a graph", c.name);
        fattn_graph_destroy(gpu, graph);
        call_free(x), call_free(plain);
    }
    fattn_ctx_destroy(gpu);
}

/* ---- refusals ---- */

static void refused(fattn_ctx *ctx, fattn_status s, fattn_status want, const char *message) {
    cr_assert_eq(s, want, "%s", fattn_ctx_error(ctx));
    cr_assert(strstr(fattn_ctx_error(ctx), message), "%s", fattn_ctx_error(ctx));
}

/* On a device that is no Hopper GPU, or as if on one. */
Test(cuda_fp8_calls, other_devices_refuse) {
    fattn_ctx *const any = context_or_skip();
    static const int archs[] = {80, 86, 89};
    const attention_case a = {.name = "refused", .dtype = FATTN_BF16, .B = 1, .Hq = 2, .Sq = 100, .Sk = 100, .D = 64};
    for (int n = 0; n < 3; ++n) {
        if (any->gpu.arch < archs[n]) continue;
        fattn_ctx *const ctx = context_of(NULL, 0, archs[n]);
        call *const c = call_new(any, &a);
        fattn_attention_plan plan = {.struct_size = sizeof plan};
        size_t bytes = 0;
        c->params.flags |= FATTN_FP8;
        refused(ctx, fattn_attention_query(ctx, &c->params, &c->io, &plan), FATTN_E_UNSUPPORTED, "sm_90");
        refused(ctx, fattn_attention_fwd(ctx, &c->params, &c->io), FATTN_E_UNSUPPORTED, "sm_90");
        refused(ctx, fattn_fp8_layout(ctx, &c->params, &c->io, NULL, &bytes, NULL), FATTN_E_UNSUPPORTED, "sm_90");
        cr_assert_eq(bytes, 0u);
        c->params.flags &= ~(uint32_t)FATTN_FP8;
        call_free(c);
        fattn_ctx_destroy(ctx);
    }
    fattn_ctx_destroy(any);
}

Test(cuda_fp8_calls, calls_that_are_refused) {
    fattn_ctx *const gpu = hopper_or_skip();
    const attention_case a = {
        .name = "refused", .dtype = FATTN_BF16, .B = 1, .Hq = 2, .Sq = 100, .Sk = 100, .D = 64, .flags = FATTN_FP8};
    call *const c = call_new(gpu, &a);
    const fattn_attention_params given = c->params;
    fattn_attention_plan plan = {.struct_size = sizeof plan};
    c->params.softcap = 5;
    refused(gpu, fattn_attention_query(gpu, &c->params, &c->io, &plan), FATTN_E_UNSUPPORTED, "softcap");
    c->params = given, c->params.dropout_p = 0.1f;
    refused(gpu, fattn_attention_query(gpu, &c->params, &c->io, &plan), FATTN_E_UNSUPPORTED, "dropout");
    c->params = given, c->params.algorithm = FATTN_ALGO_STANDARD;
    refused(gpu, fattn_attention_query(gpu, &c->params, &c->io, &plan), FATTN_E_UNSUPPORTED, "STANDARD");
    c->params = given;
    c->io.workspace_bytes = c->plan.fwd_workspace - 1;
    refused(gpu, fattn_attention_fwd(gpu, &c->params, &c->io), FATTN_E_WORKSPACE, "bytes needed");
    c->io.workspace_bytes = c->plan.fwd_workspace;
    call_forward(c);
    call_free(c);
    fattn_ctx_destroy(gpu);
}
