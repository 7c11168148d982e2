#define K_F64 1
#define K_ROWS_NAME fattn_bwd_preprocess_f64
#define K_SINK_NAME fattn_bwd_sink_f64
#include "bwd/cuda/rows/bwd_preprocess_real.cuh"
