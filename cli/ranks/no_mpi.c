#include "cli/base/cli.h"
#include "cli/ranks/mpi.h"

#include <stdlib.h>

/* Several processes would each be a whole run, in one folder. */
int mpi_begin(const launch *l, int *number, int *size) {
    *number = (int)l->rank, *size = 1;
    if (l->processes == 0 && l->rank == 0) return CLI_OK; /* the only process, or the others end it */
    if (l->rank > 0) return CLI_USAGE;                    /* one message is enough */
    return cli_fail(CLI_USAGE,
                    "%s has started several processes, but this program was built without MPI (FATTN_MPI): start it "
                    "once, with --ranks or --gpus",
                    l->launcher);
}

void mpi_local(int *size, int *gpu) { *size = 1, *gpu = 0; }

fattn_status mpi_comm(fattn_ctx *ctx, const fattn_comm_options *o, fattn_comm **out) {
    (void)o, *out = NULL;
    return fattn_ctx_fail(ctx, FATTN_E_UNSUPPORTED, "this program was built without MPI");
}

void mpi_announce(void) {}
bool mpi_announced(double seconds) { return (void)seconds, false; }
void mpi_end(void) {}
_Noreturn void mpi_abort(int code) { _Exit(code); }
