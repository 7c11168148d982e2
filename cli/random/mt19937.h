/* The Mersenne Twister (Matsumoto and Nishimura 1998) as PyTorch and llm.c use it: the same words, the same normal
   numbers, the same permutations for a seed. */
#ifndef FATTNI_CLI_RANDOM_MT19937_H
#define FATTNI_CLI_RANDOM_MT19937_H

#include <stdint.h>

enum { MT19937_WORDS = 624 };

typedef struct mt19937 {
    int32_t left;  /* draws until the words are made anew, plus one */
    uint32_t next; /* the word that the next draw takes */
    uint32_t word[MT19937_WORDS];
} mt19937;

void mt19937_seed(mt19937 *g, uint32_t seed);
uint32_t mt19937_draw(mt19937 *g); /* 32 bits */

/* n numbers of mean 0 and this deviation, by Box and Muller's method in F32: torch.normal_ on a CPU tensor. From n = 16
   on in blocks of 16, of 24-bit uniforms; when n is not a multiple of 16 the last 16 numbers are drawn once more. */
void mt19937_normal(mt19937 *g, float *x, int64_t n, float std);

/* Fisher and Yates, from the end: i is swapped with draw mod (i+1), for i = n-1 to 1. */
void mt19937_shuffle(mt19937 *g, int32_t *x, int64_t n);

#endif
