/* Every recorded case on every algorithm: outputs and gradients against the fp64 reference, and
   gradients against the finite differences that were recorded beside it. */
#include "cli/commands/check.h"
#include "cli/base/cli.h"
#include "cli/output/progress.h"

#include <fattn/check.h>
#include <fattn/fixture.h>

#include <dirent.h>
#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

enum { FILES_MAX = 64, FILE_NAME = 128 };

/* The accuracy of central differences of order 2 in fp64: fattn_gradcheck's defaults. */
static const double fd_atol = 1e-8, fd_rtol = 1e-6;

static const uint32_t accumulates[FATTN_FIXTURE_GRADIENTS] = {FATTN_ACC_DQ, FATTN_ACC_DK, FATTN_ACC_DV, FATTN_ACC_DBIAS,
                                                              FATTN_ACC_DSINK};

/* Keeps the error message of the first failure; `about` names the result. */
static void fail(check_way *way, const char *about, const char *message) {
    if (way->state == CHECK_FAILED) return;
    way->state = CHECK_FAILED;
    snprintf(way->message, sizeof way->message, "%s: %s", about, message);
}

/* An error of a score is a relative error of P: with large scores all errors are large. L estimates the size
   of the scores; an L above 1e6 comes from a sink. */
static double score_size(const fattn_fixture_attention *c) {
    const double *const lse = c->want_lse.data;
    double size = 1;
    for (int64_t n = 0; lse && n < fattn_tensor_numel(&c->want_lse); ++n) {
        if (fabs(lse[n]) < 1e6) size = fmax(size, fabs(lse[n]));
    }
    return size;
}

static void compare(check_run *run, check_way *way, const char *about, const fattn_tensor *got,
                    const fattn_tensor *want, double tolerance, double unit) {
    fattn_report report = {.struct_size = sizeof report};
    const fattn_tolerance t = {.atol = tolerance * unit, .rtol = tolerance};
    const fattn_status s = fattn_compare(run->host, got, want, NULL, 0, t, &report);
    way->checked += report.checked;
    way->worst = fmax(way->worst, check_worst(&report, unit));
    if (s != FATTN_OK) fail(way, about, fattn_ctx_error(run->host));
}

/* Tolerances: `relative` to the result, plus a term relative to the size of the terms of its sum. */
enum { RESULTS = 2 + FATTN_FIXTURE_GRADIENTS }; /* o, lse, dq, dk, dv, d_bias, d_sink */
typedef struct allowance {
    double relative, unit[RESULTS];
} allowance;

/* F64: 1e-12 allows any order of summation. F32: the rounding of a sum of the case's longest length, as a
   random walk, and a few roundings. */
static double rounding(const check_run *run, const fattn_fixture_attention *c) {
    if (run->dtype == FATTN_F64) return 1e-12;
    int64_t terms = 1;
    for (int d = 2; d < 4; ++d) {
        if (c->io.q->shape[d] > terms) terms = c->io.q->shape[d];
        if (c->io.k->shape[d] > terms) terms = c->io.k->shape[d];
    }
    terms *= c->io.q->shape[1] / c->io.k->shape[1];
    return 0x1p-24 * (8 + sqrt((double)terms));
}

/* Errors grow with the scores, unless the file has the size of the terms of each result: then the scores
   are exact in F32, however large. */
static fattn_status allow(check_run *run, fattn_fixture *f, const char *name, const fattn_fixture_attention *c,
                          allowance *out) {
    char path[192];
    fattn_tensor unit;
    out->relative = rounding(run, c);
    for (int i = 0; i < RESULTS; ++i) out->unit[i] = 1;
    snprintf(path, sizeof path, "/cases/%s/unit", name);
    if (!fattn_fixture_has(f, path)) {
        out->relative *= score_size(c);
        return FATTN_OK;
    }
    fattn_status s = fattn_fixture_get(f, path, FATTN_F64, &unit);
    if (s != FATTN_OK) return s;
    const double *const sizes = unit.data;
    const int64_t count = fattn_tensor_numel(&unit);
    if (count != RESULTS)
        s = fattn_ctx_fail(run->host, FATTN_E_IO, "%s has %lld numbers, not %d", path, (long long)count, (int)RESULTS);
    for (int i = 0; s == FATTN_OK && i < RESULTS; ++i) {
        out->unit[i] = sizes[i];
        if (!(sizes[i] > 0 && isfinite(sizes[i])))
            s = fattn_ctx_fail(run->host, FATTN_E_IO, "%s[%d] is %.9g, which is not a size", path, i, sizes[i]);
    }
    fattn_tensor_free(run->host, &unit);
    return s;
}

/* Element number n in row-major order of a tensor. */
static double element(const fattn_tensor *t, int64_t n) {
    int64_t offset = 0;
    for (int d = t->ndim - 1; d >= 0; --d) {
        offset += n % t->shape[d] * t->stride[d];
        n /= t->shape[d];
    }
    return t->dtype == FATTN_F32 ? ((const float *)t->data)[offset] : ((const double *)t->data)[offset];
}

static void compare_differences(check_way *way, const fattn_fixture_gradient *g, double tolerance, double unit) {
    const int64_t n = g->fd_index.data ? fattn_tensor_numel(&g->fd_index) : 0;
    for (int64_t i = 0; i < n; ++i) {
        const int32_t at = ((const int32_t *)g->fd_index.data)[i];
        if (at < 0 || at >= fattn_tensor_numel(g->got)) {
            fail(way, g->name, "the file's finite differences have an index out of range");
            return;
        }
        const double got = element(g->got, at), want = ((const double *)g->fd_value.data)[i];
        way->checked += 1;
        if (fabs(got - want) <= fd_atol + tolerance * unit + (fd_rtol + tolerance) * fabs(want)) continue;
        char text[160];
        snprintf(text, sizeof text, "element %d is %.9g, its central difference %.9g", at, got, want);
        fail(way, g->name, text);
    }
}

static void compare_all(check_run *run, check_way *way, const fattn_fixture_attention *c, const allowance *a) {
    compare(run, way, "o", c->io.o, &c->want_o, a->relative, a->unit[0]);
    compare(run, way, "lse", c->io.lse, &c->want_lse, a->relative, a->unit[1]);
    for (int i = 0; i < FATTN_FIXTURE_GRADIENTS; ++i) {
        const fattn_fixture_gradient *g = &c->gradient[i];
        if (!g->got) continue;
        compare(run, way, g->name, g->got, &g->want, a->relative, a->unit[2 + i]);
        if (!(c->params.flags & accumulates[i])) compare_differences(way, g, a->relative, a->unit[2 + i]);
    }
}

/* The case's memory as bytes. */
enum { TENSORS = sizeof((fattn_fixture_attention *)0)->tensor / sizeof(fattn_tensor) };
static fattn_tensor bytes_of(const fattn_tensor *memory) {
    const int64_t bytes = fattn_tensor_numel(memory) * (int64_t)fattn_dtype_size((fattn_dtype)memory->dtype);
    return fattn_tensor_view(memory->data, FATTN_U8, FATTN_CPU, 0, 1, &bytes);
}

/* Runs the case on the device: copies its memory there, with its strides, and back. */
static fattn_status run_elsewhere(fattn_ctx *ctx, fattn_fixture_attention *c) {
    fattn_tensor there[TENSORS] = {{0}};
    void *home[TENSORS];
    fattn_status s = FATTN_OK;
    for (int i = 0; i < TENSORS; ++i) {
        const fattn_tensor here = bytes_of(&c->memory[i]);
        if (!s && here.data) s = fattn_tensor_alloc(ctx, FATTN_U8, 1, here.shape, &there[i]);
        if (!s && here.data) s = fattn_tensor_copy(ctx, &there[i], &here);
    }
    for (int i = 0; i < TENSORS; ++i) {
        fattn_tensor *const t = &c->tensor[i];
        home[i] = t->data;
        t->device = FATTN_CUDA;
        for (int m = 0; m < TENSORS && home[i]; ++m) {
            const fattn_tensor here = bytes_of(&c->memory[m]);
            const char *const begin = here.data, *const at = home[i];
            if (begin && at >= begin && at < begin + here.shape[0]) t->data = (char *)there[m].data + (at - begin);
        }
    }
    if (!s) s = fattn_fixture_attention_run(ctx, c);
    for (int i = 0; i < TENSORS; ++i) {
        const fattn_tensor here = bytes_of(&c->memory[i]);
        c->tensor[i].data = home[i];
        c->tensor[i].device = FATTN_CPU;
        if (!s && there[i].data) s = fattn_tensor_copy(ctx, &here, &there[i]);
        fattn_tensor_free(ctx, &there[i]);
    }
    return s;
}

static fattn_status run_case(fattn_ctx *ctx, fattn_fixture_attention *c) {
    if (fattn_ctx_device(ctx) == FATTN_CPU) return fattn_fixture_attention_run(ctx, c);
    return run_elsewhere(ctx, c);
}

/* Loads the case again for each algorithm, since a call may add to its outputs. */
static void check_way_of(check_run *run, fattn_fixture *f, const char *name, int w, check_result *r) {
    check_way *const way = &r->way[w];
    fattn_fixture_attention c = {.struct_size = sizeof c};
    allowance a;
    fattn_status s = fattn_fixture_attention_load(f, name, run->dtype, &c);
    if (s == FATTN_OK) s = allow(run, f, name, &c, &a);
    if (s == FATTN_OK) {
        check_sizes(r, c.io.q->shape[0], c.io.q->shape[1], c.io.k->shape[1], c.io.q->shape[2], c.io.k->shape[2],
                    c.io.q->shape[3], c.io.v->shape[3]);
        c.params.algorithm = check_algorithm(w);
        s = run_case(run->ctx, &c);
    }
    if (s == FATTN_OK) {
        way->state = CHECK_OK;
        compare_all(run, way, &c, &a);
    } else if (s == FATTN_E_UNSUPPORTED) {
        snprintf(way->message, sizeof way->message, "%s", fattn_ctx_error(run->ctx));
    } else {
        fail(way, fattn_status_name(s), fattn_ctx_error(run->ctx));
    }
    fattn_fixture_attention_free(run->host, &c);
}

/* Cases of the tape's ops have no q; only the library's tests run them. */
static bool is_attention(fattn_fixture *f, const char *name) {
    char path[128];
    snprintf(path, sizeof path, "/cases/%s/q", name);
    return fattn_fixture_has(f, path) != 0;
}

static void check_case(check_run *run, fattn_fixture *f, const char *file, const char *name) {
    if (!is_attention(f, name)) return;
    char full[192];
    snprintf(full, sizeof full, "%.*s/%s", (int)strcspn(file, "."), file, name);
    if (!check_begin(run, full)) return;
    check_result r = {.name = full};
    const double begin = seconds_now();
    for (int w = 0; w < CHECK_WAYS; ++w) check_way_of(run, f, name, w, &r);
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
        for (; at > 0 && strcmp(names[at - 1], e->d_name) > 0; --at) memcpy(names[at], names[at - 1], FILE_NAME);
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
        const fattn_status s = fattn_fixture_open(run->host, path, 0, &f);
        if (s != FATTN_OK) {
            cli_status(run->host, s, "fixtures");
            return false;
        }
        for (int c = 0; c < fattn_fixture_count(f); ++c) check_case(run, f, names[i], fattn_fixture_case(f, c));
        if (fattn_fixture_close(f) != FATTN_OK) return false;
    }
    return true;
}
