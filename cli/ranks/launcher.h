/* Programs that start processes of MPI tell each of them how many there are, by environment variables. */
#ifndef FATTNI_CLI_RANKS_LAUNCHER_H
#define FATTNI_CLI_RANKS_LAUNCHER_H

#include <stdint.h>

typedef struct launch {
    const char *launcher;    /* NULL: none has started this process */
    int64_t processes, rank; /* processes 0: it does not say how many */
} launch;

launch launch_of_process(void);

#endif
