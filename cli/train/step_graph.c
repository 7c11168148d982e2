/* A step as a CUDA graph: recorded, launched, and its results one step later; of several ranks op by op, and the
   same. */
#include "cli/train/trainer_parts.h"

#include <math.h>
#include <stdio.h>

/* A step of one pass is one graph; with more, the update comes behind the last of them. */
static bool has_update(const trainer *r) { return r->config.passes == 1; }

static const char *reason(const trainer *r) {
    if (!r->config.graph) return "graphs are not asked for";
    if (r->config.rank && r->config.rank->size > 1) return "ranks exchange gradients";
    if (r->config.zero) return "--zero";
    if (r->reducer) return "--deterministic adds the gradients of several passes as those of ranks";
    return "";
}

static fattn_status create_results(trainer *r, step_results *to) {
    fattn_status s = fattn_pinned_alloc(r->ctx, FATTN_F32, 1, &r->config.passes, &to->losses);
    if (!s) s = fattn_pinned_alloc(r->ctx, FATTN_F64, 0, NULL, &to->norm);
    if (!s) s = fattn_pinned_alloc(r->ctx, FATTN_F32, 0, NULL, &to->scale);
    return s ? s : fattn_mark_create(r->ctx, &to->arrived);
}

fattn_status step_graph_create(trainer *r) {
    step_graph *const g = &r->graph;
    snprintf(g->why, sizeof g->why, "%s", reason(r));
    g->by_ops = r->config.rank && r->config.rank->size > 1;
    fattn_status s = FATTN_OK;
    if (g->why[0] && !g->by_ops) return s;
    for (int i = 0; i < 2 && !s; ++i) s = create_results(r, &g->results[i]);
    return s ? s : fattn_adamw_norm_view(r->adamw, &g->norm);
}

void step_graph_destroy(trainer *r) {
    step_graph *const g = &r->graph;
    for (int i = 0; i < 2 && r->ctx; ++i) {
        step_results *const at = &g->results[i];
        if (at->arrived) (void)!fattn_mark_wait(r->ctx, at->arrived); /* the memory goes, whatever became of them */
        fattn_mark_destroy(r->ctx, at->arrived);
        fattn_pinned_free(r->ctx, &at->losses);
        fattn_pinned_free(r->ctx, &at->norm);
        fattn_pinned_free(r->ctx, &at->scale);
    }
    step_graph_forget(r);
}

void step_graph_forget(trainer *r) {
    fattn_graph_destroy(r->ctx, r->graph.graph);
    r->graph.graph = NULL;
}

static fattn_status record(trainer *r) {
    step_graph *const g = &r->graph;
    fattn_tape_reset(r->tape); /* its memory becomes one block before the recording, which may not allocate */
    fattn_status s = fattn_graph_begin(r->ctx);
    if (s) return s;
    const fattn_var loss = trainer_pass_loss(r);
    s = fattn_tape_backward_from(r->tape, loss, &r->scale);
    if (!s) s = fattn_tape_value(r->tape, loss, &g->loss);
    if (!s && has_update(r)) s = fattn_adamw_step(r->adamw);
    return device_end_recording(r->ctx, s, &g->graph);
}

bool step_graph_ready(trainer *r) {
    step_graph *const g = &r->graph;
    if (g->by_ops) return true;
    if (g->why[0] || !g->warm) return false;
    if (g->graph || !record(r)) return true;
    snprintf(g->why, sizeof g->why, "%s", fattn_ctx_error(r->ctx));
    return false;
}

/* The number of a pass's loss among the step's. */
static fattn_tensor loss_at(const step_results *to, int64_t pass) {
    return fattn_tensor_view((float *)to->losses.data + pass, FATTN_F32, (fattn_device)to->losses.device,
                             to->losses.device_id, 0, NULL);
}

/* Enqueued only: the host prepares the next batch while the pass runs. */
static fattn_status run_pass(trainer *r, int64_t pass, const step_results *to) {
    const fattn_tensor loss = loss_at(to, pass);
    fattn_status s = trainer_prepare(r, pass);
    if (!s) s = trainer_send(r, pass);
    if (!s) s = fattn_graph_launch(r->ctx, r->graph.graph);
    if (!s) s = fattn_tensor_copy(r->ctx, &loss, &r->graph.loss);
    return s;
}

/* The results of the step after the history's last one. */
static fattn_status collect(trainer *r) {
    step_graph *const g = &r->graph;
    const step_results *const from = &g->results[1 - g->next];
    fattn_status s = fattn_mark_wait(r->ctx, from->arrived);
    if (s) return s;
    double loss;
    g->pending = false;
    s = trainer_share_losses(r, from->losses.data, &loss);
    if (s) return s;
    r->lr = from->lr;
    r->grad_norm = *(const double *)from->norm.data;
    r->scaling.scale = *(const float *)from->scale.data;
    r->scaling.skipped_steps += !isfinite(r->grad_norm);
    s = trainer_check_loss(r, loss);
    return s ? s : trainer_note_step(r, loss);
}

/* As run_pass. */
static fattn_status enqueue_pass(trainer *r, int64_t pass, const step_results *to) {
    const fattn_tensor loss = loss_at(to, pass);
    fattn_var last;
    fattn_tensor from;
    fattn_status s = trainer_add_gradient(r, pass, &last);
    if (!s) s = fattn_tape_value(r->tape, last, &from);
    return s ? s : fattn_tensor_copy(r->ctx, &loss, &from);
}

/* All of a step but its results. */
static fattn_status run_step(trainer *r, double lr, const step_results *to) {
    const bool by_ops = r->graph.by_ops;
    const int64_t past = r->first_pass + r->own_passes;
    fattn_status s = fattn_adamw_set_lr(r->adamw, (float)lr);
    for (int64_t pass = r->first_pass; !s && pass < past; ++pass)
        s = by_ops ? enqueue_pass(r, pass, to) : run_pass(r, pass, to);
    return s || (!by_ops && has_update(r)) ? s : fattn_adamw_step(r->adamw);
}

fattn_status step_graph_run(trainer *r, double lr) {
    step_graph *const g = &r->graph;
    step_results *const to = &g->results[g->next];
    fattn_status s = run_step(r, lr, to);
    if (!s) s = fattn_tensor_copy(r->ctx, &to->norm, &g->norm);
    if (!s) s = fattn_tensor_copy(r->ctx, &to->scale, &r->scale);
    if (!s) s = fattn_mark_set(r->ctx, to->arrived);
    if (!s) s = trainer_prepare(r, r->first_pass + r->own_passes);
    if (!s && g->pending) s = collect(r);
    if (s) return s;
    to->lr = lr;
    g->pending = true;
    g->next = 1 - g->next;
    return FATTN_OK;
}

fattn_status step_graph_settle(trainer *r) { return r->graph.pending ? collect(r) : FATTN_OK; }
