/* The options of `fattn train`: those given by the user, completed by the task's defaults or by a
   checkpoint's configuration. */
#ifndef FATTNI_CLI_TRAIN_TRAIN_OPTIONS_H
#define FATTNI_CLI_TRAIN_TRAIN_OPTIONS_H

#include "cli/train/checkpoint.h"

enum { TASK_RECALL, TASK_TEXT, TASK_TOKENS, TASK_SHARDS };
enum { IN_F32, IN_BF16, IN_F16 }; /* dtype */

typedef struct train_options {
    int preset, task, arch, algorithm, device, dtype, schedule, rounding;
    bool deterministic, overwrite, zero, fp8, fp8_renew, fp8_int8, no_graph, tf32;
    const char *loss_scale, *text, *data, *val, *tokenizer, *hellaswag, *init, *checkpoint, *resume, *json, *plot,
        *prompt;
    int64_t vocab, layers, channels, heads, kv_heads, mlp, context, batch;
    int64_t steps, warmup, seed, threads, ranks, gpus, eval_every, eval_sequences, checkpoint_every;
    int64_t sample, top_k, positions, total_batch, examples;
    double seconds, lr, weight_decay, clip, dropout, target, temperature, top_p, final_lr, beta2, time_limit;
    bool same_log; /* not an option: the log file has the name of the one of the run's first part */
} train_options;

extern const cli_option train_table[];
extern const train_options train_unset;     /* nothing given: outside every range */
extern const char *const train_roundings[]; /* names of ROUNDING_* */
extern const char train_details[];
extern const char *const train_not_stored[]; /* for checkpoint_save */

/* Fills in those of how ranks are placed, which come from no checkpoint: before the ranks are there. CLI_OK, or another
   code after an error message. */
int train_options_place(train_options *o);

/* Fills in options that were not given: from the checkpoint if there is one (fixed options are compared with
   it), else the task's defaults; and checks that options are consistent. Returns CLI_OK, or another code
   after an error message. */
int train_options_complete(train_options *o, checkpoint *from);

fattn_dtype train_dtype(int choice);
model_config train_model_config(const train_options *o, int64_t vocab);
trainer_config train_trainer_config(const train_options *o);

#endif
