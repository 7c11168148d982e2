/* llm.c's tokenizer file: the bytes of each token. GPT-2's ids are the ranks of its merges, so that the file also
   encodes: byte pair encoding (Sennrich et al. 2016) merges, in each piece of the text, the two neighbours whose
   joint bytes are the token of least id, until none are a token. Pieces are those of GPT-2's regular expression:
       's|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+ */
#ifndef FATTNI_CLI_LLMC_TOKENIZER_H
#define FATTNI_CLI_LLMC_TOKENIZER_H

#include "cli/train/durable.h"

#include <stdbool.h>
#include <stdint.h>

typedef struct tokenizer {
    int64_t n;            /* tokens */
    int32_t end;          /* the one before each document; text never becomes it */
    unsigned char *bytes; /* of all tokens, one after another */
    int64_t *at;          /* [n+1]: where each begins */
    int32_t *slots;       /* hash table of ids, -1 = free */
    uint64_t mask;        /* its size - 1 */
    const char *path;     /* the caller's; NULL: of no file */
} tokenizer;

/* False after an error message: file, offset and expected value. */
bool tokenizer_read(tokenizer *t, const char *path);
/* 256 bytes, and <|endoftext|> as number 256. False after an error message. */
bool tokenizer_of_bytes(tokenizer *t);
/* Appends the file's bytes to a stream that has begun. False after an error message. */
bool tokenizer_put(const tokenizer *t, durable_stream *s);
void tokenizer_free(tokenizer *t);

/* The bytes of a token in 0..n-1. */
static inline const unsigned char *tokenizer_text(const tokenizer *t, int64_t token, int64_t *length) {
    *length = t->at[token + 1] - t->at[token];
    return t->bytes + t->at[token];
}

typedef struct token_list {
    uint32_t *token;
    int64_t n, capacity;
} token_list;

bool token_list_add(token_list *l, uint32_t token); /* false after an error message */
/* Appends the tokens of n bytes, in any encoding: what is no UTF-8 counts as characters that are neither letters,
   numbers nor spaces. False after an error message: a byte that is no token, no memory. */
bool tokenizer_encode(const tokenizer *t, const unsigned char *text, int64_t n, token_list *to);

#endif
