/* A rank's end of a group. */
#ifndef FATTNI_CORE_COMM_COMM_H
#define FATTNI_CORE_COMM_COMM_H

#include "core/base/device.h"

#include <fattn/comm.h>

/* Tensors to a rank or from it that a transport moves from where they lie to where they shall lie. */
typedef struct fattni_parts {
    const fattn_tensor *t; /* [n]: none empty; the receiver's have the sender's shapes and dtypes, not its strides */
    int n;
    int32_t peer;
    bool exposed; /* the receiver's: nothing else runs meanwhile, so that SMs may copy, too */
} fattni_parts;

/* What a transport that moves parts, too, has beside fattn_transport. */
typedef struct fattni_parts_transport {
    /* As start of fattn_transport, with parts for messages; at most one of them goes from one rank to another. */
    fattn_status (*start)(void *state, fattn_ctx *ctx, const fattni_parts *sends, int n_sends,
                          const fattni_parts *receives, int n_receives, void **request);
    /* Enqueues the copies of what the request receives, which else finish does, in the order of starts; if it waits,
       what is enqueued from now on runs after them. To finish it remains. */
    fattn_status (*receive)(void *state, fattn_ctx *ctx, void *request, bool waits);
    /* finish of all of these, in the order of their starts: with fewer waits on the device than one after the other. */
    fattn_status (*finish)(void *state, fattn_ctx *ctx, void *const *requests, int n);
} fattni_parts_transport;

struct fattn_comm {
    fattn_ctx *ctx;
    fattn_transport transport;
    const fattni_parts_transport *parts; /* NULL: the transport moves only messages */
    int rank, size;
    bool linked; /* fattn_comm_linked */
    bool failed; /* a call of this rank has failed: the group has ended */
    void *scratch;
    size_t scratch_bytes;
    char failure[FATTNI_ERROR_BYTES];
};

/* opt, which may be NULL, checked and with its defaults. */
fattn_status fattni_comm_options(fattn_ctx *ctx, const fattn_comm_options *opt, fattn_comm_options *out);

/* Begins an exchange, and finishes it; messages of 0 bytes are dropped, on both sides. After a failure the group has
   ended; so it has after fattni_comm_end with a status that is not FATTN_OK, which it returns. */
fattn_status fattni_comm_start(fattn_comm *c, const fattn_message *sends, int n_sends, const fattn_message *receives,
                               int n_receives, void **request);
/* The same with parts, where the communicator moves them; those without tensors are dropped. */
fattn_status fattni_comm_start_parts(fattn_comm *c, const fattni_parts *sends, int n_sends,
                                     const fattni_parts *receives, int n_receives, void **request);
/* Where the communicator moves parts; also of messages. */
fattn_status fattni_comm_receive(fattn_comm *c, void *request, bool waits);
fattn_status fattni_comm_finish_parts(fattn_comm *c, void *const *requests, int n);
fattn_status fattni_comm_finish(fattn_comm *c, void *request);
fattn_status fattni_comm_end(fattn_comm *c, fattn_status s);

/* The least of the ranks' values, on all. Collective; waits for the device. */
fattn_status fattni_comm_least(fattn_comm *c, int64_t value, int64_t *least);

/* Makes the block *p of *have bytes at least as large as asked for; its content is lost. While a graph is recorded only
   what is there can be used: STATE, and the block stays, which recorded work may use. */
fattn_status fattni_comm_grow(fattn_ctx *ctx, void **p, size_t *have, size_t bytes);

/* Scratch memory on the device, valid until the next call of it. */
fattn_status fattni_comm_scratch(fattn_comm *c, size_t bytes, void **out);

/* Memory for a sum over the ranks of n elements each: parts [size][n] of the dtype at its beginning. */
size_t fattni_comm_sum_bytes(const fattn_comm *c, fattn_dtype dtype, int64_t n);
/* sum [n] = the sum of the parts, in the order of fattn/comm.h, 16 bits in F32. sum may be the first part. */
fattn_status fattni_comm_add(fattn_comm *c, void *parts, fattn_dtype dtype, int64_t n, void *sum);

#endif
