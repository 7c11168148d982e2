/* Every recorded case on every CPU algorithm: outputs and gradients against the fp64 reference, and
   gradients against the finite differences that were recorded beside it. */
#include "check.h"
#include "cli.h"
#include "progress.h"

#include <fattn/check.h>
#include <fattn/fixture.h>

#include <dirent.h>
#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

enum { FILES_MAX = 64, FILE_NAME = 128 };

/* What central differences of order 2 in fp64 can show: fattn_gradcheck's defaults. */
static const double fd_atol = 1e-8, fd_rtol = 1e-6;

static const uint32_t accumulates[FATTN_FIXTURE_GRADIENTS] = {
    FATTN_ACC_DQ, FATTN_ACC_DK, FATTN_ACC_DV, FATTN_ACC_DBIAS, FATTN_ACC_DSINK};

/* Keeps the first failure's sentence, with what it was about. */
static void fail(check_result *r, const char *about, const char *sentence) {
    if (r->state == CHECK_FAILED) return;
    r->state = CHECK_FAILED;
    snprintf(r->sentence, sizeof r->sentence, "%s: %s", about, sentence);
}

static void compare(check_run *run, check_result *r, const char *about, const fattn_tensor *got,
                    const fattn_tensor *want) {
    fattn_report report = {.struct_size = sizeof report};
    const fattn_tolerance by_dtype = {0};
    const fattn_status s = fattn_compare(run->ctx, got, want, NULL, 0, by_dtype, &report);
    r->checked += report.checked;
    r->worst = fmax(r->worst, report.max_rel);
    if (s != FATTN_OK) fail(r, about, fattn_ctx_error(run->ctx));
}

/* Element number n in row-major order of an F64 tensor. */
static double element(const fattn_tensor *t, int64_t n) {
    int64_t offset = 0;
    for (int d = t->ndim - 1; d >= 0; --d) {
        offset += n % t->shape[d] * t->stride[d];
        n /= t->shape[d];
    }
    return ((const double *)t->data)[offset];
}

static void compare_differences(check_result *r, const fattn_fixture_gradient *g) {
    for (int64_t i = 0; i < fattn_tensor_numel(&g->fd_index); ++i) {
        const int32_t at = ((const int32_t *)g->fd_index.data)[i];
        if (at < 0 || at >= fattn_tensor_numel(g->got)) {
            fail(r, g->name, "the file's finite differences name an element that is not there");
            return;
        }
        const double got = element(g->got, at), want = ((const double *)g->fd_value.data)[i];
        r->checked += 1;
        if (fabs(got - want) <= fd_atol + fd_rtol * fabs(want)) continue;
        char text[160];
        snprintf(text, sizeof text, "element %d is %.9g, its central difference %.9g", at, got,
                 want);
        fail(r, g->name, text);
    }
}

static void compare_all(check_run *run, check_result *r, const fattn_fixture_attention *c) {
    compare(run, r, "o", c->io.o, &c->want_o);
    compare(run, r, "lse", c->io.lse, &c->want_lse);
    for (int i = 0; i < FATTN_FIXTURE_GRADIENTS; ++i) {
        const fattn_fixture_gradient *g = &c->gradient[i];
        if (!g->got) continue;
        compare(run, r, g->name, g->got, &g->want);
        if (!(c->params.flags & accumulates[i])) compare_differences(r, g);
    }
}

static void describe(check_result *r, const fattn_attention_io *io) {
    snprintf(r->what, sizeof r->what, "B %lld, H %lld/%lld, %lld x %lld, d %lld/%lld",
             (long long)io->q->shape[0], (long long)io->q->shape[1], (long long)io->k->shape[1],
             (long long)io->q->shape[2], (long long)io->k->shape[2], (long long)io->q->shape[3],
             (long long)io->v->shape[3]);
}

static void check_case(check_run *run, fattn_fixture *f, const char *file, const char *name,
                       fattn_algorithm algorithm) {
    static const char *const algorithms[] = {"auto", "standard", "flash1", "flash2"};
    char full[192];
    snprintf(full, sizeof full, "%.*s/%s/%s", (int)strcspn(file, "."), file, name,
             algorithms[algorithm]);
    if (!check_begin(run, full)) return;
    check_result r = {.name = full};
    fattn_fixture_attention c = {.struct_size = sizeof c};
    const double begin = seconds_now();
    fattn_status s = fattn_fixture_attention_load(f, name, FATTN_F64, &c);
    if (s == FATTN_OK) {
        describe(&r, &c.io);
        c.params.algorithm = algorithm;
        s = fattn_fixture_attention_run(run->ctx, &c);
        if (s == FATTN_OK) compare_all(run, &r, &c);
    }
    if (s == FATTN_E_UNSUPPORTED) {
        r.state = CHECK_SKIPPED;
        snprintf(r.sentence, sizeof r.sentence, "%s", fattn_ctx_error(run->ctx));
    } else if (s != FATTN_OK) {
        fail(&r, fattn_status_name(s), fattn_ctx_error(run->ctx));
    }
    fattn_fixture_attention_free(run->ctx, &c);
    r.seconds = seconds_now() - begin;
    check_end(run, &r);
}

/* The .h5 files of a folder, by name; -1 with errno. */
static int list_files(const char *folder, char (*names)[FILE_NAME]) {
    DIR *d = opendir(folder);
    if (!d) return -1;
    int n = 0;
    for (const struct dirent *e = readdir(d); e; e = readdir(d)) {
        const size_t length = strlen(e->d_name);
        const bool fixture = length > 3 && strcmp(e->d_name + length - 3, ".h5") == 0;
        if (!fixture || length >= FILE_NAME || n == FILES_MAX) continue;
        int at = n++;
        for (; at > 0 && strcmp(names[at - 1], e->d_name) > 0; --at)
            memcpy(names[at], names[at - 1], FILE_NAME);
        memcpy(names[at], e->d_name, length + 1);
    }
    closedir(d);
    return n;
}

bool check_fixtures(check_run *run, const char *folder) {
    char names[FILES_MAX][FILE_NAME];
    const int n = list_files(folder, names);
    if (n < 0) cli_fail(CLI_FAILURE, "cannot read the folder %s: %s", folder, strerror(errno));
    if (n == 0) cli_fail(CLI_FAILURE, "%s: no fixture (*.h5) in this folder", folder);
    if (n <= 0) return false;
    for (int i = 0; i < n; ++i) {
        char path[4096];
        fattn_fixture *f;
        if (snprintf(path, sizeof path, "%s/%s", folder, names[i]) >= (int)sizeof path) {
            cli_fail(CLI_FAILURE, "%s/%s: the path is too long", folder, names[i]);
            return false;
        }
        const fattn_status s = fattn_fixture_open(run->ctx, path, 0, &f);
        if (s != FATTN_OK) {
            cli_status(run->ctx, s, path);
            return false;
        }
        for (int c = 0; c < fattn_fixture_count(f); ++c) {
            for (int a = FATTN_ALGO_STANDARD; a <= FATTN_ALGO_FLASH2; ++a)
                check_case(run, f, names[i], fattn_fixture_case(f, c), (fattn_algorithm)a);
        }
        if (fattn_fixture_close(f) != FATTN_OK) return false;
    }
    return true;
}
