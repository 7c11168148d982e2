/* Attention with one key: O = V and L = q.k/sqrt(D), whatever the softmax. */
#include <fattn/fattn.h>

#include <float.h>
#include <math.h>
#include <stdio.h>

enum { D = 2 };

int main(void) {
    double q[D] = {3, 4}, k[D] = {0.5, -1}, v[D] = {7, -9}, o[D] = {0}, lse = 0;
    const int64_t shape[4] = {1, 1, 1, D};
    const fattn_tensor tq = fattn_tensor_view(q, FATTN_F64, FATTN_CPU, 0, 4, shape);
    const fattn_tensor tk = fattn_tensor_view(k, FATTN_F64, FATTN_CPU, 0, 4, shape);
    const fattn_tensor tv = fattn_tensor_view(v, FATTN_F64, FATTN_CPU, 0, 4, shape);
    const fattn_tensor to = fattn_tensor_view(o, FATTN_F64, FATTN_CPU, 0, 4, shape);
    const fattn_tensor tl = fattn_tensor_view(&lse, FATTN_F64, FATTN_CPU, 0, 3, shape);
    fattn_attention_io io = {.struct_size = sizeof io, .q = &tq, .k = &tk, .v = &tv, .o = &to, .lse = &tl};
    fattn_attention_plan plan = {.struct_size = sizeof plan};

    fattn_ctx *ctx;
    fattn_status s = fattn_ctx_create(NULL, &ctx);
    if (s != FATTN_OK) return fprintf(stderr, "%s\n", fattn_status_text(s)), 1;
    s = fattn_attention_query(ctx, NULL, &io, &plan);
    fattn_tensor workspace = {0};
    const int64_t bytes = (int64_t)plan.fwd_workspace;
    if (s == FATTN_OK) s = fattn_tensor_alloc(ctx, FATTN_U8, 1, &bytes, &workspace);
    io.workspace = workspace.data, io.workspace_bytes = plan.fwd_workspace;
    if (s == FATTN_OK) s = fattn_attention_fwd(ctx, NULL, &io);
    if (s != FATTN_OK) fprintf(stderr, "%s: %s\n", fattn_status_name(s), fattn_ctx_error(ctx));
    fattn_tensor_free(ctx, &workspace);
    fattn_ctx_destroy(ctx);
    printf("%s: O = %g %g, L = %.15g\n", plan.fwd_kernel, o[0], o[1], lse);
    /* A few roundings each: of exp, of the division by its sum, of scale. */
    const double error = fmax(fmax(fabs(o[0] / 7 - 1), fabs(o[1] / -9 - 1)), fabs(lse + 2.5 / sqrt(D)));
    return s != FATTN_OK || !(error <= 8 * DBL_EPSILON);
}
