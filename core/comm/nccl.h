/* NCCL, which moves messages between GPUs: a table in nccl_cuda.c. */
#ifndef FATTNI_CORE_COMM_NCCL_H
#define FATTNI_CORE_COMM_NCCL_H

#include "core/base/device.h"

#include <fattn/comm.h>

#define FATTNI_NCCL_FILE "libnccl.so.2"

typedef struct fattni_nccl_join {
    const uint8_t *id; /* NULL: a communicator of the caller's */
    int rank, size;    /* with an id */
    void *theirs;      /* the caller's ncclComm_t */
    double time_limit;
    bool waits; /* FATTN_COMM_WAIT */
} fattni_nccl_join;

typedef struct fattni_nccl_ops {
    fattn_status (*make_id)(fattn_ctx *ctx, uint8_t *id);
    /* After a failure nothing is left. */
    fattn_status (*open)(fattn_ctx *ctx, const fattni_nccl_join *j, fattn_transport *out);
} fattni_nccl_ops;

#endif
