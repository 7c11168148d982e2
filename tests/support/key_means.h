/* Keys whose channels have means of many standard deviations, where a rounding of delta or dS is multiplied by them. */
#ifndef TEST_KEY_MEANS_H
#define TEST_KEY_MEANS_H

#include "attention.h"

/* With means of 100, 10, 3 and 1 standard deviations, those from `least` on, in four channels of K, dQ of the case is
   at most 1.5 times as far from the fp64 reference as without them, and what F32 scores of that size are off, in the
   Frobenius norm relative to its own size. on_device: for the engine ON_DEVICE. */
void key_means_check(fattn_ctx *ctx, const attention_case *c, double least, enum engine by,
                     fattn_status (*on_device)(attention *a, enum fattni_pass pass));

/* How far dQ and dK are from the fp64 reference on the same inputs, with means of `key` in four channels of K and of
   `value` in all of V: in the Frobenius norm, relative to their own size. */
typedef struct gradient_errors {
    double dq, dk;
} gradient_errors;
gradient_errors key_means_errors(fattn_ctx *ctx, const attention_case *c, double key, double value, enum engine by,
                                 fattn_status (*on_device)(attention *a, enum fattni_pass pass));

/* Adds K's mean to four channels, and V's to each `every`-th. Of F32 queries and keys are rounded to BF16: TF32 would
   round them, an error of S that grows with the mean. */
typedef struct key_means {
    double key, value;
    int64_t every;
} key_means;
void key_means_add(attention *a, key_means add);

/* Keys from `begin` on have a mean of K in four channels, but rows [0, rows) do not see them, or a bias of `mask`, 0
   for the others, masks them: dQ of these rows is at most 1.5 times as far from the reference as without it. Means of 3
   to 3000. */
typedef struct hidden_means {
    int64_t begin;
    double mask;
    int64_t rows;
} hidden_means;
void key_means_check_hidden(fattn_ctx *ctx, const attention_case *c, const hidden_means *x, enum engine by,
                            fattn_status (*on_device)(attention *a, enum fattni_pass pass));
/* Adds it; of dQ's rows [0, rows), relative to the reference's. */
void key_means_add_hidden(attention *a, double mean, const hidden_means *x);
double key_means_hidden_error(const attention *got, int64_t rows);

typedef struct hidden_means_case {
    attention_case c;
    hidden_means x;
} hidden_means_case;
extern const hidden_means_case hidden_means_cases[];
extern const int hidden_means_case_count;

/* Masks and features, of 300 to 520 rows and keys. */
extern const attention_case key_means_cases[];
extern const int key_means_case_count;

#endif
