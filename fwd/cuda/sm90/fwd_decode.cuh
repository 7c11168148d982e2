/* Forward attention of few rows on Hopper: the sums of fwd_parts.cuh, made for calls whose time is latency.

   S = Q K^T, P = exp(s - m), O^T = V^T P^T by mma.sync, K and V straight from global memory to registers: the sums of
   both products may be in any order, and the columns of O in any place, so that a lane loads 16 bytes as they lie.
   Loads of a warp's next keys start as soon as registers are free; warps do not wait for each other.

   Tensors     q, o [b,h,i,d], k, v [b,g,j,d], lse [b,h,i]; d is D, in rows at multiples of 16 bytes.
   Rows        of the heads of a group, 8 or 16 in a tile. What 16 have they have in two halves: the bits of 8.
   Keys        in parts (fwd_decode.h), of which a CTA has one or several, in turn. Stream w has keys 16 w .. 16 w + 15
               of every BN of a part, with a maximum, a sum and O of its own; a warp has one, or two in turn. They are
               added up in the order of the streams, then the parts, one by one: by their CTA, or by the first of the
               cluster, which the others send theirs to, or by a second launch, from memory. So are those of several
               clusters. The order does not depend on where it is done: results repeat bitwise, in every batch.
   Fragments   lane 4 g + t. K is B: keys g and g + 8 of 16, chunks (of 8 columns) t + 4 c, of which words 0, 1 and 2, 3
               are steps of the sum. Q is A: row g with the words of the first step, in the place of row g + 8 those of
               the second. V is A of O^T: keys 2t, 2t + 1, 2t + 8, 2t + 9, chunks g + 8 c, words paired by key;
               tile n has columns n and n + D/16 of the lane's. P of row g is B as it comes out of S.
   Code        K and V are usually not in L2, and with them the code is pushed out of it: what runs once is short. All
               addresses are computed before the wait for the stream's previous kernel.

   Instances: fwd_kernels.def. Macros in: cmake/instance.cu.in. */
#include "core/device/describe.cuh"
#include "core/ptx/cluster.h"
#include "core/ptx/cluster_barrier.h"
#include "core/ptx/load_once.h"
#include "core/ptx/ldmatrix.h"
#include "core/ptx/mbarrier.h"
#include "core/ptx/shared.h"
#include "core/ptx/store_async.h"
#include "fwd/cuda/fwd_decode.h"

enum {
    D = K_D,
    BM = K_BM,
    BN = K_BN,
    STREAMS = 8, /* of keys: those of a warp */
    THREADS = 32 * K_WARPS,
    GROUPS = FATTNI_DECODE_GROUPS,
    SLOTS = FATTNI_DECODE_SLOTS,
    MOST = FATTNI_DECODE_MOST,
    CHUNKS = D / 32, /* that a lane has of a row of K or Q */
    PANELS = D / 64, /* chunks that it has of a row of V */
    TILES = D / 16,
    HALVES = BM / 8,
    AT_ONCE = 16384 / BM / D / (K_WARPS * K_CTAS),
    AHEAD = AT_ONCE > 1 ? AT_ONCE : 1, /* tiles of 16 keys of a warp whose loads are in flight */
    KEPT = FATTNI_DECODE_KEPT,
    ALIGNED = 16 /* the first key of a tile */
};

/* Results: m and l of their rows, and rows of O, [row][result][D]. As many rows as the call's tiles have: what shared
   memory leaves over is L1, through which all loads in flight pass. */
typedef struct shared_memory {
    uint4 q[HALVES][CHUNKS][32];                          /* A fragments, by lanes */
    float m_warps[KEPT][STREAMS], l_warps[KEPT][STREAMS]; /* of streams: rows of a part, or of all the CTA's */
    float m_slots[BM][MOST], l_slots[BM][MOST];           /* of parts, in the cluster's first CTA */
    uint64_t full, unused;                                /* mbarrier: these have arrived */
    float o[(STREAMS + MOST) * BM * D]; /* of streams; the CTA's sum and its statistics; of parts, in slots */
} shared_memory;
enum { SHARED_BYTES = sizeof(shared_memory) };
static_assert(BM % 8 == 0 && (int)HALVES * (int)CHUNKS <= (int)K_WARPS, "loads of Q");
static_assert((int)BN == 16 * (int)STREAMS && (int)BN == (int)FATTNI_DECODE_LEAST, "shape");
static_assert(offsetof(shared_memory, o) == FATTNI_DECODE_SHARED(D, BM, 0), "the host's");

#include "fwd/cuda/sm90/fwd_decode_parts.cuh"

/* Where the columns are that this thread adds up, among the rows of O: number f of FOURS. */
#define FOUR_OF(f) (4 * ((int)threadIdx.x + (f)*32 * z->warps))
/* Columns of row r of a warp's results are exchanged by XOR, so that lanes store to different banks. */
#define EXCHANGED(r) (((r)&2) << 1 | ((r)&4) << 2)

/* Tiles of rows with the same keys run side by side. Gives 0 where the tile has no rows. */
DEVICE int find_part(const fattni_fwd_decode_args *z, key_part *w) {
    const fattni_fwd_parts_args *const x = &z->x;
    int n = (int)blockIdx.x;
    const int cta = fattni_divide(&n, &x->parts);
    w->cta = cta, w->part = cta * z->each, w->first = z->ctas > x->cluster ? w->part & ~(SLOTS - 1) : 0;
    const int rows = find_tile(x, n, w);
    if (rows <= 0) return 0;
    w->keys = fattni_decode_keys_of_part(w->end - w->begin, (int)x->heads.by, rows, BM, D);
    return 1;
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

/* The result of one of `streams`, in rows row0.. of the results: m and l of row first + g, O^T of 8 rows. */
DEVICE void store_result(shared_memory *smem, int streams, int stream, int row0, int first, const float (*o)[4],
                         float m, float l, int rows) {
    const int lane = (int)threadIdx.x & 31, g = lane / 4, t = lane % 4;
    if (t == 0 && first + g < rows)
        smem->m_warps[row0 + first + g][stream] = m, smem->l_warps[row0 + first + g][stream] = l;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const int row = first + 2 * t + r;
        if (row >= rows) break;
        float *const columns = smem->o + ((row0 + row) * streams + stream) * D;
        const int column = 8 * g ^ EXCHANGED(row);
#pragma unroll
        for (int c = 0; c < D / 8; c += 4) {
            float x[4];
#pragma unroll
            for (int e = 0; e < 4; ++e) x[e] = o[(c + e) % TILES][(c + e) / TILES * 2 + r];
            *(float4 *)(columns + c / 8 * 64 + (column ^ c % 8)) = make_float4(x[0], x[1], x[2], x[3]);
        }
    }
}

/* The sum of warps' results. m, l: of the row; o: of the first result. */
DEVICE row_sum add_up(const float *m, const float *l, const float *o, int count, float unit) {
    row_sum x = {make_float4(0, 0, 0, 0), -INFINITY, 0.0f};
    float maxima[STREAMS];
#pragma unroll
    for (int n = 0; n < STREAMS; ++n) {
        maxima[n] = -INFINITY;
        if (n < count) maxima[n] = m[n];
        x.m = fmaxf(x.m, maxima[n]);
    }
#pragma unroll
    for (int n = 0; n < STREAMS; ++n) {
        if (n >= count) continue;
        const float weight = weight_at(maxima[n], x.m, unit);
        const float4 y = *(const float4 *)(o + n * D);
        x.l = fmaf(weight, l[n], x.l);
        x.o.x = fmaf(weight, y.x, x.o.x), x.o.y = fmaf(weight, y.y, x.o.y);
        x.o.z = fmaf(weight, y.z, x.o.z), x.o.w = fmaf(weight, y.w, x.o.w);
    }
    return x;
}
/* Adds a part to what this thread has added up in shared memory. */
DEVICE void add_to_sum(const float *so_far, const fattni_fwd_parts_args *x, int four, row_sum *sum, float unit) {
    const float2 statistics = *(const float2 *)(so_far + x->rows * D + four / 2);
    row_sum all = {*(const float4 *)(so_far + four), statistics.x, statistics.y};
    add_part(&all, sum, unit), *sum = all;
}

/* Whether results of clusters, or of CTAs that are in none, meet in memory. */
DEVICE int meet_in_memory(const fattni_fwd_decode_args *z, int parts) {
    return z->ctas > z->x.cluster && parts > (z->x.cluster > 1 ? (int)SLOTS : z->each);
}

/* The second launch of a call whose results meet in memory. Inline, its code would lie in the way of the others'. */
static __device__ __noinline__ void add_in_memory(const fattni_fwd_decode_args *z) {
    key_part w;
    const int some = find_part(z, &w), parts = some ? parts_of(&w) : 0;
    grid_dependency_wait();
    if (!some || !meet_in_memory(z, parts)) return;
    const int count = z->x.cluster > 1 ? (parts + SLOTS - 1) / SLOTS : parts;
    add_results(&z->x, &w, ONE_SUM, count, GROUPS, FOUR_OF(w.cta));
}

#define NEXT_TURN()                                                                                                    \
    do {                                                                                                               \
        if (++ahead < turns)                                                                                           \
            start += 16 * K_WARPS;                                                                                     \
        else                                                                                                           \
            ahead = 0, start = limit + 16 * warp, limit = min(limit + w.keys, end);                                    \
        next = start;                                                                                                  \
    } while (0)

extern "C" __global__ void __launch_bounds__(THREADS, K_CTAS)
    K_NAME(const __grid_constant__ fattni_fwd_decode_args args) {
    grid_dependents_start();
    extern __shared__ __align__(1024) unsigned char SHARED_MEMORY[];
    shared_memory *const smem = (shared_memory *)SHARED_MEMORY;
    const fattni_fwd_decode_args *const z = &args;
    const fattni_fwd_parts_args &x = args.x;
    const fattni_attention_args &a = x.a;
    const int warp = (int)threadIdx.x / 32, lane = (int)threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int mask = x.page_mask;
    const uint32_t shared = shared_address(SHARED_MEMORY), full = MEMBER_ADDRESS(shared, full);
    if (z->adds) {
        add_in_memory(z);
        return;
    }
    key_part w;
    if (!find_part(z, &w)) {
        grid_dependency_wait();
        return;
    }
    const int parts = parts_of(&w), to_memory = meet_in_memory(z, parts);
    const int together = x.cluster > 1 && parts > 1; /* the cluster's parts are sent to its first CTA */
    const int in_cluster = to_memory ? min(parts - w.first, (int)SLOTS) : parts;
    const int keeps = z->kept && parts > 1, own = keeps ? 0 : z->each; /* parts that are in no slot */
    const int sent = together ? max(in_cluster - own, 0) : 0;
    const int passes_on = together ? keeps || w.part != w.first : to_memory;
    if (together) {
        if (threadIdx.x == 0 && w.part == w.first && sent > 0) {
            mbarrier_init(full, 1);
            mbarrier_expect(full, sent * x.rows * (int)((D + 2) * sizeof(float)));
            mbarrier_init_fence();
        }
        cluster_arrive_started();
    }
    const int batch = x.page_table.p ? 0 : w.s.batch;
    const char *const k_head = (const char *)a.k.p + (batch * a.k.b + w.hk * a.k.h) * 2 + (int64_t)w.s.k0 * z->k_row;
    const char *const v_head = (const char *)a.v.p + (batch * a.v.b + w.hk * a.v.h) * 2 + (int64_t)w.s.k0 * z->v_row;
    const int begin = w.begin + w.part * w.keys, end = min(w.end, begin + z->each * w.keys), last = w.end - 1;
    const int chunk = warp % CHUNKS, half = warp / CHUNKS; /* of Q, which this warp loads */
    const half_type *const q_row = (const half_type *)a.q.p + place_of(&x, &w, &a.q, min(8 * half + g, w.rows - 1));
    const char *from_q = (const char *)q_row + 16 * (t + 4 * chunk), *from_k[2], *from_v[4];
    int row[HALVES];
#pragma unroll
    for (int h = 0; h < HALVES; ++h) row[h] = fattni_divided(w.r0 + 8 * h + g, &x.tile_heads);
    int j = begin + 16 * warp, end_of_part = min(begin + w.keys, end);
    uint32_t k[AHEAD][2][CHUNKS][4], v[AHEAD][4][PANELS][4];
    int page[AHEAD] = {0};
    find_k(from_k, k_head, z->k_row, j, last, mask), find_v(from_v, v_head, z->v_row, j, last, mask);
    if (z->prefetch && j < end) { /* rows of K by 16 lanes, of V by the others */
        const uint64_t key = (uint64_t)(uint32_t)min(j + lane % 16, last);
        const char *const first = lane < 16 ? k_head + key * z->k_row : v_head + key * z->v_row;
#pragma unroll
        for (int c = 0; c < 2 * D; c += 128) prefetch_line(first + c);
    }
    uint64_t all = (uint64_t)from_q;
#pragma unroll
    for (int n = 0; n < 6; ++n) all |= (uint64_t)(n < 2 ? from_k[n] : from_v[n - 2]);
    grid_dependency_wait_after(all);
    if (w.part > 0 && w.part >= parts) {
        if (together) cluster_wait_started();
        return;
    }
    /* Where the CTA's sum and slots begin in smem->o. */
    const int of_sum = x.rows * (z->kept ? z->each : 1) * (z->streams * D), of_slots = of_sum + x.rows * D * 3 / 2;
    uint32_t q[4];
    if (half < HALVES) load_once_4(q, from_q);
    if (j < end) {
        if (x.page_table.p) {
            const int64_t at = page_of(&x, w.b, j);
            find_k(from_k, k_head + at * a.k.b * 2, z->k_row, j, last, mask);
            find_v(from_v, v_head + at * a.v.b * 2, z->v_row, j, last, mask);
        }
        load_k(k[0], from_k), load_v(v[0], from_v);
    }
#pragma unroll
    for (int u = 1; u < AHEAD; ++u) {
        const int key = j + u * BN;
        if (key >= end_of_part) break;
        const int64_t at = page_of(&x, w.b, key);
        find_k(from_k, k_head + at * a.k.b * 2, z->k_row, key, last, mask), load_k(k[u], from_k);
        find_v(from_v, v_head + at * a.v.b * 2, z->v_row, key, last, mask), load_v(v[u], from_v);
    }
    /* The keys after those: of this turn, or the first of the next one, which are from `start` to `limit`. A turn is a
       stream's keys of a part. */
    const int turns = K_WARPS == STREAMS ? 1 : z->streams / K_WARPS;
    int next = j + AHEAD * BN, limit = end_of_part, start = j, ahead = 0, stays = next < limit;
    if (!stays) NEXT_TURN();
#pragma unroll
    for (int u = 0; u < AHEAD; ++u)
        if (next + u * BN < limit) page[u] = page_of(&x, w.b, next + u * BN);
    if (half < HALVES) smem->q[half][chunk][lane] = make_uint4(q[0], q[2], q[1], q[3]);
    const uint32_t q_lane = MEMBER_ADDRESS(shared, q) + 16 * lane;
    const float unit = a.scale * LOG2E;
    __syncthreads();

    int n = 0, added = 0, turn = 0; /* n: this part; added: parts whose streams' results are added up */
#pragma unroll 1
    for (;;) {
        float o[HALVES][TILES][4], m[HALVES], l[HALVES];
#pragma unroll
        for (int h = 0; h < HALVES; ++h) {
            m[h] = -INFINITY, l[h] = 0.0f;
#pragma unroll
            for (int c = 0; c < 4 * TILES; ++c) o[h][c / 4][c % 4] = 0.0f;
        }
        int goes_on = j < end_of_part;
#pragma unroll 1
        while (goes_on) {
#pragma unroll
            for (int u = 0; u < AHEAD; ++u) {
                const int now = j + u * BN, inside = u == 0 || now < end_of_part, then = next + u * BN,
                          more = then < limit;
                const int64_t at = page[u];
                float p[HALVES][4];
                if (inside)
#pragma unroll
                    for (int h = 0; h < HALVES; ++h) scores_of(p[h], k[u], q_lane + 512 * CHUNKS * h);
                if (more) find_k(from_k, k_head + at * a.k.b * 2, z->k_row, then, last, mask), load_k(k[u], from_k);
                if (inside) {
                    if (now < w.first_seen || now + 16 > w.end_seen)
#pragma unroll
                        for (int h = 0; h < HALVES; ++h)
                            hide(p[h], row[h] + w.s.lo - now, min(row[h] + w.s.hi, last) - now);
                    add_keys(o, m, l, p, v[u], unit);
                }
                if (more) find_v(from_v, v_head + at * a.v.b * 2, z->v_row, then, last, mask), load_v(v[u], from_v);
            }
            goes_on = stays, j = next, next = j + AHEAD * BN, stays = next < limit;
            if (!stays) NEXT_TURN();
#pragma unroll
            for (int u = 0; u < AHEAD; ++u)
                if (next + u * BN < limit) page[u] = page_of(&x, w.b, next + u * BN);
        }
        if (!z->kept && n > 0 && turn == 0) __syncthreads(); /* the last part's results have been read */
#pragma unroll
        for (int h = 0; h < HALVES; ++h)
            store_result(smem, z->streams, turn * K_WARPS + warp, (n - added) * x.rows, 8 * h, o[h], m[h],
                         quad_sum(l[h]), x.rows);
        if (turns > 1 && ++turn < turns) continue;
        turn = 0, end_of_part = min(end_of_part + w.keys, end);
        const int is_last = n + 1 == z->each || w.part + n + 1 == parts;
        if (z->kept && !is_last) {
            ++n;
            continue;
        }
        __syncthreads();
        if (together && added == 0) cluster_wait_started(); /* so that its first CTA has */
        if (is_last && !passes_on && !keeps) break;
#pragma unroll 1
        for (int four = FOUR_OF(0); four < (n + 1 - added) * x.rows * D; four += 128 * z->warps) {
            const int row = four / D, part = n == added ? 0 : row / x.rows, r = row - part * x.rows;
            const int number = w.part + added + part, slot = number - w.first - own,
                      at = of_slots + (r * z->slots + slot) * D + four % D;
            row_sum sum = add_up(smem->m_warps[row], smem->l_warps[row],
                                 smem->o + (RESULT_OF(four, z->streams) ^ EXCHANGED(r)), z->streams, unit);
            if (passes_on && together) {
                const uint32_t bar = cluster_address(full, 0);
                if (four % D == 0) {
                    store_async(cluster_address(shared_address(&smem->m_slots[r][slot]), 0), sum.m, bar);
                    store_async(cluster_address(shared_address(&smem->l_slots[r][slot]), 0), sum.l, bar);
                }
                store_async_4(cluster_address(ELEMENT_ADDRESS(shared, o, at), 0), sum.o, bar);
            } else if (passes_on) {
                store_to_memory(&x, &w, &sum, r, four % D, number, GROUPS);
            } else if (keeps) {
                if (four % D == 0) smem->m_slots[r][slot] = sum.m, smem->l_slots[r][slot] = sum.l;
                *(float4 *)(smem->o + at) = sum.o;
            } else {
                if (n > 0) add_to_sum(smem->o + of_sum, &x, four, &sum, unit);
                *(float4 *)(smem->o + of_sum + four) = sum.o;
                *(float2 *)(smem->o + of_sum + x.rows * D + four / 2) = make_float2(sum.m, sum.l);
            }
        }
        if (is_last) break;
        added = ++n;
    }
    if (passes_on && (!together || w.part != w.first)) return;
    if (!together && keeps) __syncthreads();
#pragma unroll 1
    for (int f = 0; f * 128 * z->warps < x.rows * D; ++f) {
        const int four = FOUR_OF(f), r = four / D;
        row_sum sum;
        if (four < x.rows * D) {
            if (!keeps) {
                sum = add_up(smem->m_warps[r], smem->l_warps[r], smem->o + (RESULT_OF(four, z->streams) ^ EXCHANGED(r)),
                             z->streams, unit);
                if (n > 0) add_to_sum(smem->o + of_sum, &x, four, &sum, unit);
            }
            if (sent > 0) mbarrier_wait(full, 0);
            if (keeps || sent > 0)
                add_parts(&sum, smem->m_slots[r], smem->l_slots[r], smem->o + of_slots + RESULT_OF(four, z->slots),
                          keeps, ONE_SUM, keeps ? in_cluster : sent, unit);
        }
        if (!to_memory)
            finish(&x, &w, &sum, four, unit);
        else if (four < x.rows * D)
            store_to_memory(&x, &w, &sum, r, four % D, w.part / SLOTS, GROUPS);
    }
}

DESCRIBE_KERNEL_THAT_WAITS(fattni_fwd_decode_args, SHARED_BYTES, 1);
