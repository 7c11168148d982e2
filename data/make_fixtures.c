/* make_fixtures FOLDER: writes the fixture files there. Runs of the same build give the same bytes. */
#include "generator.h"

#include "core/tensor/philox.h"

#include <float.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

fattn_status draw(writer *w, fattn_dtype exact, int ndim, const int64_t *shape, fattn_tensor *out) {
    fattn_tensor rounded = {0};
    fattn_status status = fattn_tensor_alloc(w->ctx, exact, ndim, shape, &rounded);
    if (status == FATTN_OK) status = fattn_tensor_alloc(w->ctx, FATTN_F64, ndim, shape, out);
    const fattn_rng rng = {.seed = w->seed, .stream = w->stream++};
    if (status == FATTN_OK) status = fattn_tensor_normal(w->ctx, &rounded, 0, 1, rng);
    if (status == FATTN_OK) status = fattn_tensor_copy(w->ctx, out, &rounded);
    fattn_tensor_free(w->ctx, &rounded);
    return status;
}

fattn_status put_f32(writer *w, const char *path, const fattn_tensor *t) {
    fattn_tensor narrow = {0};
    FATTNI_TRY(fattn_tensor_alloc(w->ctx, FATTN_F32, t->ndim, t->shape, &narrow));
    fattn_status status = fattn_tensor_copy(w->ctx, &narrow, t);
    if (status == FATTN_OK) status = fattn_fixture_put(w->file, path, &narrow);
    fattn_tensor_free(w->ctx, &narrow);
    return status;
}

enum { SAMPLE = 12, TRIES = 64 };

static int ascending(const void *a, const void *b) {
    const int32_t x = *(const int32_t *)a, y = *(const int32_t *)b;
    return (x > y) - (x < y);
}

/* Chooses distinct elements that are finite and have a gradient; returns their number. */
static int choose(writer *w, const difference *d, int32_t *out) {
    const int64_t count = fattn_tensor_numel(&d->x);
    const double *const x = d->x.data, *const gradient = d->gradient.data;
    const uint32_t stream = w->stream++;
    int chosen = 0;
    for (uint32_t n = 0; count > 0 && n < TRIES && chosen < SAMPLE; ++n) {
        const fattni_block random = fattni_philox(w->seed, (fattni_block){{n, 0, 0, stream}});
        const int32_t at = (int32_t)(n == 0 ? 0 : n == 1 ? count - 1 : (int64_t)(random.w[0] % (uint64_t)count));
        bool fresh = isfinite(x[at]) && isfinite(gradient[at]);
        for (int m = 0; m < chosen; ++m) fresh = fresh && out[m] != at;
        if (fresh) out[chosen++] = at;
    }
    qsort(out, (size_t)chosen, sizeof *out, ascending);
    return chosen;
}

/* The quotient over the distance of the points as stored; h = DBL_EPSILON^(1/3) max(1, |x|). */
static fattn_status quotient(const difference *d, int32_t at, double *out) {
    double *const x = (double *)d->x.data + at, value = *x;
    const double h = cbrt(DBL_EPSILON) * fmax(1, fabs(value));
    const double above = value + h, below = value - h;
    double up = 0, down = 0;
    *x = above;
    fattn_status status = d->loss(d->user, &up);
    *x = below;
    if (status == FATTN_OK) status = d->loss(d->user, &down);
    *x = value;
    *out = (up - down) / (above - below);
    return status;
}

fattn_status put_differences(writer *w, const difference *d) {
    int32_t index[SAMPLE];
    double value[SAMPLE];
    char path[128];
    const int64_t count = choose(w, d, index);
    for (int n = 0; n < count; ++n) {
        const double *const x = (const double *)d->x.data + index[n];
        FATTNI_TRY(d->quotient ? d->quotient(d->user, x, d->step, &value[n]) : quotient(d, index[n], &value[n]));
    }
    const fattn_tensor i = fattn_tensor_view(index, FATTN_I32, FATTN_CPU, 0, 1, &count);
    const fattn_tensor v = fattn_tensor_view(value, FATTN_F64, FATTN_CPU, 0, 1, &count);
    snprintf(path, sizeof path, "/cases/%s/fd/%s_index", d->name, d->input);
    FATTNI_TRY(fattn_fixture_put(w->file, path, &i));
    snprintf(path, sizeof path, "/cases/%s/fd/%s_value", d->name, d->input);
    FATTNI_TRY(fattn_fixture_put(w->file, path, &v));
    return fattn_fixture_put_f64(w->file, path, "step", d->quotient ? d->step : cbrt(DBL_EPSILON));
}

static fattn_status put_attentions(writer *w, const attention_spec *specs, int count) {
    for (int n = 0; n < count; ++n) FATTNI_TRY(put_attention(w, &specs[n]));
    return FATTN_OK;
}
static fattn_status put_small(writer *w) { return put_attentions(w, small_specs, small_count); }
static fattn_status put_masks(writer *w) { return put_attentions(w, mask_specs, mask_count); }
static fattn_status put_dropout(writer *w) { return put_attentions(w, dropout_specs, dropout_count); }
static fattn_status put_extremes(writer *w) { return put_attentions(w, extreme_specs, extreme_count); }
static fattn_status put_means(writer *w) { return put_attentions(w, mean_specs, mean_count); }

static const struct {
    const char *name;
    uint64_t seed;
    fattn_status (*put)(writer *w);
} files[] = {
    {"attention_small.h5", 1, put_small}, {"masks.h5", 2, put_masks},
    {"dropout.h5", 3, put_dropout},       {"ops.h5", 4, put_ops},
    {"block.h5", 5, put_blocks},          {"extremes.h5", 6, put_extremes},
    {"means.h5", 7, put_means},
};

static fattn_status make(fattn_ctx *ctx, const char *folder, int n) {
    char path[4096];
    snprintf(path, sizeof path, "%s/%s", folder, files[n].name);
    writer w = {.ctx = ctx, .seed = files[n].seed};
    FATTNI_TRY(fattn_fixture_open(ctx, path, 1, &w.file));
    fattn_status status = fattn_fixture_put_text(w.file, "/", "generator", "make_fixtures 1");
    if (status == FATTN_OK) status = fattn_fixture_put_f64(w.file, "/", "seed", (double)files[n].seed);
    if (status == FATTN_OK) status = files[n].put(&w);
    const int cases = fattn_fixture_count(w.file);
    if (status == FATTN_OK)
        status = fattn_fixture_close(w.file);
    else if (fattn_fixture_close(w.file) != FATTN_OK) /* the first error message is the one to show */
        return status;
    if (status == FATTN_OK) printf("%s: %d cases\n", path, cases);
    return status;
}

int main(int argc, char **argv) {
    if (argc != 2) {
        fprintf(stderr, "usage: make_fixtures FOLDER\n");
        return 2;
    }
    const fattn_ctx_options one_thread = {.struct_size = sizeof one_thread, .cpu_threads = 1};
    fattn_ctx *ctx;
    fattn_status status = fattn_ctx_create(&one_thread, &ctx);
    if (status != FATTN_OK) {
        fprintf(stderr, "make_fixtures: %s\n", fattn_status_text(status));
        return 1;
    }
    const int count = sizeof files / sizeof *files;
    for (int n = 0; n < count && status == FATTN_OK; ++n) status = make(ctx, argv[1], n);
    if (status != FATTN_OK) fprintf(stderr, "make_fixtures: %s: %s\n", fattn_status_name(status), fattn_ctx_error(ctx));
    fattn_ctx_destroy(ctx);
    return status != FATTN_OK;
}
