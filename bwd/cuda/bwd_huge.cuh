/* Backward attention of huge rows in 16 bits (core/attention/huge.h says which and why), with mma.sync, sm_80 and
   later. The main kernels leave them out: L is not enough for their P. Runs after them, and after dq is in its place.

   Row blocks, in order: m = max s, l = sum exp(s - m) over all keys; then P = exp((s - m) - log l), dS = P (dP - delta),
   dQ = dS K, dbias, dsink. Then key blocks: dV += P^T dO, dK += dS^T Q over the row blocks that have huge rows. In both
   S is computed by the same instructions, so that its bits, and with them the sum of a row of P, are the same.

   Tensors     q, d_o [b,h,i,d], k, v, dk, dv [b,g,j,d]; delta of bwd_preprocess.cu; dq, dk, dv are added to.
   CTAs        as many as SMs; tasks are claimed in order, key blocks wait until all row blocks are done. Without huge
               rows a CTA reads one number and ends.
   Threads     8 warps. S, dP: 16 rows and half of the keys; dQ: 16 rows, dK, dV: 16 keys, and half of the columns.
   Shared      Q, K, V, dO [64][PITCH], P and dS [64][64] in the input dtype; statistics of the rows.
   Rounding    P and dS to the input dtype, accumulation fp32.

   Nothing here is pipelined: rows are huge by accident, or because they are padding.

   Instances: bwd_kernels.def. */
#include "bwd/cuda/bwd_layout.cuh"
#include "core/device/score_terms_mma.cuh"
#include "core/attention/huge.h"
#include "core/ptx/acquire.h"
#include "core/ptx/grid.h"
#include "core/device/quad.cuh"

#define LOG2E 1.4426950408889634f

enum {
    D = K_D, PITCH = D, BM = K_BM, BN = K_BN, THREADS = 32 * K_WARPS, KEY_TILES = BN / 16,
    COLUMNS = D / 2, COLUMN_TILES = COLUMNS / 8, TILE = BM * PITCH * 2, TILE_S = BM * BN * 2
};
static_assert(BM == 64 && BN == 64 && K_WARPS == 8 && D % 64 == 0, "four warps of 16 rows or keys, twice");

/* Per row: m and log2 l less what P is scaled by, +inf where the row is not huge; delta; the two halves of keys. */
typedef struct statistics {
    float max[BM], log_sum[BM], delta[BM], part_max[2][BM], part_sum[2][BM];
} statistics;

/* What a CTA has at hand. */
typedef struct tiles {
    uint32_t q, k, v, d_o, p, ds;
    statistics *of_rows;
} tiles;

/* This warp's part of S and of the gradients; this lane's first row, and key. */
DEVICE int first_row(void) { return (int)threadIdx.x / 32 % 4 * 16; }
DEVICE int first_key(void) { return (int)threadIdx.x / 128 * (BN / 2); }
DEVICE int first_column(void) { return (int)threadIdx.x / 128 * COLUMNS; }
DEVICE int lane_row(void) { return first_row() + (int)threadIdx.x % 32 / 4; }
DEVICE int lane_key(void) { return first_key() + (int)threadIdx.x % 4 * 2; }

DEVICE const half_type *row_of_view(const fattni_view *v, const sequence *s, int head, int64_t row) {
    return (const half_type *)v->p + s->batch * v->b + head * v->h + row * v->row;
}
DEVICE void load_rows(const fattni_cuda_args *a, const sequence *s, const tiles *t, int h, int i0) {
    load_tile(t->q, PITCH, BM, THREADS, row_of_view(&a->q, s, h, s->q0 + i0), a->q.row, s->Sq - i0, a->D,
              a->vector_qkv);
    load_tile(t->d_o, PITCH, BM, THREADS, row_of_view(&a->d_o, s, h, s->q0 + i0), a->d_o.row, s->Sq - i0, a->Dv,
              a->vector_qkv);
}
DEVICE void load_keys(const fattni_cuda_args *a, const sequence *s, const tiles *t, int hk, int j0) {
    load_tile(t->k, PITCH, BN, THREADS, row_of_view(&a->k, s, hk, s->k0 + j0), a->k.row, s->Sk - j0, a->D,
              a->vector_qkv);
    load_tile(t->v, PITCH, BN, THREADS, row_of_view(&a->v, s, hk, s->k0 + j0), a->v.row, s->Sk - j0, a->Dv,
              a->vector_qkv);
}
/* Loads are there, and what was written to shared memory. */
DEVICE void meet(void) {
    cp_async_wait(0);
    __syncthreads();
}

/* Scores in natural units; -inf where a row does not see the key. tanhs: what general_scores keeps. */
DEVICE void scores(float x[KEY_TILES][4], float tanhs[KEY_TILES][4], const fattni_cuda_args *a, const sequence *s,
                   const tiles *t, int b, int h, int i0, int j0) {
    product_nt(x, 1, KEY_TILES, D, lane_16(t->q, PITCH), first_row(), lane_8(t->k, PITCH), first_key(), PITCH);
    const int i = i0 + lane_row(), j = j0 + lane_key();
    general_scores(x, tanhs, KEY_TILES, 0, a, s, slope_of(a, h), b, h, i, j);
#pragma unroll
    for (int n = 0; n < KEY_TILES; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            const int row = row_of(0, i, n, e), key = column_of(0, j, n, e);
            asm volatile("" : "+f"(x[n][e])); /* no product of scale and q.k is fused with what comes next */
            if (key < row + s->lo || key > row + s->hi || key >= s->Sk) x[n][e] = -INFINITY;
        }
}

/* Online maximum and sum, each thread's own keys, of its two rows. */
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
        for (int n = 0; n < 2 * KEY_TILES; ++n)
            sum[half] += exp2_approx((x[n / 2][2 * half + n % 2] - top) * LOG2E);
    }
}
/* Two such, of the same row. */
DEVICE void join_sums(float *max, float *sum, float other_max, float other_sum) {
    const float top = fmaxf(*max, other_max);
    if (top == -INFINITY) return;
    *sum = *sum * exp2_approx((*max - top) * LOG2E) + other_sum * exp2_approx((other_max - top) * LOG2E);
    *max = top;
}

/* Whether some row of the block is huge. All threads. */
DEVICE int has_huge_rows(const fattni_cuda_args *a, const sequence *s, int h, int i0) {
    const int i = i0 + (int)threadIdx.x;
    int huge = 0;
    if ((int)threadIdx.x < BM && i < s->Sq) {
        const float L = ((const float *)a->lse.p)[s->batch * a->lse.b + h * a->lse.h + (int64_t)(s->q0 + i) * a->lse.row];
        huge = FATTNI_IS_HUGE(L);
    }
    return __syncthreads_or(huge);
}

/* m and l over all keys, to shared memory and, for the key blocks, to the workspace; the rows' part in dsink. */
DEVICE void find_statistics(const fattni_cuda_args *a, const sequence *s, const tiles *t, int b, int h, int i0,
                            int begin, int end) {
    statistics *const of = t->of_rows;
    float max[2] = {-INFINITY, -INFINITY}, sum[2] = {0.0f, 0.0f};
    for (int j0 = begin / BN * BN; j0 < end; j0 += BN) {
        __syncthreads(); /* nobody reads the last keys */
        load_keys(a, s, t, h / a->group, j0);
        cp_async_commit();
        meet();
        float x[KEY_TILES][4], tanhs[KEY_TILES][4];
        scores(x, tanhs, a, s, t, b, h, i0, j0);
        sum_scores(max, sum, x);
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        for (int step = 1; step <= 2; ++step)
            join_sums(max + half, sum + half, __shfl_xor_sync(ALL_LANES, max[half], step),
                      __shfl_xor_sync(ALL_LANES, sum[half], step));
        if (threadIdx.x % 4 == 0) {
            of->part_max[threadIdx.x / 128][lane_row() + 8 * half] = max[half];
            of->part_sum[threadIdx.x / 128][lane_row() + 8 * half] = sum[half];
        }
    }
    __syncthreads();
    const int r = (int)threadIdx.x, i = i0 + r;
    if (r < BM) {
        const int64_t at = row_base(a, s, b, h) + i;
        float top = of->part_max[0][r], total = of->part_sum[0][r], log_sum = INFINITY, L = INFINITY;
        const float sink = a->sink.p ? float_at(&a->sink, h) : -INFINITY;
        join_sums(&top, &total, of->part_max[1][r], of->part_sum[1][r]);
        join_sums(&top, &total, sink, 1.0f);
        if (i < s->Sq)
            L = ((const float *)a->lse.p)[s->batch * a->lse.b + h * a->lse.h + (int64_t)(s->q0 + i) * a->lse.row];
        const int counts = FATTNI_IS_HUGE(L) && total > 0.0f;
        if (counts) {
            log_sum = logf(total);
            const float more = L - top - log_sum; /* than rounding: L is of other keys, too */
            if (fabsf(more) > fabsf(L) * FATTNI_HUGE_ROUNDING_F32) log_sum += more;
        }
        const float delta = i < s->Sq ? a->delta[at] : 0.0f;
        of->part_sum[0][r] = counts && a->d_sink.p ? -expf(sink - top - log_sum) * delta : 0.0f;
        of->max[r] = counts ? top : 0.0f;
        of->log_sum[r] = counts ? (log_sum - a->lse_shift) * LOG2E : INFINITY;
        of->delta[r] = delta;
        if (i < s->Sq) ((float *)a->huge_max)[at] = of->max[r], ((float *)a->huge_log_sum)[at] = of->log_sum[r];
    }
    __syncthreads();
    if (a->d_sink.p && threadIdx.x == 0) {
        float gradient = 0.0f;
        for (int n = 0; n < BM; ++n) gradient += of->part_sum[0][n];
        const int blocks = (a->Sq + BM - 1) / BM;
        ((float *)a->huge_sink)[((int64_t)h * a->B + b) * blocks + i0 / BM] = gradient;
    }
}

/* P and dS of one tile, rounded, to shared memory; dbias, if it is to have its part. All threads. */
DEVICE void gradients(const fattni_cuda_args *a, const sequence *s, const tiles *t, int b, int h, int i0, int j0,
                      int with_bias) {
    const statistics *const of = t->of_rows;
    float p[KEY_TILES][4], ds[KEY_TILES][4], tanhs[KEY_TILES][4];
    scores(p, tanhs, a, s, t, b, h, i0, j0);
    product_nt(ds, 1, KEY_TILES, D, lane_16(t->d_o, PITCH), first_row(), lane_8(t->v, PITCH), first_key(), PITCH);
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
            const int r = row + e / 2 * 8, kept = keep[0] >> (4 * n + e) & 1;
            p[n][e] = p[n][e] == -INFINITY ? 0.0f : exp2_approx((p[n][e] - of->max[r]) * LOG2E - of->log_sum[r]);
            const float dp = kept ? ds[n][e] * (a->drop_T ? a->keep_scale : 1.0f) : 0.0f;
            ds[n][e] = p[n][e] == 0.0f ? 0.0f : p[n][e] * (dp - of->delta[r]);
            if (!kept) p[n][e] = 0.0f;
        }
    if (with_bias && a->d_bias.p) add_dbias(ds, KEY_TILES, 0, a, s, b, h, i, j);
    if (a->softcap > 0) through_cap(ds, tanhs, KEY_TILES);
    const int lane = (int)threadIdx.x % 4;
#pragma unroll
    for (int n = 0; n < KEY_TILES; ++n)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const uint32_t at = tile_offset(BN, row + 8 * half, first_key() / 8 + n) + 4u * lane;
            store_shared_word(t->p + at, pack(p[n][2 * half], p[n][2 * half + 1]));
            store_shared_word(t->ds + at, pack(ds[n][2 * half], ds[n][2 * half + 1]));
        }
    __syncthreads();
}

/* This warp's 16 rows and half of the columns are added to a gradient; of this lane's two rows those that are
   `inside`. */
DEVICE void add_rows(const float x[COLUMN_TILES][4], const fattni_view *to, const sequence *s, int head, int64_t row,
                     float scale, const int inside[2], int width, int f32) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int64_t at = s->batch * to->b + head * to->h + (row + 8 * half) * to->row + first_column();
        store_row((char *)to->p + at * (f32 ? 4 : 2), &x[0][2 * half], COLUMN_TILES, scale, inside[half],
                  width - first_column(), f32, 1);
    }
}

DEVICE void clear(float x[COLUMN_TILES][4]) {
#pragma unroll
    for (int n = 0; n < COLUMN_TILES; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) x[n][e] = 0.0f;
}

DEVICE void row_block(const fattni_cuda_args *a, const tiles *t, int task) {
    const int blocks = (a->Sq + BM - 1) / BM, plane = task / blocks, h = plane % a->Hq, b = plane / a->Hq;
    const int i0 = task % blocks * BM;
    const sequence s = sequence_of(a, b);
    const int huge = i0 < s.Sq && has_huge_rows(a, &s, h, i0);
    if (threadIdx.x == 0) a->huge_blocks[task] = huge;
    if (!huge) return;
    load_rows(a, &s, t, h, i0);
    cp_async_commit();
    meet();
    const int rows = min(BM, s.Sq - i0);
    const int begin = max(0, min(i0 + s.lo, s.Sk)), end = max(0, min(i0 + rows + s.hi, s.Sk));
    find_statistics(a, &s, t, b, h, i0, begin, end);
    if (!a->dq.p && !a->d_bias.p) return;
    float dq[COLUMN_TILES][4];
    clear(dq);
    for (int j0 = begin / BN * BN; j0 < end; j0 += BN) {
        __syncthreads(); /* nobody reads the last tiles */
        load_keys(a, &s, t, h / a->group, j0);
        cp_async_commit();
        meet();
        gradients(a, &s, t, b, h, i0, j0, 1);
        product_nn(dq, 1, COLUMN_TILES, BN, lane_16(t->ds, BN), first_row(), BN, 0, lane_16(t->k, PITCH),
                   first_column(), PITCH);
    }
    const int row = lane_row();
    const int inside[2] = {t->of_rows->log_sum[row] < INFINITY, t->of_rows->log_sum[row + 8] < INFINITY};
    if (a->dq.p) add_rows(dq, &a->dq, &s, h, s.q0 + i0 + row, a->dq_scale, inside, a->D, a->dq_f32);
}

/* dK and dV of a key block; above d 128 there are registers for one of them at a time. */
enum { DK = 1, DV = 2 };
DEVICE void key_block(const fattni_cuda_args *a, const tiles *t, int task, const int want) {
    const int blocks = (a->Sk + BN - 1) / BN, plane = task / blocks, hk = plane % a->Hkv, b = plane / a->Hkv;
    const int j0 = task % blocks * BN, row_blocks = (a->Sq + BM - 1) / BM;
    const sequence s = sequence_of(a, b);
    const int with_dk = (want & DK) && a->dk.p, with_dv = (want & DV) && a->dv.p;
    if (j0 >= s.Sk || !(with_dk || with_dv)) return;
    const int keys = min(BN, s.Sk - j0);
    const int begin = max(0, min(j0 - s.hi, s.Sq)), end = max(0, min(j0 + keys - s.lo, s.Sq));
    float dk[COLUMN_TILES][4], dv[COLUMN_TILES][4];
    int any = 0;
    clear(dk), clear(dv);
    for (int h = hk * a->group; h < (hk + 1) * a->group; ++h)
        for (int block = begin / BM; block * BM < end; ++block) {
            if (!a->huge_blocks[(b * a->Hq + h) * (int64_t)row_blocks + block]) continue;
            const int i0 = block * BM;
            __syncthreads(); /* nobody reads the last tiles */
            if (!any) load_keys(a, &s, t, hk, j0);
            any = 1;
            load_rows(a, &s, t, h, i0);
            cp_async_commit();
            const int r = (int)threadIdx.x;
            if (r < BM) {
                const int64_t at = row_base(a, &s, b, h) + i0 + r;
                const int inside = i0 + r < s.Sq;
                t->of_rows->max[r] = inside ? ((const float *)a->huge_max)[at] : 0.0f;
                t->of_rows->log_sum[r] = inside ? ((const float *)a->huge_log_sum)[at] : INFINITY;
                t->of_rows->delta[r] = inside ? a->delta[at] : 0.0f;
            }
            meet();
            gradients(a, &s, t, b, h, i0, j0, 0);
            if (want & DV)
                product_nn(dv, 1, COLUMN_TILES, BM, lane_8(t->p, BN), first_row(), BN, 1, lane_16(t->d_o, PITCH),
                           first_column(), PITCH);
            if (want & DK)
                product_nn(dk, 1, COLUMN_TILES, BM, lane_8(t->ds, BN), first_row(), BN, 1, lane_16(t->q, PITCH),
                           first_column(), PITCH);
        }
    if (!any) return;
    const int key = lane_row(); /* of the gradients */
    const int inside[2] = {key < keys, key + 8 < keys};
    if (with_dk) add_rows(dk, &a->dk, &s, hk, s.k0 + j0 + key, a->dk_scale, inside, a->D, a->dk_f32);
    if (with_dv) add_rows(dv, &a->dv, &s, hk, s.k0 + j0 + key, a->dv_scale, inside, a->Dv, a->dv_f32);
}

extern "C" __global__ void __launch_bounds__(THREADS, K_CTAS)
    K_NAME(const __grid_constant__ fattni_cuda_args a) {
    extern __shared__ __align__(1024) unsigned char shared[];
    await_last_grid();
    if (*(volatile const int32_t *)a.huge == 0) return;
    const uint32_t at = shared_address(shared);
    const tiles t = {at, at + TILE, at + 2 * TILE, at + 3 * TILE, at + 4 * TILE, at + 4 * TILE + TILE_S,
                     (statistics *)(shared + 4 * TILE + 2 * TILE_S)};
    const int row_tasks = a.B * a.Hq * ((a.Sq + BM - 1) / BM), key_tasks = a.B * a.Hkv * ((a.Sk + BN - 1) / BN);
    for (;;) {
        __shared__ int claimed;
        __syncthreads();
        if (threadIdx.x == 0) claimed = atomicAdd(a.huge + 1, 1);
        __syncthreads();
        const int task = claimed;
        if (task >= row_tasks + key_tasks) return;
        if (task < row_tasks) {
            row_block(&a, &t, task);
            __threadfence();
            __syncthreads();
            if (threadIdx.x == 0) add_release(a.huge + 2, 1);
            continue;
        }
        if (threadIdx.x == 0)
            while (load_acquire(a.huge + 2) < row_tasks) {}
        __syncthreads();
        if (D <= 128) key_block(&a, &t, task - row_tasks, DK | DV);
        else key_block(&a, &t, task - row_tasks, DV), key_block(&a, &t, task - row_tasks, DK);
    }
}
