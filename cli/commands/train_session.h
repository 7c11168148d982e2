/* What the files of `fattn train` share: cmd_train.c runs a training, train_report.c tells about it. */
#ifndef FATTNI_CLI_COMMANDS_TRAIN_SESSION_H
#define FATTNI_CLI_COMMANDS_TRAIN_SESSION_H

#include "cli/commands/gpt2_run.h"
#include "cli/llmc/hellaswag.h"
#include "cli/output/json.h"
#include "cli/output/plot.h"
#include "cli/output/progress.h"
#include "cli/train/durable.h"
#include "cli/train/train_options.h"

enum { WARM_STEPS = 5 }; /* before speed is measured */

/* What the ranks of a process read together. */
typedef struct train_setup {
    train_options o;
    checkpoint *from; /* NULL: a new run */
    char home[4096];  /* the folder of that checkpoint */
    gpt2_start start; /* of --init */
    tokenizer tokens; /* of shards; n 0: none */
} train_setup;

/* One rank's training. Files, and what is printed, are rank 0's alone; the others' are empty. */
typedef struct session {
    train_options o;
    const train_setup *setup;
    const rank *rank;
    task *task;
    trainer r;
    evaluation last;    /* the latest on held-out data */
    bool reached;       /* the target */
    int64_t first_step; /* of this part of the run */
    int64_t warm_step;  /* speed is measured from here on: after allocations and loading of kernels */
    double warm_elapsed;
    int64_t told_step;  /* the last one in the log */
    bool graphs;        /* steps are graphs, or will be after the first one */
    int64_t saved_step; /* of the last checkpoint, -1 = none */

    hellaswag examples; /* n 0: none */
    int64_t asked_step; /* after which they were asked last */
    json log;
    output plot;
    bool drawn; /* the plot is written */
    progress bar;
    durable_lock lock; /* of the folder of checkpoints */
    bool same_folder;  /* whether that folder is the one that the run was resumed from */
    int64_t keep;      /* checkpoints there up to this step belong to this run; -1 = none */
} session;

bool wants_checkpoints(const session *s);

void report_header(const session *s);
void report_start(session *s);    /* this and the three after it: a line of the log */
void report_step(session *s);     /* the last one of the history */
void report_no_graph(session *s); /* a line of the log, and one above the progress: from here on op by op */
void report_evaluation(session *s, const char *event);
void report_progress(session *s);
/* The loss curve. False after an error message. */
bool report_plot(session *s, const plot_level *levels, int n_levels);
/* The task's summary, after the last evaluation, and the files written. CLI_OK, or another code after an error
   message. */
int report_summary(session *s);

#endif
