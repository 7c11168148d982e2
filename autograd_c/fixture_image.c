/* A fixture file's bytes. HDF5 only ever works on a file in memory. Reading: the file is loaded first,
   so that it cannot change underneath. Writing: the finished image goes out with one fwrite, whose
   failure is ours to report. HDF5 1.10 does not survive a write of its own that fails (it ends in its
   handler at exit, in a loop or a crash), so memory for what a call may add is there before HDF5 sees
   the call. Nor does it get past a damaged header without a leak: hence the seal, a text in HDF5's user
   block that has the length and the CRC of the file. A file without one, from another program, is left
   to HDF5's own checksums. */
#include "fixture_internal.h"

#include <stdlib.h>
#include <string.h>
#include <zlib.h>

enum { SEAL_BYTES = 512, GROW_BY = 1 << 20 };

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
    if (size > f->room) { /* the spare takes its place */
        if (size > f->spare_bytes) return NULL;
        if (p) memcpy(f->spare, p, f->image_bytes);
        free(p);
        p = f->spare;
        f->room = f->spare_bytes;
        f->spare = NULL;
        f->spare_bytes = 0;
    }
    f->image_bytes = size;
    return p;
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

/* The image can grow to so many bytes. Half as much again is taken, so that a file of many small pieces
   is copied seldom. */
static bool make_room(fattn_fixture *f, size_t bytes) {
    if (bytes <= f->room || bytes <= f->spare_bytes) return true;
    const size_t wanted[2] = {bytes + bytes / 2, bytes};
    void *p = NULL;
    for (int n = 0; n < 2 && !p; ++n)
        if ((p = malloc(wanted[n]))) f->spare_bytes = wanted[n];
    if (!p) return false;
    free(f->spare);
    f->spare = p;
    return true;
}

fattn_status fattni_fixture_image_reserve(fattn_fixture *f, const char *path, int64_t bytes) {
    enum { HEADERS = 1 << 16 }; /* groups on the way, the object's header, the index of its chunks */
    hsize_t now;
    if (H5Fget_filesize(f->file, &now) < 0) return fattni_fixture_break(f, path);
    /* Chunks at the edge are stored whole; HDF5 rounds up what it asks for. */
    const size_t most = (size_t)now + 2 * (size_t)bytes + HEADERS + 2 * GROW_BY;
    if (make_room(f, most)) return FATTN_OK;
    return fattn_ctx_fail(f->ctx, FATTN_E_NOMEM, "%s: %s: no memory for a file of %zu bytes",
                          f->path, path, most);
}

/* A file in memory; image NULL: an empty one, to be written. */
static fattn_status open_image(fattn_fixture *f, const fattn_tensor *image) {
    fattn_status status = FATTN_OK;
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
    } else if (!make_room(f, 2 * GROW_BY)) {
        status = fattn_ctx_fail(f->ctx, FATTN_E_NOMEM, "%s: no memory for a file", f->path);
    } else {
        H5FD_file_image_callbacks_t keep = {
            image_alloc, image_copy, image_realloc, image_free, same_user, leave_user, f};
        if (H5Pset_file_image_callbacks(access, &keep) >= 0)
            f->file = H5Fcreate(name, H5F_ACC_TRUNC, create, access);
    }
    if (f->file < 0 && status == FATTN_OK)
        status = fattni_fixture_fail(f, "/", "is not a sound HDF5 file");
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
        bool sound = f->bytes >= SEAL_BYTES + FATTNI_SUPERBLOCK;
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

fattn_status fattni_fixture_image_new(fattn_fixture *f) { return open_image(f, NULL); }

fattn_status fattni_fixture_image_load(fattn_fixture *f, const fattn_tensor *image) {
    const fattn_status status = check_seal(f, image->data);
    return status == FATTN_OK ? open_image(f, image) : status;
}

fattn_status fattni_fixture_image_write(fattn_fixture *f) {
    enum { END_OF_FILE = SEAL_BYTES + 28 }; /* of a superblock of version 2 or 3, little-endian */
    uint8_t *const file = f->image;
    uint64_t bytes = 0;
    for (int n = 7; f->image_bytes >= SEAL_BYTES + FATTNI_SUPERBLOCK && n >= 0; --n)
        bytes = bytes << 8 | file[END_OF_FILE + n];
    const bool sound = bytes > SEAL_BYTES && bytes <= f->image_bytes &&
                       bytes <= (uint64_t)FATTNI_FIXTURE_LIMIT;
    if (sound) write_seal(file, bytes, f->image);
    if (sound && fwrite(file, 1, bytes, f->sink) == bytes) return FATTN_OK;
    return fattn_ctx_fail(f->ctx, FATTN_E_IO, "%s: its %llu bytes, at most %lld, were not written",
                          f->path, (unsigned long long)bytes, (long long)FATTNI_FIXTURE_LIMIT);
}
