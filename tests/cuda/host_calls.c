#include "host_calls.h"

#include <criterion/criterion.h>
#include <string.h>

const fattn_dtype dtypes[4] = {FATTN_BF16, FATTN_F16, FATTN_F32, FATTN_F64};
const int architectures[ARCHITECTURES] = {75, 80, 86, 87, 89, 90, 100, 103, 120, 121};

void *place(int n) { return (void *)((uintptr_t)(n + 1) << 50); }

void describe(shapes *x, fattn_dtype dtype, int64_t H, int64_t Sq, int64_t Sk, int64_t D) {
    const fattn_dtype statistic = dtype == FATTN_F64 ? FATTN_F64 : FATTN_F32;
    const int64_t rows[4] = {1, H, Sq, D}, keys[4] = {1, H, Sk, D};
    *x = (shapes){.p = {.struct_size = sizeof x->p}, .io = {.struct_size = sizeof x->io}};
    for (int n = 0; n < TENSORS; ++n)
        x->t[n] =
            fattn_tensor_view(place(n), dtype, FATTN_CUDA, 0, 4, n == K || n == V || n == DK || n == DV ? keys : rows);
    x->lse = fattn_tensor_view(place(TENSORS), statistic, FATTN_CUDA, 0, 3, rows);
    x->io.q = &x->t[Q], x->io.k = &x->t[K], x->io.v = &x->t[V], x->io.o = &x->t[O], x->io.lse = &x->lse;
    x->io.d_o = &x->t[D_O], x->io.dq = &x->t[DQ], x->io.dk = &x->t[DK], x->io.dv = &x->t[DV];
}

fattn_ctx *planner(int arch) {
    const fattn_ctx_options o = {
        .struct_size = sizeof o, .flags = FATTN_CTX_PLAN_ONLY, .device = FATTN_CUDA, .arch_cap = arch};
    fattn_ctx *ctx;
    cr_assert_eq(fattn_ctx_create(&o, &ctx), FATTN_OK, "sm_%d", arch);
    return ctx;
}

fattn_attention_plan plan_of(fattn_ctx *ctx, const shapes *x) {
    fattn_attention_plan plan = {.struct_size = sizeof plan};
    cr_assert_eq(fattn_attention_query(ctx, &x->p, &x->io, &plan), FATTN_OK, "%s", fattn_ctx_error(ctx));
    return plan;
}

const fattni_cuda_kernel *kernel_called(const fattni_cuda_kernel *const *list, const char *name) {
    while (*list && strcmp((*list)->name, name) != 0) ++list;
    cr_assert(*list, "%s", name);
    return *list;
}
