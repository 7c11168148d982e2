/* Fixture files: open and close, the list of cases, paths.

   HDF5 only ever works on a file in memory. Reading: the file is loaded first, so that it cannot
   change underneath. Writing: the finished image goes out with one fwrite, whose failure is ours to
   report; HDF5 1.10 cannot be closed cleanly once its own writes fail. Nor does it get past a
   damaged header without a leak: hence the seal, a text in HDF5's user block that has the length
   and the CRC of the file. A file without one, from another program, is left to HDF5's own
   checksums. */
#include "fixture_internal.h"

#include <limits.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <zlib.h>

enum { CASE_LIMIT = 100000, SEAL_BYTES = 512, SUPERBLOCK_BYTES = 48 };

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

fattn_status fattni_fixture_make_parents(fattn_fixture *f, const char *path) {
    fattn_status status = check_path(f, path);
    if (status != FATTN_OK) return status;
    if (!f->sink)
        return fattn_ctx_fail(f->ctx, FATTN_E_STATE, "%s: %s: the file is open for reading",
                              f->path, path);
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

/* A created file's memory, as HDF5 grows it; we keep it when HDF5 closes the file. (While the file
   is open, its image is marked as being written.) */
static void *image_alloc(size_t size, H5FD_file_image_op_t op, void *user) {
    (void)op, (void)user;
    return malloc(size);
}
static void *image_copy(void *to, const void *from, size_t size, H5FD_file_image_op_t op,
                        void *user) {
    (void)op, (void)user;
    return memcpy(to, from, size);
}
static void *image_realloc(void *p, size_t size, H5FD_file_image_op_t op, void *user) {
    fattn_fixture *const f = user;
    (void)op;
    void *const image = realloc(p, size);
    if (image) f->image_bytes = size;
    return image;
}
static herr_t image_free(void *p, H5FD_file_image_op_t op, void *user) {
    fattn_fixture *const f = user;
    if (op == H5FD_FILE_IMAGE_OP_FILE_CLOSE)
        f->image = p;
    else
        free(p);
    return 0;
}
static void *same_user(void *user) { return user; }
static herr_t leave_user(void *user) { return (void)user, 0; }

/* A file in memory; image NULL: an empty one, to be written. */
static fattn_status open_image(fattn_fixture *f, const fattn_tensor *image) {
    enum { GROW_BY = 1 << 20 };
    char name[48]; /* HDF5 takes files of one name for the same file */
    snprintf(name, sizeof name, "fattn fixture %p", (void *)f);
    const hid_t access = H5Pcreate(H5P_FILE_ACCESS), create = H5Pcreate(H5P_FILE_CREATE);
    H5Pset_fapl_core(access, GROW_BY, false);
    H5Pset_fclose_degree(access, H5F_CLOSE_STRONG);
    H5Pset_libver_bounds(access, H5F_LIBVER_V110, H5F_LIBVER_V110); /* checksums everywhere */
    H5Pset_obj_track_times(create, false);
    H5Pset_attr_phase_change(create, 64, 48);
    H5Pset_userblock(create, SEAL_BYTES);
    if (image) {
        if (H5Pset_file_image(access, image->data, (size_t)image->shape[0]) >= 0)
            f->file = H5Fopen(name, H5F_ACC_RDONLY, access);
    } else {
        H5FD_file_image_callbacks_t keep = {
            image_alloc, image_copy, image_realloc, image_free, same_user, leave_user, f};
        if (H5Pset_file_image_callbacks(access, &keep) >= 0)
            f->file = H5Fcreate(name, H5F_ACC_TRUNC, create, access);
    }
    const fattn_status status =
        f->file < 0 ? fattni_fixture_fail(f, "/", "is not a sound HDF5 file") : FATTN_OK;
    H5Pclose(create);
    H5Pclose(access);
    return status;
}

static const char seal_title[] = "fattn fixture\n";

/* What the first SEAL_BYTES of a sealed file of so many bytes are. */
static void write_seal(const uint8_t *file, size_t bytes, char seal[SEAL_BYTES]) {
    const uLong crc = crc32_z(0, file + SEAL_BYTES, bytes - SEAL_BYTES);
    memset(seal, 0, SEAL_BYTES);
    snprintf(seal, SEAL_BYTES,
             "%sbytes %zu\ncrc32 of bytes %d and up %08lx\nHDF5 begins at byte %d.\n", seal_title,
             bytes, SEAL_BYTES, crc, SEAL_BYTES);
}

/* Before HDF5 sees anything: is the file as it was written, and in a format with checksums? */
static fattn_status check_seal(fattn_fixture *f, const uint8_t *file) {
    static const uint8_t signature[8] = {0x89, 'H', 'D', 'F', '\r', '\n', 0x1a, '\n'};
    char seal[SEAL_BYTES];
    const bool sealed = memcmp(file, seal_title, sizeof seal_title - 1) == 0;
    if (sealed) {
        bool sound = f->bytes >= SEAL_BYTES + SUPERBLOCK_BYTES;
        if (sound) write_seal(file, (size_t)f->bytes, seal);
        sound = sound && memcmp(seal, file, SEAL_BYTES) == 0;
        if (!sound)
            return fattn_ctx_fail(f->ctx, FATTN_E_IO,
                                  "%s: damaged: its length or CRC is not what it says", f->path);
    }
    const uint8_t *const start = file + (sealed ? SEAL_BYTES : 0);
    if (memcmp(start, signature, sizeof signature) != 0)
        return fattn_ctx_fail(f->ctx, FATTN_E_IO, "%s: is neither a fixture nor an HDF5 file",
                              f->path);
    if (start[8] != 2 && start[8] != 3)
        return fattn_ctx_fail(f->ctx, FATTN_E_IO,
                              "%s: superblock version %d, not 2 or 3: a format without checksums "
                              "cannot be told from a damaged one",
                              f->path, start[8]);
    return FATTN_OK;
}

static fattn_status load(fattn_fixture *f, FILE *source, fattn_tensor *image) {
    if (fread(image->data, 1, (size_t)f->bytes, source) != (size_t)f->bytes)
        return fattn_ctx_fail(f->ctx, FATTN_E_IO, "%s: could not be read to its end", f->path);
    const fattn_status status = check_seal(f, image->data);
    return status == FATTN_OK ? open_image(f, image) : status;
}

static fattn_status open_for_reading(fattn_fixture *f) {
    struct stat info;
    if (stat(f->path, &info) != 0 || !S_ISREG(info.st_mode))
        return fattn_ctx_fail(f->ctx, FATTN_E_IO, "%s: there is no such file", f->path);
    f->bytes = (int64_t)info.st_size;
    if (f->bytes < SUPERBLOCK_BYTES || f->bytes > FATTNI_FIXTURE_LIMIT)
        return fattn_ctx_fail(f->ctx, FATTN_E_IO, "%s: %lld bytes, not in %d..%lld", f->path,
                              (long long)f->bytes, SUPERBLOCK_BYTES,
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
    fattn_status status = open_image(f, NULL);
    if (status == FATTN_OK) status = fattni_fixture_at(f, "/", &root);
    if (status != FATTN_OK) return status;
    status = fattni_fixture_write_attribute(f, root, "/", "schema", H5T_STD_I32LE, H5T_NATIVE_INT32,
                                            &schema);
    H5Oclose(root);
    return status;
}

/* The finished file, sealed, as one piece, to its place: as far as the superblock says it goes. */
static fattn_status write_image(fattn_fixture *f) {
    enum { END_OF_FILE = SEAL_BYTES + 28 }; /* of a superblock of version 2 or 3, little-endian */
    uint8_t *const file = f->image;
    uint64_t bytes = 0;
    for (int n = 7; f->image_bytes >= SEAL_BYTES + SUPERBLOCK_BYTES && n >= 0; --n)
        bytes = bytes << 8 | file[END_OF_FILE + n];
    const bool sound = bytes > SEAL_BYTES && bytes <= f->image_bytes &&
                       bytes <= (uint64_t)FATTNI_FIXTURE_LIMIT;
    if (sound) write_seal(file, bytes, f->image);
    if (sound && fwrite(file, 1, bytes, f->sink) == bytes) return FATTN_OK;
    return fattn_ctx_fail(f->ctx, FATTN_E_IO, "%s: its %llu bytes, at most %lld, were not written",
                          f->path, (unsigned long long)bytes, (long long)FATTNI_FIXTURE_LIMIT);
}

/* Closes and frees everything; a sound created file is written on the way. */
static fattn_status release(fattn_fixture *f, fattn_status status) {
    if (f->file >= 0 && H5Fclose(f->file) < 0) f->broken = true;
    if (f->broken && status == FATTN_OK)
        status = fattn_ctx_fail(f->ctx, FATTN_E_IO, "%s: left empty: a write has failed", f->path);
    if (f->sink && status == FATTN_OK) status = write_image(f);
    if (f->sink && fclose(f->sink) != 0 && status == FATTN_OK)
        status = fattn_ctx_fail(f->ctx, FATTN_E_IO, "%s: could not be closed", f->path);
    for (int i = 0; i < f->count; ++i)
        free(f->names[i]);
    free(f->names);
    free(f->image);
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
