/* F64 tiles, and F32 tiles rounded to TF32, in shared memory, and their products on tensor cores:
   shared by forward and backward. Include after defining K_F64, K_D, K_BM, K_BN and K_WARPS.

   A tile is [rows][columns], columns a multiple of 8 chunks of 16 bytes. Chunk c of row r lies at
   c ^ turn(r): then both ways below of reading a tile touch every bank once.

   Both types have an mma.sync m16n8k8. Where it takes depths t and t + 4 from thread t of a lane
   quad, any two will do, as long as A and B agree: here 2t and 2t + 1, next to each other. Then
   accumulators are the A fragment of the next product as they are. With g = lane/4:

   along    an operand whose rows run along the depth: row g, columns 2t, 2t+1 in one access.
   across   an operand whose rows are steps of the depth: rows 2t and 2t+1, a vector of columns
            from g * VECTOR on: one column for each of VECTOR neighbouring fragments. So column
            n of fragment e stands for column n * VECTOR + e of their group. */
#ifndef FATTNI_MMA_TILE_H
#define FATTNI_MMA_TILE_H

#include "ptx/cp_async.h"
#include "ptx/ldmatrix.h"
#include "ptx/mma.h"
#include "real.h"

enum { D = K_D, BM = K_BM, BN = K_BN, WARPS = K_WARPS, THREADS = 32 * WARPS, GROUP = 8 * VECTOR };

typedef struct __align__(2 * sizeof(real)) pair { real low, high; } pair;

DEVICE int lane_of(void) { return (int)threadIdx.x & 31; }

/* Of eight rows, neighbours differ in bit 2, even ones and odd ones in bits 1 and 2. */
DEVICE int turn(int row) { return (row & 6) ^ (row & 1) << 2; }

/* Where columns [column, column + VECTOR) of a row are; column is a multiple of VECTOR. */
DEVICE real *chunk_at(real *tile, int columns, int row, int column) {
    return tile + row * columns + (column ^ turn(row) * VECTOR);
}
/* Two neighbours; column is even. */
DEVICE pair *pair_at(real *tile, int columns, int row, int column) {
    return (pair *)(chunk_at(tile, columns, row, column & -VECTOR) + column % VECTOR);
}

/* Rows [0, rows) of a tile of D columns; what lies beyond `valid` rows or `width` columns is zero.
   base: row 0; pitch in elements; vectors: 16-byte accesses are possible. */
DEVICE void load_tile(real *tile, int rows, const real *base, int64_t pitch, int valid, int width,
                      int vectors) {
    for (int n = (int)threadIdx.x; n < rows * (D / VECTOR); n += THREADS) {
        const int row = n / (D / VECTOR), column = n % (D / VECTOR) * VECTOR;
        real *const to = chunk_at(tile, D, row, column);
        const real *const from = base + row * pitch + column;
        const int inside = row < valid && column < width;
        if (vectors) {
            cp_async_16(shared_address(to), inside ? from : base, inside ? 16 : 0);
        } else {
#pragma unroll
            for (int e = 0; e < VECTOR; ++e)
                to[e] = inside && column + e < width ? from[e] : (real)0;
        }
    }
}

/* What the tensor cores take of x: the nearest number of 11 bits, or x. */
DEVICE real operand(real x) {
#if K_F64
    return x;
#else
    return round_tf32(x);
#endif
}

/* Rounds what this thread brought with load_tile, once it is there. */
DEVICE void round_tile(real *tile, int rows) {
#if !K_F64
    for (int n = (int)threadIdx.x; n < rows * (D / VECTOR); n += THREADS) {
        vector *const chunk =
            (vector *)chunk_at(tile, D, n / (D / VECTOR), n % (D / VECTOR) * VECTOR);
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

/* A fragments of 16 rows from `row` on: along. */
DEVICE void load_a(real a[4], real *tile, int columns, int row, int step) {
    const int g = lane_of() / 4, t = lane_of() % 4;
    const pair upper = *pair_at(tile, columns, row + g, step + 2 * t),
               lower = *pair_at(tile, columns, row + g + 8, step + 2 * t);
    a[0] = upper.low, a[1] = lower.low, a[2] = upper.high, a[3] = lower.high;
}

/* Accumulators as an A fragment: x[rows][k]. */
DEVICE void a_of(real a[4], const real x[4]) {
    a[0] = operand(x[0]), a[1] = operand(x[2]), a[2] = operand(x[1]), a[3] = operand(x[3]);
}

/* One step of x[m_tiles][n_tiles] += A B^T: columns `step` and on of rows a_row.. and b_row.. of
   two tiles, both along. */
DEVICE void step_nt(real (*x)[4], int m_tiles, int n_tiles, real *a_tile, int a_row, real *b_tile,
                    int b_row, int columns, int step) {
    const int g = lane_of() / 4, t = lane_of() % 4;
    real a[2][4];
#pragma unroll
    for (int m = 0; m < m_tiles; ++m) load_a(a[m], a_tile, columns, a_row + 16 * m, step);
#pragma unroll
    for (int n = 0; n < n_tiles; ++n) {
        const pair b = *pair_at(b_tile, columns, b_row + 8 * n + g, step + 2 * t);
#pragma unroll
        for (int m = 0; m < m_tiles; ++m) multiply(x[m * n_tiles + n], a[m], b.low, b.high);
    }
}

/* One step of x[m_tiles][groups * VECTOR] += A B: A fragments a[m]; row `step` of B and on, its
   columns from `column` on, across. */
DEVICE void step_nn(real (*x)[4], int m_tiles, int groups, const real (*a)[4], real *b_tile,
                    int columns, int step, int column) {
    const int g = lane_of() / 4, t = lane_of() % 4;
#pragma unroll
    for (int c = 0; c < groups; ++c) {
        const int at = column + c * GROUP + g * VECTOR;
        const vector b0 = *(const vector *)chunk_at(b_tile, columns, step + 2 * t, at),
                     b1 = *(const vector *)chunk_at(b_tile, columns, step + 2 * t + 1, at);
#pragma unroll
        for (int e = 0; e < VECTOR; ++e)
#pragma unroll
            for (int m = 0; m < m_tiles; ++m)
                multiply(x[(m * groups + c) * VECTOR + e], a[m], b0.e[e], b1.e[e]);
    }
}

/* x += P B over `depth`, P being accumulators p[m_tiles][depth / 8]. */
DEVICE void product_registers(real (*x)[4], int m_tiles, int groups, int depth, const real (*p)[4],
                              real *b_tile, int columns, int column) {
#pragma unroll
    for (int n = 0; n < depth / 8; ++n) {
        real a[2][4];
#pragma unroll
        for (int m = 0; m < m_tiles; ++m) a_of(a[m], p[m * (depth / 8) + n]);
        step_nn(x, m_tiles, groups, a, b_tile, columns, 8 * n, column);
    }
}

/* x += A B over `depth`: rows a_row.. of A, along. */
DEVICE void product_nn(real (*x)[4], int m_tiles, int groups, int depth, real *a_tile, int a_row,
                       int a_columns, real *b_tile, int columns, int column) {
#pragma unroll 2
    for (int step = 0; step < depth; step += 8) {
        real a[2][4];
#pragma unroll
        for (int m = 0; m < m_tiles; ++m) load_a(a[m], a_tile, a_columns, a_row + 16 * m, step);
        step_nn(x, m_tiles, groups, a, b_tile, columns, step, column);
    }
}

/* x[VECTOR / 2][groups * VECTOR] = A^T B over `depth` rows of A, whose columns a_column.. are GROUP
   rows of the result, across: row n of fragment m and of its lower half h is number
   n * VECTOR + 2 m + h. */
DEVICE void product_tn(real (*x)[4], int groups, int depth, real *a_tile, int a_column,
                       int a_columns, real *b_tile, int columns, int column) {
    const int g = lane_of() / 4, t = lane_of() % 4;
    clear(x, VECTOR / 2 * groups * VECTOR);
#pragma unroll 2
    for (int step = 0; step < depth; step += 8) {
        const int at = a_column + g * VECTOR;
        const vector a0 = *(const vector *)chunk_at(a_tile, a_columns, step + 2 * t, at),
                     a1 = *(const vector *)chunk_at(a_tile, a_columns, step + 2 * t + 1, at);
        real a[VECTOR / 2][4];
#pragma unroll
        for (int m = 0; m < VECTOR / 2; ++m) {
            a[m][0] = a0.e[2 * m], a[m][1] = a0.e[2 * m + 1];
            a[m][2] = a1.e[2 * m], a[m][3] = a1.e[2 * m + 1];
        }
        step_nn(x, VECTOR / 2, groups, a, b_tile, columns, step, column);
    }
}

/* Sum and maximum over a lane quad: the threads of a row. */
DEVICE real row_sum(real x) {
    x += __shfl_xor_sync(0xffffffffu, x, 1);
    return x + __shfl_xor_sync(0xffffffffu, x, 2);
}
DEVICE real row_max(real x) {
    x = fmax(x, __shfl_xor_sync(0xffffffffu, x, 1));
    return fmax(x, __shfl_xor_sync(0xffffffffu, x, 2));
}

/* Element n of lane t of a quad and element t of lane n change places. */
DEVICE void transpose_quad(real x[4]) {
    const int t = lane_of() % 4;
#pragma unroll
    for (int step = 1; step <= 2; step *= 2) {
        const int other = 3 - step; /* the pairs (0, step) and (other, 3) */
        const real first = __shfl_xor_sync(0xffffffffu, t & step ? x[0] : x[step], step);
        const real second = __shfl_xor_sync(0xffffffffu, t & step ? x[other] : x[3], step);
        if (t & step) x[0] = first, x[other] = second;
        else x[step] = first, x[3] = second;
    }
}

/* This thread's elements in a scratch tile, one plane of all threads for each: going through memory
   lets a loop over elements stay a loop. */
DEVICE real *place(real *tile, int n) { return tile + n * THREADS + threadIdx.x; }

DEVICE real exponential(real x) {
#if K_F64
    return exp(x);
#else
    return exp2_approx(x * 1.4426950408889634f);
#endif
}

#endif
