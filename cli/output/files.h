/* Files given by the user: inputs must be regular files, outputs are opened before the work starts. */
#ifndef FATTNI_CLI_OUTPUT_FILES_H
#define FATTNI_CLI_OUTPUT_FILES_H

#include <stdbool.h>
#include <stdio.h>

/* Opens a regular file for reading. Anything else is rejected: a pipe or a device may block, or never end.
   NULL after an error message. */
FILE *input_open(const char *path);
/* For each of some files; false ends it. */
typedef bool file_visit(void *arg, const char *path);

/* An existing file is appended to, or kept until output_restart: until there is something to replace it with. */
typedef enum output_mode { OUTPUT_APPEND, OUTPUT_LATER } output_mode;

typedef struct output {
    FILE *file; /* NULL: no output */
    const char *path;
    const char *name; /* for error messages: the path, or "standard output" */
    bool made;        /* the file was not there before */
    int error;        /* errno of the first failure, 0 */
} output;

/* Opens a file for writing and creates the folders above it. path NULL: no output. "-", or another name of the file or
   pipe that it is: standard output; o->path is "-" then, and the program's own text goes to standard error from now on.
   False after an error message. */
bool output_open(output *o, const char *path, output_mode mode);
void output_restart(output *o); /* empties the file; standard output may hold what others wrote, and stays */
/* False after an error message, when this or, by o->error, an earlier write failed: a full disk is an error.
   A file that was created here and is still empty is removed. True if there is no output, or it is closed. */
bool output_close(output *o);
bool output_is_stdout(const char *path); /* "-"; NULL is none */
/* Two outputs of a command (NULL = none) must be different files, or devices. False after an error message. */
bool output_differ(const char *json, const char *plot);
typedef struct named_output {
    const char *option, *path; /* "json"; NULL = none */
} named_output;
/* A named_output must not be a file that the command reads (NULL = none). False after an error message. */
bool output_spares(void *to, const char *input);

#endif
