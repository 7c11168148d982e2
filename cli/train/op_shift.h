/* A custom op of this program: y[b,s] = x[b,s-1], y[b,0] = 0, along the rows of a sequence. */
#ifndef FATTNI_CLI_TRAIN_OP_SHIFT_H
#define FATTNI_CLI_TRAIN_OP_SHIFT_H

#include <fattn/tape.h>

/* x F32 [B,S,C], row-major. */
fattn_var op_shift(fattn_tape *t, fattn_var x);

#endif
