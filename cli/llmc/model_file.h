/* Model files and optimizer states of llm.c (train_gpt2.cu's model_*.bin, state_*_00000.bin, DONE_*), of one process.

   Both have the 16 tensors wte wpe ln1w ln1b qkvw qkvb attprojw attprojb ln2w ln2b fcw fcb fcprojw fcprojb lnfw lnfb,
   those of blocks stacked over the blocks, weights as [out,in]. A model is F32 (version 3) or bf16 (version 5), a state
   has AdamW's m, v and the F32 masters, and the loader's place. Error messages name file, offset and what is expected;
   a file that is refused changes nothing. */
#ifndef FATTNI_CLI_LLMC_MODEL_FILE_H
#define FATTNI_CLI_LLMC_MODEL_FILE_H

#include "cli/llmc/shards.h"
#include "cli/train/trainer.h"

typedef struct llmc_model {
    int64_t positions, vocab, columns, layers, heads, channels;
    bool bf16;
    int64_t numbers; /* elements of all tensors */
} llmc_model;

/* Reads the header; the file must have as many bytes as it asks for. columns must be vocab, rounded up to a multiple of
   128. False after an error message. */
bool llmc_model_sizes(const char *path, llmc_model *m);
/* Fills the parameters of a GPT2 of these sizes, and its masters: with the file's values as they are. Not a finite
   number: an error. False after an error message; parameters may then be partly filled. */
bool llmc_model_read(const char *path, trainer *r);
/* Writes the model's values, F32 from the masters where there are some; bf16 rounds to nearest, ties to even. */
bool llmc_model_write(const char *folder, const char *name, const trainer *r, bool bf16);

/* Fills masters, or the values that have none (if the file has masters, else they stay), moments, step counts, and the
   cursor. l: the loader of the task's training files; NULL: the data does not matter. False after an error message. */
bool llmc_state_read(const char *path, trainer *r, loader *l);
/* Writes model_STEP.bin, state_STEP_00000.bin and, when both are on the disk, DONE_STEP. l: at the run's place; NULL: a
   run without shuffled files, at its start. False after an error message; what could not be written whole, as on a full
   disk, has replaced nothing. */
bool llmc_run_write(const char *folder, const trainer *r, bool bf16, const loader *l);
/* The newest step with a DONE file, which readers take; -1: there is none. */
int64_t llmc_run_newest(const char *folder);
/* Removes the DONE files of later steps, their models and states. False after an error message. */
bool llmc_run_remove_after(const char *folder, int64_t step);
/* The paths of the newest model and state with a DONE file; false, without an error message, when there is none. */
enum { LLMC_PATH = 4096 };
bool llmc_run_find(const char *folder, char model_path[LLMC_PATH], char state_path[LLMC_PATH]);

#endif
