#include "cli/train/durable.h"

#include "cli/base/cli.h"
#include "cli/output/files.h"
#include "core/files/unfinished.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static bool stream_failed(durable_stream *s) {
    cli_fail(CLI_FAILURE, "cannot write %s: %s", s->path, strerror(errno));
    if (s->file >= 0) {
        close(s->file);
        unlink(s->temporary);
    }
    s->file = -1;
    return false;
}

bool durable_begin(durable_stream *s, const char *folder, const char *name) {
    s->file = -1;
    if (snprintf(s->path, sizeof s->path, "%s/%s", folder, name) >= (int)sizeof s->path)
        errno = ENAMETOOLONG;
    else if (cli_make_parents(s->path))
        s->file = fattni_open_unfinished(s->path, s->temporary);
    return s->file >= 0 || stream_failed(s);
}

bool durable_append(durable_stream *s, const void *bytes, size_t size) {
    return s->file >= 0 && (fattni_write_all(s->file, bytes, size) || stream_failed(s));
}

bool durable_end(durable_stream *s, bool keep) {
    if (s->file < 0) return false;
    const int file = s->file;
    if (keep && !fattni_sync_file(file)) return stream_failed(s);
    s->file = -1;
    bool ok = close(file) == 0 || !keep;
    if (ok && keep) ok = rename(s->temporary, s->path) == 0 && fattni_sync_folder_of(s->path);
    if (!ok) stream_failed(s);
    if (!ok || !keep) unlink(s->temporary);
    return ok;
}

bool durable_sync_folder(const char *folder) { return fattni_sync_folder(folder); }

/* ---- one writer ---- */

/* Of a stream, or of fattn_checkpoint_write, which gives them the same names. */
static void remove_unfinished(const char *folder) {
    DIR *d = opendir(folder);
    for (struct dirent *e; d && (e = readdir(d));) {
        char path[PATH_MAX];
        const size_t length = strlen(e->d_name);
        if (strncmp(e->d_name, "unfinished", 10) != 0 || length < 14) continue;
        if (strcmp(e->d_name + length - 4, ".tmp") != 0) continue;
        if (snprintf(path, sizeof path, "%s/%s", folder, e->d_name) < PATH_MAX) unlink(path);
    }
    if (d) closedir(d);
}

/* Whether the locked file still has its name: a process that ends removes it, and a user may. */
static bool is_there(const durable_lock *l) {
    struct stat held, named;
    return fstat(l->file, &held) == 0 && lstat(l->path, &named) == 0 && held.st_dev == named.st_dev &&
           held.st_ino == named.st_ino;
}

static bool fail_locked(const durable_lock *l, const char *folder) {
    struct flock other = {.l_type = F_WRLCK, .l_whence = SEEK_SET};
    char who[40] = "";
    if (fcntl(l->file, F_GETLK, &other) == 0 && other.l_type != F_UNLCK && other.l_pid > 0)
        snprintf(who, sizeof who, " (process %ld)", (long)other.l_pid);
    cli_fail(CLI_FAILURE,
             "another run%s saves its checkpoints in %s: wait for its end, or give another folder "
             "with --checkpoint",
             who, folder);
    return false;
}

bool durable_hold(durable_lock *l, const char *folder) {
    if (l->held && is_there(l)) return true;
    do {
        if (l->held) close(l->file);
        l->held = false;
        const int length = snprintf(l->path, sizeof l->path, "%s/running.lock", folder);
        const bool fits = length > 0 && (size_t)length < sizeof l->path;
        if (!fits) errno = ENAMETOOLONG;
        l->file = fits && cli_make_parents(l->path)
                      ? open(l->path, O_RDWR | O_CREAT | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC, 0666)
                      : -1;
        if (l->file < 0) {
            cli_fail(CLI_FAILURE, "cannot write to the folder %s: %s", folder, strerror(errno));
            return false;
        }
        struct flock all = {.l_type = F_WRLCK, .l_whence = SEEK_SET};
        if (fcntl(l->file, F_SETLK, &all) != 0) {
            if (errno == EACCES || errno == EAGAIN) {
                fail_locked(l, folder);
                close(l->file);
                return false;
            }
            cli_fail(CLI_OK, "cannot lock %s: %s; another run there would not be detected", l->path, strerror(errno));
        }
        l->held = true;
    } while (!is_there(l));
    remove_unfinished(folder);
    return true;
}

void durable_release(durable_lock *l) {
    if (!l->held) return;
    if (is_there(l)) unlink(l->path);
    close(l->file);
    l->held = false;
}
