/* The safe softmax and the online softmax, in float and double. */
#include "fwd/cpu/softmax.h"

#include <math.h>

enum { LANES = 8 }; /* partial sums: the rounding error grows with n / LANES */

#define BODY "fwd/cpu/softmax.inc"
#include "core/base/for_each_real.inc"
