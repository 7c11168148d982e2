/* Forward attention with mma.sync, sm_80 and later: one CTA per row block, FlashAttention-2's order.

   S = Q K^T, P = exp(scale S - m), O = P V / l, L = m + ln l, with an online softmax over key blocks from right to
   left, so that the blocks that need a mask come first.

   Tensors     q, o [b,h,i,d], k, v [b,g,j,d], lse [b,h,i]; any strides, d contiguous.
   Threads     WARPS warps; each owns ROW_TILES times 16 rows of the block and all keys. A thread holds
               rows g, g+8 and columns 2t, 2t+1 of each 16x8 tile (g = lane/4, t = lane%4).
   Shared      struct shared_memory: Q, K, V, swizzled (core/device/mma16_tile.cuh). O is stored through Q's tile. With
               K_LEAN (fwd_mma16_lean.cuh) Q's fragments stay in registers, and K and V take its place.
   Loads       cp.async: the load of V(n) overlaps Q K^T, that of K(n-1) softmax and P V. On sm_75, which has none,
               registers take its place, where there are enough (HOLDS).
   Rounding    P to the input dtype before P V, unscaled; everything else fp32.
   Variants    general has window, softcap, ALiBi, bias, sink, dropout, lengths and merge as uniform branches, and
               parts of keys (TAKES_PARTS, fwd_split.h); full and causal have none of them.

   Instances: fwd_kernels.def. Macros in: cmake/instance.cu.in. */
#ifndef K_LEAN
#define K_LEAN 0
#endif
/* Where registers are short: of lean kernels not on sm_80 to sm_90. */
#if (K_D == 128 && K_BN > 32) || K_VARIANT == FATTNI_VARIANT_GENERAL ||                                                \
    (K_LEAN && defined __CUDA_ARCH__ && (__CUDA_ARCH__ < 800 || __CUDA_ARCH__ >= 1200))
#define XOR_COLUMNS 256
#endif
#include "core/device/describe.cuh"
#include "fwd/cuda/fwd_row_block.cuh"
#include "fwd/cuda/fwd_softmax.cuh"
#include "core/device/mma16_tile.cuh"

/* Parts of keys take registers: the others would spill more. */
#define TAKES_PARTS (K_VARIANT == FATTNI_VARIANT_GENERAL && (K_D <= 128 || K_WARPS == 8))
#if TAKES_PARTS
#define SPLIT_OF(args) ((args).results ? &(args) : 0)
typedef fattni_fwd_split_args kernel_args;
#else
#define SPLIT_OF(args) ((const fattni_fwd_split_args *)0)
typedef fattni_attention_args kernel_args;
#endif
enum {
    LEAN = K_LEAN,
    D = K_D,
    PITCH = (D + 63) / 64 * 64,
    BM = K_BM,
    BN = K_BN,
    WARPS = K_WARPS,
    THREADS = 32 * WARPS,
    ROW_TILES = BM / (16 * WARPS),
    KEY_TILES = BN / 8,
    COLUMN_TILES = D / 8,
    GENERAL = K_VARIANT == FATTNI_VARIANT_GENERAL,
    HOLDS = !FATTNI_SM80 && !GENERAL && D <= 128,
    HELD = BN * PITCH / 8 / THREADS /* chunks of K or V of a thread */
};

/* Tiles of 16-bit elements. */
typedef struct shared_memory {
    uint16_t q[LEAN ? 0 : BM][PITCH], k[BN][PITCH], v[BN][PITCH];
} shared_memory;
enum { SHARED_BYTES = sizeof(shared_memory) };
static_assert(BM % (16 * WARPS) == 0 && ROW_TILES <= 2 && BN % 16 == 0 && D % 16 == 0, "tile shape");
static_assert(BM * PITCH / 8 % THREADS == 0 && BN * PITCH / 8 % THREADS == 0, "each thread loads as much");
static_assert(!LEAN || (ROW_TILES == 1 && BM <= 2 * BN), "Q and O pass through the tiles of K and V");
static_assert(offsetof(shared_memory, k) % 512 == 0 && offsetof(shared_memory, v) % 512 == 0,
              "swizzled tiles start at multiples of 512");
static_assert(SHARED_BYTES <= 227 * 1024, "shared memory");

/* O += P V: accumulators of S are laid out as the A fragment is. B fragments are loaded one product ahead. */
DEVICE void accumulate(float o[ROW_TILES][COLUMN_TILES][4], const float p[ROW_TILES][KEY_TILES][4], uint32_t v_lane) {
    uint32_t b[2][4];
    load_b_trans(b[0], v_lane, PITCH, 0, 0);
#pragma unroll
    for (int step = 0; step < BN / 16; ++step) {
        uint32_t a[ROW_TILES][4];
#pragma unroll
        for (int r = 0; r < ROW_TILES; ++r) {
            a[r][0] = pack(p[r][2 * step][0], p[r][2 * step][1]);
            a[r][1] = pack(p[r][2 * step][2], p[r][2 * step][3]);
            a[r][2] = pack(p[r][2 * step + 1][0], p[r][2 * step + 1][1]);
            a[r][3] = pack(p[r][2 * step + 1][2], p[r][2 * step + 1][3]);
        }
#pragma unroll
        for (int c = 0; c < COLUMN_TILES / 2; ++c) {
            const int at = step * (COLUMN_TILES / 2) + c, next = at + 1;
            if (next < BN / 16 * (COLUMN_TILES / 2))
                load_b_trans(b[next & 1], v_lane, PITCH, 16 * (next / (COLUMN_TILES / 2)),
                             16 * (next % (COLUMN_TILES / 2)));
#pragma unroll
            for (int r = 0; r < ROW_TILES; ++r) {
                mma(o[r][2 * c], a[r], b[at & 1][0], b[at & 1][1]);
                mma(o[r][2 * c + 1], a[r], b[at & 1][2], b[at & 1][3]);
            }
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, K_CTAS) K_NAME(const __grid_constant__ kernel_args args) {
    extern __shared__ __align__(1024) unsigned char SHARED_MEMORY[];
#if TAKES_PARTS
    const fattni_attention_args &a = args.a;
#else
    const fattni_attention_args &a = args;
#endif
    const uint32_t shared = shared_address(SHARED_MEMORY), q_tile = MEMBER_ADDRESS(shared, q),
                   k_tile = MEMBER_ADDRESS(shared, k), v_tile = MEMBER_ADDRESS(shared, v);
    const int warp = (int)threadIdx.x / 32, lane = (int)threadIdx.x % 32;
    const int g = lane / 4, t = lane % 4, row0 = warp * 16 * ROW_TILES;
    const uint32_t q_lane = lane_16(q_tile + row0 * PITCH * 2, PITCH), k_lane = lane_8(k_tile, PITCH),
                   v_lane = lane_16(v_tile, PITCH);

    row_block work;
    if (!find_row_block(&a, SPLIT_OF(args), BM, BN, &work)) return;
    const int b = work.b, h = work.h, i0 = work.i0, rows = work.rows, begin = work.begin, end = work.end;
    const sequence s = work.s;

    const half_type *const q = (const half_type *)a.q.p + s.batch * a.q.b + h * a.q.h + (int64_t)(s.q0 + i0) * a.q.row;
    const half_type *const k =
        (const half_type *)a.k.p + s.batch * a.k.b + h / a.group * a.k.h + (int64_t)s.k0 * a.k.row;
    const half_type *const v =
        (const half_type *)a.v.p + s.batch * a.v.b + h / a.group * a.v.h + (int64_t)s.k0 * a.v.row;

    float o[ROW_TILES][COLUMN_TILES][4];
    float m[ROW_TILES][2], l[ROW_TILES][2]; /* running maximum of the scores before `unit`; sum of this thread's P */
#pragma unroll
    for (int r = 0; r < ROW_TILES; ++r) {
#pragma unroll
        for (int c = 0; c < COLUMN_TILES; ++c)
#pragma unroll
            for (int e = 0; e < 4; ++e) o[r][c][e] = 0.0f;
        m[r][0] = m[r][1] = -INFINITY;
        l[r][0] = l[r][1] = 0.0f;
    }
    /* From scores to units of log2: the general variant scales them in general_scores, the others in the exponent. */
    const float unit = GENERAL ? LOG2E : a.scale * LOG2E;

    const int first = begin / BN;
    int block = (end + BN - 1) / BN - 1;
    if (end <= begin) block = first - 1;
    load_tile(q_tile, PITCH, BM, THREADS, q, a.q.row, rows, a.D, a.vector_qkv);
    uint32_t q_rows[LEAN ? D / 16 : 1][4];
    if (LEAN) {
        cp_async_commit();
        cp_async_wait(0);
        __syncthreads();
#pragma unroll
        for (int n = 0; n < D / 16; ++n)
            if (LEAN) load_a(q_rows[n], lane_16(q_tile, PITCH), PITCH, row0, 16 * n);
        __syncthreads(); /* all warps have read Q: K and V take its place */
    }
    uint4 held[HELD]; /* of K(n), and from its arrival on of V(n) */
    if (block >= first)
        begin_tile(held, HOLDS, k_tile, PITCH, BN, THREADS, k + (int64_t)block * BN * a.k.row, a.k.row,
                   s.Sk - block * BN, a.D, a.vector_qkv);
    cp_async_commit();

    if (!GENERAL) prefetch_next_q(&a, BM, PITCH, THREADS);

    for (; block >= first; --block) {
        const int j0 = block * BN;
        cp_async_wait(0);
        end_tile(held, HOLDS, k_tile, PITCH, BN, THREADS, a.vector_qkv);
        __syncthreads(); /* K(n) has arrived, and all warps have read V(n+1) */
        begin_tile(held, HOLDS, v_tile, PITCH, BN, THREADS, v + (int64_t)j0 * a.v.row, a.v.row, s.Sk - j0, a.Dv,
                   a.vector_qkv);
        cp_async_commit();

        float p[ROW_TILES][KEY_TILES][4];
        if (LEAN)
            product_fragments_nt(p[0], 1, KEY_TILES, D / 16, q_rows, k_lane, 0, PITCH);
        else
            product_nt(&p[0][0], ROW_TILES, KEY_TILES, D, q_lane, 0, k_lane, 0, PITCH);
        if (GENERAL)
#pragma unroll
            for (int r = 0; r < ROW_TILES; ++r)
                general_scores(p[r], 0, KEY_TILES, 0, &a, &s, slope_of(&a, h), b, h, i0 + row0 + 16 * r + g,
                               j0 + 2 * t);

        const int unmasked = i0 + BM - 1 + s.lo <= j0 && j0 + BN - 1 <= i0 + s.hi && j0 + BN <= s.Sk;
        if (!unmasked) {
#pragma unroll
            for (int r = 0; r < ROW_TILES; ++r)
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    const int i = i0 + row0 + 16 * r + g + (e >= 2 ? 8 : 0);
                    const int low = i + s.lo - j0 - 2 * t - (e & 1);
                    const int high = min(i + s.hi, s.Sk - 1) - j0 - 2 * t - (e & 1);
#pragma unroll
                    for (int n = 0; n < KEY_TILES; ++n)
                        if (8 * n > high || ((GENERAL) && 8 * n < low)) p[r][n][e] = -INFINITY;
                }
        }

        cp_async_wait(0);
        end_tile(held, HOLDS, v_tile, PITCH, BN, THREADS, a.vector_qkv);
        __syncthreads(); /* V(n) has arrived, and all warps have read K(n) */
        if (block > first)
            begin_tile(held, HOLDS, k_tile, PITCH, BN, THREADS, k + (int64_t)(j0 - BN) * a.k.row, a.k.row,
                       s.Sk - (j0 - BN), a.D, a.vector_qkv);
        cp_async_commit();

        float correction[ROW_TILES][2]; /* 2^(old - new maximum) */
        int rose = 0;                   /* whether some row's maximum did: only then O is rescaled */
#pragma unroll
        for (int r = 0; r < ROW_TILES; ++r) rose |= online_softmax(p[r], KEY_TILES, m[r], l[r], correction[r], unit);
        if (__any_sync(ALL_LANES, rose)) {
#pragma unroll
            for (int r = 0; r < ROW_TILES; ++r)
#pragma unroll
                for (int c = 0; c < COLUMN_TILES; ++c)
#pragma unroll
                    for (int e = 0; e < 4; ++e) o[r][c][e] *= correction[r][e / 2];
        }
        if (GENERAL && a.drop_T) {
            const dropout_plane plane_rng = dropout_plane_of(&a, b, h);
#pragma unroll
            for (int r = 0; r < ROW_TILES; ++r) {
                uint32_t keep[(KEY_TILES + 7) / 8];
                keep_tiles(keep, KEY_TILES, &a, &plane_rng, 0, i0 + row0 + 16 * r + g, j0 + 2 * t);
#pragma unroll
                for (int n = 0; n < KEY_TILES; ++n)
#pragma unroll
                    for (int e = 0; e < 4; ++e)
                        if (!is_kept(keep, 0, n, e)) p[r][n][e] = 0.0f;
            }
        }
        accumulate(o, p, v_lane);
    }

    /* Row epilogue: O / l, L = m + ln l; a row without keys gives O = 0, L = -inf. A part is stored as
       it is. */
    cp_async_wait(0);
    __syncthreads();
    const sequence own = TAKES_PARTS ? sequence_of(&a, b) : s; /* again: it takes no registers before */
    const fattni_fwd_split_args *const split = SPLIT_OF(args);
    float *const part = split ? (float *)split->results + result_of_part(split) : 0;
    const int end_i = own_row(row0, ROW_TILES, g, t); /* this lane's row */
    const int ends = t < 2 * ROW_TILES && end_i < rows;
    float sums[ROW_TILES][2];
#pragma unroll
    for (int r = 0; r < ROW_TILES; ++r) sums[r][0] = quad_sum(l[r][0]), sums[r][1] = quad_sum(l[r][1]);
    const float maximum = of_own_row(m, ROW_TILES), sum = of_own_row(sums, ROW_TILES);
    if (part) {
        float *const maxima = part + split->rows * split->width;
        if (ends) maxima[end_i] = maximum, maxima[split->rows + end_i] = sum;
    } else {
        float *const lse =
            (float *)a.lse.p + own.batch * a.lse.b + h * a.lse.h + (int64_t)(own.q0 + i0 + end_i) * a.lse.row;
        const row_result row =
            end_of_row(&a, GENERAL, maximum, sum, unit, GENERAL ? 1.0f : a.scale, h, end_i < rows ? lse : 0);
        if (GENERAL) __syncwarp(); /* all lanes of the row have read the old L */
        if (ends) *lse = row.L;
#pragma unroll
        for (int r = 0; r < ROW_TILES; ++r)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int i = row0 + 16 * r + g + 8 * half;
                const float scale = __shfl_sync(ALL_LANES, row.scale, lane_of_row(r, half));
#pragma unroll
                for (int c = 0; c < COLUMN_TILES; ++c) o[r][c][2 * half] *= scale, o[r][c][2 * half + 1] *= scale;
                if (GENERAL && (a.flags & FATTN_MERGE)) {
                    const float keep_old = __shfl_sync(ALL_LANES, row.keep_old, lane_of_row(r, half));
                    const float *const old =
                        (const float *)a.o.p + own.batch * a.o.b + h * a.o.h + (int64_t)(own.q0 + i0 + i) * a.o.row;
#pragma unroll
                    for (int c = 0; c < COLUMN_TILES; ++c)
#pragma unroll
                        for (int e = 0; e < 2; ++e)
                            if (i < rows && 8 * c + 2 * t + e < a.Dv && keep_old > 0)
                                o[r][c][2 * half + e] += keep_old * old[8 * c + 2 * t + e];
                }
            }
    }
    if (part || a.o_f32) {
        float *const out =
            part ? part : (float *)a.o.p + own.batch * a.o.b + h * a.o.h + (int64_t)(own.q0 + i0) * a.o.row;
        const int64_t pitch = part ? split->width : a.o.row;
#pragma unroll
        for (int r = 0; r < ROW_TILES; ++r)
#pragma unroll
            for (int c = 0; c < COLUMN_TILES; ++c)
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    const int i = row0 + 16 * r + g + (e >= 2 ? 8 : 0), d = 8 * c + 2 * t + (e & 1);
                    if (i < rows && d < a.Dv) out[i * pitch + d] = o[r][c][e];
                }
        return;
    }
    if (a.o_rest.p)
#pragma unroll
        for (int r = 0; r < ROW_TILES; ++r)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int i = row0 + 16 * r + g + 8 * half;
                char *const to = (char *)a.o_rest.p + own.batch * a.o_rest.b + h * a.o_rest.h +
                                 (int64_t)(own.q0 + i0 + i) * a.o_rest.row;
                store_rest(to, &o[r][0][2 * half], COLUMN_TILES, 1.0f, i < rows, a.Dv);
            }
    half_type *const out = (half_type *)a.o.p + own.batch * a.o.b + h * a.o.h + (int64_t)(own.q0 + i0) * a.o.row;
    store_rows(o, ROW_TILES, COLUMN_TILES, q_tile, PITCH, row0, out, a.o.row, rows, a.Dv, a.vector_qkv);
}

DESCRIBE_KERNEL(kernel_args, SHARED_BYTES, 1);
