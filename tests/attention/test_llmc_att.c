/* examples/llm.c/fattn_att.c on the CPU: its results have the bits of the library's attention, whatever was in the
   gradients before; the options of its context; memory; errors. */
#define _POSIX_C_SOURCE 200809L
#include "packed_qkv.h"

#include <criterion/criterion.h>
#include <string.h>

/* The options of the context that the example makes. */
static fattn_ctx_options options;
static fattn_status create_and_keep(const fattn_ctx_options *o, fattn_ctx **out) {
    options = *o;
    return fattn_ctx_create(o, out);
}
#define FATTN_ATT_ON_CPU
#define fattn_ctx_create create_and_keep
#include "examples/llm.c/fattn_att.c"
#undef fattn_ctx_create

static void call_forward(packed_qkv *x, float *stats, fattn_stream stream) {
    (x->dtype == FATTN_BF16 ? forward_bf16 : forward_f16)(x->o, stats, x->qkv, x->B, x->T, x->Hq, x->Hq * x->HS,
                                                          stream);
}
static void call_backward(packed_qkv *x) {
    (x->dtype == FATTN_BF16 ? backward_bf16 : backward_f16)(x->dqkv, x->d_o, x->qkv, x->o, x->lse, x->B, x->T, x->Hq,
                                                            x->Hq * x->HS, NULL);
}

static const fattn_dtype dtypes[] = {FATTN_BF16, FATTN_F16};

/* Shapes that become smaller and larger, so that the workspace of one serves the next. */
Test(llmc_att, bits_of_the_library) {
    static const int shapes[][4] = {{2, 37, 3, 16}, {1, 1, 1, 8}, {2, 130, 4, 64}, {3, 64, 2, 24}};
    create_cudnn();
    for (int n = 0; n < 8; ++n) {
        const int *const s = shapes[n / 2];
        packed_qkv x = packed_new(dtypes[n % 2], s[0], s[1], s[2], s[2], s[3]);
        call_forward(&x, x.lse, NULL);
        call_backward(&x);
        packed_check(&x, 1);
        call_backward(&x); /* gradients are overwritten */
        packed_check(&x, 1);
        packed_free(&x);
    }
    destroy_cudnn();
}

/* The statistic of row 0, which sees key 0 alone, is its score: natural log, scale 1/sqrt(HS). */
Test(llmc_att, statistics_are_natural_logs) {
    packed_qkv x = packed_new(FATTN_F16, 1, 5, 1, 1, 16);
    uint16_t *const q = x.qkv, *const k = x.qkv + 16;
    for (int d = 0; d < 16; ++d) q[d] = 0x3c00, k[d] = 0x4000; /* 1 and 2 */
    create_cudnn();
    call_forward(&x, x.lse, NULL);
    destroy_cudnn();
    cr_assert(x.lse[0] > 7 && x.lse[0] < 9, "%g", x.lse[0]); /* 16 * 2 / sqrt(16); in base 2 11.5, unscaled 32 */
    packed_free(&x);
}

Test(llmc_att, without_statistics) {
    packed_qkv x = packed_new(FATTN_BF16, 2, 37, 3, 3, 16);
    create_cudnn();
    call_forward(&x, NULL, NULL);
    memcpy(x.lse, unwanted_stats.data, (size_t)(2 * 3 * 37) * sizeof *x.lse);
    destroy_cudnn();
    cr_assert(!workspace.data && !unwanted_stats.data);
    packed_check(&x, 0);
    packed_free(&x);
}

Test(llmc_att, allocates_where_calls_become_larger) {
    packed_qkv small = packed_new(FATTN_BF16, 1, 40, 2, 2, 16), large = packed_new(FATTN_BF16, 2, 200, 3, 3, 64);
    packed_qkv *const order[] = {&small, &large, &small, &large};
    size_t allocs[4];
    create_cudnn();
    for (int n = 0; n < 4; ++n) {
        call_forward(order[n], order[n]->lse, NULL);
        call_backward(order[n]);
        allocs[n] = fattn_ctx_mem(ctx).allocs;
    }
    cr_assert_gt(allocs[1], allocs[0]);
    cr_assert_eq(allocs[3], allocs[1]);
    cr_assert_eq(fattn_ctx_mem(ctx).live, (size_t)workspace.shape[0]);
    destroy_cudnn();
    packed_free(&small), packed_free(&large);
}

Test(llmc_att, deterministic_unless_asked) {
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
        create_cudnn();
        cr_assert_eq(options.flags, cases[n].flags, "case %d: %x", n, options.flags);
        destroy_cudnn();
    }
}

static void forward_now(packed_qkv *x) { call_forward(x, x->lse, NULL); }
static void with_stream(packed_qkv *x) { call_forward(x, x->lse, (fattn_stream)x->qkv); }
static void backward_with_stream(packed_qkv *x) {
    backward_bf16(x->dqkv, x->d_o, x->qkv, x->o, x->lse, x->B, x->T, 3, 48, (fattn_stream)x->qkv);
}
static void with_heads(packed_qkv *x) { forward_bf16(x->o, x->lse, x->qkv, x->B, x->T, 5, 48, NULL); }
static void without_heads(packed_qkv *x) { forward_bf16(x->o, x->lse, x->qkv, x->B, x->T, 0, 48, NULL); }
static void negative(packed_qkv *x) { forward_bf16(x->o, NULL, x->qkv, -1, x->T, 3, 48, NULL); }
static void without_inputs(packed_qkv *x) { forward_bf16(x->o, x->lse, NULL, x->B, x->T, 3, 48, NULL); }
static void without_stats(packed_qkv *x) {
    backward_bf16(x->dqkv, x->d_o, x->qkv, x->o, NULL, x->B, x->T, 3, 48, NULL);
}
static void over_inputs(packed_qkv *x) { backward_bf16(x->qkv, x->d_o, x->qkv, x->o, x->lse, x->B, x->T, 3, 48, NULL); }
static void destroyed(packed_qkv *x) {
    destroy_cudnn();
    destroy_cudnn();
    forward_now(x);
}

Test(llmc_att, errors) {
    packed_qkv x = packed_new(FATTN_BF16, 2, 7, 3, 3, 16);
    packed_check_failure(forward_now, &x, "attention outside create_cudnn and destroy_cudnn");
    create_cudnn();
    create_cudnn();                                          /* has no effect */
    packed_check_failure(with_stream, &x, "has no streams"); /* a stream reaches the context */
    packed_check_failure(backward_with_stream, &x, "has no streams");
    packed_check_failure(with_heads, &x, "C 48 is not a multiple of NH 5");
    packed_check_failure(without_heads, &x, "C 48 is not a multiple of NH 0");
    packed_check_failure(negative, &x, "shape[0] is -");
    packed_check_failure(without_inputs, &x, "qkvr: NULL");
    packed_check_failure(without_stats, &x, "lse: data is NULL, but it has 42 elements");
    packed_check_failure(over_inputs, &x, "fattn_att.c:");
    packed_check_failure(destroyed, &x, "attention outside create_cudnn and destroy_cudnn");
    destroy_cudnn();
    packed_free(&x);
}
