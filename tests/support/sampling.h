/* Calls of fattn_sample and what they must choose, from a sort of all tokens and sums in order. On any device. */
#ifndef TEST_SAMPLING_H
#define TEST_SAMPLING_H

#include <fattn/fattn.h>

typedef struct sampling_rule {
    double temperature, top_p;
    int32_t top_k;
    fattn_rng rng;
} sampling_rule;

/* The token of one row. */
int32_t sampling_expected(const float *logits, int64_t V, const sampling_rule *r, int32_t draw);
/* fattn_sample of one row in host memory; of a CPU context. */
int32_t sampling_of_row(fattn_ctx *ctx, const float *logits, int64_t V, const sampling_rule *r, int32_t draw);

enum { SAMPLING_CASES = 240, SAMPLING_LARGE = 6 };
/* Case number n: rows of some kind, dtype and strides, all tokens and draws against the above. */
void sampling_check(fattn_ctx *ctx, int n);
/* The same with V of tens of thousands. */
void sampling_check_large(fattn_ctx *ctx, int n);
/* -1 where a row has NaN, infinity or nothing. */
void sampling_check_bad_rows(fattn_ctx *ctx);

#endif
