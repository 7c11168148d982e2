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
        double *const want = cp_op(FATTN_CPU, 1, FATTN_CP_ULYSSES, loss, &n);
        double largest = 0;
        for (int64_t i = 0; i < n; ++i) largest = fmax(largest, fabs(want[i]));
        cr_assert_gt(largest, 1);
        for (int form = FATTN_CP_RING; form <= FATTN_CP_ULYSSES; ++form)
            for (int ranks = 2; ranks <= 4; ++ranks) {
                if (form == FATTN_CP_ULYSSES && ranks == 3) continue; /* 4 heads */
                double *const got = cp_op(FATTN_CPU, ranks, form, loss, &n);
                for (int64_t i = 0; i < n; ++i)
                    cr_assert_leq(fabs(got[i] - want[i]), 1e-13 * largest, "loss %d, form %d, %d ranks: [%lld]", loss,
                                  form, ranks, (long long)i);
                free(got);
            }
        free(want);
    }
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
