/* Token shards: what is accepted, the order of samples, targets across rows. */
#define _XOPEN_SOURCE 700 /* mkdtemp */
#include <criterion/criterion.h>

#include "cli/llmc/file.h"
#include "cli/llmc/shards.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static char folder[] = "/tmp/fattn-shards-XXXXXX", pattern[64], messages[64];

static void begin(void) {
    cr_assert_not_null(mkdtemp(folder));
    snprintf(pattern, sizeof pattern, "%s/a*.bin", folder);
    snprintf(messages, sizeof messages, "%s/messages", folder);
    cr_assert_not_null(freopen(messages, "w", stderr));
}
static void end(void) {
    char command[128];
    snprintf(command, sizeof command, "rm -r %s", folder);
    cr_assert_eq(system(command), 0);
}
TestSuite(shards, .init = begin, .fini = end);

/* n tokens first, first+1, ... modulo 65536 (or 2^32); `words` replace the header's, `more` bytes follow. */
static const char *write_shard(const char *name, const int32_t *words, int64_t n, uint32_t first, int more) {
    static char path[128];
    unsigned char header[LLMC_HEADER_BYTES], bytes[4] = {0};
    snprintf(path, sizeof path, "%s/%s", folder, name);
    FILE *f = fopen(path, "wb");
    cr_assert_not_null(f);
    llmc_header(header, words, 3);
    fwrite(header, 1, sizeof header, f);
    for (int64_t i = 0; i < n; ++i) {
        llmc_put_u32(bytes, first + (uint32_t)i);
        fwrite(bytes, 1, words[0] == LLMC_TOKENS_32 ? 4 : 2, f);
    }
    for (int i = 0; i < more; ++i) fputc(0, f);
    fclose(f);
    return path;
}

static void plain(const char *name, int32_t n, uint32_t first) {
    write_shard(name, (const int32_t[]){LLMC_TOKENS, 1, n}, n, first, 0);
}

/* Files of 2, 5 and 3 samples of 2 x 4 tokens; their tokens number all tokens. */
enum { B = 2, T = 4, SAMPLES = 10, EPOCHS = 4 };
static void three(void) {
    plain("a1.bin", 17, 0);
    plain("a2.bin", 48, 100); /* 7 tokens that make no sample */
    plain("a10.bin", 25, 200);
}
/* glob sorts by name: a1, a10, a2 */
static const int64_t sorted_samples[] = {2, 3, 5};
static const int32_t sorted_first[] = {0, 200, 100};

Test(shards, are_counted) {
    shards s;
    three();
    cr_assert(shards_open(&s, pattern, B, T));
    cr_assert_eq(s.n, 3);
    cr_assert_eq(s.samples, SAMPLES);
    cr_assert_eq(s.tokens, 90);
    for (int i = 0; i < 3; ++i) cr_assert_eq(shards_samples(&s, i), sorted_samples[i], "%d", i);
    shards_close(&s);
}

/* By definition, from the generator alone: every epoch permutes the list of the last one. */
static void expected_order(int64_t order[EPOCHS * SAMPLES][2]) {
    mt19937 g;
    int32_t list[3] = {0, 1, 2}, inside[5];
    int n = 0;
    mt19937_seed(&g, 42);
    for (int epoch = 0; epoch < EPOCHS; ++epoch) {
        mt19937_shuffle(&g, list, 3);
        for (int k = 0; k < 3; ++k) {
            const int64_t here = sorted_samples[list[k]];
            for (int i = 0; i < here; ++i) inside[i] = i;
            mt19937_shuffle(&g, inside, here);
            for (int i = 0; i < here; ++i) order[n][0] = list[k], order[n++][1] = inside[i];
        }
    }
}

Test(shards, shuffled_order) {
    shards s;
    loader l;
    int64_t want[EPOCHS * SAMPLES][2], at, sample;
    expected_order(want);
    three();
    cr_assert(shards_open(&s, pattern, B, T) && loader_open(&l, &s, true));
    for (int i = 0; i < EPOCHS * SAMPLES; ++i) {
        loader_take(&l, &at, &sample);
        cr_assert(at == want[i][0] && sample == want[i][1], "sample %d", i);
    }
    const int places[] = {39, 0, 12, 13, 10, 25}; /* forward, back, one on, an epoch's first */
    for (int i = 0; i < 6; ++i) {
        loader_go(&l, places[i]);
        loader_take(&l, &at, &sample);
        cr_assert(at == want[places[i]][0] && sample == want[places[i]][1], "sample %d", places[i]);
    }
    bool seen[3][5] = {{false}};
    for (int i = 0; i < SAMPLES; ++i) seen[want[i][0]][want[i][1]] = true;
    for (int k = 0; k < 3; ++k)
        for (int i = 0; i < sorted_samples[k]; ++i) cr_assert(seen[k][i], "an epoch has each sample once");
    loader_close(&l);
    shards_close(&s);
}

/* Row r of sample i: tokens (i B + r) T .. of its file, targets one further, across rows. */
Test(shards, rows_of_a_task) {
    int64_t order[EPOCHS * SAMPLES][2];
    int32_t ids[T], targets[T];
    expected_order(order);
    three();
    plain("v.bin", 19, 300);
    char val[80];
    snprintf(val, sizeof val, "%s/v.bin", folder);
    task *const t = shards_task(pattern, val, B, T, 400);
    cr_assert_not_null(t);
    cr_assert_eq(t->held_out, 2 * B);
    cr_assert_eq(shards_tokens(t), 90);
    for (int64_t n = 0; n < EPOCHS * SAMPLES * B; ++n) {
        t->train(t, n, ids, targets);
        const int64_t *const at = order[n / B];
        for (int i = 0; i < T; ++i) {
            const int64_t token = sorted_first[at[0]] + (at[1] * B + n % B) * T + i;
            cr_assert(ids[i] == token && targets[i] == token + 1, "sequence %lld", (long long)n);
        }
    }
    for (int64_t n = 0; n < t->held_out; ++n) {
        t->test(t, n, ids, targets);
        for (int i = 0; i < T; ++i) cr_assert(ids[i] == 300 + n * T + i && targets[i] == ids[i] + 1);
    }
    cr_assert_eq(t->error[0], 0);
    t->close(t);
}

Test(shards, wide_tokens) {
    shards s;
    int32_t token[3];
    char error[256];
    write_shard("a.bin", (const int32_t[]){LLMC_TOKENS_32, 7, 9}, 9, 100000, 0);
    cr_assert(shards_open(&s, pattern, 1, 8));
    cr_assert(shards_read(&s, 0, 6, 3, 128256, token, error, sizeof error), "%s", error);
    for (int i = 0; i < 3; ++i) cr_assert_eq(token[i], 100006 + i);
    shards_close(&s);
}

Test(shards, a_token_beyond_the_vocabulary) {
    char error[256];
    int32_t token[9];
    shards s;
    plain("a.bin", 20, 490);
    cr_assert(shards_open(&s, pattern, 1, 8));
    cr_assert(shards_read(&s, 0, 1, 9, 500, token, error, sizeof error));
    cr_assert_not(shards_read(&s, 0, 2, 9, 500, token, error, sizeof error));
    cr_assert(strstr(error, "a.bin, offset 1044: token 500, the vocabulary has 0..499"), "%s", error);
    shards_close(&s);
}

/* A damaged file is refused when it is opened, one that shrinks later when it is read. */
static void refused(const char *says) {
    shards s;
    char text[600] = "";
    cr_assert_not(shards_open(&s, pattern, B, T));
    fflush(stderr);
    FILE *f = fopen(messages, "r");
    cr_assert_gt(fread(text, 1, sizeof text - 1, f), 0);
    fclose(f);
    cr_assert(strstr(text, says), "%s: %s", says, text);
    cr_assert_not_null(freopen(messages, "w", stderr));
}

Test(shards, what_is_refused) {
    refused("there is no such file");
    write_shard("a.bin", (const int32_t[]){1234, 1, 9}, 9, 0, 0);
    refused("a.bin, offset 0: the first word is 1234");
    write_shard("a.bin", (const int32_t[]){LLMC_TOKENS, 2, 9}, 9, 0, 0);
    refused("offset 4: the version is 2, not 1");
    write_shard("a.bin", (const int32_t[]){LLMC_TOKENS_32, 1, 9}, 9, 0, 0);
    refused("offset 4: the version is 1, not 7");
    write_shard("a.bin", (const int32_t[]){LLMC_TOKENS, 1, -9}, 9, 0, 0);
    refused("offset 8: the number of tokens is -9, not in 1..2147483647");
    write_shard("a.bin", (const int32_t[]){LLMC_TOKENS, 1, 10}, 9, 0, 0);
    refused("offset 1042: the file has 1042 bytes, its header asks for 1044");
    write_shard("a.bin", (const int32_t[]){LLMC_TOKENS, 1, 9}, 9, 0, 1);
    refused("offset 1042: the file has 1043 bytes, its header asks for 1042");
    write_shard("a.bin", (const int32_t[]){LLMC_TOKENS, 1, 8}, 8, 0, 0);
    refused("offset 8: the file has 8 tokens, a batch of this size needs 9");
    const char *const path = write_shard("a.bin", (const int32_t[]){LLMC_TOKENS, 1, 9}, 9, 0, 0);
    cr_assert_eq(truncate(path, 1000), 0);
    refused("offset 1000: the file ends, 1024 bytes at offset 0 are expected");
    cr_assert_eq(truncate(path, 0), 0);
    refused("offset 0: the file ends");
    unlink(path);
    cr_assert_eq(symlink("/dev/null", path), 0);
    refused("a device, not a file");
}

Test(shards, a_file_that_shrinks_is_an_error_of_the_task) {
    int32_t ids[T], targets[T];
    plain("a.bin", 17, 0);
    task *const t = shards_task(pattern, pattern, B, T, 400);
    cr_assert_not_null(t);
    char path[80];
    snprintf(path, sizeof path, "%s/a.bin", folder);
    cr_assert_eq(truncate(path, LLMC_HEADER_BYTES + 4), 0);
    t->train(t, 0, ids, targets);
    cr_assert(strstr(t->error, "has become shorter"), "%s", t->error);
    t->close(t);
}
