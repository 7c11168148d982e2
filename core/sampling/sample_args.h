/* What the kernel of fattn_sample is told. */
#ifndef FATTNI_CORE_SAMPLING_SAMPLE_ARGS_H
#define FATTNI_CORE_SAMPLING_SAMPLE_ARGS_H

#include "core/sampling/sample.h"

enum { FATTNI_SAMPLE_THREADS = 512 }; /* a row is one CTA's */

typedef struct fattni_sample_args {
    fattni_sample job;
    int32_t fours; /* logits of 16 or 32 bits that are read as vectors of four */
    int32_t reserved;
} fattni_sample_args;

#endif
