/* fattn/mpi.h - ranks that are processes started by mpirun. In libfattn_mpi, so that libfattn needs no MPI. Opt-in:
   include <mpi.h> (MPI 3.0 or later) yourself before this header; no other header of fattn uses it.

   The contract is fattn/comm.h's. A message moves while both ranks are in the call that ends its exchange.
   fattn_comm_destroy is collective: it waits for the other ranks' calls of it, at most the time limit; so destroy
   several communicators in the same order everywhere. A group that has failed leaves MPI's communicator behind, because
   messages may be on their way in it; one that ends by a time limit may also leave memory, which the context's counters
   show.

   Call MPI_Init or MPI_Init_thread before, MPI_Finalize after the last fattn_comm_destroy. All calls of a communicator
   are calls of MPI by the calling thread: with MPI_THREAD_FUNNELED only the thread that initialised MPI may make them.
   mpirun notices when a process dies, and ends the others. */
#ifndef FATTN_MPI_H
#define FATTN_MPI_H

#include <fattn/comm.h>

/* This process's end of a group of comm's processes; collective over comm, which is duplicated. opt may be NULL. On the
   CPU only, else UNSUPPORTED: GPUs use NCCL, or threads. ARG: no communicator of 1..1024 processes, or an
   inter-communicator. STATE: MPI is not initialised, or has been finalised. COMM: a process does not call it within the
   time limit. NOMEM. */
FATTN_API FATTN_CHECKED fattn_status fattn_comm_mpi(fattn_ctx *ctx, MPI_Comm comm, const fattn_comm_options *opt,
                                                    fattn_comm **out);

/* The same on GPUs, by NCCL (fattn_comm_nccl): MPI gives NCCL's id to all, and is not used after that. Each process's
   context is on a GPU of its own. UNSUPPORTED: the context is on the CPU, or NCCL is missing. */
FATTN_API FATTN_CHECKED fattn_status fattn_comm_mpi_nccl(fattn_ctx *ctx, MPI_Comm comm, const fattn_comm_options *opt,
                                                         fattn_comm **out);

#endif
