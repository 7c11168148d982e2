/* Text as numbers, split by records into a training part and a held-out part. */
#ifndef CLI_CORPUS_H
#define CLI_CORPUS_H

#include <stdbool.h>
#include <stdint.h>

/* 95 printable ASCII characters, then the newline. A tab becomes a space, a backspace takes back
   the character before it, a UTF-8 character becomes '?', other control characters vanish. */
enum { TEXT_SYMBOLS = 96, TEXT_NEWLINE = 95 };
char text_char(int symbol);
int text_symbol(unsigned char c); /* -1: none */

typedef struct text_buffer {
    uint8_t *symbols;
    int64_t n, capacity;
} text_buffer;
typedef struct corpus {
    text_buffer train, held_out;
    uint64_t fingerprint; /* hash of both */
} corpus;

/* path: a file, or a folder whose files are read in the order of their names, but for links, *.dat
   (indices of fortune files) and hidden ones. Records end at lines that hold only '%', and keep
   that line; a file without such lines is cut into records of 1024 characters. Every tenth record,
   by a hash of its characters, is held out, so that copies of a record fall on the same side. False
   after a sentence. */
bool corpus_read(corpus *c, const char *path);
void corpus_free(corpus *c);

#endif
