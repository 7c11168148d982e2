/* What the tape and the optimizers call of a reducer. */
#ifndef FATTNI_AUTOGRAD_PARALLEL_REDUCER_H
#define FATTNI_AUTOGRAD_PARALLEL_REDUCER_H

#include "core/base/internal.h"

#include <fattn/parallel.h>

enum { FATTNI_SHARE_ELEMENTS = 16384 }; /* a rank owns whole pieces of so many elements, but for a parameter's last */

/* ---- for the tape: around backward ---- */

/* An op in the graph uses p; once for each of its inputs. p NULL, and params that are not r's, are ignored. */
void fattni_reducer_use(fattn_reducer *r, const fattn_param *p);
/* All uses are known: starts the buckets that have none. */
fattn_status fattni_reducer_begin(fattn_reducer *r);
/* The backward of one such use is done. */
fattn_status fattni_reducer_used(fattn_reducer *r, const fattn_param *p);

/* ---- for optimizers: to owners ---- */

/* Returns s; if that is a failure, the group has ended. */
fattn_status fattni_reducer_end(fattn_reducer *r, fattn_status s);
/* ARG unless r was made for these params, to owners, on ctx; who: in error messages. */
fattn_status fattni_reducer_check(const fattn_reducer *r, fattn_ctx *ctx, const char *who, fattn_param *const *params,
                                  int n);
/* STATE: a pass has not been finished. */
fattn_status fattni_reducer_check_idle(const fattn_reducer *r, const char *who);
/* Zeroes the gradients' elements of other ranks. */
fattn_status fattni_reducer_zero_others(fattn_reducer *r);
/* Collective: every rank gets the values of the other ranks' elements. */
fattn_status fattni_reducer_gather_values(fattn_reducer *r);
/* Collective: rank 0's data, of params[i]'s size in elements of `size` bytes, gets the other ranks' elements. */
fattn_status fattni_reducer_gather_first(fattn_reducer *r, int i, void *data, size_t size);

#endif
