/* Backward attention of huge rows in 16 bits (core/attention/huge.h says which and why), with mma.sync, sm_80 and
   later. The main kernels leave them out: L is not enough for their P. Runs after them, and after postprocess.

   Row blocks: m = max s, l = sum exp(s - m) over all keys; then P = exp((s - m) - log l), dS = P (dP - delta),
   dQ = dS K, dbias, dsink. Then key blocks: dV += P^T dO, dK += dS^T Q over the row blocks that have huge rows. In both
   S is computed by the same instructions, so that its bits, and with them the sum of a row of P, are the same.

   Tensors     q, d_o [b,h,i,d], k, v, dk, dv [b,g,j,d]; delta of bwd_preprocess.cu; dq, dk, dv are added to.
   CTAs        as many as SMs; tasks are claimed in order (bwd_huge_common.cuh). Without huge rows a CTA reads one
               number and ends.
   Threads     8 warps. S, dP: 16 rows and half of the keys; dQ: 16 rows, dK, dV: 16 keys, and half of the columns.
   Shared      struct shared_memory. Q, dO, K and V have a tile each; with K_LEAN (bwd_huge_lean.cuh) Q and dO share
               one, K and V another, of at most 128 columns, and are loaded each time that a product needs them.
   Rounding    P and dS to the input dtype, accumulation fp32.

   Nothing is pipelined: huge rows come by accident, or from padding.

   Instances: bwd_kernels.def. Macros in: cmake/instance.cu.in. */
#include "core/device/describe.cuh"
#include "bwd/cuda/bwd_workspace.cuh"
#include "core/device/mma16_tile.cuh"
#include "core/device/quad.cuh"
#include "core/device/score_terms_mma.cuh"

#ifndef K_LEAN
#define K_LEAN 0
#endif
enum {
    D = K_D,
    LEAN = K_LEAN,
    PITCH = LEAN && D > 128 ? 128 : D, /* columns of a panel, as many as a tile has */
    PANELS = D / PITCH,
    BM = K_BM,
    BN = K_BN,
    THREADS = 32 * K_WARPS,
    KEY_TILES = BN / 16,
    COLUMNS = PITCH / 2, /* of a panel, for a warp */
    COLUMN_TILES = COLUMNS / 8
};
static_assert(BM == 64 && BN == 64 && K_WARPS == 8 && PITCH % 64 == 0, "four warps of 16 rows or keys, twice");

enum operand { Q, DO, K, V };
typedef struct shared_memory {
    half_type rows[LEAN ? 1 : 2][BM * PITCH], keys[LEAN ? 1 : 2][BN * PITCH], p[BM * BN], ds[BM * BN];
    /* Per row: m; log2 l, less what P is scaled by, +inf where the row is not huge; delta; m and l of either half of
       the keys. */
    float max[BM], log_sum[BM], delta[BM], half_max[2][BM], half_sum[2][BM];
    float ds_sum[BM]; /* what a row of dS should sum to; with a softcap P (dP - delta), which tells it */
    /* With a softcap, of either half of the keys: what P (dP - delta), dS and P c sum to (capped_sum_of_ds). */
    float capped[2][3][BM];
} shared_memory;
enum { SHARED_BYTES = sizeof(shared_memory) };
static_assert(offsetof(shared_memory, keys) % 1024 == 0 && offsetof(shared_memory, p) % 1024 == 0 &&
                  offsetof(shared_memory, ds) % 1024 == 0,
              "swizzled tiles");

/* Shared memory by its address and by a pointer. */
typedef struct cta_memory {
    uint32_t shared;
    shared_memory *memory;
} cta_memory;

#include "bwd/cuda/huge/bwd_huge_common.cuh"
#include "bwd/cuda/bwd_load16.cuh"

/* This warp's part of S and of the gradients; this lane's first row, and key. */
DEVICE int first_row(void) { return (int)threadIdx.x / 32 % 4 * 16; }
DEVICE int first_key(void) { return (int)threadIdx.x / 128 * (BN / 2); }
DEVICE int first_column(void) { return (int)threadIdx.x / 128 * COLUMNS; }
DEVICE int lane_row(void) { return first_row() + (int)threadIdx.x % 32 / 4; }
DEVICE int lane_key(void) { return first_key() + (int)threadIdx.x % 4 * 2; }

/* Waits for this thread's loads, then for all threads. */
DEVICE void wait_loads(void) {
    cp_async_wait(0);
    __syncthreads();
}

DEVICE uint32_t tile_of(const cta_memory *m, enum operand x) {
    return x < K ? ELEMENT_ADDRESS(m->shared, rows, LEAN ? 0 : x - Q)
                 : ELEMENT_ADDRESS(m->shared, keys, LEAN ? 0 : x - K);
}

/* One panel of an operand to its tile: of the row block at `first` of query head h, or of the key block. */
DEVICE void load_panel(const cta_memory *m, const fattni_bwd_args *bwd, const sequence *s, enum operand x, int panel,
                       int h, int first) {
    const fattni_attention_args *const a = &bwd->a;
    const fattni_view *const view = x == Q ? &a->q : x == DO ? &bwd->d_o : x == K ? &a->k : &a->v;
    const int of_rows = x < K, width = (x == Q || x == K ? a->D : a->Dv) - panel * PITCH;
    const int64_t row = first + (of_rows ? s->q0 : s->k0);
    load_tile(tile_of(m, x), PITCH, of_rows ? BM : BN, THREADS,
              half_row_at(view, s, of_rows ? h : h / a->group, row) + panel * PITCH, view->row,
              (of_rows ? s->Sq : s->Sk) - first, width, a->vector_qkv);
}
/* Both operands of rows, or of keys, which stay in their tiles; nothing with LEAN. */
DEVICE void load_both(const cta_memory *m, const fattni_bwd_args *bwd, const sequence *s, enum operand x, int h,
                      int first) {
    if (LEAN) return;
    load_panel(m, bwd, s, x, 0, h, first);
    load_panel(m, bwd, s, x == Q ? DO : V, 0, h, first);
    cp_async_commit();
}
/* The tile with a panel of an operand: where it stayed, or loaded now. All threads. */
DEVICE uint32_t panel_of(const cta_memory *m, const fattni_bwd_args *bwd, const sequence *s, enum operand x, int panel,
                         int h, int first) {
    if (LEAN) {
        __syncthreads(); /* no warp reads what was there */
        load_panel(m, bwd, s, x, panel, h, first);
        cp_async_commit();
        wait_loads();
    }
    return tile_of(m, x);
}

/* This warp's part of an operand of rows times the transpose of one of keys. All threads. */
DEVICE void rows_by_keys(float x[KEY_TILES][4], const cta_memory *m, const fattni_bwd_args *bwd, const sequence *s,
                         enum operand rows, enum operand keys, int h, int i0, int j0) {
#pragma unroll
    for (int panel = 0; panel < PANELS; ++panel) {
        float y[KEY_TILES][4];
        const uint32_t row_tile = panel_of(m, bwd, s, rows, panel, h, i0);
        const uint32_t key_tile = panel_of(m, bwd, s, keys, panel, h, j0);
        product_nt(y, 1, KEY_TILES, PITCH, lane_16(row_tile, PITCH), first_row(), lane_8(key_tile, PITCH), first_key(),
                   PITCH);
#pragma unroll
        for (int n = 0; n < KEY_TILES; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e) x[n][e] = panel ? x[n][e] + y[n][e] : y[n][e];
    }
}

/* Scores in natural units; -inf where a row does not see the key. tanhs: what general_scores keeps. */
DEVICE void scores(float x[KEY_TILES][4], float tanhs[KEY_TILES][4], const fattni_bwd_args *bwd, const sequence *s,
                   const cta_memory *m, int b, int h, int i0, int j0) {
    const fattni_attention_args *const a = &bwd->a;
    rows_by_keys(x, m, bwd, s, Q, K, h, i0, j0);
    const int i = i0 + lane_row(), j = j0 + lane_key();
    general_scores(x, tanhs, KEY_TILES, 0, a, s, slope_of(a, h), b, h, i, j);
#pragma unroll
    for (int n = 0; n < KEY_TILES; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            const int row = row_of(0, i, n, e), key = column_of(0, j, n, e);
            keep_rounded(&x[n][e]); /* the product of scale and q.k */
            if (key < row + s->lo || key > row + s->hi || key >= s->Sk) x[n][e] = -INFINITY;
        }
}

/* Online maximum and sum of a thread's two rows, over its own keys. */
DEVICE void sum_scores(float max[2], float sum[2], const float x[KEY_TILES][4]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        float top = max[half];
#pragma unroll
        for (int n = 0; n < KEY_TILES; ++n) top = fmaxf(top, fmaxf(x[n][2 * half], x[n][2 * half + 1]));
        if (top == -INFINITY) continue;
        sum[half] *= exp2_approx((max[half] - top) * LOG2E);
        max[half] = top;
#pragma unroll
        for (int n = 0; n < 2 * KEY_TILES; ++n) sum[half] += exp2_approx((x[n / 2][2 * half + n % 2] - top) * LOG2E);
    }
}
/* Adds another maximum and sum of the same row. */
DEVICE void join_sums(float *max, float *sum, float other_max, float other_sum) {
    const float top = fmaxf(*max, other_max);
    if (top == -INFINITY) return;
    *sum = *sum * exp2_approx((*max - top) * LOG2E) + other_sum * exp2_approx((other_max - top) * LOG2E);
    *max = top;
}

/* m and l over all keys, to shared memory and, for the key blocks, to the workspace; the rows' part of dsink. */
DEVICE void find_statistics(const fattni_bwd_args *bwd, const sequence *s, const cta_memory *m, int b, int h, int i0,
                            int begin, int end) {
    const fattni_attention_args *const a = &bwd->a;
    shared_memory *const of = m->memory;
    float max[2] = {-INFINITY, -INFINITY}, sum[2] = {0.0f, 0.0f};
    for (int j0 = begin / BN * BN; j0 < end; j0 += BN) {
        __syncthreads(); /* no warp reads the last keys */
        load_both(m, bwd, s, K, h, j0);
        wait_loads();
        float x[KEY_TILES][4], tanhs[KEY_TILES][4];
        scores(x, tanhs, bwd, s, m, b, h, i0, j0);
        sum_scores(max, sum, x);
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        for (int step = 1; step <= 2; ++step)
            join_sums(max + half, sum + half, __shfl_xor_sync(ALL_LANES, max[half], step),
                      __shfl_xor_sync(ALL_LANES, sum[half], step));
        if (threadIdx.x % 4 == 0) {
            of->half_max[threadIdx.x / 128][lane_row() + 8 * half] = max[half];
            of->half_sum[threadIdx.x / 128][lane_row() + 8 * half] = sum[half];
        }
    }
    __syncthreads();
    const int r = (int)threadIdx.x, i = i0 + r;
    if (r < BM) {
        const int64_t at = row_base(bwd, s, b, h) + i;
        const float L = lse_at(a, s, h, i);
        float top = of->half_max[0][r], total = of->half_sum[0][r];
        const float sink = a->sink.p ? float_at(&a->sink, h) : -INFINITY;
        join_sums(&top, &total, of->half_max[1][r], of->half_sum[1][r]);
        join_sums(&top, &total, sink, 1.0f);
        const int counts = FATTNI_IS_HUGE(L) && total > 0.0f;
        const float log_sum = counts ? log_sum_of(L, top, total) : INFINITY;
        const float delta = i < s->Sq ? bwd->delta[at] : 0.0f;
        of->half_sum[0][r] = counts && bwd->d_sink.p ? -expf(sink - top - log_sum) * delta : 0.0f;
        float d_lse = 0.0f;
        if (i < s->Sq && bwd->d_lse.p) d_lse = *row_at(&bwd->d_lse, s, h, s->q0 + i);
        of->ds_sum[r] = sum_of_ds(bwd, expf(sink - top - log_sum), delta, d_lse);
        for (int n = 0; n < 6; ++n) of->capped[n / 3][n % 3][r] = 0.0f;
        of->max[r] = counts ? top : 0.0f;
        of->log_sum[r] = counts ? (log_sum - bwd->lse_shift) * LOG2E : INFINITY;
        of->delta[r] = delta;
        if (i < s->Sq) ((float *)bwd->huge_max)[at] = of->max[r], ((float *)bwd->huge_log_sum)[at] = of->log_sum[r];
    }
    __syncthreads();
    if (bwd->d_sink.p && threadIdx.x == 0) store_sink_part(bwd, b, h, i0, of->half_sum[0]);
}

/* This warp's part of P (dP - delta) to its rows' sums, with the softcap's tanh. */
DEVICE void add_capped_sums(shared_memory *of, const float p[KEY_TILES][4], const float g[KEY_TILES][4],
                            const float tanhs[KEY_TILES][4]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        float x[3] = {0.0f, 0.0f, 0.0f};
#pragma unroll
        for (int n = 0; n < 2 * KEY_TILES; ++n) {
            const int e = 2 * half + n % 2;
            const float t = tanhs[n / 2][e], c = fmaf(-t, t, 1.0f);
            x[0] += g[n / 2][e], x[1] += g[n / 2][e] * c, x[2] += p[n / 2][e] * c;
        }
#pragma unroll
        for (int n = 0; n < 3; ++n) {
            x[n] += __shfl_xor_sync(ALL_LANES, x[n], 1);
            x[n] += __shfl_xor_sync(ALL_LANES, x[n], 2);
            if (threadIdx.x % 4 == 0) of->capped[threadIdx.x / 128][n][lane_row() + 8 * half] += x[n];
        }
    }
}

/* P and dS of one tile, rounded, to shared memory; of_rows: and what it adds to dbias and to sums. All threads. */
DEVICE void gradients(const fattni_bwd_args *bwd, const sequence *s, const cta_memory *m, int b, int h, int i0, int j0,
                      int of_rows) {
    const fattni_attention_args *const a = &bwd->a;
    const shared_memory *const of = m->memory;
    float p[KEY_TILES][4], ds[KEY_TILES][4], tanhs[KEY_TILES][4];
    scores(p, tanhs, bwd, s, m, b, h, i0, j0);
    rows_by_keys(ds, m, bwd, s, DO, V, h, i0, j0);
    const int row = lane_row(), i = i0 + row, j = j0 + lane_key();
    uint32_t keep[1] = {~0u};
    if (a->drop_T) {
        const dropout_plane plane = dropout_plane_of(a, b, h);
        keep_tiles(keep, KEY_TILES, a, &plane, 0, i, j);
    }
#pragma unroll
    for (int n = 0; n < KEY_TILES; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            const int r = row + e / 2 * 8, kept = is_kept(keep, 0, n, e);
            p[n][e] = p[n][e] == -INFINITY ? 0.0f : exp2_approx((p[n][e] - of->max[r]) * LOG2E - of->log_sum[r]);
            const float dp = kept ? ds[n][e] * (a->drop_T ? a->keep_scale : 1.0f) : 0.0f;
            ds[n][e] = p[n][e] == 0.0f ? 0.0f : p[n][e] * (dp - of->delta[r]);
        }
    if (of_rows && bwd->d_bias.p) add_dbias(ds, KEY_TILES, 0, &bwd->d_bias, bwd->dbias_scale, s, b, h, i, j);
    if (a->softcap > 0) {
        if (of_rows) add_capped_sums(m->memory, p, ds, tanhs);
        softcap_backward(ds, tanhs, KEY_TILES);
    }
    if (a->drop_T)
#pragma unroll
        for (int n = 0; n < KEY_TILES; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e) p[n][e] = is_kept(keep, 0, n, e) ? p[n][e] : 0.0f;
    const int lane = (int)threadIdx.x % 4;
#pragma unroll
    for (int n = 0; n < KEY_TILES; ++n)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const uint32_t at = tile_offset(BN, row + 8 * half, first_key() / 8 + n) + 4u * lane;
            store_shared_word(MEMBER_ADDRESS(m->shared, p) + at, pack(p[n][2 * half], p[n][2 * half + 1]));
            store_shared_word(MEMBER_ADDRESS(m->shared, ds) + at, pack(ds[n][2 * half], ds[n][2 * half + 1]));
        }
    __syncthreads();
}

/* This warp's 16 rows and half of the columns of each panel. */
typedef float gradient[PANELS][COLUMN_TILES][4];

/* They are added to a gradient; of this lane's two rows those that are `inside`. */
DEVICE void add_rows(const gradient x, const fattni_view *to, const sequence *s, int head, int64_t row, float scale,
                     const int inside[2], int width, int f32) {
#pragma unroll
    for (int n = 0; n < 2 * PANELS; ++n) {
        const int panel = n / 2, half = n % 2, column = panel * PITCH + first_column();
        const int64_t at = s->batch * to->b + head * to->h + (row + 8 * half) * to->row + column;
        store_row((char *)to->p + at * (f32 ? 4 : 2), &x[panel][0][2 * half], COLUMN_TILES, scale, inside[half],
                  width - column, f32, 1);
    }
}

DEVICE void clear_gradient(gradient x) {
#pragma unroll
    for (int panel = 0; panel < PANELS; ++panel) clear(x[panel], COLUMN_TILES);
}

/* Adds this warp's 16 rows of dS, summed over the keys: element 2e is row g + 8e. */
DEVICE void sum_ds(float sum[4], const cta_memory *m) {
#pragma unroll
    for (int step = 0; step < BN / 16; ++step) {
        uint32_t rows[4];
        load_a(rows, lane_16(MEMBER_ADDRESS(m->shared, ds), BN), BN, first_row(), 16 * step);
        mma(sum, rows, ONES, ONES);
    }
}
/* What row r of dS should sum to. */
DEVICE float ds_sum_of(const fattni_bwd_args *bwd, const shared_memory *of, int r) {
    if (!(bwd->a.softcap > 0)) return of->ds_sum[r];
    float sums[3];
    for (int n = 0; n < 3; ++n) sums[n] = of->capped[0][n][r] + of->capped[1][n][r];
    return capped_sum_of_ds(bwd, of->ds_sum[r], sums[0], sums[1], sums[2]);
}
/* dQ less its rows' excess times the mean of the keys (bwd_key_mean.cu). */
DEVICE void subtract_excess(gradient dq, const float sum[4], const fattni_bwd_args *bwd, const shared_memory *of,
                            const float *key_mean) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const float excess = sum[2 * half] - ds_sum_of(bwd, of, lane_row() + 8 * half);
#pragma unroll
        for (int n = 0; n < PANELS * COLUMN_TILES; ++n) {
            const int panel = n / COLUMN_TILES, tile = n % COLUMN_TILES;
            const int column = panel * PITCH + first_column() + 8 * tile + (int)threadIdx.x % 4 * 2;
            const float2 mean = *(const float2 *)(key_mean + column);
            dq[panel][tile][2 * half] -= excess * mean.x;
            dq[panel][tile][2 * half + 1] -= excess * mean.y;
        }
    }
}

DEVICE void row_task(const fattni_bwd_args *bwd, cta_memory *m, int task) {
    const fattni_attention_args *const a = &bwd->a;
    huge_rows work;
    if (!find_huge_rows(bwd, task, &work)) return;
    const int b = work.b, h = work.h, i0 = work.i0, rows = work.rows;
    const sequence s = work.s;
    load_both(m, bwd, &s, Q, h, i0);
    wait_loads();
    const interval keys = keys_seen_by(&s, i0, rows);
    find_statistics(bwd, &s, m, b, h, i0, keys.begin, keys.end);
    if (!bwd->dq.p && !bwd->d_bias.p) return;
    const float *const key_mean = key_mean_of(bwd, b, h / a->group);
    float sum[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    gradient dq;
    clear_gradient(dq);
    for (int j0 = keys.begin / BN * BN; j0 < keys.end; j0 += BN) {
        __syncthreads(); /* no warp reads the last tiles */
        load_both(m, bwd, &s, K, h, j0);
        wait_loads();
        gradients(bwd, &s, m, b, h, i0, j0, 1);
#pragma unroll
        for (int panel = 0; panel < PANELS; ++panel) {
            const uint32_t tile = panel_of(m, bwd, &s, K, panel, h, j0);
            product_nn(dq[panel], 1, COLUMN_TILES, BN, lane_16(MEMBER_ADDRESS(m->shared, ds), BN), first_row(), BN, 0,
                       lane_16(tile, PITCH), first_column(), PITCH);
        }
        if (key_mean) sum_ds(sum, m);
    }
    if (key_mean) subtract_excess(dq, sum, bwd, m->memory, key_mean);
    const int row = lane_row();
    const int inside[2] = {m->memory->log_sum[row] < INFINITY, m->memory->log_sum[row + 8] < INFINITY};
    if (bwd->dq.p) add_rows(dq, &bwd->dq, &s, h, s.q0 + i0 + row, bwd->dq_scale, inside, a->D, bwd->dq_f32);
}

/* dK, dV, or both, of a key block: above head_dim 128 there are registers for one of them at a time. */
enum { DK = 1, DV = 2 };
DEVICE void key_gradients(const fattni_bwd_args *bwd, const cta_memory *m, int task, const int want) {
    const fattni_attention_args *const a = &bwd->a;
    const int with_dk = (want & DK) && bwd->dk.p, with_dv = (want & DV) && bwd->dv.p;
    key_block work;
    if (!(with_dk || with_dv) || !find_key_block(a, (unsigned)task, BM, BN, &work)) return;
    const int b = work.b, hk = work.hk, j0 = work.j0, keys = work.keys;
    const row_blocks rows = work.rows;
    const sequence s = work.s;
    gradient dk, dv;
    int any = 0;
    clear_gradient(dk), clear_gradient(dv);
    for (int step = 0; step < rows.steps; ++step) {
        const row_block now = row_block_of(&rows, step);
        const int h = now.h, i0 = now.i0;
        if (!is_huge(bwd, b, h, i0)) continue;
        __syncthreads(); /* no warp reads the last tiles */
        if (!any) load_both(m, bwd, &s, K, h, j0);
        any = 1;
        load_both(m, bwd, &s, Q, h, i0);
        const int r = (int)threadIdx.x;
        if (r < BM) load_statistics(m->memory, bwd, r, row_base(bwd, &s, b, h) + i0 + r, i0 + r < s.Sq);
        wait_loads();
        gradients(bwd, &s, m, b, h, i0, j0, 0);
#pragma unroll
        for (int panel = 0; panel < PANELS; ++panel) {
            if (want & DV)
                product_nn(dv[panel], 1, COLUMN_TILES, BM, lane_8(MEMBER_ADDRESS(m->shared, p), BN), first_row(), BN, 1,
                           lane_16(panel_of(m, bwd, &s, DO, panel, h, i0), PITCH), first_column(), PITCH);
            if (want & DK)
                product_nn(dk[panel], 1, COLUMN_TILES, BM, lane_8(MEMBER_ADDRESS(m->shared, ds), BN), first_row(), BN,
                           1, lane_16(panel_of(m, bwd, &s, Q, panel, h, i0), PITCH), first_column(), PITCH);
        }
    }
    if (!any) return;
    const int key = lane_row(); /* of the gradients */
    const int inside[2] = {key < keys, key + 8 < keys};
    if (with_dk) add_rows(dk, &bwd->dk, &s, hk, s.k0 + j0 + key, bwd->dk_scale, inside, a->D, bwd->dk_f32);
    if (with_dv) add_rows(dv, &bwd->dv, &s, hk, s.k0 + j0 + key, bwd->dv_scale, inside, a->Dv, bwd->dv_f32);
}

DEVICE void key_task(const fattni_bwd_args *bwd, cta_memory *m, int task) {
    if (D <= 128)
        key_gradients(bwd, m, task, DK | DV);
    else
        key_gradients(bwd, m, task, DV), key_gradients(bwd, m, task, DK);
}

extern "C" __global__ void __launch_bounds__(THREADS, K_CTAS) K_NAME(const __grid_constant__ fattni_bwd_args args) {
    extern __shared__ __align__(1024) unsigned char SHARED_MEMORY[];
    cta_memory m = {shared_address(SHARED_MEMORY), (shared_memory *)SHARED_MEMORY};
    if (has_tasks(&args)) run_tasks(&args, &m);
}

DESCRIBE_KERNEL(fattni_bwd_args, SHARED_BYTES, 1);
