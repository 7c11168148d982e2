/* The oracles in IEEE binary128: what fp64 itself is held against where it cancels. */
#include "attention.h"

#ifdef __clang__
typedef __float128 quad;
#else
__extension__ typedef _Float128 quad;
#endif

/* In glibc's libm, behind names that ISO C11 does not know. */
quad expf128(quad), logf128(quad), log1pf128(quad), tanhf128(quad), fabsf128(quad);

#define REAL quad
#define REAL_FN(name) name##f128
#define FWD_REF fwd_ref_quad
#define BWD_REF bwd_ref_quad
#include "bwd/ref/bwd_ref.inc"
#include "fwd/ref/fwd_ref.inc"
