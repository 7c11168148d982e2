/* Attention over ranks against the same call on one device: every form, layout and feature, 1 to 16 ranks. */
#include "core/context_parallel/cp.h"

#include "cp.h"
#include "ranks.h"
#include "thinned.h"

#include <criterion/criterion.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#define HEADS .Hq = 16, .Hkv = 16
#define SMALL .B = 1, HEADS, .N = 301, .D = 5
#define PACKED .B = 1, HEADS, .N = 300, .D = 6, .n_sequences = 6, .lengths = {7, 0, 181, 1, 90, 21}

static const cp_case cases[] = {
    {"full", SMALL},
    {"causal", SMALL, .flags = FATTN_CAUSAL},
    {"causal top left, Dv", SMALL, .Dv = 9, .flags = FATTN_CAUSAL_TOP_LEFT},
    {"causal, heads last", SMALL, .flags = FATTN_CAUSAL, .heads_last = true},
    {"causal, heads last on some ranks", SMALL, .flags = FATTN_CAUSAL, .mixed = true},
    {"window", SMALL, .flags = FATTN_WINDOW, .window_left = 9, .window_right = 4},
    {"narrow window", SMALL, .flags = FATTN_WINDOW, .window_left = 0, .window_right = 1},
    {"causal window", SMALL, .flags = FATTN_CAUSAL | FATTN_WINDOW, .window_left = 17, .window_right = -1},
    {"softcap", SMALL, .softcap = 1.5f, .flags = FATTN_CAUSAL},
    {"ALiBi", SMALL, .alibi = true},
    {"ALiBi, causal", SMALL, .alibi = true, .flags = FATTN_CAUSAL},
    {"sink", SMALL, .sink = true, .d_lse = true},
    {"sink, causal", SMALL, .sink = true, .flags = FATTN_CAUSAL},
    {"dropout", SMALL, .dropout_p = 0.3f, .rng_step = true},
    {"dropout, causal, window", SMALL, .dropout_p = 0.3f, .flags = FATTN_CAUSAL | FATTN_WINDOW, .window_left = 30},
    {"dL", SMALL, .d_lse = true, .flags = FATTN_CAUSAL},
    {"accumulate", SMALL, .flags = FATTN_CAUSAL | FATTN_ACC_DQ | FATTN_ACC_DK | FATTN_ACC_DV},
    {"packed", PACKED},
    {"packed, causal", PACKED, .flags = FATTN_CAUSAL},
    {"packed, all", PACKED, .flags = FATTN_CAUSAL | FATTN_WINDOW, .window_left = 12, .dropout_p = 0.25f, .sink = true,
     .alibi = true, .d_lse = true},
    {"fewer rows than chunks", .B = 2, HEADS, .N = 53, .D = 4, .flags = FATTN_CAUSAL},
    {"one row", .B = 2, HEADS, .N = 1, .D = 4},
    {"no rows", .B = 2, HEADS, .N = 0, .D = 4},
    {"GQA", .B = 2, .Hq = 32, .Hkv = 16, .N = 40, .D = 4, .flags = FATTN_CAUSAL},
};
static const int sizes[] = {1, 2, 3, 4, 8, 16};
static const char *const forms[] = {"auto", "ring", "all-gather", "ulysses"};

#define EACH(x, list) for (size_t x = 0; x < sizeof(list) / sizeof *(list); ++x)

/* F64: rounding alone, of sums of at most 301 terms and merges. */
static void expect_close(const cp_case *c, int form, int layout, int ranks, const cp_result *want) {
    cp_result got = cp_run(c, FATTN_CPU, ranks, form, layout);
    for (int i = 0; i < CP_RESULTS; ++i)
        cr_assert_leq(cp_error(&got, want, i), 1e-13, "%s, %s, layout %d, %d ranks: %s is off by %g", c->name,
                      forms[form], layout, ranks, cp_names[i], cp_error(&got, want, i));
    cp_free(&got);
}

static void every_case(int form, const int *ranks, int n_ranks) {
    EACH(n, cases) {
        const cp_case *const c = &cases[n];
        cp_result want = cp_whole(c, FATTN_CPU, 0);
        for (int i = (int)(n % (size_t)THINNED(n_ranks)); i < n_ranks; i += THINNED(n_ranks))
            expect_close(c, form, (int)(n + (size_t)i) % 2, ranks[i], &want);
        cp_free(&want);
    }
}
Test(context_parallel, ring) { every_case(FATTN_CP_RING, (const int[]){1, 2, 3, 16}, 4); }
Test(context_parallel, all_gather) { every_case(FATTN_CP_ALL_GATHER, (const int[]){1, 4, 16}, 3); }
Test(context_parallel, ulysses) { every_case(FATTN_CP_ULYSSES, (const int[]){2, 8}, 2); }
Test(context_parallel, automatic) { every_case(FATTN_CP_AUTO, (const int[]){3}, 1); }

/* Deterministic: the bits of one device, on any number of ranks. */
static const cp_case exact_cases[] = {
    {"f64", .B = 2, .Hq = 4, .Hkv = 4, .N = 150, .D = 20, .dtype = FATTN_F64, .flags = FATTN_CAUSAL},
    {"f32, full", .B = 1, .Hq = 8, .Hkv = 4, .N = 333, .D = 64, .dtype = FATTN_F32},
    {"f32, all", .B = 2, .Hq = 4, .Hkv = 4, .N = 333, .D = 40, .dtype = FATTN_F32, .flags = FATTN_CAUSAL | FATTN_WINDOW,
     .window_left = 100, .dropout_p = 0.2f, .alibi = true, .sink = true, .d_lse = true},
    {"bf16", .B = 1, .Hq = 4, .Hkv = 4, .N = 517, .D = 64, .dtype = FATTN_BF16, .flags = FATTN_CAUSAL},
    {"bf16, accumulate", .B = 1, .Hq = 4, .Hkv = 4, .N = 130, .D = 32, .dtype = FATTN_BF16,
     .flags = FATTN_CAUSAL | FATTN_ACC_DQ | FATTN_ACC_DK | FATTN_ACC_DV, .wide = true},
    {"f16, window", .B = 1, .Hq = 4, .Hkv = 4, .N = 300, .D = 64, .dtype = FATTN_F16, .flags = FATTN_WINDOW,
     .window_left = 50, .window_right = 20},
};

static void expect_same(const cp_case *given, int form, int ranks, int layout, const cp_result *want) {
    cp_case c = *given;
    c.flags |= FATTN_DETERMINISTIC;
    cp_result got = cp_run(&c, FATTN_CPU, ranks, form, layout);
    for (int i = CP_O; i <= CP_DV; ++i)
        cr_assert(cp_same(&got, want, i), "%s, %s, layout %d, %d ranks: %s has other bits, off by %g", c.name,
                  forms[form], layout, ranks, cp_names[i], cp_error(&got, want, i));
    cp_free(&got);
}

static void exact(int form) {
    EACH(n, exact_cases) {
        const cp_case *const c = &exact_cases[n];
        cp_result want = cp_whole(c, FATTN_CPU, 0);
        for (size_t i = n % THINNED(3); i < sizeof sizes / sizeof *sizes; i += THINNED(3))
            if (form != FATTN_CP_ULYSSES || c->Hkv % sizes[i] == 0)
                expect_same(c, form, sizes[i], (int)(n + i) % 2, &want);
        cp_free(&want);
    }
}
Test(context_parallel, ulysses_has_the_bits_of_one_device) { exact(FATTN_CP_ULYSSES); }
Test(context_parallel, all_gather_has_the_bits_of_one_device) { exact(FATTN_CP_ALL_GATHER); }

/* ULYSSES: any number of groups of heads, moved as parts or as messages, of tensors whose rows are runs or not, gives
   the bits of one device; so it does when gradients are not asked for. */
#define BF16_CAUSAL .dtype = FATTN_BF16, .flags = FATTN_CAUSAL
static const cp_case group_cases[] = {
    {"10 heads", .B = 1, .Hq = 10, .Hkv = 10, .N = 131, .D = 32, BF16_CAUSAL},
    {"GQA, two of a batch", .B = 2, .Hq = 30, .Hkv = 10, .N = 130, .D = 16, BF16_CAUSAL},
    {"heads last", .B = 2, .Hq = 12, .Hkv = 6, .N = 130, .D = 16, BF16_CAUSAL, .heads_last = true},
    {"heads last on a rank", .B = 2, .Hq = 12, .Hkv = 6, .N = 130, .D = 16, BF16_CAUSAL, .mixed = true},
    {"accumulate, heads last", .B = 2, .Hq = 10, .Hkv = 10, .N = 70, .D = 8, .dtype = FATTN_F32, .heads_last = true,
     .flags = FATTN_CAUSAL | FATTN_ACC_DQ | FATTN_ACC_DK | FATTN_ACC_DV},
    {"all", .B = 1, .Hq = 12, .Hkv = 6, .N = 135, .D = 16, .Dv = 24, .dtype = FATTN_F32, .flags = FATTN_CAUSAL,
     .dropout_p = 0.2f, .alibi = true, .sink = true, .d_lse = true, .rng_step = true},
    {"packed", .B = 1, .Hq = 10, .Hkv = 10, .N = 140, .D = 16, BF16_CAUSAL, .n_sequences = 4,
     .lengths = {7, 0, 101, 32}},
    {"rows of some ranks only", .B = 1, .Hq = 10, .Hkv = 10, .N = 20, .D = 16, BF16_CAUSAL},
};

static void expect_groups(const cp_case *given, int groups, int layout, uint32_t without, const cp_result *want) {
    cp_case c = *given;
    c.flags |= FATTN_DETERMINISTIC, c.groups = groups, c.without = without;
    for (int way = 0; way < 4; ++way) {
        c.messages = way % 2, c.saves = way / 2;
        cp_result got = cp_run(&c, FATTN_CPU, 2, FATTN_CP_ULYSSES, layout);
        for (int i = CP_O; i <= CP_DV; ++i)
            cr_assert((without & 1u << i) || cp_same(&got, want, i),
                      "%s, %d groups, %s%s, layout %d: %s has other bits", c.name, groups,
                      c.messages ? "messages" : "parts", c.saves ? ", saved" : "", layout, cp_names[i]);
        cp_free(&got);
    }
}

Test(context_parallel, groups_of_heads_have_the_bits_of_one_device) {
    static const int some[] = {1, 3, FATTNI_CP_GROUPS};
    EACH(n, group_cases) {
        cp_result want = cp_whole(&group_cases[n], FATTN_CPU, 0);
        for (size_t i = n % THINNED(3); i < 3; i += THINNED(3))
            expect_groups(&group_cases[n], some[i], (int)(n + i) % 2, 0, &want);
        cp_free(&want);
    }
}

Test(context_parallel, groups_of_heads_without_some_gradients) {
    const uint32_t q = 1u << CP_DQ, k = 1u << CP_DK, v = 1u << CP_DV, some[] = {q, k, v, q | k, k | v, q | k | v};
    for (int n = 2; n < 4; ++n) {
        cp_result want = cp_whole(&group_cases[n], FATTN_CPU, 0);
        EACH(i, some) expect_groups(&group_cases[n], 3, 0, some[i], &want);
        cp_free(&want);
    }
}

/* As many bytes, of other shapes. */
static fattn_status turns_shapes(rank_call *r) {
    const fattn_cp_options o = {.struct_size = sizeof o, .form = FATTN_CP_ULYSSES, .rows = 80};
    static const int64_t shapes[2][4] = {{1, 4, 40, 8}, {1, 8, 40, 4}};
    const int64_t *const shape = shapes[r->rank];
    float x[4][4 * 40 * 8] = {{0}}, lse[8 * 40];
    fattn_tensor t[4];
    fattn_cp *cp;
    for (int i = 0; i < 4; ++i) t[i] = fattn_tensor_view(x[i], FATTN_F32, FATTN_CPU, 0, 4, shape);
    const fattn_tensor l = fattn_tensor_view(lse, FATTN_F32, FATTN_CPU, 0, 3, shape);
    const fattn_attention_io io = {.struct_size = sizeof io, .q = &t[0], .k = &t[1], .v = &t[2], .o = &t[3], .lse = &l};
    fattn_status s = fattn_cp_create(r->comm, &o, &cp);
    if (s) return s;
    cp->groups = 1;
    s = fattn_cp_fwd(cp, NULL, &io);
    fattn_cp_destroy(cp);
    return s;
}
Test(context_parallel, other_shapes_of_as_many_bytes_are_refused) {
    rank_call calls[2];
    run_ranks(2, NULL, turns_shapes, NULL, calls);
    for (int r = 0; r < 2; ++r) {
        cr_assert_eq(calls[r].status, FATTN_E_COMM, "%s", calls[r].error);
        cr_assert_not_null(strstr(calls[r].error, "shapes or dtypes differ"), "%s", calls[r].error);
    }
}

/* Keys with a mean: on one device they are centred, by ULYSSES, too; ALL_GATHER does not, on any number of ranks. */
Test(context_parallel, bits_with_key_means) {
    const cp_case c = {"key means",
                       .B = 1,
                       .Hq = 4,
                       .Hkv = 4,
                       .N = 400,
                       .D = 64,
                       .dtype = FATTN_BF16,
                       .flags = FATTN_CAUSAL | FATTN_DETERMINISTIC,
                       .key_means = true};
    cp_result whole = cp_whole(&c, FATTN_CPU, 0), one = cp_run(&c, FATTN_CPU, 1, FATTN_CP_ALL_GATHER, 0);
    EACH(i, sizes) {
        expect_same(&c, FATTN_CP_ALL_GATHER, sizes[i], 0, &one);
        if (c.Hkv % sizes[i] == 0) expect_same(&c, FATTN_CP_ULYSSES, sizes[i], 1, &whole);
    }
    cr_assert_not(cp_same(&whole, &one, CP_DQ));
    cp_free(&whole);
    cp_free(&one);
}

/* A ring's bits are those of every run of it. */
Test(context_parallel, ring_repeats) {
    cp_case c = exact_cases[3];
    c.flags |= FATTN_DETERMINISTIC;
    cp_result want = cp_run(&c, FATTN_CPU, 3, FATTN_CP_RING, 0);
    for (int n = 0; n < 5; ++n) expect_same(&c, FATTN_CP_RING, 3, 0, &want);
    cp_free(&want);
}

/* 16 bits: parts are merged in F32 and rounded once, so that the error does not grow with the ranks: 1.1 for the other
   roundings of P in parts. L is rounded to F32 once more per merge: half a unit each, in
   a random walk. */
Test(context_parallel, error_does_not_grow_with_ranks) {
    const cp_case c = {
        "bf16", .B = 1, .Hq = 4, .Hkv = 2, .N = 1024, .D = 64, .dtype = FATTN_BF16, .flags = FATTN_CAUSAL};
    cp_result exactly = cp_whole(&c, FATTN_CPU, FATTN_F64), one = cp_whole(&c, FATTN_CPU, 0);
    for (int form = FATTN_CP_RING; form <= FATTN_CP_ALL_GATHER; ++form) {
        for (size_t n = 0; n < sizeof sizes / sizeof *sizes; n += THINNED(3)) {
            cp_result got = cp_run(&c, FATTN_CPU, sizes[n], form, 0);
            for (int i = CP_O; i <= CP_DV; ++i)
                cr_assert_leq(cp_error(&got, &exactly, i),
                              (i == CP_LSE ? sqrt(sizes[n]) : 1.1) * cp_error(&one, &exactly, i),
                              "%s, %d ranks: the error of %s is %g, on one device %g", forms[form], sizes[n],
                              cp_names[i], cp_error(&got, &exactly, i), cp_error(&one, &exactly, i));
            cp_free(&got);
        }
    }
    cp_free(&exactly);
    cp_free(&one);
}

/* ---- layout ---- */

static fattn_status positions(rank_call *r) {
    static const int32_t starts[] = {0, 7, 7, 29};
    for (int layout = 0; layout < 2; ++layout)
        for (int packed = 0; packed < 2; ++packed) {
            const fattn_cp_options o = {.struct_size = sizeof o,
                                        .layout = layout,
                                        .rows = 29,
                                        .n_sequences = packed ? 3 : 0,
                                        .cu_seqlens = packed ? starts : NULL};
            fattn_cp *cp;
            fattn_status s = fattn_cp_create(r->comm, &o, &cp);
            if (s) return s;
            int32_t place[29], whole[29], got[29];
            for (int i = 0; i < 29; ++i) whole[i] = packed && i >= 7 ? i - 7 : i;
            const int64_t rows = fattn_cp_rows(cp), n = 29;
            fattn_cp_positions(cp, place);
            const fattn_tensor a = fattn_tensor_view(place, FATTN_I32, FATTN_CPU, 0, 1, &rows);
            const fattn_tensor b = fattn_tensor_view(got, FATTN_I32, FATTN_CPU, 0, 1, &n);
            s = fattn_cp_gather(cp, &a, 0, &b);
            if (!s && memcmp(got, whole, sizeof got)) s = fattn_ctx_fail(r->ctx, FATTN_E_MISMATCH, "positions");
            const fattn_tensor w = fattn_tensor_view(whole, FATTN_I32, FATTN_CPU, 0, 1, &n);
            int32_t taken[29];
            const fattn_tensor t = fattn_tensor_view(taken, FATTN_I32, FATTN_CPU, 0, 1, &rows);
            if (!s) s = fattn_cp_take(cp, &w, 0, &t);
            if (!s && memcmp(taken, place, (size_t)rows * sizeof *taken))
                s = fattn_ctx_fail(r->ctx, FATTN_E_MISMATCH, "take");
            fattn_cp_destroy(cp);
            if (s) return s;
        }
    return FATTN_OK;
}
Test(context_parallel, rows_and_positions) { EACH(i, sizes) expect_ranks(sizes[i], NULL, positions, NULL); }

/* ---- refusals ---- */

typedef struct refusal {
    const char *text;
    fattn_status status;
    void (*spoil)(fattn_attention_params *p, fattn_attention_io *io, fattn_tensor *t);
} refusal;

static void with_merge(fattn_attention_params *p, fattn_attention_io *io, fattn_tensor *t) {
    (void)io, (void)t;
    p->flags |= FATTN_MERGE;
}
static void with_fp8(fattn_attention_params *p, fattn_attention_io *io, fattn_tensor *t) {
    (void)io, (void)t;
    p->flags |= FATTN_FP8;
}
static void with_position(fattn_attention_params *p, fattn_attention_io *io, fattn_tensor *t) {
    (void)io, (void)t;
    p->q_pos0 = 3;
}
static void with_bias(fattn_attention_params *p, fattn_attention_io *io, fattn_tensor *t) {
    (void)p;
    io->bias = t;
}
static void with_standard(fattn_attention_params *p, fattn_attention_io *io, fattn_tensor *t) {
    (void)io, (void)t;
    p->algorithm = FATTN_ALGO_STANDARD;
}
static void with_rows(fattn_attention_params *p, fattn_attention_io *io, fattn_tensor *t) {
    (void)p, (void)io;
    t->shape[2] -= 1;
}
static void with_workspace(fattn_attention_params *p, fattn_attention_io *io, fattn_tensor *t) {
    (void)p;
    io->workspace = t->data;
}
static void with_small_saved(fattn_attention_params *p, fattn_attention_io *io, fattn_tensor *t) {
    static _Alignas(256) char bytes[2];
    (void)p, (void)t;
    io->saved = bytes, io->saved_bytes = 1;
}
static void with_odd_saved(fattn_attention_params *p, fattn_attention_io *io, fattn_tensor *t) {
    with_small_saved(p, io, t);
    io->saved = (char *)io->saved + 1;
}
static const refusal refusals[] = {
    {"FATTN_MERGE", FATTN_E_UNSUPPORTED, with_merge},
    {"FATTN_FP8", FATTN_E_UNSUPPORTED, with_fp8},
    {"q_pos0 3", FATTN_E_ARG, with_position},
    {"bias", FATTN_E_UNSUPPORTED, with_bias},
    {"STANDARD", FATTN_E_UNSUPPORTED, with_standard},
    {"with 17 rows in dimension 2", FATTN_E_SHAPE, with_rows},
    {"workspace", FATTN_E_ARG, with_workspace},
    {"saved has 1 bytes, 5632 are needed", FATTN_E_WORKSPACE, with_small_saved},
    {"is not aligned to 256 bytes", FATTN_E_WORKSPACE, with_odd_saved},
};

static fattn_status refused(rank_call *r) {
    const refusal *const f = r->arg;
    const fattn_cp_options o = {.struct_size = sizeof o, .rows = 34};
    fattn_cp *cp;
    fattn_status s = fattn_cp_create(r->comm, &o, &cp);
    if (s) return s;
    float x[4 * 17 * 4] = {0}, lse[4 * 17];
    const int64_t shape[4] = {1, 4, fattn_cp_rows(cp), 4};
    fattn_tensor t = fattn_tensor_view(x, FATTN_F32, FATTN_CPU, 0, 4, shape);
    const fattn_tensor l = fattn_tensor_view(lse, FATTN_F32, FATTN_CPU, 0, 3, shape);
    fattn_attention_params p = {.struct_size = sizeof p};
    fattn_attention_io io = {.struct_size = sizeof io, .q = &t, .k = &t, .v = &t, .o = &t, .lse = &l};
    f->spoil(&p, &io, &t);
    s = fattn_cp_fwd(cp, &p, &io);
    fattn_cp_destroy(cp);
    return s;
}
Test(context_parallel, refusals) {
    EACH(i, refusals) {
        rank_call calls[2];
        refusal f = refusals[i];
        run_ranks(2, NULL, refused, &f, calls);
        /* The first to fail may end the other's creation. */
        cr_assert(calls[0].status == f.status || calls[1].status == f.status, "%s", calls[0].error);
        for (int r = 0; r < 2; ++r) {
            cr_assert(calls[r].status == f.status || calls[r].status == FATTN_E_COMM, "%s", calls[r].error);
            cr_assert_not_null(strstr(calls[r].error, f.text), "%s", calls[r].error);
        }
    }
}

/* A rank alone has what forward saved: the other waits for inputs that do not come. */
static fattn_status saves_alone(rank_call *r) {
    const fattn_cp_options o = {.struct_size = sizeof o, .form = FATTN_CP_ULYSSES, .rows = 80};
    fattn_cp *cp;
    fattn_status s = fattn_cp_create(r->comm, &o, &cp);
    if (s) return s;
    static _Alignas(256) char saved[2][1 << 16];
    static const int64_t shape[4] = {1, 4, 40, 8};
    float x[8][4 * 40 * 8] = {{0}}, lse[4 * 40];
    fattn_tensor t[8];
    for (int i = 0; i < 8; ++i) t[i] = fattn_tensor_view(x[i], FATTN_F32, FATTN_CPU, 0, 4, shape);
    const fattn_tensor l = fattn_tensor_view(lse, FATTN_F32, FATTN_CPU, 0, 3, shape);
    fattn_attention_io io = {.struct_size = sizeof io,
                             .q = &t[0],
                             .k = &t[1],
                             .v = &t[2],
                             .o = &t[3],
                             .lse = &l,
                             .d_o = &t[4],
                             .dq = &t[5],
                             .dk = &t[6],
                             .dv = &t[7]};
    io.saved = saved[r->rank], io.saved_bytes = sizeof saved[0];
    s = fattn_cp_fwd(cp, NULL, &io);
    if (r->rank == 1) io.saved = NULL, io.saved_bytes = 0;
    if (!s) s = fattn_cp_bwd(cp, NULL, &io);
    fattn_cp_destroy(cp);
    return s;
}
Test(context_parallel, all_ranks_save_or_none) {
    rank_call calls[2];
    const ranks_options limit = {.time_limit = 10};
    run_ranks(2, &limit, saves_alone, NULL, calls);
    for (int r = 0; r < 2; ++r) cr_assert_eq(calls[r].status, FATTN_E_COMM, "%s", calls[r].error);
}

static fattn_status disagrees(rank_call *r) {
    const fattn_cp_options o = {.struct_size = sizeof o, .rows = r->rank == 1 ? 35 : 34};
    fattn_cp *cp;
    const fattn_status s = fattn_cp_create(r->comm, &o, &cp);
    fattn_cp_destroy(cp);
    return s;
}
Test(context_parallel, ranks_must_agree) {
    rank_call calls[3];
    run_ranks(3, NULL, disagrees, NULL, calls);
    for (int r = 0; r < 3; ++r) {
        cr_assert_eq(calls[r].status, FATTN_E_COMM);
        cr_assert_not_null(strstr(calls[r].error, "rows is 35 on rank 1, 34 on rank 0"), "%s", calls[r].error);
    }
}

/* GPUs of different sizes: the ranks must choose the same form, and as many groups, or their messages differ. On the
   CPU the number of SMs is 0; here the ranks pretend to have some. */
static fattn_status chooses_with_other_ranks(rank_call *r) {
    const fattn_cp_options o = {.struct_size = sizeof o, .rows = 4096};
    fattn_cp *cp;
    r->ctx->gpu.sms = r->rank == 1 ? 16 : 132;
    fattn_status s = fattn_cp_create(r->comm, &o, &cp);
    if (s) return s;
    const fattni_cp_call c = {.cp = cp, .B = 1};
    static const char *const names[] = {"form", "parts", "form of 16 SMs", "parts of 16 SMs"};
    const int64_t form = fattn_cp_form_of(cp, 12, 12, NULL), parts = fattni_cp_full_parts(&c, 12, 4096);
    const int64_t values[] = {form, parts, form == FATTN_CP_ULYSSES, parts == 3};
    s = fattn_comm_agree(r->comm, names, values, 4);
    fattn_cp_destroy(cp);
    r->ctx->gpu.sms = 0;
    return !s && !(values[2] && values[3]) ? FATTN_E_MISMATCH : s;
}
Test(context_parallel, ranks_with_different_gpus) { expect_ranks(3, NULL, chooses_with_other_ranks, NULL); }

/* One rank fails in the middle of a ring: the others must not wait for it. */
static fattn_status leaves_ring(rank_call *r) {
    const fattn_cp_options o = {.struct_size = sizeof o, .form = FATTN_CP_RING, .rows = 136};
    fattn_cp *cp;
    static const int64_t shape[4] = {1, 2, 34, 4};
    float x[3][2 * 34 * 4] = {{0}}, y[2 * 34 * 4], lse[2 * 34];
    fattn_tensor t[3];
    for (int i = 0; i < 3; ++i) t[i] = fattn_tensor_view(x[i], FATTN_F32, FATTN_CPU, 0, 4, shape);
    const fattn_tensor out = fattn_tensor_view(y, FATTN_F32, FATTN_CPU, 0, 4, shape);
    const fattn_tensor l = fattn_tensor_view(lse, FATTN_F32, FATTN_CPU, 0, 3, shape);
    fattn_attention_io io = {.struct_size = sizeof io, .q = &t[0], .k = &t[1], .v = &t[2], .o = &out, .lse = &l};
    fattn_status s = fattn_cp_create(r->comm, &o, &cp);
    if (s) return s;
    for (int n = 0; n < 3 && !s; ++n) {
        if (n == 1 && r->rank == 2) io.q = &l; /* 3 dimensions */
        s = fattn_cp_fwd(cp, NULL, &io);
    }
    fattn_cp_destroy(cp);
    return s;
}
Test(context_parallel, a_failing_rank_ends_the_call_of_all) {
    rank_call calls[4];
    run_ranks(4, NULL, leaves_ring, NULL, calls);
    for (int r = 0; r < 4; ++r) {
        cr_assert_eq(calls[r].status, r == 2 ? FATTN_E_SHAPE : FATTN_E_COMM, "%s", calls[r].error);
        if (r != 2) cr_assert_not_null(strstr(calls[r].error, "rank 2: q: "), "%s", calls[r].error);
    }
}
