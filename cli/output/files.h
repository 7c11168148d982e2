/* Files that a user names: read only when they are files, and known to be writable before the work. */
#ifndef FATTNI_CLI_OUTPUT_FILES_H
#define FATTNI_CLI_OUTPUT_FILES_H

#include <stdbool.h>
#include <stdio.h>

/* Opens a regular file for reading. Anything else is refused at once: a pipe or a device may never
   answer, or never end. NULL after a sentence. */
FILE *input_open(const char *path);

/* What becomes of a file that is there already: emptied now; gone on with at its end; kept until
   output_restart, for what is written after long work. */
typedef enum output_mode { OUTPUT_REPLACE, OUTPUT_APPEND, OUTPUT_LATER } output_mode;

typedef struct output {
    FILE *file; /* NULL: none is wanted */
    const char *path;
    const char *name; /* for sentences: the path, or "standard output" */
    bool made;        /* the file was not there before */
    int error;        /* errno of the first failure, 0 */
} output;

/* Opens a file for writing and makes the folders above it. path NULL: none. "-": standard output; what
   the program prints there itself goes to standard error from now on. False after a sentence. */
bool output_open(output *o, const char *path, output_mode mode);
void output_restart(output *o); /* empties it: what is written from now on is all */
/* False after a sentence, when this or, by o->error, an earlier write failed: a full disk is an error.
   A file that this output made and nothing was written to is removed. None, or closed: true. */
bool output_close(output *o);
bool output_is_stdout(const char *path); /* "-"; NULL is none */
/* Two outputs of a command, either NULL = none, must be two files: one would replace the other. False
   after a sentence. */
bool output_differ(const char *json, const char *plot);

#endif
