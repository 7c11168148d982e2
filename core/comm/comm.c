/* Communicators: creation, exchanges, failures. */
#include "core/comm/comm.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

enum { MOST_MESSAGES = 1024 };

fattn_status fattni_comm_options(fattn_ctx *ctx, const fattn_comm_options *opt, fattn_comm_options *out) {
    fattn_comm_options o = {.struct_size = sizeof o};
    if (opt) FATTNI_TRY(fattni_take_struct(ctx, "fattn_comm_options", opt, &o, sizeof o));
    if (o.flags & ~(uint32_t)FATTN_COMM_WAIT)
        return fattn_ctx_fail(ctx, FATTN_E_ARG, "comm: unknown flags 0x%x", o.flags);
    if (!(o.time_limit >= 0 && isfinite(o.time_limit)))
        return fattn_ctx_fail(ctx, FATTN_E_ARG, "comm: time_limit %g is not a number of seconds", o.time_limit);
    if (o.time_limit == 0) o.time_limit = 120;
    *out = o;
    return FATTN_OK;
}

fattn_status fattn_comm_time_limit(fattn_ctx *ctx, const fattn_comm_options *opt, double *seconds) {
    fattn_comm_options o = {0};
    if (!ctx) return FATTN_E_ARG;
    if (!seconds) return fattn_ctx_fail(ctx, FATTN_E_ARG, "comm: seconds is NULL");
    FATTNI_TRY(fattni_comm_options(ctx, opt, &o));
    *seconds = o.time_limit;
    return FATTN_OK;
}

fattn_status fattn_comm_create(fattn_ctx *ctx, const fattn_transport *given, fattn_comm **out) {
    if (out) *out = NULL;
    if (!ctx) return FATTN_E_ARG;
    if (!out) return fattn_ctx_fail(ctx, FATTN_E_ARG, "comm: out is NULL");
    if (!given) return fattn_ctx_fail(ctx, FATTN_E_ARG, "transport: NULL");
    fattn_transport t = {.struct_size = sizeof t};
    FATTNI_TRY(fattni_take_struct(ctx, "fattn_transport", given, &t, sizeof t));
    if (!t.start || !t.finish || !t.abort || !t.close || !t.name)
        return fattn_ctx_fail(ctx, FATTN_E_ARG, "transport: a function or its name is NULL");
    if (t.size < 1 || t.size > MOST_MESSAGES || t.rank < 0 || t.rank >= t.size)
        return fattn_ctx_fail(ctx, FATTN_E_ARG, "transport: rank %d of %d, not 0..size-1 of 1..%d", t.rank, t.size,
                              MOST_MESSAGES);
    if (!(t.devices & 1u << ctx->device))
        return fattn_ctx_fail(ctx, FATTN_E_UNSUPPORTED, "%s does not move memory of the %s", t.name, ctx->ops->name);
    void *p;
    FATTNI_TRY(fattni_host_alloc(ctx, sizeof(fattn_comm), &p));
    fattn_comm *const c = p;
    *c = (fattn_comm){.ctx = ctx, .transport = t, .rank = t.rank, .size = t.size};
    *out = c;
    return FATTN_OK;
}

void fattn_comm_destroy(fattn_comm *c) {
    if (!c) return;
    fattn_ctx *const ctx = c->ctx;
    c->transport.close(c->transport.state, ctx);
    fattni_free(ctx, c->scratch, c->scratch_bytes);
    fattni_host_free(ctx, c, sizeof *c);
}

int fattn_comm_rank(const fattn_comm *c) { return c ? c->rank : -1; }
int fattn_comm_size(const fattn_comm *c) { return c ? c->size : 0; }
const char *fattn_comm_name(const fattn_comm *c) { return c ? c->transport.name : ""; }
int fattn_comm_linked(const fattn_comm *c) { return c && c->linked; }

void fattn_comm_abort(fattn_comm *c, const char *text) {
    if (c) c->transport.abort(c->transport.state, text ? text : "aborted");
}

fattn_status fattni_comm_end(fattn_comm *c, fattn_status s) {
    if (s == FATTN_OK || c->failed) return s;
    c->failed = true;
    snprintf(c->failure, sizeof c->failure, "%s", fattn_ctx_error(c->ctx));
    c->transport.abort(c->transport.state, c->failure);
    return s;
}

/* Keeps those of more than 0 bytes. */
static int take_messages(const fattn_message *given, int n, fattn_message *kept) {
    int count = 0;
    for (int i = 0; i < n; ++i)
        if (given[i].bytes > 0) kept[count++] = given[i];
    return count;
}

fattn_status fattni_comm_start(fattn_comm *c, const fattn_message *sends, int n_sends, const fattn_message *receives,
                               int n_receives, void **request) {
    *request = NULL;
    if (c->failed)
        return fattn_ctx_fail(c->ctx, FATTN_E_COMM, "the communicator has failed before: %.400s", c->failure);
    fattn_message *kept;
    FATTNI_TRY(fattni_host_alloc(c->ctx, (size_t)(n_sends + n_receives + 1) * sizeof *kept, (void **)&kept));
    const int s = take_messages(sends, n_sends, kept), r = take_messages(receives, n_receives, kept + n_sends);
    const fattn_status status = c->transport.start(c->transport.state, c->ctx, kept, s, kept + n_sends, r, request);
    fattni_host_free(c->ctx, kept, (size_t)(n_sends + n_receives + 1) * sizeof *kept);
    return fattni_comm_end(c, status);
}

static int take_parts(const fattni_parts *given, int n, fattni_parts *kept) {
    int count = 0;
    for (int i = 0; i < n; ++i)
        if (given[i].n > 0) kept[count++] = given[i];
    return count;
}

fattn_status fattni_comm_start_parts(fattn_comm *c, const fattni_parts *sends, int n_sends,
                                     const fattni_parts *receives, int n_receives, void **request) {
    *request = NULL;
    if (c->failed)
        return fattn_ctx_fail(c->ctx, FATTN_E_COMM, "the communicator has failed before: %.400s", c->failure);
    fattni_parts *kept;
    FATTNI_TRY(fattni_host_alloc(c->ctx, (size_t)(n_sends + n_receives + 1) * sizeof *kept, (void **)&kept));
    const int s = take_parts(sends, n_sends, kept), r = take_parts(receives, n_receives, kept + n_sends);
    const fattn_status status = c->parts->start(c->transport.state, c->ctx, kept, s, kept + n_sends, r, request);
    fattni_host_free(c->ctx, kept, (size_t)(n_sends + n_receives + 1) * sizeof *kept);
    return fattni_comm_end(c, status);
}

fattn_status fattni_comm_receive(fattn_comm *c, void *request, bool waits) {
    return fattni_comm_end(c, c->parts->receive(c->transport.state, c->ctx, request, waits));
}

fattn_status fattni_comm_finish_parts(fattn_comm *c, void *const *requests, int n) {
    return fattni_comm_end(c, c->parts->finish(c->transport.state, c->ctx, requests, n));
}

fattn_status fattni_comm_finish(fattn_comm *c, void *request) {
    return fattni_comm_end(c, c->transport.finish(c->transport.state, c->ctx, request));
}

fattn_status fattni_comm_grow(fattn_ctx *ctx, void **p, size_t *have, size_t bytes) {
    void *grown;
    if (bytes <= *have) return FATTN_OK;
    if (!ctx->recording) {
        fattni_free(ctx, *p, *have);
        *p = NULL, *have = 0;
    }
    FATTNI_TRY(fattni_alloc(ctx, bytes, &grown));
    *p = grown, *have = bytes;
    return FATTN_OK;
}

fattn_status fattni_comm_scratch(fattn_comm *c, size_t bytes, void **out) {
    FATTNI_TRY(fattni_comm_grow(c->ctx, &c->scratch, &c->scratch_bytes, bytes));
    *out = c->scratch;
    return FATTN_OK;
}
