/* Random numbers of the training program: Philox4x32-10, counter based. A draw is a pure function of (seed,
   stream, index, number of draws before), so the state of a run is a few integers. */
#ifndef FATTNI_CLI_RANDOM_RANDOM_H
#define FATTNI_CLI_RANDOM_RANDOM_H

#include "core/tensor/philox.h"

/* Word 3 of the counter, far from the small stream numbers that the library's callers use. */
enum random_stream {
    RANDOM_INIT = 0x7f000000, /* parameter i takes stream RANDOM_INIT + i */
    RANDOM_TRAIN = 0x7e000000,
    RANDOM_TEST,
    RANDOM_ORDER,
    RANDOM_SAMPLE
};

typedef struct draws {
    uint64_t seed;
    fattni_block counter, block;
    int used; /* words of block */
} draws;

static inline draws draws_at(uint64_t seed, enum random_stream stream, uint64_t index) {
    const fattni_block counter = {{0, (uint32_t)index, (uint32_t)(index >> 32), (uint32_t)stream}};
    return (draws){.seed = seed, .counter = counter, .used = 4};
}

static inline uint32_t draw_word(draws *d) {
    if (d->used == 4) {
        d->block = fattni_philox(d->seed, d->counter);
        d->counter.w[0] += 1;
        d->used = 0;
    }
    return d->block.w[d->used++];
}

/* Word number n from the beginning, where d is what draws_at gave. */
static inline uint32_t draw_word_at(const draws *d, uint64_t n) {
    fattni_block counter = d->counter;
    counter.w[0] += (uint32_t)(n / 4);
    return fattni_philox(d->seed, counter).w[n % 4];
}

/* Uniform in 0..n-1, n > 0, without bias: multiply and reject (Lemire 2019). */
static inline uint32_t draw_below(draws *d, uint32_t n) {
    const uint32_t threshold = (0u - n) % n;
    uint64_t product = (uint64_t)draw_word(d) * n;
    while ((uint32_t)product < threshold) product = (uint64_t)draw_word(d) * n;
    return (uint32_t)(product >> 32);
}

#endif
