/* Shared by the fuzz targets. A target is one function of a byte string: it returns, or it ends the process.
   libFuzzer calls it in the preset cpu-fuzz; otherwise replay.c does, with the seeds. */
#ifndef FUZZ_H
#define FUZZ_H

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

/* Always 0. */
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

#define FUZZ_CHECK(condition, ...)                                                                                     \
    do {                                                                                                               \
        if (condition) break;                                                                                          \
        fprintf(stderr, "%s:%d: %s: ", __FILE__, __LINE__, #condition);                                                \
        fprintf(stderr, __VA_ARGS__);                                                                                  \
        fputc('\n', stderr);                                                                                           \
        abort();                                                                                                       \
    } while (0)

/* The input as a sequence of choices. After its end all are 0, the simplest choice. */
typedef struct fuzz_input {
    const uint8_t *next, *end;
} fuzz_input;

static inline unsigned fuzz_byte(fuzz_input *in) { return in->next < in->end ? *in->next++ : 0; }
static inline unsigned fuzz_below(fuzz_input *in, unsigned n) { return fuzz_byte(in) % n; }
static inline uint64_t fuzz_word(fuzz_input *in, int bytes) {
    uint64_t word = 0;
    for (int n = 0; n < bytes; ++n) word |= (uint64_t)fuzz_byte(in) << (8 * n);
    return word;
}

/* An invalid or extreme size, stride, count or code. */
static inline int64_t fuzz_hostile(fuzz_input *in) {
    static const int64_t common[] = {0,         -1,           1,         2,         3,         5,         255,
                                     257,       65535,        65536,     INT32_MAX, INT32_MIN, 1ll << 31, 1ll << 32,
                                     1ll << 33, 1ll << 40,    1ll << 47, 1ll << 60, 1ll << 61, 1ll << 62, INT64_MAX,
                                     INT64_MIN, INT64_MIN + 1};
    enum { COUNT = sizeof common / sizeof *common };
    const unsigned choice = fuzz_below(in, COUNT + 2);
    if (choice < COUNT) return common[choice];
    return choice == COUNT ? (int64_t)fuzz_word(in, 8) : (int64_t)(int16_t)fuzz_word(in, 2);
}

#endif
