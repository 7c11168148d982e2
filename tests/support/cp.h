/* Attention over ranks, beside the same call on one device. */
#ifndef TEST_CP_H
#define TEST_CP_H

#include <fattn/fattn.h>

#include <stdbool.h>

enum { CP_MOST_SEQUENCES = 6 };

typedef struct cp_case {
    const char *name;
    int64_t B, Hq, Hkv, N, D, Dv; /* Dv 0 = D */
    fattn_dtype dtype;            /* 0 = F64 */
    uint32_t flags;
    int32_t window_left, window_right;
    float softcap, dropout_p;
    bool alibi, sink, d_lse, rng_step;
    bool wide;        /* gradients and o in F32 beside 16 bits */
    bool heads_last;  /* q, k, v, o as [B,N,H,D] in memory */
    bool mixed;       /* that on odd ranks alone */
    bool key_means;   /* four channels of K at 10 */
    int groups;       /* of heads that ULYSSES forms at most; 0 = it chooses */
    bool messages;    /* ranks move messages only */
    bool saves;       /* backward has what forward saved; q, k, v, o, lse are NaN then */
    uint32_t without; /* bits 1 << CP_DQ, CP_DK, CP_DV: gradients that ranks do not ask for */
    int n_sequences;
    int32_t lengths[CP_MOST_SEQUENCES]; /* of a packed batch; their sum is N */
} cp_case;

/* Everything that a call writes, of the whole sequence, row-major on the host in the dtype in which it was written. */
enum { CP_O, CP_LSE, CP_DQ, CP_DK, CP_DV, CP_D_SINK, CP_RESULTS };
extern const char *const cp_names[CP_RESULTS];
typedef struct cp_result {
    fattn_tensor t[CP_RESULTS]; /* data NULL: not there */
} cp_result;

/* One device. dtype 0: the case's. */
cp_result cp_whole(const cp_case *c, fattn_device device, fattn_dtype dtype);
/* `ranks` threads. form and layout as in fattn_cp_options. Asserts that all succeed. */
cp_result cp_run(const cp_case *c, fattn_device device, int ranks, int form, int layout);
extern const fattn_stream *cp_streams; /* of cp_run's ranks on a GPU; NULL = the default stream */
void cp_free(cp_result *r);

/* The relative error (Frobenius) of result i; 0 for what is not there. */
double cp_error(const cp_result *got, const cp_result *want, int i);
/* Asserts that result i has the same bytes. */
bool cp_same(const cp_result *a, const cp_result *b, int i);

/* The op on a tape: rope at the ranks' positions, attention with a sink, a loss of o, of lse, or of both (1, 2, 3). The
   gradients of q, k, v of the whole sequence and of the sink, and the loss, as doubles, in one array of *n; F64. save:
   as in fattn_cp_options. */
double *cp_op(fattn_device device, int ranks, int form, bool save, int loss, int64_t *n);

#endif
