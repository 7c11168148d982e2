/* The references in IEEE binary128, for comparison with fp64 where that cancels. */
#include "attention.h"

#ifdef __clang__
typedef __float128 quad;
#else
__extension__ typedef _Float128 quad;
#endif

/* In glibc's libm, under names that are not part of ISO C11. */
quad expf128(quad), logf128(quad), log1pf128(quad), tanhf128(quad), fabsf128(quad);

#define REAL quad
#define FN(name) name##_quad
#define MATH(name) name##f128
#include "bwd/ref/bwd_ref.c"
#include "fwd/ref/fwd_ref.c"
