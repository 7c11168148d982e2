/* The grid of bwd_preprocess.cu and bwd_postprocess.cu: one CTA per row block of a (sequence, head). Of packed
   sequences of many lengths most row blocks that the longest one has are of none of the others. So where that is less,
   there is one CTA per row block of the workspace instead, which finds its sequence; not with dsink, which has a part
   for every row block. */
#ifndef FATTNI_BWD_CUDA_BWD_PADDED_BLOCKS_H
#define FATTNI_BWD_CUDA_BWD_PADDED_BLOCKS_H

#include "bwd/cuda/bwd_args.h"

/* Whether the CTAs of a call are of the row blocks of the workspace; these, of one head. `x`: fattni_bwd_args *. */
#define FATTNI_BY_PADDED_BLOCKS(x)                                                                                     \
    ((x)->a.cu_seqlens_q.p && !(x)->d_sink.p &&                                                                        \
     FATTNI_PADDED_BLOCKS(x) < ((int64_t)(x)->a.Sq + (x)->row_block - 1) / (x)->row_block * (x)->a.B)
#define FATTNI_PADDED_BLOCKS(x) ((int64_t)(x)->padded_rows / (x)->row_block)

#endif
