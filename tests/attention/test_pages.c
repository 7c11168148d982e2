/* Forward with keys in pages: the bits of the same call with keys one after the other, on every instruction set and any
   number of threads. Pages are shuffled; what is not in use holds NaN, or -1 in the table. */
#include "attention.h"
#include "pages.h"
#include "thinned.h"

#include <criterion/criterion.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const fattn_dtype dtypes[4] = {FATTN_F64, FATTN_F32, FATTN_F16, FATTN_BF16};
static const enum layout layouts[4] = {LAYOUT_BHSD, LAYOUT_BSHD, LAYOUT_PITCH, LAYOUT_REVERSED};
static const int32_t lengths[] = {0, 1, 15, 16, 17, 63, 64, 65, 511, 512, 513, 1000};
static const int64_t sizes[] = {16, 32, 64, 256};
static const int64_t dims[] = {8, 3, 16, 40, 1, 64, 33};

/* The forward call of `a` with keys in pages. */
static fattn_attention_io io_of(const attention *a, const pages *p) {
    fattn_attention_io io = a->io;
    io.k = &p->k, io.v = &p->v, io.page_table = &p->table;
    io.dq = io.dk = io.dv = io.d_bias = io.d_sink = io.d_o = io.d_lse = io.delta = NULL;
    return io;
}

/* It in another context; o and lse are a's, refilled before. */
static fattn_status run_in_pages(fattn_ctx *ctx, attention *a, const pages *p, fattn_attention_plan *plan) {
    fattn_attention_io io = io_of(a, p);
    attention_reset(a);
    *plan = (fattn_attention_plan){.struct_size = sizeof *plan};
    fattn_status s = fattn_attention_query(ctx, &a->params, &io, plan);
    if (s) return s;
    const size_t room = (plan->fwd_workspace + 255) / 256 * 256;
    unsigned char *const workspace = aligned_alloc(256, room + 256);
    cr_assert(workspace);
    memset(workspace, 0xff, room + 256); /* NaN in every type */
    io.workspace = workspace, io.workspace_bytes = plan->fwd_workspace;
    s = fattn_attention_fwd(ctx, &a->params, &io);
    for (size_t n = plan->fwd_workspace; n < room + 256; ++n)
        cr_assert_eq(workspace[n], 0xff, "%s: beyond the workspace", a->c.name);
    free(workspace);
    return s;
}

static unsigned char *result_of(const attention *a, enum tensor_id id) {
    const field *const f = &a->fields[a->home[id]];
    unsigned char *const copy = malloc(f->size);
    cr_assert(copy);
    return memcpy(copy, f->memory, f->size);
}

/* All of o's and lse's memory, padding and rows past the end included. */
static void check_result(const attention *a, enum tensor_id id, const unsigned char *want, int64_t page, int threads) {
    const field *const f = &a->fields[a->home[id]];
    cr_assert(memcmp(f->memory, want, f->size) == 0, "%s, %s, pages of %d, %d threads: %s differs", a->c.name,
              fattn_dtype_name(a->c.dtype), (int)page, threads, attention_names[id]);
}

/* A case whose keys are padded, with Sk a multiple of the page. */
static void check_case(const attention_case *c, int64_t page, enum pages_layout layout, int isa) {
    static const int threads[] = {1, 2, 4};
    fattn_ctx *const one = attention_context_isa(1, isa);
    if (!one) return;
    attention *const a = attention_new(one, c);
    attention_forward(a, LIBRARY);
    unsigned char *const o = result_of(a, T_O), *const lse = result_of(a, T_LSE);
    const pages p = pages_of(&a->t[T_K], &a->t[T_V], c->length_k, page, 3, layout, (uint64_t)page + (uint64_t)c->Sq);
    for (int n = 0; n < 3; ++n) {
        fattn_attention_plan plan;
        fattn_ctx *const ctx = attention_context_isa(threads[n], isa);
        const fattn_status s = run_in_pages(ctx, a, &p, &plan);
        cr_assert_eq(s, FATTN_OK, "%s: %s", c->name, fattn_ctx_error(ctx));
        cr_assert_str_eq(plan.fwd_kernel, a->plan.fwd_kernel);
        cr_assert_eq(strlen(plan.bwd_kernel), 0);
        check_result(a, T_O, o, page, threads[n]);
        check_result(a, T_LSE, lse, page, threads[n]);
        fattn_ctx_destroy(ctx);
    }
    free(o);
    free(lse);
    pages_free((pages *)&p);
    attention_free(a);
    fattn_ctx_destroy(one);
}

static void check_every_isa(const attention_case *c, int64_t page, enum pages_layout layout) {
    for (int isa = FATTNI_ISA_BASELINE; isa <= FATTNI_ISA_AMXFP16; ++isa) check_case(c, page, layout, isa);
}

static int64_t up(int64_t n, int64_t page) { return (n + page - 1) / page * page; }

/* Rows 1 to 17 and 40; every length, alone or in a batch; groups of 1, 3 and 8; every mask. */
static attention_case shape(int n) {
    static const uint32_t masks[] = {FATTN_CAUSAL, 0, FATTN_CAUSAL | FATTN_WINDOW, FATTN_CAUSAL_TOP_LEFT};
    static const int64_t groups[] = {1, 3, 8};
    attention_case c = {.name = "pages",
                        .dtype = dtypes[n % 4],
                        .B = 1 + n % 8,
                        .Hkv = 1 + n / 3 % 2,
                        .Hq = groups[n % 3] * (1 + n / 3 % 2),
                        .Sq = n % 18 == 17 ? 40 : 1 + n % 18,
                        .D = dims[n / 2 % 7],
                        .Dv = dims[n / 3 % 7],
                        .layout = layouts[n / 5 % 4],
                        .flags = masks[n / 4 % 4],
                        .window_left = 30 * (n % 11),
                        .window_right = -1,
                        .lengths = n / 7 % 2 ? LENGTHS_PADDED : LENGTHS_PADDED_K,
                        .wide = n % 5 == 0};
    int32_t longest = 1;
    for (int b = 0; b < c.B; ++b) {
        c.length_k[b] = lengths[(b * 5 + n) % 12];
        c.length_q[b] = (int32_t)((b * 7 + n) % (c.Sq + 1));
        if (c.length_k[b] > longest) longest = c.length_k[b];
    }
    c.Sk = up(longest, sizes[n % 4]) + n / 2 % 2 * sizes[n % 4]; /* the table may have a column that nobody uses */
    return c;
}

static void walk(int first, int count) {
    for (int n = first; n < first + count; n += THINNED(5)) {
        char name[32];
        attention_case c = shape(n);
        snprintf(name, sizeof name, "pages %d", n);
        c.name = name;
        check_every_isa(&c, sizes[n % 4], (enum pages_layout)(n / 3 % PAGES_LAYOUTS));
    }
}
Test(pages, shapes) { walk(0, 36); }
Test(pages, more_shapes) { walk(36, 36); }

/* Every feature of forward, with many keys. */
static void features(int first, int step) {
    for (int n = first; n < attention_feature_count; n += step * THINNED(2)) {
        attention_case c = attention_features[n];
        if (c.lengths == LENGTHS_PACKED || c.Sk == 0) continue;
        char name[64];
        snprintf(name, sizeof name, "%s, pages", c.name);
        const int64_t page = sizes[n / 2 % 4];
        const int32_t keys = 41 + 30 * (n % 3);
        const bool rows = c.lengths == LENGTHS_PADDED || c.lengths == LENGTHS_PADDED_Q;
        for (int b = 0; b < c.B; ++b) {
            const int32_t k =
                c.lengths == LENGTHS_PADDED || c.lengths == LENGTHS_PADDED_K ? c.length_k[b] : (int32_t)c.Sk - b;
            c.length_k[b] = (k > 0 ? k : 0) * keys;
            if (!rows) c.length_q[b] = (int32_t)c.Sq;
        }
        c.name = name;
        c.lengths = LENGTHS_PADDED;
        c.Sk = up(c.Sk * keys, page);
        c.window_left *= keys, c.window_right *= keys;
        c.D *= 1 + n % 5;
        c.dtype = dtypes[(n + n / 4) % 4];
        c.layout = layouts[n / 2 % 4];
        c.wide = n % 3 == 0 || (c.flags & FATTN_MERGE);
        check_case(&c, page, (enum pages_layout)(n % PAGES_LAYOUTS), 9);
        c.Sq = c.Sq * 11; /* past few rows, in several blocks */
        for (int b = 0; b < c.B; ++b) c.length_q[b] *= 11;
        c.dtype = dtypes[(n + 1 + n / 4) % 4];
        check_case(&c, page, (enum pages_layout)(n / 4 % PAGES_LAYOUTS), 9);
    }
}
Test(pages, each_feature) { features(0, 2); }
Test(pages, each_other_feature) { features(1, 2); }

/* A call of many blocks of rows, where BF16 keys are copied into operands once for all of them, or are too many. */
Test(pages, many_rows) {
    for (int n = 0; n < 4; ++n) {
        attention_case c = {.name = "many rows",
                            .dtype = dtypes[n],
                            .B = 2,
                            .Hq = 4,
                            .Hkv = 2,
                            .Sq = 300,
                            .Sk = 1024,
                            .D = 40,
                            .flags = FATTN_CAUSAL,
                            .lengths = LENGTHS_PADDED_K,
                            .length_k = {1000, 333}};
        check_every_isa(&c, sizes[n % 2], PAGES_HEADS_INSIDE);
    }
}

/* Two sequences with the same first 48 keys share their pages. */
Test(pages, shared_prefix) {
    for (int n = 0; n < 8; ++n) {
        const attention_case c = {.name = "shared",
                                  .dtype = dtypes[n % 4],
                                  .B = 2,
                                  .Hq = 3,
                                  .Hkv = 1,
                                  .Sq = n < 4 ? 2 : 30,
                                  .Sk = 112,
                                  .D = 16,
                                  .flags = FATTN_CAUSAL,
                                  .lengths = LENGTHS_PADDED_K,
                                  .length_k = {100, 77}};
        fattn_ctx *const ctx = attention_context(2);
        attention *const a = attention_new(ctx, &c);
        for (int64_t j = 0; j < 48; ++j)
            for (int64_t d = 0; d < 16; ++d)
                for (int id = T_K; id <= T_V; ++id)
                    attention_set(&a->t[id], (int64_t[]){1, 0, j, d},
                                  attention_get(&a->t[id], (int64_t[]){0, 0, j, d}));
        attention_forward(a, LIBRARY);
        unsigned char *const o = result_of(a, T_O), *const lse = result_of(a, T_LSE);
        pages p = pages_of(&a->t[T_K], &a->t[T_V], c.length_k, 16, 0, PAGES_HEADS_OUTSIDE, 5);
        for (int64_t i = 0; i < 3; ++i) {
            for (int64_t e = 0; e < 16 * 16; ++e) {
                fattni_store(p.k.data, p.k.dtype, *pages_entry(&p, 1, i) * p.k.stride[0] + e, NAN);
                fattni_store(p.v.data, p.v.dtype, *pages_entry(&p, 1, i) * p.v.stride[0] + e, NAN);
            }
            *pages_entry(&p, 1, i) = *pages_entry(&p, 0, i);
        }
        fattn_attention_plan plan;
        cr_assert_eq(run_in_pages(ctx, a, &p, &plan), FATTN_OK, "%s", fattn_ctx_error(ctx));
        check_result(a, T_O, o, 16, 2);
        check_result(a, T_LSE, lse, 16, 2);
        free(o);
        free(lse);
        pages_free(&p);
        attention_free(a);
        fattn_ctx_destroy(ctx);
    }
}

/* A table whose columns, or rows, are not side by side. */
Test(pages, strided_table) {
    const attention_case c = {.name = "strided table",
                              .dtype = FATTN_F32,
                              .B = 3,
                              .Hq = 2,
                              .Sq = 3,
                              .Sk = 96,
                              .D = 8,
                              .lengths = LENGTHS_PADDED_K,
                              .length_k = {96, 5, 40}};
    fattn_ctx *const ctx = attention_context(2);
    attention *const a = attention_new(ctx, &c);
    attention_forward(a, LIBRARY);
    unsigned char *const o = result_of(a, T_O);
    pages p = pages_of(&a->t[T_K], &a->t[T_V], c.length_k, 32, 1, PAGES_PITCH, 2);
    int32_t other[2 * 3 * 3];
    fattn_tensor table = p.table;
    table.data = other, table.stride[0] = 2, table.stride[1] = 6;
    for (int64_t n = 0; n < 18; ++n) other[n] = -7;
    for (int64_t n = 0; n < 9; ++n) other[n / 3 * 2 + n % 3 * 6] = *pages_entry(&p, n / 3, n % 3);
    p.table = table;
    fattn_attention_plan plan;
    cr_assert_eq(run_in_pages(ctx, a, &p, &plan), FATTN_OK, "%s", fattn_ctx_error(ctx));
    check_result(a, T_O, o, 32, 2);
    free(o);
    pages_free(&p);
    attention_free(a);
    fattn_ctx_destroy(ctx);
}

/* ---- refused ---- */

typedef struct call {
    attention *a;
    pages p;
    fattn_attention_params params;
    fattn_attention_io io;
} call;

static call new_call(fattn_ctx *ctx) {
    const attention_case c = {.name = "refused",
                              .dtype = FATTN_F32,
                              .B = 2,
                              .Hq = 2,
                              .Sq = 3,
                              .Sk = 64,
                              .D = 8,
                              .lengths = LENGTHS_PADDED_K,
                              .length_k = {40, 17}};
    call x = {.a = attention_new(ctx, &c)};
    x.p = pages_of(&x.a->t[T_K], &x.a->t[T_V], c.length_k, 32, 1, PAGES_HEADS_OUTSIDE, 1);
    x.params = x.a->params;
    return x;
}

static void check_refused(fattn_ctx *ctx, fattn_status got, fattn_status want, const char *says) {
    cr_assert_eq(got, want, "%s instead of %s: %s", fattn_status_name(got), says, fattn_ctx_error(ctx));
    cr_assert(strstr(fattn_ctx_error(ctx), says), "%s", fattn_ctx_error(ctx));
}

static _Alignas(256) unsigned char refused_workspace[1 << 16];

/* The last arguments change call x, which a forward call, and a query if `planned`, must then reject. */
#define REFUSED(planned, status, says, ...)                                                                            \
    do {                                                                                                               \
        call x = new_call(ctx);                                                                                        \
        x.io = io_of(x.a, &x.p);                                                                                       \
        x.io.workspace = refused_workspace, x.io.workspace_bytes = sizeof refused_workspace;                           \
        __VA_ARGS__;                                                                                                   \
        fattn_attention_plan plan = {.struct_size = sizeof plan};                                                      \
        const fattn_status s = fattn_attention_query(ctx, &x.params, &x.io, &plan);                                    \
        if (planned)                                                                                                   \
            check_refused(ctx, s, status, says);                                                                       \
        else                                                                                                           \
            cr_assert_eq(s, FATTN_OK, "%s", fattn_ctx_error(ctx));                                                     \
        check_refused(ctx, fattn_attention_fwd(ctx, &x.params, &x.io), status, says);                                  \
        pages_free(&x.p);                                                                                              \
        attention_free(x.a);                                                                                           \
    } while (0)

Test(pages, refused_calls) {
    fattn_ctx *const ctx = attention_context(1);
    fattn_tensor t, u;
    int32_t cu[3] = {0, 3, 6};
    const fattn_tensor packed = fattn_tensor_view(cu, FATTN_I32, FATTN_CPU, 0, 1, (int64_t[]){3});
    REFUSED(true, FATTN_E_SHAPE, "page_table is [3,2], not [2,pages of a sequence]",
            (t = x.p.table, t.shape[0] = 3, x.io.page_table = &t));
    REFUSED(true, FATTN_E_SHAPE, "page_table is [2], not [2,pages of a sequence]",
            (t = x.p.table, t.ndim = 1, x.io.page_table = &t));
    REFUSED(true, FATTN_E_DTYPE, "page_table: dtype f32", (t = x.p.table, t.dtype = FATTN_F32, x.io.page_table = &t));
    REFUSED(true, FATTN_E_DEVICE, "page_table: is on device", (t = x.p.table, t.device = 2, x.io.page_table = &t));
    REFUSED(true, FATTN_E_ARG, "page_table needs seqlens_k", x.io.seqlens_k = NULL);
    REFUSED(true, FATTN_E_ARG, "page_table and cu_seqlens (packed) exclude each other",
            (x.io.cu_seqlens_q = x.io.cu_seqlens_k = &packed));
    REFUSED(true, FATTN_E_UNSUPPORTED, "STANDARD and FLASH1", x.params.algorithm = FATTN_ALGO_STANDARD);
    REFUSED(true, FATTN_E_UNSUPPORTED, "STANDARD and FLASH1", x.params.algorithm = FATTN_ALGO_FLASH1);
    REFUSED(true, FATTN_E_SHAPE, "k has 4 pages, v has 3", (t = x.p.v, t.shape[0] = 3, x.io.v = &t));
    REFUSED(true, FATTN_E_SHAPE, "k has pages of 31 keys: not a power of two of 16 or more",
            (t = x.p.k, u = x.p.v, t.shape[2] = u.shape[2] = 31, x.io.k = &t, x.io.v = &u));
    REFUSED(true, FATTN_E_SHAPE, "k has pages of 8 keys: not a power of two of 16 or more",
            (t = x.p.k, u = x.p.v, t.shape[2] = u.shape[2] = 8, x.io.k = &t, x.io.v = &u));
    REFUSED(true, FATTN_E_SHAPE, "Sk=32 but v: Sk=16", (t = x.p.v, t.shape[2] = 16, x.io.v = &t));
    REFUSED(true, FATTN_E_SHAPE, "more than 2^31-1 keys",
            (t = x.p.table, t.shape[1] = 1 << 26, t.stride[1] = 0, t.stride[0] = 0, x.io.page_table = &t));
    REFUSED(false, FATTN_E_ARG, "page_table[0,1] = -1 is not in 0..3", *pages_entry(&x.p, 0, 1) = -1);
    REFUSED(false, FATTN_E_ARG, "page_table[1,0] = 4 is not in 0..3", *pages_entry(&x.p, 1, 0) = 4);
    REFUSED(false, FATTN_E_ARG, "seqlens_k[1] = 65 is not in 0..64",
            (t = *x.io.seqlens_k, ((int32_t *)t.data)[1] = 65));
    REFUSED(false, FATTN_E_ARG, "o and page_table overlap",
            (t = x.p.table, t.data = x.io.o->data, memcpy(t.data, x.p.table.data, 16), x.io.page_table = &t));
    fattn_ctx_destroy(ctx);
}

Test(pages, backward_is_refused) {
    fattn_ctx *const ctx = attention_context(1);
    call x = new_call(ctx);
    x.io = io_of(x.a, &x.p);
    fattn_attention_plan plan = {.struct_size = sizeof plan};
    const fattn_tensor dk = x.p.k, dv = x.p.v;
    x.io.d_o = x.a->io.d_o, x.io.dk = &dk, x.io.dv = &dv;
    cr_assert_eq(fattn_attention_query(ctx, &x.params, &x.io, &plan), FATTN_OK, "%s", fattn_ctx_error(ctx));
    check_refused(ctx, fattn_attention_bwd(ctx, &x.params, &x.io), FATTN_E_UNSUPPORTED, "backward has no pages");
    pages_free(&x.p);
    attention_free(x.a);
    fattn_ctx_destroy(ctx);
}
