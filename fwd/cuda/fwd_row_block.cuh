/* The work of a CTA in kernels with one CTA per row block, or per row block and part of its keys (fwd_split.h): BM rows
   of one (b, h). */
#ifndef FATTNI_FWD_CUDA_FWD_ROW_BLOCK_H
#define FATTNI_FWD_CUDA_FWD_ROW_BLOCK_H

#include "core/device/plane_block.cuh"
#include "core/device/sequence.cuh"
#include "core/ptx/load_once.h"
#include "core/ptx/sm_count.h"
#include "fwd/cuda/fwd_split.h"

typedef struct row_block {
    int b, h, i0, rows; /* rows [i0, i0 + rows) of the sequence */
    int begin, end;     /* the keys that some of them see, and that this part has, are in [begin, end) */
    sequence s;
} row_block;

/* All keys that some rows of the block see. */
DEVICE void find_keys(row_block *x) {
    x->begin = max(0, min(x->i0 + x->s.lo, x->s.Sk)), x->end = max(0, min(x->i0 + x->rows + x->s.hi, x->s.Sk));
}
/* Keys of a part of the sequence; and the parts of all keys of the block. */
DEVICE int keys_of_part(const fattni_fwd_split_args *x, const sequence *s, int BM, int BN) {
    const int blocks = (x->a.Sq + BM - 1) / BM * x->a.Hq, keys = fattni_fwd_most_keys(&x->a, s->Sk, BM, BN);
    return fattni_fwd_keys_of_part(keys, blocks, x->least_part, BN);
}
DEVICE int parts_of(const row_block *x, int keys, int BN) {
    return fattni_fwd_parts_of(x->end - x->begin / BN * BN, keys);
}
/* From all keys of the block to those of a part of them, which begins and ends at multiples of BN or the last key. */
DEVICE void narrow_to_part(row_block *x, int part, int keys, int BN) {
    x->begin = x->begin / BN * BN + part * keys, x->end = min(x->end, x->begin + keys);
}

/* Row blocks vary fastest, the last rows, which see most keys under a causal mask, first; then the heads of a group,
   whose K and V are in L2 by then; then parts. Or so many planes at once (a->at_once), where keys are not split. split:
   NULL where they are not. Gives 0 if the sequence has no such rows or the block no such part. */
DEVICE int row_block_of(unsigned cta, const fattni_attention_args *a, const fattni_fwd_split_args *split, int BM,
                        int BN, row_block *x) {
    const unsigned blocks = (unsigned)(a->Sq + BM - 1) / (unsigned)BM;
    const plane_block at = plane_block_of(cta, blocks, (unsigned)(a->B * a->Hq), (unsigned)a->at_once);
    const int n = at.plane / a->Hq, part = split ? n % split->parts : 0;
    x->h = at.plane - n * a->Hq, x->b = split ? n / split->parts : n;
    x->i0 = ((int)blocks - 1 - at.block) * BM;
    x->s = sequence_of(a, x->b);
    if (x->i0 >= x->s.Sq) return 0;
    x->rows = min(BM, x->s.Sq - x->i0);
    find_keys(x);
    if (!split) return 1;
    const int keys = keys_of_part(split, &x->s, BM, BN);
    if (part >= parts_of(x, keys, BN)) return 0;
    narrow_to_part(x, part, keys, BN);
    return 1;
}
DEVICE int find_row_block(const fattni_attention_args *a, const fattni_fwd_split_args *split, int BM, int BN,
                          row_block *x) {
    return row_block_of(blockIdx.x, a, split, BM, BN, x);
}

/* Q of the row block that probably follows on this SM, to L2: of 16-bit elements, D columns, by kernels that take all
   registers, so that an SM has 256 threads. */
DEVICE void prefetch_next_q(const fattni_attention_args *a, int BM, int D, int threads) {
    const unsigned cta = blockIdx.x + sm_count() * (unsigned)(256 / threads);
    row_block x;
    if (cta >= gridDim.x || !row_block_of(cta, a, 0, BM, BM, &x)) return;
    const char *const q =
        (const char *)a->q.p + 2 * (x.s.batch * a->q.b + x.h * a->q.h + (int64_t)(x.s.q0 + x.i0) * a->q.row);
    const int lines = D / 64;
#pragma unroll
    for (int at = 0; at < BM * lines; at += threads) {
        const int row = (at + (int)threadIdx.x) / lines, line = (at + (int)threadIdx.x) % lines;
        if (row < x.rows && 64 * line < a->D) prefetch_line(q + 2 * (row * a->q.row + 64 * line));
    }
}

/* Where the CTA's part of O, maxima and sums goes, in elements of the results. */
DEVICE int64_t result_of_part(const fattni_fwd_split_args *split) { return (int64_t)blockIdx.x * split->step; }

#endif
