/* The tape's kernels: their arguments, and the host functions in front of them.

   Kernels compute in float or double. Float kernels read and write F32, F16 and BF16 in any
   mixture: a 16-bit variable may have an F32 gradient. Sums over many elements are in double, in an
   order that shapes alone decide. */
#ifndef FATTNI_AUTOGRAD_OPS_OP_CUDA_H
#define FATTNI_AUTOGRAD_OPS_OP_CUDA_H

#include "core/cuda/grid.h"

enum { FATTNI_PACK = 8 }; /* elements that a thread takes at once where they lie side by side */

/* Rows of a tensor (core/tensor/rows.h): row number n begins walk_offset(n) elements after the first. */
typedef struct fattni_walk {
    int64_t shape[FATTN_MAX_DIMS], stride[FATTN_MAX_DIMS];
    int32_t n, reserved;
} fattni_walk;

typedef struct fattni_operand { /* a tensor's elements */
    void *p;
    int32_t dtype, reserved;
} fattni_operand;

/* d (+)= f(x, y, z) over a grid whose operand 0 is d (op_each.cu). */
typedef struct fattni_element_args {
    fattni_grid grid;
    fattni_operand t[4];
    double value;
    int32_t what; /* enum fattni_element */
    int32_t fresh;
    int32_t vector; /* innermost, all lie side by side or are one element; 16-byte accesses */
    int32_t operands;
    int32_t dtype; /* of all operands; 0: they differ */
    int32_t flat;  /* vector, and element n of every operand is number n in memory */
} fattni_element_args;

/* Columns that a block sums, where operands are rows side by side: of a part of the rows, of all. */
enum { FATTNI_BLOCK_COLUMNS = 32 * FATTNI_PACK, FATTNI_TALL_COLUMNS = 2 * FATTNI_PACK };
enum { FATTNI_TALL_THREADS = 512 };
enum { FATTNI_PARTS_THREADS = 1024 }; /* of a block that adds parts */

/* d (+)= the sum of x y over what d broadcasts, over divisor: operands d, x, y. parts > 1: sums of each part to
   partial[part][kept] instead. `lanes` threads share one sum. */
typedef struct fattni_sum_args {
    fattni_grid kept, reduced;
    fattni_operand d, x, y;
    double *partial;
    double divisor;
    int64_t parts;
    int32_t fresh, lanes;
    int32_t dtype, reserved; /* of x and y; 0: they differ */
} fattni_sum_args;

enum { FATTNI_PART_SUMS = 3 };
/* d (+)= the sum over parts of partial[part * stride + e], e < grid.count, over divisor; for each d. */
typedef struct fattni_parts_args {
    struct {
        fattni_grid grid;
        fattni_operand d;
        const double *partial;
        int32_t fresh, blocks;
    } of[FATTNI_PART_SUMS];
    int64_t parts, stride;
    double divisor;
} fattni_parts_args;

/* d = dy gelu'(x) of rows of `columns` elements side by side; partial[part][column]: sums over a part of the rows. */
typedef struct fattni_gelu_back_args {
    fattni_operand d, x, dy;
    double *partial;
    int64_t rows, columns, parts;
    int32_t dtype, reserved; /* of all; 0: they differ */
} fattni_gelu_back_args;

enum { FATTNI_NORM_PACKS = 4 }; /* of a lane, where a warp holds a row */
typedef struct fattni_norm_args {
    fattni_walk x, y, dx; /* y: output, and its gradient in backward */
    fattni_operand in, out, gain, bias, d_in;
    void *statistics; /* REAL r[rows], mean[rows] */
    double *partial;  /* [parts][2][C]: sums of dy h, and of dy; [parts][3][C]: of dx, too */
    double eps;
    int64_t rows, C, parts;
    int32_t centred, fresh;
    int32_t dtype, reserved; /* of all operands; 0: they differ */
} fattni_norm_args;

/* Rows of softmax; y: output, and its gradient in backward. */
typedef struct fattni_softmax_args {
    fattni_walk x, y, dx;
    fattni_operand in, out, d_out, d_in;
    int64_t rows, C;
    int32_t fresh, reserved;
} fattni_softmax_args;

typedef struct fattni_dropout_args {
    fattni_grid grid; /* operands d, x */
    fattni_operand d, x;
    const int32_t *step; /* NULL: 0 */
    uint64_t seed;
    double scale;
    uint32_t stream, T;
    int32_t fresh;
    int32_t vector; /* both lie side by side: 16-byte accesses */
} fattni_dropout_args;

typedef struct fattni_rope_args {
    fattni_operand to, from;
    int64_t shape[4], to_stride[4], from_stride[4]; /* [B,H,S,D] */
    void *cos_sin;                                  /* REAL [S][2][D/2] */
    const int32_t *positions;                       /* [S] or NULL: row s is at `position` + s */
    int64_t position_step;
    double base, position;
    int32_t back, fresh;
    int32_t pack;            /* pairs of a thread: 1 or FATTNI_PACK */
    int32_t heads_inside;    /* both lie as [B,S,H,D]: so are threads numbered */
    int32_t dtype, reserved; /* of both; 0: they differ */
} fattni_rope_args;

typedef struct fattni_embedding_args {
    fattni_walk table, ids, out;
    int64_t id_columns, id_step;  /* of a row of ids */
    fattni_operand rows, entries; /* [R,C] and [V,C] */
    const int32_t *id;
    int64_t R, V, C;
    int32_t pack, reserved; /* elements of a thread: 1 or FATTNI_PACK */
} fattni_embedding_args;

enum { FATTNI_LOSS_THREADS = 640 }; /* of a row, at most */
enum { FATTNI_LOSS_ROWS = 8 };      /* of a block, where a warp has a row */
/* linear_cross_entropy's gradients in F16, before they are those of a mean and have the loss scale, in this unit: a
   probability has all bits from 2^-22 on, and a dx of twice a weight of 127 is finite. */
enum { FATTNI_LOSS_UNIT = 256 };
/* Rows of logits against targets (op_cross_entropy.cu). `kept` counts the rows that are not
   ignored. */
typedef struct fattni_loss_args {
    fattni_walk x, dx, target;
    int64_t target_columns, target_step;
    fattni_operand logits, d, out; /* out: the scalar, or the gradient that reaches it */
    const int32_t *id;
    double *kept, *loss;         /* loss[row] */
    double *state;               /* [row][2]: maximum, sum of exp(x - max); NULL: not kept */
    float *rest;                 /* 1/(kept unit), if gradients are those of a sum times the unit; NULL: of a mean */
    int64_t first, rows, all, V; /* rows first..first+rows-1 of `all` */
    int64_t width;               /* columns of a row, V of them classes: the others' gradient is 0 */
    int32_t ignore, fresh, gradients;
    int32_t pack;        /* elements of a thread at once: 1 or FATTNI_PACK */
    int32_t dtype;       /* of logits and d; 0: they differ */
    int32_t keeps;       /* BF16 rows stay in shared memory between their sum and their gradient */
    int32_t fours;       /* targets lie one behind the other, in packs of four */
    int32_t row_threads; /* of a row: 32, and FATTNI_LOSS_ROWS rows are a block, or a block */
} fattni_loss_args;

#ifdef __CUDACC__
static __device__ inline int64_t walk_offset(const fattni_walk *w, int64_t row) {
    int64_t offset = 0;
    for (int d = w->n - 1; d > 0; --d) {
        offset += row % w->shape[d] * w->stride[d];
        row /= w->shape[d];
    }
    return offset + row * w->stride[0];
}
#else
#include "core/cuda/launch.h"
#include "autograd_c/ops/op_device.h"

/* Rows can be read and written in packs. */
bool fattni_rows_in_packs(const fattn_tensor *t);

static inline fattni_operand fattni_operand_of(const fattn_tensor *t) { return (fattni_operand){t->data, t->dtype, 0}; }
fattni_walk fattni_walk_of(const fattn_tensor *t);
/* The dtype that all of them have, but for those that are absent (NULL); 0: none. */
int32_t fattni_common_dtype(const fattni_operand *const *t, int n);

/* Starts name_f64 or name_f32, by the dtype in which it computes. */
#define FATTNI_START_REAL(ctx, dtype, name, grid, block, args)                                                         \
    ((dtype) == FATTN_F64 ? FATTNI_START(ctx, fattn_##name##_f64, grid, block, args)                                   \
                          : FATTNI_START(ctx, fattn_##name##_f32, grid, block, args))
#define FATTNI_KERNEL(name, type)                                                                                      \
    extern void fattn_##name##_f32(type);                                                                              \
    extern void fattn_##name##_f64(type)

/* d (+)= f(x, y, z), t = {d, x, y, z} or fewer; value is FATTNI_FILL's or FATTNI_SCALE's. */
fattn_status fattni_cuda_each(fattn_ctx *ctx, enum fattni_element what, const fattn_tensor *const *t, int operands,
                              bool fresh, double value);
/* d (+)= the sum of `parts` partial results, `stride` apart, over divisor, one per element of d; for n of at most
   FATTNI_PART_SUMS d in one launch. */
typedef struct fattni_part_sum {
    const fattn_tensor *d;
    const double *partial;
    bool fresh;
} fattni_part_sum;
fattn_status fattni_cuda_add_parts(fattn_ctx *ctx, const fattni_part_sum *of, int n, int64_t parts, int64_t stride,
                                   double divisor);
#endif

#endif
