/* embedding: what its loops on every device share. */
#ifndef FATTNI_AUTOGRAD_OPS_SEQUENCE_OP_EMBEDDING_H
#define FATTNI_AUTOGRAD_OPS_SEQUENCE_OP_EMBEDDING_H

#include "autograd_c/ops/op_device.h"

enum { FATTNI_EMBEDDING_TABLE, FATTNI_EMBEDDING_IDS };

extern const fattni_code fattni_embedding_cpu, fattni_embedding_cuda;

#endif
