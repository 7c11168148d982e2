/* 16-bit tiles in shared memory and mma.sync fragments of them: for forward and backward kernels on sm_80 and later.
   Include after defining K_BF16 (1 or 0).

   A tile is [rows][columns] with columns a multiple of 64. Chunks of 16 bytes are XOR-swizzled with the row
   (swizzled_chunk), so that the eight rows of an 8x8 matrix lie in different banks. */
#ifndef FATTNI_CORE_DEVICE_MMA16_TILE_H
#define FATTNI_CORE_DEVICE_MMA16_TILE_H

#ifndef XOR_COLUMNS
#define XOR_COLUMNS 64
#endif

#include "core/device/sequence.cuh"
#include "core/device/half_types.cuh"
#include "core/ptx/cp_async.h"
#include "core/ptx/global.h"
#include "core/ptx/ldmatrix.h"
#include "core/ptx/shared.h"

/* Byte offset of chunk (8 elements) `chunk` of row `row`. */
DEVICE uint32_t tile_offset(int columns, int row, int chunk) {
    return (uint32_t)(row * columns * 2) + swizzled_chunk(chunk, row & 7);
}

/* Rows [0, rows) of a tile from global memory, by `threads` threads of which this one is number `thread`; rows at or
   beyond `valid`, and columns at or beyond `width` (the call's head_dim), become zero. base: row 0; pitch in elements;
   vector: 16-byte accesses are possible. */
DEVICE void load_tile_by(int thread, int threads, uint32_t tile, int columns, int rows, const half_type *base,
                         int64_t pitch, int valid, int width, int vector) {
    const int chunks = columns / 8, rows_at_once = threads / chunks;
    const int chunk = thread % chunks, row0 = thread / chunks;
    if (vector) {
        const half_type *from = base + row0 * pitch + chunk * 8;
        if (valid >= rows && width == columns) { /* without predicates */
#pragma unroll
            for (int row = 0; row < rows; row += rows_at_once) {
                cp_async_16(tile + tile_offset(columns, row0 + row, chunk), from, 16);
                from += rows_at_once * pitch;
            }
            return;
        }
#pragma unroll
        for (int row = 0; row < rows; row += rows_at_once) {
            const int inside = row0 + row < valid && chunk * 8 < width;
            cp_async_16(tile + tile_offset(columns, row0 + row, chunk), inside ? from : base, inside ? 16 : 0);
            from += rows_at_once * pitch;
        }
        return;
    }
#pragma unroll 1
    for (int at = thread; at < rows * columns; at += threads) {
        const int row = at / columns, column = at % columns;
        const half_type x = row < valid && column < width ? base[row * pitch + column] : to_half(0.0f);
        const uint32_t to = tile + tile_offset(columns, row, column / 8) + (uint32_t)(column % 8) * 2;
        store_shared_half(to, *(const uint16_t *)&x);
    }
}

/* The same by all threads of the CTA. */
DEVICE void load_tile(uint32_t tile, int columns, int rows, int threads, const half_type *base, int64_t pitch,
                      int valid, int width, int vector) {
    load_tile_by((int)threadIdx.x, threads, tile, columns, rows, base, pitch, valid, width, vector);
}

/* load_tile in two steps for GPUs without cp.async (before sm_80), with `holds`: between them a thread holds its chunks
   of the tile in registers, held[rows * columns / 8 / threads], and other work runs while they come. Else, and without
   16-byte accesses, the first step is all. */
DEVICE void begin_tile(uint4 *held, int holds, uint32_t tile, int columns, int rows, int threads, const half_type *base,
                       int64_t pitch, int valid, int width, int vector) {
    if (!holds || !vector) {
        load_tile(tile, columns, rows, threads, base, pitch, valid, width, vector);
        return;
    }
    const int chunks = columns / 8, rows_at_once = threads / chunks;
    const int chunk = (int)threadIdx.x % chunks, row0 = (int)threadIdx.x / chunks;
#pragma unroll
    for (int n = 0; n < rows / rows_at_once; ++n) {
        const int row = row0 + n * rows_at_once;
        held[n] = make_uint4(0, 0, 0, 0);
        if (row < valid && chunk * 8 < width) held[n] = *(const uint4 *)(base + row * pitch + chunk * 8);
    }
}
DEVICE void end_tile(const uint4 *held, int holds, uint32_t tile, int columns, int rows, int threads, int vector) {
    if (!holds || !vector) return;
    const int chunks = columns / 8, rows_at_once = threads / chunks;
    const int chunk = (int)threadIdx.x % chunks, row0 = (int)threadIdx.x / chunks;
#pragma unroll
    for (int n = 0; n < rows / rows_at_once; ++n)
        store_shared_words(tile + tile_offset(columns, row0 + n * rows_at_once, chunk), &held[n].x);
}

/* The address that this lane gives to ldmatrix in a tile of `columns`: row lane%16 and chunk lane/16, or row
   lane%8 + 8 (lane/16) and chunk lane/8%2. The first is for A fragments of a row-major tile and B fragments of a
   transposed one, the second for the other two. fragment_at moves it by an even number of chunks along a row and a
   multiple of 8 rows: an XOR for the place among 64 columns, so that four registers serve all of a row, and a sum that
   ldmatrix takes as its offset. Where these registers are lacking, XOR_COLUMNS 256 computes each address instead.
   Moves along a row add up if their places among 64 columns have no bit in common. Tiles start at multiples of 512. */
DEVICE uint32_t lane_16(uint32_t tile, int columns) {
    const int lane = (int)threadIdx.x & 31;
    return tile + tile_offset(columns, lane & 15, lane >> 4);
}
DEVICE uint32_t lane_8(uint32_t tile, int columns) {
    const int lane = (int)threadIdx.x & 31;
    return tile + tile_offset(columns, (lane & 7) + ((lane >> 4) << 3), (lane >> 3) & 1);
}
DEVICE uint32_t fragment_at(uint32_t lane_address, int columns, int row, int column) {
    const int within = column % XOR_COLUMNS;
    return (lane_address ^ (uint32_t)(within * 2)) + (uint32_t)((row * columns + column - within) * 2);
}

/* A[m][k] = tile[row + m][column + k], 16 x 16; lane_16. */
DEVICE void load_a(uint32_t a[4], uint32_t lane_address, int columns, int row, int column) {
    ldmatrix_x4(a, fragment_at(lane_address, columns, row, column));
}
/* B[k][n] = tile[row + n][column + k], n below 16: b[0..1] and b[2..3]; lane_8. */
DEVICE void load_b(uint32_t b[4], uint32_t lane_address, int columns, int row, int column) {
    ldmatrix_x4(b, fragment_at(lane_address, columns, row, column));
}
/* B[k][n] = tile[row + k][column + n]; lane_16. */
DEVICE void load_b_trans(uint32_t b[4], uint32_t lane_address, int columns, int row, int column) {
    ldmatrix_x4_trans(b, fragment_at(lane_address, columns, row, column));
}
/* A[m][k] = tile[row + k][column + m]; lane_8. */
DEVICE void load_a_trans(uint32_t a[4], uint32_t lane_address, int columns, int row, int column) {
    ldmatrix_x4_trans(a, fragment_at(lane_address, columns, row, column));
}

/* Products of one warp: accumulators x[row_tiles][column_tiles][4] of 16 x 8 tiles, row_tiles at most 2. All sizes are
   constants; fragments are loaded one product ahead. */

DEVICE void clear(float (*x)[4], int tiles) {
#pragma unroll
    for (int n = 0; n < tiles; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) x[n][e] = 0.0f;
}

/* x += A B^T over `depth`: rows a_row.. of one tile (lane_16) and b_row.. of another (lane_8). */
DEVICE void add_product_nt(float (*x)[4], int row_tiles, int column_tiles, int depth, uint32_t a_lane, int a_row,
                           int a_columns, uint32_t b_lane, int b_row, int b_columns) {
    const int steps = depth / 16, pairs = column_tiles / 2;
    uint32_t a[2][2][4], b[2][4];
    a_lane = fragment_at(a_lane, a_columns, a_row, 0), b_lane = fragment_at(b_lane, b_columns, b_row, 0);
#pragma unroll
    for (int r = 0; r < row_tiles; ++r) load_a(a[0][r], a_lane, a_columns, 16 * r, 0);
    load_b(b[0], b_lane, b_columns, 0, 0);
#pragma unroll
    for (int step = 0; step < steps; ++step)
#pragma unroll
        for (int n = 0; n < pairs; ++n) {
            const int at = step * pairs + n, next = at + 1;
            if (next < steps * pairs) load_b(b[next & 1], b_lane, b_columns, 16 * (next % pairs), 16 * (next / pairs));
            if (n == 0 && step + 1 < steps)
#pragma unroll
                for (int r = 0; r < row_tiles; ++r)
                    load_a(a[(step + 1) & 1][r], a_lane, a_columns, 16 * r, 16 * (step + 1));
#pragma unroll
            for (int r = 0; r < row_tiles; ++r) {
                mma(x[r * column_tiles + 2 * n], a[step & 1][r], b[at & 1][0], b[at & 1][1]);
                mma(x[r * column_tiles + 2 * n + 1], a[step & 1][r], b[at & 1][2], b[at & 1][3]);
            }
        }
}
/* x = A B^T, of tiles as wide as each other. */
DEVICE void product_nt(float (*x)[4], int row_tiles, int column_tiles, int depth, uint32_t a_lane, int a_row,
                       uint32_t b_lane, int b_row, int columns) {
    clear(x, row_tiles * column_tiles);
    add_product_nt(x, row_tiles, column_tiles, depth, a_lane, a_row, columns, b_lane, b_row, columns);
}

/* x += A B over `depth`, B[k][n] = b tile[k][b_column + n] (lane_16), b_column a multiple of the columns of x.
   A[m][k] = a tile[a_at + m][k] (lane_16), or transposed a tile[k][a_at + m] (lane_8), a_at a multiple of the rows
   of x. */
DEVICE void product_nn(float (*x)[4], int row_tiles, int column_tiles, int depth, uint32_t a_lane, int a_at,
                       int a_columns, int transposed, uint32_t b_lane, int b_column, int b_columns) {
    const int steps = depth / 16, pairs = column_tiles / 2;
    uint32_t a[2][2][4], b[2][4];
    a_lane = fragment_at(a_lane, a_columns, transposed ? 0 : a_at, transposed ? a_at : 0);
    if ((column_tiles & (column_tiles - 1)) == 0) b_lane = fragment_at(b_lane, b_columns, 0, b_column), b_column = 0;
    load_b_trans(b[0], b_lane, b_columns, 0, b_column);
#pragma unroll
    for (int step = 0; step <= steps; ++step) {
        if (step < steps)
#pragma unroll
            for (int r = 0; r < row_tiles; ++r) {
                if (transposed)
                    load_a_trans(a[step & 1][r], a_lane, a_columns, 16 * step, 16 * r);
                else
                    load_a(a[step & 1][r], a_lane, a_columns, 16 * r, 16 * step);
            }
        if (step == 0) continue;
#pragma unroll
        for (int n = 0; n < pairs; ++n) {
            const int at = (step - 1) * pairs + n, next = at + 1;
            if (next < steps * pairs)
                load_b_trans(b[next & 1], b_lane, b_columns, 16 * (next / pairs), b_column + 16 * (next % pairs));
#pragma unroll
            for (int r = 0; r < row_tiles; ++r) {
                mma(x[r * column_tiles + 2 * n], a[(step - 1) & 1][r], b[at & 1][0], b[at & 1][1]);
                mma(x[r * column_tiles + 2 * n + 1], a[(step - 1) & 1][r], b[at & 1][2], b[at & 1][3]);
            }
        }
    }
}

/* Accumulators [2 steps][4] of 16 rows as A fragments of 16 columns each. */
DEVICE void to_fragments(uint32_t (*a)[4], const float (*x)[4], int steps) {
#pragma unroll
    for (int step = 0; step < steps; ++step)
#pragma unroll
        for (int n = 0; n < 4; ++n) {
            const float *const pair = &x[2 * step + n / 2][n % 2 * 2];
            a[step][n] = pack(pair[0], pair[1]);
        }
}

/* x = A B^T over 16 `steps`: row_tiles of A as fragments, `steps` of each, rows b_row.. of a tile (lane_8). */
DEVICE void product_fragments_nt(float (*x)[4], int row_tiles, int column_tiles, int steps, const uint32_t (*a)[4],
                                 uint32_t b_lane, int b_row, int columns) {
    const int pairs = column_tiles / 2;
    uint32_t b[2][4];
    b_lane = fragment_at(b_lane, columns, b_row, 0);
    load_b(b[0], b_lane, columns, 0, 0);
    clear(x, row_tiles * column_tiles);
#pragma unroll
    for (int step = 0; step < steps; ++step)
#pragma unroll
        for (int n = 0; n < pairs; ++n) {
            const int at = step * pairs + n, next = at + 1;
            if (next < steps * pairs) load_b(b[next & 1], b_lane, columns, 16 * (next % pairs), 16 * (next / pairs));
#pragma unroll
            for (int r = 0; r < row_tiles; ++r) {
                mma(x[r * column_tiles + 2 * n], a[r * steps + step], b[at & 1][0], b[at & 1][1]);
                mma(x[r * column_tiles + 2 * n + 1], a[r * steps + step], b[at & 1][2], b[at & 1][3]);
            }
        }
}

/* x += A B over 16 `steps`: 16 rows of A as fragments, B[k][n] = b tile[k][n] (lane_16). */
DEVICE void product_fragments_nn(float (*x)[4], int column_tiles, int steps, const uint32_t (*a)[4], uint32_t b_lane,
                                 int columns) {
    const int pairs = column_tiles / 2;
    uint32_t b[2][4];
    load_b_trans(b[0], b_lane, columns, 0, 0);
#pragma unroll
    for (int at = 0; at < steps * pairs; ++at) {
        const int n = at % pairs, next = at + 1;
        if (next < steps * pairs) load_b_trans(b[next & 1], b_lane, columns, 16 * (next / pairs), 16 * (next % pairs));
        mma(x[2 * n], a[at / pairs], b[at & 1][0], b[at & 1][1]);
        mma(x[2 * n + 1], a[at / pairs], b[at & 1][2], b[at & 1][3]);
    }
}

DEVICE uint4 load_chunk(uint32_t address) {
    uint32_t x[4];
    load_shared_4(x, address);
    return make_uint4(x[0], x[1], x[2], x[3]);
}

/* A warp's accumulators [row_tiles][column_tiles][4], rows row0.. of a block, to `out` (row 0 of the block), rows below
   `rows` and columns below `width`: through rows of a shared tile that only this warp uses. */
DEVICE void store_rows(const void *accumulators, int row_tiles, int column_tiles, uint32_t tile, int columns, int row0,
                       half_type *out, int64_t pitch, int rows, int width, int vector) {
    const float(*const acc)[4] = (const float(*)[4])accumulators;
    const int lane = (int)threadIdx.x & 31, g = lane / 4, t = lane % 4;
    __syncwarp();
#pragma unroll
    for (int r = 0; r < row_tiles; ++r)
#pragma unroll
        for (int c = 0; c < column_tiles; ++c) {
            const float *const x = acc[r * column_tiles + c];
            const int row = row0 + 16 * r + g;
            store_shared_word(tile + tile_offset(columns, row, c) + 4u * t, pack(x[0], x[1]));
            store_shared_word(tile + tile_offset(columns, row + 8, c) + 4u * t, pack(x[2], x[3]));
        }
    __syncwarp();
    const int chunks = columns / 8, accesses = row_tiles * chunks / 2, at_once = accesses % 8 ? 4 : 8;
    if (vector) {
#pragma unroll
        for (int first = 0; first < accesses; first += at_once) {
            uint4 x[8];
#pragma unroll
            for (int n = 0; n < at_once; ++n) {
                const int at = 32 * (first + n) + lane;
                x[n] = load_chunk(tile + tile_offset(columns, row0 + at / chunks, at % chunks));
            }
#pragma unroll
            for (int n = 0; n < at_once; ++n) {
                const int at = 32 * (first + n) + lane, row = row0 + at / chunks, chunk = at % chunks;
                store_global_4_if(out + row * pitch + chunk * 8, &x[n].x, row < rows && chunk * 8 < width);
            }
        }
        return;
    }
#pragma unroll 1
    for (int at = lane; at < 16 * row_tiles * chunks; at += 32) {
        const int row = row0 + at / chunks, chunk = at % chunks;
        if (row >= rows || chunk * 8 >= width) continue;
        const uint4 x = load_chunk(tile + tile_offset(columns, row, chunk));
        for (int e = 0; e < 8; ++e)
            if (chunk * 8 + e < width) out[row * pitch + chunk * 8 + e] = ((const half_type *)&x)[e];
    }
}

#endif
