/* Files of llm.c: little-endian, with headers of 256 words of 32 bits; words without a meaning are 0. Every error
   message names the file, the offset in bytes, what is there and what is expected. */
#ifndef FATTNI_CLI_LLMC_FILE_H
#define FATTNI_CLI_LLMC_FILE_H

#include <fattn/base.h>

#include <stdbool.h>
#include <stdio.h>

enum { LLMC_HEADER_WORDS = 256, LLMC_HEADER_BYTES = 1024 };

/* The first word of each kind of file. */
enum {
    LLMC_TOKENS = 20240520,
    LLMC_TOKENS_32 = 20240801, /* Llama's: tokens of 32 bits */
    LLMC_MODEL = 20240326,
    LLMC_STATE = 20240527,
    LLMC_TOKENIZER = 20240328,
    LLMC_EVALUATION = 20240522
};

typedef struct llmc_file {
    FILE *file;
    const char *path; /* the caller's */
    int64_t size;     /* bytes */
    int32_t header[LLMC_HEADER_WORDS];
} llmc_file;

/* Opens a regular file and reads its header. False after an error message. */
bool llmc_open(llmc_file *f, const char *path);
void llmc_close(llmc_file *f);

/* False after an error message: word number `word` of the header is not `expected`, or not in least..most. */
bool llmc_expect(const llmc_file *f, int word, int64_t expected, const char *what);
bool llmc_in_range(const llmc_file *f, int word, int64_t least, int64_t most, const char *what);
/* False after an error message that says how many bytes the file should have. */
bool llmc_has_bytes(const llmc_file *f, int64_t bytes);
/* Prints "PATH, offset N: <error message>"; false. */
bool llmc_fail(const char *path, int64_t offset, const char *format, ...) FATTN_PRINTF(3, 4);

/* Reads n bytes at an offset. False after an error message: the file ends before, or cannot be read. */
bool llmc_read(llmc_file *f, int64_t offset, void *to, int64_t n);

/* Numbers as the files have them, whatever the machine. */
static inline uint32_t llmc_u16(const unsigned char *b) { return (uint32_t)b[0] | (uint32_t)b[1] << 8; }
static inline uint32_t llmc_u32(const unsigned char *b) { return llmc_u16(b) | llmc_u16(b + 2) << 16; }
static inline uint64_t llmc_u64(const unsigned char *b) { return llmc_u32(b) | (uint64_t)llmc_u32(b + 4) << 32; }
static inline void llmc_put_u16(unsigned char *b, uint32_t x) {
    b[0] = (unsigned char)x, b[1] = (unsigned char)(x >> 8);
}
static inline void llmc_put_u32(unsigned char *b, uint32_t x) { llmc_put_u16(b, x), llmc_put_u16(b + 2, x >> 16); }
static inline void llmc_put_u64(unsigned char *b, uint64_t x) {
    llmc_put_u32(b, (uint32_t)x), llmc_put_u32(b + 4, (uint32_t)(x >> 32));
}

/* A header of these words; the others are 0. */
void llmc_header(unsigned char header[LLMC_HEADER_BYTES], const int32_t *words, int n);

#endif
