#include "failing_alloc.h"

#include <criterion/criterion.h>

#include <stdlib.h>
#include <string.h>

/* Filled with 0xff: a read before the first write gives NaN. */
static void *take(void *user, size_t bytes, size_t align, fattn_stream s) {
    (void)s;
    failing_alloc *a = user;
    if (a->left == 0) return NULL;
    if (a->left > 0) --a->left;
    void *p = aligned_alloc(align, (bytes + align - 1) / align * align);
    if (!p) return NULL;
    memset(p, 0xff, bytes);
    ++a->live;
    return p;
}

static void give(void *user, void *p, size_t bytes, fattn_stream s) {
    (void)s;
    failing_alloc *a = user;
    memset(p, 0xff, bytes); /* a read after free gives NaN */
    --a->live;
    free(p);
}

fattn_ctx *failing_context(failing_alloc *a, int threads) {
    const long left = a->left;
    const fattn_ctx_options o = {.struct_size = sizeof o, .cpu_threads = threads, .allocator = {take, give, a}};
    fattn_ctx *ctx;
    a->left = -1;
    cr_assert_eq(fattn_ctx_create(&o, &ctx), FATTN_OK);
    a->left = left;
    return ctx;
}
