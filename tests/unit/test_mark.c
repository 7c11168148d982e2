/* fattn/overlap.h on the CPU, where memory is the context's and nobody waits: contents, counters, errors. */
#include <criterion/criterion.h>
#include <fattn/fattn.h>

#include <stdint.h>
#include <string.h>

static fattn_ctx *ctx;
static void begin(void) { cr_assert_eq(fattn_ctx_create(NULL, &ctx), FATTN_OK); }
static void end(void) {
    cr_assert_eq(fattn_ctx_mem(ctx).live, 0);
    fattn_ctx_destroy(ctx);
}
TestSuite(mark, .init = begin, .fini = end);

static void expect(fattn_status got, fattn_status want, const char *message) {
    cr_assert_eq(got, want, "%s", fattn_ctx_error(ctx));
    cr_assert(strstr(fattn_ctx_error(ctx), message), "%s", fattn_ctx_error(ctx));
}

Test(mark, pinned_memory_is_a_tensor_of_the_context) {
    const int64_t shape[] = {2, 3};
    fattn_tensor pinned, other;
    cr_assert_eq(fattn_pinned_alloc(ctx, FATTN_I32, 2, shape, &pinned), FATTN_OK);
    cr_assert(pinned.device == FATTN_CPU && pinned.ndim == 2 && pinned.stride[0] == 3 && pinned.dtype == FATTN_I32);
    cr_assert_eq((uintptr_t)pinned.data % 256, 0);
    for (int i = 0; i < 6; ++i) ((int32_t *)pinned.data)[i] = i;
    cr_assert_eq(fattn_tensor_alloc(ctx, FATTN_I32, 2, shape, &other), FATTN_OK);
    cr_assert_eq(fattn_tensor_copy(ctx, &other, &pinned), FATTN_OK);
    cr_assert_eq(memcmp(other.data, pinned.data, 6 * sizeof(int32_t)), 0);
    fattn_tensor_free(ctx, &other);
    fattn_pinned_free(ctx, &pinned);
    cr_assert_null(pinned.data);
    fattn_pinned_free(ctx, &pinned);
    cr_assert_eq(fattn_pinned_alloc(ctx, FATTN_F32, 1, (int64_t[]){0}, &pinned), FATTN_OK);
    cr_assert_null(pinned.data);
    fattn_pinned_free(NULL, &pinned);
    fattn_pinned_free(ctx, NULL);
}

Test(mark, pinned_errors) {
    fattn_tensor t;
    cr_assert_eq(fattn_pinned_alloc(NULL, FATTN_F32, 0, NULL, &t), FATTN_E_ARG);
    expect(fattn_pinned_alloc(ctx, FATTN_F32, 1, NULL, &t), FATTN_E_ARG, "pinned_alloc: out or shape is NULL");
    expect(fattn_pinned_alloc(ctx, FATTN_F32, 0, NULL, NULL), FATTN_E_ARG, "pinned_alloc: out or shape is NULL");
    expect(fattn_pinned_alloc(ctx, FATTN_F32, 9, (int64_t[]){1}, &t), FATTN_E_ARG, "ndim 9 is not in 0..5");
    expect(fattn_pinned_alloc(ctx, FATTN_F32, 1, (int64_t[]){-2}, &t), FATTN_E_ARG, "pinned_alloc: shape[0] is -2");
    expect(fattn_pinned_alloc(ctx, (fattn_dtype)77, 0, NULL, &t), FATTN_E_DTYPE, "unknown dtype 77");
    expect(fattn_pinned_alloc(ctx, FATTN_F32, 2, (int64_t[]){INT64_MAX, 8}, &t), FATTN_E_NOMEM, "overflows");
    expect(fattn_pinned_alloc(ctx, FATTN_U8, 1, (int64_t[]){INT64_MAX / 2}, &t), FATTN_E_NOMEM, "no memory for");
}

Test(mark, marks_of_the_cpu_wait_for_nothing) {
    fattn_mark *m;
    cr_assert_eq(fattn_mark_create(ctx, &m), FATTN_OK);
    cr_assert_eq(fattn_mark_wait(ctx, m), FATTN_OK); /* never set */
    cr_assert_eq(fattn_mark_set(ctx, m), FATTN_OK);
    cr_assert_eq(fattn_mark_set(ctx, m), FATTN_OK);
    cr_assert_eq(fattn_mark_wait(ctx, m), FATTN_OK);
    fattn_mark_destroy(ctx, m);
    fattn_mark_destroy(ctx, NULL);
    fattn_mark_destroy(NULL, NULL);
}

Test(mark, mark_errors) {
    fattn_mark *m = (fattn_mark *)&ctx;
    cr_assert_eq(fattn_mark_create(NULL, &m), FATTN_E_ARG);
    expect(fattn_mark_create(ctx, NULL), FATTN_E_ARG, "mark_create: out is NULL");
    cr_assert_eq(fattn_mark_create(ctx, &m), FATTN_OK);
    cr_assert_eq(fattn_mark_set(NULL, m), FATTN_E_ARG);
    cr_assert_eq(fattn_mark_wait(NULL, m), FATTN_E_ARG);
    expect(fattn_mark_set(ctx, NULL), FATTN_E_ARG, "mark_set: the mark is NULL");
    expect(fattn_mark_wait(ctx, NULL), FATTN_E_ARG, "mark_wait: the mark is NULL");
    fattn_mark_destroy(ctx, m);
}
