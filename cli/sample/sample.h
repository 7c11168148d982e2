/* The choice of a token by its logits. */
#ifndef FATTNI_CLI_SAMPLE_SAMPLE_H
#define FATTNI_CLI_SAMPLE_SAMPLE_H

#include <stdint.h>

/* Applied in this order. */
typedef struct sample_options {
    double temperature; /* divides the logits; 0 = always the most likely symbol */
    int64_t top_k;      /* choose among the k most likely; 0 = among all */
    double top_p;       /* of these among the most likely whose probabilities, which sum to 1 over them, first sum to
                           top_p or more (Holtzman et al. 2020); 0 or 1 = among all of them */
    uint64_t seed;
} sample_options;

/* One of 0..n-1, n < 2^31, with probability softmax(logits/temperature) over those that top_k and top_p leave. Of equal
   logits the first is the more likely one. `number` is the index of the draw for a seed; scratch has room for n. */
int64_t sample_choose(const float *logits, int64_t n, const sample_options *o, int64_t number, int32_t *scratch);

#endif
