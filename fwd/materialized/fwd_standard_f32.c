/* The textbook forward in float. */
#define REAL float
#define REAL_FN(name) name##f
#define DTYPE FATTN_F32
#define SOFTMAX fattni_softmax_f32
#define FWD_STANDARD fattni_fwd_standard_f32
#include "fwd/materialized/fwd_standard.inc"
