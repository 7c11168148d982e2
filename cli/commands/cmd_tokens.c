/* fattn tokens: text to token files, as llm.c's programs and `fattn train --task shards` read them. */
#include "cli/base/cli.h"
#include "cli/llmc/file.h"
#include "cli/llmc/tokenizer.h"
#include "cli/output/files.h"
#include "cli/train/durable.h"

#include <errno.h>
#include <glob.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef struct tokens_options {
    const char *out, *tokenizer;
    double val;
    int64_t shard;
    int split;
    bool overwrite;
} tokens_options;

enum { SPLIT_FILE, SPLIT_PARAGRAPH, SPLIT_LINE };
enum { PATH_BYTES = 4096, AT_ONCE = 1 << 16, NARROW_TOKENS = 1 << 16 };
static const int64_t LARGEST = (int64_t)1 << 32; /* bytes of a file */

#define FIELD(name) offsetof(tokens_options, name)
static const cli_option table[] = {
    {"out", CLI_TEXT, FIELD(out), "PREFIX", 0, 0, NULL, "of the files that are written"},
    {"tokenizer", CLI_TEXT, FIELD(tokenizer), "FILE", 0, 0, NULL,
     "llm.c's tokenizer file; without it tokens are bytes"},
    {"val", CLI_REAL, FIELD(val), "V", 0, 1, NULL, "share of the tokens, the first ones, that is held out"},
    {"shard", CLI_INT, FIELD(shard), "N", 2, 2147483647, NULL, "tokens of a file"},
    {"split", CLI_CHOICE, FIELD(split), "S", 0, 0, "file|paragraph|line",
     "what a document is; the end-of-text token precedes each"},
    {"overwrite", CLI_FLAG, FIELD(overwrite), NULL, 0, 0, NULL, "remove files of this prefix that are there"},
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

/* The end of the document that begins at `begin`: a line with its end, a paragraph with the blank lines after it. */
static int64_t document_end(const unsigned char *text, int64_t n, int64_t begin, int split) {
    if (split == SPLIT_FILE) return n;
    for (int64_t i = begin; i < n; ++i) {
        if (text[i] != '\n') continue;
        if (split == SPLIT_LINE) return i + 1;
        int64_t end = i + 1;
        while (end < n && text[end] == '\n') ++end;
        if (end > i + 1) return end;
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

/* ---- writing ---- */

/* PREFIX split into a folder and the beginning of names. */
static bool name_of(const char *prefix, const char *rest, char folder[PATH_BYTES], char name[PATH_BYTES]) {
    const char *const slash = strrchr(prefix, '/');
    const int a = snprintf(folder, PATH_BYTES, "%.*s", slash ? (int)(slash - prefix + (slash == prefix)) : 1,
                           slash ? prefix : ".");
    const int b = snprintf(name, PATH_BYTES, "%s%s", slash ? slash + 1 : prefix, rest);
    if (a < PATH_BYTES && b < PATH_BYTES) return true;
    cli_fail(CLI_FAILURE, "--out has %zu bytes, less than %d are possible", strlen(prefix), PATH_BYTES);
    return false;
}

static bool write_shard(const char *prefix, const char *rest, const uint32_t *token, int64_t n, bool narrow) {
    char folder[PATH_BYTES], name[PATH_BYTES];
    unsigned char header[LLMC_HEADER_BYTES], *const bytes = malloc(4 * AT_ONCE);
    durable_stream s;
    if (!bytes) cli_fail(CLI_FAILURE, "no memory for a buffer");
    if (!bytes || !name_of(prefix, rest, folder, name)) {
        free(bytes);
        return false;
    }
    llmc_header(header, (const int32_t[]){narrow ? LLMC_TOKENS : LLMC_TOKENS_32, narrow ? 1 : 7, (int32_t)n}, 3);
    bool ok = durable_begin(&s, folder, name) && durable_append(&s, header, sizeof header);
    for (int64_t done = 0; ok && done < n; done += AT_ONCE) {
        const int64_t part = n - done < AT_ONCE ? n - done : AT_ONCE;
        const int size = narrow ? 2 : 4;
        for (int64_t i = 0; i < part; ++i) {
            if (narrow)
                llmc_put_u16(bytes + i * size, token[done + i]);
            else
                llmc_put_u32(bytes + i * size, token[done + i]);
        }
        ok = durable_append(&s, bytes, (size_t)(part * size));
    }
    free(bytes);
    ok = durable_end(&s, ok) && ok;
    if (ok) printf("%s%s: %lld tokens\n", prefix, rest, (long long)n);
    return ok;
}

/* Shards of one part, numbered on from *number. A last one of a single token has no target and is left out. */
static bool write_part(const tokens_options *o, const char *part, const uint32_t *token, int64_t n, bool narrow,
                       int *number) {
    bool ok = true;
    for (int64_t first = 0; ok && first + 1 < n; first += o->shard, *number += 1) {
        char rest[64];
        snprintf(rest, sizeof rest, "_%s_%06d.bin", part, *number);
        ok = write_shard(o->out, rest, token + first, n - first < o->shard ? n - first : o->shard, narrow);
    }
    return ok;
}

/* Files of an earlier call would be read together with the new ones. */
static bool clear(const tokens_options *o) {
    static const char *const rests[] = {"_train_*.bin", "_val_*.bin"};
    bool ok = true;
    for (int k = 0; ok && k < 2; ++k) {
        char pattern[PATH_BYTES];
        glob_t found = {0};
        if (snprintf(pattern, sizeof pattern, "%s%s", o->out, rests[k]) >= PATH_BYTES) continue;
        const bool any = glob(pattern, 0, NULL, &found) == 0 && found.gl_pathc > 0;
        if (any && !o->overwrite) {
            cli_fail(CLI_FAILURE, "%s is there: name another --out, or remove these files with --overwrite",
                     found.gl_pathv[0]);
            ok = false;
        }
        for (size_t i = 0; ok && any && i < found.gl_pathc; ++i) {
            if (unlink(found.gl_pathv[i]) == 0) continue;
            cli_fail(CLI_FAILURE, "cannot remove %s: %s", found.gl_pathv[i], strerror(errno));
            ok = false;
        }
        globfree(&found);
    }
    return ok;
}

static bool write_all(const tokens_options *o, const tokenizer *t, const token_list *l) {
    const bool narrow = t->n <= NARROW_TOKENS;
    const int64_t val = (int64_t)(o->val * (double)l->n);
    int number = 0;
    if (!clear(o) || !write_part(o, "val", l->token, val, narrow, &number) ||
        !write_part(o, "train", l->token + val, l->n - val, narrow, &number))
        return false;
    if (!o->tokenizer) {
        char folder[PATH_BYTES], name[PATH_BYTES];
        if (!name_of(o->out, "_tokenizer.bin", folder, name) || !tokenizer_write(t, folder, name)) return false;
        printf("%s_tokenizer.bin: %lld tokens\n", o->out, (long long)t->n);
    }
    const char *const file = o->tokenizer ? o->tokenizer : "_tokenizer.bin";
    printf("train: fattn train --data '%s_train_*.bin' --val '%s_val_*.bin' --tokenizer %s%s\n", o->out, o->out,
           o->tokenizer ? "" : o->out, file);
    return true;
}

static int run(const void *options, int n_operands, char *const *operands) {
    const tokens_options *const o = options;
    tokenizer t;
    token_list l = {0};
    if (n_operands == 0) return cli_fail(CLI_USAGE, "no text: name at least one FILE");
    if (!(o->tokenizer ? tokenizer_read(&t, o->tokenizer) : tokenizer_of_bytes(&t))) return CLI_FAILURE;
    bool ok = true;
    for (int i = 0; ok && i < n_operands; ++i) ok = add_file(&t, operands[i], o->split, &l);
    if (ok && l.n < 2) {
        cli_fail(CLI_FAILURE, "the text has no bytes");
        ok = false;
    }
    ok = ok && write_all(o, &t, &l);
    free(l.token);
    tokenizer_free(&t);
    return ok ? CLI_OK : CLI_FAILURE;
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
