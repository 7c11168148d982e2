#include "cli/ranks/launcher.h"

#include <stdlib.h>

/* Variables of the number of processes and of this one's. Those of srun are its step's: those of a job are there in the
   job's script, too, which is one process. MPI_LOCALNRANKS counts the processes of this machine. */
static const struct {
    const char *launcher, *processes, *rank;
} known[] = {{"Open MPI's mpirun", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"},
             {"mpiexec", "PMI_SIZE", "PMI_RANK"},
             {"MVAPICH's mpirun_rsh", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_RANK"},
             {"PALS' mpiexec", "PALS_SIZE", "PALS_RANKID"},
             {"srun", "SLURM_STEP_NUM_TASKS", "SLURM_PROCID"},
             {"mpiexec", "MPI_LOCALNRANKS", "MPI_LOCALRANKID"},
             {"a launcher with PMIx", NULL, "PMIX_RANK"}};

static int64_t number_in(const char *variable) {
    const char *const text = variable ? getenv(variable) : NULL;
    return text ? strtoll(text, NULL, 10) : 0;
}

launch launch_of_process(void) {
    launch found = {.processes = 1};
    for (size_t i = 0; i < sizeof known / sizeof *known; ++i) {
        const char *const variable = known[i].processes ? known[i].processes : known[i].rank;
        const launch l = {known[i].launcher, number_in(known[i].processes), number_in(known[i].rank)};
        if (!getenv(variable)) continue;
        if (l.processes > 1) return l;
        if (!found.launcher) found = l;
    }
    return found;
}
