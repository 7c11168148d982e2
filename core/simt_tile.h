/* F32 and F64 tiles in shared memory, and their products by fused multiply-add: shared by forward and
   backward. Include after defining K_F64, K_D, K_BM, K_BN, K_WARPS.

   TX x TY threads share each result. Thread (tx, ty) has the rows ty, ty + TY, ... and of S the columns
   tx, tx + TX, ..., of O and the gradients the vectors tx, tx + TX, ... of 16 bytes. The threads of one
   row are neighbours in one warp.

   A tile's rows are one vector longer than its columns: then eight rows' vectors at one column lie in
   different banks. */
#ifndef FATTNI_SIMT_TILE_H
#define FATTNI_SIMT_TILE_H

#include "ptx/cp_async.h"
#include "ptx/ldmatrix.h"
#include "simt_real.h"

enum {
    D = K_D, BM = K_BM, BN = K_BN, THREADS = 32 * K_WARPS,
    TX = D / 8 < 16 ? D / 8 : 16, TY = THREADS / TX,
    ROWS = BM / TY, KEYS = BN / TX,        /* a thread's part of S */
    VECTORS = D / (TX * VECTOR),           /* and of a row of O */
    PITCH = D + VECTOR, PITCH_S = BN + VECTOR,
    MOST = 8                               /* rows or keys of a thread, at most */
};
static_assert(TX * TY == THREADS && ROWS * TY == BM && KEYS * TX == BN, "S");
static_assert(VECTORS * TX * VECTOR == D && ROWS <= MOST && BM % VECTOR == 0 && BN % VECTOR == 0, "O");

/* Rows [0, rows) of a tile of D columns; what lies beyond `valid` rows or `width` columns is zero.
   base: row 0; pitch in elements; vectors: 16-byte accesses are possible. */
DEVICE void load_tile(real *tile, int rows, const real *base, int64_t pitch, int valid, int width,
                      int vectors) {
    for (int n = (int)threadIdx.x; n < rows * (D / VECTOR); n += THREADS) {
        const int row = n / (D / VECTOR), column = n % (D / VECTOR) * VECTOR;
        real *const to = tile + row * PITCH + column;
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

/* x[R][C] = A B^T over `depth` columns: this thread's rows of a, and rows tx + TX c of b. */
DEVICE void product_nt(real *x, int R, int C, const real *a, const real *b, int depth) {
    const real *const a0 = a + threadIdx.x / TX * PITCH, *const b0 = b + threadIdx.x % TX * PITCH;
#pragma unroll
    for (int n = 0; n < R * C; ++n) x[n] = 0;
#pragma unroll 1
    for (int k = 0; k < depth; k += VECTOR) {
        vector u[MOST];
#pragma unroll
        for (int r = 0; r < R; ++r) u[r] = *(const vector *)(a0 + r * TY * PITCH + k);
#pragma unroll
        for (int c = 0; c < C; ++c) {
            const vector w = *(const vector *)(b0 + c * TX * PITCH + k);
#pragma unroll
            for (int e = 0; e < VECTOR; ++e)
#pragma unroll
                for (int r = 0; r < R; ++r) x[r * C + c] = fma(u[r].e[e], w.e[e], x[r * C + c]);
        }
    }
}

/* x[R][VECTORS] += A B over `depth`, a multiple of VECTOR: this thread's rows of a, [..][PITCH_S]. */
DEVICE void product_nn(vector *x, int R, const real *a, const real *b, int depth) {
    const real *const a0 = a + threadIdx.x / TX * PITCH_S, *const b0 = b + threadIdx.x % TX * VECTOR;
#pragma unroll 1
    for (int k = 0; k < depth; k += VECTOR) {
        vector u[MOST];
#pragma unroll
        for (int r = 0; r < R; ++r) u[r] = *(const vector *)(a0 + r * TY * PITCH_S + k);
#pragma unroll
        for (int m = 0; m < VECTOR; ++m)
#pragma unroll
            for (int c = 0; c < VECTORS; ++c) {
                const vector w = *(const vector *)(b0 + (k + m) * PITCH + c * TX * VECTOR);
#pragma unroll
                for (int r = 0; r < R; ++r)
#pragma unroll
                    for (int e = 0; e < VECTOR; ++e)
                        x[r * VECTORS + c].e[e] = fma(u[r].e[m], w.e[e], x[r * VECTORS + c].e[e]);
            }
    }
}

/* Which column of a, counted from 0, is row r of this thread's part of A^T B. */
DEVICE int transposed_row(int r) {
    return (r / VECTOR * TY + (int)threadIdx.x / TX) * VECTOR + r % VECTOR;
}

/* x[R][VECTORS] += A^T B over `depth` rows of a, [..][PITCH_S], and of b; R is a multiple of VECTOR. */
DEVICE void product_tn(vector *x, int R, const real *a, const real *b, int depth) {
    const real *const a0 = a + transposed_row(0), *const b0 = b + threadIdx.x % TX * VECTOR;
#pragma unroll 2
    for (int k = 0; k < depth; ++k) {
        vector u[MOST / VECTOR];
#pragma unroll
        for (int g = 0; g < R / VECTOR; ++g)
            u[g] = *(const vector *)(a0 + k * PITCH_S + g * TY * VECTOR);
#pragma unroll
        for (int c = 0; c < VECTORS; ++c) {
            const vector w = *(const vector *)(b0 + k * PITCH + c * TX * VECTOR);
#pragma unroll
            for (int r = 0; r < R; ++r)
#pragma unroll
                for (int e = 0; e < VECTOR; ++e)
                    x[r * VECTORS + c].e[e] =
                        fma(u[r / VECTOR].e[r % VECTOR], w.e[e], x[r * VECTORS + c].e[e]);
        }
    }
}

/* A thread's part of S, or P, to and from its places in a tile [BM][BN]; place n is row
   place_row(n), column place_column(n). Going through memory lets a loop over elements stay a loop. */
DEVICE int place_row(int n) { return (int)threadIdx.x / TX + n / KEYS * TY; }
DEVICE int place_column(int n) { return (int)threadIdx.x % TX + n % KEYS * TX; }
DEVICE real *place(real *tile, int n) { return tile + place_row(n) * PITCH_S + place_column(n); }

DEVICE void put(real *tile, const real x[ROWS * KEYS]) {
#pragma unroll
    for (int n = 0; n < ROWS * KEYS; ++n) *place(tile, n) = x[n];
}
DEVICE void get(real x[ROWS * KEYS], real *tile) {
#pragma unroll
    for (int n = 0; n < ROWS * KEYS; ++n) x[n] = *place(tile, n);
}

/* Sum and maximum over the threads of a row. */
DEVICE real row_sum(real x) {
#pragma unroll
    for (int step = TX / 2; step > 0; step /= 2) x += __shfl_xor_sync(0xffffffffu, x, step);
    return x;
}
DEVICE real row_max(real x) {
#pragma unroll
    for (int step = TX / 2; step > 0; step /= 2) x = fmax(x, __shfl_xor_sync(0xffffffffu, x, step));
    return x;
}

#endif
