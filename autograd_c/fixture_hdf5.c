/* Fixture files: open and close, the list of cases, paths. */
#include "fixture_internal.h"

#include <limits.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

enum { CASE_LIMIT = 100000 };

fattni_hush fattni_hush_begin(void) {
    fattni_hush h = {0};
    H5Eget_auto2(H5E_DEFAULT, &h.print, &h.data);
    H5Eset_auto2(H5E_DEFAULT, NULL, NULL);
    return h;
}

void fattni_hush_end(fattni_hush h) { H5Eset_auto2(H5E_DEFAULT, h.print, h.data); }

static herr_t keep_innermost(unsigned n, const H5E_error2_t *e, void *reason) {
    if (n == 0) snprintf(reason, 128, ": %s", e->desc ? e->desc : "no reason given");
    return 0;
}

fattn_status fattni_fixture_fail(fattn_fixture *f, const char *path, const char *what) {
    char reason[128] = "";
    H5Ewalk2(H5E_DEFAULT, H5E_WALK_UPWARD, keep_innermost, reason);
    H5Eclear2(H5E_DEFAULT);
    return fattn_ctx_fail(f->ctx, FATTN_E_IO, "%s: %s: %s%s", f->path, path, what, reason);
}

fattn_status fattni_fixture_break(fattn_fixture *f, const char *path) {
    f->broken = true;
    return fattni_fixture_fail(f, path, "could not be written");
}

/* Names: what every file system, shell and language can spell. */
static size_t sound_prefix(const char *s) {
    return s[0] == '.' ? 0
                       : strspn(s, "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
                                   "0123456789_-.");
}

bool fattni_fixture_sound_name(const char *s) {
    const size_t length = s ? sound_prefix(s) : 0;
    return length >= 1 && length < FATTNI_FIXTURE_NAME && s[length] == 0;
}

static fattn_status check_path(fattn_fixture *f, const char *path) {
    if (!path) return fattn_ctx_fail(f->ctx, FATTN_E_ARG, "%s: path is NULL", f->path);
    if (strcmp(path, "/") == 0) return FATTN_OK;
    bool sound = path[0] == '/' && strnlen(path, FATTNI_FIXTURE_PATH) < FATTNI_FIXTURE_PATH;
    for (const char *s = path; sound && *s;) { /* s stands at a slash */
        const size_t length = sound_prefix(++s);
        s += length;
        sound = length >= 1 && length < FATTNI_FIXTURE_NAME && (*s == '/' || !*s);
    }
    if (sound) return FATTN_OK;
    return fattn_ctx_fail(f->ctx, FATTN_E_ARG, "%s: '%.80s' is not a path of plain names", f->path,
                          path);
}

fattn_status fattni_fixture_case_path(fattn_fixture *f, const char *name, char *path) {
    if (!fattni_fixture_sound_name(name))
        return fattn_ctx_fail(f->ctx, FATTN_E_ARG, "%s: '%.80s' is not a case name", f->path,
                              name ? name : "NULL");
    snprintf(path, FATTNI_FIXTURE_PATH, "/cases/%s", name);
    return FATTN_OK;
}

/* Each link on the way is looked at before it is followed: soft links may loop, external ones leave
   the file, and both would be followed silently. */
fattn_status fattni_fixture_find(fattn_fixture *f, const char *path, hid_t *out) {
    *out = H5I_INVALID_HID;
    const fattn_status status = check_path(f, path);
    if (status != FATTN_OK) return status;
    for (const char *end = path; path[1] && *end;) {
        char prefix[FATTNI_FIXTURE_PATH];
        end += 1 + strcspn(end + 1, "/");
        snprintf(prefix, sizeof prefix, "%.*s", (int)(end - path), path);
        const htri_t exists = H5Lexists(f->file, prefix, H5P_DEFAULT);
        if (exists == 0) return FATTN_OK;
        H5L_info_t link;
        if (exists < 0 || H5Lget_info(f->file, prefix, &link, H5P_DEFAULT) < 0)
            return fattni_fixture_fail(f, prefix, "damaged");
        if (link.type != H5L_TYPE_HARD)
            return fattni_fixture_fail(f, prefix, "is not a hard link, and no other is followed");
        H5O_info_t object;
        if (H5Oget_info_by_name(f->file, prefix, &object, H5P_DEFAULT) < 0)
            return fattni_fixture_fail(f, prefix, "damaged");
        if (object.type != H5O_TYPE_GROUP && (object.type != H5O_TYPE_DATASET || *end))
            return fattni_fixture_fail(f, prefix, "is not a group or a dataset in a group");
    }
    *out = H5Oopen(f->file, path, H5P_DEFAULT);
    return *out < 0 ? fattni_fixture_fail(f, path, "damaged") : FATTN_OK;
}

fattn_status fattni_fixture_at(fattn_fixture *f, const char *path, hid_t *out) {
    const fattn_status status = fattni_fixture_find(f, path, out);
    if (status != FATTN_OK || *out >= 0) return status;
    H5Eclear2(H5E_DEFAULT);
    return fattni_fixture_fail(f, path, "there is no such object");
}

/* Sorted insertion; an equal name is kept once. */
static fattn_status add_case(fattn_fixture *f, const char *name) {
    int at = f->count;
    while (at > 0 && strcmp(f->names[at - 1], name) > 0)
        --at;
    if (at > 0 && strcmp(f->names[at - 1], name) == 0) return FATTN_OK;
    if (f->count == f->capacity) {
        const int capacity = f->capacity ? 2 * f->capacity : 32;
        char **const names = realloc(f->names, (size_t)capacity * sizeof *names);
        if (!names) return fattn_ctx_fail(f->ctx, FATTN_E_NOMEM, "%s: %d names", f->path, capacity);
        f->names = names;
        f->capacity = capacity;
    }
    char *const copy = malloc(strlen(name) + 1);
    if (!copy) return fattn_ctx_fail(f->ctx, FATTN_E_NOMEM, "%s: a name", f->path);
    strcpy(copy, name);
    memmove(f->names + at + 1, f->names + at, (size_t)(f->count - at) * sizeof *f->names);
    f->names[at] = copy;
    f->count += 1;
    return FATTN_OK;
}

fattn_status fattni_fixture_make_group(fattn_fixture *f, const char *path) {
    const hid_t list = H5Pcreate(H5P_GROUP_CREATE);
    H5Pset_obj_track_times(list, false);
    H5Pset_link_phase_change(list, 64, 48); /* compact: a case's links lie in its header, ... */
    H5Pset_attr_phase_change(list, 64, 48); /* and so do its attributes */
    const hid_t group = H5Gcreate2(f->file, path, H5P_DEFAULT, list, H5P_DEFAULT);
    H5Pclose(list);
    if (group < 0) {
        return fattni_fixture_break(f, path);
    }
    H5Gclose(group);
    static const char cases[] = "/cases/";
    const size_t prefix = sizeof cases - 1;
    return strncmp(path, cases, prefix) == 0 && !strchr(path + prefix, '/')
               ? add_case(f, path + prefix)
               : FATTN_OK;
}

fattn_status fattni_fixture_make_parents(fattn_fixture *f, const char *path, int64_t bytes) {
    fattn_status status = check_path(f, path);
    if (status != FATTN_OK) return status;
    if (!f->sink)
        return fattn_ctx_fail(f->ctx, FATTN_E_STATE, "%s: %s: the file is open for reading",
                              f->path, path);
    status = fattni_fixture_image_reserve(f, path, bytes);
    if (status != FATTN_OK) return status;
    for (const char *end = path; (end = strchr(end + 1, '/'));) {
        char prefix[FATTNI_FIXTURE_PATH];
        snprintf(prefix, sizeof prefix, "%.*s", (int)(end - path), path);
        hid_t object;
        status = fattni_fixture_find(f, prefix, &object);
        if (status != FATTN_OK) return status;
        if (object >= 0)
            H5Oclose(object);
        else if ((status = fattni_fixture_make_group(f, prefix)) != FATTN_OK)
            return status;
    }
    return FATTN_OK;
}

typedef struct listing {
    fattn_fixture *f;
    fattn_status status;
} listing;

static herr_t list_case(hid_t group, const char *name, const H5L_info_t *link, void *user) {
    listing *const l = user;
    H5O_info_t object;
    if (!fattni_fixture_sound_name(name))
        l->status = fattni_fixture_fail(l->f, "/cases", "a name has odd characters or is too long");
    else if (l->f->count >= CASE_LIMIT)
        l->status = fattni_fixture_fail(l->f, "/cases", "more cases than anybody wrote");
    else if (link->type != H5L_TYPE_HARD)
        l->status = fattni_fixture_fail(l->f, name, "is not a hard link, and no other is followed");
    else if (H5Oget_info_by_name(group, name, &object, H5P_DEFAULT) < 0)
        l->status = fattni_fixture_fail(l->f, name, "damaged");
    else if (object.type == H5O_TYPE_GROUP)
        l->status = add_case(l->f, name);
    return l->status == FATTN_OK ? 0 : -1;
}

static fattn_status list_cases(fattn_fixture *f) {
    hid_t group;
    fattn_status status = fattni_fixture_find(f, "/cases", &group);
    if (status != FATTN_OK || group < 0) return status;
    listing l = {f, FATTN_OK};
    hsize_t next = 0;
    if (H5Iget_type(group) != H5I_GROUP)
        l.status = fattni_fixture_fail(f, "/cases", "is not a group");
    else if (H5Literate(group, H5_INDEX_NAME, H5_ITER_INC, &next, list_case, &l) < 0 &&
             l.status == FATTN_OK)
        l.status = fattni_fixture_fail(f, "/cases", "damaged");
    H5Oclose(group);
    return l.status;
}

static fattn_status load(fattn_fixture *f, FILE *source, fattn_tensor *image) {
    if (fread(image->data, 1, (size_t)f->bytes, source) != (size_t)f->bytes)
        return fattn_ctx_fail(f->ctx, FATTN_E_IO, "%s: could not be read to its end", f->path);
    return fattni_fixture_image_load(f, image);
}

static fattn_status open_for_reading(fattn_fixture *f) {
    struct stat info;
    if (stat(f->path, &info) != 0 || !S_ISREG(info.st_mode))
        return fattn_ctx_fail(f->ctx, FATTN_E_IO, "%s: there is no such file", f->path);
    f->bytes = (int64_t)info.st_size;
    if (f->bytes < FATTNI_SUPERBLOCK || f->bytes > FATTNI_FIXTURE_LIMIT)
        return fattn_ctx_fail(f->ctx, FATTN_E_IO, "%s: %lld bytes, not in %d..%lld", f->path,
                              (long long)f->bytes, FATTNI_SUPERBLOCK,
                              (long long)FATTNI_FIXTURE_LIMIT);
    fattn_tensor image = {0};
    fattn_status status = fattn_tensor_alloc(f->ctx, FATTN_U8, 1, &f->bytes, &image);
    if (status != FATTN_OK) return status;
    FILE *const source = fopen(f->path, "rb");
    if (source) {
        status = load(f, source, &image);
        fclose(source);
    } else {
        status = fattn_ctx_fail(f->ctx, FATTN_E_IO, "%s: cannot be opened for reading", f->path);
    }
    fattn_tensor_free(f->ctx, &image);
    if (status != FATTN_OK) return status;

    double schema;
    status = fattn_fixture_get_f64(f, "/", "schema", &schema);
    if (status != FATTN_OK) return status;
    if (schema != FATTN_FIXTURE_SCHEMA)
        return fattn_ctx_fail(f->ctx, FATTN_E_IO, "%s: schema %g, this library reads %d", f->path,
                              schema, FATTN_FIXTURE_SCHEMA);
    return list_cases(f);
}

static fattn_status open_for_writing(fattn_fixture *f) {
    f->sink = fopen(f->path, "wb");
    if (!f->sink)
        return fattn_ctx_fail(f->ctx, FATTN_E_IO, "%s: cannot be opened for writing", f->path);
    const int32_t schema = FATTN_FIXTURE_SCHEMA;
    hid_t root;
    fattn_status status = fattni_fixture_image_new(f);
    if (status == FATTN_OK) status = fattni_fixture_at(f, "/", &root);
    if (status != FATTN_OK) return status;
    status = fattni_fixture_write_attribute(f, root, "/", "schema", H5T_STD_I32LE, H5T_NATIVE_INT32,
                                            &schema);
    H5Oclose(root);
    return status;
}

/* Closes and frees everything; a sound created file is written on the way. */
static fattn_status release(fattn_fixture *f, fattn_status status) {
    if (f->file >= 0 && H5Fclose(f->file) < 0) f->broken = true;
    if (f->broken && status == FATTN_OK)
        status = fattn_ctx_fail(f->ctx, FATTN_E_IO, "%s: left empty: a write has failed", f->path);
    if (f->sink && status == FATTN_OK) status = fattni_fixture_image_write(f);
    if (f->sink && fclose(f->sink) != 0 && status == FATTN_OK)
        status = fattn_ctx_fail(f->ctx, FATTN_E_IO, "%s: could not be closed", f->path);
    for (int i = 0; i < f->count; ++i)
        free(f->names[i]);
    free(f->names);
    free(f->image);
    free(f->spare);
    free(f->path);
    free(f);
    return status;
}

fattn_status fattn_fixture_open(fattn_ctx *ctx, const char *path, int create, fattn_fixture **out) {
    if (out) *out = NULL;
    if (!ctx) return FATTN_E_ARG;
    if (!path || !out) return fattn_ctx_fail(ctx, FATTN_E_ARG, "fixture_open: path or out is NULL");
    if (fattn_ctx_device(ctx) != FATTN_CPU)
        return fattn_ctx_fail(ctx, FATTN_E_UNSUPPORTED, "fixture_open: works on a CPU context only");
    fattn_fixture *const f = calloc(1, sizeof *f);
    char *const copy = malloc(strlen(path) + 1);
    if (!f || !copy) {
        free(f);
        free(copy);
        return fattn_ctx_fail(ctx, FATTN_E_NOMEM, "fixture_open: %s", path);
    }
    *f = (fattn_fixture){.ctx = ctx, .file = H5I_INVALID_HID, .path = strcpy(copy, path)};
    const fattni_hush hush = fattni_hush_begin();
    fattn_status status = create ? open_for_writing(f) : open_for_reading(f);
    if (status == FATTN_OK)
        *out = f;
    else
        release(f, status);
    fattni_hush_end(hush);
    return status;
}

fattn_status fattn_fixture_close(fattn_fixture *f) {
    if (!f) return FATTN_OK;
    const fattni_hush hush = fattni_hush_begin();
    const fattn_status status = release(f, FATTN_OK);
    fattni_hush_end(hush);
    return status;
}

int fattn_fixture_count(const fattn_fixture *f) { return f ? f->count : 0; }

const char *fattn_fixture_case(const fattn_fixture *f, int i) {
    return f && i >= 0 && i < f->count ? f->names[i] : NULL;
}
