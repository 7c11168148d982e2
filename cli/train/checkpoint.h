/* Checkpoints: an HDF5 file per saved step, written so that a crash at any moment leaves the one
   before intact, and checked as a whole before a byte of it is believed.

   /config      the options of the run, by name: attributes, texts as datasets of bytes
   /state       attributes: step (taken; counter of the dropout masks), cursor (training sequences
                used; counter of the data), adam_step, elapsed, fingerprint (of the data)
   /params/N    parameter N, F32;  /adam/m/N, /adam/v/N: its moments
   /history     loss (of each step), eval_step, eval_loss, eval_right

   The last 16 bytes, which HDF5 does not look at, are a mark and the hash of all before. */
#ifndef FATTNI_CLI_TRAIN_CHECKPOINT_H
#define FATTNI_CLI_TRAIN_CHECKPOINT_H

#include "cli/base/cli.h"
#include "cli/train/trainer.h"

/* Writes folder/step-<step>.h5 through a temporary file, fsync and rename; then removes every other
   checkpoint there but the latest earlier one. False after a sentence; the folder's checkpoints are
   then as they were. options: the values that go with the table; fields of type CLI_INTS and those
   named in `skip` (NULL ends it) are not stored. */
bool checkpoint_save(const char *folder, const cli_option *table, const void *options,
                     const char *const *skip, const trainer *r);

/* The number of checkpoints of steps after `step` in the folder, -1: of all; 0 when there is no such
   folder. names: of the newest, for a sentence. */
enum { CHECKPOINT_NAMES = 160 };
int64_t checkpoint_after(const char *folder, int64_t step, char names[CHECKPOINT_NAMES]);
/* Removes them. False after a sentence. */
bool checkpoint_remove_after(const char *folder, int64_t step);

typedef struct checkpoint checkpoint;
/* path: a file, or a folder, whose newest checkpoint it is; when that one is damaged, says so and
   takes the one before. Another process may be saving there. NULL after a sentence. */
checkpoint *checkpoint_open(const char *path);
const char *checkpoint_path(const checkpoint *c); /* of the file that was opened */
/* The newest step in the folder that was opened, whose file may have been damaged; -1 for a file. */
int64_t checkpoint_newest(const checkpoint *c);
/* Reads what save stored into options; texts live as long as c. False after a sentence. */
bool checkpoint_options(checkpoint *c, const cli_option *table, void *options,
                        const char *const *skip);
/* Into a trainer that was made for these options. False after a sentence: another data fingerprint,
   another vocabulary (texts had 96 symbols once), other parameters or shapes. */
bool checkpoint_restore(checkpoint *c, trainer *r);
void checkpoint_close(checkpoint *c); /* NULL is fine */

#endif
