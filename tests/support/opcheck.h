/* Checks of one op with all kinds of inputs on a tape: parameters, whose gradients are added to;
   intermediate variables, whose first gradient overwrites; variables used twice; strided views. */
#ifndef FATTN_TEST_OPCHECK_H
#define FATTN_TEST_OPCHECK_H

#include <fattn/fattn.h>

#include <stdbool.h>

enum { OPCHECK_INPUTS = 6 };

typedef struct op_input {
    int ndim;
    int64_t shape[FATTN_MAX_DIMS];
    int32_t classes; /* 0: normal numbers; n: I32 in 0..n-1; then every fifth element is `ignore` */
    int32_t ignore;
    bool absent;
} op_input;

typedef fattn_var (*op_graph)(fattn_tape *t, const fattn_var *in);
/* The op by its definition, in double; in[i] and y row-major. */
typedef void (*op_reference)(const double *const *in, const int32_t *const *ids, double *y);

/* Its gradients for the gradient dy of y, into d[i]; for cases too large for differences. */
typedef void (*op_gradient)(const double *const *in, const int32_t *const *ids, const double *dy, double *const *d);

typedef struct op_case {
    const char *name;
    op_graph graph;
    op_reference reference;
    op_gradient gradient; /* NULL: only opcheck_gradients checks gradients in F64 */
    int n;
    op_input in[OPCHECK_INPUTS];
    bool any_strides; /* the last dimension of inputs may be strided, too */
    double roundings; /* on the longest path from an input to y or to a gradient */
} op_case;

typedef enum op_surrounding {
    OP_PLAIN,   /* parameters */
    OP_FRESH,   /* copies of parameters */
    OP_TWICE,   /* copies, and y = op(in) + 2 op(in) */
    OP_VIEWS,   /* leading dimensions in reverse order, gaps between rows */
    OP_STRIDED, /* all dimensions in reverse order, gaps between elements */
    OP_SURROUNDINGS
} op_surrounding;

/* y, and the gradients of y.cotangent; row-major, of the case's shapes; malloc'ed. */
typedef struct op_result {
    fattn_tensor y, d[OPCHECK_INPUTS]; /* d: data NULL for ids and absent inputs */
} op_result;

/* Runs the case; every status must be OK. */
op_result op_run(const op_case *c, op_surrounding how, fattn_dtype dtype, int threads);
void op_release(op_result *r);

/* All of these assert. */
void opcheck_values(const op_case *c);    /* F64 against the references, in every surrounding */
void opcheck_gradients(const op_case *c); /* against central differences, in every surrounding */
void opcheck_f32(const op_case *c);       /* values and gradients against F64 */
void opcheck_threads(const op_case *c);   /* equal bits on 1, 2 and 3 threads without AVX2, with it, with AVX-512 */
void opcheck(const op_case *c);           /* all four */

/* An op that must fail, on inputs of given dtypes and shapes, without a gradient. */
typedef struct op_error {
    op_graph graph;
    fattn_status status;
    const char *message; /* a part of it */
    int n;
    struct {
        fattn_dtype dtype;
        int ndim;
        int64_t shape[FATTN_MAX_DIMS];
        int32_t fill;
    } in[OPCHECK_INPUTS];
} op_error;
void opcheck_errors(const op_error *r, int count);

/* The scalar sum of x*w for a fixed pseudo-random w; backward: w. */
fattn_var op_contract(fattn_tape *t, fattn_var x);

#endif
