/* fattn tokens: text to token files, as llm.c's programs and `fattn train --task shards` read them. */
#include "cli/base/cli.h"
#include "cli/llmc/file.h"
#include "cli/llmc/tokenizer.h"
#include "cli/output/files.h"
#include "cli/train/durable.h"

#include <errno.h>
#include <fcntl.h>
#include <glob.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

typedef struct tokens_options {
    const char *out, *tokenizer;
    double val;
    int64_t shard;
    int split;
    bool overwrite;
} tokens_options;

enum { SPLIT_FILE, SPLIT_PARAGRAPH, SPLIT_LINE };
enum { PATH_BYTES = 4096, NAME_BYTES = 64, DIGITS = 6, AT_ONCE = 1 << 16, NARROW_TOKENS = 1 << 16 };
static const int64_t LARGEST = (int64_t)1 << 32; /* bytes of a file */

#define FIELD(name) offsetof(tokens_options, name)
static const cli_option table[] = {
    {"out", CLI_TEXT, FIELD(out), "PREFIX", 0, 0, NULL, "of the files that are written"},
    {"tokenizer", CLI_TEXT, FIELD(tokenizer), "FILE", 0, 0, NULL,
     "llm.c's tokenizer file; without it tokens are bytes"},
    {"val", CLI_REAL, FIELD(val), "V", 0, 1, NULL, "share of the tokens, the first ones, that is held out"},
    {"shard", CLI_INT, FIELD(shard), "N", 2, 2147483647, NULL,
     "tokens of a file; less than half of that at the end joins the file before"},
    {"split", CLI_CHOICE, FIELD(split), "S", 0, 0, "file|paragraph|line",
     "what a document is; the end-of-text token precedes each"},
    {"overwrite", CLI_FLAG, FIELD(overwrite), NULL, 0, 0, NULL, "replace files of this prefix that are there"},
    {NULL}};
static const tokens_options defaults = {.out = "tokens", .val = 0.1, .shard = 100000000};

/* ---- reading ---- */

static unsigned char *read_text(const char *path, int64_t *size) {
    FILE *file = input_open(path);
    if (!file) return NULL;
    unsigned char *text = NULL;
    int64_t n = 0, capacity = 0;
    bool ok = true;
    errno = 0;
    for (size_t got = 1; ok && got > 0; n += (int64_t)got) {
        if (n + AT_ONCE > capacity) {
            capacity = 2 * capacity + AT_ONCE;
            unsigned char *const larger = n < LARGEST ? realloc(text, (size_t)capacity) : NULL;
            ok = larger != NULL;
            if (!ok) cli_fail(CLI_FAILURE, "%s: no memory for more than %lld bytes", path, (long long)n);
            if (ok) text = larger;
        }
        got = ok ? fread(text + n, 1, AT_ONCE, file) : 0;
    }
    if (ok && ferror(file)) {
        cli_fail(CLI_FAILURE, "cannot read %s: %s", path, strerror(errno));
        ok = false;
    }
    fclose(file);
    *size = n;
    if (ok) return text;
    free(text);
    return NULL;
}

/* The end of the document that begins at `begin`: a line with its end, a paragraph with the blank lines around it. */
static int64_t document_end(const unsigned char *text, int64_t n, int64_t begin, int split) {
    bool has_text = false, ended = false;
    for (int64_t line = begin, next; split != SPLIT_FILE && line < n; line = next) {
        const unsigned char *const newline = memchr(text + line, '\n', (size_t)(n - line));
        next = newline ? newline - text + 1 : n;
        if (split == SPLIT_LINE) return next;
        const bool blank = text[line] == '\n' || (text[line] == '\r' && (next - line == 1 || text[line + 1] == '\n'));
        if (ended && !blank) return line;
        has_text = has_text || !blank;
        ended = has_text && blank;
    }
    return n;
}

static bool add_file(const tokenizer *t, const char *path, int split, token_list *to) {
    int64_t n;
    unsigned char *const text = read_text(path, &n);
    bool ok = text != NULL;
    for (int64_t begin = 0, end; ok && begin < n; begin = end) {
        end = document_end(text, n, begin, split);
        ok = token_list_add(to, (uint32_t)t->end) && tokenizer_encode(t, text + begin, end - begin, to);
    }
    free(text);
    return ok;
}

/* ---- what is written ---- */

/* Files number 0..val_shards-1 have held-out tokens, the train_shards after them tokens to train on; then comes the
   tokenizer, unless one was given. */
typedef struct token_files {
    const tokens_options *o;
    const tokenizer *t;
    const uint32_t *token;
    int64_t val_tokens, train_tokens;
    int64_t val_shards, train_shards, n;
    char folder[PATH_BYTES - NAME_BYTES];
    const char *base; /* the last part of --out */
    int lock;         /* file number 0, locked while files wait; -1: not */
} token_files;

/* Shards of n tokens. A rest of less than half a shard joins the shard before it: it may be shorter than a batch. A
   single token has no target and is left out. */
static int64_t shards_of(const tokens_options *o, int64_t n) {
    const int64_t whole = n / o->shard, rest = n % o->shard;
    const bool joins = whole > 0 && 2 * rest < o->shard && o->shard + rest <= INT32_MAX;
    return whole + (rest > 1 && !joins);
}

/* What follows --out in the name of file number k. */
static const char *rest_of(const token_files *f, int64_t k, char rest[NAME_BYTES]) {
    if (k < f->val_shards + f->train_shards)
        snprintf(rest, NAME_BYTES, "_%s_%0*lld.bin", k < f->val_shards ? "val" : "train", DIGITS, (long long)k);
    else
        snprintf(rest, NAME_BYTES, "_tokenizer.bin");
    return rest;
}

static void path_of(const token_files *f, int64_t k, char path[PATH_BYTES]) {
    char rest[NAME_BYTES];
    snprintf(path, PATH_BYTES, "%s%s", f->o->out, rest_of(f, k, rest));
}

/* Where file number k waits until all are written. */
static void waiting_path_of(const token_files *f, int64_t k, char path[PATH_BYTES]) {
    snprintf(path, PATH_BYTES, "%s/unfinished-%ld-of-%lld.tmp", f->folder, (long)getpid(), (long long)k);
}

/* The tokens of file number k, and where they begin. */
static int64_t tokens_of(const token_files *f, int64_t k, const uint32_t **token) {
    if (k == f->val_shards + f->train_shards) return f->t->n;
    const bool trains = k >= f->val_shards;
    const int64_t i = k - (trains ? f->val_shards : 0), first = i * f->o->shard;
    const int64_t left = (trains ? f->train_tokens : f->val_tokens) - first;
    *token = f->token + (trains ? f->val_tokens : 0) + first;
    return i + 1 < (trains ? f->train_shards : f->val_shards) || left > INT32_MAX ? f->o->shard : left;
}

/* Where files are written; plan says which. */
static bool name_files(token_files *f, const tokens_options *o, const tokenizer *t) {
    const char *const slash = strrchr(o->out, '/');
    *f = (token_files){.o = o, .t = t, .base = slash ? slash + 1 : o->out, .lock = -1};
    if (strlen(o->out) > PATH_BYTES - 2 * NAME_BYTES) {
        cli_fail(CLI_FAILURE, "--out has %zu bytes, %d are possible", strlen(o->out), PATH_BYTES - 2 * NAME_BYTES);
        return false;
    }
    snprintf(f->folder, sizeof f->folder, "%.*s", slash ? (int)(slash - o->out + (slash == o->out)) : 1,
             slash ? o->out : ".");
    return true;
}

static void plan(token_files *f, const token_list *l) {
    const tokens_options *const o = f->o;
    f->token = l->token;
    f->val_tokens = (int64_t)(o->val * (double)l->n);
    f->train_tokens = l->n - f->val_tokens;
    f->val_shards = shards_of(o, f->val_tokens);
    f->train_shards = shards_of(o, f->train_tokens);
    f->n = f->val_shards + f->train_shards + !o->tokenizer;
}

/* ---- files of an earlier call ---- */

/* --out with its own * ? [ and \ as they are, and what follows, as a pattern of glob(3). */
static void pattern_of(const char *out, const char *rest, char pattern[2 * PATH_BYTES]) {
    char *to = pattern;
    for (; *out; *to++ = *out++)
        if (strchr("*?[\\", *out)) *to++ = '\\';
    strcpy(to, rest);
}

/* They would be read together with the new ones. Some may be of a longer prefix: not is_shard. */
static void find_old(const token_files *f, glob_t *found) {
    static const char *const rests[] = {"_train_*.bin", "_val_*.bin"};
    char pattern[2 * PATH_BYTES];
    for (int k = 0; k < 2; ++k) {
        pattern_of(f->o->out, rests[k], pattern);
        (void)glob(pattern, k ? GLOB_APPEND : 0, NULL, found);
    }
}

/* Whether a path that find_old has found is a file of this prefix: between its kind and .bin there is a number only. */
static bool is_shard(const token_files *f, const char *path) {
    const char *const slash = strrchr(path, '/');
    const char *const number = strchr((slash ? slash + 1 : path) + strlen(f->base) + 1, '_') + 1;
    const size_t digits = strspn(number, "0123456789");
    return digits >= DIGITS && strcmp(number + digits, ".bin") == 0;
}

static bool may_write(const token_files *f, const glob_t *old) {
    char path[PATH_BYTES];
    struct stat status;
    if (f->o->overwrite) return true;
    const char *there = NULL;
    for (size_t i = 0; !there && i < old->gl_pathc; ++i)
        if (is_shard(f, old->gl_pathv[i])) there = old->gl_pathv[i];
    path_of(f, f->val_shards + f->train_shards, path);
    if (!there && !f->o->tokenizer && lstat(path, &status) == 0) there = path;
    if (!there) return true;
    cli_fail(CLI_FAILURE, "%s is there: name another --out, or remove these files with --overwrite", there);
    return false;
}

static bool is_new(const token_files *f, const char *path) {
    char same[PATH_BYTES];
    const int64_t k = strtoll(strrchr(path, '_') + 1, NULL, 10);
    if (k < 0 || k >= f->val_shards + f->train_shards) return false;
    path_of(f, k, same);
    return strcmp(path, same) == 0;
}

static bool remove_old(const token_files *f, const glob_t *old) {
    bool ok = true;
    for (size_t i = 0; i < old->gl_pathc; ++i) {
        const char *const path = old->gl_pathv[i];
        if (!is_shard(f, path) || is_new(f, path) || unlink(path) == 0) continue;
        cli_fail(CLI_FAILURE, "cannot remove %s: %s", path, strerror(errno));
        ok = false;
    }
    return ok;
}

/* ---- writing ---- */

static bool put_shard(durable_stream *s, const uint32_t *token, int64_t n, bool narrow) {
    unsigned char header[LLMC_HEADER_BYTES], *const bytes = malloc(4 * AT_ONCE);
    if (!bytes) cli_fail(CLI_FAILURE, "no memory for a buffer");
    llmc_header(header, (const int32_t[]){narrow ? LLMC_TOKENS : LLMC_TOKENS_32, narrow ? 1 : 7, (int32_t)n}, 3);
    bool ok = bytes && durable_append(s, header, sizeof header);
    for (int64_t done = 0; ok && done < n; done += AT_ONCE) {
        const int64_t part = n - done < AT_ONCE ? n - done : AT_ONCE;
        const int size = narrow ? 2 : 4;
        for (int64_t i = 0; i < part; ++i) {
            if (narrow)
                llmc_put_u16(bytes + i * size, token[done + i]);
            else
                llmc_put_u32(bytes + i * size, token[done + i]);
        }
        ok = durable_append(s, bytes, (size_t)(part * size)) && !cli_interrupted();
    }
    free(bytes);
    return ok;
}

/* Removes what processes that were killed have left: files with the name of a number 0 that is not locked. */
static void remove_leftovers(const token_files *f) {
    char pattern[2 * PATH_BYTES];
    glob_t first = {0};
    pattern_of(f->folder, "/unfinished-*-of-0.tmp", pattern);
    (void)glob(pattern, 0, NULL, &first);
    for (size_t i = 0; i < first.gl_pathc; ++i) {
        char *const path = first.gl_pathv[i];
        glob_t all = {0};
        const int file = open(path, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
        if (file >= 0 && flock(file, LOCK_EX | LOCK_NB) == 0) {
            path[strlen(path) - strlen("0.tmp")] = 0;
            pattern_of(path, "*.tmp", pattern);
            (void)glob(pattern, 0, NULL, &all);
        }
        for (size_t k = all.gl_pathc; k > 0; --k)
            unlink(all.gl_pathv[k - 1]); /* number 0, by which they are found, last */
        globfree(&all);
        if (file >= 0) close(file);
    }
    globfree(&first);
}

/* Gives a file that begins the name with which it waits; number 0 is locked before. */
static void let_wait(token_files *f, int64_t k, durable_stream *s) {
    char waiting[PATH_BYTES];
    waiting_path_of(f, k, waiting);
    if (k == 0 && flock(s->file, LOCK_EX | LOCK_NB) == 0) f->lock = fcntl(s->file, F_DUPFD_CLOEXEC, 0);
    if (rename(s->temporary, waiting) == 0) snprintf(s->temporary, sizeof s->temporary, "%s", waiting);
}

/* Under the name with which it waits; an error message has the later one. */
static bool write_file(token_files *f, int64_t k) {
    char name[PATH_BYTES], rest[NAME_BYTES];
    const uint32_t *token = NULL;
    const int64_t n = tokens_of(f, k, &token);
    durable_stream s;
    snprintf(name, sizeof name, "%s%s", f->base, rest_of(f, k, rest));
    bool ok = durable_begin(&s, f->folder, name);
    if (ok) let_wait(f, k, &s);
    ok = ok && (token ? put_shard(&s, token, n, f->t->n <= NARROW_TOKENS) : tokenizer_put(f->t, &s));
    waiting_path_of(f, k, s.path);
    return durable_end(&s, ok) && ok;
}

/* Gives all files their names, number 0, which is locked, last. */
static bool place(const token_files *f) {
    char waiting[PATH_BYTES], path[PATH_BYTES];
    for (int64_t k = f->n - 1; k >= 0; --k) {
        waiting_path_of(f, k, waiting);
        path_of(f, k, path);
        if (rename(waiting, path) == 0 && (k > 0 || durable_sync_folder(f->folder))) continue;
        cli_fail(CLI_FAILURE, "cannot write %s: %s", path, strerror(errno));
        return false;
    }
    return true;
}

/* Until an interrupt; when all are written it is too late for one. */
static int write_files(token_files *f) {
    int64_t written = 0;
    remove_leftovers(f);
    cli_catch_interrupts();
    while (written < f->n && !cli_interrupted() && write_file(f, written)) ++written;
    const bool stopped = cli_interrupted(), ok = !stopped && written == f->n && place(f);
    for (int64_t k = written - 1; !ok && k >= 0; --k) {
        char waiting[PATH_BYTES];
        waiting_path_of(f, k, waiting);
        unlink(waiting);
    }
    if (f->lock >= 0) close(f->lock);
    if (stopped)
        return cli_fail(CLI_INTERRUPTED, "interrupted after %lld of %lld files, none of which is kept",
                        (long long)written, (long long)f->n);
    return ok ? CLI_OK : CLI_FAILURE;
}

/* ---- what is printed ---- */

/* A word of a command line, in quotes where a shell needs them. */
static void print_word(const char *before, const char *word) {
    fputs(before, stdout);
    const bool plain =
        word[strspn(word, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-+./,:@%=")] == 0;
    if (plain) {
        fputs(word, stdout);
        return;
    }
    putchar('\'');
    for (; *word; ++word) {
        if (*word == '\'')
            fputs("'\\''", stdout);
        else
            putchar(*word);
    }
    putchar('\'');
}

static void print_files(const token_files *f) {
    char path[PATH_BYTES], pattern[2 * PATH_BYTES];
    for (int64_t k = 0; k < f->n; ++k) {
        const uint32_t *token;
        path_of(f, k, path);
        printf("%s: %lld tokens\n", path, (long long)tokens_of(f, k, &token));
    }
    if (f->val_shards == 0 || f->train_shards == 0) {
        printf("train: there are no files of %s tokens; fattn train needs --data and --val\n",
               f->val_shards ? "training" : "held-out");
        return;
    }
    /* A * would match files of longer prefixes, too. */
    const bool more_digits = f->val_shards + f->train_shards > 1000000;
    pattern_of(f->o->out, more_digits ? "_train_*.bin" : "_train_??????.bin", pattern);
    print_word("train: fattn train --data ", pattern);
    pattern_of(f->o->out, more_digits ? "_val_*.bin" : "_val_??????.bin", pattern);
    print_word(" --val ", pattern);
    print_word(" --tokenizer ", f->o->tokenizer ? f->o->tokenizer : path);
    putchar('\n');
}

/* Whether what is there allows to write: before the texts are read, which may take long. */
static bool is_free(const token_files *f) {
    glob_t old = {0};
    find_old(f, &old);
    const bool ok = may_write(f, &old);
    globfree(&old);
    return ok;
}

static int write_all(token_files *f, const token_list *l) {
    glob_t old = {0};
    plan(f, l);
    find_old(f, &old);
    int code = may_write(f, &old) ? write_files(f) : CLI_FAILURE;
    if (!code && !remove_old(f, &old)) code = CLI_FAILURE;
    globfree(&old);
    cli_release_interrupts(); /* nothing is left to be done */
    if (!code) print_files(f);
    return code;
}

static int run(const void *options, int n_operands, char *const *operands) {
    const tokens_options *const o = options;
    tokenizer t;
    token_files f;
    token_list l = {0};
    if (n_operands == 0) return cli_fail(CLI_USAGE, "no text: name at least one FILE");
    if (!name_files(&f, o, &t) || !is_free(&f)) return CLI_FAILURE;
    if (!(o->tokenizer ? tokenizer_read(&t, o->tokenizer) : tokenizer_of_bytes(&t))) return CLI_FAILURE;
    bool ok = true;
    for (int i = 0; ok && i < n_operands; ++i) ok = add_file(&t, operands[i], o->split, &l);
    if (ok && l.n < 2) {
        cli_fail(CLI_FAILURE, "the text has no bytes");
        ok = false;
    }
    const int code = ok ? write_all(&f, &l) : CLI_FAILURE;
    free(l.token);
    tokenizer_free(&t);
    return code;
}

const cli_command cmd_tokens = {
    .name = "tokens",
    .operands = "FILE...",
    .summary = "Make token files of text: bytes, or GPT-2's byte pairs",
    .details = "Writes PREFIX_val_000000.bin and PREFIX_train_000001.bin, ..., which llm.c and\n"
               "fattn train read; 16 bits a token, 32 beyond 65536 tokens (Llama's format).\n"
               "Without --tokenizer a token is a byte, and PREFIX_tokenizer.bin says so.",
    .options = table,
    .defaults = &defaults,
    .size = sizeof defaults,
    .run = run,
};
