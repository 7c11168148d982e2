/* NCCL's id by MPI, from rank 0 to all. */
#include "core/base/internal.h" /* macros and inline functions only */

#include <mpi.h>

#include <fattn/mpi.h>

static fattn_status make_id(fattn_ctx *ctx, int rank, uint8_t *id) {
    if (fattn_ctx_device(ctx) != FATTN_CUDA)
        return fattn_ctx_fail(ctx, FATTN_E_UNSUPPORTED, "NCCL does not move memory of the CPU");
    return rank == 0 ? fattn_comm_nccl_id(ctx, id) : FATTN_OK;
}

/* c is of the CPU: it has the time limit, and tells all why a rank fails. */
static fattn_status share_id(fattn_ctx *ctx, fattn_comm *c, uint8_t *id) {
    static const int64_t bytes = FATTN_NCCL_ID;
    const fattn_tensor t = fattn_tensor_view(id, FATTN_U8, FATTN_CPU, 0, 1, &bytes);
    const fattn_status s = make_id(ctx, fattn_comm_rank(c), id);
    if (s == FATTN_OK) return fattn_comm_broadcast(c, &t, 0);
    fattn_comm_abort(c, fattn_ctx_error(ctx));
    return s;
}

fattn_status fattn_comm_mpi_nccl(fattn_ctx *ctx, MPI_Comm comm, const fattn_comm_options *opt, fattn_comm **out) {
    if (!out) return FATTN_E_ARG;
    *out = NULL;
    if (!ctx) return FATTN_E_ARG;
    fattn_ctx *cpu;
    fattn_comm *c;
    uint8_t id[FATTN_NCCL_ID];
    if (fattn_ctx_create(NULL, &cpu)) return fattn_ctx_fail(ctx, FATTN_E_NOMEM, "no memory for a context of the CPU");
    fattn_status s = fattn_comm_mpi(cpu, comm, opt, &c);
    const int rank = fattn_comm_rank(c), size = fattn_comm_size(c);
    if (!s) s = share_id(ctx, c, id);
    if (s && fattn_ctx_error(cpu)[0]) fattn_ctx_fail(ctx, s, "%s", fattn_ctx_error(cpu));
    if (c) fattn_comm_destroy(c), fattn_ctx_destroy(cpu); /* without c, MPI may still use memory of the context */
    return s ? s : fattn_comm_nccl(ctx, id, rank, size, opt, out);
}
