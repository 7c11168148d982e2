/* The built-in ops: one const fattn_op_def each, recorded like any other op.

   On the CPU their loops are for F32 and F64. The tape gives those that compute (FATTN_OP_F32_ON_CPU) 16-bit variables
   in F32 and rounds what they write; views, copies and attention take every type themselves. On a GPU they take all
   four, and compute 16-bit types in float. Row ops (norms, softmax, rope, embedding, losses) need rows whose elements
   are contiguous, as those of every variable made by an op are; the others take any strides. Work is split by shape
   alone, so bits do not depend on the number of threads.
   Code for both types is in op_<name>.inc, which for_each_real.inc includes once for each. */
#ifndef FATTNI_AUTOGRAD_OPS_OPS_H
#define FATTNI_AUTOGRAD_OPS_OPS_H

#include "autograd_c/ops/op_device.h"
#include "core/tensor/rows.h"

/* Attribute of linear, linear_residual and linear_gelu. */
typedef struct fattni_linear {
    bool early; /* fattni_product's, of w */
} fattni_linear;
extern const fattn_op_def fattni_op_linear, fattni_op_matmul, fattni_op_add, fattni_op_mul, fattni_op_gelu,
    fattni_op_silu, fattni_op_layernorm, fattni_op_rmsnorm, fattni_op_embedding, fattni_op_rope, fattni_op_heads,
    fattni_op_merge, fattni_op_cast, fattni_op_cross_entropy, fattni_op_linear_cross_entropy, fattni_op_scale,
    fattni_op_relu, fattni_op_tanh, fattni_op_reshape, fattni_op_permute, fattni_op_transpose, fattni_op_slice,
    fattni_op_concat, fattni_op_sum, fattni_op_mean, fattni_op_softmax, fattni_op_dropout, fattni_op_swiglu,
    fattni_op_geglu;

/* Checks of infer. op and name are for the error message: "linear: w is absent". */

static inline bool fattni_absent(const fattn_tensor *t) { return t->dtype == 0; }
/* in[i] is there, floating, and of in[0]'s dtype. */
fattn_status fattni_check_real(const fattn_op_call *c, const char *op, const char *name, int i);
fattn_status fattni_check_i32(const fattn_op_call *c, const char *op, const char *name, int i);
/* The elements of each row of in[i] follow one another. */
fattn_status fattni_check_contiguous(const fattn_op_call *c, const char *op, const char *name, int i);
/* in[i]'s shape is in[j]'s without the last dimension: one number per row. */
fattn_status fattni_check_per_row(const fattn_op_call *c, const char *op, const char *name, int i, const char *of,
                                  int j);
/* Inputs and out[0], counted without dimensions of 0, have at most 2^47 elements: sizes that are
   computed from them do not overflow. */
fattn_status fattni_check_extents(const fattn_op_call *c, const char *op);
/* The sizes of a product fit OpenBLAS's integers. */
fattn_status fattni_check_product(const fattn_op_call *c, const char *op, int64_t M, int64_t N, int64_t K);
/* FATTN_E_SHAPE: "<op>: <name> is [..], <other> is [..]: <rule>". */
fattn_status fattni_misfit(const fattn_op_call *c, const char *op, const char *name, int i, const char *other, int j,
                           const char *rule);
/* First line of a backward: wanted gradients have their inputs' dtypes; on a GPU they may be F32 beside
   16 bits. */
fattn_status fattni_check_gradients(const fattn_op_call *c, const char *op);
/* t's shape and dtype, row-major at data. */
fattn_tensor fattni_row_major(const fattn_tensor *t, void *data);
/* out[0] = the shape and dtype of in[i], row-major. */
void fattni_out_like(fattn_op_call *c, int i);

/* Workspace in pieces of 256 aligned bytes: room in infer, carve in the same order when it runs. */
static inline size_t fattni_room(size_t bytes) { return (bytes + FATTNI_ALIGN - 1) / FATTNI_ALIGN * FATTNI_ALIGN; }
static inline void *fattni_carve(void **workspace, size_t bytes) {
    char *p = *workspace;
    *workspace = bytes ? p + fattni_room(bytes) : p;
    return bytes ? p : NULL;
}
static inline size_t fattni_tensor_bytes(const fattn_tensor *t) {
    return (size_t)fattn_tensor_numel(t) * fattn_dtype_size((fattn_dtype)t->dtype);
}

/* The same for t or its gradient, which may be F32 beside 16 bits. */
static inline size_t fattni_widest_bytes(const fattn_tensor *t) {
    const size_t size = fattn_dtype_size((fattn_dtype)t->dtype);
    return (size_t)fattn_tensor_numel(t) * (size < sizeof(float) ? sizeof(float) : size);
}

/* Loops over elements on the CPU (op_each.c). Operand k of a piece begins at p[k], step[k] elements apart. */
enum { FATTNI_OPERANDS = 4 };
typedef void (*fattni_loop)(void *const *p, const int64_t *step, int64_t n, const void *arg);
/* f_by_isa[] of a loop f (core/base/isa_clones.h). */
#define FATTNI_LOOPS_BY_ISA(f)                                                                                         \
    FATTNI_CLONES(fattni_loop, f, (void *const *p, const int64_t *step, int64_t n, const void *a), (p, step, n, a))
/* Runs `run` over the elements of t[0] in pieces. The others have its shape or broadcast to it:
   trailing dimensions aligned, 1 or missing repeats. */
void fattni_each(const fattn_ctx *ctx, const fattn_tensor *const *t, int n, fattni_loop run, const void *arg);
/* The same for one function of elements, on the context's device: its loops on the CPU, and its name for
   a GPU's kernel. A loop's arg is a fattni_how. */
typedef struct fattni_elements {
    fattni_loop f32, f64;
    enum fattni_element what;
    double value;
} fattni_elements;
typedef struct fattni_how {
    bool fresh; /* first, for loops that need no more: d is overwritten, not added to */
    double value;
} fattni_how;
extern const fattni_elements fattni_elementwise_product; /* d (+)= x y (op_mul.c) */
fattn_status fattni_each_element(fattn_ctx *ctx, const fattni_elements *f, const fattn_tensor *const *t, int n,
                                 bool fresh);
/* d (+)= factor x; x broadcasts to d. */
fattn_status fattni_scale(fattn_ctx *ctx, const fattn_tensor *d, const fattn_tensor *x, double factor, bool fresh);
/* True when b broadcasts to a's shape. */
bool fattni_broadcasts(const fattn_tensor *b, const fattn_tensor *a);
/* d (+)= the sum of x, or of x*y, over the dimensions in which d broadcasts to x; fixed order.
   y NULL, or broadcasting to x. The workspace depends on the device and the shapes of d and x alone. */
size_t fattni_reduce_workspace(const fattn_ctx *ctx, const fattn_tensor *d, const fattn_tensor *x);
fattn_status fattni_reduce(fattn_ctx *ctx, const fattn_tensor *d, bool fresh, const fattn_tensor *x,
                           const fattn_tensor *y, void *workspace);
/* d = the sum of x over divisor, rounded once. */
fattn_status fattni_reduce_divided(fattn_ctx *ctx, const fattn_tensor *d, const fattn_tensor *x, double divisor,
                                   void *workspace);

/* For infer, after the checks: an op on BF16 tensors of the CPU gets them as they are, not in F32, if products of this
   size are computed so. Its gradients may then be F32 beside BF16. NOMEM. */
fattn_status fattni_choose_products(fattn_op_call *c, int64_t M, int64_t N, int64_t K);
/* Products through OpenBLAS, oneDNN or cuBLAS (product.c). C[..,M,N] = op(A) op(B) (+ C or onto) over the same leading
   dimensions, any strides: what a BLAS cannot read or write in its place goes through the
   workspace, whose size depends on the device, shapes and strides alone. */
/* The norm of a row x: ((x - mean) r) gain + bias, in x's dtype; mean is 0 unless it is centred (op_norm.c). */
typedef struct fattni_row_norm {
    const void *gain, *bias; /* bias NULL: none */
    double eps;
    bool centred;
} fattni_row_norm;
typedef struct fattni_product {
    const fattn_tensor *a, *b, *c;
    bool trans_a, trans_b, add;
    const void *row;          /* [N] added to every row of C, not with add; NULL: none */
    const fattn_tensor *onto; /* C's shape and dtype, apart from C: added to it, not with add; NULL: none */
    const fattn_tensor
        *gelu;       /* where gelu(C) goes: C itself, or as C apart from it; not with add or onto; NULL: none */
    bool *activated; /* with gelu: whether it has been written; else the caller does it */
    bool early;      /* B may be read before the kernels before have ended; only where nothing of theirs writes it */
    const fattni_row_norm *norm; /* in A's place its norm, where fattni_product_code.takes_norm says so; NULL: none */
} fattni_product;
size_t fattni_product_workspace(const fattn_ctx *ctx, const fattni_product *p);
fattn_status fattni_product_run(fattn_ctx *ctx, const fattni_product *p, void *workspace);

/* d [N] (+)= the sum of the rows of x [R,N], row-major. */
size_t fattni_sum_rows_workspace(const fattn_ctx *ctx, const fattn_tensor *d, const fattn_tensor *x);
fattn_status fattni_sum_rows(fattn_ctx *ctx, const fattn_tensor *d, bool fresh, const fattn_tensor *x, void *workspace);

/* x [..,K] as a matrix t [R,K]: x itself when one stride walks all its rows, else a row-major copy
   that lies in the workspace. */
typedef struct fattni_flat {
    fattn_tensor t;
    bool in_place;
} fattni_flat;
fattni_flat fattni_flatten(const fattn_tensor *x); /* of a copy, t.data is NULL */
static inline size_t fattni_flat_bytes(const fattni_flat *f) { return f->in_place ? 0 : fattni_widest_bytes(&f->t); }
/* Takes the copy's place from the workspace; read also fills it from x. */
void fattni_flat_place(fattni_flat *f, void **workspace);
fattn_status fattni_flat_read(fattn_ctx *ctx, fattni_flat *f, const fattn_tensor *x, void **workspace);
/* d (+)= the copy, with d's dimensions. */
fattn_status fattni_flat_add_to(fattn_ctx *ctx, const fattni_flat *f, const fattn_tensor *d, bool fresh);

#endif
