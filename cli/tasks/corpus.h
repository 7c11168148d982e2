/* Text as numbers, split by records into a training part and a held-out part. */
#ifndef FATTNI_CLI_TASKS_CORPUS_H
#define FATTNI_CLI_TASKS_CORPUS_H

#include "cli/output/files.h"

#include <stdbool.h>
#include <stdint.h>

enum { TEXT_SYMBOLS = 256 }; /* a symbol is a byte, so that any encoding works */

typedef struct text_buffer {
    uint8_t *symbols; /* bytes */
    int64_t n, capacity;
} text_buffer;
typedef struct corpus {
    text_buffer train, held_out;
    uint64_t fingerprint; /* hash of both */
} corpus;

/* path: a file, or a folder whose files are read in the order of their names, except links, *.dat
   (indices of fortune files) and hidden files. A record ends with a line that has only '%', which it
   includes; a file without such lines is cut into records of 1024 bytes. Records are held out in the
   order of a hash of their bytes, copies together, up to a tenth of all bytes. If that gives less than a
   twentieth, because records are few, large or all equal, the last tenth of the text is held out instead.
   Each part has at least 2 bytes, if there are any. False after an error message. */
bool corpus_read(corpus *c, const char *path);
/* Visits the files that corpus_read reads. False after an error message, or when f has ended it. */
bool corpus_each(const char *path, file_visit *f, void *arg);
/* The smallest text, in bytes, that leaves `train` bytes to train on: the split leaves nine tenths. */
int64_t corpus_needed(int64_t train);
void corpus_free(corpus *c);

#endif
