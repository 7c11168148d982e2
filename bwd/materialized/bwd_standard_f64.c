/* The textbook backward in double. */
#define REAL double
#define REAL_FN(name) name
#define DTYPE FATTN_F64
#define BWD_STANDARD fattni_bwd_standard_f64
#include "bwd/materialized/bwd_standard.inc"
