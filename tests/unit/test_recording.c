/* While a graph is recorded memory that is kept cannot grow, and what recorded work uses stays. A context of the CPU
   that pretends to record. */
#include "core/base/internal.h"
#include "core/comm/comm.h"
#include "core/context_parallel/cp.h"

#include <criterion/criterion.h>
#include <fattn/fattn.h>
#include <string.h>

static fattn_ctx *ctx;

static void create(void) { cr_assert_eq(fattn_ctx_create(NULL, &ctx), FATTN_OK); }

static void destroy(void) {
    cr_assert_eq(fattn_ctx_mem(ctx).live, 0);
    fattn_ctx_destroy(ctx);
}

TestSuite(recording, .init = create, .fini = destroy);

/* A call of which status and memory are given, that asked for more while recording. */
static void expect_refused(fattn_status s, size_t live) {
    cr_assert_eq(s, FATTN_E_STATE);
    cr_assert_not_null(strstr(fattn_ctx_error(ctx), "while a graph is recorded"), "%s", fattn_ctx_error(ctx));
    cr_assert_eq(fattn_ctx_mem(ctx).live, live, "something was freed");
    ctx->recording = false;
}

Test(recording, memory_of_communicators_and_context_parallelism) {
    const fattn_cp_options o = {.struct_size = sizeof o, .rows = 8};
    fattn_world *w;
    fattn_comm *comm;
    fattn_cp *cp;
    void *p[2], *again;
    cr_assert_eq(fattn_world_create(1, &w), FATTN_OK);
    cr_assert_eq(fattn_comm_join(ctx, w, 0, NULL, &comm), FATTN_OK);
    cr_assert_eq(fattn_cp_create(comm, &o, &cp), FATTN_OK);
    cr_assert_eq(fattni_comm_scratch(comm, 1024, &p[0]), FATTN_OK);
    cr_assert_eq(fattni_cp_room(cp, FATTNI_CP_WHOLE, 64, &p[1]), FATTN_OK);
    const size_t live = fattn_ctx_mem(ctx).live;
    ctx->recording = true;
    expect_refused(fattni_comm_scratch(comm, 2048, &again), live);
    ctx->recording = true;
    expect_refused(fattni_cp_room(cp, FATTNI_CP_WHOLE, 128, &again), live);
    cr_assert_eq(fattni_comm_scratch(comm, 1024, &again), FATTN_OK);
    cr_assert_eq(again, p[0]);
    cr_assert_eq(fattni_cp_room(cp, FATTNI_CP_WHOLE, 64, &again), FATTN_OK);
    cr_assert_eq(again, p[1]);
    cr_assert_eq(fattni_comm_scratch(comm, 2048, &again), FATTN_OK);
    cr_assert_eq(fattn_ctx_mem(ctx).live, live + 1024);
    fattn_cp_destroy(cp);
    fattn_comm_destroy(comm);
    fattn_world_destroy(w);
}

/* An op with a workspace. */
static fattn_status infer(fattn_op_call *c) {
    c->out[0].dtype = FATTN_F32;
    c->fwd_workspace = *(const size_t *)c->attr;
    return FATTN_OK;
}

static fattn_status forward(fattn_op_call *c) {
    memset(c->workspace, 0, *(const size_t *)c->attr);
    *(float *)c->out[0].data = 1;
    return FATTN_OK;
}

static const fattn_op_def def = {.struct_size = sizeof def,
                                 .name = "worker",
                                 .n_out = 1,
                                 .attr_size = sizeof(size_t),
                                 .infer = infer,
                                 .forward = forward};

Test(recording, workspace_of_a_tape) {
    const size_t small = 64, large = 4096;
    float x = 0;
    const fattn_tensor in = fattn_tensor_view(&x, FATTN_F32, FATTN_CPU, 0, 0, NULL);
    fattn_tape *t;
    cr_assert_eq(fattn_tape_create(ctx, &t), FATTN_OK);
    for (int n = 0; n < 2; ++n) { /* the first step allocates for the second */
        fattn_tape_reset(t);
        const fattn_var v = fattn_input(t, &in);
        cr_assert_neq(fattn_op_custom(t, &def, &v, 1, &small).id, 0, "%s", fattn_ctx_error(ctx));
    }
    fattn_tape_reset(t);
    const fattn_var v = fattn_input(t, &in);
    const size_t live = fattn_ctx_mem(ctx).live;
    ctx->recording = true;
    cr_assert_eq(fattn_op_custom(t, &def, &v, 1, &large).id, 0);
    expect_refused(fattn_tape_status(t), live);
    fattn_tape_destroy(t);
}
