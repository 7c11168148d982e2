/* What the kernel of fattn_sample is told. */
#ifndef FATTNI_CORE_SAMPLING_SAMPLE_ARGS_H
#define FATTNI_CORE_SAMPLING_SAMPLE_ARGS_H

#include "core/sampling/sample.h"

enum {
    FATTNI_SAMPLE_THREADS = 512,
    FATTNI_SAMPLE_FOURS = 4,  /* tokens that a thread loads before it looks at one, in fours */
    FATTNI_SAMPLE_CLUSTER = 8 /* CTAs that share a row, at most; from sm_90 on */
};
#define FATTNI_SAMPLE_CHUNK ((int64_t)FATTNI_SAMPLE_THREADS * FATTNI_SAMPLE_FOURS * 4)

typedef struct fattni_sample_args {
    fattni_sample job;
    int32_t fours;   /* logits of 16 or 32 bits that are read as vectors of four */
    int32_t cluster; /* CTAs of a row: each takes every so many chunks */
} fattni_sample_args;

/* What a CTA tells the others of its cluster. */
enum { FATTNI_SAMPLE_BINS = 8 };
typedef struct fattni_sample_told {
    uint64_t bins[2][FATTNI_SAMPLE_BINS]; /* of one digit and of the next one, in turns */
    uint64_t top;
    int64_t bad, chosen;
    double highest;
} fattni_sample_told;

#endif
