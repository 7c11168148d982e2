/* What trainer.c and step_graph.c share. For these two alone. */
#ifndef FATTNI_CLI_TRAIN_TRAINER_PARTS_H
#define FATTNI_CLI_TRAIN_TRAINER_PARTS_H

#include "cli/train/trainer.h"

/* ---- trainer.c ---- */

/* Fills the next place with the batch of pass number `pass` of the step, unless it is there; behind this rank's last
   pass comes its first one of the next step: a task may be slow to go back. */
fattn_status trainer_prepare(trainer *r, int64_t pass);
/* Enqueues the copy of that batch to the device. ARG: the task could not read it. */
fattn_status trainer_send(trainer *r, int64_t pass);
/* Enqueues what adds the gradient of batch number `pass` of the step; *loss: its share, on the tape. */
fattn_status trainer_add_gradient(trainer *r, int64_t pass, fattn_var *loss);
/* The loss of the step, from the shares of this rank's passes, at their numbers (NULL: in r->news), and of the others'.
   Collective. */
fattn_status trainer_share_losses(trainer *r, const float *losses, double *loss);
/* Records the forward pass of the batch on the device: its share of the step's loss. */
fattn_var trainer_pass_loss(trainer *r);
/* MISMATCH: the loss of the step after the history's last one is not finite. */
fattn_status trainer_check_loss(const trainer *r, double loss);
/* Adds that step to the history, after lr, grad_norm and scaling have been set. MISMATCH: it is the last of
   MOST_SKIPPED. */
fattn_status trainer_note_step(trainer *r, double loss);

/* ---- step_graph.c ---- */

fattn_status step_graph_create(trainer *r);
void step_graph_destroy(trainer *r); /* before the tape and the model */
/* Whether the next step can be run below; records the graph if there is none, but for several ranks. A recording that
   fails is no failure of the step: from then on there is a reason why steps are not graphs. */
bool step_graph_ready(trainer *r);
/* Enqueues a step, then collects the results of the one before. */
fattn_status step_graph_run(trainer *r, double lr);
/* Waits for the results of the last step, if they have not been collected. */
fattn_status step_graph_settle(trainer *r);
void step_graph_forget(trainer *r); /* after settle */

#endif
