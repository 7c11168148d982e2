/* What ranks.c needs of MPI. mpi.c is for builds with it, no_mpi.c for the others. */
#ifndef FATTNI_CLI_RANKS_MPI_H
#define FATTNI_CLI_RANKS_MPI_H

#include "cli/ranks/launcher.h"

#include <fattn/comm.h>
#include <stdbool.h>

/* Initialises MPI: this process's number, and how many there are. CLI_OK, or another code after an error message. */
int mpi_begin(const launch *l, int *number, int *size);
/* The number of processes on this machine, and this one's among those of them that see the same GPUs
   (CUDA_VISIBLE_DEVICES). Collective. */
void mpi_local(int *size, int *gpu);
/* Of all processes: by MPI, or by NCCL where the context is on a GPU. */
fattn_status mpi_comm(fattn_ctx *ctx, const fattn_comm_options *o, fattn_comm **out);
/* Tells all other processes that this one has printed why they end; whether another one has, if that is known within
   some seconds. */
void mpi_announce(void);
bool mpi_announced(double seconds);
void mpi_end(void);                 /* waits for all processes */
_Noreturn void mpi_abort(int code); /* ends all processes */

#endif
