/* The backward oracle in double. */
#define REAL double
#define REAL_FN(name) name
#define BWD_REF fattni_bwd_ref
#include "bwd/ref/bwd_ref.inc"
