#define K_F64 0
#define K_ROWS_NAME fattn_bwd_preprocess_f32
#define K_SINK_NAME fattn_bwd_sink_f32
#include "bwd/cuda/rows/bwd_preprocess_real.cuh"
