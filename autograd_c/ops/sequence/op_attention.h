/* What the two ops of attention share. Their first inputs are q, k and v, their outputs o and L. */
#ifndef FATTNI_AUTOGRAD_OPS_SEQUENCE_OP_ATTENTION_H
#define FATTNI_AUTOGRAD_OPS_SEQUENCE_OP_ATTENTION_H

#include "autograd_c/tape/tape_nodes.h"

/* ARG: q, k or v is absent; SHAPE: it is not [B,H,S,D]. */
fattn_status fattni_check_qkv(const fattn_op_call *c, const char *op);
/* o [B,H,S,Dv], laid out [B,S,H,Dv], in q's dtype; L [B,H,S] in F64 or F32. */
void fattni_attention_outputs(fattn_op_call *c);

#endif
