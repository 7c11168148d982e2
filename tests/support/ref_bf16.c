/* The unfused computation in bf16: what keeping N x N matrices in that dtype costs in accuracy. */
#include "attention.h"

#include "core/tensor/numeric.h"

static double stored(double x) {
    uint16_t cell;
    fattni_store(&cell, FATTN_BF16, 0, x);
    return fattni_load(&cell, FATTN_BF16, 0);
}

#define REAL double
#define REAL_FN(name) name
#define STORED(x) stored(x)
#define FWD_REF fwd_ref_bf16
#define BWD_REF bwd_ref_bf16
#include "bwd/ref/bwd_ref.inc"
#include "fwd/ref/fwd_ref.inc"
