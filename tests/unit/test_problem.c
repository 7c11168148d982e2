/* Validation of attention calls: every error message of core/attention/problem.c, and the problem of a valid call. */
#include "core/attention/kernel.h"

#include <criterion/criterion.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { B = 2, HQ = 4, HKV = 2, SQ = 5, SK = 7, D = 8, DV = 6 };

/* A complete, valid call, of which a test changes one field. */
typedef struct call {
    fattn_attention_params p;
    fattn_attention_io io;
    fattn_tensor q, k, v, o, lse, bias, alibi, sink, seqlens_q, seqlens_k, cu_q, cu_k, step;
    fattn_tensor d_o, d_lse, delta, dq, dk, dv, d_bias, d_sink;
} call;

static fattn_ctx *ctx;
static double memory[B * HQ * SQ * SK * DV]; /* zeros; large enough for each tensor */
static int32_t lengths_q[B] = {SQ, 2}, lengths_k[B] = {0, SK};
static int32_t packed_q[4] = {0, 2, 2, 5}, packed_k[4] = {0, 3, 4, 7};

static void open_context(void) { cr_assert_eq(fattn_ctx_create(NULL, &ctx), FATTN_OK); }
static void close_context(void) { fattn_ctx_destroy(ctx); }
TestSuite(problem, .init = open_context, .fini = close_context);

static fattn_tensor tensor(int ndim, int64_t a, int64_t b, int64_t c, int64_t d) {
    return fattn_tensor_view(memory, FATTN_F32, FATTN_CPU, 0, ndim, (int64_t[]){a, b, c, d});
}

static fattn_tensor integers(int32_t *values, int64_t n) {
    return fattn_tensor_view(values, FATTN_I32, FATTN_CPU, 0, 1, &n);
}

static void fill(call *c) {
    *c = (call){.p = {.struct_size = sizeof c->p}, .io = {.struct_size = sizeof c->io}};
    c->q = c->dq = tensor(4, B, HQ, SQ, D);
    c->k = c->dk = tensor(4, B, HKV, SK, D);
    c->v = c->dv = tensor(4, B, HKV, SK, DV);
    c->o = c->d_o = tensor(4, B, HQ, SQ, DV);
    c->lse = c->d_lse = c->delta = tensor(3, B, HQ, SQ, 0);
    c->bias = c->d_bias = tensor(4, B, HQ, SQ, SK);
    c->alibi = c->sink = c->d_sink = tensor(1, HQ, 0, 0, 0);
    c->seqlens_q = integers(lengths_q, B), c->seqlens_k = integers(lengths_k, B);
    c->cu_q = integers(packed_q, 4), c->cu_k = integers(packed_k, 4);
    c->step = fattn_tensor_view(lengths_q, FATTN_I32, FATTN_CPU, 0, 0, NULL);
    fattn_attention_io *const io = &c->io;
    io->q = &c->q, io->k = &c->k, io->v = &c->v, io->o = &c->o, io->lse = &c->lse;
    io->bias = &c->bias, io->alibi = &c->alibi, io->sink = &c->sink, io->rng_step = &c->step;
    io->d_o = &c->d_o, io->d_lse = &c->d_lse, io->delta = &c->delta;
    io->dq = &c->dq, io->dk = &c->dk, io->dv = &c->dv;
    io->d_bias = &c->d_bias, io->d_sink = &c->d_sink;
}

static void pad(call *c) { c->io.seqlens_q = &c->seqlens_q, c->io.seqlens_k = &c->seqlens_k; }

/* Three sequences of 2, 0, 3 rows and 3, 1, 3 keys; bias and d_bias [3,HQ,4,4]. */
static void pack(call *c) {
    fattn_tensor *const all[] = {&c->q,     &c->k,     &c->v,  &c->o,  &c->lse, &c->d_o,
                                 &c->d_lse, &c->delta, &c->dq, &c->dk, &c->dv};
    for (size_t n = 0; n < sizeof all / sizeof *all; ++n) all[n]->shape[0] = 1;
    c->bias = c->d_bias = tensor(4, 3, HQ, 4, 4);
    c->p.max_seqlen_q = c->p.max_seqlen_k = 4;
    c->io.cu_seqlens_q = &c->cu_q, c->io.cu_seqlens_k = &c->cu_k;
}

/* The last arguments make call c invalid. It must be rejected with the status and an error message that contains
   `says`, by backward and by validation alone, without a change of the problem. */
#define REJECTED(status, says, ...)                                                                                    \
    do {                                                                                                               \
        call c;                                                                                                        \
        fill(&c);                                                                                                      \
        __VA_ARGS__;                                                                                                   \
        fattni_problem untouched;                                                                                      \
        memset(&untouched, 0x5a, sizeof untouched);                                                                    \
        const fattn_status s = fattni_problem_init(ctx, &c.p, &c.io, FATTNI_BWD, true, &untouched);                    \
        cr_assert_eq(s, status, "%s: %s", fattn_status_name(s), fattn_ctx_error(ctx));                                 \
        cr_assert(strstr(fattn_ctx_error(ctx), says), "%s", fattn_ctx_error(ctx));                                     \
        for (size_t byte = 0; byte < sizeof untouched; ++byte)                                                         \
            cr_assert_eq(((unsigned char *)&untouched)[byte], 0x5a);                                                   \
        cr_assert_eq(fattn_attention_bwd(ctx, &c.p, &c.io), status);                                                   \
    } while (0)

/* The last arguments change call c, which stays valid and becomes `problem`. */
#define ACCEPTED(problem, pass, ...)                                                                                   \
    fattni_problem problem;                                                                                            \
    do {                                                                                                               \
        call c;                                                                                                        \
        fill(&c);                                                                                                      \
        __VA_ARGS__;                                                                                                   \
        cr_assert_eq(fattni_problem_init(ctx, &c.p, &c.io, pass, true, &problem), FATTN_OK, "%s",                      \
                     fattn_ctx_error(ctx));                                                                            \
    } while (0)

Test(problem, the_valid_calls_are_valid) {
    ACCEPTED(plain, FATTNI_BWD, (void)c);
    ACCEPTED(padded, FATTNI_BWD, pad(&c));
    ACCEPTED(packed, FATTNI_BWD, pack(&c));
    cr_assert(plain.B == B && plain.Sq == SQ && plain.Sk == SK && !plain.packed && !plain.padded);
    cr_assert(padded.B == B && padded.Sq == SQ && padded.padded && !padded.packed);
    cr_assert(packed.B == 3 && packed.Sq == 4 && packed.Sk == 4 && packed.packed);
    cr_assert(packed.rows_q == SQ && packed.rows_k == SK);
}

Test(problem, structs) {
    REJECTED(FATTN_E_ABI, "fattn_attention_params: struct_size is 0", c.p.struct_size = 0);
    REJECTED(FATTN_E_ABI, "fattn_attention_io: struct_size is 0", c.io.struct_size = 0);
    REJECTED(FATTN_E_ABI, "fattn_attention_params: struct_size 20 is not the size of any version",
             c.p.struct_size = 20);
    REJECTED(FATTN_E_ABI, "fattn_attention_io: struct_size 12 is not the size of any version",
             c.io.struct_size = 12); /* half of a pointer */
    REJECTED(FATTN_E_ARG, "io: reserved is 1, not 0", c.io.reserved = 1);
    REJECTED(FATTN_E_ARG, "params: rng.reserved is 7, not 0", c.p.rng.reserved = 7);
    cr_assert_eq(fattn_attention_fwd(ctx, NULL, NULL), FATTN_E_ARG);
    cr_assert_str_eq(fattn_ctx_error(ctx), "io: NULL");
    cr_assert_eq(fattn_attention_fwd(NULL, NULL, NULL), FATTN_E_ARG);
    cr_assert_eq(fattn_attention_bwd(NULL, NULL, NULL), FATTN_E_ARG);
    cr_assert_eq(fattn_attention_query(NULL, NULL, NULL, NULL), FATTN_E_ARG);
    cr_assert_eq(fattn_attention_query(ctx, NULL, NULL, NULL), FATTN_E_ARG);
    cr_assert_str_eq(fattn_ctx_error(ctx), "query: out is NULL");
}

/* An older caller's shorter params, a newer caller's longer ones with nothing new in use. */
Test(problem, structs_grow) {
    ACCEPTED(shorter, FATTNI_BWD, c.p.struct_size = offsetof(fattn_attention_params, rng));
    cr_assert(shorter.rng.seed == 0 && shorter.rng_heads == HQ);
    call c;
    fill(&c);
    struct {
        fattn_attention_params p;
        uint64_t news;
    } newer = {.p = {.struct_size = sizeof newer}};
    fattni_problem p;
    cr_assert_eq(fattni_problem_init(ctx, &newer.p, &c.io, FATTNI_BWD, true, &p), FATTN_OK);
    newer.news = 256;
    cr_assert_eq(fattni_problem_init(ctx, &newer.p, &c.io, FATTNI_BWD, true, &p), FATTN_E_ABI);
    cr_assert(strstr(fattn_ctx_error(ctx), "byte 97 of 104"), "%s", fattn_ctx_error(ctx));
}

Test(problem, params) {
    REJECTED(FATTN_E_ARG, "unknown bits 0x80100000", c.p.flags = FATTN_CAUSAL | 1u << 31 | 1u << 20);
    REJECTED(FATTN_E_ARG, "exclude each other", c.p.flags = FATTN_CAUSAL | FATTN_CAUSAL_TOP_LEFT);
    REJECTED(FATTN_E_ARG, "algorithm: -1 is not in 0..3", c.p.algorithm = -1);
    REJECTED(FATTN_E_ARG, "algorithm: 4 is not in 0..3", c.p.algorithm = 4);
    REJECTED(FATTN_E_ARG, "scale: -0.5", c.p.scale = -0.5f);
    REJECTED(FATTN_E_ARG, "scale: inf", c.p.scale = INFINITY);
    REJECTED(FATTN_E_ARG, "scale: nan", c.p.scale = NAN);
    REJECTED(FATTN_E_ARG, "softcap: -30", c.p.softcap = -30);
    REJECTED(FATTN_E_ARG, "softcap: inf", c.p.softcap = INFINITY);
    REJECTED(FATTN_E_ARG, "softcap: nan", c.p.softcap = NAN);
    REJECTED(FATTN_E_ARG, "dropout_p: 1 is not in [0, 1)", c.p.dropout_p = 1);
    REJECTED(FATTN_E_ARG, "dropout_p: -0.1", c.p.dropout_p = -0.1f);
    REJECTED(FATTN_E_ARG, "dropout_p: nan", c.p.dropout_p = NAN);
    REJECTED(FATTN_E_ARG, "1e-06 rounds to 0/32768", c.p.dropout_p = 1e-6f);
    REJECTED(FATTN_E_ARG, "rounds to 32768/32768", c.p.dropout_p = 0.99999994f);
    REJECTED(FATTN_E_ARG, "q_pos0 -1, k_pos0 0", c.p.q_pos0 = -1);
    REJECTED(FATTN_E_ARG, "q_pos0 0, k_pos0 -9", c.p.k_pos0 = -9);
    REJECTED(FATTN_E_ARG, "q_pos0 536870913, k_pos0 0: not in 0..2^29", c.p.q_pos0 = (1 << 29) + 1);
    REJECTED(FATTN_E_ARG, "q_pos0 0, k_pos0 536870913: not in 0..2^29", c.p.k_pos0 = (1 << 29) + 1);
    REJECTED(FATTN_E_ARG, "k_pos0 9223372036854775807", c.p.k_pos0 = INT64_MAX);
    REJECTED(FATTN_E_ARG, "rng_batch0 -1, rng_head0 0, rng_heads 0", c.p.rng_batch0 = -1);
    REJECTED(FATTN_E_ARG, "rng_batch0 0, rng_head0 -2, rng_heads 0", c.p.rng_head0 = -2);
    REJECTED(FATTN_E_ARG, "rng_batch0 0, rng_head0 0, rng_heads -3", c.p.rng_heads = -3);
    REJECTED(FATTN_E_ARG, "rng_head0 3 + Hq 4 is more than rng_heads 6",
             (c.p.dropout_p = 0.5f, c.p.rng_head0 = 3, c.p.rng_heads = 6));
}

Test(problem, params_of_the_problem) {
    ACCEPTED(plain, FATTNI_BWD, (void)c);
    cr_assert(plain.scale == 1 / sqrt(D) && plain.softcap == 0 && plain.drop_T == 0);
    cr_assert(plain.keep_scale == 1 && plain.rng_heads == HQ && plain.group == HQ / HKV);
    cr_assert(plain.window_left == FATTNI_UNBOUNDED && plain.window_right == FATTNI_UNBOUNDED);
    ACCEPTED(set, FATTNI_BWD, (c.p.dropout_p = 0.1f, c.p.scale = 0.25f, c.p.softcap = 30));
    cr_assert(set.drop_T == 3277 && set.scale == 0.25 && set.softcap == 30);
    cr_assert_float_eq(set.keep_scale, 32768.0 / (32768 - 3277), 1e-15);
    ACCEPTED(off, FATTNI_BWD, c.p.window_left = 3);
    cr_assert(off.window_left == FATTNI_UNBOUNDED, "read only with the flag");
    ACCEPTED(on, FATTNI_BWD, (c.p.flags = FATTN_WINDOW, c.p.window_left = 3, c.p.window_right = -1));
    cr_assert(on.window_left == 3 && on.window_right == FATTNI_UNBOUNDED);
    ACCEPTED(slice, FATTNI_BWD, (c.p.dropout_p = 0.5f, c.p.rng_head0 = 2, c.p.rng_heads = 6));
    cr_assert_eq(fattni_dropout_plane(&slice, 1, 3), 1 * 6 + 3 + 2);
}

static void narrow(call *c, uint32_t flags) {
    fattn_tensor *const all[] = {&c->q, &c->k, &c->v, &c->o, &c->d_o, &c->dq, &c->dk, &c->dv};
    for (size_t n = 0; n < sizeof all / sizeof *all; ++n) all[n]->dtype = FATTN_BF16;
    c->p.flags = flags;
}

/* What rounding takes off O: a byte for each element, rows of DV = 6 in 16 bytes. */
Test(problem, the_rest_of_o) {
    const uint32_t flag = FATTN_EXACT_DELTA;
    ACCEPTED(without, FATTNI_BWD, narrow(&c, 0));
    ACCEPTED(wide, FATTNI_BWD, (narrow(&c, flag), c.o.dtype = FATTN_F32));
    ACCEPTED(merged, FATTNI_BWD, (narrow(&c, flag | FATTN_MERGE), c.o.dtype = FATTN_F32));
    ACCEPTED(merged_before, FATTNI_BWD, narrow(&c, FATTN_MERGE));
    ACCEPTED(f32, FATTNI_BWD, c.p.flags = flag);
    const fattni_problem *const none[] = {&without, &wide, &merged, &merged_before, &f32};
    for (int n = 0; n < 5; ++n)
        cr_assert(!none[n]->has_o_rest && !fattni_o_rest_of(none[n]).present && !fattni_o_rest_bytes(none[n]));
    ACCEPTED(forward, FATTNI_FWD, (narrow(&c, flag), c.io.saved = memory));
    const fattni_array rest = fattni_o_rest_of(&forward);
    cr_assert(forward.has_o_rest && rest.p == memory && rest.dtype == FATTN_U8);
    cr_assert(rest.s[0] == HQ * SQ * 16 && rest.s[1] == SQ * 16 && rest.s[2] == 16 && rest.s[3] == 1);
    cr_assert_eq(fattni_o_rest_bytes(&forward), B * HQ * SQ * 16);
    ACCEPTED(packed, FATTNI_BWD, (pack(&c), narrow(&c, flag)));
    cr_assert(packed.has_o_rest && fattni_o_rest_of(&packed).s[0] == 0);
    cr_assert_eq(fattni_o_rest_bytes(&packed), HQ * SQ * 16);
    REJECTED(FATTN_E_DTYPE, "o: bf16, but no forward call with MERGE has one: EXACT_DELTA needs f32",
             narrow(&c, flag | FATTN_MERGE));
}

Test(problem, a_deterministic_context_makes_every_call_so) {
    const fattn_ctx_options o = {.struct_size = sizeof o, .flags = FATTN_CTX_DETERMINISTIC};
    fattn_ctx *other;
    cr_assert_eq(fattn_ctx_create(&o, &other), FATTN_OK);
    call c;
    fill(&c);
    fattni_problem p;
    cr_assert_eq(fattni_problem_init(other, &c.p, &c.io, FATTNI_FWD, true, &p), FATTN_OK);
    cr_assert(p.flags & FATTN_DETERMINISTIC);
    fattn_ctx_destroy(other);
}

Test(problem, required_tensors) {
    REJECTED(FATTN_E_ARG, "q: NULL", c.io.q = NULL);
    REJECTED(FATTN_E_ARG, "k: NULL", c.io.k = NULL);
    REJECTED(FATTN_E_ARG, "v: NULL", c.io.v = NULL);
    REJECTED(FATTN_E_ARG, "o: NULL", c.io.o = NULL);
    REJECTED(FATTN_E_ARG, "lse: NULL", c.io.lse = NULL);
    REJECTED(FATTN_E_ARG, "d_o: NULL", c.io.d_o = NULL);
    ACCEPTED(forward, FATTNI_FWD, c.io.d_o = NULL);
    cr_assert(!forward.d_o.present && !forward.dq.present);
}

Test(problem, sizes_of_q_k_v) {
    REJECTED(FATTN_E_SHAPE, "q: has 3 dimensions, must have 4", c.q.ndim = 3);
    REJECTED(FATTN_E_SHAPE, "v: has 5 dimensions, must have 4", (c.v.ndim = 5, c.v.shape[4] = 1));
    REJECTED(FATTN_E_DTYPE, "q: dtype i32 is not a float type", c.q.dtype = FATTN_I32);
    REJECTED(FATTN_E_DTYPE, "k is f64, but q is f32", c.k.dtype = FATTN_F64);
    REJECTED(FATTN_E_DTYPE, "v is bf16, but q is f32", c.v.dtype = FATTN_BF16);
    REJECTED(FATTN_E_SHAPE, "k: Sk=7 but v: Sk=6", c.v.shape[2] = 6);
    REJECTED(FATTN_E_SHAPE, "q: D=8 but k: D=4", c.k.shape[3] = 4);
    REJECTED(FATTN_E_SHAPE, "k is [2,1,7,8], v is [2,2,7,6], q has B=2", c.k.shape[1] = 1);
    REJECTED(FATTN_E_SHAPE, "k is [1,2,7,8], v is [2,2,7,6], q has B=2", c.k.shape[0] = 1);
    REJECTED(FATTN_E_SHAPE, "q has 3 heads, k has 2", c.q.shape[1] = 3);
    REJECTED(FATTN_E_SHAPE, "q has 0 heads, k has 2", c.q.shape[1] = 0);
    REJECTED(FATTN_E_SHAPE, "q has 4 heads, k has 0", c.k.shape[1] = c.v.shape[1] = 0);
    REJECTED(FATTN_E_SHAPE, "D=0, Dv=6 are not in 1..256", c.q.shape[3] = c.k.shape[3] = 0);
    REJECTED(FATTN_E_SHAPE, "D=8, Dv=257 are not in 1..256", c.v.shape[3] = 257);
    ACCEPTED(last, FATTNI_BWD, c.p.q_pos0 = c.p.k_pos0 = 1 << 29);
    cr_assert_eq(last.q_pos0, 1 << 29);
    const int64_t most = INT32_MAX - 1 - (1 << 29); /* of rows, then */
    REJECTED(FATTN_E_SHAPE, "Sq=1610612735, Sk=7 with positions", {
        c.q.shape[2] = most + 1, c.q.stride[2] = 0;
        c.p.q_pos0 = 1 << 29;
    });
    REJECTED(FATTN_E_SHAPE, "Sq=5, Sk=1610612735 with positions", {
        c.k.shape[2] = c.v.shape[2] = most + 1, c.k.stride[2] = c.v.stride[2] = 0;
        c.p.k_pos0 = 1 << 29;
    });
    REJECTED(FATTN_E_SHAPE, "o: [2,4,5,6], but dimension 2 must be 1610612734", {
        c.q.shape[2] = most, c.q.stride[2] = 0;
        c.p.q_pos0 = 1 << 29;
    });
}

/* Shape, dtype and device of every tensor, one spoiled property each. */
Test(problem, every_tensor_is_checked) {
    enum { TENSORS = 21, FIRST_BACKWARD = 11 };
    static const char *const names[TENSORS] = {
        "q",   "k",     "v",     "o",  "lse", "bias", "alibi",  "sink",   "seqlens_q",    "seqlens_k",   "rng_step",
        "d_o", "d_lse", "delta", "dq", "dk",  "dv",   "d_bias", "d_sink", "cu_seqlens_q", "cu_seqlens_k"};
    for (int n = 0; n < TENSORS; ++n)
        for (int fault = 0; fault < 5; ++fault) {
            call c;
            fill(&c);
            n < 19 ? pad(&c) : pack(&c);
            fattn_tensor *const all[TENSORS] = {&c.q,      &c.k,     &c.v,         &c.o,         &c.lse,  &c.bias,
                                                &c.alibi,  &c.sink,  &c.seqlens_q, &c.seqlens_k, &c.step, &c.d_o,
                                                &c.d_lse,  &c.delta, &c.dq,        &c.dk,        &c.dv,   &c.d_bias,
                                                &c.d_sink, &c.cu_q,  &c.cu_k};
            fattn_tensor *const t = all[n];
            fattn_status want = FATTN_E_SHAPE;
            if (fault == 0) t->device = FATTN_CUDA, want = FATTN_E_DEVICE;
            if (fault == 1) t->dtype = FATTN_U8, want = FATTN_E_DTYPE;
            if (fault == 2) t->ndim += 1, t->shape[t->ndim - 1] = 1;
            if (fault == 3) t->shape[0] += 1, t->ndim += t->ndim == 0;
            if (fault == 4) t->data = NULL, want = FATTN_E_ARG;
            fattni_problem p;
            const fattn_status s = fattni_problem_init(ctx, &c.p, &c.io, FATTNI_BWD, true, &p);
            cr_assert_eq(s, want, "%s, fault %d: %s", names[n], fault, fattn_ctx_error(ctx));
            /* A longer cu_seqlens_q means more sequences: then the bias has the wrong shape. */
            const char *const named = n == 19 && fault == 3 ? "bias" : names[n];
            cr_assert(strstr(fattn_ctx_error(ctx), named), "%s", fattn_ctx_error(ctx));
            /* Forward does not check tensors that only backward uses. */
            const fattn_status f = fattni_problem_init(ctx, &c.p, &c.io, FATTNI_FWD, true, &p);
            cr_assert_eq(f, n >= FIRST_BACKWARD && n < 19 ? FATTN_OK : want, "%s", names[n]);
        }
}

/* Forward adds to a partial result; backward reads what may have been rounded since. */
Test(problem, a_partial_result_has_more_than_16_bits) {
    for (int n = 0; n < 3; ++n) {
        call c;
        fill(&c);
        c.q.dtype = c.k.dtype = c.v.dtype = c.o.dtype = c.d_o.dtype = FATTN_F16;
        c.dq.dtype = c.dk.dtype = c.dv.dtype = FATTN_F16;
        c.p.flags = FATTN_MERGE;
        fattni_problem p;
        const bool running = n < 2; /* 2: a query */
        const fattn_status s = fattni_problem_init(ctx, &c.p, &c.io, n ? FATTNI_BWD : FATTNI_FWD, running, &p);
        cr_assert_eq(s, n == 1 ? FATTN_OK : FATTN_E_DTYPE, "%d: %s", n, fattn_ctx_error(ctx));
        if (n != 1) cr_assert(strstr(fattn_ctx_error(ctx), "f16 cannot hold a partial result"));
    }
}

Test(problem, messages_about_one_tensor) {
    REJECTED(FATTN_E_SHAPE, "o: has 3 dimensions [2,4,5], must have 4", c.o.ndim = 3);
    REJECTED(FATTN_E_SHAPE, "lse: [2,4,6], but dimension 2 must be 5", c.lse.shape[2] = 6);
    REJECTED(FATTN_E_SHAPE, "bias: [2,3,5,7], but dimension 1 must be 4", c.bias.shape[1] = 3);
    REJECTED(FATTN_E_DTYPE, "alibi: dtype f64", c.alibi.dtype = FATTN_F64);
    REJECTED(FATTN_E_SHAPE, "o: stride[1] is 0", c.o.stride[1] = 0);
    REJECTED(FATTN_E_SHAPE, "lse: stride[2] is 0", c.lse.stride[2] = 0);
    REJECTED(FATTN_E_SHAPE, "dk: stride[0] is 0", c.dk.stride[0] = 0);
    REJECTED(FATTN_E_SHAPE, "d_sink: stride[0] is 0", c.d_sink.stride[0] = 0);
    REJECTED(FATTN_E_SHAPE, "q: stride[3] is 2", (c.q.shape[2] = 3, c.q.stride[3] = 2));
    REJECTED(FATTN_E_SHAPE, "d_o: stride[3] is 0", c.d_o.stride[3] = 0);
    REJECTED(FATTN_E_ARG, "d_bias: given without bias", c.io.bias = NULL);
    REJECTED(FATTN_E_ARG, "d_sink: given without sink", c.io.sink = NULL);
    REJECTED(FATTN_E_SHAPE, "d_bias: dimension 0 does not broadcast, but bias's does", c.bias.shape[0] = 1);
    REJECTED(FATTN_E_SHAPE, "d_bias: dimension 2 broadcasts, but bias's does not", c.d_bias.stride[2] = 0);
}

Test(problem, dtypes_that_go_together) {
    static const struct {
        fattn_dtype q, o, statistics;
        fattn_status want;
    } rows[] = {{FATTN_F32, FATTN_F32, FATTN_F32, FATTN_OK},        {FATTN_F64, FATTN_F64, FATTN_F64, FATTN_OK},
                {FATTN_BF16, FATTN_BF16, FATTN_F32, FATTN_OK},      {FATTN_F16, FATTN_F32, FATTN_F32, FATTN_OK},
                {FATTN_F64, FATTN_F32, FATTN_F64, FATTN_E_DTYPE},   {FATTN_F64, FATTN_F64, FATTN_F32, FATTN_E_DTYPE},
                {FATTN_F32, FATTN_F32, FATTN_F64, FATTN_E_DTYPE},   {FATTN_BF16, FATTN_F16, FATTN_F32, FATTN_E_DTYPE},
                {FATTN_BF16, FATTN_BF16, FATTN_BF16, FATTN_E_DTYPE}};
    for (size_t n = 0; n < sizeof rows / sizeof *rows; ++n) {
        call c;
        fill(&c);
        c.q.dtype = c.k.dtype = c.v.dtype = rows[n].q;
        c.o.dtype = c.d_o.dtype = c.dq.dtype = c.dk.dtype = c.dv.dtype = rows[n].o;
        fattn_tensor *const statistics[] = {&c.lse,  &c.d_lse,  &c.delta,  &c.alibi,
                                            &c.sink, &c.d_sink, &c.d_bias, &c.bias};
        for (int i = 0; i < 8; ++i) statistics[i]->dtype = rows[n].statistics;
        fattni_problem p;
        cr_assert_eq(fattni_problem_init(ctx, &c.p, &c.io, FATTNI_BWD, true, &p), rows[n].want, "row %zu: %s", n,
                     fattn_ctx_error(ctx));
    }
}

Test(problem, lengths) {
    REJECTED(FATTN_E_ARG, "cu_seqlens_q and cu_seqlens_k: only one is given", {
        pack(&c);
        c.io.cu_seqlens_k = NULL;
    });
    REJECTED(FATTN_E_ARG, "cu_seqlens (packed) and seqlens (padded) exclude", {
        pack(&c);
        c.io.seqlens_q = &c.seqlens_q;
    });
    REJECTED(FATTN_E_SHAPE, "packed: q is [2,4,5,8] and cu_seqlens_q [4]", {
        pack(&c);
        c.q.shape[0] = c.k.shape[0] = c.v.shape[0] = 2;
    });
    REJECTED(FATTN_E_SHAPE, "cu_seqlens_q [0]", {
        pack(&c);
        c.cu_q.shape[0] = 0;
    });
    REJECTED(FATTN_E_ARG, "max_seqlen_q -1, max_seqlen_k 4", {
        pack(&c);
        c.p.max_seqlen_q = -1;
    });
    REJECTED(FATTN_E_ARG, "max_seqlen_q 4, max_seqlen_k -2", {
        pack(&c);
        c.p.max_seqlen_k = -2;
    });
    REJECTED(FATTN_E_ARG, "max_seqlen_q 2147483648, max_seqlen_k 4: not in 0..2^31-1", {
        pack(&c);
        c.p.max_seqlen_q = (int64_t)1 << 31;
    });
    int32_t bad[4] = {0, 2, 2, 6};
    REJECTED(FATTN_E_ARG, "cu_seqlens_q runs from 0 to 6, the buffer has 5 rows", {
        pack(&c);
        c.cu_q.data = bad;
    });
    bad[0] = -1, bad[3] = 5;
    REJECTED(FATTN_E_ARG, "cu_seqlens_k runs from -1 to 5, the buffer has 7 rows", {
        pack(&c);
        c.cu_k.data = bad;
    });
    bad[0] = 0, bad[1] = 3;
    REJECTED(FATTN_E_ARG, "cu_seqlens_q: sequence 1 has length -1, not in 0..4 (max_seqlen_q)", {
        pack(&c);
        c.cu_q.data = bad;
    });
    REJECTED(FATTN_E_ARG, "cu_seqlens_k: sequence 2 has length 3, not in 0..2 (max_seqlen_k)", {
        pack(&c);
        c.p.max_seqlen_k = 2;
        bad[0] = 0, bad[1] = 2, bad[2] = 2, bad[3] = 5;
        c.bias = c.d_bias = tensor(4, 3, HQ, 4, 2);
        c.cu_k.data = bad;
    });
    int32_t negative[B] = {SQ, -1}, large[B] = {SK + 1, 0};
    REJECTED(FATTN_E_ARG, "seqlens_q[1] = -1 is not in 0..5", {
        pad(&c);
        c.seqlens_q.data = negative;
    });
    REJECTED(FATTN_E_ARG, "seqlens_k[0] = 8 is not in 0..7", {
        pad(&c);
        c.seqlens_k.data = large;
    });
}

/* The tensors are empty, so none is too large by itself. */
Test(problem, more_heads_than_can_be_counted) {
    for (int batch = 40; batch <= 61; batch += 21)
        REJECTED(FATTN_E_SHAPE, "more than 2^48 rows", {
            fattn_tensor *const all[] = {&c.q, &c.k, &c.v};
            for (int n = 0; n < 3; ++n) {
                all[n]->shape[0] = (int64_t)1 << batch;
                all[n]->shape[1] = (int64_t)1 << 20;
                all[n]->shape[2] = 0;
            }
        });
    const int64_t heads[] = {INT64_MAX, (int64_t)1 << 62, (int64_t)1 << 46};
    for (int h = 0; h < 3; ++h) /* with batch 0 plans still multiply heads and rows */
        REJECTED(FATTN_E_SHAPE, "more than 2^48 rows", {
            fattn_tensor *const all[] = {&c.q, &c.k, &c.v};
            for (int n = 0; n < 3; ++n) all[n]->shape[0] = 0, all[n]->shape[1] = heads[h];
            c.p.dropout_p = 0.5f, c.p.rng_head0 = 7;
        });
}

/* The heads of a packed buffer are counted, too. */
Test(problem, more_rows_of_a_packed_buffer_than_can_be_counted) {
    REJECTED(FATTN_E_SHAPE, "sequences of 4 in buffers of 562949953421312: more than 2^48 rows", {
        pack(&c);
        c.q.shape[1] = c.k.shape[1] = c.v.shape[1] = 1;
        c.q.shape[2] = (int64_t)1 << 49;
        c.q.stride[2] = 0;
    });
}

/* max_seqlen is a bound; even if it is larger than the buffer it determines the bias's shape. */
Test(problem, a_generous_max_seqlen) {
    ACCEPTED(p, FATTNI_BWD, {
        pack(&c);
        c.p.max_seqlen_q = 9, c.p.max_seqlen_k = 8;
        c.bias = c.d_bias = tensor(4, 3, HQ, 9, 8);
    });
    cr_assert(p.Sq == SQ && p.Sk == SK, "planned for the rows of the buffer");
    cr_assert_eq(p.bias.s[1], 72);
}

/* A query reads no tensor, plans for all gradients when none is given, and needs no backward tensors. */
Test(problem, queries) {
    call c;
    fill(&c);
    pack(&c);
    int32_t nonsense[4] = {9, -9, 100, 3};
    c.cu_q.data = c.cu_k.data = nonsense;
    c.io.d_o = c.io.dq = c.io.dk = c.io.dv = c.io.d_bias = c.io.d_sink = NULL;
    fattni_problem p;
    cr_assert_eq(fattni_problem_init(ctx, &c.p, &c.io, FATTNI_BWD, false, &p), FATTN_OK, "%s", fattn_ctx_error(ctx));
    cr_assert(p.dq.present && p.dk.present && p.dv.present && p.d_bias.present && p.d_sink.present);
    c.io.dk = &c.dk;
    cr_assert_eq(fattni_problem_init(ctx, &c.p, &c.io, FATTNI_BWD, false, &p), FATTN_OK);
    cr_assert(!p.dq.present && p.dk.present && !p.dv.present && !p.d_bias.present);
}

Test(problem, strides_are_normalised) {
    ACCEPTED(p, FATTNI_BWD, {
        c.q.shape[0] = c.k.shape[0] = c.v.shape[0] = c.o.shape[0] = c.lse.shape[0] = 1;
        c.d_o.shape[0] = c.d_lse.shape[0] = c.delta.shape[0] = 1;
        c.dq.shape[0] = c.dk.shape[0] = c.dv.shape[0] = c.bias.shape[0] = c.d_bias.shape[0] = 1;
        c.q.stride[0] = c.o.stride[0] = 123456789; /* not used, one element */
        c.bias.shape[2] = c.d_bias.shape[2] = 1;   /* broadcasts */
        c.d_o.stride[1] = 0;
    });
    cr_assert(p.q.s[0] == 0 && p.o.s[0] == 0 && p.bias.s[2] == 0 && p.bias.s[3] == 1);
    cr_assert(p.q.s[1] == SQ * D && p.q.s[2] == D && p.q.s[3] == 1 && p.d_o.s[1] == 0);
    ACCEPTED(one, FATTNI_BWD, {
        c.q.shape[3] = c.k.shape[3] = c.dq.shape[3] = c.dk.shape[3] = 1;
        c.q.stride[3] = 77;
    });
    cr_assert_eq(one.q.s[3], 1, "a head dimension of one element is contiguous");
}

/* Whether a row sees a key, from the definition by positions. */
static bool visible(const fattni_problem *p, int64_t Sq, int64_t Sk, int64_t i, int64_t j) {
    const int64_t at_i = i + p->q_pos0, at_j = j + p->k_pos0;
    const int64_t off = p->flags & (FATTN_CAUSAL_TOP_LEFT | FATTN_TOP_LEFT) ? 0 : Sk - Sq;
    if ((p->flags & (FATTN_CAUSAL | FATTN_CAUSAL_TOP_LEFT)) && at_j > at_i + off) return false;
    if (p->flags & FATTN_WINDOW) {
        if (p->window_left != FATTNI_UNBOUNDED && at_j < at_i + off - p->window_left) return false;
        if (p->window_right != FATTNI_UNBOUNDED && at_j > at_i + off + p->window_right) return false;
    }
    return true;
}

static int check_sequences(const fattni_problem *p, const int64_t *Sq, const int64_t *Sk, const int64_t *q0,
                           const int64_t *k0) {
    int seen = 0;
    for (int64_t b = 0; b < p->B; ++b) {
        const fattni_sequence s = fattni_sequence_of(p, b);
        cr_assert(s.band.Sq == Sq[b] && s.band.Sk == Sk[b] && s.q0 == q0[b] && s.k0 == k0[b]);
        cr_assert_eq(s.batch, p->packed ? 0 : b);
        const int64_t off = p->flags & (FATTN_CAUSAL_TOP_LEFT | FATTN_TOP_LEFT) ? 0 : Sk[b] - Sq[b];
        cr_assert_eq(s.diagonal, p->q_pos0 + off - p->k_pos0);
        for (int64_t i = 0; i < Sq[b]; ++i)
            for (int64_t j = 0; j < Sk[b]; ++j) {
                const bool want = visible(p, Sq[b], Sk[b], i, j);
                cr_assert_eq(fattni_visible(&s.band, i, j), want);
                seen += want;
            }
    }
    return seen;
}

Test(problem, masks_follow_their_definition) {
    static const uint32_t masks[] = {0,
                                     FATTN_CAUSAL,
                                     FATTN_CAUSAL_TOP_LEFT,
                                     FATTN_WINDOW,
                                     FATTN_WINDOW | FATTN_CAUSAL,
                                     FATTN_WINDOW | FATTN_CAUSAL_TOP_LEFT,
                                     FATTN_WINDOW | FATTN_TOP_LEFT,
                                     FATTN_CAUSAL | FATTN_TOP_LEFT};
    static const int64_t zeros[3] = {0};
    int seen = 0, calls = 0;
    for (int m = 0; m < 8; ++m)
        for (int32_t left = -1; left <= 3; ++left)
            for (int32_t right = -1; right <= 3; ++right)
                for (int64_t q_pos0 = 0; q_pos0 <= 4; q_pos0 += 2)
                    for (int64_t k_pos0 = 0; k_pos0 <= 6; k_pos0 += 3)
                        for (int form = 0; form < 3; ++form) {
                            ACCEPTED(p, FATTNI_FWD, {
                                if (form == 1) pad(&c);
                                if (form == 2) pack(&c);
                                c.p.flags = masks[m];
                                c.p.window_left = left, c.p.window_right = right;
                                c.p.q_pos0 = q_pos0, c.p.k_pos0 = k_pos0;
                            });
                            calls += 1;
                            if (form == 0)
                                seen += check_sequences(&p, (int64_t[]){SQ, SQ}, (int64_t[]){SK, SK}, zeros, zeros);
                            if (form == 1)
                                seen += check_sequences(&p, (int64_t[]){SQ, 2}, (int64_t[]){0, SK}, zeros, zeros);
                            if (form == 2)
                                seen += check_sequences(&p, (int64_t[]){2, 0, 3}, (int64_t[]){3, 1, 3},
                                                        (int64_t[]){0, 2, 2}, (int64_t[]){0, 3, 4});
                        }
    cr_assert(calls == 8 * 25 * 9 * 3 && seen > 0);
}

/* ---- pages ---- */

enum { PAGES = 6, PAGE = 16, COLUMNS = 3 };
static int32_t page_table[B * COLUMNS] = {4, -1, -1, 0, PAGES, -1}; /* one entry is in use: that of 7 keys */

/* k and v of call c in pages; a forward call, whose other sizes are those of 48 keys. */
static void page(call *c, fattn_tensor *table) {
    c->k = tensor(4, PAGES, HKV, PAGE, D);
    c->v = tensor(4, PAGES, HKV, PAGE, DV);
    *table = fattn_tensor_view(page_table, FATTN_I32, FATTN_CPU, 0, 2, (int64_t[]){B, COLUMNS});
    c->io.bias = NULL;
    c->io.page_table = table;
    pad(c);
}

static void check_rejected(const call *c, fattn_status status, const char *says) {
    fattni_problem untouched;
    memset(&untouched, 0x5a, sizeof untouched);
    const fattn_status s = fattni_problem_init(ctx, &c->p, &c->io, FATTNI_FWD, true, &untouched);
    cr_assert_eq(s, status, "%s: %s", fattn_status_name(s), fattn_ctx_error(ctx));
    cr_assert(strstr(fattn_ctx_error(ctx), says), "%s", fattn_ctx_error(ctx));
    for (size_t byte = 0; byte < sizeof untouched; ++byte) cr_assert_eq(((unsigned char *)&untouched)[byte], 0x5a);
    cr_assert_eq(fattn_attention_fwd(ctx, &c->p, &c->io), status);
}

#define PAGED_REJECTED(status, says, ...)                                                                              \
    do {                                                                                                               \
        call c;                                                                                                        \
        fattn_tensor table;                                                                                            \
        fill(&c);                                                                                                      \
        page(&c, &table);                                                                                              \
        __VA_ARGS__;                                                                                                   \
        check_rejected(&c, status, says);                                                                              \
    } while (0)

Test(problem, pages) {
    fattn_tensor table;
    ACCEPTED(p, FATTNI_FWD, page(&c, &table));
    cr_assert(p.page == PAGE && p.Sk == PAGE * COLUMNS && p.rows_k == p.Sk && p.max_k == p.Sk && p.B == B);
    cr_assert(p.padded && !p.packed && p.page_table.present);
    cr_assert(p.k.n[0] == PAGES && p.k.n[2] == PAGE && p.v.n[3] == DV);
    const fattni_sequence s = fattni_sequence_of(&p, 1);
    cr_assert(s.band.Sk == SK && s.batch == 1);
    float *const k = p.k.p;
    page_table[4] = 5; /* not in use, but there */
    cr_assert_eq(fattni_key_at(&p, &p.k, &s, 1, 6), k + (0 * HKV + 1) * PAGE * D + 6 * D);
    cr_assert_eq(fattni_key_at(&p, &p.k, &s, 0, 16 + 3), k + 5 * HKV * PAGE * D + 3 * D);
    page_table[4] = PAGES;
    ACCEPTED(without, FATTNI_FWD, pad(&c));
    cr_assert(without.page == 0 && !without.page_table.present);
    ACCEPTED(wide, FATTNI_FWD, {
        page(&c, &table);
        c.bias = tensor(4, 1, 1, 1, PAGE * COLUMNS);
        c.io.bias = &c.bias;
    });
    cr_assert_eq(wide.bias.n[3], PAGE * COLUMNS);
}

Test(problem, pages_that_are_none) {
    PAGED_REJECTED(FATTN_E_SHAPE, "page_table is [2,3,1], not [2,pages of a sequence]",
                   (table.ndim = 3, table.shape[2] = 1));
    PAGED_REJECTED(FATTN_E_SHAPE, "page_table is [1,3], not [2,pages of a sequence]", table.shape[0] = 1);
    PAGED_REJECTED(FATTN_E_DTYPE, "page_table: dtype f32", table.dtype = FATTN_F32);
    PAGED_REJECTED(FATTN_E_ARG, "page_table: data is NULL", table.data = NULL);
    PAGED_REJECTED(FATTN_E_ARG, "page_table needs seqlens_k", c.io.seqlens_k = NULL);
    PAGED_REJECTED(FATTN_E_ARG, "exclude each other", (c.io.cu_seqlens_q = &c.cu_q, c.io.cu_seqlens_k = &c.cu_k));
    PAGED_REJECTED(FATTN_E_UNSUPPORTED, "STANDARD and FLASH1", c.p.algorithm = FATTN_ALGO_STANDARD);
    PAGED_REJECTED(FATTN_E_UNSUPPORTED, "STANDARD and FLASH1", c.p.algorithm = FATTN_ALGO_FLASH1);
    PAGED_REJECTED(FATTN_E_SHAPE, "k has 6 pages, v has 5", c.v.shape[0] = 5);
    PAGED_REJECTED(FATTN_E_SHAPE, "k: Sk=16 but v: Sk=8", c.v.shape[2] = 8);
    PAGED_REJECTED(FATTN_E_SHAPE, "pages of 24 keys", c.k.shape[2] = c.v.shape[2] = 24);
    PAGED_REJECTED(FATTN_E_SHAPE, "pages of 8 keys", c.k.shape[2] = c.v.shape[2] = 8);
    PAGED_REJECTED(FATTN_E_SHAPE, "pages of 0 keys", c.k.shape[2] = c.v.shape[2] = 0);
    PAGED_REJECTED(FATTN_E_SHAPE, "more than 2^31-1 keys",
                   (table.shape[1] = (int64_t)1 << 28, table.stride[0] = table.stride[1] = 0));
    PAGED_REJECTED(FATTN_E_SHAPE, "do not fit in 31 bits",
                   (table.shape[1] = (1 << 27) - 1, table.stride[0] = table.stride[1] = 0, c.p.k_pos0 = 1 << 20));
    PAGED_REJECTED(FATTN_E_SHAPE, "bias: [2,4,5,7], but dimension 3 must be 48", c.io.bias = &c.bias);
    PAGED_REJECTED(FATTN_E_ARG, "seqlens_k[1] = 7 is not in 0..0", table.shape[1] = 0);
    page_table[3] = -1;
    PAGED_REJECTED(FATTN_E_ARG, "page_table[1,0] = -1 is not in 0..5", (void)0);
    page_table[3] = PAGES;
    PAGED_REJECTED(FATTN_E_ARG, "page_table[1,0] = 6 is not in 0..5", (void)0);
    page_table[3] = 0;
    call c;
    fattn_tensor table;
    fill(&c);
    page(&c, &table);
    cr_assert_eq(fattn_attention_bwd(ctx, &c.p, &c.io), FATTN_E_UNSUPPORTED);
    cr_assert(strstr(fattn_ctx_error(ctx), "backward has no pages"), "%s", fattn_ctx_error(ctx));
}
