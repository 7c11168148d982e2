/* F64 tiles, and F32 tiles rounded to TF32, in shared memory, and their products on tensor cores:
   shared by forward and backward. Include after defining K_F64, K_D, K_BM, K_BN and K_WARPS.

   A tile is [rows][columns], columns a multiple of 8 chunks of 16 bytes. Chunk c of row r lies at
   c ^ turn(r): then both ways below of reading a tile touch every bank once.

   Both types have an mma.sync m16n8k8. Where it takes depths t and t + 4 from thread t of a lane
   quad, any two will do, as long as A and B agree: with 2t and 2t + 1 accumulators are the A
   fragment of the next product as they are. With g = lane/4, in TF32:

   along    an operand whose rows run along the depth: row g, columns 2t, 2t+1 in one access.
   across   an operand whose rows are steps of the depth: rows 2t and 2t+1, a vector of columns
            from g * VECTOR on: one column for each of VECTOR neighbouring fragments. So column
            n of fragment e stands for column n * VECTOR + e of their group.

   In F64 every element comes by an access of its own, to the register where mma takes it: moves
   between registers would wait for the product that still reads them. Along: columns t and t + 4;
   across: rows t and t + 4, but 2t and 2t + 1 where A is accumulators. Column 2n + b of fragment e
   stands for column 4n + 2e + b of a group. Either way thread t has columns 4t.. of it. */
#ifndef FATTNI_CORE_DEVICE_MMA_TILE_H
#define FATTNI_CORE_DEVICE_MMA_TILE_H

#include "core/ptx/cp_async.h"
#include "core/ptx/ldmatrix.h"
#include "core/ptx/mma.h"
#include "core/device/float_types.cuh"

enum { D = K_D, BM = K_BM, BN = K_BN, WARPS = K_WARPS, THREADS = 32 * WARPS, GROUP = 8 * VECTOR };

typedef struct __align__(2 * sizeof(real)) pair { real low, high; } pair;

DEVICE int lane_of(void) { return (int)threadIdx.x & 31; }

/* TF32: of eight rows, neighbours differ in bit 2, even ones and odd ones in bits 1 and 2. F64:
   each half of eight rows, its even and its odd ones have four numbers that differ in bits 2 and 1,
   and in bits 2 and 0. */
DEVICE int turn(int row) {
#if K_F64
    const int code = (row & 3) ^ (row >> 2 & 1);
    return (code & 1) * 3 + (code >> 1) * 4;
#else
    return (row & 6) ^ (row & 1) << 2;
#endif
}

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
    enum { ACROSS = D / VECTOR, STEP = THREADS / ACROSS }; /* rows at a time */
    const int first = (int)threadIdx.x / ACROSS, column = (int)threadIdx.x % ACROSS * VECTOR;
    const real *from = base + first * pitch + column;
    if (vectors) {
        const int most = column < width ? valid - first : 0;
#pragma unroll 8
        for (int row = 0; row < rows; row += STEP, from += STEP * pitch)
            cp_async_16(shared_address(chunk_at(tile, D, first + row, column)),
                        row < most ? from : base, row < most ? 16 : 0);
        return;
    }
#pragma unroll 1
    for (int row = first; row < rows; row += STEP, from += STEP * pitch)
#pragma unroll
        for (int e = 0; e < VECTOR; ++e)
            chunk_at(tile, D, row, column)[e] =
                row < valid && column + e < width ? from[e] : (real)0;
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

#if K_F64
/* Row first + row, column block + column; first is a multiple of 8 and block of 16, which the
   swizzle leaves alone: loops over them only add. */
DEVICE real element_at(real *tile, int columns, int first, int row, int block, int column) {
    return tile[(first + row) * columns + block + ((column >> 1 ^ turn(row)) << 1) + (column & 1)];
}
#endif

/* This thread's two elements of row first + row, from column block + step on: along. */
DEVICE pair load_along(real *tile, int columns, int first, int row, int block, int step) {
    const int t = lane_of() % 4;
#if K_F64
    const pair x = {element_at(tile, columns, first, row, block, step + t),
                    element_at(tile, columns, first, row, block, step + t + 4)};
    return x;
#else
    return *pair_at(tile, columns, first + row, block + step + 2 * t);
#endif
}

/* Which rows of eight are this thread's of an operand across, beside an A that comes from a tile,
   or is made of accumulators. */
enum { FROM_TILE, FROM_REGISTERS };
DEVICE int low_row(int a_from) { return lane_of() % 4 * (K_F64 && a_from == FROM_TILE ? 1 : 2); }
DEVICE int high_row(int a_from) {
    return low_row(a_from) + (K_F64 && a_from == FROM_TILE ? 4 : 1);
}

/* A group of B fragments: this thread's two rows of the eight from `step` on, from column `column`
   on: across. */
typedef struct group_of { real low[VECTOR], high[VECTOR]; } group_of;
DEVICE group_of load_across(real *tile, int columns, int step, int a_from, int column) {
    const int g = lane_of() / 4, low = low_row(a_from), high = high_row(a_from);
    group_of x;
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

/* A fragments of 16 rows from `first` on: along. */
DEVICE void load_a(real a[4], real *tile, int columns, int first, int block, int step) {
    const int g = lane_of() / 4;
    const pair upper = load_along(tile, columns, first, g, block, step),
               lower = load_along(tile, columns, first + 8, g, block, step);
    a[0] = upper.low, a[1] = lower.low, a[2] = upper.high, a[3] = lower.high;
}

/* Accumulators as an A fragment: x[rows][k]. */
DEVICE void a_of(real a[4], const real x[4]) {
    a[0] = operand(x[0]), a[1] = operand(x[2]), a[2] = operand(x[1]), a[3] = operand(x[3]);
}

/* One step of x[m_tiles][n_tiles] += A B^T: columns block + step and on of rows a_row.. and b_row..
   of two tiles, both along. */
DEVICE void step_nt(real (*x)[4], int m_tiles, int n_tiles, real *a_tile, int a_row, real *b_tile,
                    int b_row, int columns, int block, int step) {
    real a[2][4];
#pragma unroll
    for (int m = 0; m < m_tiles; ++m) load_a(a[m], a_tile, columns, a_row + 16 * m, block, step);
#pragma unroll
    for (int n = 0; n < n_tiles; ++n) {
        const pair b = load_along(b_tile, columns, b_row + 8 * n, lane_of() / 4, block, step);
#pragma unroll
        for (int m = 0; m < m_tiles; ++m) multiply(x[m * n_tiles + n], a[m], b.low, b.high);
    }
}

/* One step of x[m_tiles][groups * VECTOR] += A B: A fragments a[m]; rows `step` of B and on, from
   column `column` on. */
DEVICE void step_nn(real (*x)[4], int m_tiles, int groups, const real (*a)[4], int a_from,
                    real *b_tile, int columns, int step, int column) {
#pragma unroll
    for (int c = 0; c < groups; ++c) {
        const group_of b = load_across(b_tile, columns, step, a_from, column + c * GROUP);
#pragma unroll
        for (int e = 0; e < VECTOR; ++e)
#pragma unroll
            for (int m = 0; m < m_tiles; ++m)
                multiply(x[(m * groups + c) * VECTOR + e], a[m], b.low[e], b.high[e]);
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
        step_nn(x, m_tiles, groups, a, FROM_REGISTERS, b_tile, columns, 8 * n, column);
    }
}

/* x += A B over `depth`: rows a_row.. of A, along. */
DEVICE void product_nn(real (*x)[4], int m_tiles, int groups, int depth, real *a_tile, int a_row,
                       int a_columns, real *b_tile, int columns, int column) {
#pragma unroll
    for (int step = 0; step < depth; step += 8) {
        real a[2][4];
#pragma unroll
        for (int m = 0; m < m_tiles; ++m)
            load_a(a[m], a_tile, a_columns, a_row + 16 * m, step & -16, step & 15);
        step_nn(x, m_tiles, groups, a, FROM_TILE, b_tile, columns, step, column);
    }
}

/* x[ROWS_TN / 16][groups * VECTOR] = A^T B over `depth` rows of A, whose columns a_column.. are
   ROWS_TN rows of the result, across: row_tn(m, h) is the one of fragment m and of its lower half
   h. */
enum { ROWS_TN = K_F64 ? 16 : GROUP };
DEVICE int row_tn(int m, int half) {
    const int g = lane_of() / 4;
    return K_F64 ? g + 8 * half : g * VECTOR + 2 * m + half;
}
/* This thread's A fragments: rows `step` and on. */
DEVICE void load_tn(real (*a)[4], real *a_tile, int a_columns, int step, int a_column) {
#if K_F64
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int m = row_tn(0, half);
        a[0][half] = element_at(a_tile, a_columns, step, low_row(FROM_TILE), a_column, m);
        a[0][half + 2] = element_at(a_tile, a_columns, step, high_row(FROM_TILE), a_column, m);
    }
#else
    const group_of u = load_across(a_tile, a_columns, step, FROM_TILE, a_column);
#pragma unroll
    for (int m = 0; m < ROWS_TN / 16; ++m) {
        a[m][0] = u.low[2 * m], a[m][1] = u.low[2 * m + 1];
        a[m][2] = u.high[2 * m], a[m][3] = u.high[2 * m + 1];
    }
#endif
}
DEVICE void product_tn(real (*x)[4], int groups, int depth, real *a_tile, int a_column,
                       int a_columns, real *b_tile, int columns, int column) {
    clear(x, ROWS_TN / 16 * groups * VECTOR);
#pragma unroll 2
    for (int step = 0; step < depth; step += 8) {
        real a[ROWS_TN / 16][4];
        load_tn(a, a_tile, a_columns, step, a_column);
        step_nn(x, ROWS_TN / 16, groups, a, FROM_TILE, b_tile, columns, step, column);
    }
}

/* Columns (2t + n) * VECTOR and on of group c in the rows of half `half`, from the fragments x of a
   product with an operand across. */
DEVICE vector columns_of(const real (*x)[4], int c, int half, int n) {
    vector y;
#pragma unroll
    for (int e = 0; e < VECTOR; ++e)
        y.e[e] = K_F64 ? x[c * VECTOR + n][2 * half + e] : x[c * VECTOR + e][2 * half + n];
    return y;
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
