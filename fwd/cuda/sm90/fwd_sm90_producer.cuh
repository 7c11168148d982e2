/* The producer of fwd_sm90.cuh, which includes this where its types are known: one warp claims tiles, announces them
   and loads Q, K, V and bias by TMA; with F8 another one loads scales. */
#ifndef FATTNI_FWD_CUDA_SM90_FWD_SM90_PRODUCER_H
#define FATTNI_FWD_CUDA_SM90_FWD_SM90_PRODUCER_H

/* Lane 0's values to all lanes: so the compiler knows that they are the same in the whole warp. */
DEVICE void broadcast_tile(tile *t, sequence *s) {
    t->h = from_leader(t->h), s->batch = from_leader(s->batch);
    if (BANDS) s->q0 = from_leader(s->q0), s->k0 = from_leader(s->k0), t->first = from_leader(t->first);
}

/* Coordinates of a block of K and V in their tensor maps. */
typedef struct key_location {
    int row, k_head, k_batch, v_row, v_head, v_batch; /* v_row: with F8 a column of V^T */
    key_scales scales;                                /* INT8 */
} key_location;
DEVICE key_location location_of(const fattni_fwd_sm90_args *p, const tile *t, const sequence *s) {
    const int g = t->h / p->a.group, begin = (t->first + t->blocks - 1) * BN;
    const int column = F8 && BANDS && p->a.cu_seqlens_k.p ? first_column(s->k0, t->b) : s->k0;
    const key_location at = {s->k0 + begin,
                             g * p->k_step.head,
                             s->batch * p->k_step.batch,
                             column + begin,
                             g * p->v_step.head,
                             s->batch * p->v_step.batch,
                             key_scales_of(&p->f8.k_scale, s, g, column)};
    return at;
}

DEVICE void load_k(const fattni_fwd_sm90_args *p, uint32_t shared, uint32_t kv, const key_location *at) {
    mbarrier_wait(k_empty(shared, kv), kv_parity(kv) ^ 1);
    if (!is_leader()) return;
    const int scales = INT8 ? bytes_of_scales(&at->scales, at->v_row) : 0;
    mbarrier_expect(k_full(shared, kv), K_BYTES + scales);
    if (INT8)
        bulk_load(ELEMENT_ADDRESS(shared, k_scales, kv % SCALE_STAGES), at->scales.of_0 + at->v_row / KEYS_OF_SCALE,
                  scales, k_full(shared, kv));
    for (int x = 0; x < INPUTS; ++x)
        tma_load(ELEMENT_ADDRESS(shared, k, kv % KV_STAGES) + x * BN * ROW, &p->k, k_full(shared, kv), COLUMNS * x,
                 at->row, at->k_head, at->k_batch);
}
DEVICE void load_v(const fattni_fwd_sm90_args *p, uint32_t shared, uint32_t kv, const key_location *at) {
    mbarrier_wait(v_empty(shared, kv), kv_parity(kv) ^ 1);
    if (!is_leader()) return;
    mbarrier_expect(v_full(shared, kv), V_BYTES);
    const uint32_t to = ELEMENT_ADDRESS(shared, v, kv % KV_STAGES);
    if (F8)
        for (int x = 0; x < BN / V_COLUMNS; ++x)
            tma_load(to + x * DV * V_COLUMNS, &p->v, v_full(shared, kv), at->v_row + x * V_COLUMNS, 0, at->v_head,
                     at->v_batch);
    else
        load_panels(to, &p->v, v_full(shared, kv), PANELS, BN, at->v_row, at->v_head, at->v_batch);
}

/* The bias of block j of a tile, block kv of all, once its consumers have read that of the block before. */
DEVICE void load_bias(const fattni_fwd_sm90_args *p, uint32_t shared, uint32_t kv, const tile *t, int j) {
    for (int c = 0; c < CONSUMERS; ++c) {
        const uint32_t full = ELEMENT_ADDRESS(shared, bias_full, c);
        mbarrier_wait(ELEMENT_ADDRESS(shared, bias_empty, c), (kv & 1) ^ 1);
        if (!is_leader()) continue;
        mbarrier_expect(full, BIAS_BYTES);
        for (int x = 0; x < BN / 64; ++x)
            tma_load(ELEMENT_ADDRESS(shared, bias, c) + x * (64 * 128), &p->bias, full, j * BN + 64 * x, t->i0 + 64 * c,
                     t->h * p->bias_step.head, t->b * p->bias_step.batch);
    }
}

/* By lane 0. */
DEVICE void load_q(const fattni_fwd_sm90_args *p, uint32_t shared, int part, int row, int head, int batch) {
    const uint32_t to = MEMBER_ADDRESS(shared, q) + part * (Q_STAGES > 1 ? Q_BYTES : Q_ROWS * ROW);
    for (int x = 0; x < INPUTS; ++x) {
        const uint32_t full = Q_BY_PANELS ? q_panel_full(shared, part, x) : q_full(shared, part);
        if (Q_BY_PANELS || x == 0) mbarrier_expect(full, (Q_BY_PANELS ? 1 : INPUTS) * Q_ROWS * ROW);
        tma_load(to + x * BM * ROW, &p->q, full, COLUMNS * x, row, head, batch);
    }
}

/* With one stage, Q can only be loaded between the last S of one tile and the first S of the next, in the time of one
   softmax: so it is brought to L2 before. By lane 0. */
DEVICE void prefetch_q(const fattni_fwd_sm90_args *p, int row, int head, int batch) {
    for (int y = 0; y < BM; y += Q_ROWS)
        for (int x = 0; x < INPUTS; ++x) tma_prefetch(&p->q, COLUMNS * x, row + y, head, batch);
}

/* The number of the tile after `number`, in lane 0. The counter may not be zero yet when the kernel starts, nor ever
   where each CTA has one tile. */
DEVICE int next_number(const fattni_fwd_sm90_args *p, int number) {
    if (!COUNTED) return (int)gridDim.x + number;
    if (p->schedule.tiles <= (int)gridDim.x) return p->schedule.tiles;
    if (!is_leader()) return 0;
    grid_dependency_wait();
    return (TAKES_PARTS ? 0 : (int)gridDim.x) + atomicAdd(p->schedule.next_tile, 1);
}
/* A CTA that waits for a part must not have a later tile than one that does not run yet, as it may be on a GPU that
   another kernel has a part of: where CTAs have several tiles, all are counted. */
DEVICE int first_number(const fattni_fwd_sm90_args *p) {
    return TAKES_PARTS && p->schedule.tiles > (int)gridDim.x ? from_leader(next_number(p, 0)) : (int)blockIdx.x;
}

/* Order of loads: K(0), K(1), V(0), K(2), V(1), ... over all tiles, as the consumers need them. Q comes before its
   tile's first K; with one stage, where the consumers must have finished with the last tile's Q, after it. */
DEVICE void produce(const fattni_fwd_sm90_args *p, uint32_t shared, shared_memory *smem) {
    int number = first_number(p);
    uint32_t kv = 0; /* key blocks loaded */
    key_location last = {0, 0, 0, 0, 0, 0, {0, 0}};
    for (int n = 0;; ++n) {
        if (Q_STAGES > 1) mbarrier_wait(q_empty(shared, part_of(n, 0)), q_parity(n) ^ 1);
        sequence s = whole_sequence(&p->a, 0, CAUSAL);
        tile t = {0, 0, 0, 0, 0, 0, 1};
        if (number < p->schedule.tiles) t = tile_of(p, number, &s);
        while (BANDS && t.blocks == 0 && number < p->schedule.tiles) { /* skips tiles without rows */
            number = from_leader(next_number(p, number));
            if (number < p->schedule.tiles) t = tile_of(p, number, &s);
        }
        if (Q_STAGES == 1) {
            if (t.blocks && is_leader()) prefetch_q(p, s.q0 + t.i0, t.h * p->q_step.head, s.batch * p->q_step.batch);
            __syncwarp();
            if (kv > 0) load_v(p, shared, kv - 1, &last);
            if (t.blocks) {
                broadcast_tile(&t, &s);
                const key_location first = location_of(p, &t, &s);
                load_k(p, shared, kv, &first);
            }
        }
        if (is_leader()) {
            write_tile(slot_of(smem, n), &t, &s);
            *lse_of(smem, n) = s.batch * p->a.lse.b + t.h * p->a.lse.h + (int64_t)(s.q0 + t.i0) * p->a.lse.row;
        }
        if (BANDS) __syncwarp(); /* otherwise the compiler assumes divergence from here on */
        broadcast_tile(&t, &s);
        if (F8) named_barrier_arrive(ANNOUNCED_BARRIER + n % 2, ANNOUNCED_THREADS);
        for (int y = 0; y < BM; y += Q_ROWS) {
            const int part = part_of(n, y / Q_ROWS);
            if (Q_STAGES == 1) mbarrier_wait(q_empty(shared, part), q_parity(n) ^ 1);
            if (is_leader() && t.blocks)
                load_q(p, shared, part, s.q0 + t.i0 + y, t.h * p->q_step.head, s.batch * p->q_step.batch);
            else if (is_leader())
                mbarrier_arrive(q_full(shared, part));
        }
        if (t.blocks == 0) break;
        const int rightmost = t.first + t.blocks - 1;
        key_location at = location_of(p, &t, &s);
        int next = 0;
        for (int j = rightmost; j >= t.first; --j, ++kv) {
            if (j == t.first) next = next_number(p, number); /* not earlier: the counter hands out the longest first */
            const int loaded = Q_STAGES == 1 && j == rightmost; /* before Q */
            if (!loaded) load_k(p, shared, kv, &at);
            if (kv > 0 && !loaded) load_v(p, shared, kv - 1, &last);
            if (BIASED) load_bias(p, shared, kv, &t, j); /* last: it waits longest */
            last = at;
            at.row -= BN, at.v_row -= BN;
        }
        number = from_leader(next);
    }
    if (Q_STAGES > 1 && kv > 0) load_v(p, shared, kv - 1, &last);
}

/* The scales of the same tiles, by the next warp: so that the loads of K and V do not wait for it. It counts on q_full,
   too, which keeps it at most one tile behind. */
DEVICE void produce_scales(const fattni_fwd_sm90_args *p, uint32_t shared, shared_memory *smem) {
    for (int n = 0;; ++n) {
        named_barrier_sync(ANNOUNCED_BARRIER + n % 2, ANNOUNCED_THREADS);
        const tile t = read_tile(slot_of(smem, n));
        if (t.blocks) {
            const sequence s = read_sequence(&p->a, slot_of(smem, n), t.b);
            load_scales(p, &smem->scales[n % TILE_SLOTS], &s, t.b, t.h, t.i0);
        }
        for (int y = 0; y < BM; y += Q_ROWS) {
            const uint32_t full = q_full(shared, part_of(n, y / Q_ROWS));
            /* A tile is announced while the only stage may still be filled for the last one. */
            if (Q_STAGES == 1 && n > 0) mbarrier_wait(full, q_parity(n - 1));
            cp_async_arrive(full);
        }
        if (t.blocks == 0) break;
    }
}

#endif
