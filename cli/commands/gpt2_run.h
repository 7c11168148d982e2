/* What `fattn train` and `fattn convert` share: a run's task, and models that come from files of llm.c. */
#ifndef FATTNI_CLI_COMMANDS_GPT2_RUN_H
#define FATTNI_CLI_COMMANDS_GPT2_RUN_H

#include "cli/llmc/model_file.h"
#include "cli/llmc/tokenizer.h"
#include "cli/train/train_options.h"

/* A model file of llm.c, or the newest model and state in the folder of a run. */
typedef struct gpt2_start {
    llmc_model sizes;
    char model[LLMC_PATH], state[LLMC_PATH]; /* state empty: none */
} gpt2_start;

/* False after an error message. */
bool gpt2_start_open(gpt2_start *s, const char *path);
/* Sets the options of the model's size that were not given; those that were must equal the file's. CLI_OK, or another
   code after an error message. */
int gpt2_start_options(const gpt2_start *s, const char *path, train_options *o);
/* Fills the trainer, whose task was opened by open_task. False after an error message. */
bool gpt2_start_load(const gpt2_start *s, trainer *r, bool has_shards);

/* Reads the tokenizer that --tokenizer names, if it is not read yet; its size is the vocabulary. CLI_OK,
   or another code after an error message. */
int open_tokenizer(train_options *o, tokenizer *t);

/* The task of complete options, and its steps when they are to be an epoch: llm.c's, the tokens of all files over those
   of a step. NULL after an error message. */
task *open_task(train_options *o);

#endif
