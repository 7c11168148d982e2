/* F32 and F64 tiles in shared memory, and their products by fused multiply-add: shared by forward
   and backward. Include after defining K_F64, K_D, K_BM, K_BN, K_WARPS and SPLIT.

   TX x TY threads share O and the gradients. Thread (tx, ty) has the rows ty, ty + TY, ... and of
   each the vectors tx, tx + TX, ... of 16 bytes. The threads of one row are neighbours in one warp.

   S_TX x S_TY groups of SPLIT neighbours share S. A group has the rows sy, sy + S_TY, ... and the
   columns sx, sx + S_TX, ...; its threads sum over every SPLIT-th vector of the depth, and then
   each keeps one SPLIT-th of the rows: where S is small and the head long, larger blocks per load
   from shared memory.

   A tile's rows are one vector longer than its columns: then eight rows' vectors at one column lie
   in different banks. */
#ifndef FATTNI_SIMT_TILE_H
#define FATTNI_SIMT_TILE_H

#include "ptx/cp_async.h"
#include "ptx/ldmatrix.h"
#include "real.h"

enum {
    D = K_D, BM = K_BM, BN = K_BN, THREADS = 32 * K_WARPS,
    TX = D / 8 < 16 ? D / 8 : 16, TY = THREADS / TX,
    ROWS = BM / TY, VECTORS = D / (TX * VECTOR),    /* a thread's part of O, dQ */
    S_TX = SPLIT > 1 ? 8 : TX, S_TY = THREADS / SPLIT / S_TX,
    GROUP_ROWS = BM / S_TY, KEYS = BN / S_TX,       /* a group's part of S */
    S_ROWS = GROUP_ROWS / SPLIT, PLACES = S_ROWS * KEYS, /* a thread's */
    PITCH = D + VECTOR, PITCH_S = BN + VECTOR,
    MOST = 8                                        /* rows or keys of a thread, at most */
};
static_assert(SPLIT == 1 || SPLIT == 4, "keep_half");
static_assert(S_TX * S_TY * SPLIT == THREADS && S_ROWS * SPLIT * S_TY == BM && KEYS * S_TX == BN,
              "S");
static_assert(TX * TY == THREADS && ROWS * TY == BM && VECTORS * TX * VECTOR == D, "O, dQ");
static_assert(ROWS <= MOST && BM % VECTOR == 0 && BN % VECTOR == 0, "products");

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

/* This thread's group of S: its part of the depth, its first row and column. Neighbouring groups
   are four columns apart when SPLIT vectors of a row are read at once, again for the banks. */
DEVICE int split_part(void) { return (int)threadIdx.x % SPLIT; }
DEVICE int group_row(void) { return (int)threadIdx.x / (SPLIT * S_TX); }
DEVICE int group_column(void) {
    const int sx = (int)threadIdx.x / SPLIT % S_TX;
    return SPLIT > 1 ? sx % 2 * 4 + sx / 2 : sx;
}

/* Threads whose number differs in `bit` exchange: each keeps one half of the 2 `count` sums. */
DEVICE void keep_half(real *sum, int count, int bit) {
    const int upper = (int)threadIdx.x & bit;
#pragma unroll
    for (int n = 0; n < count; ++n) {
        const real given = upper ? sum[n] : sum[n + count], own = upper ? sum[n + count] : sum[n];
        sum[n] = own + __shfl_xor_sync(0xffffffffu, given, bit);
    }
}

/* x = A B^T over `depth` columns, a multiple of SPLIT * VECTOR: this thread's part of S. */
DEVICE void product_nt(real x[PLACES], const real *a, const real *b, int depth) {
    const real *const a0 = a + group_row() * PITCH + split_part() * VECTOR,
               *const b0 = b + group_column() * PITCH + split_part() * VECTOR;
    real sum[GROUP_ROWS * KEYS];
#pragma unroll
    for (int n = 0; n < GROUP_ROWS * KEYS; ++n) sum[n] = 0;
#pragma unroll 1
    for (int k = 0; k < depth; k += SPLIT * VECTOR) {
        vector u[GROUP_ROWS];
#pragma unroll
        for (int r = 0; r < GROUP_ROWS; ++r) u[r] = *(const vector *)(a0 + r * S_TY * PITCH + k);
#pragma unroll
        for (int c = 0; c < KEYS; ++c) {
            const vector w = *(const vector *)(b0 + c * S_TX * PITCH + k);
#pragma unroll
            for (int e = 0; e < VECTOR; ++e)
#pragma unroll
                for (int r = 0; r < GROUP_ROWS; ++r)
                    sum[r * KEYS + c] = fma(u[r].e[e], w.e[e], sum[r * KEYS + c]);
        }
    }
    /* Halve the rows until each thread has its own. */
    if (SPLIT == 4) keep_half(sum, GROUP_ROWS * KEYS / 2, 2);
    if (SPLIT == 4) keep_half(sum, GROUP_ROWS * KEYS / 4, 1);
#pragma unroll
    for (int n = 0; n < PLACES; ++n) x[n] = sum[n];
}

/* x[R][VECTORS] += A B over `depth`, a multiple of VECTOR: the rows of a, [..][PITCH_S]. */
DEVICE void product_nn(vector *x, int R, const real *a, const real *b, int depth) {
    const real *const a0 = a + threadIdx.x / TX * PITCH_S,
               *const b0 = b + threadIdx.x % TX * VECTOR;
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

/* x[R][VECTORS] += A^T B over `depth` rows of a, [..][PITCH_S], and of b; R is a multiple of
   VECTOR. */
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
   place_row(n), column place_column(n). Going through memory lets a loop over elements stay a
   loop. */
DEVICE int place_row(int n) { return group_row() + (split_part() * S_ROWS + n / KEYS) * S_TY; }
DEVICE int place_column(int n) { return group_column() + n % KEYS * S_TX; }
DEVICE real *place(real *tile, int n) { return tile + place_row(n) * PITCH_S + place_column(n); }

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
