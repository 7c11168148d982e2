#include "durable.h"

#include "cli.h"
#include "files.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static const char MARK[DURABLE_SEAL / 2] = {'f', 'a', 't', 't', 'n', 'c', 'k', '1'};

/* FNV-1a over the bytes, as 8 bytes, lowest first. */
static void seal_of(const unsigned char *bytes, size_t size, unsigned char seal[DURABLE_SEAL]) {
    uint64_t hash = 0xcbf29ce484222325ull;
    for (size_t i = 0; i < size; ++i)
        hash = (hash ^ bytes[i]) * 0x100000001b3ull;
    memcpy(seal, MARK, sizeof MARK);
    for (size_t i = 0; i < sizeof hash; ++i)
        seal[sizeof MARK + i] = (unsigned char)(hash >> (8 * i));
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

/* True when all of it is known to be on the disk. */
static bool write_file(const char *path, const unsigned char *bytes, size_t size) {
    const int file = open(path, O_WRONLY | O_CREAT | O_TRUNC, 0666);
    if (file < 0) return false;
    const bool ok = write_all(file, bytes, size) && fsync(file) == 0;
    const int error = errno;
    const bool closed = close(file) == 0;
    if (!ok) errno = error;
    return ok && closed;
}

/* A name is on the disk when its folder is. */
static bool sync_folder(const char *folder) {
    const int file = open(folder, O_RDONLY | O_DIRECTORY);
    if (file < 0) return false;
    const bool ok = fsync(file) == 0;
    close(file);
    return ok;
}

bool durable_write(const char *folder, const char *name, unsigned char *bytes, size_t size) {
    char path[PATH_MAX], temporary[PATH_MAX];
    snprintf(temporary, sizeof temporary, "%s/unfinished.tmp", folder);
    const int length = snprintf(path, sizeof path, "%s/%s", folder, name);
    seal_of(bytes, size - DURABLE_SEAL, bytes + size - DURABLE_SEAL);
    bool ok = length > 0 && (size_t)length < sizeof path;
    if (!ok) errno = ENAMETOOLONG;
    ok = ok && cli_make_parents(path) && write_file(temporary, bytes, size) &&
         rename(temporary, path) == 0 && sync_folder(folder);
    if (ok) return true;
    cli_fail(CLI_FAILURE, "cannot write %s/%s: %s", folder, name, strerror(errno));
    unlink(temporary);
    return false;
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
                 errno ? strerror(errno) : "it became shorter meanwhile");
    fclose(file);
    unsigned char seal[DURABLE_SEAL];
    if (ok && (n < sizeof seal || memcmp(bytes + n - sizeof seal, MARK, sizeof MARK) != 0)) {
        cli_fail(CLI_FAILURE, "%s is no checkpoint of fattn, or its end is missing", path);
        ok = false;
    } else if (ok) {
        seal_of(bytes, n - sizeof seal, seal);
        ok = memcmp(bytes + n - sizeof seal, seal, sizeof seal) == 0;
        if (!ok) cli_fail(CLI_FAILURE, "%s is damaged: its checksum does not fit", path);
    }
    if (ok) {
        *size = n - sizeof seal;
        return bytes;
    }
    free(bytes);
    return NULL;
}
