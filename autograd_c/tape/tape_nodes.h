/* The tape's inside: variables, nodes, and where gradients live.

   A node is a recorded op call. Nodes are linked in the order of recording, which is a topological
   order, so backward walks the links and needs no graph search.

   Memory has four parts: `records` (nodes, ids, attributes; always the host's), `values` (outputs and saved buffers:
   live from forward to backward), `grads` (gradients of variables), and one `workspace` block as
   large as the largest call needs. A gradient gets its piece of memory when the first consumer
   writes; the piece is free again when the op that made the variable has run back, as is the op's
   saved buffer. A free piece serves a request of at least half its size and is never split: which
   piece serves which request depends on the sequence of sizes only, so each step needs exactly what
   the first one did.

   Views. A view is an output that lies in the memory of an input. Its `base` is the variable that
   owns the memory (never itself a view), and its gradient is the same place in the base's gradient,
   which has the layout of the base's value. Consumers of views so write straight into the gradient
   of the base: dq, dk and dv of three slices of one qkv product land in one dqkv.

   Each base tracks which part of its gradient has been written: `cover`. The usual slices (heads of
   a packed projection, a range of rows) are column ranges of the memory seen as a matrix:
   `columns`. A writer whose columns are untouched so far overwrites (fresh); one whose columns are
   all written adds; anything between first gets the untouched rest of the base zeroed, then adds.
   What no writer touched is zeroed before the gradient is read. Slices that tile their base are
   never zeroed.

   An op may say that its output's gradient is that of inputs, too (FATTN_OP_PASS_GRAD): they then lie
   in one piece, until a further writer comes to one of them and gets a copy of its own. In a residual
   stream nobody does: the branch's share has been read and given back by then, and the gradient of the
   stream runs through all layers in one place. */
#ifndef FATTNI_AUTOGRAD_TAPE_TAPE_NODES_H
#define FATTNI_AUTOGRAD_TAPE_TAPE_NODES_H

#include "autograd_c/tape/arena.h"

#include <fattn/tape.h>

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

/* Free pieces are listed by size; a request looks at the newest few of a list, to stay quick. */
enum { FATTNI_CLASSES = 64, FATTNI_PIECES_SEEN = 16 };

/* A piece of the arena that can be used again within the step. */
typedef struct fattni_piece {
    struct fattni_piece *next;
    void *p;
    size_t bytes;
    int32_t shares; /* gradients that lie in it, without the first one: to be read, not written */
} fattni_piece;

typedef struct fattni_variable {
    fattn_tensor value;
    int32_t base; /* own id unless a view */
    bool wants_grad;
    bool keep_grad; /* do not recycle the gradient */
    bool is_param;  /* grad is the caller's and is always added to */
    /* of bases only */
    fattn_tensor grad;    /* data NULL before the first writer and after release */
    fattni_piece *memory; /* of grad; NULL for a parameter */
    fattni_cover cover;
} fattni_variable;

typedef struct fattni_node {
    struct fattni_node *previous;
    fattn_op_def def;
    const int32_t *in; /* ids [n_in] */
    int32_t first_out; /* id of the first output */
    bool wants_backward;
    fattni_piece *saved;        /* memory of call.saved; NULL when there is none */
    fattn_op_call call;         /* as forward saw it; backward fills the rest */
    fattn_tensor *d_out, *d_in; /* what call's const pointers point to */
    uint8_t *fresh;
    fattni_piece **apart; /* [n_in] d_in that would overlap another one: added afterwards */
} fattni_node;

struct fattn_tape {
    fattn_ctx *ctx;
    fattn_status status; /* first failure */
    bool ran_back;
    const fattni_node *running; /* whose function `stage` is under way; NULL: none */
    const char *stage;
    fattni_variable *variables; /* [1..count]; 0 is none */
    int32_t count, capacity;
    fattni_node *last;
    fattni_arena records, values, grads;
    fattni_piece *free_pieces[FATTNI_CLASSES]; /* [c]: of 2^c to 2^(c+1) - 1 bytes */
    void *workspace;
    size_t workspace_bytes;
};

/* Makes s the tape's status unless it has failed before; returns s. For ops that fail before they
   are recorded. */
fattn_status fattni_tape_fail(fattn_tape *t, fattn_status s);
/* A floating value, row-major; unless frozen, a gradient of its shape, and its dtype or F32. ARG,
   DTYPE, SHAPE, DEVICE. */
fattn_status fattni_check_param(fattn_ctx *ctx, const fattn_param *p);
/* Elements between the lowest and the highest one of t, both included; 0: empty. */
int64_t fattni_extent(const fattn_tensor *t);
/* How many of them lie before the first one: 0 unless a stride is negative. */
int64_t fattni_before(const fattn_tensor *t);
/* OK when no two elements of t share a place; else SHAPE with a sentence that starts with who. */
fattn_status fattni_check_layout(fattn_ctx *ctx, const char *who, const fattn_tensor *t);

/* A piece of at least `bytes`, a free one if possible, else from `from`. */
fattn_status fattni_piece_take(fattn_tape *t, fattni_arena *from, size_t bytes, fattni_piece **out);
void fattni_piece_give(fattn_tape *t, fattni_piece *piece); /* or one share of it; NULL is fine */

/* Where the next writer of id's gradient writes, and whether it overwrites or adds; counts it as
   written. data NULL: no gradient is wanted, or there is no element. */
fattn_status fattni_grad_open(fattn_tape *t, int32_t id, fattn_tensor *d, uint8_t *fresh);
/* Gradient of id for reading, untouched parts zeroed; data NULL when no writer came. */
fattn_status fattni_grad_read(fattn_tape *t, int32_t id, fattn_tensor *d);
/* Adds the gradient of `from`, a base that has one, to that of `to`, of the same shape and dtype; shares
   its memory when `to` has none yet. */
fattn_status fattni_grad_pass(fattn_tape *t, int32_t from, int32_t to);
/* The producer has run: the gradient's memory is free, unless it is kept. */
void fattni_grad_release(fattn_tape *t, int32_t id);
/* Whether the gradients of two inputs may share an element. */
bool fattni_grads_overlap(const fattn_tape *t, int32_t a, int32_t b);

#endif
