/* fattn_mark: checks; the device sets and waits. A CPU has nothing to wait for. */
#include "core/base/device.h"

#include <fattn/overlap.h>

struct fattn_mark {
    void *event; /* the device's; NULL on the CPU */
};

static fattn_status check(fattn_ctx *ctx, const fattn_mark *m, const char *what) {
    if (!m) return fattn_ctx_fail(ctx, FATTN_E_ARG, "%s: the mark is NULL", what);
    if (ctx->recording) return fattn_ctx_fail(ctx, FATTN_E_STATE, "%s: not while a graph is recorded", what);
    return FATTN_OK;
}

fattn_status fattn_mark_create(fattn_ctx *ctx, fattn_mark **out) {
    if (!ctx) return FATTN_E_ARG;
    if (!out) return fattn_ctx_fail(ctx, FATTN_E_ARG, "mark_create: out is NULL");
    *out = NULL;
    void *p;
    FATTNI_TRY(fattni_host_alloc(ctx, sizeof **out, &p));
    fattn_mark *const m = p;
    m->event = NULL;
    const fattn_status s = ctx->ops->mark_create ? ctx->ops->mark_create(ctx, &m->event) : FATTN_OK;
    if (s)
        fattni_host_free(ctx, m, sizeof *m);
    else
        *out = m;
    return s;
}

fattn_status fattn_mark_set(fattn_ctx *ctx, fattn_mark *m) {
    if (!ctx) return FATTN_E_ARG;
    FATTNI_TRY(check(ctx, m, "mark_set"));
    return m->event ? ctx->ops->mark_set(ctx, m->event) : FATTN_OK;
}

fattn_status fattn_mark_wait(fattn_ctx *ctx, const fattn_mark *m) {
    if (!ctx) return FATTN_E_ARG;
    FATTNI_TRY(check(ctx, m, "mark_wait"));
    return m->event ? ctx->ops->mark_wait(ctx, m->event) : FATTN_OK;
}

void fattn_mark_destroy(fattn_ctx *ctx, fattn_mark *m) {
    if (!ctx || !m) return;
    if (m->event) ctx->ops->mark_destroy(ctx, m->event);
    fattni_host_free(ctx, m, sizeof *m);
}
