/* Files of other formats than checkpoints that are written atomically, even if the process or the system fails
   meanwhile, and the lock of a folder. */
#ifndef FATTNI_CLI_TRAIN_DURABLE_H
#define FATTNI_CLI_TRAIN_DURABLE_H

#include <limits.h>
#include <stdbool.h>
#include <stddef.h>

/* A file that is written piece by piece to unfinished-*.tmp in its folder, which is created if missing; at the end
   fsync, rename, fsync of the folder. */
typedef struct durable_stream {
    int file; /* -1: an earlier call failed, with an error message */
    char path[PATH_MAX], temporary[PATH_MAX];
} durable_stream;

/* False after an error message, at once or in any later call; then the others do nothing but return false. */
bool durable_begin(durable_stream *s, const char *folder, const char *name);
bool durable_append(durable_stream *s, const void *bytes, size_t size);
/* Puts the file in its place, or with keep false removes what was written. */
bool durable_end(durable_stream *s, bool keep);
/* Until names that were given or taken there are on the disk; false with errno. */
bool durable_sync_folder(const char *folder);

/* A folder that only one process at a time may write to. All zero: not held. */
typedef struct durable_lock {
    bool held;
    int file; /* folder/running.lock, locked: the system releases it when the process ends in any way */
    char path[PATH_MAX];
} durable_lock;

/* Takes the lock; if it is already held, checks that the file still exists and takes it again if not, since
   the folder may have been removed. A missing folder is created. Then removes unfinished files of earlier
   writers. False after an error message: another process has the lock, or the folder cannot be written to.
   On a file system without locks it only prints an error message. */
bool durable_hold(durable_lock *l, const char *folder);
void durable_release(durable_lock *l); /* removes the lock's file; a no-op if not held */

#endif
