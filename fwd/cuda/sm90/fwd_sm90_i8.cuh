/* fwd_sm90_f8.cuh with Q and K as integers: FATTN_FP8_INT8. */
#define F8 1
#define INT8 1
#include "fwd/cuda/sm90/fwd_sm90.cuh"
