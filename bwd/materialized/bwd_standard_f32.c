/* The textbook backward in float. */
#define REAL float
#define REAL_FN(name) name##f
#define DTYPE FATTN_F32
#define BWD_STANDARD fattni_bwd_standard_f32
#include "bwd/materialized/bwd_standard.inc"
