/* A custom op of this program: y[b,s] = x[b,s-1], y[b,0] = 0, along the rows of a sequence. */
#ifndef FATTNI_CLI_TRAIN_OP_SHIFT_H
#define FATTNI_CLI_TRAIN_OP_SHIFT_H

#include <fattn/tape.h>

/* x [B,S,C], row-major. carried, for graphs without backward: NULL, or [B,1,C] on the device, which outlives the call:
   the row before x's first, in place of zeros; then it becomes x's last row. */
fattn_var op_shift(fattn_tape *t, fattn_var x, const fattn_tensor *carried);

#endif
