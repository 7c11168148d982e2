/* Tile kernels of the CPU: the arithmetic of one block of rows against one block of keys.

   A tile of scores is held transposed, S^T = K Q^T: [key][row], rows along the vector. Maxima, sums
   and corrections of the softmax are then plain vector arithmetic, and elements of K and V enter as
   broadcast scalars, straight from the caller's tensors. Only rows are packed: [column][row].

   One source, tile.inc, is compiled for each instruction set and for float and double. The
   drivers (fwd_cpu.c, bwd_cpu.c) know no type: pointers are to `real`s of the table's type, strides
   count elements. Kernels allocate nothing and may run at the same time.

   16-bit numbers are what tensors may store: `pack`, `widen`, `put` and `dots` read and write them.
   Most tables multiply reals, so that 16-bit tensors are copied as floats. Those of AVX512-BF16 and
   AMX multiply BF16 numbers, that of AMX-FP16 F16 numbers, and sum in float (tile_narrow.inc): P and dS
   are rounded in between, as on a GPU. What products read are `operand`s, in an order that the table's
   own functions make. */
#ifndef FATTNI_CORE_CPU_TILE_H
#define FATTNI_CORE_CPU_TILE_H

#include "core/base/internal.h"

/* A tile has at most 64 keys and 192 bytes of rows, 48 floats or 24 doubles: three AVX-512 vectors,
   with the 8 x 3 micro-kernel all but 5 of 32 registers; and 12 KiB per tile, so that S and a
   packed operand of 64 columns fit into the first-level cache together. 16-bit products have 32 rows: two
   of AMX's tiles. */
enum { FATTNI_TILE_KEYS = 64, FATTNI_TILE_BYTES = FATTNI_TILE_KEYS * 192 };

typedef struct fattni_tile {
    int64_t rows, keys; /* in use; packed rows beyond are zero */
    int64_t lo, hi;     /* row i sees key j when i + lo <= j <= i + hi, both counted in the tile */
} fattni_tile;

/* What comes between q.k and the softmax. */
typedef struct fattni_adjustment {
    double scale, cap; /* t = cap tanh(scale s / cap), or scale s when cap is 0 */
    double slope;      /* ALiBi: t - slope |i - j + distance| */
    int64_t distance;
    const void *bias; /* [key][row], or NULL */
    void *derivative; /* NULL, or takes dt/ds = scale (1 - (t / cap)^2), [key][row]; cap > 0 */
} fattni_adjustment;

/* Where a tile lies in the dropout mask (philox.h). */
typedef struct fattni_dropout {
    uint64_t seed;
    uint32_t stream, step, plane, T;
    int64_t i, j; /* positions of row 0 and key 0 in the whole sequence */
    double scale; /* of what is kept */
} fattni_dropout;

typedef struct fattni_cpu_kernels {
    const char *isa;
    fattn_dtype dtype; /* FATTN_F32 or FATTN_F64: what a `real` is */
    int64_t rows;      /* reals of a block, also the pitch of all [..][row] arrays */
    int64_t lanes;     /* reals of a vector */
    int64_t blocks;    /* neighbouring blocks of rows that add_rows takes at once, at most */

    /* What products read: reals, or FATTN_BF16 or FATTN_F16. Rows of operands have a multiple of operand_step elements
       (fattni_operand_width). */
    fattn_dtype operand;
    int64_t operand_step;
    /* Of a thread, before and after its calls of products; NULL: nothing to do. */
    void (*begin)(void);
    void (*end)(void);

    /* packed[d][i] = x[i][d] * factor[i], or 0 where factor is 0 or i >= rows; NULL means 1. x is
       real or 16-bit. */
    void (*pack)(int64_t rows, int64_t columns, fattn_dtype from, const void *x, int64_t stride, const void *factor,
                 void *packed);
    /* x[i][d] = packed[d][i] * factor[i] for first <= i < rows; factor NULL means 1. */
    void (*unpack)(int64_t first, int64_t rows, int64_t columns, const void *packed, const void *factor, void *x,
                   int64_t stride);
    /* out[i][d] = x[i][d], which is real or 16-bit; zero for columns <= d < pitch. */
    void (*widen)(int64_t rows, int64_t columns, fattn_dtype from, const void *x, int64_t stride, void *out,
                  int64_t pitch);
    /* y[i][d] = x[i][d], or +=, where y is real or 16-bit. */
    void (*put)(int64_t rows, int64_t columns, const void *x, int64_t x_stride, bool add, fattn_dtype to, void *y,
                int64_t y_stride);
    /* out[i] = sum_d x[i][d] y[i][d] */
    void (*dots)(int64_t rows, int64_t columns, fattn_dtype x_type, const void *x, int64_t x_stride, fattn_dtype y_type,
                 const void *y, int64_t y_stride, void *out);

    /* Operands, from real or 16-bit tensors; those of 16 bits also from float. Rows of x have `columns` elements, those
       of a copy fattni_operand_width of them.
       load_packed   of scores: rows of Q or dO
       load_keys     of scores: rows of K or V
       load_transposed   of add_keys: rows of K or V; 16 bits: transposed, [column][64] for each 64 keys
       load_rows     of add_rows: rows of Q or dO, `pitch` columns, a multiple of lanes
       With reals the last three copy rows as they are, and products take those of tensors, too. */
    void (*load_packed)(int64_t rows, int64_t columns, fattn_dtype from, const void *x, int64_t stride, void *out);
    void (*load_keys)(int64_t keys, int64_t columns, fattn_dtype from, const void *x, int64_t stride, void *out,
                      int64_t width);
    void (*load_transposed)(int64_t keys, int64_t columns, fattn_dtype from, const void *x, int64_t stride, void *out,
                            int64_t width);
    void (*load_rows)(int64_t rows, int64_t columns, fattn_dtype from, const void *x, int64_t stride, void *out,
                      int64_t pitch);
    /* P or dS, x[j][i], as operands: of add_keys at `pairs`, of add_rows at `rows`, which one of these may be NULL.
       Tables without it (NULL) multiply x itself. Pairs take FATTNI_PAIRS_BYTES; rows are [key][blocks][row], of one
       block here, and take FATTNI_ROWS_BYTES for all of them. */
    void (*round)(const fattni_tile *t, const void *x, void *pairs, void *rows);
    /* acc[d][i] -= mean[d] sum_j x[j][i], with rounded x. Only with `round`. */
    void (*remove_mean)(const fattni_tile *t, int64_t columns, const void *mean, const void *pairs, void *acc);

    /* E4M3 (numeric.h), of floats; not of tables with `round`.
       load_e4m3           out[i][d] = x[i][d]
       load_e4m3_columns   out[key][d] = x[d][column of that key] (fattn/fp8.h): x begins at key 0, a multiple of 16
       round_e4m3          64 s[j][i] is rounded to nearest even, where row i sees key j; s is in 0..1 */
    void (*load_e4m3)(int64_t rows, int64_t columns, const uint8_t *x, int64_t stride, float *out, int64_t pitch);
    void (*load_e4m3_columns)(int64_t keys, int64_t columns, const uint8_t *x, int64_t stride, float *out,
                              int64_t pitch);
    void (*round_e4m3)(const fattni_tile *t, float *s);

    /* s[j][i] = sum_d k[j][d] packed[d][i], at least where row i sees key j. */
    void (*scores)(const fattni_tile *t, int64_t columns, const void *k, int64_t stride, const void *packed, void *s);
    /* s = t - slope |i - j + distance| + bias, where row i sees key j. */
    void (*adjust)(const fattni_tile *t, const fattni_adjustment *a, void *s);
    /* mask[j][i] = scale where the element is kept, 0 where it is dropped. */
    void (*keep)(const fattni_tile *t, const fattni_dropout *d, void *mask);
    /* x[j][i] *= y[j][i], where row i sees key j. */
    void (*multiply)(const fattni_tile *t, const void *y, void *x);
    /* The same; sums[3][row] += sum_j of x before, of p y, of x after. p and x are 0 where row i does not see key j. */
    void (*multiply_and_sum)(const fattni_tile *t, const void *p, const void *y, void *x, void *sums);
    /* Online softmax: max' = max(max, max_j s), s[j][i] = 2^(factor (s - max')),
       sum = decay * sum + sum_j s, decay = 2^(factor (max - max')): exponents are at most 0 however
       large scores are, because the difference comes first. Unseen keys give exactly 0; a row that
       has seen none keeps max = -inf, sum = 0. */
    void (*softmax)(const fattni_tile *t, double factor, void *s, void *max, void *sum, void *decay);
    /* s[j][i] = 2^(factor (s - base)), sum += sum_j s, for all rows of a tile without diagonals: no maxima, infinity
       beyond the range. */
    void (*exponentials)(const fattni_tile *t, double factor, double base, void *s, void *sum);
    /* acc[d][i] = decay[i] * acc[d][i] + sum_j v[j][d] s[j][i]; decay NULL means 1. 16-bit products change d up
       to the operand's width. */
    void (*add_keys)(const fattni_tile *t, int64_t columns, const void *v, int64_t stride, const void *s,
                     const void *decay, void *acc);
    /* The same two products for few rows that see all keys of the tile. Rows of Q and O lie as in tensors, `width`
       apart, a multiple of lanes, Q zero past its columns; keys are read where they are, real or 16-bit. Work is
       proportional to the rows; bits of a row do not depend on the others. Not of tables with `round`.
       few_scores  s[j][i] = sum_d k[j][d] q[i][d]
       few_add     acc[i][d] = decay[i] * acc[i][d] + sum_j v[j][d] s[j][i] */
    void (*few_scores)(const fattni_tile *t, int64_t columns, fattn_dtype from, const void *k, int64_t stride,
                       const void *q, int64_t width, void *s);
    void (*few_add)(const fattni_tile *t, int64_t columns, fattn_dtype from, const void *v, int64_t stride,
                    const void *s, const void *decay, void *acc, int64_t width);
    /* p = 2^(factor (p - base) - l), ds = scale * p * (ds - delta); both exactly 0 where row i does
       not see key j. On entry p holds the scores and ds holds dP. lse[3][row]: base, l, and what the
       rounding of l took away, for that is an error of the whole row. */
    void (*gradient)(const fattni_tile *t, double factor, double scale, const void *lse, const void *delta, void *p,
                     void *ds);
    /* acc[j][d] += sum_i s[j][i] x[i][d]; columns is a multiple of lanes and the pitch of acc. Of `count` blocks of
       rows, t[n] for each: with more than one, s and x have all of them, and blocks that see no key of theirs have
       t[n].keys = 0. Bits are those of a call for each block. */
    void (*add_rows)(const fattni_tile *t, int64_t count, int64_t columns, const void *s, const void *x, int64_t stride,
                     void *acc);
    /* dst[i * row + j * column] += g[j][i]; a stride of 0 sums. */
    void (*add_elements)(const fattni_tile *t, const void *g, void *dst, int64_t row, int64_t column);
} fattni_cpu_kernels;

/* Appends a part of that many bytes to a workspace of *end bytes; returns where it begins. */
static inline size_t fattni_append(size_t *end, size_t bytes) {
    const size_t begin = *end;
    *end += (bytes + FATTNI_ALIGN - 1) / FATTNI_ALIGN * FATTNI_ALIGN;
    return begin;
}

enum { FATTNI_MOST_BLOCKS = 4 }; /* kernels->blocks of any table */
enum { FATTNI_PAIRS_BYTES = FATTNI_TILE_KEYS * 64, FATTNI_ROWS_BYTES = FATTNI_MOST_BLOCKS * FATTNI_PAIRS_BYTES };

/* Bytes of one of [..][row], and elements and bytes of a row of `columns` of an operand. */
static inline size_t fattni_row_bytes(const fattni_cpu_kernels *k) {
    return (size_t)k->rows * fattn_dtype_size(k->dtype);
}
static inline int64_t fattni_operand_width(const fattni_cpu_kernels *k, int64_t columns) {
    return fattni_round_up(columns, k->operand_step);
}
static inline size_t fattni_operand_bytes(const fattni_cpu_kernels *k, int64_t columns) {
    return (size_t)fattni_operand_width(k, columns) * fattn_dtype_size(k->operand);
}

/* Index 0: float, 1: double. */
extern const fattni_cpu_kernels fattni_cpu_baseline[2];
#if defined(__x86_64__)
extern const fattni_cpu_kernels fattni_cpu_avx2[2], fattni_cpu_avx512[2];
#endif
#ifdef FATTNI_HAVE_NARROW_PRODUCTS /* the compiler knows AVX512-BF16 and AMX */
extern const fattni_cpu_kernels fattni_cpu_avx512bf16, fattni_cpu_amx, fattni_cpu_amxfp16;
#endif

/* What this context runs for tensors of this dtype. */
const fattni_cpu_kernels *fattni_cpu_kernels_of(const fattn_ctx *ctx, fattn_dtype dtype);

/* Tasks that call products, on at most so many threads. Those of a stage begin when all of the stages before have
   ended. One parallel region for all: threads may sleep between two, and take longer to wake than a small call
   lasts. */
typedef struct fattni_stage {
    int64_t count;
    fattni_task run;
} fattni_stage;
void fattni_cpu_stages(const fattn_ctx *ctx, int64_t threads, const fattni_cpu_kernels *k, const fattni_stage *stages,
                       int count, void *arg);

#endif
