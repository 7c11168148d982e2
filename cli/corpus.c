#include "corpus.h"

#include "cli.h"

#include <dirent.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

enum { PIECE = 1024, HELD_OUT_ONE_IN = 10, PATH_BYTES = 4096 };
static const int64_t LARGEST = 1 << 30; /* bytes of a file; /dev/zero has no end */
static const uint8_t PERCENT = '%' - ' ';

char text_char(int symbol) { return symbol == TEXT_NEWLINE ? '\n' : (char)(' ' + symbol); }

int text_symbol(unsigned char c) {
    if (c >= ' ' && c <= '~') return c - ' ';
    if (c == '\n') return TEXT_NEWLINE;
    if (c == '\t') return 0;
    return c >= 0xc0 ? '?' - ' ' : -1; /* first byte of a UTF-8 sequence; the others vanish */
}

static bool reserve(text_buffer *t, int64_t n) {
    if (t->n + n <= t->capacity) return true;
    const int64_t capacity = 2 * (t->n + n) + PIECE;
    uint8_t *larger = realloc(t->symbols, (size_t)capacity);
    if (!larger) {
        cli_fail(CLI_FAILURE, "no memory for %lld characters of text", (long long)capacity);
        return false;
    }
    t->symbols = larger;
    t->capacity = capacity;
    return true;
}

static bool append(text_buffer *t, const uint8_t *symbols, int64_t n) {
    if (!reserve(t, n)) return false;
    memcpy(t->symbols + t->n, symbols, (size_t)n);
    t->n += n;
    return true;
}

static bool append_bytes(text_buffer *t, const unsigned char *bytes, size_t n) {
    if (!reserve(t, (int64_t)n)) return false;
    for (size_t i = 0; i < n; ++i) {
        const int symbol = text_symbol(bytes[i]);
        if (symbol >= 0) t->symbols[t->n++] = (uint8_t)symbol;
        if (bytes[i] == '\b' && t->n > 0 && t->symbols[t->n - 1] != TEXT_NEWLINE) --t->n;
    }
    return true;
}

static bool read_file(text_buffer *t, const char *path) {
    bool ok = false;
    FILE *file = fopen(path, "rb");
    if (!file) {
        cli_fail(CLI_FAILURE, "cannot read %s: %s", path, strerror(errno));
        return false;
    }
    unsigned char bytes[PIECE * 16];
    int64_t total = 0;
    size_t n;
    errno = 0;
    while ((n = fread(bytes, 1, sizeof bytes, file)) > 0) {
        total += (int64_t)n;
        if (total > LARGEST) {
            cli_fail(CLI_FAILURE, "%s: a text may have %lld bytes at most", path,
                     (long long)LARGEST);
            goto done;
        }
        if (!append_bytes(t, bytes, n)) goto done;
    }
    ok = !ferror(file);
    if (!ok) cli_fail(CLI_FAILURE, "cannot read %s: %s", path, strerror(errno));
done:
    fclose(file);
    return ok;
}

/* FNV-1a, going on from `hash`. */
static uint64_t hash_on(uint64_t hash, const uint8_t *symbols, int64_t n) {
    for (int64_t i = 0; i < n; ++i)
        hash = (hash ^ symbols[i]) * 0x100000001b3ull;
    return hash;
}
static const uint64_t HASH_START = 0xcbf29ce484222325ull;

static bool add_record(corpus *c, const uint8_t *symbols, int64_t n) {
    const uint64_t hash = hash_on(HASH_START, symbols, n);
    const bool out = (hash ^ hash >> 32) % HELD_OUT_ONE_IN == 0;
    return append(out ? &c->held_out : &c->train, symbols, n);
}

/* The end of the next record in t from `begin`: behind a line that holds only '%', or t's end. */
static int64_t end_of_record(const text_buffer *t, int64_t begin) {
    bool line_start = true;
    for (int64_t i = begin; i < t->n; ++i) {
        const bool line_end = i + 1 == t->n || t->symbols[i + 1] == TEXT_NEWLINE;
        if (line_start && line_end && t->symbols[i] == PERCENT) return i + 2 < t->n ? i + 2 : t->n;
        line_start = t->symbols[i] == TEXT_NEWLINE;
    }
    return t->n;
}

static bool add_file(corpus *c, const char *path) {
    text_buffer raw = {0};
    bool ok = read_file(&raw, path);
    const bool records = end_of_record(&raw, 0) < raw.n;
    for (int64_t begin = 0, end; ok && begin < raw.n; begin = end) {
        end = begin + PIECE < raw.n ? begin + PIECE : raw.n;
        if (records) end = end_of_record(&raw, begin);
        ok = add_record(c, raw.symbols + begin, end - begin);
    }
    free(raw.symbols);
    return ok;
}

static int is_text_name(const struct dirent *entry) {
    const char *dot = strrchr(entry->d_name, '.');
    return entry->d_name[0] != '.' && !(dot && strcmp(dot, ".dat") == 0);
}
static int by_name(const struct dirent **a, const struct dirent **b) {
    return strcmp((*a)->d_name, (*b)->d_name);
}

static bool add_folder(corpus *c, const char *folder) {
    struct dirent **entries;
    const int n = scandir(folder, &entries, is_text_name, by_name);
    if (n < 0) {
        cli_fail(CLI_FAILURE, "cannot read %s: %s", folder, strerror(errno));
        return false;
    }
    bool ok = true;
    for (int i = 0; i < n; ++i) {
        char path[PATH_BYTES];
        struct stat status;
        const int length = snprintf(path, sizeof path, "%s/%s", folder, entries[i]->d_name);
        if (ok && length < PATH_BYTES && lstat(path, &status) == 0 && S_ISREG(status.st_mode))
            ok = add_file(c, path);
        free(entries[i]);
    }
    free(entries);
    return ok;
}

bool corpus_read(corpus *c, const char *path) {
    *c = (corpus){0};
    struct stat status;
    const bool folder = stat(path, &status) == 0 && S_ISDIR(status.st_mode);
    if (!(folder ? add_folder(c, path) : add_file(c, path))) {
        corpus_free(c);
        return false;
    }
    c->fingerprint = hash_on(hash_on(HASH_START, c->train.symbols, c->train.n), c->held_out.symbols,
                             c->held_out.n);
    return true;
}

void corpus_free(corpus *c) {
    free(c->train.symbols);
    free(c->held_out.symbols);
    *c = (corpus){0};
}
