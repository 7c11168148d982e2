/* The ranks of a training: models that share each batch. They are threads of this process, or processes of MPI, each of
   which is one rank.

   Rank 0 speaks for all. The others keep their error messages. One that fails ends the group with its message, which
   rank 0 gets from its next exchange, as FATTN_E_COMM, and prints. If rank 0 does not, because it is busy, has stopped
   or is gone, the first process after it that can prints its own. */
#ifndef FATTNI_CLI_RANKS_RANKS_H
#define FATTNI_CLI_RANKS_RANKS_H

#include "cli/base/device.h"

#include <fattn/comm.h>
#include <stdbool.h>

enum { RANKS_MOST = 1024, RANK_MESSAGE = 1024 };

typedef struct rank {
    int number, size;
    bool is_process;          /* of MPI; else a thread */
    fattn_ctx *ctx, *host;    /* on its device; on the CPU */
    fattn_comm *comm;         /* of ctx, for gradients; NULL: not opened */
    fattn_comm *control;      /* of host, for a few numbers: waits for no GPU; NULL: there is one rank */
    char why[DEVICE_MESSAGE]; /* ctx's log */
    char said[RANK_MESSAGE];  /* the last error message of a rank that does not print it */
} rank;

typedef struct rank_group {
    rank *at; /* those of this process */
    int here, size;
    bool of_mpi;
    double time_limit;
    fattn_world *sums, *control; /* of threads */
} rank_group;

/* Finds out what the ranks are: processes, if a launcher has started several, else `threads` threads, 1 to RANKS_MOST.
   A call that waits for another rank fails after time_limit seconds. CLI_OK, or another code after an error message. */
int ranks_begin(rank_group *g, int64_t threads, double time_limit);

typedef struct ranks_device {
    int device; /* ON_CPU, ON_CUDA */
    uint32_t flags;
    int64_t threads; /* of the CPU in this process; 0: all */
    bool own_gpus;   /* threads share no GPU; processes never do */
    bool sums;       /* the ranks get `comm` */
} ranks_device;
/* Their contexts and communicators. CLI_OK, or another code after an error message. */
int ranks_open(rank_group *g, const ranks_device *d);

/* run for all ranks of this process at the same time, each on its own thread, the first on this one. The first's code,
   or another one's if only that is one of a failure. */
int ranks_run(rank_group *g, int (*run)(rank *k, void *arg), void *arg);

/* Frees all, also after a failure. Returns code; not if the ranks are processes and it is one of a failure: then all
   processes end. */
int ranks_end(rank_group *g, int code);

static inline bool rank_leads(const rank *k) { return k->number == 0; }

/* Before a rank frees what its exchanges use. Tells the others if code is one of a failure; a process then ends all of
   them and does not return. */
void rank_leaves(rank *k, int code);

/* An error message for a library call of this rank that returned s, with the rank's number, or with what another rank
   has told. CLI_FAILURE. */
int rank_failed(const rank *k, fattn_status s, const char *what);

/* Collective; with one rank they do nothing. Failures are in ctx's error message. */

/* values [n]: each is set on one rank and 0 on the others; afterwards all have all. */
FATTN_CHECKED fattn_status rank_share(const rank *k, double *values, int64_t n);
/* FATTN_E_COMM if the ranks' integers differ; n at most 32. */
FATTN_CHECKED fattn_status rank_agree(const rank *k, const char *const *names, const int64_t *values, int n);

#endif
