/* fattn/comm.h - ranks that exchange tensors: threads of one process, processes started by mpirun, GPUs.

   A communicator is one rank's end of a group of `size` ranks, and belongs to that rank's context. Its calls are
   collective: every rank makes the same calls in the same order, with the same shapes. They are calls of the context:
   one thread at a time. Tensors are row-major, on the context's device.

   On the CPU a call returns when its results are there. On a GPU it is enqueued: its results are there for what is
   enqueued on the context's stream afterwards. The call itself may wait for the other ranks' calls, not for their GPUs;
   so it cannot be captured into a graph.

   Failures. A rank that fails, or leaves by fattn_comm_destroy while others wait for it, ends the group: the pending
   and all later calls of every rank are FATTN_E_COMM, with a message that says which rank failed and why. So is waiting
   longer than the time limit for a rank that does not answer. Nothing hangs; NCCL notices less, see there. After a
   failure the contents of results are undefined; destroy the communicators and make new ones.

   Sums are the same bits on every rank, for every transport: ((x0 + x1) + (x2 + x3)) + ..., neighbours first, then
   pairs of neighbours, over the ranks in ascending order; so that on 1, 2 and 4 ranks a power of two of equal parts,
   added in this order within a rank too, gives the same bits. F16 and BF16 are added in F32 and rounded once. */
#ifndef FATTN_COMM_H
#define FATTN_COMM_H

#include <fattn/tensor.h>

typedef struct fattn_comm fattn_comm;
typedef struct fattn_world fattn_world;

enum {
    FATTN_COMM_WAIT = 1u << 0 /* NCCL: a call returns when its exchange is done on the GPU, and so notices a rank that
                                 fails; threads and MPI notice it without */
};

typedef struct fattn_comm_options {
    uint32_t struct_size;
    uint32_t flags;
    double time_limit; /* seconds that a call waits for another rank; 0 = 120 */
} fattn_comm_options;

/* ---- ranks that are threads of one process: on the CPU, or each on a GPU, which several may share ---- */

/* ranks in 1..1024, else ARG. NOMEM. Threads may share the world; destroy it after the last communicator. */
FATTN_API FATTN_CHECKED fattn_status fattn_world_create(int ranks, fattn_world **out);
FATTN_API void fattn_world_destroy(fattn_world *w); /* NULL is allowed */
/* Rank `rank` of w, once for each. The contexts must be on the same kind of device. opt may be NULL. No call waits for
   the others here; a rank that never comes makes the others' first call fail: FATTN_E_COMM. On GPUs data moves by the
   copy engines, and where attention over ranks would wait for them by kernels, from memory of the other GPU that
   kernels can read: of cudaMalloc, or of a pool that lets them. The first communicator of a GPU lets the other GPUs
   read its memory pool, for which it waits for that GPU, where no other thread should begin work meanwhile. On failure
   *out is NULL. ARG: rank is not in 0..ranks-1, or the options are not as described; ABI; STATE: that rank is taken, or
   ctx is for plans only; DEVICE: another kind of device; COMM: the world has failed; NOMEM; CUDA. */
FATTN_API FATTN_CHECKED fattn_status fattn_comm_join(fattn_ctx *ctx, fattn_world *w, int rank,
                                                     const fattn_comm_options *opt, fattn_comm **out);

/* ---- ranks on GPUs of their own, in one process or in many: NCCL 2.14 or later ---- */

/* NCCL is loaded when it is needed: libnccl.so.2, from the toolkit that built the library or where the dynamic linker
   looks. Without it, and on the CPU: UNSUPPORTED. No two ranks share a GPU.

   What is noticed. A rank that does not come, or does not make its first call with another rank, makes the calls that
   wait for it COMM after the time limit; so does an error that NCCL reports. Once two ranks are connected, calls are
   enqueued without waiting for the other rank: if it fails, leaves, or has other shapes, NCCL tells nobody, and the GPU
   waits without limit, with it fattn_ctx_sync. With FATTN_COMM_WAIT each call waits for the GPU itself: after the time
   limit it is COMM, and the GPU is freed. A rank's failure is told to that rank alone, the others meet the time limit.
   A failure ends what a rank's GPU waits for. */
enum { FATTN_NCCL_ID = 128 };
/* An id for one group: rank 0 makes it, and gives its bytes to all others. */
FATTN_API FATTN_CHECKED fattn_status fattn_comm_nccl_id(fattn_ctx *ctx, uint8_t id[FATTN_NCCL_ID]);
/* Rank `rank` of the group with that id, size in 1..1024; waits for the others' calls. fattn_comm_destroy waits for the
   others, too, at most the time limit. */
FATTN_API FATTN_CHECKED fattn_status fattn_comm_nccl(fattn_ctx *ctx, const uint8_t id[FATTN_NCCL_ID], int rank,
                                                     int size, const fattn_comm_options *opt, fattn_comm **out);
/* The group of your ncclComm_t, which must outlive *out, and is neither aborted nor destroyed: after a failure that is
   yours to do. DEVICE: it is another GPU's than the context. */
FATTN_API FATTN_CHECKED fattn_status fattn_comm_from_nccl(fattn_ctx *ctx, void *nccl_comm,
                                                          const fattn_comm_options *opt, fattn_comm **out);

/* ---- any other transport: fattn/mpi.h, or your own ---- */

typedef struct fattn_message {
    void *data; /* on the context's device */
    size_t bytes;
    int32_t peer; /* 0..size-1; the own rank, too */
    int32_t reserved;
} fattn_message;

typedef struct fattn_transport {
    uint32_t struct_size;
    int32_t rank, size;
    uint32_t devices; /* bit 1 << fattn_device: on which it can work */
    const char *name;
    void *state; /* passed to the functions */
    /* Begins an exchange: all sends and receives at once, none of 0 bytes. Between two ranks messages arrive in the
       order of the calls; in an exchange at most one goes from one rank to another. On a GPU it reads and writes after
       what is enqueued on the context's stream now. *request is handed to finish; at most 8 are open, finished in
       order. The buffers are in use until then. */
    fattn_status (*start)(void *state, fattn_ctx *ctx, const fattn_message *sends, int n_sends,
                          const fattn_message *receives, int n_receives, void **request);
    /* CPU: returns when the exchange is done. GPU: what is enqueued from now on runs after it. */
    fattn_status (*finish)(void *state, fattn_ctx *ctx, void *request);
    /* Every rank's calls fail from now on, with this text. May be called twice, and after a failure. */
    void (*abort)(void *state, const char *text);
    /* Frees state; may wait for the other ranks, at most the time limit. */
    void (*close)(void *state, fattn_ctx *ctx);
} fattn_transport;

/* The communicator owns the transport from now on, and closes it; not after a failure: ARG, ABI, UNSUPPORTED. */
FATTN_API FATTN_CHECKED fattn_status fattn_comm_create(fattn_ctx *ctx, const fattn_transport *t, fattn_comm **out);
/* For makers of transports: the time limit of opt, which may be NULL. ABI, ARG. */
FATTN_API FATTN_CHECKED fattn_status fattn_comm_time_limit(fattn_ctx *ctx, const fattn_comm_options *opt,
                                                           double *seconds);

/* ---- calls ---- */

/* Everything enqueued on the context must have ended on a GPU (fattn_ctx_sync). NULL is allowed. */
FATTN_API void fattn_comm_destroy(fattn_comm *c);
FATTN_API int fattn_comm_rank(const fattn_comm *c);
FATTN_API int fattn_comm_size(const fattn_comm *c);
FATTN_API const char *fattn_comm_name(const fattn_comm *c); /* of the transport: "threads", "MPI", "NCCL" */
/* 1: the ranks are threads, and all GPUs that this process sees, more than one, are linked by NVLink. */
FATTN_API int fattn_comm_linked(const fattn_comm *c);
/* Ends the group: the other ranks' calls fail with this text. Not collective. */
FATTN_API void fattn_comm_abort(fattn_comm *c, const char *text);

/* Errors of all: ARG, SHAPE, DTYPE, DEVICE, of this rank's arguments, which end the group, too; COMM; NOMEM. */

/* send to rank `to`, receive from rank `from`; either may be NULL, its rank is then not read. They do not
   overlap: ARG. */
FATTN_API FATTN_CHECKED fattn_status fattn_comm_send_receive(fattn_comm *c, const fattn_tensor *send, int to,
                                                             const fattn_tensor *receive, int from);
/* out [size, ...in]: out[r] is rank r's in. `in` may be out[this rank]; else they do not overlap: ARG. */
FATTN_API FATTN_CHECKED fattn_status fattn_comm_all_gather(fattn_comm *c, const fattn_tensor *in,
                                                           const fattn_tensor *out);
/* in, out [size, ...]: out[r] here is in[this rank] there. They do not overlap: ARG. */
FATTN_API FATTN_CHECKED fattn_status fattn_comm_all_to_all(fattn_comm *c, const fattn_tensor *in,
                                                           const fattn_tensor *out);
/* x of rank `root` on every rank. */
FATTN_API FATTN_CHECKED fattn_status fattn_comm_broadcast(fattn_comm *c, const fattn_tensor *x, int root);
/* x = the sum over the ranks, in place. Floating dtypes. Memory: twice x, kept until destroy. */
FATTN_API FATTN_CHECKED fattn_status fattn_comm_all_reduce(fattn_comm *c, const fattn_tensor *x);
/* The same on rank `root` only; elsewhere x is not changed. */
FATTN_API FATTN_CHECKED fattn_status fattn_comm_reduce(fattn_comm *c, const fattn_tensor *x, int root);
/* in [n], out [end - begin] with begin = r ceil(n/size), end = min(begin + ceil(n/size), n), and at most n: elements
   begin..end-1 of the sum. Floating dtypes. */
FATTN_API FATTN_CHECKED fattn_status fattn_comm_reduce_scatter(fattn_comm *c, const fattn_tensor *in,
                                                               const fattn_tensor *out);
/* Returns when every rank has called it; a GPU's stream has not. */
FATTN_API FATTN_CHECKED fattn_status fattn_comm_barrier(fattn_comm *c);
/* FATTN_OK if every rank has the same n integers, else FATTN_E_COMM on all: "tokens is 64 on rank 1, 32 on rank 0".
   names [n]; n in 1..32, else ARG. Waits for the device. */
FATTN_API FATTN_CHECKED fattn_status fattn_comm_agree(fattn_comm *c, const char *const *names, const int64_t *values,
                                                      int n);

#endif
