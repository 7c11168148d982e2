/* embedding on the device. The gradient of the table is added atomically where it is F32 or F64,
   and by the rows' first block where the context is deterministic or the gradient has 16 bits. */
#include "autograd_c/ops/op_cuda.h"
#include "autograd_c/ops/sequence/op_embedding.h"
#include "core/tensor/rows.h"

FATTNI_KERNEL(embedding, fattni_embedding_args);
FATTNI_KERNEL(embedding_add, fattni_embedding_args);
FATTNI_KERNEL(embedding_gather, fattni_embedding_args);
extern void fattn_embedding_add4(fattni_embedding_args);

enum { TABLE = FATTNI_EMBEDDING_TABLE, IDS = FATTNI_EMBEDDING_IDS, ROW_THREADS = 256 };

static void plan(fattn_op_call *c) { (void)c; }

static fattni_embedding_args args_of(const fattn_op_call *c) {
    const fattni_rows ids = fattni_rows_of(&c->in[IDS]);
    return (fattni_embedding_args){.ids = fattni_walk_of(&c->in[IDS]),
                                   .id = c->in[IDS].data,
                                   .id_columns = ids.columns,
                                   .id_step = ids.step,
                                   .R = fattn_tensor_numel(&c->in[IDS]),
                                   .V = c->in[TABLE].shape[0],
                                   .C = c->in[TABLE].shape[1]};
}

static int pack_of(const fattn_tensor *table, const fattn_tensor *rows) {
    return fattni_rows_in_packs(table) && fattni_rows_in_packs(rows) ? FATTNI_PACK : 1;
}

static fattn_status forward(fattn_op_call *c) {
    fattni_embedding_args a = args_of(c);
    a.table = fattni_walk_of(&c->in[TABLE]);
    a.entries = fattni_operand_of(&c->in[TABLE]);
    a.rows = fattni_operand_of(&c->out[0]);
    a.pack = pack_of(&c->in[TABLE], &c->out[0]);
    return FATTNI_START_REAL(c->ctx, a.entries.dtype, embedding, fattni_ceil_div(a.R * a.C, ROW_THREADS * a.pack),
                             ROW_THREADS, &a);
}

static fattn_status backward(fattn_op_call *c) {
    const fattn_tensor *const d = &c->d_in[TABLE];
    if (!d->data) return FATTN_OK;
    fattni_embedding_args a = args_of(c);
    a.table = fattni_walk_of(d);
    a.out = fattni_walk_of(&c->d_out[0]);
    a.entries = fattni_operand_of(d);
    a.rows = fattni_operand_of(&c->d_out[0]);
    if (c->d_in_fresh[TABLE]) FATTNI_TRY(fattni_fill(c->ctx, d, 0, true));
    const bool wide = d->dtype == FATTN_F32 || d->dtype == FATTN_F64;
    if (wide && !(c->ctx->flags & FATTN_CTX_DETERMINISTIC)) {
        const bool fours = d->dtype == FATTN_F32 && pack_of(d, &c->d_out[0]) > 1;
        const int64_t blocks = fattni_ceil_div(a.R * a.C, ROW_THREADS * (fours ? 4 : 1));
        if (fours) return FATTNI_START(c->ctx, fattn_embedding_add4, blocks, ROW_THREADS, &a);
        return FATTNI_START_REAL(c->ctx, d->dtype, embedding_add, blocks, ROW_THREADS, &a);
    }
    return FATTNI_START_REAL(c->ctx, d->dtype, embedding_gather, a.C ? a.R : 0, ROW_THREADS, &a);
}

const fattni_code fattni_embedding_cuda = {plan, forward, backward};
