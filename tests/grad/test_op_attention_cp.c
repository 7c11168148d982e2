/* Attention over ranks as an op: losses and gradients of any number of ranks are those of one. */
#include "cp.h"
#include "ranks.h"
#include "suite.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

TestSuite(attention_cp, .init = open_tape, .fini = close_tape);

Test(attention_cp, gradients_of_one_rank) {
    for (int loss = 1; loss <= 3; ++loss) {
        int64_t n;
        double *const want = cp_op(FATTN_CPU, 1, FATTN_CP_ULYSSES, false, loss, &n);
        double largest = 0;
        for (int64_t i = 0; i < n; ++i) largest = fmax(largest, fabs(want[i]));
        cr_assert_gt(largest, 1);
        for (int form = FATTN_CP_RING; form <= FATTN_CP_ULYSSES; ++form)
            for (int ranks = 2; ranks <= 4; ++ranks) {
                if (form == FATTN_CP_ULYSSES && ranks == 3) continue; /* 4 heads */
                for (int save = 0; save < 2; ++save) {
                    double *const got = cp_op(FATTN_CPU, ranks, form, save, loss, &n);
                    for (int64_t i = 0; i < n; ++i)
                        cr_assert_leq(fabs(got[i] - want[i]), 1e-13 * largest,
                                      "loss %d, form %d, %d ranks, save %d: [%lld]", loss, form, ranks, save,
                                      (long long)i);
                    free(got);
                }
            }
        free(want);
    }
}

/* Few rows: a chunk has at least 17, so that some ranks have none. Gradients of a packed projection, and the loss. */
enum { FEW = 40, H = 4, D = 4, C = H * D, WEIGHTS = 3 * C * C };
enum { OF_O = 1, OF_LSE = 2, OF_FIRST = 4 }; /* the loss; of the first 17 rows of lse, which rank 0 has */

typedef struct few {
    int64_t N;
    int form, loss;
    uint32_t flags;
    double out[WEIGHTS + 1];
} few;

static fattn_var square(fattn_tape *t, fattn_var x) { return fattn_op_sum(t, fattn_op_mul(t, x, x), NULL, 0, 0); }

static fattn_var few_loss(const rank_call *r, fattn_cp *cp, fattn_tape *t, fattn_var x, fattn_var w) {
    const few *const f = r->arg;
    const fattn_attention_params p = {.struct_size = sizeof p, .flags = f->flags};
    const fattn_var h = fattn_op_linear(t, x, w, (fattn_var){0});
    const fattn_attention_vars vars = {.struct_size = sizeof vars,
                                       .q = fattn_op_heads(t, h, 0, H, D),
                                       .k = fattn_op_heads(t, h, H, H, D),
                                       .v = fattn_op_heads(t, h, 2 * H, H, D)};
    fattn_var lse, sum = {0};
    const fattn_var o = fattn_op_merge(t, fattn_op_attention_cp(t, cp, &vars, &p, &lse));
    if (f->loss & OF_O) sum = square(t, o);
    if (f->loss & OF_FIRST) lse = fattn_op_slice(t, lse, 2, 0, r->rank ? 0 : 17);
    if (!(f->loss & (OF_LSE | OF_FIRST))) return sum;
    return sum.id ? fattn_op_add(t, sum, square(t, lse)) : square(t, lse);
}

static fattn_status few_step(rank_call *r, fattn_cp *cp, fattn_tape *t) {
    few *const f = r->arg;
    const int64_t whole[] = {1, f->N, C}, local[] = {1, fattn_cp_rows(cp), C}, shape[] = {3 * C, C};
    double all[FEW * C], rows[FEW * C], weights[WEIGHTS], result[WEIGHTS + 1] = {0};
    const fattn_tensor from = fattn_tensor_view(all, FATTN_F64, FATTN_CPU, 0, 3, whole);
    const fattn_tensor x = fattn_tensor_view(rows, FATTN_F64, FATTN_CPU, 0, 3, local);
    fattn_param w = {.value = fattn_tensor_view(weights, FATTN_F64, FATTN_CPU, 0, 2, shape),
                     .grad = fattn_tensor_view(result, FATTN_F64, FATTN_CPU, 0, 2, shape)};
    fattn_status s = fattn_tensor_normal(r->ctx, &from, 0, 1, (fattn_rng){.seed = 5});
    if (!s) s = fattn_tensor_normal(r->ctx, &w.value, 0, 0.3f, (fattn_rng){.seed = 6});
    if (!s) s = fattn_cp_take(cp, &from, 1, &x);
    const fattn_var loss = few_loss(r, cp, t, fattn_input(t, &x), fattn_use(t, &w));
    if (!s) s = fattn_tape_backward(t, loss);
    if (!s) s = fattn_tape_item(t, loss, &result[WEIGHTS]);
    const fattn_tensor sum = fattn_tensor_view(result, FATTN_F64, FATTN_CPU, 0, 1, (const int64_t[]){WEIGHTS + 1});
    if (!s) s = fattn_comm_all_reduce(r->comm, &sum);
    if (r->rank == 0) memcpy(f->out, result, sizeof result);
    return s;
}

static fattn_status few_on_rank(rank_call *r) {
    const few *const f = r->arg;
    const fattn_cp_options o = {.struct_size = sizeof o, .form = f->form, .rows = f->N};
    fattn_cp *cp = NULL;
    fattn_tape *t = NULL;
    fattn_status s = fattn_cp_create(r->comm, &o, &cp);
    if (!s) s = fattn_tape_create(r->ctx, &t);
    if (!s) s = few_step(r, cp, t);
    fattn_tape_destroy(t);
    fattn_cp_destroy(cp);
    return s;
}

Test(attention_cp, ranks_without_rows) {
    static const int losses[] = {OF_O, OF_LSE, OF_O | OF_LSE, OF_FIRST};
    static const int64_t lengths[] = {20, FEW};
    static few want, got;
    const ranks_options limit = {.time_limit = 10};
    for (int k = 0; k < 16; ++k) {
        want = (few){.N = lengths[k % 2],
                     .form = FATTN_CP_ULYSSES,
                     .loss = losses[k / 2 % 4],
                     .flags = FATTN_CAUSAL | (k / 8 ? FATTN_DETERMINISTIC : 0u)};
        expect_ranks(1, NULL, few_on_rank, &want);
        double largest = 0;
        for (int i = 0; i <= WEIGHTS; ++i) largest = fmax(largest, fabs(want.out[i]));
        cr_assert_gt(largest, 1);
        for (int form = FATTN_CP_AUTO; form <= FATTN_CP_ULYSSES; ++form)
            for (int ranks = 2; ranks <= 4; ranks *= 2) {
                got = want;
                got.form = form;
                expect_ranks(ranks, &limit, few_on_rank, &got);
                for (int i = 0; i <= WEIGHTS; ++i)
                    cr_assert_leq(fabs(got.out[i] - want.out[i]), 1e-13 * largest, "case %d, form %d, %d ranks: [%d]",
                                  k, form, ranks, i);
            }
    }
}

/* Parameters in 16 bits with F32 gradients, which an idle rank's have, too. */
static fattn_status wide_gradients_on_rank(rank_call *r) {
    const fattn_cp_options o = {.struct_size = sizeof o, .form = *(const int *)r->arg, .rows = 20};
    fattn_cp *cp = NULL;
    fattn_tape *t = NULL;
    fattn_status s = fattn_cp_create(r->comm, &o, &cp);
    if (!s) s = fattn_tape_create(r->ctx, &t);
    if (s) return s;
    const int64_t shape[] = {1, H, fattn_cp_rows(cp), D};
    uint16_t numbers[20 * C];
    float gradient[20 * C] = {0};
    fattn_param p = {.value = fattn_tensor_view(numbers, FATTN_BF16, FATTN_CPU, 0, 4, shape),
                     .grad = fattn_tensor_view(gradient, FATTN_F32, FATTN_CPU, 0, 4, shape)};
    s = fattn_tensor_normal(r->ctx, &p.value, 0, 1, (fattn_rng){.seed = 7});
    const fattn_var x = fattn_use(t, &p);
    const fattn_attention_vars vars = {.struct_size = sizeof vars, .q = x, .k = x, .v = x};
    if (!s) s = fattn_tape_backward(t, square(t, fattn_op_attention_cp(t, cp, &vars, NULL, NULL)));
    for (int64_t i = 0; !s && i < fattn_tensor_numel(&p.grad); ++i)
        if (gradient[i] == 0) s = FATTN_E_MISMATCH;
    fattn_tape_destroy(t);
    fattn_cp_destroy(cp);
    return s;
}

Test(attention_cp, wide_gradients_without_rows) {
    const ranks_options limit = {.time_limit = 10};
    for (int form = FATTN_CP_RING; form <= FATTN_CP_ULYSSES; ++form)
        expect_ranks(2, &limit, wide_gradients_on_rank, &form);
}

/* What the op refuses itself. */
Test(attention_cp, errors) {
    fattn_world *w;
    fattn_comm *comm;
    fattn_cp *cp;
    cr_assert_eq(fattn_world_create(1, &w), FATTN_OK);
    cr_assert_eq(fattn_comm_join(ctx, w, 0, NULL, &comm), FATTN_OK);
    const fattn_cp_options o = {.struct_size = sizeof o, .rows = 3};
    cr_assert_eq(fattn_cp_create(comm, &o, &cp), FATTN_OK);
    float numbers[2 * 3 * 4] = {0};
    const fattn_tensor x = fattn_tensor_view(numbers, FATTN_F32, FATTN_CPU, 0, 4, (const int64_t[]){1, 2, 3, 4});
    const fattn_tensor flat = fattn_tensor_view(numbers, FATTN_F32, FATTN_CPU, 0, 1, (const int64_t[]){2});
    for (int n = 0; n < 6; ++n) {
        static const struct {
            fattn_status status;
            const char *text;
        } want[] = {{FATTN_E_ARG, "k is absent"},     {FATTN_E_SHAPE, "k has 1 dimensions"},
                    {FATTN_E_ARG, "flags 0x100"},     {FATTN_E_UNSUPPORTED, "bias and lengths"},
                    {FATTN_E_ARG, "variables or cp"}, {FATTN_E_UNSUPPORTED, "FATTN_MERGE"}};
        const fattn_var q = fattn_input(tape, &x), one = fattn_input(tape, &flat);
        fattn_attention_vars vars = {.struct_size = sizeof vars, .q = q, .k = q, .v = q};
        fattn_attention_params p = {.struct_size = sizeof p};
        if (n == 0) vars.k = (fattn_var){0};
        if (n == 1) vars.k = one;
        if (n == 2) p.flags = FATTN_ACC_DQ;
        if (n == 3) vars.bias = q;
        if (n == 5) p.flags = FATTN_MERGE; /* ends the group: the last */
        const fattn_var y = fattn_op_attention_cp(tape, n == 4 ? NULL : cp, &vars, &p, NULL);
        cr_assert_eq(y.id, 0);
        cr_assert_eq(fattn_tape_status(tape), want[n].status, "%d: %s", n, fattn_ctx_error(ctx));
        cr_assert_not_null(strstr(fattn_ctx_error(ctx), want[n].text), "%d: %s", n, fattn_ctx_error(ctx));
        fattn_tape_reset(tape);
    }
    fattn_cp_destroy(cp);
    fattn_comm_destroy(comm);
    fattn_world_destroy(w);
}
