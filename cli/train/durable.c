#include "cli/train/durable.h"

#include "cli/base/cli.h"
#include "cli/output/files.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum { NAME_BYTES = 64 }; /* of a temporary file */
static const char MARK[DURABLE_SEAL / 2] = {'f', 'a', 't', 't', 'n', 'c', 'k', '1'};

/* FNV-1a over the bytes, as 8 bytes, lowest first. */
static void seal_of(const unsigned char *bytes, size_t size, unsigned char seal[DURABLE_SEAL]) {
    uint64_t hash = 0xcbf29ce484222325ull;
    for (size_t i = 0; i < size; ++i) hash = (hash ^ bytes[i]) * 0x100000001b3ull;
    memcpy(seal, MARK, sizeof MARK);
    for (size_t i = 0; i < sizeof hash; ++i) seal[sizeof MARK + i] = (unsigned char)(hash >> (8 * i));
}

static bool write_all(int file, const unsigned char *bytes, size_t size) {
    while (size > 0) {
        const ssize_t n = write(file, bytes, size);
        if (n < 0 && errno == EINTR) continue;
        if (n < 0) return false;
        bytes += n;
        size -= (size_t)n;
    }
    return true;
}

/* Creates a new file with a unique name, and its path. Never opens an existing file or link. */
static int open_unfinished(const char *folder, char path[PATH_MAX]) {
    int file = -1;
    errno = EEXIST;
    for (int n = 0; file < 0 && errno == EEXIST && n < 1000; ++n) {
        snprintf(path, PATH_MAX, "%s/unfinished-%ld-%d.tmp", folder, (long)getpid(), n);
        file = open(path, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0666);
    }
    return file;
}

/* True when all bytes are on the disk. */
static bool write_file(int file, const unsigned char *bytes, size_t size) {
    const bool ok = write_all(file, bytes, size) && fsync(file) == 0;
    const int error = errno;
    const bool closed = close(file) == 0;
    if (!ok) errno = error;
    return ok && closed;
}

/* A new name is on the disk when its folder is synced. */
static bool sync_folder(const char *folder) {
    const int file = open(folder, O_RDONLY | O_DIRECTORY);
    if (file < 0) return false;
    const bool ok = fsync(file) == 0;
    close(file);
    return ok;
}

/* False with errno. */
static bool try_to_write(const char *folder, const char *path, const unsigned char *bytes, size_t size) {
    char temporary[PATH_MAX];
    const int file = cli_make_parents(path) ? open_unfinished(folder, temporary) : -1;
    if (file < 0) return false;
    if (write_file(file, bytes, size) && rename(temporary, path) == 0) return sync_folder(folder);
    const int error = errno;
    unlink(temporary);
    errno = error;
    return false;
}

bool durable_write(const char *folder, const char *name, unsigned char *bytes, size_t size) {
    char path[PATH_MAX];
    const int length = snprintf(path, sizeof path, "%s/%s", folder, name);
    seal_of(bytes, size - DURABLE_SEAL, bytes + size - DURABLE_SEAL);
    bool ok = length > 0 && length + NAME_BYTES < PATH_MAX;
    if (!ok) errno = ENAMETOOLONG;
    ok = ok && (try_to_write(folder, path, bytes, size) ||
                (errno == ENOENT && try_to_write(folder, path, bytes, size))); /* the folder was removed meanwhile */
    if (!ok) cli_fail(CLI_FAILURE, "cannot write %s/%s: %s", folder, name, strerror(errno));
    return ok;
}

/* ---- without a seal ---- */

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
    const int a = snprintf(s->folder, sizeof s->folder, "%s", folder);
    const int b = snprintf(s->path, sizeof s->path, "%s/%s", folder, name);
    const bool fits = a < DURABLE_PATH && b + NAME_BYTES < DURABLE_PATH;
    if (!fits) errno = ENAMETOOLONG;
    if (!fits || !cli_make_parents(s->path)) return stream_failed(s);
    s->file = open_unfinished(folder, s->temporary);
    return s->file >= 0 || stream_failed(s);
}

bool durable_append(durable_stream *s, const void *bytes, size_t size) {
    return s->file >= 0 && (write_all(s->file, bytes, size) || stream_failed(s));
}

bool durable_end(durable_stream *s, bool keep) {
    if (s->file < 0) return false;
    const int file = s->file;
    if (keep && fsync(file) != 0) return stream_failed(s);
    s->file = -1;
    bool ok = close(file) == 0 || !keep;
    if (ok && keep) ok = rename(s->temporary, s->path) == 0 && sync_folder(s->folder);
    if (!ok) stream_failed(s);
    if (!ok || !keep) unlink(s->temporary);
    return ok;
}

/* ---- one writer ---- */

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

unsigned char *durable_read(const char *path, size_t *size) {
    FILE *file = input_open(path);
    if (!file) return NULL;
    unsigned char *bytes = NULL;
    struct stat status = {0};
    bool ok = fstat(fileno(file), &status) == 0;
    const size_t n = (size_t)status.st_size;
    if (ok) {
        bytes = malloc(n + 1);
        errno = bytes ? 0 : ENOMEM;
        ok = bytes && fread(bytes, 1, n, file) == n;
    }
    if (!ok)
        cli_fail(CLI_FAILURE, "cannot read %s: %s", path,
                 errno ? strerror(errno) : "it was truncated while it was read");
    fclose(file);
    unsigned char seal[DURABLE_SEAL];
    if (ok && (n < sizeof seal || memcmp(bytes + n - sizeof seal, MARK, sizeof MARK) != 0)) {
        cli_fail(CLI_FAILURE, "%s is not a checkpoint of fattn, or is truncated", path);
        ok = false;
    } else if (ok) {
        seal_of(bytes, n - sizeof seal, seal);
        ok = memcmp(bytes + n - sizeof seal, seal, sizeof seal) == 0;
        if (!ok) cli_fail(CLI_FAILURE, "%s is damaged: its checksum does not match", path);
    }
    if (ok) {
        *size = n - sizeof seal;
        return bytes;
    }
    free(bytes);
    return NULL;
}
