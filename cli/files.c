#include "files.h"

#include "cli.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static const char *kind_of(mode_t mode) {
    return S_ISDIR(mode)    ? "a folder"
           : S_ISFIFO(mode) ? "a pipe"
           : S_ISSOCK(mode) ? "a socket"
                            : "a device";
}

FILE *input_open(const char *path) {
    struct stat status = {0};
    FILE *file = NULL;
    int number = -1;
    bool known = stat(path, &status) == 0;
    if (known && S_ISREG(status.st_mode)) {
        /* Should it be another one by now: without O_NONBLOCK a pipe would wait for a writer. */
        number = open(path, O_RDONLY | O_NONBLOCK | O_NOCTTY | O_CLOEXEC);
        known = number >= 0 && fstat(number, &status) == 0;
        if (known && S_ISREG(status.st_mode)) file = fdopen(number, "rb");
    }
    if (file) return file;
    if (known && !S_ISREG(status.st_mode))
        cli_fail(CLI_FAILURE, "cannot read %s: it is %s, not a file", path, kind_of(status.st_mode));
    else
        cli_fail(CLI_FAILURE, "cannot read %s: %s", path, strerror(errno));
    if (number >= 0) close(number);
    return NULL;
}
