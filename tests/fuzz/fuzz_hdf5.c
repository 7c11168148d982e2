#include "fuzz_hdf5.h"

#include <fcntl.h>
#include <stdbool.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum { MOST_BYTES = 1 << 20 };

/* HDF5 leaks on damaged headers, in files without a seal. The targets count its objects. */
__attribute__((visibility("default"))) const char *__lsan_default_suppressions(void);
const char *__lsan_default_suppressions(void) { return "leak:libhdf5"; }

/* --- the file --------------------------------------------------------------------------------- */

static char folder[48], temporary[64];

static void remove_all(void) {
    unlink(temporary);
    rmdir(folder);
}

const char *fuzz_folder(void) {
    if (folder[0]) return folder;
    strcpy(folder, access("/dev/shm", W_OK) == 0 ? "/dev/shm/fattn_fuzz_XXXXXX" : "/tmp/fattn_fuzz_XXXXXX");
    FUZZ_CHECK(mkdtemp(folder), "no temporary folder");
    snprintf(temporary, sizeof temporary, "%s/%s", folder, FUZZ_FILE);
    atexit(remove_all);
    return folder;
}

const char *fuzz_file(void) {
    fuzz_folder();
    return temporary;
}

void fuzz_file_write(const unsigned char *bytes, size_t size) {
    const int file = open(fuzz_file(), O_WRONLY | O_CREAT | O_TRUNC, 0600);
    FUZZ_CHECK(file >= 0 && write(file, bytes, size) == (ssize_t)size, "cannot write");
    close(file);
}

unsigned char *fuzz_file_read(size_t surplus, size_t *size) {
    struct stat info;
    const int file = open(fuzz_file(), O_RDONLY);
    FUZZ_CHECK(file >= 0 && fstat(file, &info) == 0, "cannot open");
    unsigned char *const bytes = malloc((size_t)info.st_size + surplus);
    *size = (size_t)info.st_size;
    FUZZ_CHECK(bytes && read(file, bytes, *size) == (ssize_t)*size, "cannot read");
    close(file);
    return bytes;
}

size_t fuzz_damage(fuzz_input *in, unsigned char *bytes, size_t size) {
    if (fuzz_below(in, 8) == 7) size -= fuzz_word(in, 3) % size;
    for (unsigned n = 1 + fuzz_below(in, 4); n > 0 && size > 0; --n) {
        const uint64_t at = fuzz_word(in, 3) % size;
        bytes[at] ^= (unsigned char)(1 + fuzz_below(in, 255));
    }
    return size;
}

/* --- contents --------------------------------------------------------------------------------- */

#define CHOOSE(in, list) (list)[fuzz_below(in, sizeof(list) / sizeof *(list))]

/* To be closed. */
static hid_t a_type(fuzz_input *in) {
    const hid_t plain[] = {H5T_IEEE_F64LE, H5T_IEEE_F32LE, H5T_STD_I32LE, H5T_STD_U8LE,    H5T_STD_I64LE,
                           H5T_STD_U64LE,  H5T_IEEE_F64BE, H5T_STD_B8LE,  H5T_STD_REF_OBJ, H5T_C_S1};
    const hid_t type = H5Tcopy(CHOOSE(in, plain));
    switch (fuzz_below(in, 8)) {
    case 5: H5Tset_size(type, 1 + fuzz_word(in, 2)); break;
    case 6: H5Tset_precision(type, 1 + fuzz_below(in, 64)); break;
    case 7: {
        const hid_t text = H5Tcopy(H5T_C_S1);
        H5Tset_size(text, H5T_VARIABLE);
        H5Tclose(type);
        return text;
    }
    }
    return type;
}

/* HDF5 1.10 crashes when it writes an attribute that is too large for the memory. */
static hid_t a_space(fuzz_input *in, bool huge, int *rank, hsize_t dims[H5S_MAX_RANK]) {
    static const uint8_t likely[] = {2, 1, 17, 8, 5, 3, 0, 4}; /* the sample's, and their neighbours */
    static const uint8_t ranks[] = {4, 0, 1, 3, 2, 5, 6, 32};
    *rank = CHOOSE(in, ranks);
    if (!huge && *rank > 2) *rank = 2;
    for (int d = 0; d < *rank; ++d) {
        const unsigned size = fuzz_byte(in);
        dims[d] = size < 240 || !huge ? likely[size % 8] : (hsize_t)fuzz_hostile(in);
    }
    if (*rank == 0) return H5Screate(fuzz_below(in, 8) == 7 ? H5S_NULL : H5S_SCALAR);
    return H5Screate_simple(*rank, dims, NULL);
}

/* Zeros for all elements, to be freed; NULL when they are many, or pointers. */
static unsigned char *values_of(hid_t type, int rank, const hsize_t *dims) {
    double bytes = (double)H5Tget_size(type);
    for (int d = 0; d < rank; ++d) bytes *= (double)dims[d];
    if (bytes > MOST_BYTES || H5Tis_variable_str(type) > 0) return NULL;
    unsigned char *const values = calloc(1, (size_t)bytes + sizeof(double));
    FUZZ_CHECK(values, "no memory");
    return values;
}

static void fill(fuzz_input *in, unsigned char *values, size_t size) {
    const unsigned seed = fuzz_byte(in);
    for (size_t n = 0; n < size; ++n) values[n] = (unsigned char)(seed < 128 ? 0 : (n * seed) >> (n % 8));
}

static void put_attribute(fuzz_input *in, hid_t object, const char *name) {
    int rank = 0;
    hsize_t dims[H5S_MAX_RANK] = {0};
    const hid_t type = a_type(in);
    const hid_t space = fuzz_below(in, 4) == 3 ? a_space(in, false, &rank, dims) : H5Screate(H5S_SCALAR);
    H5Adelete(object, name);
    const hid_t a = H5Acreate2(object, name, type, space, H5P_DEFAULT, H5P_DEFAULT);
    unsigned char *const values = a >= 0 ? values_of(type, rank, dims) : NULL;
    if (values) {
        const double real = (double)(int8_t)fuzz_byte(in) / 4;
        const float narrow = (float)real;
        const int64_t integer = fuzz_hostile(in);
        if (H5Tget_class(type) != H5T_FLOAT)
            memcpy(values, &integer, sizeof integer);
        else if (H5Tget_size(type) == sizeof real)
            memcpy(values, &real, sizeof real);
        else
            memcpy(values, &narrow, sizeof narrow);
        H5Awrite(a, type, values);
    }
    free(values);
    if (a >= 0) H5Aclose(a);
    if (space >= 0) H5Sclose(space);
    H5Tclose(type);
}

static hid_t a_storage(fuzz_input *in, int rank, const hsize_t *dims) {
    const hid_t list = H5Pcreate(H5P_DATASET_CREATE);
    const unsigned storage = fuzz_below(in, 4);
    if (storage == 1) H5Pset_layout(list, H5D_COMPACT);
    if (storage < 2 || rank == 0) return list;
    hsize_t chunk[H5S_MAX_RANK];
    for (int d = 0; d < rank; ++d) {
        const unsigned size = fuzz_byte(in);
        chunk[d] = size < 128 ? dims[d] : size - 127;
        if (chunk[d] < 1 || chunk[d] > 1 << 16) chunk[d] = 1;
    }
    H5Pset_chunk(list, rank, chunk);
    const unsigned filters = fuzz_byte(in);
    if (filters & 1) H5Pset_shuffle(list);
    if (filters & 2) H5Pset_deflate(list, 1);
    if (filters & 4) H5Pset_fletcher32(list);
    if (filters & 8) H5Pset_filter(list, 32015, H5Z_FLAG_OPTIONAL, 0, NULL); /* of a plug-in */
    if (filters & 16) H5Pset_shuffle(list);
    return list;
}

/* Writes bytes to one chunk that its filters have not produced. */
static void put_raw_chunk(fuzz_input *in, hid_t set) {
    unsigned char bytes[256];
    const hsize_t at[H5S_MAX_RANK] = {0};
    const size_t size = fuzz_byte(in);
    const uint32_t skipped = fuzz_byte(in) & 7;
    fill(in, bytes, sizeof bytes);
    H5Dwrite_chunk(set, H5P_DEFAULT, skipped, at, size, bytes);
}

static void put_dataset(fuzz_input *in, hid_t file, const char *path) {
    int rank;
    hsize_t dims[H5S_MAX_RANK];
    const hid_t type = a_type(in), space = a_space(in, true, &rank, dims);
    const hid_t list = a_storage(in, rank, dims);
    const hid_t set = space >= 0 ? H5Dcreate2(file, path, type, space, H5P_DEFAULT, list, H5P_DEFAULT) : -1;
    const unsigned content = fuzz_below(in, 5);
    unsigned char *const values = set >= 0 ? values_of(type, rank, dims) : NULL;
    if (values && content < 3) {
        fill(in, values, sizeof(double)); /* the first elements */
        H5Dwrite(set, type, H5S_ALL, H5S_ALL, H5P_DEFAULT, values);
    }
    if (values && content == 3 && H5Sget_simple_extent_npoints(space) > 0) put_raw_chunk(in, set);
    free(values);
    if (set >= 0) H5Dclose(set);
    H5Pclose(list);
    if (space >= 0) H5Sclose(space);
    H5Tclose(type);
}

static const char *one_of(fuzz_input *in, const char *const *names) {
    unsigned count = 0;
    while (names[count]) ++count;
    return names[fuzz_below(in, count)];
}

void fuzz_hdf5_replace(fuzz_input *in, hid_t file, const char *const *objects, const char *const *attributes) {
    const char *const path = one_of(in, objects);
    const unsigned what = fuzz_below(in, 10);
    if (what < 3) { /* an attribute of it */
        const hid_t object = H5Oopen(file, path, H5P_DEFAULT);
        if (object >= 0) put_attribute(in, object, one_of(in, attributes));
        if (object >= 0) H5Oclose(object);
        return;
    }
    if (strcmp(path, "/") == 0) return;
    H5Ldelete(file, path, H5P_DEFAULT);
    switch (what) {
    case 3: break; /* absent */
    case 4: H5Lcreate_soft(one_of(in, objects), file, path, H5P_DEFAULT, H5P_DEFAULT); break;
    case 5: H5Lcreate_external("/etc/hosts", "/x", file, path, H5P_DEFAULT, H5P_DEFAULT); break;
    case 6: H5Lcreate_hard(file, one_of(in, objects), file, path, H5P_DEFAULT, H5P_DEFAULT); break;
    case 7: {
        const hid_t group = H5Gcreate2(file, path, H5P_DEFAULT, H5P_DEFAULT, H5P_DEFAULT);
        if (group >= 0) H5Gclose(group);
        break;
    }
    default: put_dataset(in, file, path);
    }
}
