/* Checks that fattn_attention_query's sizes suffice, for all kernels of a context's device. */
#ifndef TEST_PLANS_H
#define TEST_PLANS_H

#include "core/base/internal.h"

/* Queries for calls of all dtypes, algorithms, lengths and features: the sizes do not depend on addresses, and
   without d_o suffice for each d_o that backward supports. No address is dereferenced, so a fake context of a GPU
   can be used. Returns the number of calls that were compared. */
int plans_check(fattn_ctx *ctx);

#endif
