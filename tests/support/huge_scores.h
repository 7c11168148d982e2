/* Scores from 1e4 to the end of the range, of either sign: from a bias, ALiBi slopes, q and k, a sink, under
   a softcap as large. All terms of a score are integers times powers of two whose products and sums are exact
   in any order, so that every algorithm has the same scores, rounded once, and FATTN_ALGO_STANDARD, whose
   softmax takes differences first and whose backward reads P, is what the others must give. */
#ifndef TEST_HUGE_SCORES_H
#define TEST_HUGE_SCORES_H

#include "attention.h"

/* All dtypes: walks every fourth case or so of the whole product; -1 when there are no more. */
extern const int huge_case_count;

/* Case number n for head_dim D in that dtype; what it is about stands in its name. */
attention_case huge_case(int n, int64_t D, fattn_dtype dtype);

/* The case by `by` (LIBRARY on ctx, or ON_DEVICE through on_device), with c's algorithm, beside STANDARD by the
   same: O, L, the gradients; and the rows of P sum to 1 in backward: with dO = 1, the sum of dV over the keys is
   the number of rows that see some. */
void huge_check(fattn_ctx *ctx, int n, const attention_case *c, enum engine by,
                fattn_status (*on_device)(attention *a, enum fattni_pass pass));

/* F64: gradients of keys whose L is huge and that of other keys, too, beside the oracle's. */
void huge_check_parts(fattn_ctx *ctx, enum engine by,
                      fattn_status (*on_device)(attention *a, enum fattni_pass pass));

#endif
