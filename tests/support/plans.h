/* What fattn_attention_query promises of its bytes, for every kernel of a context's device. */
#ifndef TEST_PLANS_H
#define TEST_PLANS_H

#include "core/base/internal.h"

/* Queries about calls of all dtypes, algorithms, lengths and features: the bytes do not depend on where
   tensors lie, and without d_o suffice for each d_o that backward takes. No address is followed, so a
   context that only looks like one on a GPU will do. Returns the number of calls it compared. */
int plans_check(fattn_ctx *ctx);

#endif
