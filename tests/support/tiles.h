/* Shared by the tests of the CPU tiles. */
#ifndef TEST_TILES_H
#define TEST_TILES_H

#include "attention.h"

/* Case number n of a list over shapes, head dimensions, masks, head groups and layouts. */
attention_case tiles_case(int n, fattn_dtype dtype);

/* A small case, such as those of attention_features and attention_mix, with sizes that cross tiles. */
attention_case tiles_enlarge(const attention_case *c, int n);

/* Case number n of an endless list: features mixed at random, dtypes, layouts, sizes. */
attention_case tiles_random(int n);

/* The library, on every instruction set of this machine, against the reference in F64 on the same inputs:
   forward only, or both passes. Bounds: F64 1e-12; F32 twice the error of FATTN_ALGO_STANDARD plus `granted`
   (tiles.c); 16 bits, which are only a storage format, that plus one rounding of the result. */
void tiles_check_forward(const attention_case *c);
void tiles_check_backward(const attention_case *c);
/* The same, with inputs that `change` has changed, and a tolerance of its own: with an rtol it
   replaces the baseline. */
void tiles_check_changed(const attention_case *c, bool backward, void (*change)(attention *a), fattn_tolerance tol);
/* Random cases, each on one instruction set and one number of threads. */
void tiles_check_random(int first, int count);
/* Both passes of an F32 or F64 case by attention.on_device, within the same bounds. */
void tiles_check_on_device(const attention_case *c, fattn_status (*on_device)(attention *a, enum fattni_pass pass));
/* Sets all elements of an input. */
void tiles_fill(attention *a, enum tensor_id id, double x);

#endif
