/* The backward oracle in double. */
#define REAL double
#define REAL_FN(f) f
#define BWD_REF fattni_bwd_ref
#include "bwd_ref.inc"
