/* fattn/tape.h - eager reverse-mode autograd. An op runs at once and records what backward needs.

   Values are in the tape's arena. It grows during the first step; the reset after it replaces its
   chunks by one block, which later steps reuse: a step of the same shapes does not allocate. Memory of
   gradients of intermediate variables is reused during backward, unless kept. Second derivatives are
   not supported. */
#ifndef FATTN_TAPE_H
#define FATTN_TAPE_H

#include <fattn/attention.h>

typedef struct fattn_tape fattn_tape;
typedef struct fattn_var {
    int32_t id;
} fattn_var; /* index on its tape; 0 = none or failed */
/* FROZEN: no gradient, grad is not read. Nothing that is recorded into a fattn_graph may write the value of a frozen
   parameter that ops of the same graph use: their kernels may read it before those before them have ended.

   ONE_PASS, where steps have one backward pass: it stores the gradient, whatever grad held, 0 where none arrives, and
   optimizers leave grad as it is: nobody writes zeros to add to them. On a CPU this takes as long, for OpenBLAS itself
   writes zeros first. Where a pass does not use the parameter, grad is still that of an earlier pass. Parameters that
   share a grad have it all, or none has. */
enum { FATTN_PARAM_FROZEN = 1u << 0, FATTN_PARAM_NO_DECAY = 1u << 1, FATTN_PARAM_ONE_PASS = 1u << 2 };
typedef struct fattn_param {  /* outlives the steps; the caller owns both tensors */
    fattn_tensor value, grad; /* row-major; grad: value's shape and dtype, or F32 beside 16 bits (an
                                 optimizer takes it beside F64, too); but for ONE_PASS the caller
                                 zeroes it at first, fattn_adamw_step after each use */
    const char *name;
    uint32_t flags, reserved;
} fattn_param;

FATTN_API FATTN_CHECKED fattn_status fattn_tape_create(fattn_ctx *ctx, fattn_tape **out);
FATTN_API void fattn_tape_destroy(fattn_tape *t); /* NULL is allowed */
FATTN_API void fattn_tape_reset(fattn_tape *t);   /* clears nodes and status, keeps the memory */
FATTN_API FATTN_CHECKED fattn_status fattn_tape_status(const fattn_tape *t); /* first failure, sticky */
/* Adds d(scalar)/d(param) into the grad of every param in use; scalar has one element. STATE: called
   twice on one graph, or scalar depends on no param that is not frozen. A failure in an op's backward
   leaves the gradients of params partly added, or stored (FATTN_PARAM_ONE_PASS). */
FATTN_API FATTN_CHECKED fattn_status fattn_tape_backward(fattn_tape *t, fattn_var scalar);
/* The same times *seed, of one element and a floating dtype, on the context's device, where it is read when the pass
   runs: a captured graph takes the number of the replay. It is rounded to the scalar's dtype, in which a large one may
   overflow. For a loss scale, fattn_adamw_loss_scale (fattn/optim.h): gradients then have that factor. Also ARG, SHAPE,
   DTYPE, DEVICE: the seed is not as described. */
FATTN_API FATTN_CHECKED fattn_status fattn_tape_backward_from(fattn_tape *t, fattn_var scalar,
                                                              const fattn_tensor *seed);
/* Views into the arena, valid until reset. grad: after backward, of a param in use or a variable
   that was kept; STATE otherwise. A view and its base share one gradient, the sum of both. */
FATTN_API FATTN_CHECKED fattn_status fattn_tape_value(fattn_tape *t, fattn_var v, fattn_tensor *view);
FATTN_API FATTN_CHECKED fattn_status fattn_tape_grad(fattn_tape *t, fattn_var v, fattn_tensor *view);
/* Before backward: do not recycle v's gradient. */
FATTN_API FATTN_CHECKED fattn_status fattn_tape_keep_grad(fattn_tape *t, fattn_var v);
FATTN_API FATTN_CHECKED fattn_status fattn_tape_item(fattn_tape *t, fattn_var v, double *out); /* syncs */

/* No gradient; not copied: its elements must stay until backward has run, or the reset. */
FATTN_API fattn_var fattn_input(fattn_tape *t, const fattn_tensor *x);
FATTN_API fattn_var fattn_use(fattn_tape *t, fattn_param *p); /* gradient is added into p->grad, or stored */

/* After a failure every op returns {0} and does nothing: check once, at backward. [..] = any leading dimensions.
   Floating dtypes must agree unless stated otherwise: F64, F32, F16 or BF16. The last two are computed in F32 and
   rounded once per result, on both devices; a 16-bit parameter may have an F32 gradient. An id or a target out of range
   is ARG on the CPU; on a GPU, where checking would need a synchronisation, its row or the loss becomes NaN. */
FATTN_API fattn_var fattn_op_linear(fattn_tape *t, fattn_var x, fattn_var w,
                                    fattn_var bias); /* x [..,K] w [N,K] bias [N] or {0}: x w^T + b */
/* residual + x w^T + b; the residual has the product's shape. A GPU adds it inside the product; without cuBLASLt's
   help, and where a CPU multiplies BF16 as it is, x w^T + b is rounded first. */
FATTN_API fattn_var fattn_op_linear_residual(fattn_tape *t, fattn_var x, fattn_var w, fattn_var bias,
                                             fattn_var residual);
/* s, what linear_residual gives, and *normed = layernorm(s): one op with the bits of these two but for bias's gradient.
   A GPU sums that while it computes s's, before this is rounded to 16 bits: of F32, F16 and BF16, up to 1024 columns in
   multiples of 8. ARG: normed is NULL. */
FATTN_API fattn_var fattn_op_linear_norm(fattn_tape *t, fattn_var x, fattn_var w, fattn_var bias, fattn_var residual,
                                         fattn_var gain, fattn_var norm_bias, float eps, fattn_var *normed);
/* gelu(x w^T + b), tanh form. On a GPU it is one op: with BF16, and of one row with all but F64, gelu is applied in the
   product, to what is not rounded yet; backward sums bias's gradient while it computes gelu's. On a CPU it is linear
   and gelu. */
FATTN_API fattn_var fattn_op_linear_gelu(fattn_tape *t, fattn_var x, fattn_var w, fattn_var bias);
/* linear(norm(x), w, bias), the norm being layernorm or, with FATTN_NORM_RMS and without norm_bias, rmsnorm; with
   FATTN_LINEAR_GELU linear_gelu. These are the ops that it records, but for a row of F32, F16 or BF16 on a GPU whose
   inputs want no gradients: up to 2048 columns in multiples of 8, in memory aligned to 16 bytes, are normalised inside
   the product, with sums in another order. ARG: other flags; norm_bias with FATTN_NORM_RMS. */
enum { FATTN_NORM_RMS = 1u << 0, FATTN_LINEAR_GELU = 1u << 1 };
FATTN_API fattn_var fattn_op_norm_linear(fattn_tape *t, fattn_var x, fattn_var gain, fattn_var norm_bias, float eps,
                                         fattn_var w, fattn_var bias, uint32_t flags);
FATTN_API fattn_var fattn_op_matmul(fattn_tape *t, fattn_var a, fattn_var b, int trans_a,
                                    int trans_b);                          /* [..,M,K] x [..,K,N], same leading dims */
FATTN_API fattn_var fattn_op_add(fattn_tape *t, fattn_var a, fattn_var b); /* b broadcasts to a */
FATTN_API fattn_var fattn_op_mul(fattn_tape *t, fattn_var a, fattn_var b); /* b broadcasts to a */
FATTN_API fattn_var fattn_op_gelu(fattn_tape *t, fattn_var x);             /* tanh form (arXiv 1606.08415) */
FATTN_API fattn_var fattn_op_silu(fattn_tape *t, fattn_var x);             /* x * sigmoid(x) */
FATTN_API fattn_var fattn_op_relu(fattn_tape *t, fattn_var x);             /* max(x, 0); slope 0 at 0; NaN stays */
FATTN_API fattn_var fattn_op_tanh(fattn_tape *t, fattn_var x);
/* factor x; ARG unless factor is finite in F32, for F64 in F64. */
FATTN_API fattn_var fattn_op_scale(fattn_tape *t, fattn_var x, double factor);
/* up silu(gate) and up gelu(gate) (Shazeer, arXiv 2002.05202): one shape, any strides, so that both may be slices of
   one product. What the activation gives is not stored. */
FATTN_API fattn_var fattn_op_swiglu(fattn_tape *t, fattn_var gate, fattn_var up);
FATTN_API fattn_var fattn_op_geglu(fattn_tape *t, fattn_var gate, fattn_var up);
/* Over n dimensions of x, each named once, n 0 over all; keep: these stay, with one element, else they go: all gone is
   a scalar. Summed in double, rounded once. mean: SHAPE where it would be of no elements; a sum of none is 0. */
FATTN_API fattn_var fattn_op_sum(fattn_tape *t, fattn_var x, const int *dims, int n, int keep);
FATTN_API fattn_var fattn_op_mean(fattn_tape *t, fattn_var x, const int *dims, int n, int keep);
/* exp(x - max) / sum of exp(x - max) over the last dimension, whose elements must be contiguous. A row of only
   -infinity becomes 0; a NaN or +infinity makes its row NaN. */
FATTN_API fattn_var fattn_op_softmax(fattn_tape *t, fattn_var x);
/* Training dropout (Srivastava et al. 2014): x 32768/(32768 - T), T = round(32768 p), or 0 with probability T/32768.
   p 0 is a view of x; ARG unless p is 0 or T is in 1..32767. The mask is a function of rng, step and the element's
   number, the same on every device and in backward. rng.stream is the call site. step: an I32 scalar, or {0} for 0;
   read when the op runs, so that a captured graph draws new masks once it has changed. */
FATTN_API fattn_var fattn_op_dropout(fattn_tape *t, fattn_var x, float p, fattn_rng rng, fattn_var step);
/* Over the last dimension of x [..,C], whose elements must be contiguous; gain and bias [C], bias may be {0}.
   layernorm (Ba et al., arXiv 1607.06450): (x - mean) / sqrt(mean((x - mean)^2) + eps) gain + bias.
   rmsnorm (Zhang and Sennrich, arXiv 1910.07467): x / sqrt(mean(x^2) + eps) gain. ARG: eps is not finite or below 0. */
FATTN_API fattn_var fattn_op_layernorm(fattn_tape *t, fattn_var x, fattn_var gain, fattn_var bias, float eps);
FATTN_API fattn_var fattn_op_rmsnorm(fattn_tape *t, fattn_var x, fattn_var gain, float eps);
/* Row ids[..] of table [V,C], whose rows must be contiguous: ids I32 [..] -> [..,C]. At most 2^31 - 1 ids. */
FATTN_API fattn_var fattn_op_embedding(fattn_tape *t, fattn_var table, fattn_var ids);
/* Rotary positions (Su et al., arXiv 2104.09864) of x [B,H,S,D], D even: row s turns the pair (x[i], x[i + D/2]) by
   (position + s) base^(-2i/D). ARG: base is not finite or not above 0. */
FATTN_API fattn_var fattn_op_rope(fattn_tape *t, fattn_var x, float base, int64_t position);
/* The same with row s at positions[s], I32 [S]: rows that do not follow each other (fattn/context_parallel.h). */
FATTN_API fattn_var fattn_op_rope_at(fattn_tape *t, fattn_var x, float base, fattn_var positions);
FATTN_API fattn_var fattn_op_heads(fattn_tape *t, fattn_var x, int first, int n,
                                   int head_dim);               /* [B,S,C] -> [B,n,S,head_dim], a view of the columns
                                                                   from first*head_dim on; ARG if some are missing */
FATTN_API fattn_var fattn_op_merge(fattn_tape *t, fattn_var x); /* [B,H,S,D] -> [B,S,H*D] */
/* The shape of a variable, any dtype. These are views, except as stated: nothing is copied, and their gradient is
   written into x's. An x whose elements share addresses (an input with a stride of 0) is copied. Ops that need
   contiguous rows take a permuted x as fattn_op_cast to its own dtype, which copies it row-major. */
FATTN_API fattn_var fattn_op_reshape(fattn_tape *t, fattn_var x, int ndim,
                                     const int64_t *shape); /* row-major order; one dimension may be -1: what is left;
                                                               a copy where strides cannot express it */
FATTN_API fattn_var fattn_op_permute(fattn_tape *t, fattn_var x, int ndim,
                                     const int *order); /* dimension d of y is dimension order[d] of x */
FATTN_API fattn_var fattn_op_transpose(fattn_tape *t, fattn_var x, int dim, int other); /* exchanges two dimensions */
FATTN_API fattn_var fattn_op_slice(fattn_tape *t, fattn_var x, int dim, int64_t begin,
                                   int64_t end); /* elements begin..end-1 along dim; ARG if they are not all there */
FATTN_API fattn_var fattn_op_concat(fattn_tape *t, const fattn_var *x, int n,
                                    int dim); /* 1..64 of one dtype, one after the other along dim: a copy */
/* -> o, laid out [B,S,H,D]. With FATTN_FP8 in p->flags the op makes the 8-bit copies and keeps none; q and k come from
   fattn_op_rope, if at all, and not from rope_base (fattn/fp8.h), since backward reads turned ones, too. */
FATTN_API fattn_var fattn_op_attention(fattn_tape *t, fattn_var q, fattn_var k, fattn_var v,
                                       const fattn_attention_params *p);
typedef struct fattn_attention_vars { /* absent = {0} */
    uint32_t struct_size, reserved;
    fattn_var q, k, v, bias, alibi, sink, seqlens_q, seqlens_k, cu_seqlens_q, cu_seqlens_k;
    fattn_var rng_step; /* I32 scalar, of dropout: read when forward and backward run, as fattn_op_dropout's */
    uint32_t reserved2;
} fattn_attention_vars;
FATTN_API fattn_var fattn_op_attention_ex(fattn_tape *t, const fattn_attention_vars *x, const fattn_attention_params *p,
                                          fattn_var *lse); /* lse: NULL, or a variable with gradient */
/* x in another floating dtype, rounded to nearest, ties to even; in its own a view of x, or a row-major copy where its
   elements are not. The gradient is cast back. DTYPE: one of them is an integer. */
FATTN_API fattn_var fattn_op_cast(fattn_tape *t, fattn_var x, fattn_dtype to);
/* Mean of -log softmax(logits)[target] over the rows with target != ignore; no such row: 0.
   logits [..,V], target I32 [..]; the result is a scalar, F32 (F64 for F64 logits). */
FATTN_API fattn_var fattn_op_cross_entropy(fattn_tape *t, fattn_var logits, fattn_var target, int32_t ignore);
/* cross_entropy(linear(x, w)) by chunks of rows, loss and gradient together: the logits are never
   stored as a whole. */
FATTN_API fattn_var fattn_op_linear_cross_entropy(fattn_tape *t, fattn_var x, fattn_var w, fattn_var target,
                                                  int32_t ignore);
/* The same when w [Vp,K] has more rows than there are classes, as a table padded for faster products has: softmax and
   targets are over rows 0..classes-1. The gradient of the other rows, which must be finite, is exactly 0.
   ARG: classes is not in 0..Vp. */
FATTN_API fattn_var fattn_op_linear_cross_entropy_padded(fattn_tape *t, fattn_var x, fattn_var w, fattn_var target,
                                                         int32_t ignore, int64_t classes);

/* User-defined ops. The built-in ops above use the same interface. The functions of an op may use
   other tapes and read values of this one, but not record on it, reset it, run its backward or destroy
   it: STATE. */
typedef struct fattn_op_call {
    uint32_t struct_size, flags; /* flags: those of the op's def */
    fattn_ctx *ctx;
    const void *attr;
    const fattn_tensor *in; /* absent optional input: ndim 0, dtype 0, data NULL */
    int32_t n_in, n_out;
    fattn_tensor *out;         /* infer fills ndim, shape, dtype; strides 0 everywhere = row-major;
                                  data inside in[i] = a view of that input: it gets no memory, is
                                  not written, and its gradient is the input's, without a call of
                                  backward; only views may have negative strides */
    const fattn_tensor *d_out; /* backward: read; out's strides; data NULL = has no gradient */
    const fattn_tensor *d_in;  /* backward: write; in's strides; data NULL = not needed. No two of
                                  them overlap */
    const uint8_t *d_in_fresh; /* per input, 1: first writer, overwrite every element; 0: add */
    void *saved;               /* sized by infer; valid from forward to backward; 256-byte aligned */
    size_t saved_bytes;
    void *workspace; /* sized by infer; valid during one call; 256-byte aligned */
    size_t fwd_workspace, bwd_workspace;
    const uint8_t *wanted;          /* per input, from infer on, 1: backward must compute its gradient */
    uint32_t d_out_fresh, reserved; /* FATTN_OP_COMPLETES_GRAD: 1: backward overwrites d_out[0]; 0: it adds */
} fattn_op_call;
enum {
    FATTN_OP_MAY_VIEW = 1u << 0,  /* an op with a forward may also return views */
    FATTN_OP_PASS_GRAD = 1u << 1, /* out[0]'s gradient is also that of each input of its shape and dtype:
                                     the tape passes it on, if possible without a copy, and backward
                                     gets d_in[i].data NULL for them */
    FATTN_OP_F32_ON_CPU =
        1u << 2, /* on the CPU the op has no code for F16 and BF16: with such inputs and no output that
                                     is a view, infer is called for the tape's tensors, which decides the outputs'
                                     dtypes, and then, as are forward and backward, with row-major F32 copies in place
                                     of 16-bit tensors; what these write is rounded once. An infer that takes the
                                     flag out of its call's flags gets the 16-bit tensors themselves; their gradients
                                     may then be F32 */
    FATTN_OP_PASS_GRAD_LAST = 1u << 3, /* FATTN_OP_PASS_GRAD for the last input alone */
    FATTN_OP_COLLECTIVE = 1u << 4,     /* the op exchanges with other ranks, which record the same ops, some of them
                                          maybe without elements: forward runs even if all outputs are empty. Backward
                                          runs, and d_out[o].data is not NULL, where on ranks with elements a gradient
                                          reaches an output; of an empty one data is not read. d_in[i].data is NULL
                                          for an empty input, wanted or not, and d_in_fresh may differ between ranks */
    FATTN_OP_COMPLETES_GRAD = 1u << 5  /* the other outputs are computed from out[0], which is no view. Where a gradient
                                          reaches one of them, d_out[0].data is not NULL and is written: backward adds
                                          what reaches out[0] through them to what out[0]'s consumers have left there.
                                          The sum is the gradient of out[0], also the one that FATTN_OP_PASS_GRAD passes
                                          on. Where none does, d_out[0] is read as without the flag */
};
typedef struct fattn_op_def {
    uint32_t struct_size, attr_size; /* attr_size bytes of attr are copied onto the tape */
    int32_t n_out;
    uint32_t flags;
    const char *name;
    fattn_status (*infer)(fattn_op_call *c);    /* checks, shapes and sizes; reads no element */
    fattn_status (*forward)(fattn_op_call *c);  /* NULL: all outputs are views; called unless they
                                                   all are views or empty (but FATTN_OP_COLLECTIVE) */
    fattn_status (*backward)(fattn_op_call *c); /* NULL: gradients pass through views only */
} fattn_op_def;
/* Records and runs def; its name and functions must outlive the tape's graph. Outputs have
   consecutive ids, the first is returned. in[i].id 0 = absent. At most 64 inputs and 64 outputs. */
FATTN_API fattn_var fattn_op_custom(fattn_tape *t, const fattn_op_def *def, const fattn_var *in, int n_in,
                                    const void *attr);

#endif
