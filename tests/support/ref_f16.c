/* The unfused computation in f16: the error of storing N x N matrices in that dtype. */
#include "attention.h"

#include "core/tensor/numeric.h"

static double stored(double x) {
    uint16_t cell;
    fattni_store(&cell, FATTN_F16, 0, x);
    return fattni_load(&cell, FATTN_F16, 0);
}

#define REAL double
#define FN(name) name##_f16
#define MATH(name) name
#define STORED(x) stored(x)
#include "bwd/ref/bwd_ref.c"
#include "fwd/ref/fwd_ref.c"
