/* C = op(A) op(B) over equal leading dimensions; op transposes the last two when its flag is set.
   Backward, for C = A B: dA = dC B^T, dB = A^T dC, transposed where the operand was. Saves nothing. */
#include "autograd_c/ops/ops.h"

typedef struct matmul {
    int32_t trans_a, trans_b;
} matmul;

enum { A = 0, B = 1 };

/* What one operand's gradient is a product of. */
static fattni_product gradient_of(const matmul *m, int which, const fattn_tensor *a, const fattn_tensor *b,
                                  const fattn_tensor *d_out, const fattn_tensor *d_in) {
    const bool ta = m->trans_a, tb = m->trans_b;
    if (which == A && !ta) return (fattni_product){.a = d_out, .b = b, .c = d_in, .trans_b = !tb};
    if (which == A) return (fattni_product){.a = b, .b = d_out, .c = d_in, .trans_a = tb, .trans_b = true};
    if (!tb) return (fattni_product){.a = a, .b = d_out, .c = d_in, .trans_a = !ta};
    return (fattni_product){.a = d_out, .b = a, .c = d_in, .trans_a = true, .trans_b = ta};
}

static fattn_status infer(fattn_op_call *c) {
    const matmul *m = c->attr;
    FATTNI_TRY(fattni_check_real(c, "matmul", "a", A));
    FATTNI_TRY(fattni_check_real(c, "matmul", "b", B));
    const fattn_tensor *a = &c->in[A], *b = &c->in[B];
    const int n = a->ndim;
    bool fits = n >= 2 && b->ndim == n;
    for (int d = 0; fits && d < n - 2; ++d) fits = a->shape[d] == b->shape[d];
    if (!fits || a->shape[m->trans_a ? n - 2 : n - 1] != b->shape[m->trans_b ? n - 1 : n - 2]) {
        static const char *const rules[] = {"[..,M,K] x [..,K,N] is needed", "[..,M,K] x [..,N,K] is needed",
                                            "[..,K,M] x [..,K,N] is needed", "[..,K,M] x [..,N,K] is needed"};
        return fattni_misfit(c, "matmul", "a", A, "b", B, rules[(m->trans_a ? 2 : 0) + (m->trans_b ? 1 : 0)]);
    }
    fattni_out_like(c, A);
    c->out[0].shape[n - 2] = a->shape[m->trans_a ? n - 1 : n - 2];
    c->out[0].shape[n - 1] = b->shape[m->trans_b ? n - 2 : n - 1];
    FATTNI_TRY(fattni_check_extents(c, "matmul"));
    const int64_t M = c->out[0].shape[n - 2], N = c->out[0].shape[n - 1], K = a->shape[m->trans_a ? n - 2 : n - 1];
    FATTNI_TRY(fattni_check_product(c, "matmul", M, N, K));
    FATTNI_TRY(fattni_choose_products(c, M, N, K));

    const fattn_tensor y = fattni_row_major(&c->out[0], NULL);
    c->fwd_workspace = fattni_product_workspace(
        c->ctx, &(fattni_product){.a = a, .b = b, .c = &y, .trans_a = m->trans_a, .trans_b = m->trans_b});
    for (int i = A; i <= B; ++i) {
        const fattni_product p = gradient_of(m, i, a, b, &y, &c->in[i]);
        const size_t bytes = c->wanted[i] ? fattni_product_workspace(c->ctx, &p) : 0;
        if (bytes > c->bwd_workspace) c->bwd_workspace = bytes;
    }
    return FATTN_OK;
}

static fattn_status forward(fattn_op_call *c) {
    const matmul *m = c->attr;
    const fattni_product p = {
        .a = &c->in[A], .b = &c->in[B], .c = &c->out[0], .trans_a = m->trans_a, .trans_b = m->trans_b};
    return fattni_product_run(c->ctx, &p, c->workspace);
}

static fattn_status backward(fattn_op_call *c) {
    FATTNI_TRY(fattni_check_gradients(c, "matmul"));
    for (int i = A; i <= B; ++i) {
        if (!c->d_in[i].data) continue;
        fattni_product p = gradient_of(c->attr, i, &c->in[A], &c->in[B], &c->d_out[0], &c->d_in[i]);
        p.add = !c->d_in_fresh[i];
        FATTNI_TRY(fattni_product_run(c->ctx, &p, c->workspace));
    }
    return FATTN_OK;
}

const fattn_op_def fattni_op_matmul = {.struct_size = sizeof(fattn_op_def),
                                       .attr_size = sizeof(matmul),
                                       .n_out = 1,
                                       .flags = FATTN_OP_F32_ON_CPU,
                                       .name = "matmul",
                                       .infer = infer,
                                       .forward = forward,
                                       .backward = backward};

fattn_var fattn_op_matmul(fattn_tape *t, fattn_var a, fattn_var b, int trans_a, int trans_b) {
    return fattn_op_custom(t, &fattni_op_matmul, (fattn_var[]){a, b}, 2, &(matmul){trans_a != 0, trans_b != 0});
}
