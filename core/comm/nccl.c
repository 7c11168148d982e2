/* Communicators of GPUs by NCCL: arguments. */
#include "core/base/with_cuda.h"
#include "core/comm/comm.h"
#include "core/comm/nccl.h"

enum { MOST_RANKS = 1024 };

extern const fattni_nccl_ops fattni_cuda_nccl;

static const fattni_nccl_ops *const devices[] = {[FATTN_CPU] = NULL,
                                                 FATTNI_WITH_CUDA([FATTN_CUDA] = &fattni_cuda_nccl)};

static fattn_status check_context(fattn_ctx *ctx) {
    if (!devices[ctx->device])
        return fattn_ctx_fail(ctx, FATTN_E_UNSUPPORTED, "NCCL (" FATTNI_NCCL_FILE ") does not move memory of the %s",
                              ctx->ops->name);
    if (ctx->flags & FATTN_CTX_PLAN_ONLY) return fattn_ctx_fail(ctx, FATTN_E_STATE, "comm: the context only plans");
    return FATTN_OK;
}

fattn_status fattn_comm_nccl_id(fattn_ctx *ctx, uint8_t id[FATTN_NCCL_ID]) {
    if (!ctx) return FATTN_E_ARG;
    if (!id) return fattn_ctx_fail(ctx, FATTN_E_ARG, "id: NULL");
    FATTNI_TRY(check_context(ctx));
    return devices[ctx->device]->make_id(ctx, id);
}

static fattn_status join(fattn_ctx *ctx, fattni_nccl_join *j, const fattn_comm_options *opt, fattn_comm **out) {
    fattn_comm_options o = {0};
    FATTNI_TRY(fattni_comm_options(ctx, opt, &o));
    j->time_limit = o.time_limit;
    j->waits = o.flags & FATTN_COMM_WAIT;
    fattn_transport t;
    FATTNI_TRY(devices[ctx->device]->open(ctx, j, &t));
    const fattn_status s = fattn_comm_create(ctx, &t, out);
    if (s) t.close(t.state, ctx);
    return s;
}

fattn_status fattn_comm_nccl(fattn_ctx *ctx, const uint8_t id[FATTN_NCCL_ID], int rank, int size,
                             const fattn_comm_options *opt, fattn_comm **out) {
    if (out) *out = NULL;
    if (!ctx) return FATTN_E_ARG;
    if (!out) return fattn_ctx_fail(ctx, FATTN_E_ARG, "comm: out is NULL");
    if (!id) return fattn_ctx_fail(ctx, FATTN_E_ARG, "id: NULL");
    if (size < 1 || size > MOST_RANKS || rank < 0 || rank >= size)
        return fattn_ctx_fail(ctx, FATTN_E_ARG, "rank %d of %d: not 0..size-1 of 1..%d", rank, size, MOST_RANKS);
    FATTNI_TRY(check_context(ctx));
    fattni_nccl_join j = {.id = id, .rank = rank, .size = size};
    return join(ctx, &j, opt, out);
}

fattn_status fattn_comm_from_nccl(fattn_ctx *ctx, void *nccl_comm, const fattn_comm_options *opt, fattn_comm **out) {
    if (out) *out = NULL;
    if (!ctx) return FATTN_E_ARG;
    if (!out) return fattn_ctx_fail(ctx, FATTN_E_ARG, "comm: out is NULL");
    if (!nccl_comm) return fattn_ctx_fail(ctx, FATTN_E_ARG, "nccl_comm: NULL");
    FATTNI_TRY(check_context(ctx));
    fattni_nccl_join j = {.theirs = nccl_comm};
    return join(ctx, &j, opt, out);
}
