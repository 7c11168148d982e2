/* fattn_kv_append and keys in pages on the device: bits of fattn_op_rope and of copies, bits of attention with keys one
   after the other, and decoding as a CUDA graph. */
#include "attention.h"
#include "contexts.h"
#include "device.h"
#include "kv.h"
#include "pages.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MUST(context, call) cr_assert_eq(call, FATTN_OK, "%s", fattn_ctx_error(context))

static bool has(fattn_dtype dtype) { return dtype != FATTN_BF16 || call_has_bf16(); }

/* ---- appends ---- */

/* The call on the device against fattn_op_rope and copies there: all bytes. */
static void check_append(fattn_ctx *ctx, fattn_tape *tape, const kv_case *c, int n) {
    kv *const host = kv_new(c), *const read = kv_new(c);
    kv *const got = kv_to_device(ctx, host), *const want = kv_to_device(ctx, host);
    kv_expect(ctx, tape, want);
    const fattn_mem before = fattn_ctx_mem(ctx);
    MUST(ctx, fattn_kv_append(ctx, &got->io));
    cr_assert_eq(fattn_ctx_mem(ctx).allocs, before.allocs, "case %d: the call allocated", n);
    kv_read(ctx, got, read);
    kv_read(ctx, want, host);
    const char *const different = kv_difference(read, host);
    cr_assert_null(different, "case %d, %s: %s differs", n, fattn_dtype_name(c->dtype), different);
    kv_free_on_device(ctx, got);
    kv_free_on_device(ctx, want);
    kv_free(host);
    kv_free(read);
}

/* Without room for all rows, too. */
static void walk(int first, int count) {
    fattn_ctx *const ctx = context_or_skip();
    fattn_tape *tape;
    MUST(ctx, fattn_tape_create(ctx, &tape));
    for (int n = first; n < first + count; ++n) {
        const kv_case c = kv_case_of(n, n % 2);
        if (has(c.dtype)) check_append(ctx, tape, &c, n);
    }
    fattn_tape_destroy(tape);
    cr_assert_eq(fattn_ctx_mem(ctx).live, 0u);
    fattn_ctx_destroy(ctx);
}
Test(cuda_kv_append, cases, .timeout = 300) { walk(0, 200); }
Test(cuda_kv_append, more_cases, .timeout = 300) { walk(200, 200); }

Test(cuda_kv_append, prompts_and_empty_calls, .timeout = 200) {
    fattn_ctx *const ctx = context_or_skip();
    fattn_tape *tape;
    MUST(ctx, fattn_tape_create(ctx, &tape));
    for (int n = 0; n < 24; ++n) {
        kv_case c = kv_case_of(n, true);
        if (!has(c.dtype)) continue;
        c.B = 3, c.S = 1000 + n, c.page = n % 2 ? 64 : 0, c.room = 2048, c.ragged = true, c.D = 16 + 8 * n;
        for (int b = 0; b < 3; ++b) c.lengths[b] = 400 * b + n, c.rows[b] = (int32_t)c.S - b * 50;
        check_append(ctx, tape, &c, n);
        c.S = n % 3 ? 0 : 7, c.B = n % 3 == 1 ? 0 : c.B;
        for (int b = 0; b < 3; ++b) c.rows[b] = 0;
        check_append(ctx, tape, &c, n);
    }
    fattn_tape_destroy(tape);
    fattn_ctx_destroy(ctx);
}

/* What cosines, sines and a rotation of numbers up to 4 may be off by, between two devices. Their frequencies differ by
   up to 3 units in the last place in F64, so that angles at positions below 600 are off by 1800. Then 1 for the cosine
   and for the sine and 1.5 for the roundings, on each side; an F16 or BF16 result is below 8 and rounded once. */
static double rotation_bound(fattn_dtype dtype) {
    if (dtype == FATTN_F64) return 8 * (1800 + 5) * 0x1p-53;
    return 8 * 5 * 0x1p-24 + (dtype == FATTN_F16 ? 0x1p-8 : dtype == FATTN_BF16 ? 0x1p-5 : 0);
}

static void check_against_cpu(fattn_ctx *ctx, fattn_ctx *cpu, const kv_case *c, int n) {
    kv *const host = kv_new(c), *const read = kv_new(c), *const device = kv_to_device(ctx, host);
    MUST(cpu, fattn_kv_append(cpu, &host->io));
    MUST(ctx, fattn_kv_append(ctx, &device->io));
    kv_read(ctx, device, read);
    if (c->base == 0) {
        const char *const different = kv_difference(read, host);
        cr_assert_null(different, "case %d, %s: %s differs", n, fattn_dtype_name(c->dtype), different);
    }
    for (int id = KV_K_CACHE; id <= KV_Q_ROTATED; ++id) {
        int64_t at[FATTN_MAX_DIMS];
        for (int64_t e = 0; host->t[id].dtype && e < fattn_tensor_numel(&host->t[id]); ++e) {
            attention_index(&host->t[id], e, at);
            const double x = attention_get(&read->t[id], at), y = attention_get(&host->t[id], at);
            cr_assert(isnan(y) ? isnan(x) : fabs(x - y) <= rotation_bound(c->dtype), "case %d: %s[%d,%d,%d,%d]: %g %g",
                      n, kv_names[id], (int)at[0], (int)at[1], (int)at[2], (int)at[3], x, y);
        }
    }
    kv_free_on_device(ctx, device);
    kv_free(host);
    kv_free(read);
}

Test(cuda_kv_append, as_on_the_cpu, .timeout = 200) {
    fattn_ctx *const ctx = context_or_skip(), *const cpu = attention_context(0);
    for (int n = 0; n < 160; ++n) {
        kv_case c = kv_case_of(n, true);
        if (has(c.dtype)) check_against_cpu(ctx, cpu, &c, n);
        c.base = 0;
        if (has(c.dtype)) check_against_cpu(ctx, cpu, &c, n);
    }
    fattn_ctx_destroy(cpu);
    fattn_ctx_destroy(ctx);
}

/* What the CPU refuses: clamped lengths and numbers of rows, entries that are none, whose rows are left out. */
Test(cuda_kv_append, values_out_of_range) {
    fattn_ctx *const ctx = context_or_skip();
    fattn_tape *tape;
    MUST(ctx, fattn_tape_create(ctx, &tape));
    kv_case c = {.dtype = FATTN_F16,
                 .B = 4,
                 .Hkv = 2,
                 .Hq = 4,
                 .S = 5,
                 .D = 64,
                 .Dv = 64,
                 .room = 64,
                 .page = 16,
                 .base = 1e4f,
                 .ragged = true,
                 .lengths = {0, 64, 14, 59},
                 .rows = {5, 0, 2, 5}};
    kv *const host = kv_new(&c), *const read = kv_new(&c), *const want = kv_to_device(ctx, host);
    kv_expect(ctx, tape, want);
    int32_t *const lengths = (int32_t *)host->memory[KV_LENGTHS], *const rows = (int32_t *)host->memory[KV_NEW_ROWS];
    int32_t *const table = (int32_t *)host->memory[KV_TABLE];
    lengths[0] = -7, rows[0] = 9;                                          /* 0 and 5 */
    lengths[1] = 1000, rows[1] = 3;                                        /* 64, no room */
    rows[2] = 4, table[2 * 4 + 1] = (int32_t)host->t[KV_K_CACHE].shape[0]; /* rows at 16 and 17 have no page */
    rows[3] = 100;
    kv *const got = kv_to_device(ctx, host);
    MUST(ctx, fattn_kv_append(ctx, &got->io));
    kv_read(ctx, got, read);
    kv_read(ctx, want, host);
    static const enum kv_tensor results[] = {KV_K_CACHE, KV_V_CACHE, KV_Q_ROTATED};
    for (int n = 0; n < 3; ++n)
        cr_assert(memcmp(read->memory[results[n]], host->memory[results[n]], host->bytes[results[n]]) == 0, "%s",
                  kv_names[results[n]]);
    const int32_t *const after = (const int32_t *)read->memory[KV_AFTER];
    cr_assert(after[0] == 5 && after[1] == 64 && after[2] == 18 && after[3] == 64, "%d %d %d %d", after[0], after[1],
              after[2], after[3]);
    kv_free_on_device(ctx, got);
    kv_free_on_device(ctx, want);
    kv_free(host);
    kv_free(read);
    fattn_tape_destroy(tape);
    fattn_ctx_destroy(ctx);
}

Test(cuda_kv_append, refused_calls) {
    fattn_ctx *const ctx = context_or_skip();
    const kv_case c = {
        .dtype = FATTN_F32, .B = 2, .Hkv = 1, .S = 1, .D = 8, .Dv = 8, .room = 32, .ragged = true, .rows = {1, 1}};
    kv *const host = kv_new(&c), *const x = kv_to_device(ctx, host);
    cr_assert_eq(fattn_kv_append(ctx, &host->io), FATTN_E_DEVICE);
    cr_assert(strstr(fattn_ctx_error(ctx), "k: is on device 1:0"), "%s", fattn_ctx_error(ctx));
    x->io.lengths_after = x->io.lengths;
    cr_assert_eq(fattn_kv_append(ctx, &x->io), FATTN_E_ARG);
    cr_assert(strstr(fattn_ctx_error(ctx), "lengths_after and lengths overlap"), "%s", fattn_ctx_error(ctx));
    kv_free_on_device(ctx, x);
    kv_free(host);
    fattn_ctx_destroy(ctx);
}

/* ---- attention with pages ---- */

static fattn_tensor on_device(fattn_ctx *ctx, const fattn_tensor *host, bool heads_inside) {
    static const int order[] = {0, 2, 1, 3};
    const fattn_tensor shape = heads_inside ? fattn_tensor_permute(host, order) : *host;
    fattn_tensor t;
    MUST(ctx, fattn_tensor_alloc(ctx, (fattn_dtype)host->dtype, host->ndim, shape.shape, &t));
    if (heads_inside) t = fattn_tensor_permute(&t, order);
    if (fattn_tensor_numel(host)) MUST(ctx, fattn_tensor_copy(ctx, &t, host));
    return t;
}

static fattn_tensor on_host(fattn_ctx *ctx, fattn_ctx *cpu, const fattn_tensor *t) {
    fattn_tensor here;
    MUST(cpu, fattn_tensor_alloc(cpu, (fattn_dtype)t->dtype, t->ndim, t->shape, &here));
    if (fattn_tensor_numel(t)) MUST(ctx, fattn_tensor_copy(ctx, &here, t));
    return here;
}

/* Bytes that are NaN in every type. */
static fattn_tensor poisoned(fattn_ctx *ctx, size_t bytes) {
    const int64_t n = (int64_t)bytes + 256;
    unsigned char *const ones = malloc((size_t)n);
    fattn_tensor t;
    cr_assert(ones);
    memset(ones, 0xff, (size_t)n);
    const fattn_tensor host = fattn_tensor_view(ones, FATTN_U8, FATTN_CPU, 0, 1, &n);
    MUST(ctx, fattn_tensor_alloc(ctx, FATTN_U8, 1, &n, &t));
    MUST(ctx, fattn_tensor_copy(ctx, &t, &host));
    free(ones);
    return t;
}

/* The call of the case, then the same with keys in pages: the bits of o and lse, as often as wanted. */
static void check_pages(fattn_ctx *ctx, fattn_ctx *cpu, const attention_case *c, int64_t page, int times) {
    call *const x = call_new(ctx, c);
    call_forward(x);
    const uint64_t want = call_bits(x, CALL_O, CALL_LSE);
    fattn_tensor k = on_host(ctx, cpu, &x->t[CALL_K]), v = on_host(ctx, cpu, &x->t[CALL_V]);
    pages p = pages_of(&k, &v, c->length_k, page, 3, PAGES_HEADS_OUTSIDE, (uint64_t)page);
    const bool inside = page == 32;
    fattn_tensor paged_k = on_device(ctx, &p.k, inside), paged_v = on_device(ctx, &p.v, inside);
    fattn_tensor table = on_device(ctx, &p.table, false);
    fattn_attention_io io = x->io;
    fattn_attention_plan plan = {.struct_size = sizeof plan};
    io.k = &paged_k, io.v = &paged_v, io.page_table = &table;
    io.d_o = io.d_lse = io.dq = io.dk = io.dv = io.d_bias = io.d_sink = NULL;
    cr_assert_eq(fattn_attention_query(ctx, &x->params, &io, &plan), FATTN_OK, "%s: %s", c->name, fattn_ctx_error(ctx));
    fattn_tensor workspace = poisoned(ctx, plan.fwd_workspace);
    io.workspace = workspace.data, io.workspace_bytes = plan.fwd_workspace;
    for (int n = 0; n < times; ++n) {
        call_fill(x, CALL_O, NAN);
        call_fill(x, CALL_LSE, NAN);
        MUST(ctx, fattn_attention_fwd(ctx, &x->params, &io));
        cr_assert_eq(call_bits(x, CALL_O, CALL_LSE), want, "%s, %s, Sq %d, D %d, pages of %d, %s, repetition %d",
                     c->name, fattn_dtype_name(c->dtype), (int)c->Sq, (int)c->D, (int)page, plan.fwd_kernel, n);
    }
    fattn_tensor *const device[] = {&paged_k, &paged_v, &table, &workspace};
    for (int n = 0; n < 4; ++n) fattn_tensor_free(ctx, device[n]);
    fattn_tensor_free(cpu, &k);
    fattn_tensor_free(cpu, &v);
    pages_free(&p);
    call_free(x);
}

static int64_t up(int64_t n, int64_t page) { return (n + page - 1) / page * page; }

/* Rows on both sides of what is few; lengths on both sides of pages, tiles and parts; every mask and feature. */
static attention_case paged_case(int n, fattn_dtype dtype, int64_t page) {
    static const int64_t rows[] = {1, 4, 16, 17, 100}, dims[] = {64, 128, 40, 256, 80};
    static const int32_t lengths[] = {0, 1, 15, 16, 17, 63, 64, 65, 511, 512, 513, 1000, 3000};
    static const uint32_t masks[] = {FATTN_CAUSAL, 0, FATTN_CAUSAL | FATTN_WINDOW};
    attention_case c = {.name = "pages",
                        .dtype = dtype,
                        .B = 1 + n % 4,
                        .Hkv = 1 + n / 2 % 2,
                        .Sq = rows[n % 5],
                        .D = dims[n / 3 % 5],
                        .flags = masks[n / 2 % 3],
                        .window_left = 200,
                        .window_right = -1,
                        .lengths = LENGTHS_PADDED,
                        .wide = n % 2};
    static const int64_t groups[] = {1, 3, 8};
    c.Hq = c.Hkv * groups[n / 5 % 3];
    if (n % 7 == 1) c.softcap = 3;
    if (n % 7 == 2) c.alibi = true;
    if (n % 7 == 3) c.sink = true;
    if (n % 7 == 4) c.bias = BIAS | BIAS_OVER_B;
    if (n % 7 == 5) c.dropout_p = 0.25f;
    int32_t longest = 1;
    for (int b = 0; b < c.B; ++b) {
        c.length_k[b] = lengths[(n * 5 + b * 3) % 13];
        c.length_q[b] = b % 2 ? (int32_t)(c.Sq / 2) : (int32_t)c.Sq;
        if (c.length_k[b] > longest) longest = c.length_k[b];
    }
    c.Sk = up(longest, page) + (n % 2 ? page : 0);
    return c;
}

static void paged(fattn_dtype dtype) {
    static const int64_t sizes[] = {16, 32, 64, 256, 128};
    fattn_ctx *const ctx = context_or_skip(), *const cpu = attention_context(0);
    for (int n = 0; n < 60 && has(dtype); ++n) {
        const int64_t page = sizes[n / 2 % 5];
        const attention_case c = paged_case(n, dtype, page);
        check_pages(ctx, cpu, &c, page, n % 15 < 5 ? 100 : 2);
    }
    cr_assert_eq(fattn_ctx_mem(cpu).live, 0u);
    fattn_ctx_destroy(cpu);
    cr_assert_eq(fattn_ctx_mem(ctx).live, 0u);
    fattn_ctx_destroy(ctx);
}
Test(cuda_pages, f16, .timeout = 300) { paged(FATTN_F16); }
Test(cuda_pages, bf16, .timeout = 300) { paged(FATTN_BF16); }
Test(cuda_pages, f32, .timeout = 300) { paged(FATTN_F32); }
Test(cuda_pages, f64, .timeout = 300) { paged(FATTN_F64); }

/* The sequence alone, and beside others. */
Test(cuda_pages, long_keys, .timeout = 300) {
    fattn_ctx *const ctx = context_or_skip(), *const cpu = attention_context(0);
    for (int n = 0; n < 12; ++n) {
        attention_case c = {.name = "long keys",
                            .dtype = n % 2 ? FATTN_F16 : FATTN_BF16,
                            .B = 1 + n / 2 % 2 * 2,
                            .Hq = 8,
                            .Hkv = 2,
                            .Sq = 1 + n / 4 * 3,
                            .Sk = 40000,
                            .D = 128,
                            .flags = FATTN_CAUSAL,
                            .lengths = LENGTHS_PADDED,
                            .length_q = {1, 1, 1},
                            .length_k = {39999, 100, 20000}};
        if (!has(c.dtype)) continue;
        if (n % 4 == 0 && n < 8) c.flags |= FATTN_UNIFIED_MAX;
        if (n >= 8) c.Hq = 16, c.Sq = 7, c.length_q[2] = 7, c.D = n < 10 ? 64 : 128; /* rows of large groups */
        c.unified_max = n ? 90 : 1;                                                  /* far, near */
        c.Sk = up(c.Sk, 256);
        check_pages(ctx, cpu, &c, n == 8 ? 16 : n == 11 ? 256 : 64, 3);
    }
    fattn_ctx_destroy(cpu);
    fattn_ctx_destroy(ctx);
}

/* ---- decoding ---- */

enum { BATCH = 2, HEADS = 4, KV_HEADS = 2, WIDTH = 64, FIRST = 300, STEPS = 40, PAGE = 64, COLUMNS = 8 };

/* One layer's attention over a cache, on any device. */
typedef struct layer {
    fattn_ctx *ctx;
    fattn_dtype dtype;
    float base;
    fattn_tensor q, k, v, o, lse;  /* of the S rows of a step */
    fattn_tensor k_cache, v_cache; /* in pages */
    fattn_tensor table, lengths, after, workspace;
} layer;

static fattn_tensor room(fattn_ctx *ctx, fattn_dtype dtype, int ndim, int64_t a, int64_t b, int64_t c, int64_t d) {
    fattn_tensor t;
    MUST(ctx, fattn_tensor_alloc(ctx, dtype, ndim, (const int64_t[]){a, b, c, d}, &t));
    return t;
}

static fattn_tensor integers(int32_t *x, int64_t n) { return fattn_tensor_view(x, FATTN_I32, FATTN_CPU, 0, 1, &n); }

static fattn_kv_append_io append_of(const layer *m) {
    return (fattn_kv_append_io){.struct_size = sizeof(fattn_kv_append_io),
                                .rope_base = m->base,
                                .k = &m->k,
                                .v = &m->v,
                                .k_cache = &m->k_cache,
                                .v_cache = &m->v_cache,
                                .lengths = &m->lengths,
                                .lengths_after = &m->after,
                                .page_table = &m->table,
                                .q = &m->q,
                                .q_rotated = &m->q};
}

static const fattn_attention_params causal = {.struct_size = sizeof causal, .flags = FATTN_CAUSAL};

static fattn_attention_io attention_of(const layer *m) {
    return (fattn_attention_io){.struct_size = sizeof(fattn_attention_io),
                                .q = &m->q,
                                .k = &m->k_cache,
                                .v = &m->v_cache,
                                .o = &m->o,
                                .lse = &m->lse,
                                .seqlens_k = &m->after,
                                .page_table = &m->table,
                                .workspace = m->workspace.data,
                                .workspace_bytes = (size_t)fattn_tensor_numel(&m->workspace)};
}

/* Numbers of step n, made on the CPU: the same on every device. */
static void load(layer *m, fattn_ctx *cpu, uint32_t n) {
    const fattn_tensor *const to[] = {&m->q, &m->k, &m->v};
    for (uint32_t i = 0; i < 3; ++i) {
        fattn_tensor x;
        MUST(cpu, fattn_tensor_alloc(cpu, m->dtype, 4, to[i]->shape, &x));
        MUST(cpu, fattn_tensor_normal(cpu, &x, 0, 1, (fattn_rng){.seed = 3, .stream = 3 * n + i}));
        MUST(m->ctx, fattn_tensor_copy(m->ctx, to[i], &x));
        fattn_tensor_free(cpu, &x);
    }
}

/* Prompts of 5 and FIRST tokens, then room for steps of S rows. */
static void open_layer(layer *m, fattn_ctx *ctx, fattn_ctx *cpu, fattn_dtype dtype, float base, int64_t S) {
    const fattn_dtype wide = dtype == FATTN_F64 ? dtype : FATTN_F32;
    int32_t start[BATCH] = {0, 0}, prompt[BATCH] = {5, FIRST};
    const fattn_tensor zeros = integers(start, BATCH), rows = integers(prompt, BATCH);
    pages p = pages_empty(dtype, BATCH, KV_HEADS, COLUMNS, PAGE, WIDTH, WIDTH, PAGES_HEADS_OUTSIDE, 4);
    *m = (layer){.ctx = ctx, .dtype = dtype, .base = base};
    m->k_cache = on_device(ctx, &p.k, false), m->v_cache = on_device(ctx, &p.v, false);
    m->table = on_device(ctx, &p.table, false);
    m->lengths = on_device(ctx, &zeros, false), m->after = on_device(ctx, &zeros, false);
    pages_free(&p);
    fattn_tensor new_rows = on_device(ctx, &rows, false);
    m->q = room(ctx, dtype, 4, BATCH, HEADS, FIRST, WIDTH);
    m->k = room(ctx, dtype, 4, BATCH, KV_HEADS, FIRST, WIDTH),
    m->v = room(ctx, dtype, 4, BATCH, KV_HEADS, FIRST, WIDTH);
    load(m, cpu, 1000);
    fattn_kv_append_io io = append_of(m);
    io.new_rows = &new_rows;
    MUST(ctx, fattn_kv_append(ctx, &io));
    MUST(ctx, fattn_tensor_copy(ctx, &m->lengths, &m->after));
    MUST(ctx, fattn_ctx_sync(ctx));
    fattn_tensor *const old[] = {&m->q, &m->k, &m->v, &new_rows};
    for (int n = 0; n < 4; ++n) fattn_tensor_free(ctx, old[n]);
    m->q = room(ctx, dtype, 4, BATCH, HEADS, S, WIDTH), m->o = room(ctx, wide, 4, BATCH, HEADS, S, WIDTH);
    m->k = room(ctx, dtype, 4, BATCH, KV_HEADS, S, WIDTH), m->v = room(ctx, dtype, 4, BATCH, KV_HEADS, S, WIDTH);
    m->lse = room(ctx, wide, 3, BATCH, HEADS, S, 0);
    fattn_attention_plan plan = {.struct_size = sizeof plan};
    const fattn_attention_io attend = attention_of(m);
    MUST(ctx, fattn_attention_query(ctx, &causal, &attend, &plan));
    m->workspace = room(ctx, FATTN_U8, 1, (int64_t)plan.fwd_workspace, 0, 0, 0);
}

static void close_layer(layer *m) {
    fattn_tensor *const all[] = {&m->q,       &m->k,     &m->v,       &m->o,     &m->lse,      &m->k_cache,
                                 &m->v_cache, &m->table, &m->lengths, &m->after, &m->workspace};
    MUST(m->ctx, fattn_ctx_sync(m->ctx));
    for (size_t n = 0; n < sizeof all / sizeof *all; ++n) fattn_tensor_free(m->ctx, all[n]);
    cr_assert_eq(fattn_ctx_mem(m->ctx).live, 0u);
}

/* Append, attention, and the lengths of the next step: nothing here depends on the step. */
static void step(layer *m) {
    const fattn_kv_append_io append = append_of(m);
    const fattn_attention_io attend = attention_of(m);
    MUST(m->ctx, fattn_kv_append(m->ctx, &append));
    MUST(m->ctx, fattn_attention_fwd(m->ctx, &causal, &attend));
    MUST(m->ctx, fattn_tensor_copy(m->ctx, &m->lengths, &m->after));
}

/* What O may be off by, between two devices, at most N keys: chains of roundings along D and N, at scores of size 8
   (tests/support/tiles.c); in 16 bits P is rounded on the device, which moves a mean of values below 5 by two units of
   that. What rotations differ by moves scores by at most 2 sqrt(D) 5 times as much, and O by twice that times 5. */
static double decoding_bound(fattn_dtype dtype, float base) {
    const double unit = dtype == FATTN_F64 ? 0x1p-53 : 0x1p-24, N = FIRST + STEPS * 3;
    const double p = dtype == FATTN_BF16 ? 0x1p-8 : dtype == FATTN_F16 ? 0x1p-11 : 0;
    const double turned = base > 0 ? 2 * sqrt(WIDTH) * 5 * rotation_bound(dtype) : 0;
    return 2 * unit * 8 * (4 * (8 + sqrt(WIDTH) + sqrt(N))) + 2 * p * 5 + 2 * turned * 5;
}

/* Steps of S rows: a graph that was captured once, the same calls one by one, and the CPU. */
static void decode(fattn_dtype dtype, float base, int64_t S) {
    cudaStream_t stream;
    cudaGraph_t graph;
    cudaGraphExec_t run;
    if (!has(dtype)) cr_skip_test("no BF16");
    fattn_ctx *const probe = context_or_skip();
    fattn_ctx_destroy(probe);
    must(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "stream");
    fattn_ctx *const gpu = context(stream, 0), *const other = context(NULL, 0), *const cpu = attention_context(0);
    layer replayed, called, host;
    open_layer(&replayed, gpu, cpu, dtype, base, S);
    open_layer(&called, other, cpu, dtype, base, S);
    open_layer(&host, cpu, cpu, dtype, base, S);
    must(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "begin");
    step(&replayed);
    must(cudaStreamEndCapture(stream, &graph), "end");
    must(cudaGraphInstantiate(&run, graph, 0), "instantiate");
    const int64_t count = fattn_tensor_numel(&host.o);
    const size_t bytes = (size_t)count * fattn_dtype_size((fattn_dtype)host.o.dtype);
    for (uint32_t n = 0; n < STEPS; ++n) {
        load(&replayed, cpu, n), load(&called, cpu, n), load(&host, cpu, n);
        must(cudaGraphLaunch(run, stream), "launch");
        step(&called);
        step(&host);
        fattn_tensor x = on_host(gpu, cpu, &replayed.o), y = on_host(other, cpu, &called.o);
        cr_assert(memcmp(x.data, y.data, bytes) == 0, "step %u: the graph has other bits than the calls", n);
        for (int64_t e = 0; e < count; ++e) {
            int64_t at[FATTN_MAX_DIMS];
            attention_index(&host.o, e, at);
            const double got = attention_get(&x, at), want = attention_get(&host.o, at);
            cr_assert(fabs(got - want) <= decoding_bound(dtype, base), "step %u, sequence %d: %g, %g on the CPU", n,
                      (int)at[0], got, want);
        }
        fattn_tensor_free(cpu, &x);
        fattn_tensor_free(cpu, &y);
    }
    fattn_tensor lengths = on_host(gpu, cpu, &replayed.lengths);
    const int32_t *const last = lengths.data;
    cr_assert(last[0] == 5 + STEPS * S && last[1] == FIRST + STEPS * S, "%d and %d keys", last[0], last[1]);
    fattn_tensor_free(cpu, &lengths);
    must(cudaGraphExecDestroy(run), "destroy");
    must(cudaGraphDestroy(graph), "destroy");
    close_layer(&replayed), close_layer(&called), close_layer(&host);
    fattn_ctx_destroy(gpu);
    fattn_ctx_destroy(other);
    fattn_ctx_destroy(cpu);
    must(cudaStreamDestroy(stream), "stream");
}
Test(cuda_decoding, f64_rope, .timeout = 100) { decode(FATTN_F64, 1e4f, 1); }
Test(cuda_decoding, f64_rows, .timeout = 100) { decode(FATTN_F64, 0, 3); }
Test(cuda_decoding, f32, .timeout = 100) { decode(FATTN_F32, 0, 1); }
Test(cuda_decoding, f32_rope_rows, .timeout = 100) { decode(FATTN_F32, 1e4f, 3); }
Test(cuda_decoding, f16, .timeout = 100) { decode(FATTN_F16, 0, 1); }
Test(cuda_decoding, f16_rope_rows, .timeout = 100) { decode(FATTN_F16, 5e5f, 3); }
Test(cuda_decoding, bf16, .timeout = 100) { decode(FATTN_BF16, 0, 1); }
Test(cuda_decoding, bf16_rows, .timeout = 100) { decode(FATTN_BF16, 0, 3); }
