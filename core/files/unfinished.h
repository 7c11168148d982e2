/* What writers of files that replace others have in common (autograd_c/fixture/sealed_file.c, cli/train/durable.c):
   bytes go to a file of another name in the same folder, which then takes the place of the old one, so that no reader
   and no failure meets half a file. POSIX; errors are in errno. */
#ifndef FATTNI_CORE_FILES_UNFINISHED_H
#define FATTNI_CORE_FILES_UNFINISHED_H

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

/* Writes all bytes, or fails. */
static inline bool fattni_write_all(int file, const void *bytes, size_t size) {
    const char *next = bytes;
    while (size > 0) {
        const ssize_t n = write(file, next, size);
        if (n < 0 && errno == EINTR) continue;
        if (n < 0) return false;
        next += n;
        size -= (size_t)n;
    }
    return true;
}

/* The bytes of path up to its last slash. */
static inline int fattni_folder_length(const char *path) {
    const char *const slash = strrchr(path, '/');
    return slash ? (int)(slash - path + 1) : 0;
}

/* Creates unfinished-*.tmp beside path, for writing; -1: it cannot. Never opens an existing file or link. */
static inline int fattni_open_unfinished(const char *path, char temporary[PATH_MAX]) {
    int file = -1;
    errno = EEXIST;
    for (int n = 0; file < 0 && errno == EEXIST && n < 1000; ++n) {
        const int length = snprintf(temporary, PATH_MAX, "%.*sunfinished-%ld-%d.tmp", fattni_folder_length(path), path,
                                    (long)getpid(), n);
        errno = ENAMETOOLONG;
        if (length < PATH_MAX) file = open(temporary, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0666);
    }
    return file;
}

/* Until all bytes of a file are on the disk. */
static inline bool fattni_sync_file(int file) {
    int result;
    do result = fsync(file);
    while (result != 0 && errno == EINTR);
    return result == 0;
}

/* A new name is on the disk when its folder is synced. */
static inline bool fattni_sync_folder(const char *folder) {
    const int file = open(folder, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (file < 0) return false;
    const bool ok = fattni_sync_file(file);
    const int error = errno;
    close(file);
    errno = error;
    return ok;
}
static inline bool fattni_sync_folder_of(const char *path) {
    char folder[PATH_MAX];
    const int length = fattni_folder_length(path);
    snprintf(folder, sizeof folder, "%.*s", length ? length : 1, length ? path : ".");
    return fattni_sync_folder(folder);
}

#endif
