/* The safe softmax and the online softmax, in double and float. */
#include "fwd/cpu/softmax.h"

#include <math.h>

enum { LANES = 8 }; /* partial sums: the rounding error grows with n / LANES */

#define REAL double
#define REAL_FN(name) name
#define NAME(x) fattni_softmax_f64##x
#define STATE fattni_softmax_f64_state
#include "fwd/cpu/softmax.inc"
#undef REAL
#undef REAL_FN
#undef NAME
#undef STATE

#define REAL float
#define REAL_FN(name) name##f
#define NAME(x) fattni_softmax_f32##x
#define STATE fattni_softmax_f32_state
#include "fwd/cpu/softmax.inc"
