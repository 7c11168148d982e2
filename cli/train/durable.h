/* Files that are either there as a whole or not at all, whatever happens while they are written,
   and that are known to be undamaged before anybody reads them. */
#ifndef FATTNI_CLI_TRAIN_DURABLE_H
#define FATTNI_CLI_TRAIN_DURABLE_H

#include <stdbool.h>
#include <stddef.h>

/* Bytes at the end of such a file: a mark and a hash of all before. */
enum { DURABLE_SEAL = 16 };

/* bytes[0..size-1], of which the last DURABLE_SEAL are filled in here, become folder/name: written
   to a new file unfinished-*.tmp beside it, fsync, rename, fsync of the folder, which is made when it
   is missing. False after a sentence; the file that had the name before is then still there. */
bool durable_write(const char *folder, const char *name, unsigned char *bytes, size_t size);

/* The whole file, to be freed, and its size without the seal. NULL after a sentence: it cannot be
   read, or its seal is missing or does not fit. */
unsigned char *durable_read(const char *path, size_t *size);

/* A folder that one process at a time writes into. All zero: not held. */
typedef struct durable_lock {
    bool held;
    int file; /* folder/running.lock, locked: the system lets go of it when the process ends, however */
    char path[4096];
} durable_lock;

/* Takes the lock, or looks whether it is still there and takes it again: somebody may have removed the
   folder, which is made when it is missing. Then removes what earlier writers that died left
   unfinished. False after a sentence: another process has the lock, or the folder cannot be written
   to. Where the file system knows no locks, a sentence is all. */
bool durable_hold(durable_lock *l, const char *folder);
void durable_release(durable_lock *l); /* removes the lock's file; not held is fine */

#endif
