#include "cli/llmc/shards.h"

#include "cli/base/cli.h"
#include "cli/llmc/file.h"

#include <errno.h>
#include <glob.h>
#include <stdlib.h>
#include <string.h>

static const int64_t MOST_TOKENS = INT32_MAX;

/* The header and the size of one file. */
static bool check(llmc_file *f, int64_t needed, shard_file *out) {
    const bool wide = f->header[0] == LLMC_TOKENS_32;
    if (!wide && f->header[0] != LLMC_TOKENS)
        return llmc_fail(f->path, 0, "the first word is %d, files of tokens have %d or %d", f->header[0], LLMC_TOKENS,
                         LLMC_TOKENS_32);
    if (!llmc_expect(f, 1, wide ? 7 : 1, "the version") || !llmc_in_range(f, 2, 1, MOST_TOKENS, "the number of tokens"))
        return false;
    out->tokens = f->header[2];
    out->token_bytes = wide ? 4 : 2;
    if (!llmc_has_bytes(f, LLMC_HEADER_BYTES + out->tokens * out->token_bytes)) return false;
    if (out->tokens >= needed) return true;
    return llmc_fail(f->path, 8, "the file has %lld tokens, a batch of this size needs %lld", (long long)out->tokens,
                     (long long)needed);
}

static bool add(shards *s, const char *path) {
    llmc_file f;
    shard_file *const at = &s->at[s->n];
    if (!llmc_open(&f, path)) return false;
    const bool ok = check(&f, s->sample_tokens + 1, at);
    llmc_close(&f);
    if (!ok) return false;
    at->path = malloc(strlen(path) + 1);
    if (!at->path) {
        cli_fail(CLI_FAILURE, "no memory for a list of files");
        return false;
    }
    strcpy(at->path, path);
    s->tokens += at->tokens;
    s->n += 1;
    s->samples += shards_samples(s, s->n - 1);
    return true;
}

bool shards_open(shards *s, const char *pattern, int64_t batch, int64_t context) {
    glob_t found = {0};
    *s = (shards){.sample_tokens = batch * context};
    const int code = glob(pattern, 0, NULL, &found);
    bool ok = code == 0 && found.gl_pathc > 0;
    if (!ok)
        cli_fail(CLI_FAILURE, "%s: %s", pattern,
                 code == GLOB_NOMATCH ? "there is no such file" : "the pattern cannot be read");
    if (ok) s->at = calloc(found.gl_pathc, sizeof *s->at);
    if (ok && !s->at) cli_fail(CLI_FAILURE, "no memory for a list of files");
    ok = ok && s->at;
    for (size_t i = 0; ok && i < found.gl_pathc; ++i) ok = add(s, found.gl_pathv[i]);
    globfree(&found);
    if (!ok) shards_close(s);
    return ok;
}

void shards_close(shards *s) {
    for (int64_t i = 0; i < s->n; ++i) free(s->at[i].path);
    free(s->at);
    *s = (shards){0};
}

bool shards_read(const shards *s, int64_t i, int64_t first, int64_t n, int64_t vocab, int32_t *to, char *error,
                 size_t size) {
    enum { AT_ONCE = 4096 };
    const shard_file *const f = &s->at[i];
    unsigned char bytes[4 * AT_ONCE];
    int64_t offset = LLMC_HEADER_BYTES + first * f->token_bytes;
    FILE *file = fopen(f->path, "rb");
    bool ok = file && fseeko(file, (off_t)offset, SEEK_SET) == 0;
    if (!ok) snprintf(error, size, "cannot read %s: %s", f->path, strerror(errno));
    for (int64_t done = 0; ok && done < n;) {
        const int64_t part = n - done < AT_ONCE ? n - done : AT_ONCE;
        ok = fread(bytes, (size_t)f->token_bytes, (size_t)part, file) == (size_t)part;
        if (!ok) snprintf(error, size, "%s, offset %lld: the file has become shorter", f->path, (long long)offset);
        for (int64_t k = 0; ok && k < part; ++k, offset += f->token_bytes) {
            const unsigned char *const b = bytes + k * f->token_bytes;
            const uint32_t token = f->token_bytes == 2 ? llmc_u16(b) : llmc_u32(b);
            ok = token < (uint64_t)vocab;
            if (!ok)
                snprintf(error, size, "%s, offset %lld: token %u, the vocabulary has 0..%lld", f->path,
                         (long long)offset, token, (long long)vocab - 1);
            else
                to[done + k] = (int32_t)token;
        }
        done += part;
    }
    if (file) fclose(file);
    return ok;
}

/* ---- the order ---- */

static void identity(int32_t *x, int64_t n) {
    for (int64_t i = 0; i < n; ++i) x[i] = (int32_t)i;
}

static int64_t samples_here(const loader *l) {
    return shards_samples(l->files, l->shuffled ? l->shard_order[l->shard] : l->shard);
}

static void enter(loader *l, int64_t shard) {
    l->shard = shard;
    l->sample = 0;
    if (!l->shuffled) return;
    if (shard == 0) mt19937_shuffle(&l->random, l->shard_order, l->files->n);
    const int64_t n = samples_here(l);
    identity(l->sample_order, n);
    mt19937_shuffle(&l->random, l->sample_order, n);
}

static void begin(loader *l) {
    if (l->shuffled) identity(l->shard_order, l->files->n);
    mt19937_seed(&l->random, 42);
    l->taken = 0;
    enter(l, 0);
}

bool loader_open(loader *l, const shards *files, bool shuffled) {
    int64_t most = 0;
    for (int64_t i = 0; i < files->n; ++i)
        if (shards_samples(files, i) > most) most = shards_samples(files, i);
    *l = (loader){.files = files, .shuffled = shuffled};
    l->shard_order = malloc((size_t)files->n * sizeof *l->shard_order);
    l->sample_order = malloc((size_t)most * sizeof *l->sample_order);
    if (!l->shard_order || !l->sample_order) {
        cli_fail(CLI_FAILURE, "no memory for an order of %lld samples", (long long)most);
        loader_close(l);
        return false;
    }
    begin(l);
    return true;
}

void loader_close(loader *l) {
    free(l->shard_order);
    free(l->sample_order);
    *l = (loader){0};
}

void loader_take(loader *l, int64_t *shard, int64_t *sample) {
    if (l->sample == samples_here(l)) enter(l, (l->shard + 1) % l->files->n);
    *shard = l->shuffled ? l->shard_order[l->shard] : l->shard;
    *sample = l->shuffled ? l->sample_order[l->sample] : l->sample;
    l->sample += 1;
    l->taken += 1;
}

void loader_go(loader *l, int64_t n) {
    int64_t shard, sample;
    if (n < l->taken) begin(l);
    while (l->taken < n) loader_take(l, &shard, &sample);
}

/* ---- llm.c's state of it ---- */

loader_state loader_save(const loader *l) {
    return (loader_state){.shard = l->shard,
                          .sample = l->sample,
                          .shards = l->files->n,
                          .samples = samples_here(l),
                          .shard_order = l->shard_order,
                          .sample_order = l->sample_order,
                          .random = l->random};
}

/* Whether l is in the same shard, of the same epoch. */
static bool same_visit(const loader *l, const loader_state *s) {
    const size_t n = sizeof *l->shard_order;
    return l->shard == s->shard && samples_here(l) == s->samples &&
           memcmp(l->random.word, s->random.word, sizeof l->random.word) == 0 && l->random.next == s->random.next &&
           memcmp(l->shard_order, s->shard_order, (size_t)s->shards * n) == 0 &&
           memcmp(l->sample_order, s->sample_order, (size_t)s->samples * n) == 0;
}

bool loader_find(loader *l, const loader_state *s, char *error, size_t size) {
    const int64_t most = (int64_t)1 << 28; /* samples: seconds */
    if (s->shards != l->files->n) {
        snprintf(error, size, "it is of %lld files of tokens, --data names %lld", (long long)s->shards,
                 (long long)l->files->n);
        return false;
    }
    begin(l);
    while (!same_visit(l, s) && l->taken < most) {
        l->taken += samples_here(l);
        enter(l, (l->shard + 1) % l->files->n);
    }
    if (l->taken < most && s->sample >= 0 && s->sample <= s->samples) {
        l->taken += s->sample;
        l->sample = s->sample;
        return true;
    }
    snprintf(error, size,
             "its place, sample %lld of %lld in file %lld, is none that seed 42 leads to with these files, --batch and "
             "--context (%lld tokens a sample)",
             (long long)s->sample, (long long)s->samples, (long long)s->shard, (long long)l->files->sample_tokens);
    begin(l);
    return false;
}
