/* fattn/parallel.h - data-parallel training: every rank of a communicator has a model of its own and a part of the
   batch. Gradients are added over the ranks while backward is still running:

       fattn_reducer_backward(reducer, tape, loss, NULL);    in the last backward pass of a step
       fattn_reducer_finish(reducer);
       fattn_adamw_step(adamw);

   Gradients are sums: divide the loss by the number of ranks for their mean. The sums have the bits of
   fattn_comm_all_reduce, on every rank; then parameters that begin equal stay equal.

   Parameters form buckets, from the last one to the first, which is about the order in which backward completes their
   gradients. Gradients that lie one behind the other in memory, without a gap and on every rank, share a bucket up to
   its size. A bucket starts when all its gradients are complete, after their last use in the graph, and the buckets
   before it have started: so the order is the same on every rank, whatever the order of completion. Its start also
   moves on the buckets before it. On a GPU exchanges overlap with what backward enqueues meanwhile.

   Several batches a step. fattn_tape_backward adds the gradients of a rank's batches one after the other; the last
   batch goes through fattn_reducer_backward. With fattn_reducer_set_aside after each batch but the last, batches are
   added like ranks, ((g0 + g1) + (g2 + g3)) + ...: then n batches have the same sums, bit for bit, on every number of
   ranks that leaves each rank, in order, the same power of two of them; and on one rank. */
#ifndef FATTN_PARALLEL_H
#define FATTN_PARALLEL_H

#include <fattn/comm.h>
#include <fattn/tape.h>

typedef struct fattn_reducer fattn_reducer;
enum {
    FATTN_REDUCE_TO_OWNERS = 1u << 0 /* each rank gets the sums of its own elements only, for an optimizer with
                                        `owners` (fattn/optim.h); the rest of its gradients is undefined until that
                                        optimizer's step, which zeroes them, but for FATTN_PARAM_ONE_PASS. Buckets
                                        then need values that lie one behind the other, too */
};
typedef struct fattn_reducer_options {
    uint32_t struct_size;
    uint32_t flags;       /* FATTN_REDUCE_* */
    int64_t bucket_bytes; /* 0 = 64 MB. A larger parameter is a bucket of its own */
    int32_t late;         /* so many of the first params get their gradients last of all, as embeddings do: they share
                             a bucket, whatever its size, with no others, which would wait for them */
    uint32_t hold;        /* percent: no bucket starts before so many of the gradients' bytes, without the late ones,
                             are complete; what has waited then starts bit by bit until backward ends. For GPUs at
                             their power limit: links that sleep leave it to the SMs. Pays where what is left of
                             backward takes longer than the exchanges. The least of the ranks' counts */
} fattn_reducer_options;

/* Collective: the same options and shapes on every rank; opt may be NULL. Keeps comm and the pointers, which must
   differ and outlive it; frozen params are skipped and must stay frozen; values and gradients must stay where they are.
   Memory for three buckets, three times as much for 16 bits. ABI, ARG, SHAPE, DTYPE, DEVICE, NOMEM; COMM: also when the
   ranks differ. */
FATTN_API FATTN_CHECKED fattn_status fattn_reducer_create(fattn_ctx *ctx, fattn_comm *comm,
                                                          const fattn_reducer_options *opt, fattn_param *const *params,
                                                          int n, fattn_reducer **out);
/* NULL is allowed. After optimizers that have it as their owners, before the communicator. */
FATTN_API void fattn_reducer_destroy(fattn_reducer *r);
/* fattn_tape_backward_from, or with seed NULL fattn_tape_backward, with exchanges. Params that t does not use take
   part, too. Errors: theirs, COMM, and STATE: the pass before has not been finished, or a gradient has moved. A failure
   ends the group of ranks. */
FATTN_API FATTN_CHECKED fattn_status fattn_reducer_backward(fattn_reducer *r, fattn_tape *t, fattn_var scalar,
                                                            const fattn_tensor *seed);
/* After the backward pass of a batch that is not the step's last: keeps the gradients until fattn_reducer_finish, which
   adds them, and zeroes them. Memory: one copy of the gradients for the step's second batch, and one more for its 3rd,
   5th, 9th ...; kept until destroy. Not collective; a failure ends the group of ranks. DTYPE: gradients in 16 bits.
   STATE: as backward. NOMEM. */
FATTN_API FATTN_CHECKED fattn_status fattn_reducer_set_aside(fattn_reducer *r);
/* Completes all sums; without a pass before, it makes all of them. On a GPU: for what is enqueued from now on. */
FATTN_API FATTN_CHECKED fattn_status fattn_reducer_finish(fattn_reducer *r);
/* This rank's elements of params[i], in row-major order, begin..end-1: with FATTN_REDUCE_TO_OWNERS begin is a multiple
   of 16384, else all are its own. ARG. */
FATTN_API FATTN_CHECKED fattn_status fattn_reducer_share(const fattn_reducer *r, int i, int64_t *begin, int64_t *end);
FATTN_API fattn_comm *fattn_reducer_comm(const fattn_reducer *r); /* that of its creation */

#endif
