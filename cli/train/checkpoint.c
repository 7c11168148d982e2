#include "cli/train/checkpoint.h"

#include <dirent.h>
#include <errno.h>
#include <fattn/checkpoint.h>
#include <hdf5.h>
#include <limits.h>
#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum { MAX_TEXTS = 16, OLD_TEXT_BYTES = 4096, NAME_BYTES = 64 };

struct checkpoint {
    fattn_ctx *ctx; /* for error messages: the run's is made after its options have been read */
    fattn_checkpoint_file *library;
    hid_t file; /* the same for HDF5 */
    int64_t newest;
    char path[PATH_MAX];
    char *texts[MAX_TEXTS];
    int n_texts;
};

/* ---- names ---- */

static void name_of(int64_t step, char name[NAME_BYTES]) {
    snprintf(name, NAME_BYTES, "step-%09lld.h5", (long long)step);
}

/* The step in a file's name; -1 for other files. */
static int64_t step_of(const char *name) {
    char same[NAME_BYTES];
    if (strncmp(name, "step-", 5) != 0) return -1;
    const int64_t step = strtoll(name + 5, NULL, 10);
    name_of(step, same);
    return strcmp(name, same) == 0 ? step : -1;
}

/* The newest checkpoint in the folder before step `limit`; -1 when there is none. */
static int64_t newest_before(const char *folder, int64_t limit) {
    int64_t newest = -1;
    DIR *d = opendir(folder);
    for (struct dirent *e; d && (e = readdir(d));) {
        const int64_t step = step_of(e->d_name);
        if (step < limit && step > newest) newest = step;
    }
    if (d) closedir(d);
    return newest;
}

int64_t checkpoint_after(const char *folder, int64_t step, char names[CHECKPOINT_NAMES]) {
    enum { NAMED = 4 };
    int64_t count = 0, at = INT64_MAX;
    size_t used = 0;
    names[0] = 0;
    while ((at = newest_before(folder, at)) > step) {
        char name[NAME_BYTES];
        name_of(at, name);
        if (count++ < NAMED)
            used += (size_t)snprintf(names + used, CHECKPOINT_NAMES - used, "%s%s", count > 1 ? ", " : "", name);
    }
    if (count > NAMED) snprintf(names + used, CHECKPOINT_NAMES - used, " and %lld more", (long long)(count - NAMED));
    return count;
}

bool checkpoint_each(const char *folder, file_visit *f, void *arg) {
    char name[NAME_BYTES], path[PATH_MAX];
    bool ok = true;
    for (int64_t at = INT64_MAX; ok && (at = newest_before(folder, at)) >= 0;) {
        name_of(at, name);
        snprintf(path, sizeof path, "%s/%s", folder, name);
        ok = f(arg, path);
    }
    return ok;
}

/* Removes the folder's checkpoints of steps after `after`, except two. */
static bool remove_but(const char *folder, int64_t after, int64_t keep, int64_t keep_too) {
    bool ok = true;
    DIR *d = opendir(folder);
    for (struct dirent *e; d && (e = readdir(d));) {
        char path[PATH_MAX];
        const int64_t step = step_of(e->d_name);
        if (step <= after || step == keep || step == keep_too) continue;
        snprintf(path, sizeof path, "%s/%s", folder, e->d_name);
        if (unlink(path) == 0) continue;
        cli_fail(CLI_FAILURE, "cannot remove %s: %s", path, strerror(errno));
        ok = false;
    }
    if (d) closedir(d);
    return ok;
}

bool checkpoint_remove_after(const char *folder, int64_t step) { return remove_but(folder, step, -1, -1); }

/* ---- values in HDF5 ---- */

static bool put_attribute(hid_t object, const char *name, hid_t type, const void *value) {
    const hid_t space = H5Screate(H5S_SCALAR);
    const hid_t a = H5Acreate2(object, name, type, space, H5P_DEFAULT, H5P_DEFAULT);
    const bool ok = a >= 0 && H5Awrite(a, type, value) >= 0;
    if (a >= 0) H5Aclose(a);
    H5Sclose(space);
    return ok;
}

static bool get_attribute(hid_t object, const char *name, hid_t type, void *value) {
    if (H5Aexists(object, name) <= 0) return false;
    const hid_t a = H5Aopen(object, name, H5P_DEFAULT);
    const hid_t space = H5Aget_space(a), stored = H5Aget_type(a);
    const bool ok = H5Sget_simple_extent_npoints(space) == 1 && H5Tget_class(stored) == H5Tget_class(type) &&
                    H5Aread(a, type, value) >= 0;
    H5Tclose(stored);
    H5Sclose(space);
    H5Aclose(a);
    return ok;
}

static bool put_array(hid_t file, const char *path, hid_t type, int ndim, const int64_t *shape, const void *data) {
    hsize_t extent[FATTN_MAX_DIMS];
    for (int d = 0; d < ndim; ++d) extent[d] = (hsize_t)shape[d];
    const hid_t space = H5Screate_simple(ndim, extent, NULL);
    const hid_t links = H5Pcreate(H5P_LINK_CREATE), create = H5Pcreate(H5P_DATASET_CREATE);
    H5Pset_create_intermediate_group(links, 1);
    H5Pset_obj_track_times(create, false); /* equal states give equal files */
    const hid_t set = H5Dcreate2(file, path, type, space, links, create, H5P_DEFAULT);
    const bool empty = H5Sget_simple_extent_npoints(space) == 0;
    const bool ok = set >= 0 && (empty || H5Dwrite(set, type, H5S_ALL, H5S_ALL, H5P_DEFAULT, data) >= 0);
    if (set >= 0) H5Dclose(set);
    H5Pclose(create);
    H5Pclose(links);
    H5Sclose(space);
    return ok;
}

/* Whether count elements are stored contiguously in the file itself; HDF5 would fill in missing data. */
static bool is_whole(hid_t set, hsize_t count) {
    hsize_t size;
    const hid_t file = H5Iget_file_id(set);
    const hid_t list = H5Dget_create_plist(set), type = H5Dget_type(set);
    const H5D_layout_t layout = H5Pget_layout(list);
    const bool whole = (layout == H5D_CONTIGUOUS || layout == H5D_COMPACT) && H5Pget_external_count(list) == 0 &&
                       H5Fget_filesize(file, &size) >= 0 && count <= size &&
                       H5Dget_storage_size(set) == count * H5Tget_size(type);
    H5Tclose(type);
    H5Pclose(list);
    H5Fclose(file);
    return whole;
}

/* Extent of a dataset; -1 dimensions when it is missing or incomplete. */
static int shape_of(hid_t file, const char *path, int64_t shape[FATTN_MAX_DIMS]) {
    if (H5Lexists(file, path, H5P_DEFAULT) <= 0) return -1;
    const hid_t set = H5Dopen2(file, path, H5P_DEFAULT);
    if (set < 0) return -1;
    const hid_t space = H5Dget_space(set);
    hsize_t extent[H5S_MAX_RANK];
    int ndim = H5Sget_simple_extent_dims(space, extent, NULL);
    const hssize_t count = H5Sget_simple_extent_npoints(space);
    if (ndim > FATTN_MAX_DIMS || count < 0 || !is_whole(set, (hsize_t)count)) ndim = -1;
    for (int d = 0; d < ndim; ++d) shape[d] = (int64_t)extent[d];
    H5Sclose(space);
    H5Dclose(set);
    return ndim;
}

static bool get_array(hid_t file, const char *path, hid_t type, int ndim, const int64_t *shape, void *data) {
    int64_t found[FATTN_MAX_DIMS];
    if (shape_of(file, path, found) != ndim) return false;
    int64_t n = 1;
    for (int d = 0; d < ndim; ++d) {
        if (found[d] != shape[d]) return false;
        n *= found[d];
    }
    const hid_t set = H5Dopen2(file, path, H5P_DEFAULT);
    const bool ok = n == 0 || H5Dread(set, type, H5S_ALL, H5S_ALL, H5P_DEFAULT, data) >= 0;
    H5Dclose(set);
    return ok;
}

/* A text is a dataset of bytes, since an attribute has at most 64 KiB. */
static bool put_text(hid_t group, const char *name, const char *value) {
    const int64_t length = (int64_t)strlen(value);
    return put_array(group, name, H5T_NATIVE_UCHAR, 1, &length, value);
}

static char *get_text(hid_t group, const char *name) {
    int64_t length[FATTN_MAX_DIMS];
    if (H5Lexists(group, name, H5P_DEFAULT) > 0) {
        if (shape_of(group, name, length) != 1) return NULL;
        char *const text = calloc(1, (size_t)length[0] + 1);
        if (text && get_array(group, name, H5T_NATIVE_UCHAR, 1, length, text)) return text;
        free(text);
        return NULL;
    }
    const hid_t type = H5Tcopy(H5T_C_S1); /* the format of older versions */
    char *text = calloc(1, OLD_TEXT_BYTES + 1);
    if (text && (H5Tset_size(type, OLD_TEXT_BYTES) < 0 || !get_attribute(group, name, type, text))) {
        free(text);
        text = NULL;
    }
    H5Tclose(type);
    return text;
}

/* ---- options ---- */

static bool is_stored(const cli_option *o, const char *const *skip) {
    for (; *skip; ++skip)
        if (strcmp(o->name, *skip) == 0) return false;
    return o->type != CLI_INTS;
}

static bool put_option(hid_t group, const cli_option *o, const void *field) {
    switch (o->type) {
    case CLI_FLAG: {
        const int value = *(const bool *)field;
        return put_attribute(group, o->name, H5T_NATIVE_INT, &value);
    }
    case CLI_INT: return put_attribute(group, o->name, H5T_NATIVE_INT64, field);
    case CLI_REAL: return put_attribute(group, o->name, H5T_NATIVE_DOUBLE, field);
    case CLI_CHOICE: return put_attribute(group, o->name, H5T_NATIVE_INT, field);
    case CLI_TEXT: return !*(char *const *)field || put_text(group, o->name, *(char *const *)field);
    default: return false;
    }
}

static bool read_option(checkpoint *c, hid_t group, const cli_option *o, void *field) {
    switch (o->type) {
    case CLI_FLAG: {
        int value;
        if (!get_attribute(group, o->name, H5T_NATIVE_INT, &value)) return false;
        *(bool *)field = value != 0;
        return true;
    }
    case CLI_INT: return get_attribute(group, o->name, H5T_NATIVE_INT64, field);
    case CLI_REAL: return get_attribute(group, o->name, H5T_NATIVE_DOUBLE, field);
    case CLI_CHOICE: return get_attribute(group, o->name, H5T_NATIVE_INT, field);
    case CLI_TEXT: {
        *(const char **)field = NULL;
        if (H5Aexists(group, o->name) <= 0 && H5Lexists(group, o->name, H5P_DEFAULT) <= 0) return true;
        char *text = c->n_texts < MAX_TEXTS ? get_text(group, o->name) : NULL;
        if (!text) return false;
        *(const char **)field = c->texts[c->n_texts++] = text;
        return true;
    }
    default: return false;
    }
}

/* An option that the file lacks stays as it is: older versions did not have it. A valid file may still have values
   outside an option's range. */
static bool get_option(checkpoint *c, hid_t group, const cli_option *o, void *field) {
    if (o->type != CLI_TEXT && H5Aexists(group, o->name) <= 0) return true;
    return read_option(c, group, o, field) && cli_in_range(o, field);
}

/* ---- the state of a run ---- */

/* What the library's checkpoint has of a run. */
static fattn_checkpoint of_run(const trainer *r) {
    int n;
    fattn_param *const *const params = model_params(r->model, &n);
    return (fattn_checkpoint){
        .struct_size = sizeof(fattn_checkpoint), .n = n, .params = params, .adamw = r->adamw, .step = r->step};
}

/* What /state has beside step and adam_step, which are the library's. */
typedef struct counters {
    int64_t step, cursor;
    double elapsed;
    uint64_t fingerprint;
} counters;

static bool put_counters(hid_t group, const counters *c) {
    return put_attribute(group, "cursor", H5T_NATIVE_INT64, &c->cursor) &&
           put_attribute(group, "elapsed", H5T_NATIVE_DOUBLE, &c->elapsed) &&
           put_attribute(group, "fingerprint", H5T_NATIVE_UINT64, &c->fingerprint);
}
static bool get_counters(hid_t group, counters *c) {
    return get_attribute(group, "step", H5T_NATIVE_INT64, &c->step) &&
           get_attribute(group, "cursor", H5T_NATIVE_INT64, &c->cursor) &&
           get_attribute(group, "elapsed", H5T_NATIVE_DOUBLE, &c->elapsed) &&
           get_attribute(group, "fingerprint", H5T_NATIVE_UINT64, &c->fingerprint);
}

/* Counters will be incremented: they must not overflow. */
static bool are_valid(const counters *c) {
    const int64_t limit = INT64_MAX / 2;
    return c->step >= 0 && c->step < limit && c->cursor >= 0 && c->cursor < limit && isfinite(c->elapsed) &&
           c->elapsed >= 0;
}

static bool put_history(hid_t file, const history *h) {
    return put_array(file, "/history/loss", H5T_NATIVE_DOUBLE, 1, &h->steps, h->loss) &&
           put_array(file, "/history/eval_step", H5T_NATIVE_DOUBLE, 1, &h->evals, h->eval_step) &&
           put_array(file, "/history/eval_loss", H5T_NATIVE_DOUBLE, 1, &h->evals, h->eval_loss) &&
           put_array(file, "/history/eval_right", H5T_NATIVE_DOUBLE, 1, &h->evals, h->eval_right);
}

static bool get_history(hid_t file, fattn_ctx *ctx, history *h) {
    int64_t steps[FATTN_MAX_DIMS], evals[FATTN_MAX_DIMS];
    if (shape_of(file, "/history/loss", steps) != 1) return false;
    if (shape_of(file, "/history/eval_step", evals) != 1) return false;
    if (history_resize(ctx, h, steps[0], evals[0]) != FATTN_OK) return false;
    return get_array(file, "/history/loss", H5T_NATIVE_DOUBLE, 1, &h->steps, h->loss) &&
           get_array(file, "/history/eval_step", H5T_NATIVE_DOUBLE, 1, &h->evals, h->eval_step) &&
           get_array(file, "/history/eval_loss", H5T_NATIVE_DOUBLE, 1, &h->evals, h->eval_loss) &&
           get_array(file, "/history/eval_right", H5T_NATIVE_DOUBLE, 1, &h->evals, h->eval_right);
}

/* Adds to the library's file what only this program needs. */
static bool put_all(hid_t file, const cli_option *table, const void *options, const char *const *skip,
                    const trainer *r) {
    const counters c = {.cursor = r->cursor, .elapsed = r->elapsed, .fingerprint = r->task->fingerprint};
    const hid_t config = H5Gcreate2(file, "/config", H5P_DEFAULT, H5P_DEFAULT, H5P_DEFAULT);
    const hid_t state = H5Gopen2(file, "/state", H5P_DEFAULT);
    bool ok = config >= 0 && state >= 0;
    for (const cli_option *o = table; ok && o->name; ++o) {
        if (is_stored(o, skip)) ok = put_option(config, o, (const char *)options + o->offset);
    }
    ok = ok && put_counters(state, &c) && put_history(file, &r->history);
    if (config >= 0) H5Gclose(config);
    if (state >= 0) H5Gclose(state);
    return ok;
}

/* Makes the folders, too. */
static fattn_status write_file(fattn_ctx *ctx, const fattn_checkpoint_file *file, const char *path) {
    if (!cli_make_parents(path)) return fattn_ctx_fail(ctx, FATTN_E_IO, "cannot write %s: %s", path, strerror(errno));
    return fattn_checkpoint_write(ctx, file, path);
}

bool checkpoint_save(const char *folder, const cli_option *table, const void *options, const char *const *skip,
                     const trainer *r) {
    const fattn_checkpoint run = of_run(r);
    fattn_checkpoint_file *file = NULL;
    char name[NAME_BYTES], path[PATH_MAX];
    if (!trainer_leads(r)) { /* its part of AdamW's state */
        const fattn_status s = r->config.zero ? fattn_checkpoint_create(r->ctx, &run, &file) : FATTN_OK;
        if (s) rank_failed(r->config.rank, s, "checkpoint");
        return !s;
    }
    H5Eset_auto2(H5E_DEFAULT, NULL, NULL); /* HDF5 prints nothing */
    name_of(r->step, name);
    if (snprintf(path, sizeof path, "%s/%s", folder, name) >= PATH_MAX) {
        cli_fail(CLI_FAILURE, "cannot write %s/%s: %s", folder, name, strerror(ENAMETOOLONG));
        return false;
    }
    const int64_t before = newest_before(folder, r->step);
    fattn_status s = fattn_checkpoint_create(r->ctx, &run, &file);
    if (!s && !put_all((hid_t)fattn_checkpoint_hdf5(file), table, options, skip, r))
        s = fattn_ctx_fail(r->ctx, FATTN_E_NOMEM, "cannot build a checkpoint of step %lld: no memory?",
                           (long long)r->step);
    if (!s) s = write_file(r->ctx, file, path);
    if (s == FATTN_E_IO && access(folder, F_OK) != 0) s = write_file(r->ctx, file, path); /* it was removed meanwhile */
    fattn_checkpoint_close(file);
    if (s) cli_fail(CLI_FAILURE, "%s", fattn_ctx_error(r->ctx));
    return !s && remove_but(folder, -1, r->step, before);
}

/* ---- reading ---- */

static checkpoint *open_file(const char *path) {
    checkpoint *const c = calloc(1, sizeof *c);
    fattn_status s = c ? fattn_ctx_create(NULL, &c->ctx) : FATTN_E_NOMEM;
    H5Eset_auto2(H5E_DEFAULT, NULL, NULL);
    if (!s) s = fattn_checkpoint_open(c->ctx, path, &c->library);
    if (!s) {
        c->file = (hid_t)fattn_checkpoint_hdf5(c->library);
        c->newest = -1;
        snprintf(c->path, sizeof c->path, "%s", path);
        return c;
    }
    cli_fail(CLI_FAILURE, "%s", c && c->ctx ? fattn_ctx_error(c->ctx) : fattn_status_text(s));
    checkpoint_close(c);
    return NULL;
}

checkpoint *checkpoint_open(const char *path) {
    struct stat status;
    if (stat(path, &status) != 0 || !S_ISDIR(status.st_mode)) return open_file(path);
    int64_t newest = newest_before(path, INT64_MAX), step = newest;
    if (step < 0) cli_fail(CLI_FAILURE, "%s has no checkpoint", path);
    checkpoint *c = NULL;
    while (!c && step >= 0) {
        char name[NAME_BYTES], file[PATH_MAX];
        name_of(step, name);
        snprintf(file, sizeof file, "%s/%s", path, name);
        c = open_file(file);
        if (c) c->newest = newest;
        if (c) break;
        const int64_t now = newest_before(path, INT64_MAX); /* another process may have saved since */
        step = now > newest ? now : newest_before(path, step);
        if (step >= 0) cli_fail(CLI_OK, "going %s to step %lld", now > newest ? "on" : "back", (long long)step);
        if (now > newest) newest = now;
    }
    return c;
}

int64_t checkpoint_newest(const checkpoint *c) { return c->newest; }
const char *checkpoint_path(const checkpoint *c) { return c->path; }

bool checkpoint_options(checkpoint *c, const cli_option *table, void *options, const char *const *skip) {
    const hid_t group = H5Gopen2(c->file, "/config", H5P_DEFAULT);
    bool ok = group >= 0;
    for (const cli_option *o = table; ok && o->name; ++o) {
        if (!is_stored(o, skip)) continue;
        ok = get_option(c, group, o, (char *)options + o->offset);
        if (!ok) cli_fail(CLI_FAILURE, "%s was written by another version: its %s is out of range", c->path, o->name);
    }
    if (group >= 0)
        H5Gclose(group);
    else
        cli_fail(CLI_FAILURE, "%s has no configuration", c->path);
    return ok;
}

bool checkpoint_fingerprint(checkpoint *c, uint64_t *out) {
    counters found;
    const hid_t group = H5Gopen2(c->file, "/state", H5P_DEFAULT);
    const bool ok = group >= 0 && get_counters(group, &found);
    if (group >= 0) H5Gclose(group);
    if (!ok) cli_fail(CLI_FAILURE, "%s has no counters of a run", c->path);
    if (ok) *out = found.fingerprint;
    return ok;
}

/* False after an error message: the file's model has another vocabulary. */
static bool has_symbols(const checkpoint *c, const model *m) {
    int64_t embedding[FATTN_MAX_DIMS];
    const int64_t symbols = model_columns(model_get_config(m));
    const char *table = model_get_config(m)->arch == ARCH_GPT2 ? "/params/wte.weight" : "/params/embedding";
    if (shape_of(c->file, table, embedding) != 2 || embedding[0] == symbols) return true;
    cli_fail(CLI_FAILURE,
             "%s: its model has %lld symbols, this program's has %lld: it was written by another version "
             "(symbols of a text are now its bytes), and the run cannot be resumed",
             c->path, (long long)embedding[0], (long long)symbols);
    return false;
}

static bool restore(checkpoint *c, trainer *r) {
    counters found;
    const hid_t group = H5Gopen2(c->file, "/state", H5P_DEFAULT);
    bool ok = group >= 0 && get_counters(group, &found) && are_valid(&found);
    if (group >= 0) H5Gclose(group);
    if (ok && !has_symbols(c, r->model)) return false;
    if (ok && found.fingerprint != r->task->fingerprint) {
        cli_fail(CLI_FAILURE, "%s: the run was trained on other data", c->path);
        return false;
    }
    ok = ok && get_history(c->file, r->ctx, &r->history) && r->history.steps == found.step;
    if (!ok) {
        cli_fail(CLI_FAILURE, "%s does not hold the state of a run", c->path);
        return false;
    }
    fattn_checkpoint run = of_run(r);
    if (fattn_checkpoint_read(r->ctx, c->library, &run) != FATTN_OK || trainer_read_scale(r) != FATTN_OK) {
        cli_fail(CLI_FAILURE, "%s", fattn_ctx_error(r->ctx));
        return false;
    }
    r->step = found.step;
    r->cursor = found.cursor;
    r->elapsed = found.elapsed;
    return true;
}

bool checkpoint_restore(checkpoint *c, trainer *r) {
    static pthread_mutex_t one_at_a_time = PTHREAD_MUTEX_INITIALIZER; /* HDF5 is not thread-safe */
    pthread_mutex_lock(&one_at_a_time);
    const bool ok = restore(c, r);
    pthread_mutex_unlock(&one_at_a_time);
    return ok;
}

bool checkpoint_read_model(checkpoint *c, fattn_ctx *ctx, model *m) {
    int n;
    fattn_param *const *const params = model_params(m, &n);
    fattn_checkpoint run = {.struct_size = sizeof run, .n = n, .params = params};
    if (!has_symbols(c, m)) return false;
    if (fattn_checkpoint_read(ctx, c->library, &run) == FATTN_OK) return true;
    cli_fail(CLI_FAILURE, "%s", fattn_ctx_error(ctx));
    return false;
}

void checkpoint_close(checkpoint *c) {
    if (!c) return;
    for (int i = 0; i < c->n_texts; ++i) free(c->texts[i]);
    fattn_checkpoint_close(c->library);
    fattn_ctx_destroy(c->ctx);
    free(c);
}
