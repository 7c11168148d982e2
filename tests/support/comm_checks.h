/* What every transport must do: functions that all ranks run, on the device of their contexts. A wrong result is
   FATTN_E_MISMATCH, with the line. */
#ifndef TEST_COMM_CHECKS_H
#define TEST_COMM_CHECKS_H

#include "ranks.h"

/* Collectives; up to 16 ranks. arg is not used. */
#define COMM_CHECKS(X)                                                                                                 \
    X(ring) X(one_way) X(all_gather) X(all_to_all) X(broadcast) X(sums) X(narrow_sums) X(agreement) X(several_open)
#define X(name) fattn_status check_##name(rank_call *c);
COMM_CHECKS(X)
#undef X

/* Failures: one rank is at fault, the others get FATTN_E_COMM. */
typedef struct comm_fault {
    int rank, sleeps; /* seconds: fails_to_answer */
    int64_t n;        /* elements of the messages, at most 50000 */
} comm_fault;

fattn_status fails_to_agree(rank_call *c);     /* COMM: "tokens is 7 on rank R, 64 on rank 0" */
fattn_status fails_by_shape(rank_call *c);     /* COMM: "expects" */
fattn_status fails_by_argument(rank_call *c);  /* SHAPE: "x: is not row-major" */
fattn_status fails_by_overlap(rank_call *c);   /* ARG: "out and in overlap" */
fattn_status fails_by_sending(rank_call *c);   /* ARG: "receive and send overlap" */
fattn_status fails_by_leaving(rank_call *c);   /* OK: "rank R has left" */
fattn_status fails_to_answer(rank_call *c);    /* COMM: "rank R does not answer within" */
fattn_status fails_in_a_chain(rank_call *c);   /* as before; each rank waits for the next, the last one first */
fattn_status fails_by_aborting(rank_call *c);  /* COMM: "rank R: the file is missing" */
fattn_status fails_by_many_open(rank_call *c); /* of 1 rank, STATE: "8 exchanges are open" */

/* Frees what these functions have allocated. */
void free_rank_tensors(rank_call *c);

#endif
