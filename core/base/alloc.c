/* All heap allocation of the library, and its counters. */
#if defined(__linux__)
#define _DEFAULT_SOURCE /* madvise */
#endif
#include "core/base/device.h"

#include <stdlib.h>
#if defined(__linux__)
#include <sys/mman.h>
#endif

enum { HUGE_PAGE = 1 << 21, LARGE = 2 * HUGE_PAGE };

/* Blocks of a product touch many pages: where Linux has huge ones for those who ask, large memory asks. */
static void *host_alloc(void *user, size_t bytes, size_t align, fattn_stream s) {
    (void)user, (void)s;
    if (bytes >= LARGE) align = HUGE_PAGE;
    if (bytes > (size_t)PTRDIFF_MAX - align) return NULL;
    void *const p = aligned_alloc(align, (bytes + align - 1) / align * align);
#ifdef MADV_HUGEPAGE
    if (p && bytes >= LARGE) (void)madvise(p, bytes / HUGE_PAGE * HUGE_PAGE, MADV_HUGEPAGE);
#endif
    return p;
}

static void host_free(void *user, void *p, size_t bytes, fattn_stream s) {
    (void)user, (void)bytes, (void)s;
    free(p);
}

fattn_allocator fattni_default_allocator(void) { return (fattn_allocator){.alloc = host_alloc, .free = host_free}; }

fattn_status fattni_alloc(fattn_ctx *ctx, size_t bytes, void **out) {
    bool entered;
    *out = NULL;
    if (bytes == 0) return FATTN_OK;
    if (ctx->recording)
        return fattn_ctx_fail(ctx, FATTN_E_STATE, "%zu bytes are asked for while a graph is recorded", bytes);
    FATTNI_TRY(ctx->ops->enter(ctx, &entered));
    void *p = ctx->allocator.alloc(ctx->allocator.user, bytes, FATTNI_ALIGN, ctx->stream);
    ctx->ops->leave(ctx, entered);
    if (!p) return fattn_ctx_fail(ctx, FATTN_E_NOMEM, "no memory for %zu bytes (%zu in use)", bytes, ctx->mem.live);
    ctx->mem.live += bytes;
    ctx->mem.allocs += 1;
    if (ctx->mem.live > ctx->mem.peak) ctx->mem.peak = ctx->mem.live;
    *out = p;
    return FATTN_OK;
}

void fattni_free(fattn_ctx *ctx, void *p, size_t bytes) {
    if (!p) return;
    bool entered;
    if (ctx->ops->enter(ctx, &entered) != FATTN_OK) entered = false; /* free all the same */
    ctx->allocator.free(ctx->allocator.user, p, bytes, ctx->stream);
    ctx->ops->leave(ctx, entered);
    ctx->mem.live -= bytes;
}

fattn_status fattni_host_alloc(fattn_ctx *ctx, size_t bytes, void **out) {
    if (ctx->ops->on_host) return fattni_alloc(ctx, bytes, out);
    *out = NULL;
    if (bytes == 0) return FATTN_OK;
    *out = host_alloc(NULL, bytes, FATTNI_ALIGN, NULL);
    if (*out) return FATTN_OK;
    return fattn_ctx_fail(ctx, FATTN_E_NOMEM, "no memory for %zu bytes on the host", bytes);
}

void fattni_host_free(fattn_ctx *ctx, void *p, size_t bytes) {
    if (ctx->ops->on_host)
        fattni_free(ctx, p, bytes);
    else
        free(p);
}
