/* fattn_kv_append on the CPU: all bytes of all tensors against fattn_op_rope and copies of rows; append and attention,
   token by token, against one forward over everything; calls that are refused. */
#include "attention.h"
#include "failing_alloc.h"
#include "kv.h"
#include "pages.h"
#include "thinned.h"
#include "core/cpu/tile.h"

#include <criterion/criterion.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- appends ---- */

/* Case n with that many threads; the call may not allocate. */
static void check_append(const kv_case *c, int n, int threads) {
    failing_alloc memory = {.left = -1};
    fattn_ctx *const ctx = failing_context(&memory, threads);
    fattn_tape *tape;
    cr_assert_eq(fattn_tape_create(ctx, &tape), FATTN_OK);
    kv *const got = kv_new(c), *const want = kv_new(c);
    kv_expect(ctx, tape, want);
    memory.left = 0;
    cr_assert_eq(fattn_kv_append(ctx, &got->io), FATTN_OK, "case %d: %s", n, fattn_ctx_error(ctx));
    const char *const different = kv_difference(got, want);
    cr_assert_null(different, "case %d, %s, %d threads: %s differs", n, fattn_dtype_name(c->dtype), threads, different);
    kv_free(got);
    kv_free(want);
    fattn_tape_destroy(tape);
    fattn_ctx_destroy(ctx);
}

static void walk(int first, int count) {
    static const int threads[] = {1, 2, 4};
    for (int n = first; n < first + count; n += THINNED(17)) {
        const kv_case c = kv_case_of(n, true);
        check_append(&c, n, threads[n % 3]);
        check_append(&c, n, threads[(n + 1) % 3]);
    }
}
Test(kv_append, cases) { walk(0, 250); }
Test(kv_append, more_cases) { walk(250, 250); }

/* Prompts: many rows, in several tasks of a thread, across pages. */
Test(kv_append, prompts) {
    for (int n = 0; n < 16; ++n) {
        kv_case c = kv_case_of(n, true);
        c.B = 3, c.S = 200 + n, c.page = n % 2 ? 64 : 0, c.room = 512, c.ragged = true, c.D = 16 + 2 * n;
        for (int b = 0; b < 3; ++b) c.lengths[b] = 100 * b + n, c.rows[b] = (int32_t)c.S - b * 50;
        check_append(&c, n, 1 + n % 4);
    }
}

Test(kv_append, nothing_to_append) {
    for (int n = 0; n < 12; ++n) {
        kv_case c = kv_case_of(4 * n + 1, true);
        if (n % 3 == 0) c.B = 0;
        if (n % 3 == 1) c.S = 0;
        c.ragged = n % 3 == 2;
        for (int b = 0; b < KV_SEQUENCES; ++b) c.rows[b] = 0, c.lengths[b] = (int32_t)c.room;
        check_append(&c, n, 2);
    }
}

/* ---- append and attention against one forward ---- */

enum { TOKENS = 150, PAGE = 16, COLUMNS = 10 };

typedef struct decoding {
    fattn_ctx *ctx;
    fattn_tape *tape;
    attention *whole;  /* causal, over all tokens, q and k turned before */
    fattn_tensor q, k; /* as they were */
    float base;
    pages cache;
    fattn_tensor flat_k, flat_v; /* the cache without pages */
    bool paged;
    int32_t lengths[2], rows[2], after[2];
} decoding;

static fattn_tensor dense(fattn_ctx *ctx, fattn_dtype dtype, const fattn_tensor *like) {
    fattn_tensor t;
    cr_assert_eq(fattn_tensor_alloc(ctx, dtype, like->ndim, like->shape, &t), FATTN_OK);
    return t;
}

static void turn(decoding *d, enum tensor_id id) {
    fattn_tensor value;
    if (d->base == 0) return;
    fattn_tape_reset(d->tape);
    const fattn_var y = fattn_op_rope(d->tape, fattn_input(d->tape, &d->whole->t[id]), d->base, 0);
    cr_assert_eq(fattn_tape_value(d->tape, y, &value), FATTN_OK);
    cr_assert_eq(fattn_tensor_copy(d->ctx, &d->whole->t[id], &value), FATTN_OK);
}

static decoding begin(fattn_dtype dtype, int64_t Hkv, int64_t Hq, float base, bool paged) {
    const attention_case c = {.name = "decoding",
                              .dtype = dtype,
                              .B = 2,
                              .Hq = Hq,
                              .Hkv = Hkv,
                              .Sq = TOKENS,
                              .Sk = TOKENS,
                              .D = 16,
                              .Dv = 12,
                              .flags = FATTN_CAUSAL,
                              .wide = true};
    decoding d = {.base = base, .paged = paged, .ctx = attention_context(2)};
    cr_assert_eq(fattn_tape_create(d.ctx, &d.tape), FATTN_OK);
    d.whole = attention_new(d.ctx, &c);
    d.q = dense(d.ctx, dtype, &d.whole->t[T_Q]);
    d.k = dense(d.ctx, dtype, &d.whole->t[T_K]);
    cr_assert_eq(fattn_tensor_copy(d.ctx, &d.q, &d.whole->t[T_Q]), FATTN_OK);
    cr_assert_eq(fattn_tensor_copy(d.ctx, &d.k, &d.whole->t[T_K]), FATTN_OK);
    turn(&d, T_Q);
    turn(&d, T_K);
    attention_forward(d.whole, LIBRARY);
    d.cache = pages_empty(dtype, 2, Hkv, COLUMNS, PAGE, 16, 12, PAGES_HEADS_INSIDE, 9);
    d.flat_k = fattn_tensor_view(NULL, dtype, FATTN_CPU, 0, 4, (int64_t[]){2, Hkv, TOKENS, 16});
    d.flat_v = fattn_tensor_view(NULL, dtype, FATTN_CPU, 0, 4, (int64_t[]){2, Hkv, TOKENS, 12});
    d.flat_k = dense(d.ctx, dtype, &d.flat_k), d.flat_v = dense(d.ctx, dtype, &d.flat_v);
    return d;
}

static void end(decoding *d) {
    fattn_tensor *const all[] = {&d->q, &d->k, &d->flat_k, &d->flat_v};
    for (int n = 0; n < 4; ++n) fattn_tensor_free(d->ctx, all[n]);
    pages_free(&d->cache);
    attention_free(d->whole);
    fattn_tape_destroy(d->tape);
    cr_assert_eq(fattn_ctx_mem(d->ctx).live, 0);
    fattn_ctx_destroy(d->ctx);
}

/* Rows lengths[b] .. of the tokens, as a tensor of S rows; past rows[b] NaN. */
static fattn_tensor next_rows(const decoding *d, const fattn_tensor *all, int64_t S) {
    const fattn_tensor shape = {.ndim = 4, .shape = {2, all->shape[1], S, all->shape[3]}};
    const fattn_tensor t = dense(d->ctx, (fattn_dtype)all->dtype, &shape);
    int64_t at[FATTN_MAX_DIMS];
    for (int64_t n = 0; n < fattn_tensor_numel(&t); ++n) {
        attention_index(&t, n, at);
        const int64_t from[4] = {at[0], at[1], d->lengths[at[0]] + at[2], at[3]};
        attention_set(&t, at, at[2] < d->rows[at[0]] ? attention_get(all, from) : NAN);
    }
    return t;
}

/* Appends rows[b] <= S tokens, attends, and compares with the rows of the whole. */
static void step(decoding *d, int64_t S, double bound) {
    const attention_case *const c = &d->whole->c;
    fattn_tensor q = next_rows(d, &d->q, S), k = next_rows(d, &d->k, S), v = next_rows(d, &d->whole->t[T_V], S);
    const fattn_tensor shape = {.ndim = 4, .shape = {2, c->Hq, S, c->Dv}};
    fattn_tensor o = dense(d->ctx, (fattn_dtype)d->whole->t[T_O].dtype, &shape), lse;
    cr_assert_eq(fattn_tensor_alloc(d->ctx, (fattn_dtype)d->whole->t[T_LSE].dtype, 3, shape.shape, &lse), FATTN_OK);
    const int64_t B = 2;
    const fattn_tensor lengths = fattn_tensor_view(d->lengths, FATTN_I32, FATTN_CPU, 0, 1, &B);
    const fattn_tensor rows = fattn_tensor_view(d->rows, FATTN_I32, FATTN_CPU, 0, 1, &B);
    const fattn_tensor after = fattn_tensor_view(d->after, FATTN_I32, FATTN_CPU, 0, 1, &B);
    const fattn_kv_append_io append = {.struct_size = sizeof append,
                                       .rope_base = d->base,
                                       .k = &k,
                                       .v = &v,
                                       .k_cache = d->paged ? &d->cache.k : &d->flat_k,
                                       .v_cache = d->paged ? &d->cache.v : &d->flat_v,
                                       .lengths = &lengths,
                                       .new_rows = &rows,
                                       .lengths_after = &after,
                                       .page_table = d->paged ? &d->cache.table : NULL,
                                       .q = &q,
                                       .q_rotated = &q};
    const fattn_attention_params params = {.struct_size = sizeof params, .flags = FATTN_CAUSAL};
    fattn_attention_io io = {.struct_size = sizeof io,
                             .q = &q,
                             .k = append.k_cache,
                             .v = append.v_cache,
                             .o = &o,
                             .lse = &lse,
                             .seqlens_q = &rows,
                             .seqlens_k = &after,
                             .page_table = append.page_table};
    fattn_attention_plan plan = {.struct_size = sizeof plan};
    fattn_tensor workspace;
    cr_assert_eq(fattn_kv_append(d->ctx, &append), FATTN_OK, "%s", fattn_ctx_error(d->ctx));
    cr_assert_eq(fattn_attention_query(d->ctx, &params, &io, &plan), FATTN_OK, "%s", fattn_ctx_error(d->ctx));
    const int64_t bytes = (int64_t)plan.fwd_workspace;
    cr_assert_eq(fattn_tensor_alloc(d->ctx, FATTN_U8, 1, &bytes, &workspace), FATTN_OK);
    io.workspace = workspace.data, io.workspace_bytes = plan.fwd_workspace;
    cr_assert_eq(fattn_attention_fwd(d->ctx, &params, &io), FATTN_OK, "%s", fattn_ctx_error(d->ctx));
    int64_t at[FATTN_MAX_DIMS];
    for (int64_t n = 0; n < fattn_tensor_numel(&o); ++n) {
        attention_index(&o, n, at);
        if (at[2] >= d->rows[at[0]]) continue;
        const int64_t whole[4] = {at[0], at[1], d->lengths[at[0]] + at[2], at[3]};
        const double x = attention_get(&o, at), y = attention_get(&d->whole->t[T_O], whole);
        cr_assert(fabs(x - y) <= bound, "sequence %d, token %d: %g and %g", (int)at[0], (int)whole[2], x, y);
    }
    for (int b = 0; b < 2; ++b) cr_assert_eq(d->after[b], d->lengths[b] + d->rows[b]);
    memcpy(d->lengths, d->after, sizeof d->lengths);
    fattn_tensor *const all[] = {&q, &k, &v, &o, &lse, &workspace};
    for (int n = 0; n < 6; ++n) fattn_tensor_free(d->ctx, all[n]);
}

/* A prompt, token by token, and some at a time, the sequences at different speeds. Keys, values and rotations are the
   same bits in both computations, and arithmetic and o are F32 for 16 bits, too. So each is off by at most what
   attention of N keys may be: chains of roundings along D and N, scores of size 8 (tests/support/tiles.c). */
static void decode(fattn_dtype dtype, int64_t Hkv, int64_t Hq, float base, bool paged) {
    static const int counts[] = {1, 1, 1, 3, 1, 8, 1, 2};
    const double unit = dtype == FATTN_F64 ? 0x1p-53 : 0x1p-24;
    const double bound = 2 * unit * 8 * (4 * (8 + sqrt(16) + sqrt(TOKENS)));
    decoding d = begin(dtype, Hkv, Hq, base, paged);
    d.rows[0] = 20, d.rows[1] = 3;
    step(&d, 20, bound);
    for (int n = 0; d.lengths[0] < TOKENS || d.lengths[1] < TOKENS; ++n) {
        int64_t S = 0;
        for (int b = 0; b < 2; ++b) {
            const int32_t left = TOKENS - d.lengths[b], wanted = counts[(n + 3 * b) % 8];
            d.rows[b] = wanted < left ? wanted : left;
            if (d.rows[b] > S) S = d.rows[b];
        }
        step(&d, S, bound);
    }
    end(&d);
}
Test(kv_decoding, f64) { decode(FATTN_F64, 2, 2, 0, true); }
Test(kv_decoding, f64_rope) { decode(FATTN_F64, 1, 3, 1e4f, true); }
Test(kv_decoding, f64_rope_without_pages) { decode(FATTN_F64, 2, 4, 500, false); }
Test(kv_decoding, f32_rope) { decode(FATTN_F32, 1, 8, 1e4f, true); }
static void decode_narrow(fattn_dtype dtype) {
    fattn_ctx *const ctx = attention_context(1); /* 16-bit products round P */
    const bool rounds = fattni_cpu_kernels_of(ctx, dtype)->round;
    fattn_ctx_destroy(ctx);
    if (rounds) cr_skip("P is rounded in calls of many rows");
    decode(dtype, 2, 6, 1e4f, true);
}
Test(kv_decoding, f16_rope) { decode_narrow(FATTN_F16); }
Test(kv_decoding, bf16_rope) { decode_narrow(FATTN_BF16); }

/* ---- refused ---- */

static kv_case plain_case(void) {
    return (kv_case){.dtype = FATTN_F32,
                     .B = 3,
                     .Hkv = 2,
                     .Hq = 4,
                     .S = 5,
                     .D = 8,
                     .Dv = 6,
                     .room = 64,
                     .page = 16,
                     .base = 1e4f,
                     .ragged = true,
                     .lengths = {7, 30, 59},
                     .rows = {5, 0, 5}};
}

static fattn_ctx *ctx;
static void open_context(void) { ctx = attention_context(2); }
static void close_context(void) { fattn_ctx_destroy(ctx); }
TestSuite(kv_refused, .init = open_context, .fini = close_context);

/* Call x must fail and change no byte. */
static void check_refused(kv *x, fattn_status status, const char *says) {
    kv *const before = kv_new(&x->c);
    for (int id = 0; id < KV_COUNT; ++id)
        if (x->memory[id]) memcpy(before->memory[id], x->memory[id], x->bytes[id]);
    const fattn_status s = fattn_kv_append(ctx, &x->io);
    cr_assert_eq(s, status, "%s: %s", fattn_status_name(s), fattn_ctx_error(ctx));
    cr_assert(strstr(fattn_ctx_error(ctx), says), "%s", fattn_ctx_error(ctx));
    const char *const changed = kv_difference(x, before);
    cr_assert_null(changed, "%s changed", changed);
    kv_free(x);
    kv_free(before);
}

/* The last arguments change call x. */
#define REFUSED(status, says, ...)                                                                                     \
    do {                                                                                                               \
        kv *const x = kv_new(&c);                                                                                      \
        fattn_kv_append_io *const io = &x->io;                                                                         \
        (void)io;                                                                                                      \
        __VA_ARGS__;                                                                                                   \
        check_refused(x, status, says);                                                                                \
    } while (0)

Test(kv_refused, structs) {
    const kv_case c = plain_case();
    cr_assert_eq(fattn_kv_append(NULL, NULL), FATTN_E_ARG);
    cr_assert_eq(fattn_kv_append(ctx, NULL), FATTN_E_ARG);
    cr_assert_str_eq(fattn_ctx_error(ctx), "io: NULL");
    REFUSED(FATTN_E_ABI, "fattn_kv_append_io", io->struct_size = 0);
    REFUSED(FATTN_E_ABI, "fattn_kv_append_io", io->struct_size = 13);
    REFUSED(FATTN_E_ARG, "k: NULL, but it is required", io->k = NULL);
    REFUSED(FATTN_E_ARG, "v: NULL, but it is required", io->v = NULL);
    REFUSED(FATTN_E_ARG, "k_cache: NULL, but it is required", io->k_cache = NULL);
    REFUSED(FATTN_E_ARG, "v_cache: NULL, but it is required", io->v_cache = NULL);
    REFUSED(FATTN_E_ARG, "lengths: NULL, but it is required", io->lengths = NULL);
    REFUSED(FATTN_E_ARG, "q and q_rotated: only one is given", io->q = NULL);
    REFUSED(FATTN_E_ARG, "q and q_rotated: only one is given", io->q_rotated = NULL);
    REFUSED(FATTN_E_ARG, "rope_base: -1 is not finite and positive", io->rope_base = -1);
    REFUSED(FATTN_E_ARG, "rope_base: inf is not finite and positive", io->rope_base = INFINITY);
    REFUSED(FATTN_E_ARG, "rope_base: nan is not finite and positive", io->rope_base = (float)fabs((double)NAN));
}

Test(kv_refused, dtypes_and_devices) {
    const kv_case c = plain_case();
    REFUSED(FATTN_E_DTYPE, "k: is i32, not f64, f32, f16 or bf16", x->t[KV_K].dtype = FATTN_I32);
    REFUSED(FATTN_E_DTYPE, "k: unknown dtype 9", x->t[KV_K].dtype = 9);
    static const enum kv_tensor floats[] = {KV_V, KV_K_CACHE, KV_V_CACHE, KV_Q, KV_Q_ROTATED};
    for (int n = 0; n < 5; ++n) {
        char text[64];
        snprintf(text, sizeof text, "%s: is f16, must be f32", kv_names[floats[n]]);
        REFUSED(FATTN_E_DTYPE, text, x->t[floats[n]].dtype = FATTN_F16);
    }
    for (int id = KV_LENGTHS; id < KV_COUNT; ++id) {
        char text[64];
        snprintf(text, sizeof text, "%s: is f32, must be i32", kv_names[id]);
        REFUSED(FATTN_E_DTYPE, text, x->t[id].dtype = FATTN_F32);
    }
    for (int id = 0; id < KV_COUNT; ++id) {
        char text[64];
        snprintf(text, sizeof text, "%s: is on device 2:0", kv_names[id]);
        REFUSED(FATTN_E_DEVICE, text, x->t[id].device = FATTN_CUDA);
    }
}

Test(kv_refused, shapes) {
    const kv_case c = plain_case();
    REFUSED(FATTN_E_SHAPE, "k, v, k_cache have 3, 4, 4 dimensions, must have 4", x->t[KV_K].ndim = 3);
    REFUSED(FATTN_E_SHAPE, "v_cache: is [14,2,16], not [pages,Hkv,page,D]", x->t[KV_V_CACHE].ndim = 3);
    REFUSED(FATTN_E_SHAPE, "v: is [3,2,4,6], must be [B,Hkv,S,Dv] = [3,2,5,6]", x->t[KV_V].shape[2] = 4);
    REFUSED(FATTN_E_SHAPE, "v: is [3,1,5,6], must be [B,Hkv,S,Dv] = [3,2,5,6]", x->t[KV_V].shape[1] = 1);
    REFUSED(FATTN_E_SHAPE, "k_cache: is [14,1,16,8], must be [pages,Hkv,page,D] = [14,2,16,8]",
            x->t[KV_K_CACHE].shape[1] = 1);
    REFUSED(FATTN_E_SHAPE, "v_cache: is [13,2,16,6], must be [pages,Hkv,page,D] = [14,2,16,6]",
            x->t[KV_V_CACHE].shape[0] = 13);
    REFUSED(FATTN_E_SHAPE, "k_cache: pages of 15 keys: not a power of two", x->t[KV_K_CACHE].shape[2] = 15);
    REFUSED(FATTN_E_SHAPE, "k_cache: pages of 8 keys: not a power of two", x->t[KV_K_CACHE].shape[2] = 8);
    REFUSED(FATTN_E_SHAPE, "room for more than 2^31-1 keys",
            (x->t[KV_TABLE].shape[1] = 1 << 28, x->t[KV_TABLE].stride[0] = x->t[KV_TABLE].stride[1] = 0));
    REFUSED(FATTN_E_SHAPE, "q: is [3,4,5,6], must be [B,Hq,S,D] = [3,4,5,8]", x->t[KV_Q].shape[3] = 6);
    REFUSED(FATTN_E_SHAPE, "q_rotated: is [3,3,5,8], must be [B,Hq,S,D] = [3,4,5,8]", x->t[KV_Q_ROTATED].shape[1] = 3);
    REFUSED(FATTN_E_SHAPE, "lengths: is [2], must be [B] = [3]", x->t[KV_LENGTHS].shape[0] = 2);
    REFUSED(FATTN_E_SHAPE, "new_rows: is [2], must be [B] = [3]", x->t[KV_NEW_ROWS].shape[0] = 2);
    REFUSED(FATTN_E_SHAPE, "lengths_after: is [2], must be [B] = [3]", x->t[KV_AFTER].shape[0] = 2);
    REFUSED(FATTN_E_SHAPE, "page_table: is [2,4], must be [B,pages of a sequence] = [3,4]",
            x->t[KV_TABLE].shape[0] = 2);
    REFUSED(FATTN_E_SHAPE, "page_table: is [3], not [B,pages of a sequence]", x->t[KV_TABLE].ndim = 1);
    REFUSED(FATTN_E_SHAPE, "k: is [3,2,5,0]: no head, or a head dimension that is not in 1..256",
            x->t[KV_K].shape[3] = 0);
    REFUSED(FATTN_E_SHAPE, "v: is [3,2,0,257]: no head, or a head dimension that is not in 1..256",
            (x->t[KV_V].shape[3] = 257, x->t[KV_V].shape[2] = 0));
    REFUSED(FATTN_E_SHAPE, "k: is [3,0,5,8]: no head", x->t[KV_K].shape[1] = 0);
    REFUSED(FATTN_E_SHAPE, "k: D=7 is odd, but rope turns pairs", x->t[KV_K].shape[3] = 7);
    for (int id = KV_K; id <= KV_Q_ROTATED; ++id) {
        char text[64];
        snprintf(text, sizeof text, "%s: stride[3] is 2, the head dimension must be contiguous", kv_names[id]);
        REFUSED(FATTN_E_SHAPE, text, x->t[id].stride[3] = 2);
    }
    static const enum kv_tensor outputs[] = {KV_K_CACHE, KV_V_CACHE, KV_Q_ROTATED, KV_AFTER};
    for (int n = 0; n < 4; ++n) {
        char text[80];
        snprintf(text, sizeof text, "%s: stride[0] is 0: several elements share one address", kv_names[outputs[n]]);
        REFUSED(FATTN_E_SHAPE, text, x->t[outputs[n]].stride[0] = 0);
    }
}

Test(kv_refused, without_pages) {
    kv_case c = plain_case();
    c.page = 0;
    REFUSED(FATTN_E_SHAPE, "k_cache: is [2,2,64,8], must be [B,Hkv,room,D] = [3,2,64,8]",
            x->t[KV_K_CACHE].shape[0] = 2);
    REFUSED(FATTN_E_SHAPE, "v_cache: is [3,2,63,6], must be [B,Hkv,room,D] = [3,2,64,6]",
            x->t[KV_V_CACHE].shape[2] = 63);
    REFUSED(FATTN_E_ARG, "kv_append: sequence 2 has 60 keys and 5 new ones, room for 64",
            ((int32_t *)x->memory[KV_LENGTHS])[2] = 60);
}

Test(kv_refused, values) {
    kv_case c = plain_case();
    REFUSED(FATTN_E_ARG, "lengths[1] = -1 is not in 0..64", ((int32_t *)x->memory[KV_LENGTHS])[1] = -1);
    REFUSED(FATTN_E_ARG, "lengths[2] = 65 is not in 0..64", ((int32_t *)x->memory[KV_LENGTHS])[2] = 65);
    REFUSED(FATTN_E_ARG, "new_rows[0] = -1 is not in 0..5", ((int32_t *)x->memory[KV_NEW_ROWS])[0] = -1);
    REFUSED(FATTN_E_ARG, "new_rows[1] = 6 is not in 0..5", ((int32_t *)x->memory[KV_NEW_ROWS])[1] = 6);
    REFUSED(FATTN_E_ARG, "kv_append: sequence 2 has 60 keys and 5 new ones, room for 64",
            ((int32_t *)x->memory[KV_LENGTHS])[2] = 60);
    REFUSED(FATTN_E_ARG, "page_table[2,3] = 14 is not in 0..13", ((int32_t *)x->memory[KV_TABLE])[2 * 4 + 3] = 14);
    REFUSED(FATTN_E_ARG, "page_table[0,0] = -1 is not in 0..13", ((int32_t *)x->memory[KV_TABLE])[0] = -1);
    c.ragged = false;
    REFUSED(FATTN_E_ARG, "page_table[1,1] = -1 is not in 0..13", (void)0); /* whose new rows now count */
}

Test(kv_refused, overlaps) {
    kv_case c = plain_case();
    REFUSED(FATTN_E_ARG, "k_cache and k overlap", x->t[KV_K].data = x->t[KV_K_CACHE].data);
    REFUSED(FATTN_E_ARG, "v_cache and v overlap", x->t[KV_V].data = x->t[KV_V_CACHE].data);
    REFUSED(FATTN_E_ARG, "k_cache and v_cache overlap", x->t[KV_V_CACHE].data = x->t[KV_K_CACHE].data);
    REFUSED(FATTN_E_ARG, "lengths_after and lengths overlap", x->t[KV_AFTER].data = x->t[KV_LENGTHS].data);
    REFUSED(FATTN_E_ARG, "lengths_after and new_rows overlap", x->t[KV_AFTER].data = x->t[KV_NEW_ROWS].data);
    REFUSED(FATTN_E_ARG, "lengths_after and page_table overlap", x->t[KV_AFTER].data = x->t[KV_TABLE].data);
    REFUSED(FATTN_E_ARG, "q_rotated and q overlap", x->t[KV_Q_ROTATED].data = (float *)x->t[KV_Q].data + 1);
    REFUSED(FATTN_E_ARG, "q_rotated and q overlap",
            (x->t[KV_Q_ROTATED].data = x->t[KV_Q].data, x->t[KV_Q_ROTATED].stride[1] = 8,
             x->t[KV_Q_ROTATED].stride[2] = 32));
    REFUSED(FATTN_E_ARG, "q_rotated and k overlap", x->t[KV_K].data = x->t[KV_Q_ROTATED].data);
    REFUSED(FATTN_E_ARG, "k_cache and q_rotated overlap", x->t[KV_Q_ROTATED].data = x->t[KV_K_CACHE].data);
}
