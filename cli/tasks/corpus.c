#include "cli/tasks/corpus.h"

#include "cli/base/cli.h"

#include <dirent.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

enum { PIECE = 1024, HELD_OUT_ONE_IN = 10, PATH_BYTES = 4096 };
static const int64_t LARGEST = 1 << 30; /* bytes of a file */

/* The text as it is read, before it is split. */
typedef struct record {
    uint64_t hash;
    int64_t begin, n;
    bool out; /* held out */
} record;
typedef struct reading {
    text_buffer text;
    record *records;
    int64_t n, capacity;
} reading;

static bool reserve(text_buffer *t, int64_t n) {
    if (t->n + n <= t->capacity) return true;
    const int64_t capacity = 2 * (t->n + n) + PIECE;
    uint8_t *larger = realloc(t->symbols, (size_t)capacity);
    if (!larger) {
        cli_fail(CLI_FAILURE, "no memory for %lld bytes of text", (long long)capacity);
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

static bool read_file(text_buffer *t, const char *path) {
    bool ok = false;
    FILE *file = input_open(path);
    if (!file) return false;
    unsigned char bytes[PIECE * 16];
    int64_t total = 0;
    size_t n;
    errno = 0;
    while ((n = fread(bytes, 1, sizeof bytes, file)) > 0) {
        total += (int64_t)n;
        if (total > LARGEST) {
            cli_fail(CLI_FAILURE, "%s: a text may have %lld bytes at most", path, (long long)LARGEST);
            goto done;
        }
        if (!append(t, bytes, (int64_t)n)) goto done;
    }
    ok = !ferror(file);
    if (!ok) cli_fail(CLI_FAILURE, "cannot read %s: %s", path, strerror(errno));
done:
    fclose(file);
    return ok;
}

/* FNV-1a, continued from `hash`. */
static uint64_t hash_on(uint64_t hash, const uint8_t *symbols, int64_t n) {
    for (int64_t i = 0; i < n; ++i) hash = (hash ^ symbols[i]) * 0x100000001b3ull;
    return hash;
}
static const uint64_t HASH_START = 0xcbf29ce484222325ull;

static bool add_record(reading *r, int64_t begin, int64_t n) {
    if (r->n == r->capacity) {
        const int64_t capacity = 2 * r->capacity + PIECE;
        record *larger = realloc(r->records, (size_t)capacity * sizeof *larger);
        if (!larger) {
            cli_fail(CLI_FAILURE, "no memory for %lld records of text", (long long)capacity);
            return false;
        }
        r->records = larger;
        r->capacity = capacity;
    }
    uint64_t hash = hash_on(HASH_START, r->text.symbols + begin, n);
    hash = (hash ^ hash >> 33) * 0xff51afd7ed558ccdull; /* mixes the last bytes into all bits */
    hash = (hash ^ hash >> 33) * 0xc4ceb9fe1a85ec53ull;
    r->records[r->n++] = (record){hash, begin, n, false};
    return true;
}

/* The end of the next record in t from `begin`: after a line with only '%', or t's end. */
static int64_t end_of_record(const text_buffer *t, int64_t begin) {
    for (int64_t line = begin; line < t->n;) {
        const uint8_t *const at = t->symbols + line;
        const uint8_t *const newline = memchr(at, '\n', (size_t)(t->n - line));
        const int64_t length = newline ? newline - at : t->n - line;
        line += newline ? length + 1 : length;
        if (at[0] == '%' && (length == 1 || (length == 2 && at[1] == '\r'))) return line;
    }
    return t->n;
}

static bool add_file(void *arg, const char *path) {
    reading *const r = arg;
    text_buffer *const t = &r->text;
    int64_t begin = t->n, end;
    if (!read_file(t, path)) return false;
    const bool records = end_of_record(t, begin) < t->n;
    for (; begin < t->n; begin = end) {
        end = begin + PIECE < t->n ? begin + PIECE : t->n;
        if (records) end = end_of_record(t, begin);
        if (!add_record(r, begin, end - begin)) return false;
    }
    return true;
}

static int is_text_name(const struct dirent *entry) {
    const char *dot = strrchr(entry->d_name, '.');
    return entry->d_name[0] != '.' && !(dot && strcmp(dot, ".dat") == 0);
}
static int by_name(const struct dirent **a, const struct dirent **b) { return strcmp((*a)->d_name, (*b)->d_name); }

bool corpus_each(const char *path, file_visit *f, void *arg) {
    struct dirent **entries;
    struct stat status;
    if (stat(path, &status) != 0 || !S_ISDIR(status.st_mode)) return f(arg, path);
    const int n = scandir(path, &entries, is_text_name, by_name);
    if (n < 0) {
        cli_fail(CLI_FAILURE, "cannot read %s: %s", path, strerror(errno));
        return false;
    }
    bool ok = true;
    for (int i = 0; i < n; ++i) {
        char file[PATH_BYTES];
        const int length = snprintf(file, sizeof file, "%s/%s", path, entries[i]->d_name);
        if (ok && length < PATH_BYTES && lstat(file, &status) == 0 && S_ISREG(status.st_mode)) ok = f(arg, file);
        free(entries[i]);
    }
    free(entries);
    return ok;
}

/* ---- the split ---- */

static int by_hash(const void *a, const void *b) {
    const record *const x = a, *const y = b;
    return (x->hash > y->hash) - (x->hash < y->hash);
}
static int by_place(const void *a, const void *b) {
    const record *const x = a, *const y = b;
    return (x->begin > y->begin) - (x->begin < y->begin);
}

/* Chooses the held-out records by the rule in corpus.h; false when they have less than `enough` bytes. */
static bool choose(reading *r, int64_t most, int64_t enough) {
    int64_t held = 0;
    qsort(r->records, (size_t)r->n, sizeof *r->records, by_hash);
    for (int64_t i = 0, next; i < r->n; i = next) {
        int64_t copies = 0; /* bytes of this record and its copies */
        for (next = i; next < r->n && r->records[next].hash == r->records[i].hash; ++next) copies += r->records[next].n;
        if (held + copies > most) {
            if (held >= enough) break; /* otherwise small records would be preferred */
            continue;
        }
        for (int64_t k = i; k < next; ++k) r->records[k].out = true;
        held += copies;
    }
    qsort(r->records, (size_t)r->n, sizeof *r->records, by_place);
    return held >= enough;
}

static int64_t at_least_2(int64_t n) { return n > 2 ? n : 2; }

static bool split(corpus *c, reading *r) {
    const text_buffer *const t = &r->text;
    const int64_t most = at_least_2(t->n / HELD_OUT_ONE_IN);
    if (r->n == 0) return true;
    if (!choose(r, most, at_least_2(most / 2))) {
        const int64_t begin = t->n > most ? t->n - most : 0;
        return append(&c->train, t->symbols, begin) && append(&c->held_out, t->symbols + begin, t->n - begin);
    }
    for (int64_t i = 0; i < r->n; ++i) {
        const record *const a = &r->records[i];
        if (!append(a->out ? &c->held_out : &c->train, t->symbols + a->begin, a->n)) return false;
    }
    return true;
}

int64_t corpus_needed(int64_t train) { return train + at_least_2((train - 1) / (HELD_OUT_ONE_IN - 1)); }

bool corpus_read(corpus *c, const char *path) {
    *c = (corpus){0};
    reading r = {0};
    const bool ok = corpus_each(path, add_file, &r) && split(c, &r);
    free(r.text.symbols);
    free(r.records);
    if (!ok) {
        corpus_free(c);
        return false;
    }
    c->fingerprint = hash_on(hash_on(HASH_START, c->train.symbols, c->train.n), c->held_out.symbols, c->held_out.n);
    return true;
}

void corpus_free(corpus *c) {
    free(c->train.symbols);
    free(c->held_out.symbols);
    *c = (corpus){0};
}
