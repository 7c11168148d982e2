/* A run: a model trained on a task with AdamW. Its complete state is the parameters, the moments and a few
   integers in this struct; batches and dropout masks are functions of them.

   Ranks have the same state. A step's passes are numbered over all of them, and each rank does as many, one after the
   other; so data, masks and the order of sums do not depend on the number of ranks. */
#ifndef FATTNI_CLI_TRAIN_TRAINER_H
#define FATTNI_CLI_TRAIN_TRAINER_H

#include "cli/ranks/ranks.h"
#include "cli/train/batch_feed.h"
#include "cli/train/model.h"

#include <fattn/graph.h>
#include <fattn/optim.h>
#include <fattn/parallel.h>

/* Learning rates over the steps s = 0, 1, ..., u = warmup. COSINE, LINEAR and WSD are the library's (fattn/optim.h),
   down to final_lr of the peak, and need steps; they are llm.c's, as is
   CONSTANT  the peak from the first step on
   BUDGET    (s+1)/(u+1) of, and at most, a cosine from the peak to a tenth over the budget, steps or seconds */
enum { SCHEDULE_BUDGET, SCHEDULE_COSINE, SCHEDULE_LINEAR, SCHEDULE_CONSTANT, SCHEDULE_WSD };

/* How 16-bit parameters are updated: by F32 masters, or themselves (fattn/optim.h), rounded with the model's seed. */
enum { ROUNDING_MASTERS, ROUNDING_STOCHASTIC, ROUNDING_NEAREST, ROUNDING_STOCHASTIC_MASTERS };

typedef struct trainer_config {
    int64_t batch, steps, warmup;  /* sequences of a pass; steps 0 = no limit */
    int64_t passes;                /* of a step, whose gradient is the mean of theirs; 0 = one for each rank */
    double seconds;                /* wall-clock budget; 0 = no limit */
    double lr, weight_decay, clip; /* peak learning rate; clip 0 = none */
    double final_lr;               /* the last learning rate over the peak */
    double beta2;                  /* AdamW's; 0 = 0.99: runs are short, v must adapt within a hundred steps */
    double loss_scale;             /* of F16: fixed; 0 = the library's dynamic one */
    int schedule, rounding;
    bool tree;        /* gradients of passes are added like those of ranks (fattn/parallel.h), which takes memory */
    bool zero;        /* ranks divide AdamW's state */
    bool graph;       /* passes as CUDA graphs, where they can be (step_graph below) */
    const rank *rank; /* NULL: there is one. It needs `comm` for several ranks, tree and zero */
} trainer_config;

/* Whether a trainer of so many passes and ranks needs the rank's `comm`. */
static inline bool trainer_sums(const trainer_config *c, int size) {
    return size > 1 || c->zero || (c->tree && c->passes > 1);
}

/* The losses so far, for the plot; part of a checkpoint. */
typedef struct history {
    double *loss;                               /* of step i, i < steps; NULL when steps is 0 */
    double *eval_step, *eval_loss, *eval_right; /* of held-out evaluation i */
    int64_t steps, evals, step_capacity, eval_capacity;
} history;

/* Steps one after the other that have an infinity or a NaN in their gradients, with a finite loss: the dynamic scale
   has come from its largest number to its smallest by then. */
enum { MOST_SKIPPED = 32 };

/* What a step leaves for the host, in page-locked memory. */
typedef struct step_results {
    fattn_tensor losses, norm, scale; /* F32 [passes]; F64; F32 */
    fattn_mark *arrived;              /* behind their copies */
    double lr;                        /* of the step */
} step_results;

/* A pass that is recorded once and launched for each batch: the first step runs op by op, which loads kernels and sizes
   the tape's memory. The update is in the graph if a step has one pass. What differs between steps is on the device:
   the batch, its number, the learning rate, AdamW's count, the loss scale. The results of a step are collected when
   the next one has been enqueued, so that the GPU never waits for the host. Functions: trainer_parts.h. */
typedef struct step_graph {
    bool by_ops;             /* ranks: each op is enqueued by itself, which exchanges need; the rest is the same */
    fattn_graph *graph;      /* NULL: not recorded, or forgotten since the tape has been used for something else */
    bool warm;               /* a step has run op by op */
    bool pending;            /* the last step's results have not been collected */
    fattn_tensor loss, norm; /* on the device: after a pass, its share of the loss; after a step, the gradient's norm */
    step_results results[2];
    int next;                 /* results of the next step */
    char why[DEVICE_MESSAGE]; /* there is no graph; empty: there is, or will be */
} step_graph;

typedef struct trainer {
    trainer_config config;
    fattn_ctx *ctx;
    task *task;
    model *model;
    fattn_tape *tape;
    fattn_reducer *reducer; /* NULL: the tape adds up all passes */
    fattn_adamw *adamw;
    fattn_tensor scale;             /* adamw's, which backward begins with; without loss scaling 1 */
    fattn_loss_scale_state scaling; /* after the last step of the history */
    int skipped;                    /* steps up to that one, without a break, in this part of the run */
    batch_feed feed;
    step_graph graph;
    float *logits;                  /* of a batch, on the host; NULL when they are too many */
    int64_t step;                   /* taken, or enqueued; with the pass it numbers the dropout masks */
    int64_t cursor;                 /* training sequences used; numbers the next one */
    int64_t first_pass, own_passes; /* of a step, of this rank */
    double *news;                   /* what the ranks tell each other in a step: its passes' losses and NEWS numbers */
    double elapsed;                 /* seconds, of all parts of the run, by rank 0's clock; set by a step */
    double origin;                  /* monotonic clock minus elapsed */
    bool interrupted;               /* any rank, before the end of the last step */
    double lr, grad_norm;           /* of the last step of the history */
    history history;                /* with a graph or ranks a step's loss comes with the next one, or trainer_settle */
} trainer;

/* Borrows ctx and t. On failure everything is freed, and ctx has the error message. */
fattn_status trainer_create(trainer *r, fattn_ctx *ctx, task *t, const model_config *shape,
                            const trainer_config *config);
void trainer_destroy(trainer *r);

bool trainer_leads(const trainer *r); /* this is rank 0 */
/* A signal asks this run to end; all ranks say the same after a step. */
bool trainer_interrupted(const trainer *r);

/* The used share of the budget, the larger one of steps and seconds, at least 0; 1 = used up. */
double trainer_used(const trainer *r);
/* By the config's schedule. Without a time budget it depends on the step alone. */
fattn_status trainer_lr(const trainer *r, double *lr);
int64_t trainer_sequences(const trainer *r); /* of a step, of all ranks: batch * passes */
bool trainer_is_scaled(const trainer *r);    /* F16: the loss has a scale */
fattn_status trainer_read_scale(trainer *r); /* into r->scaling */

/* Batches forward and backward, AdamW; collective. What the task could not read is FATTN_E_ARG, a loss that is not
   finite, or the last of MOST_SKIPPED steps, FATTN_E_MISMATCH; the parameters are then those of the step before. With a
   graph, or several ranks, that is found out one step later, and the parameters may be those of any step since. What
   another rank has failed with is FATTN_E_COMM. */
fattn_status trainer_step(trainer *r);
/* Waits for what has been enqueued: the history then has every step. Collective. Errors as those of trainer_step. */
fattn_status trainer_settle(trainer *r);
/* Settles, and gives the tape away for other passes than those of a step: a graph that uses it is forgotten, and
   recorded anew by the next step. */
fattn_status trainer_lend_tape(trainer *r, fattn_tape **tape);
/* Why steps are not graphs; "": they are, or will be after the first one. Valid until the next step. */
const char *trainer_why_no_graph(const trainer *r);

typedef struct evaluation {
    double loss;  /* mean -log p, nats */
    double right; /* share of the targets that are the model's first choice; NaN: not counted */
    int64_t targets;
} evaluation;
/* The largest batch of which an evaluation counts right answers: its logits are copied to the host. */
int64_t trainer_counted_batch(const task *t, const model_config *config);
/* On `count` of the task's held-out sequences, evenly spaced or, if the task says so, the first; all when count is
   larger. Collective: ranks divide the batches, whose sums are added in one order. */
fattn_status trainer_evaluate(trainer *r, int64_t count, evaluation *out);
/* Adds an evaluation to the history, at the current step. */
fattn_status trainer_note(trainer *r, const evaluation *e);
/* Allocates a history that is about to be read: sets steps and evals. */
fattn_status history_resize(fattn_ctx *ctx, history *h, int64_t steps, int64_t evals);

#endif
