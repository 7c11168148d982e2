/* Data of the training program: recall sequences, text windows, the held-out split. */
#define _XOPEN_SOURCE 700 /* mkdtemp, symlink, setrlimit */
#include <criterion/criterion.h>
#include <criterion/redirect.h>

#include "cli/tasks/task.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

/* ---- tokens ---- */

Test(tokens, targets_follow_and_all_symbols_occur) {
    enum { LENGTH = 200, SYMBOLS = 37 };
    task *const t = tokens_open(7, LENGTH, SYMBOLS), *const other = tokens_open(8, LENGTH, SYMBOLS);
    int32_t ids[LENGTH], targets[LENGTH], again[LENGTH];
    int seen[SYMBOLS] = {0};
    cr_assert_eq(t->vocab, SYMBOLS);
    for (int64_t n = 0; n < 20; ++n) {
        t->train(t, n, ids, targets);
        for (int i = 0; i < LENGTH; ++i) {
            cr_assert(ids[i] >= 0 && ids[i] < SYMBOLS && targets[i] >= 0 && targets[i] < SYMBOLS);
            cr_assert(i + 1 == LENGTH || targets[i] == ids[i + 1]);
            seen[ids[i]] += 1;
        }
    }
    for (int v = 0; v < SYMBOLS; ++v) cr_assert_gt(seen[v], 50); /* 108 expected, 10 their deviation */
    t->train(t, 19, again, targets);
    cr_assert_eq(memcmp(ids, again, sizeof ids), 0);
    t->test(t, 19, again, targets);
    cr_assert_neq(memcmp(ids, again, sizeof ids), 0);
    other->train(other, 19, again, targets);
    cr_assert_neq(memcmp(ids, again, sizeof ids), 0);
    t->close(t);
    other->close(other);
}

/* ---- recall ---- */

enum { CONTEXT = 64, PAIRS = CONTEXT / 4 };

static void check_recall_sequence(const int32_t *ids, const int32_t *targets) {
    int value_of[2 * PAIRS], asked[2 * PAIRS] = {0};
    memset(value_of, -1, sizeof value_of);
    for (int i = 0; i < PAIRS; ++i) {
        const int32_t key = ids[2 * i], value = ids[2 * i + 1];
        cr_assert(key >= 0 && key < 2 * PAIRS && value >= 2 * PAIRS && value < 4 * PAIRS);
        cr_assert_eq(value_of[key], -1, "key %d twice", key);
        cr_assert(targets[2 * i] == TASK_IGNORE && targets[2 * i + 1] == TASK_IGNORE);
        value_of[key] = value;
    }
    for (int i = PAIRS; i < 2 * PAIRS; ++i) {
        const int32_t key = ids[2 * i];
        cr_assert(value_of[key] >= 0 && !asked[key]);
        asked[key] = 1;
        cr_assert_eq(targets[2 * i], value_of[key]);
        cr_assert_eq(ids[2 * i + 1], value_of[key]);
        cr_assert_eq(targets[2 * i + 1], TASK_IGNORE);
    }
}

Test(recall, every_key_is_queried_once_and_only_values_are_targets) {
    task *t = recall_open(7, CONTEXT);
    cr_assert_not_null(t);
    cr_assert_eq(t->vocab, CONTEXT);
    int32_t ids[CONTEXT], targets[CONTEXT];
    for (int64_t i = 0; i < 100; ++i) {
        t->train(t, i, ids, targets);
        check_recall_sequence(ids, targets);
        t->test(t, i, ids, targets);
        check_recall_sequence(ids, targets);
    }
    t->close(t);
}

Test(recall, sequences_are_functions_of_seed_side_and_number) {
    task *t = recall_open(7, CONTEXT), *other = recall_open(8, CONTEXT);
    int32_t a[CONTEXT], b[CONTEXT], targets[CONTEXT];
    t->train(t, 5, a, targets);
    t->train(t, 6, b, targets);
    cr_assert_neq(memcmp(a, b, sizeof a), 0);
    t->train(t, 5, b, targets);
    cr_assert_eq(memcmp(a, b, sizeof a), 0);
    t->test(t, 5, b, targets);
    cr_assert_neq(memcmp(a, b, sizeof a), 0);
    other->train(other, 5, b, targets);
    cr_assert_neq(memcmp(a, b, sizeof a), 0);
    t->close(t);
    other->close(other);
}

/* Frequencies of the first key and of the answer's position: 5 sigma. */
Test(recall, keys_and_positions_are_uniform) {
    enum { N = 20000 };
    task *t = recall_open(1, CONTEXT);
    int keys[2 * PAIRS] = {0}, places[PAIRS] = {0};
    int32_t ids[CONTEXT], targets[CONTEXT];
    for (int64_t n = 0; n < N; ++n) {
        t->train(t, n, ids, targets);
        keys[ids[0]] += 1;
        for (int i = 0; i < PAIRS; ++i) places[i] += ids[2 * i] == ids[2 * PAIRS];
    }
    for (int i = 0; i < 2 * PAIRS; ++i) /* mean 625, sigma 24.6 */
        cr_assert(abs(keys[i] - N / (2 * PAIRS)) < 123, "key %d: %d times", i, keys[i]);
    for (int i = 0; i < PAIRS; ++i) /* mean 1250, sigma 34.2 */
        cr_assert(abs(places[i] - N / PAIRS) < 171, "place %d: %d times", i, places[i]);
    t->close(t);
}

Test(recall, rejects_other_lengths) {
    cr_assert_null(recall_open(1, 66));
    cr_assert_null(recall_open(1, 4));
}

/* ---- text ---- */

static char folder[] = "/tmp/fattn-tasks-XXXXXX";
static char path[4096];

static void make_folder(void) { cr_assert_not_null(mkdtemp(folder)); }
static void remove_folder(void) {
    char command[4200];
    snprintf(command, sizeof command, "rm -rf '%s'", folder);
    cr_assert_eq(system(command), 0);
}
static const char *put_file(const char *name, const char *content, size_t n) {
    snprintf(path, sizeof path, "%s/%s", folder, name);
    FILE *f = fopen(path, "wb");
    cr_assert(f && fwrite(content, 1, n, f) == n && fclose(f) == 0);
    return path;
}
TestSuite(text, .init = make_folder, .fini = remove_folder);

/* All byte values: texts are read without a change. */
Test(text, bytes_are_unchanged) {
    enum { N = 4096 };
    unsigned char raw[N];
    for (int i = 0; i < N; ++i) raw[i] = (unsigned char)(i * 37 + i / 256);
    memcpy(raw, "a\tb\r\n_\bI\x07\xc3\xa9~\n\b\x7f\0\xff", 17);
    corpus c;
    cr_assert(corpus_read(&c, put_file("raw", (const char *)raw, N)));
    cr_assert_eq(c.train.n + c.held_out.n, N);
    int counts[TEXT_SYMBOLS] = {0};
    for (int i = 0; i < N; ++i) counts[raw[i]] += 1;
    for (int64_t i = 0; i < c.train.n; ++i) counts[c.train.symbols[i]] -= 1;
    for (int64_t i = 0; i < c.held_out.n; ++i) counts[c.held_out.symbols[i]] -= 1;
    for (int v = 0; v < TEXT_SYMBOLS; ++v) cr_assert_eq(counts[v], 0, "byte %d", v);
    corpus_free(&c);
    task *const t = text_open(path, 1, 32);
    cr_assert_eq(t->vocab, 256);
    t->close(t);
}

/* Kinds of texts: random, one line repeated, records of any size, with and without copies. */
enum { KINDS = 6 };
static int64_t fill_text(char *content, int64_t n, int kind, uint32_t seed) {
    uint32_t state = seed * 2654435761u + 1;
    for (int64_t i = 0; i < n; ++i) {
        state = state * 1664525u + 1013904223u;
        content[i] = kind == 1 ? 'a' : (char)(state >> 24);
        if (content[i] == '%') content[i] = '-';
    }
    for (int64_t i = 0; kind == 2 && i + 8 < n; i += 8) memcpy(content + i, "same\r\n%\n", 8);
    for (int64_t i = 0; kind == 3 && i + 99 < n; i += 90) memcpy(content + i, "\n%\n", 3);
    for (int64_t i = 40; kind == 4 && i + 9 < n; i += n / 3 + 1) memcpy(content + i, "\n%\r\n", 4);
    if (kind == 5 && n > 8) memcpy(content, "x\n%\n", 4); /* a small record, and one with the rest */
    return n;
}

/* Any text of the documented minimum length can be used; with one byte less it is rejected, with both lengths in
   the error message. At most a tenth is held out, and not much less. */
Test(text, only_its_length_matters) {
    enum { MOST = 40000 };
    static const int64_t contexts[] = {8, 9, 31, 64, 256, 1024, 4099};
    char *const content = malloc(MOST);
    cr_redirect_stderr();
    for (size_t k = 0; k < sizeof contexts / sizeof *contexts; ++k) {
        const int64_t context = contexts[k], needed = corpus_needed(2 * context);
        cr_assert(needed <= 2 * context * 10 / 9 + 2, "%lld", (long long)needed);
        for (int kind = 0; kind < KINDS; ++kind) {
            for (uint32_t seed = 0; seed < 8; ++seed) {
                const int64_t n = needed + seed * seed * 37;
                fill_text(content, n, kind, seed);
                task *const t = text_open(put_file("t", content, (size_t)n), 1, context);
                cr_assert(t, "%lld bytes, kind %d, context %lld", (long long)n, kind, (long long)context);
                const corpus *const c = text_corpus(t);
                const int64_t held = c->held_out.n;
                cr_assert_eq(c->train.n + held, n);
                cr_assert(held >= 2 && held >= n / 20 - 1 && (held == 2 || held <= n / 10), "%lld of %lld held out",
                          (long long)held, (long long)n);
                t->close(t);
            }
            fill_text(content, needed - 1, kind, 1);
            cr_assert_null(text_open(put_file("t", content, (size_t)needed - 1), 1, context));
        }
    }
    fflush(stderr);
    char said[4096] = "";
    cr_assert_gt(fread(said, 1, sizeof said - 1, cr_get_redirected_stderr()), 0);
    cr_assert(strstr(said, "it has 17 bytes; --context 8 needs 18"), "%s", said);
    free(content);
}

/* Records are found with Windows line ends, too. */
Test(text, records_end_at_either_line_end) {
    enum { RECORDS = 500 };
    char *const content = calloc(RECORDS, 32);
    int64_t n = 0;
    for (int i = 0; i < RECORDS; ++i) n += sprintf(content + n, "record %d\r\n%%\r\n", i);
    corpus c;
    cr_assert(corpus_read(&c, put_file("dos", content, (size_t)n)));
    cr_assert(c.held_out.n > n / 20 && c.held_out.n <= n / 10);
    for (int64_t i = 0; i < c.held_out.n; i += 3) { /* whole records only */
        const char *const at = (const char *)c.held_out.symbols + i;
        cr_assert_eq(strncmp(at, "record ", 7), 0);
        while (c.held_out.symbols[i] != '%') ++i;
    }
    corpus_free(&c);
    free(content);
}

/* 2000 records with numbers, each in two files: the split keeps copies together, loses nothing, and
   holds out a tenth (5 sigma). */
Test(text, a_tenth_of_the_records_is_held_out_with_their_copies) {
    enum { RECORDS = 2000 };
    char *content = calloc(RECORDS, 32);
    size_t n = 0;
    for (int i = 0; i < RECORDS; ++i) n += (size_t)sprintf(content + n, "record %d\n%%\n", i);
    put_file("a", content, n);
    put_file("b", content, n);
    put_file("b.dat", "index", 5);
    put_file(".hidden", "hidden", 6);
    cr_assert_eq(symlink("a", strcat(strcpy(path, folder), "/c")), 0);
    corpus c;
    cr_assert(corpus_read(&c, folder));
    cr_assert_eq(c.train.n + c.held_out.n, 2 * (int64_t)n);
    int held_out = 0;
    for (int64_t i = 0; i < c.held_out.n; ++i) held_out += c.held_out.symbols[i] == '%';
    cr_assert_eq(held_out % 2, 0);
    cr_assert(abs(held_out / 2 - RECORDS / 10) < 5 * 14, "%d of %d", held_out / 2, RECORDS);
    cr_assert_eq(memcmp(c.held_out.symbols, c.held_out.symbols + c.held_out.n / 2, (size_t)c.held_out.n / 2), 0,
                 "the second file splits like the first");
    corpus_free(&c);
    free(content);
}

/* A text without records: every byte of the training part once per epoch, except the ragged ends; each held-out
   byte except the first is predicted exactly once. */
Test(text, windows_cover_the_text) {
    enum { N = 50000, WINDOW = 32 };
    char *content = malloc(N);
    uint32_t state = 1; /* random bytes: a window occurs once */
    for (int i = 0; i < N; ++i) {
        state = state * 1664525u + 1013904223u;
        content[i] = (char)(' ' + (state >> 16) % 95);
    }
    task *t = text_open(put_file("plain", content, N), 3, WINDOW);
    cr_assert_not_null(t);
    const corpus *c = text_corpus(t);
    cr_assert_eq(c->train.n + c->held_out.n, N);
    const int64_t windows = (c->train.n - WINDOW) / WINDOW;
    int32_t ids[WINDOW], targets[WINDOW], first[WINDOW];
    int starts_differ = 0;
    for (int64_t epoch = 0; epoch < 3; ++epoch) {
        char *seen = calloc((size_t)c->train.n, 1);
        for (int64_t i = 0; i < windows; ++i) {
            t->train(t, epoch * windows + i, ids, targets);
            cr_assert_eq(memcmp(ids + 1, targets, sizeof ids - sizeof *ids), 0);
            int64_t at = -1;
            for (int64_t p = 0; p + WINDOW < c->train.n && at < 0; ++p) {
                int same = 1;
                for (int j = 0; j < WINDOW && same; ++j) same = c->train.symbols[p + j] == ids[j];
                if (same) at = p;
            }
            cr_assert(at >= 0 && !memchr(seen + at, 1, WINDOW), "epoch %lld window %lld: at %lld", (long long)epoch,
                      (long long)i, (long long)at);
            cr_assert_eq(targets[WINDOW - 1], c->train.symbols[at + WINDOW]);
            memset(seen + at, 1, WINDOW);
        }
        free(seen);
        t->train(t, epoch * windows, ids, targets);
        if (epoch > 0) starts_differ |= memcmp(ids, first, sizeof ids) != 0;
        memcpy(first, ids, sizeof ids);
    }
    cr_assert(starts_differ, "each epoch has its own order");
    int64_t counted = 0;
    for (int64_t i = 0; i < t->held_out; ++i) {
        t->test(t, i, ids, targets);
        for (int j = 0; j < WINDOW; ++j) {
            if (targets[j] == TASK_IGNORE) continue;
            cr_assert_eq(targets[j], c->held_out.symbols[i * WINDOW + j + 1]);
            cr_assert_eq(ids[j], c->held_out.symbols[i * WINDOW + j]);
            ++counted;
        }
    }
    cr_assert_eq(counted, c->held_out.n - 1);
    t->close(t);
    free(content);
}

Test(text, rejects_unusable_files) {
    cr_assert_null(text_open("/nonexistent/text", 1, 32));
    cr_assert_null(text_open(put_file("empty", "", 0), 1, 32));
    cr_assert_null(text_open(put_file("short", "a few words\n", 12), 1, 32));
    cr_assert_null(text_open("/dev/zero", 1, 32), "no end");
}
