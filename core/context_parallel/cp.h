/* Attention over ranks: the plan of a call, its pieces, and memory. */
#ifndef FATTNI_CORE_CONTEXT_PARALLEL_CP_H
#define FATTNI_CORE_CONTEXT_PARALLEL_CP_H

#include "core/comm/comm.h"

#include <fattn/context_parallel.h>

/* Memory that stays from call to call, one buffer for each use. */
enum { FATTNI_CP_GROUPS = 4, FATTNI_CP_STREAMS = 2 }; /* at most: groups of heads of ULYSSES, streams that compute */
enum { FATTNI_CP_MOVES = 2 * FATTNI_CP_GROUPS, FATTNI_CP_TENSORS = 10 }; /* moves with buffers; tensors of one */
enum fattni_cp_use {
    FATTNI_CP_WORKSPACE,                                      /* of the attention calls, one for each stream */
    FATTNI_CP_SEND = FATTNI_CP_WORKSPACE + FATTNI_CP_STREAMS, /* one for each move */
    FATTNI_CP_RECEIVE = FATTNI_CP_SEND + FATTNI_CP_MOVES,
    FATTNI_CP_WHOLE = FATTNI_CP_RECEIVE + FATTNI_CP_MOVES, /* whole sequences */
    FATTNI_CP_RESULT,                                      /* gradients or outputs before they are converted */
    FATTNI_CP_RING,                                        /* what goes around */
    FATTNI_CP_RING_GRADIENTS,
    FATTNI_CP_USES
};

/* Rows begin..end-1 of the whole; they lie from row `at` on in a tensor. */
typedef struct fattni_cp_span {
    int64_t begin, end, at;
} fattni_cp_span;

enum { FATTNI_CP_CHUNKS = 2 }; /* of a rank, at most */

struct fattn_cp {
    fattn_comm *comm;
    fattn_ctx *ctx;
    int form, layout;
    bool save; /* of the op */
    int64_t N;
    int n_sequences; /* at least 1 */
    bool packed;
    int64_t sms;             /* of the rank that has the fewest: ranks must choose the same; 0 on the CPU */
    int32_t *starts;         /* [n_sequences + 1], host */
    fattn_tensor cu_seqlens; /* the same on the device, when packed */
    int32_t longest;         /* sequence */
    void *zero;              /* a double on the device */
    fattn_message *messages; /* [2][size]: sends, receives */
    fattni_copy_pair *pairs; /* [FATTNI_CP_TENSORS][size][FATTNI_CP_CHUNKS], of which n_pairs are to be copied */
    int n_pairs;
    fattni_parts *parts;   /* [2][size], as messages */
    fattn_tensor *tensors; /* [2][size][FATTNI_CP_TENSORS][FATTNI_CP_CHUNKS]: of the parts */
    int n_tensors;
    fattn_stream
        side[FATTNI_CP_STREAMS]; /* streams beside the context's, which is not among them; NULL: not yet made */
    int groups;                  /* of tests: ULYSSES forms so many, if it can; 0: it chooses */
    int on_stream;               /* 0: attention calls run on the context's stream, else on side[it] */
    void *memory[FATTNI_CP_USES];
    size_t bytes[FATTNI_CP_USES];
};

/* A call: what was given, and what follows from it. */
typedef struct fattni_cp_call {
    fattn_cp *cp;
    fattn_attention_params p; /* for whole sequences: without positions */
    fattn_attention_io io;
    fattn_cp_form form;
    fattn_dtype dtype, wide;         /* of q; of what is summed: F32 (F64) */
    int64_t B, Hq, Hkv, D, Dv, rows; /* rows: of this rank */
    bool causal, deterministic;
    void *saved; /* of the caller: io has none */
} fattni_cp_call;

fattn_status fattni_cp_room(fattn_cp *cp, enum fattni_cp_use use, size_t bytes, void **out);

/* The chunks of a rank; returns how many. `at` counts within the rank. */
int fattni_cp_chunks(const fattn_cp *cp, int rank, fattni_cp_span *out);
int64_t fattni_cp_rows_of(const fattn_cp *cp, int rank);

fattn_tensor fattni_cp_view(const fattn_cp *cp, void *data, fattn_dtype dtype, int ndim, const int64_t *shape);
size_t fattni_cp_bytes(const fattn_tensor *t);

/* The part begin..end-1 of dimension dim, in *out; NULL of NULL. */
const fattn_tensor *fattni_cp_slice(const fattn_tensor *t, int dim, int64_t begin, int64_t end, fattn_tensor *out);
/* `given` with rows [q0, q1) and keys [k0, k1) alone, whose tensors are in t. */
enum { FATTNI_CP_ROWS = 10 };
fattn_attention_io fattni_cp_take_rows(const fattn_attention_io *given, int64_t q0, int64_t q1, int64_t k0, int64_t k1,
                                       fattn_tensor t[FATTNI_CP_ROWS]);

/* One attention call for the rows of q and the keys of k in each sequence that both reach, if the mask lets one see the
   other. In io the rows of q, o, lse, d_o, d_lse, dq lie as q's span says, those of k, v, dk, dv as k's; flags are
   added to the call's. */
fattn_status fattni_cp_attend(const fattni_cp_call *c, bool backward, const fattn_attention_io *io,
                              const fattni_cp_span *q, const fattni_cp_span *k, uint32_t flags);
/* The same call for all rows and keys that io has, as one sequence without positions. */
fattn_status fattni_cp_attend_plain(const fattni_cp_call *c, bool backward, const fattn_attention_io *io,
                                    uint32_t flags, bool causal);

/* fattn_attention_fwd or _bwd with the workspace that they need. */
fattn_status fattni_cp_call_attention(const fattni_cp_call *c, bool backward, const fattn_attention_params *p,
                                      const fattn_attention_io *io);

/* In how many parts a GPU can compute so many heads and rows (backward: of keys), each of which fills it: seven tiles
   of 128 rows for each SM, as measured on an H100. */
int64_t fattni_cp_full_parts(const fattni_cp_call *c, int64_t heads, int64_t rows);

/* ---- moves.c: tensors [B,H,rows,W] ---- */

/* n tensors between the ranks' rows, `local`, and all N rows, `whole`. By heads `whole` has H / size heads, rank r's
   from r H / size on; of these move, for every rank, those of so many key heads from `head` on. Else it has all. */
typedef struct fattni_cp_move {
    const fattni_cp_call *c;
    const fattn_tensor *local, *whole;
    int n;
    bool by_heads;
    int64_t head, heads;
    int slot;       /* 0..FATTNI_CP_MOVES-1: each open move has its own */
    bool exposed;   /* nothing else runs meanwhile */
    char *received; /* the rest is of moves.c */
    bool unpacks;   /* what comes lies in `received` first */
    void *request;
} fattni_cp_move;
/* Begins to move, after what is enqueued now; moves are finished in the order of their starts. What the rank itself has
   of the whole is copied by own_to_whole. */
fattn_status fattni_cp_start_to_whole(fattni_cp_move *m);
fattn_status fattni_cp_own_to_whole(fattni_cp_move *m);
fattn_status fattni_cp_finish_to_whole(fattni_cp_move *m);
/* By heads; what the rank itself has of its rows is copied by own_to_rows. */
fattn_status fattni_cp_start_to_rows(fattni_cp_move *m);
fattn_status fattni_cp_own_to_rows(fattni_cp_move *m);
fattn_status fattni_cp_finish_to_rows(fattni_cp_move *m);
/* Where the transport moves parts. The tensors are in the whole for what is enqueued from now on; to finish remains. */
fattn_status fattni_cp_receive_whole(fattni_cp_move *m);
/* Finishes all: first those to whole sequences, then those to rows. */
fattn_status fattni_cp_finish_all(fattni_cp_move *to_whole, int n_to_whole, fattni_cp_move *to_rows, int n_to_rows);

/* All heads of each rank's `local` [n] to every rank's `whole`. */
fattn_status fattni_cp_to_whole(const fattni_cp_call *c, const fattn_tensor *local, int n, const fattn_tensor *whole);
/* local (+)= the sum over the ranks of their `whole`, of this rank's rows; F32 or F64, in the order of comm.h. */
fattn_status fattni_cp_sum_rows(const fattni_cp_call *c, const fattn_tensor *whole, int n, const fattn_tensor *local,
                                const bool *add);
/* local = this rank's rows of `whole`. */
fattn_status fattni_cp_own_rows(const fattni_cp_call *c, const fattn_tensor *whole, const fattn_tensor *local);
/* lse [B,H,rows] as [B,H,rows,1]; others as they are. */
fattn_tensor fattni_cp_rows_4d(const fattn_tensor *t);
/* Gives the tensors, of which only data is not set, memory for whole sequences. */
fattn_status fattni_cp_wholes(const fattni_cp_call *c, fattn_tensor *whole, int n);
/* The bytes of such tensors, each from a multiple of FATTNI_ALIGN on; with memory, their data, too. */
size_t fattni_cp_lay_out(fattn_tensor *whole, int n, void *memory);

/* ---- the forms ---- */

fattn_status fattni_cp_ring_fwd(fattni_cp_call *c);
fattn_status fattni_cp_ring_bwd(fattni_cp_call *c);
fattn_status fattni_cp_gather_fwd(fattni_cp_call *c);
fattn_status fattni_cp_gather_bwd(fattni_cp_call *c);
fattn_status fattni_cp_ulysses_fwd(fattni_cp_call *c);
fattn_status fattni_cp_ulysses_bwd(fattni_cp_call *c);
/* The bytes of io.saved that a call of this form uses; of the tensors only dtypes and shapes are read. */
size_t fattni_cp_saved_bytes(const fattn_cp *cp, fattn_cp_form form, const fattn_attention_io *io);

/* to (+)= from, any dtypes and strides; t = 0. */
fattn_status fattni_cp_store(fattn_cp *cp, const fattn_tensor *to, const fattn_tensor *from, bool add);
fattn_status fattni_cp_zero(fattn_cp *cp, const fattn_tensor *t);

#endif
