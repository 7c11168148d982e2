/* What attention takes: nothing from the heap, a workspace that the query knows to the byte, and
   never anything of size Sq*Sk. The guards around all buffers are attention_run's. */
#include "tiles.h"

#include <criterion/criterion.h>
#include <string.h>

static fattn_attention_plan plan_of(fattn_ctx *ctx, const attention_case *c) {
    attention *const a = attention_new(ctx, c);
    fattn_attention_plan plan = {.struct_size = sizeof plan};
    cr_assert_eq(fattn_attention_query(ctx, &a->params, &a->io, &plan), FATTN_OK, "%s",
                 fattn_ctx_error(ctx));
    attention_free(a);
    return plan;
}

static const attention_case base = {.name = "memory", .dtype = FATTN_F32, .B = 1, .Hq = 2, .Sq = 512,
                                    .Sk = 512, .D = 64, .flags = FATTN_CAUSAL};

Test(memory, forward_scratch_is_per_thread_and_independent_of_length) {
    fattn_ctx *const two = attention_context(2), *const eight = attention_context(8);
    attention_case longer = base;
    longer.Sq = longer.Sk = 2048;
    const size_t bytes = plan_of(two, &base).fwd_workspace;
    /* Q^T, S^T, O^T: 64 columns or keys of 192 bytes; max, sum, decay */
    cr_assert_eq(bytes, 2 * (3 * 64 * 192 + 3 * 256));
    cr_assert_eq(plan_of(two, &longer).fwd_workspace, bytes);
    cr_assert_eq(plan_of(eight, &longer).fwd_workspace, 4 * bytes);
    cr_assert_eq(plan_of(two, &base).saved_bytes, 0);
    fattn_ctx_destroy(two);
    fattn_ctx_destroy(eight);
}

/* delta is one number per row; all else belongs to threads and does not grow with the length. */
Test(memory, backward_grows_with_rows_only) {
    fattn_ctx *const ctx = attention_context(2);
    attention_case c = base;
    size_t bytes[3];
    for (int n = 0; n < 3; ++n) {
        c.Sq = c.Sk = 1024 << n;
        bytes[n] = plan_of(ctx, &c).bwd_workspace;
    }
    cr_assert_eq(bytes[1] - bytes[0], 2 * 1024 * sizeof(float));
    cr_assert_eq(bytes[2] - bytes[1], 2 * 2048 * sizeof(float));
    c.delta = true;
    for (int n = 0; n < 3; ++n) {
        c.Sq = c.Sk = 1024 << n;
        cr_assert_eq(bytes[n] - plan_of(ctx, &c).bwd_workspace, 2 * (size_t)c.Sq * sizeof(float));
    }
    fattn_ctx_destroy(ctx);
}

/* Threads that could have no task have no scratch. */
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

/* A gradient that nobody wants costs no scratch. */
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
    return backward ? fattn_attention_bwd(a->ctx, &a->params, &a->io)
                    : fattn_attention_fwd(a->ctx, &a->params, &a->io);
}

Test(memory, a_byte_less_or_misaligned_is_refused) {
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

/* The peak of a layer, forward and backward, on the allocator's ruler: a step with N x N stored
   holds P as well. */
Test(memory, plan_against_materialised) {
    fattn_ctx *const ctx = attention_context(2);
    attention_case c = base;
    c.Sq = c.Sk = 2048;
    const fattn_attention_plan plan = plan_of(ctx, &c);
    cr_assert_eq(plan.materialized_bytes, 2u * 2048 * 2048 * sizeof(float));
    cr_assert_eq(plan.lse_bytes, 2u * 2048 * sizeof(float));
    cr_assert_lt(plan.fwd_workspace + plan.bwd_workspace + plan.lse_bytes,
                 plan.materialized_bytes / 20);
    fattn_ctx_destroy(ctx);
}
