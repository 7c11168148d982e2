/* Simple F64 ops for tests of the tape: any shape, any strides. */
#ifndef TEST_TAPE_OPS_H
#define TEST_TAPE_OPS_H

#include <fattn/tape.h>

/* Element number e in row-major order. */
double *element(const fattn_tensor *t, int64_t e);

/* a*b of one shape. Uses and overwrites saved memory and workspace; writes d_b before d_a. */
fattn_var mul(fattn_tape *t, fattn_var a, fattn_var b);
fattn_var add(fattn_tape *t, fattn_var a, fattn_var b);
/* Sum over everything: a scalar. */
fattn_var sum(fattn_tape *t, fattn_var x);
/* The elements of a, then those of b, as a vector. */
fattn_var join(fattn_tape *t, fattn_var a, fattn_var b);
/* Elements [begin, end) along dim: a view. */
fattn_var slice(fattn_tape *t, fattn_var x, int64_t dim, int64_t begin, int64_t end);
/* Elements 0, step, 2 step, ... along dim: a view. */
fattn_var every(fattn_tape *t, fattn_var x, int64_t dim, int64_t step);
/* Elements in reverse order along dim: a view. */
fattn_var reverse(fattn_tape *t, fattn_var x, int64_t dim);
/* Dimensions in reverse order: a view. */
fattn_var transpose(fattn_tape *t, fattn_var x);

extern int mul_backward_calls;
extern uint8_t mul_fresh[2]; /* d_in_fresh of mul's last backward */

/* A parameter of up to 60 elements: 1, 1.5, 2, ... and zero gradients. */
typedef struct leaf {
    double value[60], grad[60];
    fattn_param p;
} leaf;
void leaf_init(leaf *l, int ndim, const int64_t *shape);

#endif
