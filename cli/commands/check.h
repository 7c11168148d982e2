/* Shared by the parts of `fattn check`: selection of cases, reports. */
#ifndef FATTNI_CLI_COMMANDS_CHECK_H
#define FATTNI_CLI_COMMANDS_CHECK_H

#include "cli/output/json.h"

#include <fattn/check.h>

typedef enum check_state { CHECK_SKIPPED, CHECK_OK, CHECK_FAILED } check_state; /* worst last */

/* Every case runs on these, in this order: FATTN_ALGO_STANDARD, _FLASH1, _FLASH2. */
enum { CHECK_WAYS = 3 };
extern const char *const check_way_name[CHECK_WAYS];
static inline int check_algorithm(int way) { return FATTN_ALGO_STANDARD + way; }

typedef struct check_run {
    fattn_ctx *ctx;    /* computes */
    fattn_ctx *host;   /* reads files and compares: the CPU's */
    fattn_dtype dtype; /* of the computation: F64 or F32 */
    int n_wanted;
    char *const *wanted; /* names, or parts or patterns of them; none: all cases */
    bool *found;         /* per wanted: whether a case matches it */
    bool list;           /* names only, nothing runs */
    json log;
    int cases[3];             /* per check_state */
    int computed[CHECK_WAYS]; /* cases that the algorithm has a kernel for */
} check_run;

typedef struct check_way {
    check_state state; /* SKIPPED: no kernel of this version covers the case */
    int64_t checked;   /* numbers compared */
    double worst;      /* largest relative error, see check_worst */
    char message[512]; /* of the first failure, or why it was skipped */
} check_way;

typedef struct check_result {
    const char *name; /* "attention/causal" */
    char what[96];    /* sizes */
    check_way way[CHECK_WAYS];
    double seconds;
} check_result;

/* r->what: "2, 4/2, 7 x 7, 8/8". */
void check_sizes(check_result *r, int64_t B, int64_t Hq, int64_t Hkv, int64_t Sq, int64_t Sk, int64_t D, int64_t Dv);
void check_heading(const char *text);
/* Whether the case is to be run. In a listing it prints the name and returns false. */
bool check_begin(check_run *run, const char *name);
void check_end(check_run *run, const check_result *r);

/* |got - want| / (|want| + unit) of the worst element. With unit = atol/rtol an element passes when
   this is at most rtol: values far below the unit are compared absolutely. */
double check_worst(const fattn_report *r, double unit);

/* Fused attention and transformer blocks on the tape, against central differences in fp64. */
void check_gradients(check_run *run);
/* Every case of every .h5 file in the folder on every algorithm. False after an error message when
   the folder cannot be read or holds no fixture. */
bool check_fixtures(check_run *run, const char *folder);

#endif
