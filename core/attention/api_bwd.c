/* The backward entry point. */
#include "core/attention/kernel.h"

fattn_status fattn_attention_bwd(fattn_ctx *ctx, const fattn_attention_params *p,
                                 const fattn_attention_io *io) {
    return fattni_run(ctx, p, io, FATTNI_BWD, fattni_bwd_table);
}
