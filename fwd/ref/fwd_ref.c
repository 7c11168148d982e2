/* The forward oracle in double. */
#define REAL double
#define REAL_FN(name) name
#define FWD_REF fattni_fwd_ref
#include "fwd/ref/fwd_ref.inc"
