/* What the parts of `fattn check` share: which cases are wanted, how one is reported. */
#ifndef CLI_CHECK_H
#define CLI_CHECK_H

#include "json.h"

#include <fattn/context.h>

typedef enum check_state { CHECK_OK, CHECK_FAILED, CHECK_SKIPPED } check_state;

typedef struct check_run {
    fattn_ctx *ctx;
    int n_wanted;
    char *const *wanted; /* parts of names; none: all cases */
    bool *found;         /* per wanted: some case had it */
    bool list;           /* names only, nothing runs */
    json log;
    int count[3]; /* per check_state */
} check_run;

typedef struct check_result {
    const char *name; /* "attention/causal/flash2" */
    char what[96];    /* sizes */
    check_state state;
    int64_t checked; /* numbers compared */
    double worst;    /* largest relative error */
    double seconds;
    char sentence[512]; /* of a failure, or why it was skipped */
} check_result;

/* True when the case is to be run now. In a listing it prints the name and is false. */
bool check_begin(check_run *run, const char *name);
void check_end(check_run *run, const check_result *r);

/* Fused attention and transformer blocks on the tape in fp64, against central differences. */
void check_gradients(check_run *run);
/* Every case of every .h5 file in the folder on every CPU algorithm. False after a sentence when
   the folder cannot be read or holds no fixture. */
bool check_fixtures(check_run *run, const char *folder);

#endif
