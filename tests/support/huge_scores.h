/* Scores from 1e4 to the end of the range, of either sign: from a bias, ALiBi slopes, q and k, a sink, under
   a softcap as large. All terms of a score are integers times powers of two whose products and sums are exact
   in any order, so that every algorithm has the same scores, rounded once. FATTN_ALGO_STANDARD, whose
   softmax takes differences first and whose backward reads P, gives the expected results. */
#ifndef TEST_HUGE_SCORES_H
#define TEST_HUGE_SCORES_H

#include "attention.h"

/* The number of cases. */
extern const int huge_case_count;

/* Case number n for head_dim D in that dtype; its name describes it. */
attention_case huge_case(int n, int64_t D, fattn_dtype dtype);

/* Runs the case with `by` (LIBRARY on ctx, or ON_DEVICE through on_device) and c's algorithm, and compares O, L and
   the gradients with STANDARD's. Also checks that rows of P sum to 1 in backward: with dO = 1, the sum of dV over the
   keys is the number of rows that see a key. */
void huge_check(fattn_ctx *ctx, int n, const attention_case *c, enum engine by,
                fattn_status (*on_device)(attention *a, enum fattni_pass pass));

/* F64: gradients for a huge L that also covers other keys, against the reference's. */
void huge_check_parts(fattn_ctx *ctx, enum engine by, fattn_status (*on_device)(attention *a, enum fattni_pass pass));

#endif
