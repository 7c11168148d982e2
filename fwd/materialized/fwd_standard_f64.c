/* The textbook forward in double. */
#define REAL double
#define REAL_FN(name) name
#define DTYPE FATTN_F64
#define SOFTMAX fattni_softmax_f64
#define FWD_STANDARD fattni_fwd_standard_f64
#include "fwd/materialized/fwd_standard.inc"
