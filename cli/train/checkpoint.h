/* Checkpoints: an HDF5 file per saved step, of the library (fattn/checkpoint.h): written so that a crash at any time
   leaves the previous one intact, and read only after its hash has been verified. Beside what the library stores,
   /params, /adam and /state with step (taken; counter of the dropout masks), adam_step, the loss scale and the seed of
   stochastic rounding, it has

   /config      the options of the run, by name: attributes, texts as datasets of bytes
   /state       attributes: cursor (training sequences used; counter of the data), elapsed, fingerprint (of the data)
   /history     loss (of each step), eval_step, eval_loss, eval_right */
#ifndef FATTNI_CLI_TRAIN_CHECKPOINT_H
#define FATTNI_CLI_TRAIN_CHECKPOINT_H

#include "cli/base/cli.h"
#include "cli/output/files.h"
#include "cli/train/trainer.h"

/* Writes folder/step-<step>.h5 by fattn_checkpoint_write; then removes every other checkpoint there except the latest
   earlier one. False after an error message; the folder's checkpoints are then unchanged. options: the values that the
   table describes; fields of type CLI_INTS and those named in `skip` (NULL ends it) are not stored. With ranks rank 0
   alone writes; where they divide AdamW's state all must call it. */
bool checkpoint_save(const char *folder, const cli_option *table, const void *options, const char *const *skip,
                     const trainer *r);

/* The number of checkpoints of steps after `step` in the folder, -1: of all; 0 when there is no such
   folder. names: of the newest, for an error message. */
enum { CHECKPOINT_NAMES = 160 };
int64_t checkpoint_after(const char *folder, int64_t step, char names[CHECKPOINT_NAMES]);
/* Visits the folder's checkpoints. False when f has ended it. */
bool checkpoint_each(const char *folder, file_visit *f, void *arg);
/* Removes those of steps after `step`. False after an error message. */
bool checkpoint_remove_after(const char *folder, int64_t step);

typedef struct checkpoint checkpoint;
/* path: a file, or a folder, of which the newest checkpoint is opened; if that is damaged, prints an error
   message and opens the one before. Another process may be saving there. NULL after an error message. */
checkpoint *checkpoint_open(const char *path);
const char *checkpoint_path(const checkpoint *c); /* of the file that was opened */
/* The newest step in the folder that was opened, even if its file is damaged; -1 for a file. */
int64_t checkpoint_newest(const checkpoint *c);
/* Reads the stored options; their texts live as long as c. False after an error message. */
bool checkpoint_options(checkpoint *c, const cli_option *table, void *options, const char *const *skip);
/* Of the data. False after an error message. */
bool checkpoint_fingerprint(checkpoint *c, uint64_t *out);
/* Restores a trainer that was created with these options. False after an error message: different data
   fingerprint, vocabulary (in older versions texts had 96 symbols), parameters or shapes. Threads that are ranks may
   call it at the same time. */
bool checkpoint_restore(checkpoint *c, trainer *r);
/* The parameters alone, in any dtype, whatever the data. False after an error message. */
bool checkpoint_read_model(checkpoint *c, fattn_ctx *ctx, model *m);
void checkpoint_close(checkpoint *c); /* NULL is allowed */

#endif
