/* fwd_sm90.cuh with E4M3 operands: q, k and V^T are the 8-bit copies of include/fattn/fp8.h. */
#define F8 1
#include "fwd/cuda/sm90/fwd_sm90.cuh"
