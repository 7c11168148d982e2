#include "cli/output/files.h"

#include "cli/base/cli.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

/* ---- input ---- */

static const char *kind_of(mode_t mode) {
    return S_ISDIR(mode) ? "a folder" : S_ISFIFO(mode) ? "a pipe" : S_ISSOCK(mode) ? "a socket" : "a device";
}

FILE *input_open(const char *path) {
    struct stat status = {0};
    FILE *file = NULL;
    int number = -1;
    bool known = stat(path, &status) == 0;
    if (known && S_ISREG(status.st_mode)) {
        /* O_NONBLOCK: the path may have become a pipe since, which would wait for a writer. */
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

/* ---- output ---- */

bool output_is_stdout(const char *path) { return path && strcmp(path, "-") == 0; }

/* Whether two are one file or pipe; a device keeps what each of two outputs writes. */
static bool is_same(const struct stat *x, const struct stat *y) {
    return (S_ISREG(x->st_mode) || S_ISFIFO(x->st_mode)) && x->st_dev == y->st_dev && x->st_ino == y->st_ino;
}

/* "-", or a name of the file or pipe that standard output is, as /dev/stdout: two that write to it from places of their
   own would overwrite one another. */
static bool names_stdout(const char *path) {
    struct stat x, y;
    return output_is_stdout(path) || (path && stat(path, &x) == 0 && fstat(STDOUT_FILENO, &y) == 0 && is_same(&x, &y));
}

bool output_spares(void *to, const char *input) {
    const named_output *const o = to;
    struct stat x, y;
    const bool both = o->path && input && !output_is_stdout(o->path);
    const bool same = both && stat(o->path, &x) == 0 && stat(input, &y) == 0 && is_same(&x, &y);
    if (same) cli_fail(CLI_USAGE, "--%s %s is the input %s: name another file", o->option, o->path, input);
    return !same;
}

/* Returns a stream for standard output; text printed to stdout goes to standard error from now on. */
static FILE *take_stdout(void) {
    cli_flush();
    if ((fcntl(STDOUT_FILENO, F_GETFL) & O_ACCMODE) == O_RDONLY) { /* as a write would find out */
        errno = EBADF;
        return NULL;
    }
    const int number = fcntl(STDOUT_FILENO, F_DUPFD_CLOEXEC, STDERR_FILENO + 1);
    if (number < 0 || dup2(STDERR_FILENO, STDOUT_FILENO) < 0) return NULL;
    return fdopen(number, "w");
}

static FILE *open_file(output *o, output_mode mode) {
    const int flags = O_WRONLY | O_CREAT | O_CLOEXEC | O_NOCTTY | (mode == OUTPUT_APPEND ? O_APPEND : 0);
    if (!cli_make_parents(o->path)) return NULL;
    int number = open(o->path, flags | O_EXCL, 0666);
    o->made = number >= 0;
    if (number < 0 && errno == EEXIST) number = open(o->path, flags, 0666);
    return number < 0 ? NULL : fdopen(number, mode == OUTPUT_APPEND ? "a" : "w");
}

bool output_open(output *o, const char *path, output_mode mode) {
    *o = (output){.path = path, .name = path};
    if (!path) return true;
    if (!names_stdout(path)) {
        o->file = open_file(o, mode);
    } else {
        o->path = "-";
        o->name = "standard output";
        o->file = take_stdout();
    }
    if (!o->file) cli_fail(CLI_FAILURE, "cannot write %s: %s", o->name, strerror(errno));
    return o->file != NULL;
}

static bool is_regular(const output *o, struct stat *status) {
    return fstat(fileno(o->file), status) == 0 && S_ISREG(status->st_mode);
}

/* Whether two names, of which neither is a file yet, would be one: they are made and, being empty, removed. */
static bool would_be_same(const char *a, const char *b) {
    output x = {.path = a}, y = {.path = b};
    struct stat of_x, of_y;
    x.file = open_file(&x, OUTPUT_LATER);
    y.file = x.file ? open_file(&y, OUTPUT_LATER) : NULL;
    const bool same = y.file && is_regular(&x, &of_x) && is_regular(&y, &of_y) && is_same(&of_x, &of_y);
    output_close(&x);
    output_close(&y);
    return same;
}

bool output_differ(const char *json, const char *plot) {
    struct stat x, y;
    const bool log = names_stdout(json), picture = names_stdout(plot);
    bool same = log && picture;
    if (json && plot && !log && !picture) {
        const bool new_json = stat(json, &x) != 0, new_plot = stat(plot, &y) != 0;
        same = new_json && new_plot ? strcmp(json, plot) == 0 || would_be_same(json, plot)
                                    : !new_json && !new_plot && is_same(&x, &y);
    }
    if (same) cli_fail(CLI_USAGE, "--json and --plot are both %s: name two files", json);
    return !same;
}

void output_restart(output *o) {
    struct stat status;
    if (output_is_stdout(o->path) || !is_regular(o, &status)) return;
    rewind(o->file);
    if (ftruncate(fileno(o->file), 0) != 0 && !o->error) o->error = errno;
}

bool output_close(output *o) {
    if (!o->file) return true;
    struct stat status;
    errno = 0;
    const bool failed = ferror(o->file) != 0, flushed = fflush(o->file) == 0;
    if ((failed || !flushed) && !o->error) o->error = errno ? errno : EIO;
    if (o->made && is_regular(o, &status) && status.st_size == 0) unlink(o->path);
    if (fclose(o->file) != 0 && !o->error) o->error = errno ? errno : EIO;
    o->file = NULL;
    if (o->error) cli_fail(CLI_FAILURE, "cannot write %s: %s", o->name, strerror(o->error));
    return o->error == 0;
}
