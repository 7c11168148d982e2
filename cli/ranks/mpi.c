#include "cli/ranks/mpi.h"

#include "cli/base/cli.h"

#include <mpi.h>

#include <fattn/mpi.h>
#include <stdlib.h>
#include <time.h>

int mpi_begin(const launch *l, int *number, int *size) {
    int provided;
    if (MPI_Init_thread(NULL, NULL, MPI_THREAD_FUNNELED, &provided) != MPI_SUCCESS)
        return cli_fail(CLI_FAILURE, "%s has started this process, but MPI cannot be initialised", l->launcher);
    MPI_Comm_rank(MPI_COMM_WORLD, number);
    MPI_Comm_size(MPI_COMM_WORLD, size);
    if (l->processes <= 1 || *size > 1) return CLI_OK;
    return cli_fail(
        CLI_FAILURE,
        "%s has started %lld processes, MPI knows of one: use the launcher of the MPI that this program was "
        "built with, or srun's --mpi",
        l->launcher, (long long)l->processes);
}

void mpi_local(int *size, int *gpu) {
    MPI_Comm machine, same;
    const char *const visible = getenv("CUDA_VISIBLE_DEVICES");
    uint32_t hash = 0x811c9dc5u; /* FNV-1a */
    for (const char *c = visible ? visible : ""; *c; ++c) hash = (hash ^ (unsigned char)*c) * 0x01000193u;
    MPI_Comm_split_type(MPI_COMM_WORLD, MPI_COMM_TYPE_SHARED, 0, MPI_INFO_NULL, &machine);
    MPI_Comm_size(machine, size);
    MPI_Comm_split(machine, (int)(hash >> 1), 0, &same);
    MPI_Comm_rank(same, gpu);
    MPI_Comm_free(&same);
    MPI_Comm_free(&machine);
}

fattn_status mpi_comm(fattn_ctx *ctx, const fattn_comm_options *o, fattn_comm **out) {
    return fattn_ctx_device(ctx) == FATTN_CPU ? fattn_comm_mpi(ctx, MPI_COMM_WORLD, o, out)
                                              : fattn_comm_mpi_nccl(ctx, MPI_COMM_WORLD, o, out);
}

enum { ANNOUNCED = 1 }; /* a tag; nothing else is sent in MPI_COMM_WORLD itself */

void mpi_announce(void) {
    int number, size;
    MPI_Comm_rank(MPI_COMM_WORLD, &number);
    MPI_Comm_size(MPI_COMM_WORLD, &size);
    for (int p = 0; p < size; ++p) {
        MPI_Request request;
        if (p == number) continue;
        MPI_Isend(NULL, 0, MPI_BYTE, p, ANNOUNCED, MPI_COMM_WORLD, &request);
        MPI_Request_free(&request);
    }
}

bool mpi_announced(double seconds) {
    const double end = MPI_Wtime() + seconds;
    int found = 0;
    do {
        MPI_Iprobe(MPI_ANY_SOURCE, ANNOUNCED, MPI_COMM_WORLD, &found, MPI_STATUS_IGNORE);
        if (!found) nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
    } while (!found && MPI_Wtime() < end);
    return found;
}

void mpi_end(void) { MPI_Finalize(); }

_Noreturn void mpi_abort(int code) {
    MPI_Abort(MPI_COMM_WORLD, code);
    _Exit(code);
}
