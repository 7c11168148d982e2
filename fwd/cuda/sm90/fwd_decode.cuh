/* Forward attention of few rows on Hopper: the sums of fwd_parts.cuh, made for calls whose time is latency.

   S = Q K^T, P = exp(s - m), O^T = V^T P^T by mma.sync, K and V straight from global memory to registers: the sums of
   both products may be in any order, and the columns of O in any place, so that a lane loads 16 bytes as they lie.
   Loads of a warp's next keys start as soon as registers are free; warps do not wait for each other.

   Tensors     q, o [b,h,i,d], k, v [b,g,j,d], lse [b,h,i]; d is D, in rows at multiples of 16 bytes.
   Rows        of the heads of a group, 8 or 16 in a tile. What 16 have they have in two halves: the bits of 8.
   Keys        in parts (fwd_decode.h), of which a CTA has one or several, in turn. Warp w has keys 16 w .. 16 w + 15 of
               every BN of a part, with a maximum, a sum and O of its own. These are added up in the order of the warps,
               then those of the parts, in shared memory of the cluster's first CTA, then those of clusters, through
               memory. The order is fixed: results repeat bitwise.
   Fragments   lane 4 g + t. K is B: keys g and g + 8 of 16, chunks (of 8 columns) t + 4 c, of which words 0, 1 and 2, 3
               are steps of the sum. Q is A: row g with the words of the first step, in the place of row g + 8 those of
               the second. V is A of O^T: keys 2t, 2t + 1, 2t + 8, 2t + 9, chunks g + 8 c, words paired by key;
               tile n has columns n and n + D/16 of the lane's. P of row g is B as it comes out of S.
   Code        K and V are usually not in L2, and with them the code is pushed out of it: what runs once is short. All
               addresses are computed before the wait for the stream's previous kernel.

   Instances: fwd_kernels.def. Macros in: cmake/instance.cu.in. */
#include "core/device/describe.cuh"
#include "core/device/sequence.cuh"
#include "core/device/half_types.cuh"
#include "core/ptx/cluster.h"
#include "core/ptx/cluster_barrier.h"
#include "core/ptx/grid.h"
#include "core/ptx/load_once.h"
#include "core/ptx/ldmatrix.h"
#include "core/ptx/mbarrier.h"
#include "core/ptx/relaxed.h"
#include "core/ptx/shared.h"
#include "core/ptx/store_async.h"
#include "fwd/cuda/fwd_softmax.cuh"
#include "fwd/cuda/fwd_decode.h"

enum {
    D = K_D,
    BM = K_BM,
    BN = K_BN,
    WARPS = K_WARPS,
    THREADS = 32 * WARPS,
    GROUPS = FATTNI_DECODE_GROUPS,
    SLOTS = FATTNI_DECODE_SLOTS,
    CHUNKS = D / 32, /* that a lane has of a row of K or Q */
    PANELS = D / 64, /* chunks that it has of a row of V */
    TILES = D / 16,
    HALVES = BM / 8,
    AT_ONCE = 2048 / BM / D / K_CTAS,
    AHEAD = AT_ONCE > 1 ? AT_ONCE : 1, /* tiles of 16 keys of a warp whose loads are in flight */
    KEPT = FATTNI_DECODE_KEPT,
    FOURS = BM * D > 1024 ? 2 : 1 /* columns that a thread adds up, by four */
};

/* Results: m and l of their rows, and rows of O, [row][result][D]. As many rows as the call's tiles have: what shared
   memory leaves over is L1, through which all loads in flight pass. */
typedef struct shared_memory {
    uint4 q[HALVES][CHUNKS][32];                      /* A fragments, by lanes */
    float m_warps[KEPT][WARPS], l_warps[KEPT][WARPS]; /* of warps: rows of one part, or of all of the CTA's */
    float m_slots[BM][SLOTS], l_slots[BM][SLOTS];     /* of parts, in the cluster's first CTA */
    uint64_t full, unused;                            /* mbarrier: these have arrived */
    float o[2 * BM * WARPS * D];                      /* of warps, then of parts in slots */
} shared_memory;
enum { SHARED_BYTES = sizeof(shared_memory) };
static_assert(BM % 8 == 0 && (int)HALVES * (int)CHUNKS <= (int)WARPS, "loads of Q");
static_assert((int)BN == 16 * (int)WARPS && (int)BN == (int)FATTNI_DECODE_LEAST && (int)WARPS == (int)SLOTS, "shape");
static_assert(offsetof(shared_memory, o) == FATTNI_DECODE_SHARED(D, BM, 0, 0), "the host's");

/* Where the columns are that this thread adds up, among the rows of O: number f of FOURS. */
#define FOUR_OF(f) (4 * ((int)threadIdx.x + (f)*THREADS))
/* The same in results of which there are `of`. */
#define RESULT_OF(four, of) ((four) / D * (of)*D + (four) % D)

/* The work of a CTA. */
typedef struct key_part {
    int b, hk, h0, r0, rows;  /* rows [r0, r0 + rows) of heads h0 .. h0 + tile_heads - 1, which share key head hk */
    int begin, end, keys;     /* of the tile; of a part */
    int first_seen, end_seen; /* all rows see [first_seen, end_seen) */
    int tile, part;           /* tile: of all of the call; part: the first of this CTA */
    sequence s;
} key_part;

/* Tiles of rows with the same keys run side by side. Gives 0 where the tile has no rows. */
DEVICE int find_part(const fattni_fwd_decode_args *z, key_part *w) {
    const fattni_fwd_parts_args *const x = &z->x;
    const fattni_attention_args *const a = &x->a;
    int n = (int)blockIdx.x;
    w->part = fattni_divide(&n, &x->parts) * z->each;
    w->tile = n;
    const int tile = fattni_divide(&n, &x->tiles);
    w->hk = fattni_divide(&n, &x->heads), w->h0 = w->hk * (int)x->tile_heads.by, w->b = n;
    if (a->seqlens_q.p || a->seqlens_k.p || a->cu_seqlens_q.p) grid_dependency_wait();
    w->s = sequence_of(a, w->b);
    const int rows = w->s.Sq * (int)x->tile_heads.by;
    w->r0 = tile * BM, w->rows = min(BM, rows - w->r0);
    if (w->rows <= 0) return 0;
    const int first = fattni_divided(w->r0, &x->tile_heads), last = fattni_divided(w->r0 + w->rows - 1, &x->tile_heads);
    w->begin = max(0, min(first + w->s.lo, w->s.Sk)) & ~15;
    w->end = max(w->begin, min(last + 1 + w->s.hi, w->s.Sk));
    w->keys = fattni_decode_keys_of_part(w->end - w->begin, (int)x->heads.by * ((rows + BM - 1) / BM), rows);
    w->first_seen = last + w->s.lo, w->end_seen = min(w->end, first + 1 + w->s.hi);
    return 1;
}

/* Row r of the tile: its place in a tensor, in elements. */
DEVICE int64_t place_of(const fattni_fwd_parts_args *x, const key_part *w, const fattni_view *t, int r) {
    int row = w->r0 + r;
    const int h = w->h0 + fattni_divide(&row, &x->tile_heads);
    return w->s.batch * t->b + h * t->h + (int64_t)(w->s.q0 + row) * t->row;
}

/* The page of keys from j on; 0 without pages. */
DEVICE int page_of(const fattni_fwd_parts_args *x, int b, int j) {
    if (!x->page_table.p) return 0;
    const int page = ((const int32_t *)x->page_table.p + b * x->page_table.b)[(j >> x->page_log2) * x->page_table.h];
    return (unsigned)page >= (unsigned)x->pages ? 0 : page;
}

/* Rows of K or V that this lane loads of 16 keys from j on; instead of those after `last` it once more, so that nothing
   else is read. head: of the page. */
DEVICE const char *key_at(const char *head, uint32_t row, int j, int last, int mask) {
    return head + (uint64_t)((uint32_t)(min(j, last) & mask)) * row;
}
DEVICE void find_k(const char *from[2], const char *head, uint32_t row, int j, int last, int mask) {
    const int lane = (int)threadIdx.x & 31, g = lane / 4, t = lane % 4;
#pragma unroll
    for (int n = 0; n < 2; ++n) from[n] = key_at(head, row, j + g + 8 * n, last, mask) + 16 * t;
}
DEVICE void find_v(const char *from[4], const char *head, uint32_t row, int j, int last, int mask) {
    const int lane = (int)threadIdx.x & 31, g = lane / 4, t = lane % 4;
#pragma unroll
    for (int n = 0; n < 4; ++n) from[n] = key_at(head, row, j + 2 * t + n % 2 + 8 * (n / 2), last, mask) + 16 * g;
}
DEVICE void load_k(uint32_t k[2][CHUNKS][4], const char *const from[2]) {
#pragma unroll
    for (int n = 0; n < 2; ++n)
#pragma unroll
        for (int c = 0; c < CHUNKS; ++c) load_once_4(k[n][c], from[n] + 64 * c);
}
DEVICE void load_v(uint32_t v[4][PANELS][4], const char *const from[4]) {
#pragma unroll
    for (int n = 0; n < 4; ++n)
#pragma unroll
        for (int c = 0; c < PANELS; ++c) load_once_4(v[n][c], from[n] + 128 * c);
}

/* S of 16 keys: in p[0..1] keys 2t, 2t + 1, in p[2..3] 8 more. Two sums that do not wait for each other: rows 8 to 15
   of A are rows 0 to 7 with other chunks, of which the second sum is used. */
DEVICE void scores_of(float p[4], const uint32_t k[2][CHUNKS][4], uint32_t q_lane) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        float x[4] = {0, 0, 0, 0}, y[4] = {0, 0, 0, 0};
#pragma unroll
        for (int c = 0; c < CHUNKS; ++c) {
            uint32_t q[4];
            load_shared_4(q, q_lane + 512 * c);
            mma(x, q, k[half][c][0], k[half][c][1]);
            mma(y, q, k[half][c][2], k[half][c][3]);
        }
        p[2 * half] = x[0] + y[2], p[2 * half + 1] = x[1] + y[3];
    }
}

/* O^T += V^T P^T of 16 keys. */
DEVICE void add_values(float o[HALVES][TILES][4], const uint32_t v[4][PANELS][4], const uint32_t p[HALVES][2]) {
#pragma unroll
    for (int n = 0; n < TILES; ++n) {
        uint32_t a[4];
#pragma unroll
        for (int e = 0; e < 4; ++e) { /* column n or n + D/16, keys 2t, 2t + 1 or 8 more */
            const int column = n + e % 2 * TILES, c = column / 8, word = column % 8 / 2;
            a[e] = __byte_perm(v[e / 2 * 2][c][word], v[e / 2 * 2 + 1][c][word], column % 2 ? 0x7632 : 0x5410);
        }
#pragma unroll
        for (int h = 0; h < HALVES; ++h) mma(o[h][n], a, p[h][0], p[h][1]);
    }
}

/* online_softmax (fwd_softmax.cuh) of row g and 16 keys. Gives whether the maximum rose. */
DEVICE int softmax_of_keys(float p[4], float *m, float *l, float *correction, float unit) {
    const float top = quad_max(fmaxf(fmaxf(*m, fmaxf(p[0], p[1])), fmaxf(p[2], p[3])));
    const int rose = top != *m;
    float base = top == -INFINITY ? 0.0f : __fmul_rn(top, unit), shift = 0.0f;
    if (is_far(base)) { /* the difference comes before the product */
        base = 0.0f, shift = top;
#pragma unroll
        for (int e = 0; e < 4; ++e) p[e] -= top;
    }
    /* The product is rounded as base is, so that this is 2^0 where the maximum stays. */
    *correction = exp2_approx(__fmul_rn(*m - shift, unit) - base);
    *m = top;
#pragma unroll
    for (int e = 0; e < 4; ++e) p[e] = exp2_approx(fmaf(p[e], unit, -base));
    *l = fmaf(*l, *correction, p[0] + p[1] + (p[2] + p[3]));
    return rose;
}

/* Scores of 16 keys of which the row sees only [low, high]. */
DEVICE void hide(float p[4], int low, int high) {
    const int t = (int)threadIdx.x & 3;
#pragma unroll
    for (int e = 0; e < 4; ++e) {
        const int key = 2 * t + e % 2 + e / 2 * 8;
        if (key < low || key > high) p[e] = -INFINITY;
    }
}

/* 16 keys more: scores p become P. */
DEVICE void add_keys(float o[HALVES][TILES][4], float m[HALVES], float l[HALVES], float p[HALVES][4],
                     const uint32_t v[4][PANELS][4], float unit) {
    const int t = (int)threadIdx.x & 3;
    uint32_t weights[HALVES][2];
#pragma unroll
    for (int h = 0; h < HALVES; ++h) {
        float correction;
        if (__any_sync(ALL_LANES, softmax_of_keys(p[h], &m[h], &l[h], &correction, unit))) {
            const float first = __shfl_sync(ALL_LANES, correction, 8 * t, 32),
                        second = __shfl_sync(ALL_LANES, correction, 8 * t + 4, 32);
#pragma unroll
            for (int c = 0; c < TILES; ++c)
#pragma unroll
                for (int e = 0; e < 4; ++e) o[h][c][e] *= e % 2 ? second : first;
        }
        weights[h][0] = pack(p[h][0], p[h][1]), weights[h][1] = pack(p[h][2], p[h][3]);
    }
    add_values(o, v, weights);
}

/* A warp's result, in rows row0.. of the results: m and l of row first + g, O^T of 8 rows. */
DEVICE void store_result(shared_memory *smem, int row0, int first, const float (*o)[4], float m, float l, int rows) {
    const int warp = (int)threadIdx.x / 32, lane = (int)threadIdx.x & 31, g = lane / 4, t = lane % 4;
    if (t == 0 && first + g < rows)
        smem->m_warps[row0 + first + g][warp] = m, smem->l_warps[row0 + first + g][warp] = l;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const int row = first + 2 * t + r;
        if (row >= rows) break;
        float *const columns = smem->o + ((row0 + row) * WARPS + warp) * D + 8 * g;
#pragma unroll
        for (int c = 0; c < D / 8; c += 4) {
            float x[4];
#pragma unroll
            for (int e = 0; e < 4; ++e) x[e] = o[(c + e) % TILES][(c + e) / TILES * 2 + r];
            *(float4 *)(columns + c / 8 * 64 + c % 8) = make_float4(x[0], x[1], x[2], x[3]);
        }
    }
}

/* Four columns of a row: the sum of `count` results, `most` at most, in their order. m, l: of the row; o: of the first
   result. */
typedef struct row_sum {
    float4 o;
    float m, l;
} row_sum;
DEVICE row_sum add_up(const float *m, const float *l, const float *o, int count, int most, int in_memory, float unit) {
    row_sum x = {make_float4(0, 0, 0, 0), -INFINITY, 0.0f};
    float maxima[FATTNI_DECODE_GROUPS];
#pragma unroll
    for (int n = 0; n < most; ++n) {
        maxima[n] = -INFINITY;
        if (n < count) maxima[n] = in_memory ? load_relaxed(m + n) : m[n];
        x.m = fmaxf(x.m, maxima[n]);
    }
#pragma unroll
    for (int n = 0; n < most; ++n) {
        if (n >= count) continue;
        const float weight = weight_of(maxima[n], x.m, unit);
        float4 y;
        if (in_memory) {
            const float2 low = load_relaxed_2(o + n * D), high = load_relaxed_2(o + n * D + 2);
            y = make_float4(low.x, low.y, high.x, high.y);
        } else {
            y = *(const float4 *)(o + n * D);
        }
        x.l = fmaf(weight, in_memory ? load_relaxed(l + n) : l[n], x.l);
        x.o.x = fmaf(weight, y.x, x.o.x), x.o.y = fmaf(weight, y.y, x.o.y);
        x.o.z = fmaf(weight, y.z, x.o.z), x.o.w = fmaf(weight, y.w, x.o.w);
    }
    return x;
}

/* What O of row r is multiplied by, and L. */
DEVICE row_result end_of(const fattni_fwd_parts_args *x, const key_part *w, const row_sum *sum, int r, float unit) {
    const fattni_attention_args *const a = &x->a;
    int h = w->r0 + r;
    h = w->h0 + fattni_divide(&h, &x->tile_heads);
    const float *const lse = (const float *)a->lse.p + place_of(x, w, &a->lse, r);
    return end_of_row(a, a->sink.p || a->flags & FATTN_MERGE, sum->m, sum->l, unit, a->scale, h, lse);
}

/* L of row r, and columns d .. d + 3 of its O. */
DEVICE void store_end(const fattni_fwd_parts_args *x, const key_part *w, const row_sum *sum, const row_result *end,
                      int r, int d) {
    const fattni_attention_args *const a = &x->a;
    if (d == 0) ((float *)a->lse.p)[place_of(x, w, &a->lse, r)] = end->L;
    float o[4] = {sum->o.x * end->scale, sum->o.y * end->scale, sum->o.z * end->scale, sum->o.w * end->scale};
    const int64_t at = place_of(x, w, &a->o, r) + d;
    if (a->o_f32) {
        float *const to = (float *)a->o.p + at;
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            if (a->flags & FATTN_MERGE && end->keep_old > 0) o[e] += end->keep_old * to[e];
            to[e] = o[e];
        }
        return;
    }
    *(uint2 *)((half_type *)a->o.p + at) = make_uint2(pack(o[0], o[1]), pack(o[2], o[3]));
    if (!a->o_rest.p) return;
    const uint32_t rest = rest_pair(o[0], o[1], rest_pair(o[2], o[3], 0));
    *(uint32_t *)((int8_t *)a->o_rest.p + place_of(x, w, &a->o_rest, r) + d) = rest;
}

extern "C" __global__ void __launch_bounds__(THREADS, K_CTAS) K_NAME(const __grid_constant__ fattni_fwd_decode_args z) {
    grid_dependents_start();
    extern __shared__ __align__(1024) unsigned char memory[];
    shared_memory *const smem = (shared_memory *)memory;
    const fattni_fwd_parts_args &x = z.x;
    const fattni_attention_args &a = x.a;
    const int warp = (int)threadIdx.x / 32, lane = (int)threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int mask = x.page_mask;
    const uint32_t shared = shared_address(memory), full = MEMBER_ADDRESS(shared, full);
    key_part w;
    if (!find_part(&z, &w)) {
        grid_dependency_wait();
        return;
    }
    const int seen = w.end - w.begin, parts = seen > w.keys ? (seen + w.keys - 1) / w.keys : 1;
    const int together = x.cluster > 1 && parts > 1; /* the cluster's parts are sent to its first CTA */
    if (together) {
        if (threadIdx.x == 0 && w.part % SLOTS == 0 && w.part < parts) {
            mbarrier_init(full, 1);
            mbarrier_expect(full, min(parts - w.part, (int)SLOTS) * x.rows * (int)((D + 2) * sizeof(float)));
            mbarrier_init_fence();
        }
        cluster_arrive_started();
    }
    const int batch = x.page_table.p ? 0 : w.s.batch;
    const char *const k_head = (const char *)a.k.p + (batch * a.k.b + w.hk * a.k.h) * 2 + (int64_t)w.s.k0 * z.k_row;
    const char *const v_head = (const char *)a.v.p + (batch * a.v.b + w.hk * a.v.h) * 2 + (int64_t)w.s.k0 * z.v_row;
    const int begin = w.begin + w.part * w.keys, end = min(w.end, begin + z.each * w.keys), last = w.end - 1;
    const int chunk = warp % CHUNKS, half = warp / CHUNKS; /* of Q, which this warp loads */
    const half_type *const q_row = (const half_type *)a.q.p + place_of(&x, &w, &a.q, min(8 * half + g, w.rows - 1));
    const char *from_q = (const char *)q_row + 16 * (t + 4 * chunk), *from_k[2], *from_v[4];
    int row[HALVES];
#pragma unroll
    for (int h = 0; h < HALVES; ++h) row[h] = fattni_divided(w.r0 + 8 * h + g, &x.tile_heads);
    int j = begin + 16 * warp, end_of_part = min(begin + w.keys, end);
    uint32_t k[AHEAD][2][CHUNKS][4], v[AHEAD][4][PANELS][4];
    int page[AHEAD] = {0};
    find_k(from_k, k_head, z.k_row, j, last, mask), find_v(from_v, v_head, z.v_row, j, last, mask);
    uint64_t all = (uint64_t)from_q;
#pragma unroll
    for (int n = 0; n < 6; ++n) all |= (uint64_t)(n < 2 ? from_k[n] : from_v[n - 2]);
    grid_dependency_wait_after(all);
    if (w.part > 0 && w.part >= parts) {
        if (together) cluster_wait_started();
        return;
    }
    const int of_slots = x.rows * (z.kept ? z.each : 1) * (WARPS * D); /* where they begin in smem->o */
    uint32_t q[4];
    if (half < HALVES) load_once_4(q, from_q);
    if (j < end) {
        if (x.page_table.p) {
            const int64_t at = page_of(&x, w.b, j);
            find_k(from_k, k_head + at * a.k.b * 2, z.k_row, j, last, mask);
            find_v(from_v, v_head + at * a.v.b * 2, z.v_row, j, last, mask);
        }
        load_k(k[0], from_k), load_v(v[0], from_v);
    }
#pragma unroll
    for (int u = 1; u < AHEAD; ++u) {
        const int key = j + u * BN;
        if (key >= end_of_part) break;
        const int64_t at = page_of(&x, w.b, key);
        find_k(from_k, k_head + at * a.k.b * 2, z.k_row, key, last, mask), load_k(k[u], from_k);
        find_v(from_v, v_head + at * a.v.b * 2, z.v_row, key, last, mask), load_v(v[u], from_v);
    }
    /* The keys after those, of this part, or the first of the next one, which ends at `limit`. */
    int next = j + AHEAD * BN, limit = end_of_part;
    if (next >= limit) next = limit + 16 * warp, limit = min(limit + w.keys, end);
#pragma unroll
    for (int u = 0; u < AHEAD; ++u)
        if (next + u * BN < limit) page[u] = page_of(&x, w.b, next + u * BN);
    if (half < HALVES) smem->q[half][chunk][lane] = make_uint4(q[0], q[2], q[1], q[3]);
    const uint32_t q_lane = MEMBER_ADDRESS(shared, q) + 16 * lane;
    const float unit = a.scale * LOG2E;
    __syncthreads();

#pragma unroll 1
    for (int n = 0, added = 0;; ++n) { /* added: parts whose warps' results are added up */
        float o[HALVES][TILES][4], m[HALVES], l[HALVES];
#pragma unroll
        for (int h = 0; h < HALVES; ++h) {
            m[h] = -INFINITY, l[h] = 0.0f;
#pragma unroll
            for (int c = 0; c < 4 * TILES; ++c) o[h][c / 4][c % 4] = 0.0f;
        }
#pragma unroll 1
        while (j < end_of_part) {
#pragma unroll
            for (int u = 0; u < AHEAD; ++u) {
                const int now = j + u * BN, inside = u == 0 || now < end_of_part, then = next + u * BN,
                          more = then < limit;
                const int64_t at = page[u];
                float p[HALVES][4];
                if (inside)
#pragma unroll
                    for (int h = 0; h < HALVES; ++h) scores_of(p[h], k[u], q_lane + 512 * CHUNKS * h);
                if (more) find_k(from_k, k_head + at * a.k.b * 2, z.k_row, then, last, mask), load_k(k[u], from_k);
                if (inside) {
                    if (now < w.first_seen || now + 16 > w.end_seen)
#pragma unroll
                        for (int h = 0; h < HALVES; ++h)
                            hide(p[h], row[h] + w.s.lo - now, min(row[h] + w.s.hi, last) - now);
                    add_keys(o, m, l, p, v[u], unit);
                }
                if (more) find_v(from_v, v_head + at * a.v.b * 2, z.v_row, then, last, mask), load_v(v[u], from_v);
            }
            j = next, next = j + AHEAD * BN;
            if (next >= limit) next = limit + 16 * warp, limit = min(limit + w.keys, end);
#pragma unroll
            for (int u = 0; u < AHEAD; ++u)
                if (next + u * BN < limit) page[u] = page_of(&x, w.b, next + u * BN);
        }
        const int row0 = (n - added) * x.rows, is_last = n + 1 == z.each || w.part + n + 1 == parts;
        if (!z.kept && n > 0) __syncthreads(); /* the last part's results have been read */
#pragma unroll
        for (int h = 0; h < HALVES; ++h) store_result(smem, row0, 8 * h, o[h], m[h], quad_sum(l[h]), x.rows);
        end_of_part = min(end_of_part + w.keys, end);
        if (z.kept && !is_last) continue;
        __syncthreads();
        if (parts == 1) break;
        if (together && added == 0) cluster_wait_started(); /* so that its first CTA has */
#pragma unroll 1
        for (int four = FOUR_OF(0); four < (n + 1 - added) * x.rows * D; four += 4 * THREADS) {
            const int row = four / D, part = n == added ? 0 : row / x.rows, r = row - part * x.rows;
            const int slot = (w.part + added + part) % SLOTS, at = of_slots + (r * SLOTS + slot) * D + four % D;
            const row_sum sum =
                add_up(smem->m_warps[row], smem->l_warps[row], smem->o + RESULT_OF(four, WARPS), WARPS, WARPS, 0, unit);
            if (together) { /* to the cluster's first CTA */
                const uint32_t bar = cluster_address(full, 0);
                if (four % D == 0) {
                    store_async(cluster_address(shared_address(&smem->m_slots[r][slot]), 0), sum.m, bar);
                    store_async(cluster_address(shared_address(&smem->l_slots[r][slot]), 0), sum.l, bar);
                }
                store_async_4(cluster_address(ELEMENT_ADDRESS(shared, o, at), 0), sum.o, bar);
            } else {
                if (four % D == 0) smem->m_slots[r][slot] = sum.m, smem->l_slots[r][slot] = sum.l;
                *(float4 *)(smem->o + at) = sum.o;
            }
        }
        if (is_last) break;
        added = n + 1;
    }

    if (together) {
        if (w.part % SLOTS) return;
        mbarrier_wait(full, 0);
    } else if (parts > 1) {
        __syncthreads();
    }
    row_sum sums[FOURS];
    const int count = parts > 1 ? min(parts - w.part, (int)SLOTS) : (int)WARPS;
#pragma unroll
    for (int f = 0; f < FOURS; ++f) {
        const int four = FOUR_OF(f), r = four / D;
        if (four >= x.rows * D) break;
        sums[f] =
            add_up(parts > 1 ? smem->m_slots[r] : smem->m_warps[r], parts > 1 ? smem->l_slots[r] : smem->l_warps[r],
                   smem->o + (parts > 1 ? of_slots : 0) + RESULT_OF(four, SLOTS), count, SLOTS, 0, unit);
    }
    if (parts > SLOTS) { /* clusters: the last one to finish adds up */
        const int groups = (parts + SLOTS - 1) / SLOTS, group = w.part / SLOTS, all_m = x.rows * GROUPS;
        float *const results = x.results + (int64_t)w.tile * (all_m * (D + 2));
#pragma unroll
        for (int f = 0; f < FOURS; ++f) {
            const int four = FOUR_OF(f), m = four / D * GROUPS + group;
            if (four >= x.rows * D) break;
            if (four % D == 0) results[m] = sums[f].m, results[all_m + m] = sums[f].l;
            *(float4 *)(results + 2 * all_m + RESULT_OF(four, GROUPS) + group * D) = sums[f].o;
        }
        __syncthreads();
        int is_last = 0;
        if (threadIdx.x == 0) {
            __threadfence();
            is_last = atomicAdd(&x.arrived[w.tile], 1) == groups - 1;
            __threadfence();
        }
        if (!__syncthreads_or(is_last)) return;
#pragma unroll
        for (int f = 0; f < FOURS; ++f) {
            const int four = FOUR_OF(f);
            if (four >= x.rows * D) break;
            const float *const m = results + four / D * GROUPS;
            sums[f] = add_up(m, m + all_m, results + 2 * all_m + RESULT_OF(four, GROUPS), groups, GROUPS, 1, unit);
        }
    }
    row_result ends[FOURS];
#pragma unroll
    for (int f = 0; f < FOURS; ++f)
        if (FOUR_OF(f) < w.rows * D) ends[f] = end_of(&x, &w, &sums[f], FOUR_OF(f) / D, unit);
    if (D > 128) /* all threads of a row have read the old L */
        __syncthreads();
    else
        __syncwarp();
#pragma unroll
    for (int f = 0; f < FOURS; ++f)
        if (FOUR_OF(f) < w.rows * D) store_end(&x, &w, &sums[f], &ends[f], FOUR_OF(f) / D, FOUR_OF(f) % D);
}

DESCRIBE_KERNEL_THAT_WAITS(fattni_fwd_decode_args, SHARED_BYTES, 1);
