/* Which block of rows or keys a CTA or a task has, and what lies across it. */
#ifndef FATTNI_BWD_CUDA_BWD_BLOCKS_H
#define FATTNI_BWD_CUDA_BWD_BLOCKS_H

#include "core/device/plane_block.cuh"
#include "core/device/sequence.cuh"

/* Block `number` of a call in which each (sequence, head) has ceil(length / block) of them: its first row or key. */
typedef struct block_position {
    int b, h, index, first;
} block_position;
DEVICE block_position block_at(unsigned number, int length, int block, int heads) {
    const int blocks = (length + block - 1) / block, plane = (int)(number / (unsigned)blocks);
    const int index = (int)(number % (unsigned)blocks);
    const block_position at = {plane / heads, plane % heads, index, index * block};
    return at;
}

/* [begin, end): rows that see a key of [j0, j0 + keys), keys that a row of [i0, i0 + rows) sees. */
typedef struct interval {
    int begin, end;
} interval;
DEVICE interval rows_that_see(const sequence *s, int j0, int keys) {
    const interval x = {max(0, min(j0 - s->hi, s->Sq)), max(0, min(j0 + keys - s->lo, s->Sq))};
    return x;
}
DEVICE interval keys_seen_by(const sequence *s, int i0, int rows) {
    const interval x = {max(0, min(i0 + s->lo, s->Sk)), max(0, min(i0 + rows + s->hi, s->Sk))};
    return x;
}

/* The row blocks of BM rows that see keys [j0, j0 + keys): of each query head from `head` on `count`, from number
   `first` on. A step is one of them: those of the first head, of the second, ... */
typedef struct row_blocks {
    int head, first, count, steps, BM;
} row_blocks;
DEVICE row_blocks row_blocks_that_see(const sequence *s, int j0, int keys, int hk, int group, int BM) {
    const interval rows = rows_that_see(s, j0, keys);
    const int first = rows.begin / BM, count = rows.end > rows.begin ? (rows.end + BM - 1) / BM - first : 0;
    const row_blocks x = {hk * group, first, count, count * group, BM};
    return x;
}
/* Query head and first row of a step. */
typedef struct row_block {
    int h, i0;
} row_block;
DEVICE row_block row_block_of(const row_blocks *x, int step) {
    const row_block at = {x->head + step / x->count, (x->first + step % x->count) * x->BM};
    return at;
}

/* BN keys of one (b, key head). */
typedef struct key_block {
    int b, hk, j0, keys; /* keys [j0, j0 + keys) of the sequence */
    row_blocks rows;     /* that see some of them */
    sequence s;
} key_block;

/* Key block `number` of a call. Key blocks vary fastest, or so many planes at once (a->at_once): with a causal mask the
   first has the most rows and starts first. Gives 0 if the sequence has no such keys. */
DEVICE int find_key_block(const fattni_attention_args *a, unsigned number, int BM, int BN, key_block *x) {
    const plane_block at = plane_block_of(number, (unsigned)(a->Sk + BN - 1) / (unsigned)BN, (unsigned)(a->B * a->Hkv),
                                          (unsigned)a->at_once);
    x->b = at.plane / a->Hkv, x->hk = at.plane - x->b * a->Hkv, x->j0 = at.block * BN;
    x->s = sequence_of(a, x->b);
    if (x->j0 >= x->s.Sk) return 0;
    x->keys = min(BN, x->s.Sk - x->j0);
    x->rows = row_blocks_that_see(&x->s, x->j0, x->keys, x->hk, a->group, BM);
    return 1;
}

#endif
