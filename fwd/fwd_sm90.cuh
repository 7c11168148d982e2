/* Forward attention for Hopper: TMA, wgmma, one producer warpgroup and two or three consumers.

   S = Q K^T, P = exp(scale S - m), O = P V / l, L = m + ln l, online over key blocks from right to
   left, so that the blocks that need a mask come first.

   Tensors     q, o [b,h,i,d], k, v [b,g,j,d], lse [b,h,i]; q, k, v with strides that tensor maps can
               take (fattni_sm90_fits), o and lse any.
   CTAs        one per SM, persistent. A tile is BM rows of one (b, h). Causal: longest tiles first,
               handed out by a counter; full: a fixed stride.
   Threads     warpgroup 0 loads (one thread of it); each other one owns 64 rows of the tile and all
               keys. Thread layout of S and O: ptx/wgmma.h.
   Shared      Q (two slots up to d 128), K and V (two stages each), barriers, tile numbers.
   Pipeline    one flat sequence of key blocks over all tiles. S(n) is issued before P V(n-1), also
               across tiles, and the softmax of block n runs under P V(n-1). Named barriers give the
               tensor cores to one warpgroup after the other (FlashAttention-3's ping-pong).
   Softmax     exponentials are taken against the maximum of the blocks so far, while the row's lanes still
               compare theirs; where it rose, P is multiplied by 2^(old - new) before it is rounded.
               So P of the row's maximum is exactly 1, as if the maximum had been known. Blocks that
               cross the diagonal, or rise by 2^64 and more, take the exact way at once.
   Rounding    P to the input dtype before P V, unscaled; everything else fp32.

   Instances: fwd_kernels.def. Macros in: K_NAME, K_BF16, K_D, K_MASK, K_BM, K_BN, K_WARPS. */
#include "sm90_tile.h"

enum {
    D = K_D, BM = K_BM, BN = K_BN, THREADS = 32 * K_WARPS, GROUPS = K_WARPS / 4 - 1,
    CAUSAL = K_MASK == 1, PANELS = (D + 63) / 64, Q_SLOTS = D > 128 ? 1 : 2,
    Q_BYTES = PANELS * BM * 128, KV_BYTES = PANELS * BN * 128,
    K_AT = Q_SLOTS * Q_BYTES, V_AT = K_AT + 2 * KV_BYTES, BARRIERS_AT = V_AT + 2 * KV_BYTES,
    TILES_AT = BARRIERS_AT + 128, SHARED_BYTES = BARRIERS_AT + 256
};
static_assert(BM == 64 * GROUPS && BN % 16 == 0 && D % 16 == 0, "tile shape");
static_assert(KV_BYTES % 1024 == 0 && SHARED_BYTES <= 227 * 1024, "shared memory");

#define LOG2E 1.4426950408889634f
#define LN2 0.6931471805599453f

/* Barriers; x counts tiles or key blocks. */
DEVICE uint32_t q_full(int slot) { return BARRIERS_AT + 8u * slot; }
DEVICE uint32_t q_empty(int slot) { return BARRIERS_AT + 16 + 8u * slot; }
DEVICE uint32_t k_full(uint32_t x) { return BARRIERS_AT + 32 + 8 * (x & 1); }
DEVICE uint32_t k_empty(uint32_t x) { return BARRIERS_AT + 48 + 8 * (x & 1); }
DEVICE uint32_t v_full(uint32_t x) { return BARRIERS_AT + 64 + 8 * (x & 1); }
DEVICE uint32_t v_empty(uint32_t x) { return BARRIERS_AT + 80 + 8 * (x & 1); }
DEVICE uint32_t stage_parity(uint32_t x) { return x >> 1 & 1; }
DEVICE uint32_t slot_parity(uint32_t tile) { return tile / Q_SLOTS & 1; }

typedef struct tile {
    int i0, h, b;
    int blocks; /* of keys; at least 1, so that all roles agree; 0 = no tile is left */
} tile;

/* The last key that row i sees is i + highest(a), if that is not beyond Sk. */
DEVICE int highest(const fattni_cuda_args *a) {
    return CAUSAL ? diagonal_of(a, a->Sq, a->Sk) : FATTNI_FAR;
}

DEVICE tile tile_of(const fattni_sm90_args *p, int number) {
    const position at = position_of(p, p->a.Hq, number, CAUSAL);
    const int block = CAUSAL ? p->blocks - 1 - at.block : at.block; /* the last rows see most keys */
    tile t = {block * BM, at.plane % p->a.Hq, at.plane / p->a.Hq, 0};
    const int end = CAUSAL ? min(p->a.Sk, t.i0 + BM + highest(&p->a)) : p->a.Sk;
    t.blocks = max(1, (end + BN - 1) / BN);
    return t;
}

/* ---- producer ---- */

DEVICE void load_k(const fattni_sm90_args *p, uint32_t shared, uint32_t x, const tile *t, int j) {
    mbarrier_wait(shared + k_empty(x), stage_parity(x) ^ 1);
    mbarrier_expect(shared + k_full(x), KV_BYTES);
    load_panels(shared + K_AT + (x & 1) * KV_BYTES, &p->k, shared + k_full(x), PANELS, BN, j * BN,
                t->h / p->a.group * p->k_step.head, t->b * p->k_step.batch);
}
DEVICE void load_v(const fattni_sm90_args *p, uint32_t shared, uint32_t x, const tile *t, int j) {
    mbarrier_wait(shared + v_empty(x), stage_parity(x) ^ 1);
    mbarrier_expect(shared + v_full(x), KV_BYTES);
    load_panels(shared + V_AT + (x & 1) * KV_BYTES, &p->v, shared + v_full(x), PANELS, BN, j * BN,
                t->h / p->a.group * p->v_step.head, t->b * p->v_step.batch);
}

/* Order of loads: K(0), K(1), V(0), K(2), V(1), ... over all tiles, as the consumers need them. */
DEVICE void produce(const fattni_sm90_args *p, uint32_t shared, volatile int4 *tiles) {
    int number = (int)blockIdx.x, last_j = 0;
    uint32_t x = 0; /* key blocks loaded */
    tile last = {0, 0, 0, 0};
    for (int n = 0;; ++n) {
        const int slot = n % Q_SLOTS;
        const int next = (int)gridDim.x + (CAUSAL ? atomicAdd(p->next_tile, 1) : number);
        if (Q_SLOTS == 1 && x > 0) load_v(p, shared, x - 1, &last, last_j);
        mbarrier_wait(shared + q_empty(slot), slot_parity(n) ^ 1);
        if (number >= p->tiles) {
            tiles[slot].w = 0;
            mbarrier_arrive(shared + q_full(slot));
            break;
        }
        const tile t = tile_of(p, number);
        tiles[slot].x = t.i0, tiles[slot].y = t.h, tiles[slot].z = t.b, tiles[slot].w = t.blocks;
        mbarrier_expect(shared + q_full(slot), Q_BYTES);
        load_panels(shared + slot * Q_BYTES, &p->q, shared + q_full(slot), PANELS, BM, t.i0,
                    t.h * p->q_step.head, t.b * p->q_step.batch);
        for (int j = t.blocks - 1; j >= 0; --j, ++x) {
            load_k(p, shared, x, &t, j);
            if (x > 0 && !(Q_SLOTS == 1 && j == t.blocks - 1)) load_v(p, shared, x - 1, &last, last_j);
            last = t;
            last_j = j;
        }
        number = next;
    }
    if (Q_SLOTS > 1 && x > 0) load_v(p, shared, x - 1, &last, last_j);
}

/* ---- consumers ---- */

/* The two rows of a thread: the maximum so far, in units of log2, rounded once, so that P and L refer to
   the same number; the sum of this thread's P. */
typedef struct rows {
    float top[2], l[2];
} rows;

/* S = Q K^T, 64 x BN. */
DEVICE void scores(float s[BN / 2], uint64_t q, uint64_t k) {
#pragma unroll
    for (int e = 0; e < D / 16; ++e)
        PASTE(wgmma_ss_n, K_BN)(s, q + along_columns(e, BM), k + along_columns(e, BN), e > 0);
}
/* O (+)= P V. */
DEVICE void accumulate(float o[D / 2], const uint32_t p[BN / 4], uint64_t v, int add) {
#pragma unroll
    for (int e = 0; e < BN / 16; ++e)
        PASTE(wgmma_rs_n, K_D)(o, p + 4 * e, v + along_rows(e), e > 0 ? 1 : add);
}

/* Scores beyond the limits become -inf; column 8i + e of the thread stays where it is <= limit[row]. */
DEVICE void mask(float s[BN / 2], int limit0, int limit1) {
#pragma unroll
    for (int i = 0; i < BN / 8; ++i)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            if (8 * i + e > limit0) s[4 * i + e] = -INFINITY;
            if (8 * i + e > limit1) s[4 * i + 2 + e] = -INFINITY;
        }
}

/* The largest of this thread's scores in each row. */
DEVICE void maxima(const float s[BN / 2], float top[2]) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        float x = s[2 * r], y = s[2 * r + 1];
#pragma unroll
        for (int i = 1; i < BN / 8; ++i) {
            x = fmaxf(x, s[4 * i + 2 * r]);
            y = fmaxf(y, s[4 * i + 2 * r + 1]);
        }
        top[r] = fmaxf(x, y);
    }
}
/* The same by integers, three at a time, in half the instructions: the bits of floats have their order as
   long as one of them is positive. A negative result is some score, no more. */
DEVICE void positive_maxima(const float s[BN / 2], float top[2]) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        int x = __float_as_int(s[2 * r]), y = __float_as_int(s[2 * r + 1]);
#pragma unroll
        for (int i = 1; i + 1 < BN / 8; i += 2) {
            x = __vimax3_s32(x, __float_as_int(s[4 * i + 2 * r]), __float_as_int(s[4 * i + 4 + 2 * r]));
            y = __vimax3_s32(y, __float_as_int(s[4 * i + 2 * r + 1]), __float_as_int(s[4 * i + 5 + 2 * r]));
        }
        if (BN / 8 % 2 == 0)
            x = __vimax3_s32(x, __float_as_int(s[BN / 2 - 4 + 2 * r]), __float_as_int(s[BN / 2 - 3 + 2 * r]));
        top[r] = __int_as_float(max(x, y));
    }
}
/* s = 2^(unit s - base), with the sums of both rows. */
DEVICE void exponentials(float s[BN / 2], float unit, const float base[2], float sum[2]) {
    float x[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
    for (int i = 0; i < BN / 2; ++i) {
        s[i] = exp2_approx(fmaf(s[i], unit, -base[i % 4 / 2]));
        x[i % 4] += s[i];
    }
    sum[0] = x[0] + x[1];
    sum[1] = x[2] + x[3];
}
/* n accumulators times the factor of their row. */
DEVICE void rescale(float *x, int n, const float alpha[2]) {
#pragma unroll
    for (int i = 0; i < n; ++i) x[i] *= alpha[i % 4 / 2];
}
/* The maximum over the quad and all blocks so far. */
DEVICE float highest_yet(float so_far, float lane, float unit) {
    return fmaxf(so_far, __fmul_rn(quad_max(lane), unit));
}

/* Scores to P the exact way; returns whether a maximum of the warp rose: O must be multiplied by alpha. */
DEVICE int softmax(float s[BN / 2], rows *r, float unit, float alpha[2]) {
    float top[2], base[2], sum[2];
    int rose = 0;
    maxima(s, top);
#pragma unroll
    for (int e = 0; e < 2; ++e) {
        top[e] = highest_yet(r->top[e], top[e], unit);
        rose |= top[e] != r->top[e];
        base[e] = top[e] == -INFINITY ? 0.0f : top[e];
        alpha[e] = exp2_approx(r->top[e] - base[e]);
        r->top[e] = top[e];
    }
    exponentials(s, unit, base, sum);
#pragma unroll
    for (int e = 0; e < 2; ++e) r->l[e] = r->l[e] * alpha[e] + sum[e];
    return __any_sync(ALL_LANES, rose);
}

/* The same, hiding the way of the maximum from lane to lane behind the exponentials. */
DEVICE int fast_softmax(float s[BN / 2], rows *r, float unit, float alpha[2]) {
    float top[2], sum[2];
    int unusual = 0, rose = 0;
    positive_maxima(s, top);
#pragma unroll
    for (int e = 0; e < 2; ++e) unusual |= !(top[e] * unit - r->top[e] < 64.0f) || top[e] < 0.0f;
    if (__any_sync(ALL_LANES, unusual)) return softmax(s, r, unit, alpha);
    exponentials(s, unit, r->top, sum);
#pragma unroll
    for (int e = 0; e < 2; ++e) {
        top[e] = highest_yet(r->top[e], top[e], unit);
        rose |= top[e] > r->top[e];
        r->l[e] += sum[e];
    }
    rose = __any_sync(ALL_LANES, rose);
    if (rose) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            alpha[e] = exp2_approx(r->top[e] - top[e]);
            r->l[e] *= alpha[e];
            r->top[e] = top[e];
        }
        rescale(s, BN / 2, alpha);
    }
    return rose;
}

DEVICE void round_p(uint32_t p[BN / 4], const float s[BN / 2]) {
#pragma unroll
    for (int i = 0; i < BN / 4; ++i) p[i] = pack(s[2 * i], s[2 * i + 1]);
}

/* This thread's two rows of the tile: O / l and L. A row without keys gives O = 0, L = -inf. */
DEVICE void store(const fattni_cuda_args *a, const tile *t, int row, float o[D / 2], const rows *r,
                  const float sum[2]) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
        const int i = row + 8 * e, inside = i < a->Sq;
        const float scale = sum[e] > 0 ? 1.0f / sum[e] : sum[e] == sum[e] ? 0.0f : sum[e];
        const int64_t at = t->b * a->o.b + t->h * a->o.h + (int64_t)i * a->o.row;
        if (threadIdx.x % 4 == 0 && inside)
            ((float *)a->lse.p)[t->b * a->lse.b + t->h * a->lse.h + (int64_t)i * a->lse.row] =
                sum[e] == 0.0f ? -INFINITY : r->top[e] * LN2 + logf(sum[e]);
        store_row((char *)a->o.p + at * (a->o_f32 ? 4 : 2), o + 2 * e, D / 8, scale, inside, a->Dv,
                  a->o_f32, 0);
    }
}

DEVICE void release(uint32_t bar) {
    if (threadIdx.x % 32 == 0) mbarrier_arrive(bar);
}

DEVICE void consume(const fattni_sm90_args *p, uint32_t shared, const volatile int4 *tiles, int group) {
    const fattni_cuda_args *const a = &p->a;
    const int warp = (int)threadIdx.x / 32 % 4, lane = (int)threadIdx.x % 32;
    const int row0 = group * 64 + warp * 16 + lane / 4, column0 = lane % 4 * 2;
    const int turn = 1 + group, next_turn = 1 + (group + 1) % GROUPS, hi = highest(a);
    const float unit = a->scale * LOG2E;
    float s[BN / 2], o[D / 2];
    uint32_t pr[BN / 4]; /* P, rounded */
    uint32_t x = 0;      /* key blocks whose S was issued before this one */
    if (group == GROUPS - 1) named_barrier_arrive(1, 256); /* the first turn is group 0's */

#define NEXT_TILE(t, slot) \
    tile t = {tiles[slot].x, tiles[slot].y, tiles[slot].z, __shfl_sync(ALL_LANES, tiles[slot].w, 0)}
    mbarrier_wait(shared + q_full(0), 0);
    NEXT_TILE(t, 0);
    if (t.blocks == 0) return;
    mbarrier_wait(shared + k_full(0), 0);
    wgmma_fence();
    scores(s, operand(shared + group * 8192, 0), operand(shared + K_AT, 0));
    wgmma_commit();
    wgmma_wait(0);
    PIN(s, BN / 2);
    release(shared + k_empty(0));

    for (int n = 0;; ++n) {
        const int slot = n % Q_SLOTS;
        const uint32_t q_tile = shared + slot * Q_BYTES;
        const int row = t.i0 + row0;
        int j = t.blocks - 1, add = 0;
        float alpha[2];
        rows r = {{-INFINITY, -INFINITY}, {0.0f, 0.0f}};
        if (j == 0) release(shared + q_empty(slot));
        if (CAUSAL || t.blocks * BN > a->Sk) {
            const int last = a->Sk - 1 - j * BN - column0, diagonal = row + hi - j * BN - column0;
            mask(s, min(last, diagonal), min(last, diagonal + 8));
        }
        softmax(s, &r, unit, alpha);
        round_p(pr, s);

        /* Blocks that cross the diagonal, then those that every row sees. */
        for (--j; j >= 0; --j) {
            const int masked = CAUSAL && j * BN + BN - 1 > t.i0 + group * 64 + hi;
            ++x;
            mbarrier_wait(shared + k_full(x), stage_parity(x));
            named_barrier_sync(turn, 256);
            wgmma_fence();
            scores(s, operand(q_tile + group * 8192, 0), operand(shared + K_AT + (x & 1) * KV_BYTES, 0));
            wgmma_commit();
            mbarrier_wait(shared + v_full(x - 1), stage_parity(x - 1));
            wgmma_fence();
            accumulate(o, pr, operand(shared + V_AT + ((x - 1) & 1) * KV_BYTES, BN * 128), add);
            wgmma_commit();
            named_barrier_arrive(next_turn, 256);
            add = 1;
            wgmma_wait(1);
            PIN(s, BN / 2);
            release(shared + k_empty(x));
            if (j == 0) release(shared + q_empty(slot));
            int rose;
            if (masked) {
                const int diagonal = row + hi - j * BN - column0;
                mask(s, diagonal, diagonal + 8);
                rose = softmax(s, &r, unit, alpha);
            } else {
                rose = fast_softmax(s, &r, unit, alpha);
            }
            wgmma_wait(0);
            PIN(o, D / 2);
            release(shared + v_empty(x - 1));
            round_p(pr, s);
            if (rose) rescale(o, D / 2, alpha);
        }

        /* The tile's last P V, and the next one's first S. */
        ++x;
        const int next_slot = (n + 1) % Q_SLOTS;
        const tile done = t;
        mbarrier_wait(shared + q_full(next_slot), slot_parity(n + 1));
        NEXT_TILE(next, next_slot);
        t = next;
        if (t.blocks) mbarrier_wait(shared + k_full(x), stage_parity(x));
        named_barrier_sync(turn, 256);
        wgmma_fence();
        /* Garbage, which nobody reads, after the last tile. */
        scores(s, operand(shared + next_slot * Q_BYTES + group * 8192, 0),
               operand(shared + K_AT + (x & 1) * KV_BYTES, 0));
        wgmma_commit();
        mbarrier_wait(shared + v_full(x - 1), stage_parity(x - 1));
        wgmma_fence();
        accumulate(o, pr, operand(shared + V_AT + ((x - 1) & 1) * KV_BYTES, BN * 128), add);
        wgmma_commit();
        named_barrier_arrive(next_turn, 256);
        const float sum[2] = {quad_sum(r.l[0]), quad_sum(r.l[1])};
        wgmma_wait(0);
        PIN(s, BN / 2);
        PIN(o, D / 2);
        if (t.blocks) release(shared + k_empty(x));
        release(shared + v_empty(x - 1));
        store(a, &done, done.i0 + row0, o, &r, sum);
        if (t.blocks == 0) return;
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    K_NAME(const __grid_constant__ fattni_sm90_args p) {
    extern __shared__ __align__(1024) unsigned char memory[];
    const uint32_t shared = shared_address(memory);
    volatile int4 *const tiles = (volatile int4 *)(memory + TILES_AT);
    const int role = __shfl_sync(ALL_LANES, (int)threadIdx.x / 128, 0);
    if (threadIdx.x == 0) {
        for (int n = 0; n < 2; ++n) {
            mbarrier_init(shared + q_full(n), 1);
            mbarrier_init(shared + k_full(n), 1);
            mbarrier_init(shared + v_full(n), 1);
            mbarrier_init(shared + q_empty(n), 4 * GROUPS);
            mbarrier_init(shared + k_empty(n), 4 * GROUPS);
            mbarrier_init(shared + v_empty(n), 4 * GROUPS);
        }
        mbarrier_init_fence();
    }
    __syncthreads();
    if (role == 0) {
        if (GROUPS == 3) registers_lower(32);
        else registers_lower(24);
        if (threadIdx.x == 0) produce(&p, shared, tiles);
    } else {
        if (GROUPS == 3) registers_raise(160);
        else registers_raise(240);
        consume(&p, shared, tiles, role - 1);
    }
}
