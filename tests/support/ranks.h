/* Runs a function on ranks that are threads of this process, each with a context and a communicator of its own. */
#ifndef TEST_RANKS_H
#define TEST_RANKS_H

#include <fattn/comm.h>

enum { RANK_TENSORS = 16 };

typedef struct rank_call {
    fattn_comm *comm;
    fattn_ctx *ctx;
    int rank, size;
    int n_tensors;
    fattn_tensor tensors[RANK_TENSORS]; /* freed after the function */
    void *arg;                          /* run_ranks' */
    fattn_status status;                /* the function's own result, for expect_ranks */
    char error[512];
} rank_call;

typedef struct ranks_options {
    uint32_t ctx_flags;
    double time_limit;           /* 0 = 30 s */
    int device;                  /* fattn_device; 0 = CPU */
    int absent;                  /* 1 + a rank that does not come; 0 = all come */
    const fattn_stream *streams; /* [size], of a GPU; NULL = the default stream for all */
    uint32_t comm_flags;
    const uint8_t *nccl_id; /* NULL = threads; else NCCL, which needs a GPU for each rank */
} ranks_options;

/* Rank r is on GPU r modulo this number. */
extern int ranks_gpus;

/* Each rank's call in calls [size]. Asserts that contexts free all memory. options may be NULL. */
void run_ranks(int size, const ranks_options *options, fattn_status (*function)(rank_call *), void *arg,
               rank_call *calls);
/* The same; asserts that every rank returns FATTN_OK. */
void expect_ranks(int size, const ranks_options *options, fattn_status (*function)(rank_call *), void *arg);

#endif
