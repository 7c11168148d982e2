/* HDF5 files for fuzz targets: damaged, or valid with unexpected contents. */
#ifndef FUZZ_HDF5_H
#define FUZZ_HDF5_H

#include "fuzz.h"

#include <hdf5.h>

/* A temporary folder with one file in it, both removed at exit. */
#define FUZZ_FILE "file.h5"
const char *fuzz_folder(void);
const char *fuzz_file(void);
void fuzz_file_write(const unsigned char *bytes, size_t size);
/* With room for `surplus` bytes more; to be freed. */
unsigned char *fuzz_file_read(size_t surplus, size_t *size);

/* Changes some bytes, at least one; or also drops the end. Returns the size. */
size_t fuzz_damage(fuzz_input *in, unsigned char *bytes, size_t size);

/* Replaces one of the objects, or one of the attributes of one, by any other: type, shape, storage,
   filters, raw chunks, links, groups, or nothing. NULL ends the lists. */
void fuzz_hdf5_replace(fuzz_input *in, hid_t file, const char *const *objects, const char *const *attributes);

#endif
