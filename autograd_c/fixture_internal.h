/* What the files of libfattn_fixture share. They use libfattn's public functions only. */
#ifndef FATTNI_FIXTURE_INTERNAL_H
#define FATTNI_FIXTURE_INTERNAL_H

#include <fattn/fixture.h>

#include <hdf5.h>
#include <stdbool.h>
#include <stdio.h>

struct fattn_fixture {
    fattn_ctx *ctx;
    hid_t file;  /* in memory: HDF5 never touches the file system */
    FILE *sink;  /* a created file's destination; NULL: read only */
    bool broken; /* a put has failed half-way: close must not write */
    void *image; /* of a created file, once HDF5 has closed it */
    size_t image_bytes, room; /* what HDF5 has of it, and what there is */
    void *spare;              /* a larger piece, for when the image has to grow into it */
    size_t spare_bytes;
    int64_t bytes; /* of the file that was read */
    char *path;
    char **names; /* of the cases, sorted */
    int count, capacity;
};

enum { FATTNI_FIXTURE_NAME = 64, FATTNI_FIXTURE_PATH = 256 }; /* bytes, the final 0 included */

/* Nothing that a file claims to hold may be larger than this, or than deflate can expand it to. */
#define FATTNI_FIXTURE_LIMIT ((int64_t)1 << 30)
enum { FATTNI_DEFLATE_RATIO = 1032 };

/* HDF5 prints its error stack by default; silent between these two. */
typedef struct fattni_hush {
    H5E_auto2_t print;
    void *data;
} fattni_hush;
fattni_hush fattni_hush_begin(void);
void fattni_hush_end(fattni_hush h);

/* FATTN_E_IO: "<file>: <path>: <what>", and HDF5's innermost reason if it has one. */
fattn_status fattni_fixture_fail(fattn_fixture *f, const char *path, const char *what);
/* The same for a write that HDF5 could not do: what was written before is not kept, either. */
fattn_status fattni_fixture_break(fattn_fixture *f, const char *path);

/* 1..63 plain characters, no dot in front. */
bool fattni_fixture_sound_name(const char *s);
/* "/cases/<name>" in a buffer of FATTNI_FIXTURE_PATH bytes. */
fattn_status fattni_fixture_case_path(fattn_fixture *f, const char *name, char *path);
/* Opens the group or dataset at path. *out is negative, and the status FATTN_OK, when there is
   nothing; a link that is not hard is FATTN_E_IO. */
fattn_status fattni_fixture_find(fattn_fixture *f, const char *path, hid_t *out);
/* The same, but nothing there is FATTN_E_IO. */
fattn_status fattni_fixture_at(fattn_fixture *f, const char *path, hid_t *out);
/* Before creating an object with so many bytes of data: f can be written, there is memory for it, the
   groups above path are there. */
fattn_status fattni_fixture_make_parents(fattn_fixture *f, const char *path, int64_t bytes);
fattn_status fattni_fixture_make_group(fattn_fixture *f, const char *path);

/* The file's bytes (fixture_image.c): an empty image to be written, or one that was loaded; memory for
   bytes more before HDF5 writes any of them, else FATTN_E_NOMEM and the file is as it was; the finished
   file, sealed, as one piece, to its place, as far as the superblock says it goes. */
enum { FATTNI_SUPERBLOCK = 48 }; /* its bytes, and the least a file has */
fattn_status fattni_fixture_image_new(fattn_fixture *f);
fattn_status fattni_fixture_image_load(fattn_fixture *f, const fattn_tensor *image);
fattn_status fattni_fixture_image_reserve(fattn_fixture *f, const char *path, int64_t bytes);
fattn_status fattni_fixture_image_write(fattn_fixture *f);

/* Writes a scalar attribute of an open object; path is for sentences. type: in the file, native: of
 *value. */
fattn_status fattni_fixture_write_attribute(fattn_fixture *f, hid_t object, const char *path,
                                            const char *attr, hid_t type, hid_t native,
                                            const void *value);

/* Fills data, row-major in the type of the file, from the chunks of an open dataset. */
typedef struct fattni_chunked {
    hid_t dataset, create_list;
    int rank;
    int64_t shape[FATTN_MAX_DIMS];
    size_t element; /* bytes */
} fattni_chunked;
fattn_status fattni_fixture_read_chunks(fattn_fixture *f, const char *path, const fattni_chunked *c,
                                        void *data);

#endif
