/* The row block of a CTA of bwd_preprocess.cu or bwd_postprocess.cu. */
#ifndef FATTNI_BWD_CUDA_ROWS_BWD_ROW_BLOCK_AT_CUH
#define FATTNI_BWD_CUDA_ROWS_BWD_ROW_BLOCK_AT_CUH

#include "bwd/cuda/bwd_blocks.cuh"
#include "bwd/cuda/bwd_padded_blocks.h"

/* Where this CTA's row block is. `rows`: a tensor that it reads or writes; where a row's heads are side by side, so are
   CTAs that have them: their short pieces share pages of memory. All threads of a warp ask. */
DEVICE block_position row_block_at(const fattni_bwd_args *bwd, const fattni_view *rows) {
    const fattni_attention_args *const a = &bwd->a;
    const int BM = bwd->row_block;
    if (!FATTNI_BY_PADDED_BLOCKS(bwd)) {
        if (rows->h >= rows->row) return block_at(blockIdx.x, a->Sq, BM, a->Hq);
        const int h = (int)(blockIdx.x % (unsigned)a->Hq);
        block_position x = block_at(blockIdx.x / (unsigned)a->Hq, a->Sq, BM, 1);
        x.h = h;
        return x;
    }
    const unsigned blocks = (unsigned)FATTNI_PADDED_BLOCKS(bwd);
    const int block = (int)(blockIdx.x % blocks), lane = (int)threadIdx.x % 32;
    block_position x = {0, (int)(blockIdx.x / blocks), 0, 0};
    int before = 0;                      /* row blocks before those of sequence b: q0 / BM + b, as row_base has it */
    for (int count = a->B; count > 0;) { /* sequences from b on that may have it: each lane asks for one in `step` */
        const int step = (count + 31) / 32, n = lane * step;
        const int q0 = n < count ? max(0, min(integer_at(&a->cu_seqlens_q, x.b + n), a->rows_q)) : 0;
        const int first = q0 / BM + x.b + n;
        const int found = max(0, __popc(__ballot_sync(0xffffffffu, n < count && first <= block)) - 1);
        before = __shfl_sync(0xffffffffu, first, found);
        x.b += found * step, count = step > 1 ? min(step, count - found * step) : 0;
    }
    x.index = block - before, x.first = x.index * BM;
    return x;
}

#endif
