/* The work of a CTA in kernels with one CTA per row block: BM rows of one (b, h). */
#ifndef FATTNI_FWD_CUDA_FWD_ROW_BLOCK_H
#define FATTNI_FWD_CUDA_FWD_ROW_BLOCK_H

#include "core/device/sequence.cuh"

typedef struct row_block {
    int b, h, i0, rows; /* rows [i0, i0 + rows) of the sequence */
    int begin, end;     /* the keys that some of them see are in [begin, end) */
    sequence s;
} row_block;

/* Row blocks vary fastest, the last rows, which see most keys under a causal mask, first; then the heads of a group,
   whose K and V are in L2 by then. Gives 0 if the sequence has no such rows. */
DEVICE int find_row_block(const fattni_attention_args *a, int BM, row_block *x) {
    const int blocks = (a->Sq + BM - 1) / BM, plane = (int)(blockIdx.x / (unsigned)blocks);
    x->h = plane % a->Hq, x->b = plane / a->Hq;
    x->i0 = (blocks - 1 - (int)(blockIdx.x % (unsigned)blocks)) * BM;
    x->s = sequence_of(a, x->b);
    if (x->i0 >= x->s.Sq) return 0;
    x->rows = min(BM, x->s.Sq - x->i0);
    x->begin = max(0, min(x->i0 + x->s.lo, x->s.Sk)), x->end = max(0, min(x->i0 + x->rows + x->s.hi, x->s.Sk));
    return 1;
}

#endif
