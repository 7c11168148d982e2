/* Memory of attention: nothing from the heap, a workspace of exactly the size that the query returns, and
   nothing of size Sq*Sk. attention_run has guards around all buffers. */
#include "tiles.h"

#include <criterion/criterion.h>
#include <stdlib.h>
#include <string.h>

static fattn_attention_plan plan_of(fattn_ctx *ctx, const attention_case *c) {
    attention *const a = attention_new(ctx, c);
    fattn_attention_plan plan = {.struct_size = sizeof plan};
    cr_assert_eq(fattn_attention_query(ctx, &a->params, &a->io, &plan), FATTN_OK, "%s", fattn_ctx_error(ctx));
    attention_free(a);
    return plan;
}

static const attention_case base = {
    .name = "memory", .dtype = FATTN_F32, .B = 1, .Hq = 2, .Sq = 512, .Sk = 512, .D = 64, .flags = FATTN_CAUSAL};

/* 64 columns or keys of 192 bytes: S^T; for each row block of a piece of work Q^T and O^T, decay, max and sum. A piece
   has one row block, or four when that leaves enough pieces. For all threads counters of 24 bytes for each head. */
Test(memory, forward_scratch_is_per_thread_and_independent_of_length) {
    const size_t shared = 64 * 192 + 256, block = 2 * 64 * 192 + 2 * 256, counters = 256;
    fattn_ctx *const two = attention_context(2), *const eight = attention_context(8);
    attention_case longer = base, shorter = base;
    longer.Sq = longer.Sk = 2048, shorter.Sq = 96;
    cr_assert_eq(plan_of(two, &shorter).fwd_workspace, counters + 2 * (shared + block));
    cr_assert_eq(plan_of(two, &base).fwd_workspace, counters + 2 * (shared + 4 * block));
    cr_assert_eq(plan_of(two, &longer).fwd_workspace, counters + 2 * (shared + 4 * block));
    cr_assert_eq(plan_of(eight, &base).fwd_workspace, counters + 8 * (shared + block));
    cr_assert_eq(plan_of(eight, &longer).fwd_workspace, counters + 8 * (shared + 4 * block));
    cr_assert_eq(plan_of(two, &base).saved_bytes, 0);
    fattn_ctx_destroy(two);
    fattn_ctx_destroy(eight);
}

/* 16-bit products: also copies of K and V of all key heads, 2 bytes a number, up to 64 MiB of them. */
static void check_copies(fattn_ctx *ctx, fattn_dtype dtype) {
    attention_case c = base;
    c.dtype = dtype, c.Hq = 4, c.Hkv = 2, c.Sq = 256, c.Sk = 500;
    const size_t small = plan_of(ctx, &c).fwd_workspace;
    c.Sk = 1000;
    cr_assert_eq(plan_of(ctx, &c).fwd_workspace - small, 2 * (1024 - 512) * (64 + 64) * 2);
    c.Sk = (64 << 20) / (2 * 128 * 2);
    cr_assert_eq(plan_of(ctx, &c).fwd_workspace - small, (64 << 20) - 2 * 512 * 128 * 2);
    ++c.Sk;
    cr_assert_eq(small - plan_of(ctx, &c).fwd_workspace, 2 * 512 * 128 * 2);
    c.Sk = 1000, c.Hkv = 4, c.Sq = 32; /* one block of rows for each head: nothing is used twice */
    const size_t one = plan_of(ctx, &c).fwd_workspace;
    c.Sk = 500;
    cr_assert_eq(plan_of(ctx, &c).fwd_workspace, one);
}

Test(memory, copies_of_keys) {
    for (int isa = FATTNI_ISA_AVX512BF16; isa <= FATTNI_ISA_AMXFP16; ++isa) {
        fattn_ctx *const ctx = attention_context_isa(2, isa);
        if (!ctx) continue;
        check_copies(ctx, FATTN_BF16);
        if (isa >= FATTNI_ISA_AMXFP16) check_copies(ctx, FATTN_F16);
        fattn_ctx_destroy(ctx);
    }
}

/* delta, and m and log l of huge rows, have one number per row each; the rest is per thread and does not grow
   with the length. */
Test(memory, backward_grows_with_rows_only) {
    fattn_ctx *const ctx = attention_context(2);
    attention_case c = base;
    size_t bytes[3];
    for (int n = 0; n < 3; ++n) {
        c.Sq = c.Sk = 1024 << n;
        bytes[n] = plan_of(ctx, &c).bwd_workspace;
    }
    cr_assert_eq(bytes[1] - bytes[0], 3 * 2 * 1024 * sizeof(float));
    cr_assert_eq(bytes[2] - bytes[1], 3 * 2 * 2048 * sizeof(float));
    c.delta = true;
    for (int n = 0; n < 3; ++n) {
        c.Sq = c.Sk = 1024 << n;
        cr_assert_eq(bytes[n] - plan_of(ctx, &c).bwd_workspace, 2 * (size_t)c.Sq * sizeof(float));
    }
    fattn_ctx_destroy(ctx);
}

/* Threads without a task have no scratch. */
Test(memory, no_more_scratch_than_tasks) {
    fattn_ctx *const few = attention_context(3), *const many = attention_context(16);
    attention_case c = base;
    c.Sq = 3, c.Hq = 3;
    cr_assert_eq(plan_of(few, &c).fwd_workspace, plan_of(many, &c).fwd_workspace);
    c.B = 0;
    cr_assert_eq(plan_of(many, &c).fwd_workspace, 0);
    cr_assert_eq(plan_of(many, &c).bwd_workspace, 0);
    fattn_ctx_destroy(few);
    fattn_ctx_destroy(many);
}

/* A gradient that is not requested needs no scratch. */
Test(memory, unwanted_gradients) {
    fattn_ctx *const ctx = attention_context(1);
    attention_case c = base;
    const size_t all = plan_of(ctx, &c).bwd_workspace;
    c.omit = NO_DK | NO_DV;
    const size_t dq = plan_of(ctx, &c).bwd_workspace;
    c.omit = NO_DQ;
    const size_t keys = plan_of(ctx, &c).bwd_workspace;
    cr_assert_lt(dq, all);
    cr_assert_lt(keys, all);
    fattn_ctx_destroy(ctx);
}

static fattn_status run(attention *a, bool backward) {
    return backward ? fattn_attention_bwd(a->ctx, &a->params, &a->io) : fattn_attention_fwd(a->ctx, &a->params, &a->io);
}

Test(memory, a_byte_less_or_misaligned_is_rejected) {
    fattn_ctx *const ctx = attention_context(2);
    attention *const a = attention_new(ctx, &base);
    attention_run(a, LIBRARY);
    for (int backward = 0; backward < 2; ++backward) {
        const size_t bytes = backward ? a->plan.bwd_workspace : a->plan.fwd_workspace;
        void *const workspace = a->io.workspace;
        a->io.workspace_bytes = bytes - 1;
        cr_assert_eq(run(a, backward), FATTN_E_WORKSPACE);
        a->io.workspace_bytes = bytes;
        a->io.workspace = (char *)workspace + 64;
        cr_assert_eq(run(a, backward), FATTN_E_WORKSPACE);
        a->io.workspace = NULL;
        cr_assert_eq(run(a, backward), FATTN_E_WORKSPACE);
        a->io.workspace = workspace;
    }
    attention_free(a);
    fattn_ctx_destroy(ctx);
}

/* The peak of a layer, forward and backward, as counted by the allocator: a step with N x N stored also
   holds P. */
Test(memory, plan_against_materialised) {
    fattn_ctx *const ctx = attention_context(2);
    attention_case c = base;
    c.Sq = c.Sk = 2048;
    const fattn_attention_plan plan = plan_of(ctx, &c);
    cr_assert_eq(plan.materialized_bytes, 2u * 2048 * 2048 * sizeof(float));
    cr_assert_eq(plan.lse_bytes, 2u * 2048 * sizeof(float));
    cr_assert_lt(plan.fwd_workspace + plan.bwd_workspace + plan.lse_bytes, plan.materialized_bytes / 20);
    fattn_ctx_destroy(ctx);
}

/* ---- to the byte ---- */

static const fattn_dtype dtypes[4] = {FATTN_F64, FATTN_F32, FATTN_F16, FATTN_BF16};

/* Sizes that use every part of a workspace completely; each feature that has its own part. */
#define FULL .B = 1, .Hq = 2, .Hkv = 1, .Sq = 192, .Sk = 512, .D = 64
static const attention_case full[] = {
    {"plain", FULL},
    {"bias", FULL, .bias = BIAS},
    {"bias, F32", FULL, .bias = BIAS | BIAS_F32},
    {"softcap", FULL, .softcap = 2},
    {"dropout", FULL, .dropout_p = 0.2f},
    {"delta", FULL, .delta = true},
    {"F32 outputs", FULL, .wide = true},
    {"whole vectors need padding", .B = 1, .Hq = 2, .Hkv = 1, .Sq = 192, .Sk = 512, .D = 60, .Dv = 44},
    {"all", FULL, .bias = BIAS, .softcap = 2, .dropout_p = 0.2f, .sink = true, .alibi = true},
    {"only dQ", FULL, .omit = NO_DK | NO_DV},
    {"only dK", FULL, .omit = NO_DQ | NO_DV},
    {"only dV", FULL, .omit = NO_DQ | NO_DK},
};
enum { FULL_COUNT = sizeof full / sizeof *full };

/* The end of the bytes of the workspace that a pass has written. */
static size_t used(const attention *a) {
    size_t end = a->workspace.size;
    while (end > 0 && a->workspace.memory[end - 1] == a->workspace.initial[end - 1]) --end;
    return end > FATTNI_ALIGN ? end - FATTNI_ALIGN : 0;
}

/* A pass writes the last part of the workspace that the query requests; writes outside of it would fail in the
   guards of attention_run. */
Test(memory, the_whole_workspace_is_used) {
    fattn_ctx *const ctx = attention_context(1);
    for (int n = 0; n < 4 * FULL_COUNT; ++n)
        for (int way = 0; way < 2; ++way) {
            attention_case c = full[n / 4];
            c.dtype = dtypes[n % 4];
            c.algorithm = way ? FATTN_ALGO_FLASH1 : FATTN_ALGO_AUTO;
            attention *const a = attention_new(ctx, &c);
            attention_forward(a, LIBRARY);
            cr_assert_gt(used(a) + FATTNI_ALIGN, a->plan.fwd_workspace, "%s %s: forward uses %zu of %zu", c.name,
                         fattn_dtype_name(c.dtype), used(a), a->plan.fwd_workspace);
            memcpy(a->workspace.memory, a->workspace.initial, a->workspace.size);
            attention_backward(a, LIBRARY);
            cr_assert_gt(used(a) + FATTNI_ALIGN, a->plan.bwd_workspace, "%s %s: backward uses %zu of %zu", c.name,
                         fattn_dtype_name(c.dtype), used(a), a->plan.bwd_workspace);
            attention_free(a);
        }
    fattn_ctx_destroy(ctx);
}

/* With the maximum of threads, and as many tasks: every algorithm's sizes are at most that of one thread times
   the threads. */
Test(memory, the_most_threads_do_not_wrap_sizes) {
    fattn_ctx *const one = attention_context(1), *const most = attention_context(FATTNI_MOST_THREADS);
    static double nothing[256];
    const int64_t shape[] = {1 << 16, 16, 1 << 16, 256}; /* stride 0: no memory behind it */
    for (int n = 0; n < 4; ++n)
        for (int32_t algorithm = FATTN_ALGO_AUTO; algorithm <= FATTN_ALGO_FLASH2; ++algorithm) {
            fattn_tensor x = fattn_tensor_view(nothing, dtypes[n], FATTN_CPU, 0, 4, shape), y, lse;
            y = x;
            for (int d = 0; d < 3; ++d) x.stride[d] = 0;
            const fattn_dtype wide = dtypes[n] == FATTN_F64 ? FATTN_F64 : FATTN_F32;
            lse = fattn_tensor_view(nothing, wide, FATTN_CPU, 0, 3, shape);
            const fattn_attention_params p = {.struct_size = sizeof p, .algorithm = algorithm};
            const fattn_attention_io io = {.struct_size = sizeof io, .q = &x, .k = &x, .v = &x, .o = &y, .lse = &lse};
            fattn_attention_plan a = {.struct_size = sizeof a}, b = a;
            cr_assert_eq(fattn_attention_query(one, &p, &io, &a), FATTN_OK, "%s", fattn_ctx_error(one));
            cr_assert_eq(fattn_attention_query(most, &p, &io, &b), FATTN_OK);
            cr_assert(b.fwd_workspace >= a.fwd_workspace && b.fwd_workspace / FATTNI_MOST_THREADS <= a.fwd_workspace,
                      "%d: %zu, %zu", algorithm, a.fwd_workspace, b.fwd_workspace);
            cr_assert_leq(b.bwd_workspace / FATTNI_MOST_THREADS, a.bwd_workspace);
            cr_assert_lt(b.bwd_workspace, (size_t)1 << 62);
        }
    fattn_ctx_destroy(one);
    fattn_ctx_destroy(most);
}

/* Counts the library's allocations. */
typedef struct counter {
    size_t live, peak, calls;
} counter;

static void *count_alloc(void *user, size_t bytes, size_t align, fattn_stream stream) {
    (void)stream;
    counter *const c = user;
    c->live += bytes, c->calls += 1;
    if (c->live > c->peak) c->peak = c->live;
    return aligned_alloc(align, (bytes + align - 1) / align * align);
}
static void count_free(void *user, void *p, size_t bytes, fattn_stream stream) {
    (void)stream;
    ((counter *)user)->live -= bytes;
    free(p);
}

/* A layer as in a caller's program: its tensors, then the workspace of one pass and of the other. The allocator
   counts the tensors, the sizes of the query, and nothing else. */
static void check_peak(const attention_case *given, int threads) {
    counter count = {0};
    const fattn_ctx_options o = {
        .struct_size = sizeof o, .cpu_threads = threads, .allocator = {count_alloc, count_free, &count}};
    fattn_ctx *counted, *const plain = attention_context(threads);
    cr_assert_eq(fattn_ctx_create(&o, &counted), FATTN_OK);
    const size_t before = count.live;
    attention *const a = attention_new(plain, given);
    fattn_attention_io io = a->io;
    const fattn_tensor **const slots[] = {&io.q,     &io.k,    &io.v,      &io.o,     &io.lse,   &io.bias,
                                          &io.alibi, &io.sink, &io.d_o,    &io.d_lse, &io.delta, &io.dq,
                                          &io.dk,    &io.dv,   &io.d_bias, &io.d_sink};
    enum { SLOTS = sizeof slots / sizeof *slots };
    fattn_tensor t[SLOTS], room;
    size_t tensors = 0;
    for (int n = 0; n < SLOTS; ++n) {
        if (!*slots[n]) continue;
        const fattn_tensor *const like = *slots[n];
        cr_assert_eq(fattn_tensor_alloc(counted, (fattn_dtype)like->dtype, like->ndim, like->shape, &t[n]), FATTN_OK);
        cr_assert_eq(fattn_tensor_copy(plain, &t[n], like), FATTN_OK);
        *slots[n] = &t[n];
        tensors += (size_t)fattn_tensor_numel(like) * fattn_dtype_size((fattn_dtype)like->dtype);
    }
    fattn_attention_plan plan = {.struct_size = sizeof plan};
    cr_assert_eq(fattn_attention_query(counted, &a->params, &io, &plan), FATTN_OK);
    cr_assert_eq(count.live - before, tensors, "%s: %zu bytes of tensors, %zu counted", given->name, tensors,
                 count.live - before);
    fattn_tensor saved = {0};
    const int64_t kept = (int64_t)plan.saved_bytes;
    if (kept) cr_assert_eq(fattn_tensor_alloc(counted, FATTN_U8, 1, &kept, &saved), FATTN_OK);
    io.saved = saved.data, io.saved_bytes = plan.saved_bytes;
    for (int pass = 0; pass < 2; ++pass) {
        const size_t bytes = pass ? plan.bwd_workspace : plan.fwd_workspace;
        const int64_t size = (int64_t)bytes;
        count.peak = count.live;
        room = (fattn_tensor){0};
        if (size) cr_assert_eq(fattn_tensor_alloc(counted, FATTN_U8, 1, &size, &room), FATTN_OK);
        io.workspace = room.data, io.workspace_bytes = bytes;
        const size_t calls = count.calls;
        cr_assert_eq((pass ? fattn_attention_bwd : fattn_attention_fwd)(counted, &a->params, &io), FATTN_OK, "%s",
                     fattn_ctx_error(counted));
        cr_assert_eq(count.calls, calls, "%s: the call allocated", given->name);
        if (size) fattn_tensor_free(counted, &room);
        cr_assert_eq(count.peak - before, tensors + plan.saved_bytes + bytes, "%s: predicted %zu, counted %zu",
                     given->name, tensors + plan.saved_bytes + bytes, count.peak - before);
    }
    cr_assert_eq(fattn_ctx_mem(counted).live, count.live - before);
    if (kept) fattn_tensor_free(counted, &saved);
    for (int n = 0; n < SLOTS; ++n)
        if (*slots[n]) fattn_tensor_free(counted, &t[n]);
    cr_assert_eq(count.live, before);
    attention_free(a);
    fattn_ctx_destroy(counted);
    fattn_ctx_destroy(plain);
}

Test(memory, predicted_peak_equals_the_allocators) {
    for (int n = 0; n < 4 * FULL_COUNT; ++n)
        for (int32_t algorithm = 0; algorithm <= FATTN_ALGO_FLASH2; ++algorithm) {
            attention_case c = full[n / 4];
            c.dtype = dtypes[n % 4];
            c.algorithm = algorithm;
            c.Sq = 50, c.Sk = 130; /* any size */
            check_peak(&c, 1 + n % 5);
        }
}

/* materialized_bytes: P in the inputs' dtype, a byte per element of the dropout mask; and lse_bytes. */
Test(memory, materialized_bytes) {
    fattn_ctx *const ctx = attention_context(2);
    for (int n = 0; n < 8; ++n) {
        attention_case c = {.name = "N x N",
                            .B = 3,
                            .Hq = 4,
                            .Hkv = 2,
                            .Sq = 70,
                            .Sk = 90,
                            .D = 8,
                            .dtype = dtypes[n / 2],
                            .dropout_p = n % 2 ? 0.5f : 0};
        const fattn_attention_plan plan = plan_of(ctx, &c);
        const size_t matrix = 3 * 4 * 70 * 90, statistic = c.dtype == FATTN_F64 ? 8 : 4;
        cr_assert_eq(plan.materialized_bytes, matrix * (fattn_dtype_size(c.dtype) + (c.dropout_p > 0)));
        cr_assert_eq(plan.lse_bytes, 3 * 4 * 70 * statistic);
        cr_assert_eq(plan.saved_bytes, 0);
        c.algorithm = FATTN_ALGO_STANDARD;
        cr_assert_eq(plan_of(ctx, &c).saved_bytes, (plan.materialized_bytes + 7) / 8 * 8 + plan.lse_bytes);
    }
    fattn_ctx_destroy(ctx);
}
