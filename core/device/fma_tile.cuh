/* F32 tiles in shared memory, and their products by fused multiply-add, for forward and backward. Include after
   defining K_F64 (0), K_D, K_BM, K_BN and K_WARPS.

   Each thread computes 8 x 8 blocks (8 x 16 of O for the largest head_dim): per block and step of k it loads 4 vectors
   of 16 bytes for 64 multiply-adds. Where a product has fewer blocks than there are threads, `split` threads share a
   block: each sums over a part of k, then they add up, and each keeps 1 / split of the rows.

   Bit 0 of a lane moves its block to the right, bit 1 down, bit 2 to the right, and so on: shared memory serves one
   vector to two such neighbours at once.

   After every eight rows a tile has a gap of one vector, so that vectors of one column, eight rows apart, lie in
   different banks.

   The register file has two banks, of even and of odd registers, each of which delivers one operand per cycle. Of the
   three operands of a multiply-add one is reused from the last; the other two should lie in different banks. Vectors of
   four begin at even registers. So in sums over k, where vectors along k are read from both factors, one factor must
   have rows that begin at even and at odd columns alternately: in tiles called paired, elements 2n and 2n + 1 of odd
   rows change places. And the inner loops alternate their direction. */
#ifndef FATTNI_CORE_DEVICE_FMA_TILE_H
#define FATTNI_CORE_DEVICE_FMA_TILE_H

#include "core/ptx/cp_async.h"
#include "core/ptx/ldmatrix.h"
#include "core/device/float_types.cuh"

enum {
    D = K_D,
    BM = K_BM,
    BN = K_BN,
    THREADS = 32 * K_WARPS,
    BLOCK = 8,
    S_SPLIT = BLOCK * BLOCK * THREADS / (BM * BN),
    S_ROWS = BLOCK / S_SPLIT,
    ELEMENTS = S_ROWS * BLOCK /* elements of S of a thread */
};
static_assert(VECTOR == 4 && BM % BLOCK == 0 && BN % BLOCK == 0, "tiles");
static_assert(S_SPLIT * BM * BN == BLOCK * BLOCK * THREADS && S_ROWS >= 1, "S");

/* The size of a tile in elements, and the index of one of them. */
#define TILE(rows, columns) ((rows) * (columns) + (rows) / BLOCK * VECTOR)
DEVICE int tile_index(int columns, int row, int column) { return row * columns + row / BLOCK * VECTOR + column; }

/* The column at which column `column` of a paired tile is stored. */
DEVICE int paired(int row, int column) { return column ^ (row & 1); }

/* Loads rows [0, rows) of a tile of D columns; beyond `valid` rows or `width` columns it gets zeros. base: row 0; pitch
   in elements; vectors: 16-byte accesses are possible. */
enum { PLAIN, PAIRED };
DEVICE void load_tile(real *tile, int layout, int rows, const real *base, int64_t pitch, int valid, int width,
                      int vectors) {
    enum { ACROSS = D / VECTOR, STEP = THREADS / ACROSS }; /* rows at a time */
    const int first = (int)threadIdx.x / ACROSS, column = (int)threadIdx.x % ACROSS * VECTOR;
    const real *from = base + first * pitch + column;
    if (vectors) {
        const int most = column < width ? valid - first : 0;
#pragma unroll 8
        for (int row = 0; row < rows; row += STEP, from += STEP * pitch) {
            const uint32_t to = shared_address(tile + tile_index(D, first + row, column));
            const real *const source = row < most ? from : base;
            const int inside = row < most;
            if (layout == PAIRED && (first + row) % 2) {
#pragma unroll
                for (int e = 0; e < VECTOR; ++e)
                    cp_async_4(to + (uint32_t)(e ^ 1) * 4, source + (inside ? e : 0), inside ? 4 : 0);
            } else {
                cp_async_16(to, source, inside ? 16 : 0);
            }
        }
        return;
    }
#pragma unroll 1
    for (int row = first; row < rows; row += STEP, from += STEP * pitch)
#pragma unroll
        for (int e = 0; e < VECTOR; ++e) {
            const int at = layout == PAIRED ? paired(row, column + e) : column + e;
            tile[tile_index(D, row, at)] = row < valid && column + e < width ? from[e] : (real)0;
        }
}

/* This thread's block of a product, and its part of k. */
typedef struct block {
    int y, x, part;
} block;

/* Blocks of a warp, in a row and in a column. */
#define LANES_X(split) ((split) <= 2 ? 8 : 16 / (split))
#define LANES_Y(split) ((split) == 1 ? 4 : 2)

/* In a product that is `across` blocks wide. */
DEVICE block block_of(int across, int split) {
    const int lane = (int)threadIdx.x % 32, warp = (int)threadIdx.x / 32;
    const int x = (lane & 1) | (lane >> 1 & 2) | (split == 1 ? lane >> 2 & 4 : lane >> 1 & 4);
    const int y = (lane >> 1 & 1) | (split == 1 ? lane >> 2 & 2 : 0);
    const int warps = across / LANES_X(split); /* in a row */
    const block at = {warp / warps * LANES_Y(split) + y, warp % warps * LANES_X(split) + x % LANES_X(split),
                      lane / (32 / split)};
    return at;
}

/* Lanes that differ in `bit` exchange: each adds the other's second half of sums to its first half. */
DEVICE void exchange_half(real *sum, int half, int bit) {
#pragma unroll
    for (int n = 0; n < half; ++n) sum[n] += __shfl_xor_sync(ALL_LANES, sum[n + half], bit);
}

/* Adds up the `split` parts of a block's sums [BLOCK][count]. Row r of part p holds row r ^ p (BLOCK / split) of the
   block: then every lane gives away its second half, and ends up with its rows first. */
DEVICE void sum_parts(real *sum, int count, int split) {
    if (split > 1) exchange_half(sum, BLOCK / 2 * count, 16);
    if (split > 2) exchange_half(sum, BLOCK / 4 * count, 8);
    if (split > 4) exchange_half(sum, BLOCK / 8 * count, 4);
}

/* This thread's part of x = A B^T over `depth` columns, a multiple of S_DEPTH. B is paired. */
enum { STRIP = S_SPLIT <= 2 ? VECTOR : 64 / S_SPLIT, S_DEPTH = STRIP * S_SPLIT };
DEVICE block s_block(void) { return block_of(BN / BLOCK, S_SPLIT); }
DEVICE void product_nt(real x[ELEMENTS], const real *a, const real *b, int depth) {
    const block at = s_block();
    const real *const b0 = b + tile_index(D, at.x * BLOCK, 0), *a0[S_SPLIT];
#pragma unroll
    for (int g = 0; g < S_SPLIT; ++g) a0[g] = a + tile_index(D, at.y * BLOCK, 0) + (g ^ at.part) * (S_ROWS * D);
    real sum[BLOCK * BLOCK];
#pragma unroll
    for (int n = 0; n < BLOCK * BLOCK; ++n) sum[n] = 0;
#pragma unroll 1
    for (int strip = at.part * STRIP; strip < depth; strip += S_DEPTH)
#pragma unroll
        for (int k = strip; k < strip + STRIP; k += VECTOR) {
            vector w[BLOCK];
#pragma unroll
            for (int c = 0; c < BLOCK; ++c) w[c] = *(const vector *)(b0 + c * D + k);
#pragma unroll
            for (int r = 0; r < BLOCK; ++r) {
                const vector u = *(const vector *)(a0[r / S_ROWS] + r % S_ROWS * D + k);
#pragma unroll
                for (int e = 0; e < VECTOR; ++e)
#pragma unroll
                    for (int n = 0; n < BLOCK; ++n) {
                        const int c = (e + r) % 2 ? BLOCK - 1 - n : n;
                        sum[r * BLOCK + c] = fma(u.e[e], w[c].e[paired(c, e)], sum[r * BLOCK + c]);
                    }
            }
        }
    sum_parts(sum, BLOCK, S_SPLIT);
#pragma unroll
    for (int n = 0; n < ELEMENTS; ++n) x[n] = sum[n];
}

/* x[BLOCK][vectors] += A B over BN rows of b, a tile of that layout; a is [..][BN], paired. Vector c of a block is
   c * D / vectors columns after the first. split: 1 or 2; rows are in the order of sum_parts. */
DEVICE void product_nn(vector *x, int vectors, int split, const real *a, const real *b, int layout) {
    const block at = block_of(D / (VECTOR * vectors), split);
    const int kept = BLOCK / split; /* rows */
    const real *b0 = b + at.x * VECTOR + at.part * (VECTOR * D), *a0[2];
#pragma unroll
    for (int g = 0; g < split; ++g)
        a0[g] = a + tile_index(BN, at.y * BLOCK, 0) + (g ^ at.part) * (kept * BN) + at.part * VECTOR;
#pragma unroll 1
    for (int k = 0; k < BN; k += BLOCK, b0 += TILE(BLOCK, D))
#pragma unroll
        for (int n = 0; n < BLOCK; n += VECTOR * split) {
            vector u[BLOCK];
#pragma unroll
            for (int r = 0; r < BLOCK; ++r) u[r] = *(const vector *)(a0[r / kept] + r % kept * BN + k + n);
#pragma unroll
            for (int m = 0; m < VECTOR; ++m)
#pragma unroll
                for (int c = 0; c < vectors; ++c) {
                    const vector w = *(const vector *)(b0 + (n + m) * D + c * (D / vectors));
#pragma unroll
                    for (int e = 0; e < VECTOR; ++e)
#pragma unroll
                        for (int i = 0; i < BLOCK; ++i) {
                            const int r = e % 2 ? BLOCK - 1 - i : i;
                            real *const sum = &x[r * vectors + c].e[e];
                            *sum = fma(u[r].e[paired(r, m)], w.e[layout == PAIRED ? paired(m, e) : e], *sum);
                        }
                }
        }
}

/* x[BLOCK][2] += A^T B over BM rows of a, [..][BN], paired, and of b; each of the `split` threads of a block takes two
   of every 2 split rows. */
DEVICE void product_tn(vector *x, int split, const real *a, const real *b) {
    const block at = block_of(D / BLOCK, split);
    const real *a0 = a + at.y * BLOCK + at.part * (2 * BN), *b0 = b + at.x * VECTOR + at.part * (2 * D);
#pragma unroll 1
    for (int k = 0; k < BM; k += BLOCK, a0 += TILE(BLOCK, BN), b0 += TILE(BLOCK, D))
#pragma unroll
        for (int i = 0; i < BLOCK / split; ++i) {
            const int n = i / 2 * 2 * split + i % 2;
            const vector u[2] = {*(const vector *)(a0 + n * BN), *(const vector *)(a0 + n * BN + VECTOR)},
                         w[2] = {*(const vector *)(b0 + n * D), *(const vector *)(b0 + n * D + D / 2)};
#pragma unroll
            for (int r = 0; r < BLOCK; ++r)
#pragma unroll
                for (int q = 0; q < BLOCK; ++q) {
                    const int j = r % 2 ? BLOCK - 1 - q : q;
                    real *const sum = &x[r * 2 + j / VECTOR].e[j % VECTOR];
                    *sum = fma(u[r / VECTOR].e[paired(n, r % VECTOR)], w[j / VECTOR].e[j % VECTOR], *sum);
                }
        }
}

DEVICE void clear(vector *x, int count) {
#pragma unroll
    for (int n = 0; n < count; ++n)
#pragma unroll
        for (int e = 0; e < VECTOR; ++e) x[n].e[e] = 0;
}

/* A thread's part of S or P in a paired tile [BM][BN]: element n is at row element_row(n) and column element_column(n).
   With elements in memory a loop over them need not be unrolled. */
DEVICE int element_row(int n) {
    const block at = s_block();
    return at.y * BLOCK + at.part * S_ROWS + n / BLOCK;
}
DEVICE int element_column(int n) { return s_block().x * BLOCK + n % BLOCK; }
DEVICE real *element_slot(real *tile, int n) {
    return tile + tile_index(BN, element_row(n), paired(element_row(n), element_column(n)));
}

/* Row r of a thread's part by vectors; put and get of score_terms_fma.cuh go by elements. */
DEVICE vector *row_of_part(real *tile, int r) {
    return (vector *)(tile + tile_index(BN, element_row(r * BLOCK), s_block().x * BLOCK));
}
DEVICE void put_row(real *tile, int r, const real x[BLOCK]) {
    const int odd = element_row(r * BLOCK) & 1;
#pragma unroll
    for (int c = 0; c < BLOCK; c += VECTOR) {
        vector y;
#pragma unroll
        for (int e = 0; e < VECTOR; ++e) y.e[e] = odd ? x[c + (e ^ 1)] : x[c + e];
        row_of_part(tile, r)[c / VECTOR] = y;
    }
}
DEVICE void get_row(real x[BLOCK], real *tile, int r) {
    const int odd = element_row(r * BLOCK) & 1;
#pragma unroll
    for (int c = 0; c < BLOCK; c += VECTOR) {
        const vector y = row_of_part(tile, r)[c / VECTOR];
#pragma unroll
        for (int e = 0; e < VECTOR; ++e) x[c + e] = odd ? y.e[e ^ 1] : y.e[e];
    }
}

#endif
