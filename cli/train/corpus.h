/* Text as numbers, split by records into a training part and a held-out part. */
#ifndef FATTNI_CLI_TRAIN_CORPUS_H
#define FATTNI_CLI_TRAIN_CORPUS_H

#include <stdbool.h>
#include <stdint.h>

enum { TEXT_SYMBOLS = 256 }; /* a symbol is a byte: any encoding comes back as it was */

typedef struct text_buffer {
    uint8_t *symbols; /* bytes */
    int64_t n, capacity;
} text_buffer;
typedef struct corpus {
    text_buffer train, held_out;
    uint64_t fingerprint; /* hash of both */
} corpus;

/* path: a file, or a folder whose files are read in the order of their names, but for links, *.dat
   (indices of fortune files) and hidden ones. Records end at lines that hold only '%', and keep
   that line; a file without such lines is cut into records of 1024 bytes. Records in the order of a
   hash of their bytes are held out, copies together, as long as a tenth of all bytes is not
   exceeded. Where that gives less than a twentieth, the records being few, large or all the same,
   the last tenth of the text is held out instead. Either is 2 bytes at least, if there are any.
   False after a sentence. */
bool corpus_read(corpus *c, const char *path);
/* The least bytes of a text that leave `train` to train on: the split leaves nine tenths. */
int64_t corpus_needed(int64_t train);
void corpus_free(corpus *c);

#endif
