/* The targets of a loss: one class per row, one value of which means "leave this row out". */
#ifndef FATTNI_AUTOGRAD_OPS_LOSS_TARGETS_H
#define FATTNI_AUTOGRAD_OPS_LOSS_TARGETS_H

#include "autograd_c/ops/ops.h"

enum { FATTNI_EXP_BLOCK = 64 }; /* exponentials that cross_entropy_row.inc buffers */

typedef struct fattni_targets {
    const int32_t *data;
    fattni_rows rows;
    int64_t count;
    int32_t ignore;
} fattni_targets;

fattni_targets fattni_targets_of(const fattn_tensor *t, int32_t ignore);

static inline int32_t fattni_target(const fattni_targets *t, int64_t row) {
    const int64_t columns = t->rows.columns;
    return t->data[fattni_row(&t->rows, row / columns) + row % columns * t->rows.step];
}

/* Counts the rows that are kept; a target that is neither ignored nor in 0..V-1 is FATTN_E_ARG. */
fattn_status fattni_targets_check(fattn_ctx *ctx, const char *op, const fattni_targets *t, int64_t V, int64_t *kept);

#endif
