/* F64 tiles, and F32 tiles rounded to TF32, in shared memory, and their products on tensor cores, for forward and
   backward. Include after defining K_F64, K_D, K_BM, K_BN and K_WARPS.

   A tile is [rows][columns], columns a multiple of 8 chunks of 16 bytes. Chunk c of row r lies at c ^ swizzle(r): both
   ways of reading a tile below are then free of bank conflicts.

   Both types have an mma.sync m16n8k8, in which lane t of a quad holds k = t and t + 4 of A and B. A sum over k has no
   order, so any two values of k serve, if A and B agree: with k = 2t and 2t + 1 accumulators can be the A fragment of
   the next product without moving data. With g = lane/4, in TF32:

   K-major    the operand's rows are contiguous along k: row g, columns 2t, 2t + 1, in one access.
   MN-major   its rows are the values of k: rows 2t and 2t + 1, of each a vector of columns from g * VECTOR on, one for
              each of VECTOR neighbouring fragments, a group. So column n of fragment e is column n * VECTOR + e of the
              group.

   In F64 each element is loaded on its own, into the register of which mma reads it: a move between registers would
   have to wait for the product that still reads them. K-major: columns t and t + 4. MN-major: rows t and t + 4, or 2t
   and 2t + 1 where A is accumulators; column 2n + b of fragment e is column 4n + 2e + b of the group. In both types
   lane t ends up with columns 4t.. of a group of the result. */
#ifndef FATTNI_CORE_DEVICE_MMA_TILE_H
#define FATTNI_CORE_DEVICE_MMA_TILE_H

#include "core/ptx/cp_async.h"
#include "core/ptx/ldmatrix.h"
#include "core/ptx/mma.h"
#include "core/device/float_types.cuh"

enum { D = K_D, BM = K_BM, BN = K_BN, WARPS = K_WARPS, THREADS = 32 * WARPS, GROUP = 8 * VECTOR };

typedef struct __align__(2 * sizeof(real)) pair {
    real low, high;
}
pair;

DEVICE int lane_of(void) { return (int)threadIdx.x & 31; }

/* What is XORed with a chunk's number. TF32: rows 2n and 2n + 1 differ in bit 2, and the even rows of eight, as the odd
   ones, in bits 1 and 2. F64: 0, 3, 4, 7, 3, 0, 7, 4 for eight rows. */
DEVICE int swizzle(int row) {
#if K_F64
    const int code = (row & 3) ^ (row >> 2 & 1);
    return (code & 1) * 3 + (code >> 1) * 4;
#else
    return (row & 6) ^ (row & 1) << 2;
#endif
}

/* Columns [column, column + VECTOR) of a row; column is a multiple of VECTOR. */
DEVICE real *chunk_at(real *tile, int columns, int row, int column) {
    return tile + row * columns + (column ^ swizzle(row) * VECTOR);
}
/* Columns column and column + 1; column is even. */
DEVICE pair *pair_at(real *tile, int columns, int row, int column) {
    return (pair *)(chunk_at(tile, columns, row, column & -VECTOR) + column % VECTOR);
}

/* Loads rows [0, rows) of a tile of D columns; beyond `valid` rows or `width` columns it gets zeros. base: row 0; pitch
   in elements; vectors: 16-byte accesses are possible. */
DEVICE void load_tile(real *tile, int rows, const real *base, int64_t pitch, int valid, int width, int vectors) {
    enum { ACROSS = D / VECTOR, STEP = THREADS / ACROSS }; /* rows at a time */
    const int first = (int)threadIdx.x / ACROSS, column = (int)threadIdx.x % ACROSS * VECTOR;
    const real *from = base + first * pitch + column;
    if (vectors) {
        const int most = column < width ? valid - first : 0;
#pragma unroll 8
        for (int row = 0; row < rows; row += STEP, from += STEP * pitch)
            cp_async_16(shared_address(chunk_at(tile, D, first + row, column)), row < most ? from : base,
                        row < most ? 16 : 0);
        return;
    }
#pragma unroll 1
    for (int row = first; row < rows; row += STEP, from += STEP * pitch)
#pragma unroll
        for (int e = 0; e < VECTOR; ++e)
            chunk_at(tile, D, row, column)[e] = row < valid && column + e < width ? from[e] : (real)0;
}

/* x as an operand: rounded to TF32's 11 bits, or F64 as it is. */
DEVICE real operand(real x) {
#if K_F64
    return x;
#else
    return round_tf32(x);
#endif
}

/* TF32: rounds what this thread loaded by load_tile with vectors, after it has arrived. */
DEVICE void round_tile(real *tile, int rows) {
#if !K_F64
    for (int n = (int)threadIdx.x; n < rows * (D / VECTOR); n += THREADS) {
        vector *const chunk = (vector *)chunk_at(tile, D, n / (D / VECTOR), n % (D / VECTOR) * VECTOR);
        vector x = *chunk;
#pragma unroll
        for (int e = 0; e < VECTOR; ++e) x.e[e] = operand(x.e[e]);
        *chunk = x;
    }
#else
    (void)tile, (void)rows;
#endif
}

/* d[16,8] += a[16,8] b[8,8]: a = (g, 2t), (g + 8, 2t), (g, 2t + 1), (g + 8, 2t + 1); b = (2t, g),
   (2t + 1, g); d = (g, 2t), (g, 2t + 1), (g + 8, 2t), (g + 8, 2t + 1). */
DEVICE void multiply(real d[4], const real a[4], real b0, real b1) {
#if K_F64
    mma_f64(d, a, b0, b1);
#else
    mma_tf32(d, a, b0, b1);
#endif
}

DEVICE void clear(real (*x)[4], int tiles) {
#pragma unroll
    for (int n = 0; n < tiles; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) x[n][e] = 0;
}

#if K_F64
/* Row first + row, column block + column; first is a multiple of 8 and block of 16, which do not enter the swizzle, so
   that loops over them only add to addresses. */
DEVICE real element_at(real *tile, int columns, int first, int row, int block, int column) {
    return tile[(first + row) * columns + block + ((column >> 1 ^ swizzle(row)) << 1) + (column & 1)];
}
#endif

/* K-major: this thread's two elements of row first + row, from column block + step on. */
DEVICE pair load_k_major(real *tile, int columns, int first, int row, int block, int step) {
    const int t = lane_of() % 4;
#if K_F64
    const pair x = {element_at(tile, columns, first, row, block, step + t),
                    element_at(tile, columns, first, row, block, step + t + 4)};
    return x;
#else
    return *pair_at(tile, columns, first + row, block + step + 2 * t);
#endif
}

/* This thread's two rows of eight in an MN-major operand; `a_from`: A is loaded from a tile, or is accumulators. */
enum { FROM_TILE, FROM_REGISTERS };
DEVICE int low_row(int a_from) { return lane_of() % 4 * (K_F64 && a_from == FROM_TILE ? 1 : 2); }
DEVICE int high_row(int a_from) { return low_row(a_from) + (K_F64 && a_from == FROM_TILE ? 4 : 1); }

/* MN-major: a group of B fragments, this thread's two rows of the eight from `step` on, from column `column` on. */
typedef struct fragment_group {
    real low[VECTOR], high[VECTOR];
} fragment_group;
DEVICE fragment_group load_mn_major(real *tile, int columns, int step, int a_from, int column) {
    const int g = lane_of() / 4, low = low_row(a_from), high = high_row(a_from);
    fragment_group x;
#if K_F64
#pragma unroll
    for (int e = 0; e < VECTOR; ++e) {
        const int within = g / 2 * 4 + 2 * e + g % 2;
        x.low[e] = element_at(tile, columns, step, low, column, within);
        x.high[e] = element_at(tile, columns, step, high, column, within);
    }
#else
    const vector u = *(const vector *)chunk_at(tile, columns, step + low, column + g * VECTOR),
                 w = *(const vector *)chunk_at(tile, columns, step + high, column + g * VECTOR);
#pragma unroll
    for (int e = 0; e < VECTOR; ++e) x.low[e] = u.e[e], x.high[e] = w.e[e];
#endif
    return x;
}

/* K-major: the A fragment of 16 rows from `first` on. */
DEVICE void load_a(real a[4], real *tile, int columns, int first, int block, int step) {
    const int g = lane_of() / 4;
    const pair upper = load_k_major(tile, columns, first, g, block, step),
               lower = load_k_major(tile, columns, first + 8, g, block, step);
    a[0] = upper.low, a[1] = lower.low, a[2] = upper.high, a[3] = lower.high;
}

/* Accumulators as an A fragment: x[rows][k]. */
DEVICE void accumulators_as_a(real a[4], const real x[4]) {
    a[0] = operand(x[0]), a[1] = operand(x[2]), a[2] = operand(x[1]), a[3] = operand(x[3]);
}

/* One step of k of x[m_tiles][n_tiles] += A B^T: columns block + step and on of rows a_row.. and b_row.. of two tiles,
   both K-major. */
DEVICE void step_nt(real (*x)[4], int m_tiles, int n_tiles, real *a_tile, int a_row, real *b_tile, int b_row,
                    int columns, int block, int step) {
    real a[2][4];
#pragma unroll
    for (int m = 0; m < m_tiles; ++m) load_a(a[m], a_tile, columns, a_row + 16 * m, block, step);
#pragma unroll
    for (int n = 0; n < n_tiles; ++n) {
        const pair b = load_k_major(b_tile, columns, b_row + 8 * n, lane_of() / 4, block, step);
#pragma unroll
        for (int m = 0; m < m_tiles; ++m) multiply(x[m * n_tiles + n], a[m], b.low, b.high);
    }
}

/* One step of k of x[m_tiles][groups * VECTOR] += A B: A fragments a[m]; rows `step` and on of B, MN-major, from column
   `column` on. */
DEVICE void step_nn(real (*x)[4], int m_tiles, int groups, const real (*a)[4], int a_from, real *b_tile, int columns,
                    int step, int column) {
#pragma unroll
    for (int c = 0; c < groups; ++c) {
        const fragment_group b = load_mn_major(b_tile, columns, step, a_from, column + c * GROUP);
#pragma unroll
        for (int e = 0; e < VECTOR; ++e)
#pragma unroll
            for (int m = 0; m < m_tiles; ++m) multiply(x[(m * groups + c) * VECTOR + e], a[m], b.low[e], b.high[e]);
    }
}

/* x += P B, P being accumulators p[m_tiles][depth / 8]; depth: the extent of k. */
DEVICE void product_registers(real (*x)[4], int m_tiles, int groups, int depth, const real (*p)[4], real *b_tile,
                              int columns, int column) {
#pragma unroll
    for (int n = 0; n < depth / 8; ++n) {
        real a[2][4];
#pragma unroll
        for (int m = 0; m < m_tiles; ++m) accumulators_as_a(a[m], p[m * (depth / 8) + n]);
        step_nn(x, m_tiles, groups, a, FROM_REGISTERS, b_tile, columns, 8 * n, column);
    }
}

/* x += A B: rows a_row.. of A, K-major. */
DEVICE void product_nn(real (*x)[4], int m_tiles, int groups, int depth, real *a_tile, int a_row, int a_columns,
                       real *b_tile, int columns, int column) {
#pragma unroll
    for (int step = 0; step < depth; step += 8) {
        real a[2][4];
#pragma unroll
        for (int m = 0; m < m_tiles; ++m) load_a(a[m], a_tile, a_columns, a_row + 16 * m, step & -16, step & 15);
        step_nn(x, m_tiles, groups, a, FROM_TILE, b_tile, columns, step, column);
    }
}

/* x[ROWS_TN / 16][groups * VECTOR] = A^T B over `depth` rows of both, MN-major: columns a_column.. of A are ROWS_TN
   rows of the result. row_tn(m, half): which of them this thread has in half `half` of fragment m. */
enum { ROWS_TN = K_F64 ? 16 : GROUP };
DEVICE int row_tn(int m, int half) {
    const int g = lane_of() / 4;
    return K_F64 ? g + 8 * half : g * VECTOR + 2 * m + half;
}
/* This thread's A fragments: rows `step` and on of A. */
DEVICE void load_tn(real (*a)[4], real *a_tile, int a_columns, int step, int a_column) {
#if K_F64
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int m = row_tn(0, half);
        a[0][half] = element_at(a_tile, a_columns, step, low_row(FROM_TILE), a_column, m);
        a[0][half + 2] = element_at(a_tile, a_columns, step, high_row(FROM_TILE), a_column, m);
    }
#else
    const fragment_group u = load_mn_major(a_tile, a_columns, step, FROM_TILE, a_column);
#pragma unroll
    for (int m = 0; m < ROWS_TN / 16; ++m) {
        a[m][0] = u.low[2 * m], a[m][1] = u.low[2 * m + 1];
        a[m][2] = u.high[2 * m], a[m][3] = u.high[2 * m + 1];
    }
#endif
}
DEVICE void product_tn(real (*x)[4], int groups, int depth, real *a_tile, int a_column, int a_columns, real *b_tile,
                       int columns, int column) {
    clear(x, ROWS_TN / 16 * groups * VECTOR);
#pragma unroll 2
    for (int step = 0; step < depth; step += 8) {
        real a[ROWS_TN / 16][4];
        load_tn(a, a_tile, a_columns, step, a_column);
        step_nn(x, ROWS_TN / 16, groups, a, FROM_TILE, b_tile, columns, step, column);
    }
}

/* Columns (2t + n) * VECTOR and on of group c, in rows of half `half`, from the accumulators x of a product with an
   MN-major B. */
DEVICE vector columns_of(const real (*x)[4], int c, int half, int n) {
    vector y;
#pragma unroll
    for (int e = 0; e < VECTOR; ++e) y.e[e] = K_F64 ? x[c * VECTOR + n][2 * half + e] : x[c * VECTOR + e][2 * half + n];
    return y;
}

/* Sum and maximum over a quad, the lanes of a row. */
DEVICE real row_sum(real x) {
    x += __shfl_xor_sync(ALL_LANES, x, 1);
    return x + __shfl_xor_sync(ALL_LANES, x, 2);
}
DEVICE real row_max(real x) {
    x = fmax(x, __shfl_xor_sync(ALL_LANES, x, 1));
    return fmax(x, __shfl_xor_sync(ALL_LANES, x, 2));
}

/* Element n of lane t and element t of lane n of a quad change places. */
DEVICE void transpose_quad(real x[4]) {
    const int t = lane_of() % 4;
#pragma unroll
    for (int step = 1; step <= 2; step *= 2) {
        const int other = 3 - step; /* the pairs (0, step) and (other, 3) */
        const real first = __shfl_xor_sync(ALL_LANES, t & step ? x[0] : x[step], step);
        const real second = __shfl_xor_sync(ALL_LANES, t & step ? x[other] : x[3], step);
        if (t & step)
            x[0] = first, x[other] = second;
        else
            x[step] = first, x[3] = second;
    }
}

/* Where this thread keeps element n in a scratch tile, [elements][threads]: with elements in memory a loop over them
   need not be unrolled. */
DEVICE real *element_slot(real *tile, int n) { return tile + n * THREADS + threadIdx.x; }

DEVICE real exponential(real x) {
#if K_F64
    return exp(x);
#else
    return exp2_approx(x * LOG2E);
#endif
}

#endif
