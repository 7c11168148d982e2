/* The tiles of fwd_sm90.cuh, which includes this where its types are known: their order, the keys that each sees, and
   the slots in which the producer leaves them for the consumers. */
#ifndef FATTNI_FWD_CUDA_SM90_FWD_SM90_TILES_H
#define FATTNI_FWD_CUDA_SM90_FWD_SM90_TILES_H

typedef struct tile {
    int i0, h, b;
    int first, blocks; /* of keys; at least one, so that all roles agree; 0 = no tile is left */
    int part, parts;   /* TAKES_PARTS */
} tile;

/* The row block of a tile's number, and its part. Full: plane after plane. Others: in head groups, of each first the
   last rows, which see most keys, or as schedule.order says; parts one after the other, planes side by side. */
DEVICE tile row_block_of(const fattni_fwd_sm90_args *p, int number) {
    int block = fattni_divide(&number, &p->order.group), plane = number, part = 0;
    if (COUNTED) {
        const int beyond = max(number - p->order.last, 0); /* the last head group may be larger */
        number -= beyond, block += beyond * (int)p->order.group.by;
        const fattni_divider planes = number == p->order.last ? p->order.last_planes : p->order.planes;
        plane = number * p->schedule.head_group + fattni_divide(&block, &planes);
        if (TAKES_PARTS) part = fattni_divide(&block, &p->order.parts);
        if (CAUSAL) block = fattni_ordered_block(&p->schedule.order, block);
        block = p->schedule.blocks - 1 - block;
    }
    if (CAUSAL) block += p->keyless;
    tile t = {block * BM, 0, plane, 0, 0, part, 1};
    t.h = fattni_divide(&t.b, &p->order.heads);
    if (BIASED && !p->bias_step.batch) /* sequences that share a bias follow each other: it stays in L2 */
        t.h = plane / p->a.B, t.b = plane % p->a.B;
    return t;
}
#if TAKES_PARTS
/* From all keys of a row block to those of a part, in equal parts, of which the first has the last keys. */
DEVICE void narrow_to_part(const fattni_fwd_sm90_args *p, tile *t) {
    const int n = t->part, parts = min(fattni_divided(t->blocks - 1, &p->part_blocks) + 1, (int)p->order.parts.by);
    const int each = t->blocks / parts, longer = t->blocks - parts * each, end = n * each + min(n, longer);
    t->parts = parts, t->first += t->blocks - end;
    t->blocks = n < parts ? each + (n < longer) : 0;
    t->first -= t->blocks;
}
#endif
/* Also the tile's sequence. blocks = 0: the rows lie beyond its end, or have no such part. */
DEVICE tile tile_of(const fattni_fwd_sm90_args *p, int number, sequence *s) {
    tile t = row_block_of(p, number);
    *s = BANDS ? sequence_of(&p->a, t.b) : whole_sequence(&p->a, t.b, CAUSAL);
    if (BANDS && t.i0 >= s->Sq) return t;
    const int end = COUNTED ? min(s->Sk, t.i0 + BM + s->hi) : s->Sk;
    if (BANDS) t.first = max(0, min(t.i0 + s->lo, end - 1)) / BN;
    t.blocks = max(1, (end + BN - 1) / BN - t.first);
#if TAKES_PARTS
    narrow_to_part(p, &t);
#endif
    return t;
}

/* Tile and sequence are read from the slot again wherever they are needed, so that they take no registers in
   between. */
DEVICE volatile tile_slot *slot_of(shared_memory *smem, int n) { return &smem->tiles[n % TILE_SLOTS]; }
DEVICE volatile int64_t *lse_of(shared_memory *smem, int n) { return &smem->lse[n % TILE_SLOTS]; }
DEVICE void write_tile(volatile tile_slot *to, const tile *t, const sequence *s) {
    to->i0 = t->i0, to->h = t->h, to->b = t->b, to->blocks = t->blocks;
    if (BANDS) to->first = t->first, to->Sq = s->Sq, to->Sk = s->Sk, to->q0 = s->q0;
#if TAKES_PARTS
    to->part = t->part, to->parts = t->parts;
#endif
}
DEVICE tile read_tile(const volatile tile_slot *from) {
    const tile t = {from->i0,
                    from->h,
                    from->b,
                    BANDS ? __shfl_sync(ALL_LANES, from->first, 0) : 0,
                    __shfl_sync(ALL_LANES, from->blocks, 0),
                    0,
                    1};
    return t;
}
DEVICE sequence read_sequence(const fattni_attention_args *a, const volatile tile_slot *from, int b) {
    sequence s = whole_sequence(a, b, CAUSAL);
    if (BANDS) {
        s.Sq = from->Sq, s.Sk = from->Sk, s.q0 = from->q0;
        if (a->cu_seqlens_q.p) s.batch = 0;
        find_band(a, &s);
    }
    return s;
}

#endif
