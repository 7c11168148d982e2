/* Internals of the tape: variables, nodes, and the memory of gradients.

   A node is a recorded op call. Nodes are linked in the order of recording, which is a topological
   order, so backward walks the links and needs no graph search.

   Memory has four parts: `records` (nodes, ids, attributes; always on the host), `values` (outputs and
   saved buffers: needed from forward to backward), `grads` (gradients of variables), and one `workspace`
   block as large as the largest call needs. The gradient of a variable gets its block when its first
   consumer writes; the block is free again after the backward of the op that produced the variable, as is
   that op's saved buffer. A free block can be reused for a request of at least half its size and is never
   split. The reuse depends on the sequence of sizes only, so each step needs exactly the memory of the
   first one.

   Views. A view is an output in the memory of an input. Its `base` is the variable that owns the memory
   (never itself a view), and its gradient is the same view of the base's gradient, which has the layout of
   the base's value. Consumers of views thus write directly into the gradient of the base: dq, dk and dv of
   three slices of one qkv product are written into one dqkv.

   Each base tracks which part of its gradient has been written: `cover`. The usual slices (heads of
   a packed projection, a range of rows) are column ranges of the memory seen as a matrix:
   `columns`. A write to columns that are all unwritten overwrites (fresh); a write to columns that are
   all written adds; otherwise the unwritten rest of the base is zeroed first, then the write adds.
   Columns that were never written are zeroed before the gradient is read. Slices that tile their base
   are never zeroed.

   The gradient of an op's output may also be that of its inputs (FATTN_OP_PASS_GRAD): they then share one
   block, until one of them is written again, which gets a copy of its own. In a residual stream that does
   not happen: the gradient of the branch has been read and its block released by then, and the gradient of
   the stream stays in one block through all layers. */
#ifndef FATTNI_AUTOGRAD_TAPE_TAPE_NODES_H
#define FATTNI_AUTOGRAD_TAPE_TAPE_NODES_H

#include "autograd_c/tape/arena.h"

#include <fattn/parallel.h>

/* Memory of `extent` elements as rows of `pitch` elements (the last may be short): elements
   [begin, end) of every row. pitch 0: a region of another form. */
typedef struct fattni_columns {
    int64_t pitch, begin, end;
} fattni_columns;

enum { FATTNI_COVER_RUNS = 8 };

/* Written part of a gradient: everything, or sorted, disjoint, non-adjacent column ranges. */
typedef struct fattni_cover {
    bool all;
    int runs;
    int64_t pitch;
    int64_t begin[FATTNI_COVER_RUNS], end[FATTNI_COVER_RUNS];
} fattni_cover;

/* Free blocks are in lists by size; a request examines only the newest few of a list, for speed. */
enum { FATTNI_CLASSES = 64, FATTNI_PIECES_SEEN = 16 };

/* A block of the arena that can be used again within the step. */
typedef struct fattni_tape_block {
    struct fattni_tape_block *next;
    void *p;
    size_t bytes;
    int32_t shares; /* gradients in it beyond the first one: if > 0 it must not be written */
} fattni_tape_block;

typedef struct fattni_variable {
    fattn_tensor value;
    int32_t base; /* own id unless a view */
    bool wants_grad;
    bool keep_grad; /* do not recycle the gradient */
    bool is_param;  /* grad belongs to the caller */
    bool one_pass;  /* a parameter whose grad is stored, else it is added to */
    bool is_frozen; /* a frozen parameter */
    const fattn_param *param;
    /* of bases only */
    bool reached;              /* by the backward in progress: has a gradient, or would have one if it had elements */
    fattn_tensor grad;         /* data NULL before the first writer and after release */
    fattni_tape_block *memory; /* of grad; NULL for a parameter */
    fattni_cover cover;
} fattni_variable;

/* The call as an op sees it that computes 16-bit variables in F32 (tape_wide.c). */
typedef struct fattni_wide {
    fattn_op_call call;
    fattn_tensor *in, *out, *d_out, *d_in; /* what call's const pointers point to */
    uint8_t *fresh;
} fattni_wide;

typedef struct fattni_node {
    struct fattni_node *previous;
    fattn_op_def def;
    const int32_t *in; /* ids [n_in] */
    int32_t first_out; /* id of the first output */
    bool wants_backward;
    bool completes;             /* FATTN_OP_COMPLETES_GRAD: backward writes to d_out[0] */
    fattni_wide *wide;          /* NULL: the op sees the tape's own tensors */
    fattni_tape_block *saved;   /* memory of call.saved; NULL when there is none */
    fattn_op_call call;         /* as forward saw it; backward fills the rest */
    fattn_tensor *d_out, *d_in; /* what call's const pointers point to */
    uint8_t *fresh;
    fattni_tape_block **apart; /* [n_in] separate memory of d_in that would overlap another one; added afterwards */
} fattni_node;

struct fattn_tape {
    fattn_ctx *ctx;
    fattn_status status; /* first failure */
    bool ran_back;
    const fattni_node *running; /* the node whose function `stage` is running; NULL: none */
    const char *stage;
    fattn_reducer *reducer; /* of the backward pass in progress: is told which gradients are complete; may be NULL */
    fattni_variable *variables; /* [1..count]; 0 is none */
    int32_t count, capacity;
    fattni_node *last;
    fattni_arena records, values, grads;
    fattni_tape_block *free_blocks[FATTNI_CLASSES]; /* [c]: of 2^c to 2^(c+1) - 1 bytes */
    void *workspace;
    size_t workspace_bytes;
};

/* Sets the tape's status to s unless it has failed before; returns s. For ops that fail before they
   are recorded. */
fattn_status fattni_tape_fail(fattn_tape *t, fattn_status s);
/* Checks that the value is of a float dtype and row-major, and, unless frozen, that the gradient has its
   shape and its dtype or F32. ARG, DTYPE, SHAPE, DEVICE. */
fattn_status fattni_check_param(fattn_ctx *ctx, const fattn_param *p);
/* Elements between the lowest and the highest one of t, both included; 0: empty. */
int64_t fattni_footprint(const fattn_tensor *t);
/* The number of these before the first element: 0 unless a stride is negative. */
int64_t fattni_before(const fattn_tensor *t);
/* Whether elements of t may share an address. */
bool fattni_elements_overlap(const fattn_tensor *t);
/* OK when no two elements of t share an address; else SHAPE with an error message that starts with who. */
fattn_status fattni_check_layout(fattn_ctx *ctx, const char *who, const fattn_tensor *t);

/* After infer: whether n computes in F32. Then make, infer of wide->call, and plan. */
bool fattni_is_wide(const fattni_node *n);
fattn_status fattni_wide_make(fattni_node *n, fattni_arena *records);
void fattni_wide_plan(fattni_node *n); /* sizes of both, in n->call */
/* Around forward and backward of wide->call. */
fattn_status fattni_wide_open_forward(fattni_node *n);
fattn_status fattni_wide_close_forward(fattni_node *n);
fattn_status fattni_wide_open_backward(fattni_node *n);
fattn_status fattni_wide_close_backward(fattni_node *n);

/* A block of at least `bytes`, a free one if possible, else from `from`. */
fattn_status fattni_tape_block_take(fattn_tape *t, fattni_arena *from, size_t bytes, fattni_tape_block **out);
void fattni_tape_block_give(fattn_tape *t, fattni_tape_block *block); /* or one share of it; NULL is fine */

/* The tensor for the next write of id's gradient, and whether that overwrites or adds; marks it as
   written. data NULL: no gradient is needed, or there is no element. */
fattn_status fattni_grad_open(fattn_tape *t, int32_t id, fattn_tensor *d, uint8_t *fresh);
/* Gradient of id for reading, unwritten parts zeroed; data NULL when nothing was written. */
fattn_status fattni_grad_read(fattn_tape *t, int32_t id, fattn_tensor *d);
/* Before backward: the gradients of FATTN_PARAM_ONE_PASS begin unwritten, but zeroed where two of them share memory. */
fattn_status fattni_grads_begin(fattn_tape *t);
/* Zeroes what backward has not written of such a gradient, of id's base, so far; others stay as they are. */
fattn_status fattni_grad_finish(fattn_tape *t, int32_t id);
/* Adds the gradient of `from`, a base that has one, to that of `to`, of the same shape and dtype; if `to`
   has none yet, it shares the memory instead. */
fattn_status fattni_grad_pass(fattn_tape *t, int32_t from, int32_t to);
/* After the producer's backward: releases the gradient's memory, unless it is kept. */
void fattni_grad_release(fattn_tape *t, int32_t id);
/* Whether kernels of a graph that is being recorded may read v before the kernels before them have ended
   (FATTN_PARAM_FROZEN). False for what is no variable. */
bool fattni_tape_reads_early(const fattn_tape *t, fattn_var v);
/* Whether the gradients of two inputs may share an element. */
bool fattni_grads_overlap(const fattn_tape *t, int32_t a, int32_t b);

#endif
