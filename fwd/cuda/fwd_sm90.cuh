/* Forward attention for Hopper: TMA, wgmma, one producer warpgroup and two or three consumers.

   S = Q K^T, P = exp(scale S - m), O = P V / l, L = m + ln l, online over key blocks from right to
   left, so that the blocks that need a mask come first.

   Tensors     q, o [b,h,i,d], k, v [b,g,j,d], lse [b,h,i]; q, k, v with strides that tensor maps can
               take (fattni_sm90_fits), o and lse any.
   CTAs        one per SM, persistent. A tile is BM rows of one (b, h). Causal and general: longest
               tiles first, handed out by a counter; full: a fixed stride.
   Threads     warpgroup 0 loads (one warp of it); each other one owns 64 rows of the tile and all
               keys. Thread layout of S and O: ptx/wgmma.h.
   Shared      Q and, up to d 128, Q of the next tile and O of the last one; K and V (two stages each), barriers,
               tile numbers. With one slot a consumer's rows of Q are loaded as soon as they are free, from L2, where
               they have been brought before.
   Pipeline    one loop over the key blocks of all tiles. S(n) is issued before P V(n-1), also across
               tiles, and the softmax of block n runs under P V(n-1): so a tile's O is stored after the next
               one's first softmax. Named barriers give the tensor cores to one warpgroup after the other
               (FlashAttention-3's ping-pong). O is rescaled beside S, or before it where products are all of the time.
   Softmax     a thread's two rows one after the other: the first one's exponentials hide the second one's maximum and
               run beside P V of the block before; d 64, where that is over, both at once. P is
               relative to a maximum that follows the true one only where that matters (FlashAttention-4's idea,
               with a bound on the error: slack_of): then O is multiplied by 2^(old - new maximum), while the next
               S runs. Blocks that cross an edge, and all until every maximum of the warp is positive, take the
               careful way: exact float maxima, rows without keys.
   Store       O by stmatrix to shared memory in the middle of the next tile's first softmax and from there by the TMA
               unit, a warp's 16 rows at a time; above d 128 half and half in short kernels, in others, whose shared
               memory is full, by 16 bytes of each thread from registers.
   Rounding    P to the input dtype before P V, unscaled; everything else fp32.
   Variants    full and causal know no other feature; banded has windows, lengths, sink and merge, general
               also softcap, ALiBi, bias and dropout, as uniform branches.
   ALiBi       S is accumulated upon it; beside a softcap or a bias it is added to S.
   Softcap     of small scores: a polynomial whose last product is the exponent's, too; else, and beside other
               terms, general_scores.

   Instances: fwd_kernels.def. Macros in: K_NAME, K_BF16, K_D, K_MASK, K_BM, K_BN, K_WARPS. */
#define HAS_BIAS (K_D <= 128)
#include "core/ptx/thread.h"
#include "core/device/sm90_tile.cuh"

enum {
    D = K_D, BM = K_BM, BN = K_BN, THREADS = 32 * K_WARPS, GROUPS = K_WARPS / 4 - 1,
    CAUSAL = K_MASK == 1, BANDS = K_MASK >= 2, GENERAL = K_MASK == 2, COUNTED = CAUSAL || BANDS,
    PANELS = (D + 63) / 64, Q_SLOTS = D > 128 ? 1 : 2,
    Q_BY_PANELS = Q_SLOTS == 1 && !GENERAL, /* which has no registers for it */
    ROWS_TOGETHER = D <= 64, /* in a softmax: P V of the block before is over by then */
    PRODUCTS_TOGETHER = D > 128, /* S and P V without a pause between: they fill the time of a block */
    Q_ROWS = FATTNI_FWD_SM90_Q_ROWS(D, BM), /* of a part */
    Q_BYTES = PANELS * BM * 128, KV_BYTES = PANELS * BN * 128,
    K_AT = Q_SLOTS * Q_BYTES, V_AT = K_AT + 2 * KV_BYTES, O_AT = V_AT + 2 * KV_BYTES,
    BY_TMA = D <= 128 || BN <= 64, /* O leaves through shared memory, which is full otherwise */
    O_PARTS = D > 128 ? 2 : 1, O_PANELS = PANELS / O_PARTS, /* which have room there, one after the other */
    O_BYTES = O_PANELS * 16 * 128, /* of a warp */
    BARRIERS_AT = O_AT + (BY_TMA ? BM / 16 * O_BYTES : 0),
    TILES_AT = BARRIERS_AT + 160,
    TILE_SLOTS = 4, /* a tile is stored after the next but one may have been announced */
    LSE_AT = TILES_AT + TILE_SLOTS * 32, SHIFTS_AT = LSE_AT + TILE_SLOTS * 8, SHARED_BYTES = SHIFTS_AT + 4 * BM
};
static_assert(BM == 64 * GROUPS && BN % 16 == 0 && D % 16 == 0, "tile shape");
static_assert(KV_BYTES % 1024 == 0 && O_BYTES % 1024 == 0, "swizzled tiles");
static_assert(SHARED_BYTES == FATTNI_FWD_SM90_SHARED(D, BM, BN) && SHARED_BYTES <= 227 * 1024,
              "shared memory");

#define LN2 0.6931471805599453f
/* A maximum, in units of log2, that PLAIN has come upon late and cannot take: floats there are 32 apart, and so far off
   might be the exponents of a row's P. O and L become NaN (NUMERICS.md). */
#define LATE 268435456.0f

#include "fwd/cuda/fwd_sm90_general.cuh"

/* Barriers; x counts key blocks. Those of Q are a slot's or, where there is one, a consumer's part's. */
DEVICE uint32_t q_full(int part) { return BARRIERS_AT + 8u * part; }
DEVICE uint32_t q_panel_full(int part, int panel) {
    return panel ? BARRIERS_AT + 80 + 16u * panel + 8u * part : q_full(part);
}
DEVICE uint32_t q_empty(int part) { return BARRIERS_AT + 16 + 8u * part; }
DEVICE uint32_t k_full(uint32_t x) { return BARRIERS_AT + 32 + 8 * (x & 1); }
DEVICE uint32_t k_empty(uint32_t x) { return BARRIERS_AT + 48 + 8 * (x & 1); }
DEVICE uint32_t v_full(uint32_t x) { return BARRIERS_AT + 64 + 8 * (x & 1); }
DEVICE uint32_t v_empty(uint32_t x) { return BARRIERS_AT + 80 + 8 * (x & 1); }
DEVICE uint32_t stage_parity(uint32_t x) { return x >> 1 & 1; }
DEVICE uint32_t slot_parity(uint32_t tile) { return tile / Q_SLOTS & 1; }
/* Which part of Q tile n's consumer has. */
DEVICE int part_of(int n, int group) { return Q_SLOTS > 1 ? n % Q_SLOTS : group; }

typedef struct tile {
    int i0, h, b;
    int first, blocks; /* of keys; at least one, so that all roles agree; 0 = no tile is left */
} tile;

/* Also the tile's sequence. blocks = 0: the rows lie beyond its end. */
DEVICE tile tile_of(const fattni_sm90_args *p, int number, sequence *s) {
    const position at = position_of(p, p->a.Hq, number, COUNTED);
    const int block = COUNTED ? p->blocks - 1 - at.block : at.block; /* the last rows see most keys */
    tile t = {block * BM, at.plane % p->a.Hq, at.plane / p->a.Hq, 0, 0};
    *s = BANDS ? sequence_of(&p->a, t.b) : whole_sequence(&p->a, t.b, CAUSAL);
    if (BANDS && t.i0 >= s->Sq) return t;
    const int end = COUNTED ? min(s->Sk, t.i0 + BM + s->hi) : s->Sk;
    if (BANDS) t.first = max(0, min(t.i0 + s->lo, end - 1)) / BN;
    t.blocks = max(1, (end + BN - 1) / BN - t.first);
    return t;
}

/* How the producer tells the others of a tile: two int4 for each of the last TILE_SLOTS. Its sequence is read
   again where it is needed: so it takes no registers in between. */
DEVICE volatile int4 *tile_slot(unsigned char *memory, int n) {
    return (volatile int4 *)(memory + TILES_AT) + n % TILE_SLOTS * 2;
}
/* What scores of a row of the tile are relative to (shift_row). */
DEVICE float *shift_of(unsigned char *memory, int row) { return (float *)(memory + SHIFTS_AT) + row; }
/* Where a tile's first L lies. */
DEVICE volatile int64_t *lse_slot(unsigned char *memory, int n) {
    return (volatile int64_t *)(memory + LSE_AT) + n % TILE_SLOTS;
}
DEVICE void write_tile(volatile int4 *to, const tile *t, const sequence *s) {
    to[0].x = t->i0, to[0].y = t->h, to[0].z = t->b, to[0].w = t->blocks;
    if (BANDS) to[1].x = t->first, to[1].y = s->Sq, to[1].z = s->Sk, to[1].w = s->q0;
}
DEVICE tile read_tile(const volatile int4 *from) {
    const tile t = {from[0].x, from[0].y, from[0].z, BANDS ? __shfl_sync(ALL_LANES, from[1].x, 0) : 0,
                    __shfl_sync(ALL_LANES, from[0].w, 0)};
    return t;
}
DEVICE sequence read_sequence(const fattni_cuda_args *a, const volatile int4 *from, int b) {
    sequence s = whole_sequence(a, b, CAUSAL);
    if (BANDS) {
        s.Sq = from[1].y, s.Sk = from[1].z, s.q0 = from[1].w;
        if (a->cu_seqlens_q.p) s.batch = 0;
        find_band(a, &s);
    }
    return s;
}

/* ---- producer ---- */

/* So that the compiler knows them to be the same in all lanes. */
DEVICE void take_leaders(tile *t, sequence *s) {
    t->h = of_leader(t->h), s->batch = of_leader(s->batch);
    if (BANDS) s->q0 = of_leader(s->q0), s->k0 = of_leader(s->k0), t->first = of_leader(t->first);
}

/* Where keys lie, and a block of them to one stage. */
typedef struct place {
    int row, k_head, k_batch, v_head, v_batch;
} place;

DEVICE void load_k(const fattni_sm90_args *p, uint32_t shared, uint32_t x, const place *at) {
    mbarrier_wait(shared + k_empty(x), stage_parity(x) ^ 1);
    if (!is_leader()) return;
    mbarrier_expect(shared + k_full(x), KV_BYTES);
    load_panels(shared + K_AT + (x & 1) * KV_BYTES, &p->k, shared + k_full(x), PANELS, BN, at->row,
                at->k_head, at->k_batch);
}
DEVICE void load_v(const fattni_sm90_args *p, uint32_t shared, uint32_t x, const place *at) {
    mbarrier_wait(shared + v_empty(x), stage_parity(x) ^ 1);
    if (!is_leader()) return;
    mbarrier_expect(shared + v_full(x), KV_BYTES);
    load_panels(shared + V_AT + (x & 1) * KV_BYTES, &p->v, shared + v_full(x), PANELS, BN, at->row,
                at->v_head, at->v_batch);
}

/* By lane 0. */
DEVICE void load_q(const fattni_sm90_args *p, uint32_t shared, int part, int row, int head, int batch) {
    const uint32_t to = shared + part * (Q_SLOTS > 1 ? Q_BYTES : 8192);
    for (int x = 0; x < PANELS; ++x) {
        const uint32_t full = shared + (Q_BY_PANELS ? q_panel_full(part, x) : q_full(part));
        if (Q_BY_PANELS || x == 0) mbarrier_expect(full, (Q_BY_PANELS ? 1 : PANELS) * Q_ROWS * 128);
        tma_load(to + x * BM * 128, &p->q, full, 64 * x, row, head, batch);
    }
}

/* Where Q has one slot there is only the time of a softmax between the last tile's last S and this one's first: so Q
   comes from L2 then. By lane 0. */
DEVICE void prefetch_q(const fattni_sm90_args *p, int row, int head, int batch) {
    for (int y = 0; y < BM; y += Q_ROWS)
        for (int x = 0; x < PANELS; ++x) tma_prefetch(&p->q, 64 * x, row + y, head, batch);
}

/* The number of the tile after `number`, in lane 0. */
DEVICE int next_number(const fattni_sm90_args *p, int number) {
    if (!COUNTED) return (int)gridDim.x + number;
    return is_leader() ? (int)gridDim.x + atomicAdd(p->next_tile, 1) : 0;
}

/* Order of loads: K(0), K(1), V(0), K(2), V(1), ... over all tiles, as the consumers need them, and Q before its
   tile's first K; with one slot, for which all consumers must be done with the last tile's, after it. */
DEVICE void produce(const fattni_sm90_args *p, uint32_t shared, unsigned char *memory) {
    int number = (int)blockIdx.x;
    uint32_t x = 0; /* key blocks loaded */
    place last = {0, 0, 0, 0, 0};
    for (int n = 0;; ++n) {
        if (Q_SLOTS > 1) mbarrier_wait(shared + q_empty(part_of(n, 0)), slot_parity(n) ^ 1);
        sequence s = whole_sequence(&p->a, 0, CAUSAL);
        tile t = {0, 0, 0, 0, 0};
        if (number < p->tiles) t = tile_of(p, number, &s);
        while (BANDS && t.blocks == 0 && number < p->tiles) { /* over tiles without rows */
            number = of_leader(next_number(p, number));
            if (number < p->tiles) t = tile_of(p, number, &s);
        }
        if (Q_SLOTS == 1) {
            if (t.blocks && is_leader()) prefetch_q(p, s.q0 + t.i0, t.h * p->q_step.head, s.batch * p->q_step.batch);
            __syncwarp();
            if (x > 0) load_v(p, shared, x - 1, &last);
            if (t.blocks) {
                take_leaders(&t, &s);
                const place first = {s.k0 + (t.first + t.blocks - 1) * BN, t.h / p->a.group * p->k_step.head,
                                     s.batch * p->k_step.batch, 0, 0};
                load_k(p, shared, x, &first);
            }
        }
        if (is_leader()) {
            write_tile(tile_slot(memory, n), &t, &s);
            *lse_slot(memory, n) = s.batch * p->a.lse.b + t.h * p->a.lse.h + (int64_t)(s.q0 + t.i0) * p->a.lse.row;
        }
        if (BANDS) __syncwarp(); /* else the compiler takes the lanes for divided from here on */
        take_leaders(&t, &s);
        for (int y = 0; y < BM; y += Q_ROWS) {
            const int part = part_of(n, y / Q_ROWS);
            if (Q_SLOTS == 1) mbarrier_wait(shared + q_empty(part), slot_parity(n) ^ 1);
            if (is_leader() && t.blocks)
                load_q(p, shared, part, s.q0 + t.i0 + y, t.h * p->q_step.head, s.batch * p->q_step.batch);
            else if (is_leader())
                mbarrier_arrive(shared + q_full(part));
        }
        if (t.blocks == 0) break;
        const int g = t.h / p->a.group, rightmost = t.first + t.blocks - 1;
        place at = {s.k0 + rightmost * BN, g * p->k_step.head, s.batch * p->k_step.batch,
                    g * p->v_step.head, s.batch * p->v_step.batch};
        int next = 0;
        for (int j = rightmost; j >= t.first; --j, ++x) {
            if (j == t.first) next = next_number(p, number); /* not before: the longest go first */
            const int ahead = Q_SLOTS == 1 && j == rightmost; /* what is loaded before Q */
            if (!ahead) load_k(p, shared, x, &at);
            if (x > 0 && !ahead) load_v(p, shared, x - 1, &last);
            last = at;
            at.row -= BN;
        }
        number = of_leader(next);
    }
    if (Q_SLOTS > 1 && x > 0) load_v(p, shared, x - 1, &last);
}

/* ---- consumers ---- */

/* For the end of a loop: mbarrier_arrive_if says why. */
DEVICE void release_if(uint32_t bar, int condition) {
    mbarrier_arrive_if(bar, condition && is_leader());
}

/* Of a consumer's thread; the other one is eight rows below. Only a tile's ends need it: thread_again. */
DEVICE int first_row(int thread, int group) { return group * 64 + thread % 128 / 32 * 16 + thread % 32 / 4; }

/* The two rows of a thread: what P is relative to, in units of log2, rounded once, so that P and L refer to the
   same number: the maximum of the blocks so far, or what that was when it last mattered; the sum of this
   thread's P; what O is to be multiplied by; how far above `top` a score may be before the maximum matters
   again, -inf where rows have shifts (shift_row): then always; whether one did. */
typedef struct rows {
    float top[2], l[2], alpha[2], slack;
    int rise;
} rows;

/* S (+)= Q K^T, 64 x BN. When Q has one slot, that of a tile's first S has only now been asked for: if it `comes`,
   its panels are used as they do. */
DEVICE void scores(float s[BN / 2], uint64_t q, uint64_t k, int add, uint32_t shared, int part, uint32_t parity,
                         int comes) {
#pragma unroll
    for (int e = 0; e < D / 16; ++e) {
        if (Q_BY_PANELS && e > 0 && e % 4 == 0) {
            if (comes) mbarrier_wait(shared + q_panel_full(part, e / 4), parity);
            wgmma_fence();
        }
        PASTE(wgmma_ss_n, K_BN)(s, q + along_columns(e, BM), k + along_columns(e, BN), e > 0 ? 1 : add);
    }
}
/* O (+)= P V. */
DEVICE void accumulate(float o[D / 2], const uint32_t p[BN / 4], uint64_t v, int add) {
#pragma unroll
    for (int e = 0; e < BN / 16; ++e)
        PASTE(wgmma_rs_n, K_D)(o, p + 4 * e, v + along_rows(e), e > 0 ? 1 : add);
}

/* Scores outside the limits become -inf: column 8i + e of the thread stays where low <= 8i + e <= high, in
   its first row, and in the one eight rows below with limits that are eight higher, but for `last`. */
DEVICE void mask(float s[BN / 2], int low, int high, int last) {
    const int high0 = min(high, last), high1 = min(high + 8, last);
#pragma unroll
    for (int i = 0; i < BN / 8; ++i)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            if (8 * i + e > high0 || (BANDS && 8 * i + e < low)) s[4 * i + e] = -INFINITY;
            if (8 * i + e > high1 || (BANDS && 8 * i + e < low + 8)) s[4 * i + 2 + e] = -INFINITY;
        }
}

/* The largest of this thread's scores in row e. */
DEVICE float maximum(const float s[BN / 2], int e) {
    float x[2] = {s[2 * e], s[2 * e + 1]};
#pragma unroll
    for (int n = 2; n < BN / 4; ++n) x[n % 2] = fmaxf(x[n % 2], s[n / 2 * 4 + 2 * e + n % 2]);
    return fmaxf(x[0], x[1]);
}
/* The same by integers, three at a time, in half the instructions: the bits of floats have their order as
   long as one of them is positive. A negative result is some score, no more. */
DEVICE float positive_maximum(const float s[BN / 2], int e) {
    int x[4];
#pragma unroll
    for (int n = 0; n < 4; ++n) x[n] = __float_as_int(s[n / 2 * 4 + 2 * e + n % 2]);
#pragma unroll
    for (int n = 4; n < BN / 4; n += 2)
        x[n / 2 % 4] = __vimax3_s32(x[n / 2 % 4], __float_as_int(s[n / 2 * 4 + 2 * e]),
                                    __float_as_int(s[n / 2 * 4 + 2 * e + 1]));
    return __int_as_float(max(x[3], __vimax3_s32(x[0], x[1], x[2])));
}
/* Of both rows. */
DEVICE float largest(const float s[BN / 2]) { return fmaxf(positive_maximum(s, 0), positive_maximum(s, 1)); }

/* PLAIN: maxima so far are at least the bases. CAREFUL: rows may have no keys. CAPPED: PLAIN with a cap. */
enum manner { PLAIN, CAREFUL, CAPPED };

/* The largest score of this thread, x, in units of log2. */
DEVICE float level(float x, const measure *m, int e, enum manner how) {
    if (how == CAPPED) return __fmul_rn(x, slope_at(x, m));
    return GENERAL ? fmaf(x, m->unit, m->base[e]) : __fmul_rn(x, m->unit);
}
/* P of row e becomes relative to the maximum, `high` the quad's, and O is to be multiplied by alpha. */
DEVICE void raise(rows *r, float high, int e, enum manner how) {
    const float top = fmaxf(r->top[e], high);
    r->alpha[e] = exp2_approx(r->top[e] - (how == CAREFUL && top == -INFINITY ? 0.0f : top));
    r->l[e] *= r->alpha[e];
    r->top[e] = top;
}
/* How far above the maximum that P is relative to a score may be. One whose P is more than DOMINANT of its thread's sum
   becomes the maximum: its rounding would be seen in O, and relative to itself it has none. Nor may P leave the
   range of F16. */
#define DOMINANT 0.25f
DEVICE float slack_of(const rows *r) {
    return fminf(fmaxf(log2_approx(DOMINANT * fminf(r->l[0], r->l[1])), 0.0f), 8.0f);
}

/* Row e of the scores becomes P. */
DEVICE void exponentials(float s[BN / 2], rows *r, const measure *m, int e, enum manner how) {
    const float zero = how == CAREFUL && r->top[e] == -INFINITY ? 0.0f : r->top[e];
    const float base = GENERAL ? m->base[e] - zero : -zero;
    float sum[2] = {0.0f, 0.0f};
#pragma unroll
    for (int n = 0; n < BN / 4; ++n) {
        float *const x = s + n / 2 * 4 + 2 * e + n % 2;
        *x = exp2_approx(fmaf(*x, how == CAPPED ? slope_at(*x, m) : m->unit, base));
        sum[n % 2] += *x;
    }
    r->l[e] += sum[0] + sum[1];
}
/* Whether a maximum of this warp is below its row's base: then PLAIN, which finds positive products' maxima
   only, may miss a higher one. */
DEVICE int any_below(const rows *r, const float base[2]) {
    return __any_sync(ALL_LANES, !(r->top[0] >= base[0] && r->top[1] >= base[1] && r->slack >= 0.0f));
}

DEVICE int has_shifts(const rows *r) { return r->slack == -INFINITY; }
/* Whether shift_row has to be called for rows of this warp, whose scores are as high. */
DEVICE int any_far(const rows *r, const float high[2]) {
    return __any_sync(ALL_LANES, has_shifts(r) || is_far(high[0]) || is_far(high[1]));
}
/* Scores that floats do not resolve (is_far) become small: those of row e less a shift, which is 0 for a row whose
   maximum is not far, and a new one where scores are far above the last, or the row's first. Shifts are products as they
   are, in shared memory; there for all rows of a warp or none. Gives the row's largest score afterwards. */
DEVICE float shift_row(float s[BN / 2], rows *r, const measure *m, unsigned char *memory, int e) {
    const int thread = thread_again(), row = (thread / 128 - 1) * 64 + first_row(thread, 0);
    float *const shift = shift_of(memory, row + 8 * e);
    const float raw = quad_max(maximum(s, e)), old = has_shifts(r) ? *shift : 0.0f, distance = (raw - old) * m->unit;
    float base = old;
    if (is_far(distance) && (distance > 0 || r->top[e] == -INFINITY)) base = is_far(raw * m->unit) ? raw : 0.0f;
    __syncwarp(); /* all of the row have read the old one */
    if (!has_shifts(r)) *shift_of(memory, row + 8 * (1 - e)) = 0.0f;
    *shift = base;
    __syncwarp();
    r->slack = -INFINITY;
    r->top[e] += (old - base) * m->unit;
#pragma unroll
    for (int n = 0; n < BN / 4; ++n) s[n / 2 * 4 + 2 * e + n % 2] -= base;
    return fmaf(raw - base, m->unit, GENERAL ? m->base[e] : 0.0f);
}

/* O at the new maxima. */
DEVICE void rescale(float o[D / 2], rows *r) {
    if (!r->rise) return;
    if (!has_shifts(r)) r->slack = slack_of(r);
#pragma unroll
    for (int i = 0; i < D / 2; ++i) o[i] *= r->alpha[i % 4 / 2];
}

/* O += weight times the row that is there, in F32; lane % 4 has columns 8c + 2t, 8c + 2t + 1. */
DEVICE void merge_row(float o[D / 2], const float *row, float weight, int width) {
#pragma unroll
    for (int c = 0; c < D / 8; ++c)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            const int d = 8 * c + 2 * ((int)threadIdx.x % 4) + e;
            if (d < width) o[4 * c + e] += weight * row[d];
        }
}

/* What the two rows of O of a quad are multiplied by when they are stored, in its lanes 0 and 1, and the O that is
   there, in its lanes 2 and 3: one register, since these wait for the next tile's first softmax. */
typedef float weights;
DEVICE weights weights_of(const float scale[2], const float keep_old[2]) {
    const int lane = (int)threadIdx.x % 4;
    const float own = lane == 0 ? scale[0] : scale[1];
    return BANDS && lane > 1 ? (lane == 2 ? keep_old[0] : keep_old[1]) : own;
}
DEVICE float scale_of(weights w, int e) { return __shfl_sync(ALL_LANES, w, e, 4); }
DEVICE float keep_old_of(weights w, int e) { return BANDS ? __shfl_sync(ALL_LANES, w, 2 + e, 4) : 0.0f; }
/* log2 x for x > 0, its fraction to 2^-21 whatever its exponent; NaN stays. */
DEVICE float log2_of(float x) {
    const int exponent = (__float_as_int(x) - 0x3f3504f3) & 0xff800000; /* x = 2^k times 0.7 to 1.4 */
    return fmaf(0.0f, x, (float)(exponent >> 23)) + log2_approx(__int_as_float(__float_as_int(x) - exponent));
}
/* L of a tile that has seen all its keys. A row without keys gives O = 0, L = -inf. Both rows at once, few
   instructions: the next tile's S is there before they are over. */
DEVICE weights finish_rows(const fattni_cuda_args *a, const volatile int4 *from, int64_t lse, int row0, const rows *r,
                           const measure *m, unsigned char *memory) {
    int Sq = a->Sq;
    if (BANDS) Sq = from[1].y; /* ?: would make the other one volatile, too, and read it from nowhere */
    const int i = from[0].x + row0;
    float *const to = (float *)a->lse.p + lse + row0 * a->lse.row;
    const float late = fmaxf(r->top[0], r->top[1]) > LATE ? NAN : 0.0f; /* both, for the instructions */
    const float sum[2] = {quad_sum(r->l[0]) + late, quad_sum(r->l[1]) + late};
    float scale[2], keep_old[2];
#pragma unroll
    for (int e = 0; e < 2; ++e) {
        const float inverse = reciprocal_approx(sum[e]), L = fmaf(r->top[e], LN2, LN2 * log2_of(sum[e]));
        row_result result = {sum[e] == 0.0f ? 0.0f : inverse, sum[e] == 0.0f ? -INFINITY : L, 0.0f, 0.0f};
        float *const there = to + 8 * e * a->lse.row;
        const int inside = i + 8 * e < Sq;
        if (has_shifts(r)) result.shift = *shift_of(memory, row0 + 8 * e) * (GENERAL && m->unit == LOG2E ? 1.0f : a->scale);
        if (BANDS) {
            result = general_row(a, result, r->top[e], sum[e], from[0].y, inside ? there : 0);
            __syncwarp(); /* all threads of the row have read the old L */
        }
        if (BANDS || has_shifts(r)) result.L += result.shift;
        scale[e] = result.scale, keep_old[e] = result.keep_old;
        if (threadIdx.x % 4 == 0 && inside) *there = result.L;
    }
    return weights_of(scale, keep_old);
}

/* And its O, in two steps with work in between: to this warp's part of shared memory, and from there, 16 rows that all
   are inside, by the TMA unit. Or in one step, by 16 bytes of each thread: where O has no room in shared memory,
   the rest of a warp's rows is another sequence's, or O is F32 or lies where tensor maps cannot. */
typedef struct leaving {
    const fattni_sm90_args *p;
    const volatile int4 *from;
    uint32_t shared;
    int row0, present;
    weights w;
} leaving;
DEVICE int by_tma(const leaving *x) {
    if (!BANDS) return BY_TMA;
    return BY_TMA && x->p->o_by_tma && x->from[0].x + x->row0 / 16 * 16 + 16 <= x->from[1].y;
}
DEVICE uint32_t o_of_warp(const leaving *x) { return x->shared + O_AT + x->row0 / 16 * O_BYTES; }

DEVICE void store_directly(const leaving *x, float o[D / 2]) {
    const fattni_cuda_args *const a = &x->p->a;
    const tile t = read_tile(x->from);
    const sequence s = read_sequence(a, x->from, t.b);
#pragma unroll
    for (int e = 0; e < 2; ++e) {
        const int i = t.i0 + x->row0 + 8 * e;
        const int64_t at = s.batch * a->o.b + t.h * a->o.h + (int64_t)(s.q0 + i) * a->o.row;
        const float keep_old = keep_old_of(x->w, e);
        float scale = scale_of(x->w, e);
        if (keep_old > 0) { /* then O is F32 */
#pragma unroll
            for (int c = 0; c < D / 2; ++c)
                if ((c & 2) == 2 * e) o[c] *= scale;
            merge_row(o + 2 * e, (const float *)a->o.p + at, keep_old, a->Dv);
            scale = 1.0f;
        }
        store_row((char *)a->o.p + at * (a->o_f32 ? 4 : 2), o + 2 * e, D / 8, scale, i < s.Sq, a->Dv, a->o_f32, 0);
    }
}
DEVICE void put_part(const leaving *x, const float o[D / 2 / O_PARTS]) {
    /* Plain d 64 has registers for what the swizzle makes of the lane, and is faster so. */
    const int lane = (D == 64 && !BANDS ? (int)threadIdx.x : thread_again()) % 32;
    const uint32_t mine = o_of_warp(x) + thread_again() % 16 * 128;
    const float scale[2] = {scale_of(x->w, 0), scale_of(x->w, 1)};
    if (is_leader()) bulk_wait_read(); /* of the part before */
    __syncwarp();
#pragma unroll
    for (int n = 0; n < D / 16 / O_PARTS; ++n) { /* 16 columns */
        uint32_t r[4];
#pragma unroll
        for (int i = 0; i < 4; ++i)
            r[i] = pack(o[8 * n + 2 * i] * scale[i % 2], o[8 * n + 2 * i + 1] * scale[i % 2]);
        stmatrix_x4(mine + n / 4 * 2048 + ((2 * (n % 4) + lane / 16) ^ (lane % 8)) * 16, r);
    }
}
DEVICE void send_part(const leaving *x, int part) {
    async_proxy_fence();
    __syncwarp();
    if (!is_leader()) return;
    const tile t = {x->from[0].x, x->from[0].y, x->from[0].z, 0, 0};
    const sequence s = read_sequence(&x->p->a, x->from, t.b);
    for (int n = 0; n < O_PANELS; ++n)
        tma_store(&x->p->o, o_of_warp(x) + n * 2048, 64 * (part * O_PANELS + n), s.q0 + t.i0 + x->row0 / 16 * 16,
                  t.h * x->p->o_step.head, s.batch * x->p->o_step.batch);
    bulk_commit();
}
DEVICE void begin_store(const leaving *x, const float o[D / 2]) {
    if (!x->present || !by_tma(x)) return;
    put_part(x, o);
    if (O_PARTS > 1) send_part(x, 0);
}
DEVICE void end_store(const leaving *x, float o[D / 2]) {
    if (!x->present) return;
    if (!by_tma(x)) {
        store_directly(x, o);
        return;
    }
    if (O_PARTS > 1) put_part(x, o + D / 4);
    send_part(x, O_PARTS - 1);
}

/* What the middle of a softmax waits for, the next K, and frees, the last V. */
typedef struct meanwhile {
    uint32_t k_full, k_parity, v_empty;
    int await_k, free_v, shifted;
    uint32_t zero; /* of the arguments: what the compiler does not know to be 0 */
} meanwhile;
/* A block's softmax: S becomes P, rounded. The first row's exponentials run beside P V of the block before
   and hide the second row's maximum; then O is there. Or O is there before, and the maxima of both rows are asked about
   at once. K is waited for here and not where it is needed because a branch keeps the compiler from moving the
   wait for O up.
   Rows with far scores get shifts, which must cost others nothing: ROWS_TOGETHER asks before the wait and begins again
   after it; the others leave with 0, O being there, are to be shifted and come again. */
DEVICE int softmax(uint32_t p[BN / 4], float s[BN / 2], float o[D / 2], rows *r, const measure *m,
                   enum manner how, meanwhile due, const dropout *dropping, const leaving *last_o,
                   unsigned char *memory) {
    const int k_came = mbarrier_test(due.k_full, due.k_parity);
    const float high[2] = {level(how == CAREFUL ? maximum(s, 0) : positive_maximum(s, 0), m, 0, how),
                           level(how == CAREFUL ? maximum(s, 1) : positive_maximum(s, 1), m, 1, how)};
    r->alpha[0] = 1.0f;
    if (ROWS_TOGETHER) r->alpha[1] = 1.0f;
    const int above = high[0] > r->top[0] + r->slack || (ROWS_TOGETHER && high[1] > r->top[1] + r->slack);
    r->rise = how == CAREFUL || __any_sync(ALL_LANES, above);
    const rows before = *r;
    if (r->rise) {
        raise(r, quad_max(high[0]), 0, how);
        if (ROWS_TOGETHER) raise(r, quad_max(high[1]), 1, how);
    }
    const int far = how == CAREFUL && !dropping && !due.shifted && any_far(r, high);
    if (!ROWS_TOGETHER && far) {
        wgmma_wait(0);
        PIN(o, D / 2);
        *r = before;
        return 0;
    }
    if (!ROWS_TOGETHER) exponentials(s, r, m, 0, how);
    if (due.await_k && !k_came) mbarrier_wait(due.k_full, due.k_parity);
    wgmma_wait(0);
    PIN(o, D / 2);
    if (due.free_v) release(due.v_empty);
    if (ROWS_TOGETHER && far) {
        *r = before;
#pragma unroll
        for (int e = 0; e < 2; ++e) raise(r, shift_row(s, r, m, memory, e), e, how);
    }
    if (ROWS_TOGETHER) {
        /* Maxima that seem to hang on O: the exponentials do not begin before the wait, where ptxas would have them. */
        if (how == PLAIN)
#pragma unroll
            for (int e = 0; e < 2; ++e)
                r->top[e] = __int_as_float(__float_as_int(r->top[e]) | (__float_as_int(o[0]) & (int)due.zero));
        exponentials(s, r, m, 0, how);
    }
    if (how == CAREFUL) begin_store(last_o, o);
    if (!ROWS_TOGETHER) {
        const float all = quad_max(high[1]);
        const int rises = how == CAREFUL || __any_sync(ALL_LANES, all > r->top[1] + r->slack);
        raise(r, rises ? all : -INFINITY, 1, how);
        r->rise |= rises;
    }
    exponentials(s, r, m, 1, how);
#pragma unroll
    for (int i = 0; i < BN / 4; ++i) p[i] = pack(s[2 * i], s[2 * i + 1]);
    if (dropping) drop(p, *dropping); /* here, among the exponentials */
    if (how == CAREFUL) end_store(last_o, o);
    return 1;
}
/* The buffer may hold anything beyond a sequence's last key, and 0 times NaN is NaN: zeros into the rest of V's
   block x, the tile's rightmost and perhaps the sequence's last; by every group for itself. */
DEVICE void clear_tail(const fattni_cuda_args *a, const volatile int4 *from, uint32_t shared, uint32_t x,
                       int group) {
    const tile t = read_tile(from);
    const int valid = read_sequence(a, from, t.b).Sk - (t.first + t.blocks - 1) * BN;
    if (valid >= BN || !(a->cu_seqlens_k.p || a->seqlens_k.p)) return;
    clear_rows(shared + V_AT + (x & 1) * KV_BYTES, PANELS, BN, max(valid, 0), (int)threadIdx.x % 128, 128);
    named_barrier_sync(4 + group, 128);
}

/* The blocks of keys [begin, end) that all rows of a consumer see whole. */
typedef struct span {
    int begin, end;
} span;
DEVICE span plain_blocks(const fattni_cuda_args *a, const volatile int4 *from, const tile *t, int group) {
    const sequence s = read_sequence(a, from, t->b);
    const int row = t->i0 + group * 64;
    span x = {0, s.Sk / BN};
    if (COUNTED) x.end = min(x.end, max(0, row + s.hi + 1) / BN);
    if (BANDS) x.begin = (max(0, row + 63 + s.lo) + BN - 1) / BN;
    return x;
}

DEVICE ramp tile_ramp(const fattni_cuda_args *a, const volatile int4 *from, const tile *t, int group) {
    const ramp none = {0.0f, 0};
    return GENERAL ? ramp_of(a, t->h, read_sequence(a, from, t->b).diagonal, t->i0 + group * 64) : none;
}

DEVICE void consume(const fattni_sm90_args *p, uint32_t shared, unsigned char *memory, int group) {
    const fattni_cuda_args *const a = &p->a;
    const int warp = (int)threadIdx.x / 32 % 4, lane = (int)threadIdx.x % 32;
    const int mine = warp * 16 + lane / 4 - lane % 4 * 2;
    const int turn = 1 + group, next_turn = 1 + (group + 1) % GROUPS;
    const int terms = GENERAL && (a->softcap > 0 || a->bias.p || is_steep(a)), alibi = GENERAL && a->alibi.p && !terms;
    const int fast = !GENERAL || !(a->bias.p || a->drop_T || (a->alibi.p && terms) || a->softcap > FATTNI_LARGE_CAP),
              capped = fast && terms;
    const float inner = capped ? __fdividef(a->scale, a->softcap) : 0.0f;
    measure line = {terms ? LOG2E : p->scale_log2, {0.0f, 0.0f}, 0.0f, 0.0f};
    const uint64_t q_rows = operand(shared + group * 8192, 0), k_keys = operand(shared + K_AT, 0),
                   v_keys = operand(shared + V_AT, BN * 128);
    float s[BN / 2], o[D / 2];
    uint32_t pr[BN / 4]; /* P, rounded */
    uint32_t x = 0;      /* key blocks whose S was issued before this one */
    if (group == GROUPS - 1) named_barrier_arrive(1, 256); /* the first turn is group 0's */
#pragma unroll
    for (int i = 0; i < D / 2; ++i) o[i] = 0.0f;

    mbarrier_wait(shared + q_full(part_of(0, group)), 0);
    tile t = read_tile(tile_slot(memory, 0));
    if (t.blocks == 0) return;
    ramp slant = tile_ramp(a, tile_slot(memory, 0), &t, group);
    if (alibi) begin_scores(s, slant.slope, slant.corner - (t.first + t.blocks - 1) * BN, mine);
    mbarrier_wait(shared + k_full(0), 0);
    wgmma_fence();
    scores(s, q_rows, k_keys, alibi, shared, part_of(0, group), 0, 1);
    wgmma_commit();
    wgmma_wait(0);
    PIN(s, BN / 2);
    release(shared + k_empty(0));

    release_if(shared + q_empty(part_of(0, group)), t.blocks == 1);

    /* One loop over the blocks of all tiles. S of block j is there; P V of the one before it, of this tile or of
       the last, is under way. */
    const rows none = {{-INFINITY, -INFINITY}, {0.0f, 0.0f}, {0.0f, 0.0f}, 0.0f, 0};
    rows r = none;
    weights done = 0.0f;
    span plain = plain_blocks(a, tile_slot(memory, 0), &t, group);
    int plain_end = 0; /* while a maximum of this warp is below its base, no block is plain */
    int n = 0, j = t.first + t.blocks - 1, shifted = 0; /* whether this block's S is */
    for (;;) {
        const int first = j == t.first + t.blocks - 1, last = j == t.first;
        const meanwhile due = {shared + k_full(x + 1), stage_parity(x + 1), shared + v_empty(x - 1), !last, x > 0, shifted, p->zero};
        if (alibi) {
            find_base(&line, slant.slope, slant.corner - j * BN, mine);
            plain_end = any_below(&r, line.base) ? 0 : plain.end;
        }
        const int clear = fast && j < plain_end && (!BANDS || j >= plain.begin);
        if (clear && !capped) {
            softmax(pr, s, o, &r, &line, PLAIN, due, 0, 0, memory);
        } else if (clear && !shifted && all_within(s, largest(s), inner, CAP_LIMIT)) {
            const measure curve = capped_measure(a, inner);
            softmax(pr, s, o, &r, &curve, CAPPED, due, 0, 0, memory);
        } else {
            const tile its = read_tile(tile_slot(memory, n)); /* again: not kept in registers */
            const int thread = thread_again(), row0 = first_row(thread, group);
            const leaving last_o = {p, tile_slot(memory, n - 1), shared, row0, first && n > 0, done};
            const int column = j * BN + thread % 4 * 2, row = its.i0 + row0;

            if (terms && !shifted) {
                const sequence now = read_sequence(a, tile_slot(memory, n), its.b);
                general_scores((float(*)[4])s, 0, BN / 8, 0, a, &now, slope_of(a, its.h), its.b, its.h, row, column);
            }
            if (j >= plain.end || (BANDS && j < plain.begin)) {
                const sequence now = read_sequence(a, tile_slot(memory, n), its.b);
                mask(s, row + now.lo - column, row + now.hi - column, now.Sk - 1 - column);
            }
            if (GENERAL && a->drop_T) {
                const dropout dropping = dropout_of(a, its.b, its.h, row, column);
                const float high[2] = {level(maximum(s, 0), &line, 0, CAREFUL), level(maximum(s, 1), &line, 1, CAREFUL)};
                if (any_far(&r, high)) /* not beside random numbers: there are no registers */
                    shift_row(s, &r, &line, memory, 0), shift_row(s, &r, &line, memory, 1);
                softmax(pr, s, o, &r, &line, CAREFUL, due, &dropping, &last_o, memory);
            } else if (!softmax(pr, s, o, &r, &line, CAREFUL, due, 0, &last_o, memory)) {
                shift_row(s, &r, &line, memory, 0), shift_row(s, &r, &line, memory, 1);
                shifted = 1;
                continue;
            }
            shifted = 0;
            plain_end = any_below(&r, line.base) ? 0 : plain.end;
        }

        ++x;
        const int slot = (n + last) % Q_SLOTS, part = part_of(n + last, group);
        --j;
        if (last) { /* and the next tile's first S */
            mbarrier_wait(shared + q_full(part), slot_parity(n + 1));
            t = read_tile(tile_slot(memory, n + 1));
            slant = tile_ramp(a, tile_slot(memory, n + 1), &t, group);
            if (t.blocks) mbarrier_wait(shared + k_full(x), stage_parity(x));
            j = t.first + t.blocks - 1;
        }
        if (alibi) begin_scores(s, slant.slope, slant.corner - j * BN, mine);
        if (PRODUCTS_TOGETHER) {
            mbarrier_wait(shared + v_full(x - 1), stage_parity(x - 1));
            if (!first) rescale(o, &r);
        }
        named_barrier_sync(turn, 256);
        wgmma_fence();
        /* Garbage, which nobody reads, after the last tile. */
        scores(s, q_rows + slot * (Q_BYTES >> 4), k_keys + (x & 1) * (KV_BYTES >> 4), alibi, shared,
               part, slot_parity(n + 1), last && t.blocks);
        wgmma_commit();
        if (!PRODUCTS_TOGETHER) {
            mbarrier_wait(shared + v_full(x - 1), stage_parity(x - 1));
            if (!first) rescale(o, &r); /* beside S */
        }
        if (BANDS && first) clear_tail(a, tile_slot(memory, n), shared, x - 1, group);
        wgmma_fence();
        accumulate(o, pr, v_keys + ((x - 1) & 1) * (KV_BYTES >> 4), !first);
        wgmma_commit();
        named_barrier_arrive(next_turn, 256);
        if (last) {
            done = finish_rows(a, tile_slot(memory, n), *lse_slot(memory, n), first_row(thread_again(), group), &r,
                               &line, memory);
            ++n;
            r = none;
            plain = plain_blocks(a, tile_slot(memory, n), &t, group);
            plain_end = 0;
        }
        wgmma_wait(1);
        PIN(s, BN / 2);
        if (t.blocks == 0) break;
        release(shared + k_empty(x));
        release_if(shared + q_empty(part), j == t.first);
    }
    wgmma_wait(0);
    PIN(o, D / 2);
    const leaving last_o = {p, tile_slot(memory, n - 1), shared, first_row(thread_again(), group), 1, done};
    begin_store(&last_o, o);
    end_store(&last_o, o);
    if (BY_TMA && is_leader()) bulk_wait_read(); /* shared memory ends with the CTA */
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    K_NAME(const __grid_constant__ fattni_sm90_args p) {
    extern __shared__ __align__(1024) unsigned char memory[];
    const uint32_t shared = shared_address(memory);
    const int role = __shfl_sync(ALL_LANES, (int)threadIdx.x / 128, 0);
    if (threadIdx.x == 0) {
        for (int n = 1; n < PANELS && Q_BY_PANELS; ++n)
            for (int part = 0; part < 2; ++part) mbarrier_init(shared + q_panel_full(part, n), 1);
        for (int n = 0; n < 2; ++n) {
            mbarrier_init(shared + q_full(n), 1);
            mbarrier_init(shared + k_full(n), 1);
            mbarrier_init(shared + v_full(n), 1);
            mbarrier_init(shared + q_empty(n), Q_SLOTS > 1 ? 4 * GROUPS : 4);
            mbarrier_init(shared + k_empty(n), 4 * GROUPS);
            mbarrier_init(shared + v_empty(n), 4 * GROUPS);
        }
        mbarrier_init_fence();
    }
    __syncthreads();
    /* All registers of the CTA, 512 or 504 per thread of four or three warpgroups. */
    if (role == 0) {
        if (GROUPS == 3) registers_lower(32);
        else if (BANDS) registers_lower(40);
        else registers_lower(24);
        if (threadIdx.x < 32) produce(&p, shared, memory);
    } else {
        if (GROUPS == 3) registers_raise(160);
        else if (BANDS) registers_raise(232);
        else registers_raise(240);
        consume(&p, shared, memory, role - 1);
    }
}
