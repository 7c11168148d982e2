/* Datasets: tensors in and out. */
#include "fixture_internal.h"

#include <string.h>

enum {
    COMPACT_BYTES = 1024,  /* up to this, data lies in the object header, under its checksum */
    CHUNK_BYTES = 1 << 20, /* above, in chunks of at most this, each with a checksum of its own */
    DEFLATE_LEVEL = 9
};

typedef struct element {
    fattn_dtype dtype;
    hid_t file, native;
} element;

static element element_of(fattn_dtype dtype) {
    switch (dtype) {
    case FATTN_F64: return (element){dtype, H5T_IEEE_F64LE, H5T_NATIVE_DOUBLE};
    case FATTN_F32: return (element){dtype, H5T_IEEE_F32LE, H5T_NATIVE_FLOAT};
    case FATTN_I32: return (element){dtype, H5T_STD_I32LE, H5T_NATIVE_INT32};
    case FATTN_U8: return (element){dtype, H5T_STD_U8LE, H5T_NATIVE_UINT8};
    default: return (element){dtype, H5I_INVALID_HID, H5I_INVALID_HID};
    }
}

/* What a dataset says about itself, checked. */
typedef struct description {
    fattn_dtype dtype;
    int rank;
    int64_t shape[FATTN_MAX_DIMS];
    int64_t bytes;
} description;

static fattn_status describe(fattn_fixture *f, const char *path, hid_t dataset, description *out) {
    static const fattn_dtype known[] = {FATTN_F64, FATTN_F32, FATTN_I32, FATTN_U8};
    description d = {0};
    const hid_t type = H5Dget_type(dataset), space = H5Dget_space(dataset);
    for (int n = 0; type >= 0 && n < 4; ++n)
        if (H5Tequal(type, element_of(known[n]).file) > 0) d.dtype = known[n];
    const H5S_class_t class = space >= 0 ? H5Sget_simple_extent_type(space) : H5S_NO_CLASS;
    const bool array = class == H5S_SCALAR || class == H5S_SIMPLE;
    hsize_t dims[H5S_MAX_RANK] = {0};
    d.rank = array ? H5Sget_simple_extent_dims(space, dims, NULL) : -1;
    if (type >= 0) H5Tclose(type);
    if (space >= 0) H5Sclose(space);
    if (!d.dtype)
        return fattni_fixture_fail(f, path, "is not of little-endian f64, f32, i32 or u8");
    if (d.rank < 0 || d.rank > FATTN_MAX_DIMS)
        return fattni_fixture_fail(f, path, "does not have 0 to 5 dimensions");

    d.bytes = (int64_t)fattn_dtype_size(d.dtype);
    bool fits = true, empty = false;
    for (int n = 0; n < d.rank; ++n) {
        d.shape[n] = dims[n] <= INT64_MAX ? (int64_t)dims[n] : INT64_MAX;
        empty = empty || dims[n] == 0;
        fits = fits && !__builtin_mul_overflow(d.bytes, d.shape[n], &d.bytes) &&
               d.shape[n] < INT64_MAX;
    }
    if (empty && fits) d.bytes = 0;
    const int64_t possible = f->sink ? FATTNI_FIXTURE_LIMIT : f->bytes * FATTNI_DEFLATE_RATIO;
    if (!fits || d.bytes > FATTNI_FIXTURE_LIMIT || d.bytes > possible)
        return fattni_fixture_fail(f, path, "claims to be larger than this file can hold");
    *out = d;
    return FATTN_OK;
}

/* Contents, row-major in the type of the file. Virtual layouts and external files, which would read
   from elsewhere, are refused. */
static fattn_status read(fattn_fixture *f, const char *path, hid_t dataset, const description *d,
                         void *data) {
    if (d->bytes == 0) return FATTN_OK;
    const hid_t list = H5Dget_create_plist(dataset);
    if (list < 0) return fattni_fixture_fail(f, path, "damaged");
    const H5D_layout_t layout = H5Pget_layout(list);
    const hid_t native = element_of(d->dtype).native;
    fattn_status status = FATTN_OK;
    if (layout == H5D_CHUNKED) {
        fattni_chunked c = {dataset, list, d->rank, {0}, fattn_dtype_size(d->dtype)};
        memcpy(c.shape, d->shape, sizeof c.shape);
        status = fattni_fixture_read_chunks(f, path, &c, data);
    } else if ((layout != H5D_COMPACT && layout != H5D_CONTIGUOUS) ||
               H5Pget_external_count(list) != 0) {
        status = fattni_fixture_fail(f, path, "is stored outside of this file");
    } else if (H5Dget_storage_size(dataset) != (hsize_t)d->bytes ||
               H5Dread(dataset, native, H5S_ALL, H5S_ALL, H5P_DEFAULT, data) < 0) {
        status = fattni_fixture_fail(f, path, "is not all there");
    }
    H5Pclose(list);
    return status;
}

static fattn_status get(fattn_fixture *f, const char *path, hid_t dataset, fattn_dtype as,
                        fattn_tensor *out) {
    if (H5Iget_type(dataset) != H5I_DATASET)
        return fattni_fixture_fail(f, path, "is not a dataset");
    description d;
    fattn_status status = describe(f, path, dataset, &d);
    if (status != FATTN_OK) return status;
    fattn_tensor stored = {0}, wanted = {0};
    status = fattn_tensor_alloc(f->ctx, d.dtype, d.rank, d.shape, &stored);
    if (status != FATTN_OK) return status;
    status = read(f, path, dataset, &d, stored.data);
    if (status == FATTN_OK && as != d.dtype) {
        status = fattn_tensor_alloc(f->ctx, as, d.rank, d.shape, &wanted);
        if (status == FATTN_OK) status = fattn_tensor_copy(f->ctx, &wanted, &stored);
        if (status == FATTN_OK) {
            const fattn_tensor t = stored;
            stored = wanted;
            wanted = t;
        }
        fattn_tensor_free(f->ctx, &wanted);
    }
    if (status == FATTN_OK)
        *out = stored;
    else
        fattn_tensor_free(f->ctx, &stored);
    return status;
}

fattn_status fattn_fixture_get(fattn_fixture *f, const char *path, fattn_dtype as,
                               fattn_tensor *out) {
    if (!f) return FATTN_E_ARG;
    if (!out) return fattn_ctx_fail(f->ctx, FATTN_E_ARG, "fixture_get: out is NULL");
    if (!fattn_dtype_size(as))
        return fattn_ctx_fail(f->ctx, FATTN_E_DTYPE, "fixture_get: unknown dtype %d", (int)as);
    const fattni_hush hush = fattni_hush_begin();
    hid_t object;
    fattn_status status = fattni_fixture_at(f, path, &object);
    if (status == FATTN_OK) {
        status = get(f, path, object, as, out);
        H5Oclose(object);
    }
    fattni_hush_end(hush);
    return status;
}

int fattn_fixture_has(fattn_fixture *f, const char *path) {
    if (!f) return 0;
    const fattni_hush hush = fattni_hush_begin();
    hid_t object;
    const fattn_status status = fattni_fixture_find(f, path, &object);
    const bool dataset = object >= 0 && H5Iget_type(object) == H5I_DATASET;
    if (object >= 0) H5Oclose(object);
    fattni_hush_end(hush);
    return status == FATTN_E_IO ? -1 : dataset;
}

/* Compact, or chunks halved along the largest dimension until they are small enough. Bytes depend
   on nothing but the contents: no times, no unwritten gaps. */
static hid_t creation_list(const fattn_tensor *t, int64_t bytes) {
    const hid_t list = H5Pcreate(H5P_DATASET_CREATE);
    H5Pset_obj_track_times(list, false);
    H5Pset_attr_phase_change(list, 64, 48);
    if (bytes <= COMPACT_BYTES) {
        H5Pset_layout(list, H5D_COMPACT);
        return list;
    }
    hsize_t chunk[FATTN_MAX_DIMS];
    for (int d = 0; d < t->ndim; ++d)
        chunk[d] = (hsize_t)t->shape[d];
    while (bytes > CHUNK_BYTES) {
        int largest = 0;
        for (int d = 1; d < t->ndim; ++d)
            if (chunk[d] > chunk[largest]) largest = d;
        chunk[largest] = (chunk[largest] + 1) / 2;
        bytes = (int64_t)fattn_dtype_size((fattn_dtype)t->dtype);
        for (int d = 0; d < t->ndim; ++d)
            bytes *= (int64_t)chunk[d];
    }
    H5Pset_chunk(list, t->ndim, chunk);
    H5Pset_shuffle(list);
    H5Pset_deflate(list, DEFLATE_LEVEL);
    H5Pset_fletcher32(list);
    return list;
}

static fattn_status put(fattn_fixture *f, const char *path, const fattn_tensor *t, int64_t bytes) {
    const element e = element_of((fattn_dtype)t->dtype);
    hid_t object;
    fattn_status status = fattni_fixture_make_parents(f, path, bytes);
    if (status == FATTN_OK) status = fattni_fixture_find(f, path, &object);
    if (status != FATTN_OK) return status;
    if (object >= 0) {
        H5Oclose(object);
        return fattn_ctx_fail(f->ctx, FATTN_E_ARG, "%s: %s is already there", f->path, path);
    }
    hsize_t dims[FATTN_MAX_DIMS] = {0};
    for (int d = 0; d < t->ndim; ++d)
        dims[d] = (hsize_t)t->shape[d];
    const hid_t space = t->ndim ? H5Screate_simple(t->ndim, dims, NULL) : H5Screate(H5S_SCALAR);
    const hid_t list = creation_list(t, bytes);
    const hid_t dataset = H5Dcreate2(f->file, path, e.file, space, H5P_DEFAULT, list, H5P_DEFAULT);
    const bool done = dataset >= 0 && (bytes == 0 || H5Dwrite(dataset, e.native, H5S_ALL, H5S_ALL,
                                                              H5P_DEFAULT, t->data) >= 0);
    if (!done) status = fattni_fixture_break(f, path);
    if (dataset >= 0) H5Dclose(dataset);
    H5Pclose(list);
    if (space >= 0) H5Sclose(space);
    return status;
}

fattn_status fattn_fixture_put(fattn_fixture *f, const char *path, const fattn_tensor *t) {
    if (!f) return FATTN_E_ARG;
    if (!t) return fattn_ctx_fail(f->ctx, FATTN_E_ARG, "fixture_put: the tensor is NULL");
    if (element_of((fattn_dtype)t->dtype).file < 0)
        return fattn_ctx_fail(f->ctx, FATTN_E_DTYPE,
                              "fixture_put: %s is %s, not f64, f32, i32 or u8",
                              path ? path : "NULL", fattn_dtype_name((fattn_dtype)t->dtype));
    if (t->ndim < 0 || t->ndim > FATTN_MAX_DIMS)
        return fattn_ctx_fail(f->ctx, FATTN_E_SHAPE, "fixture_put: ndim %d is not in 0..%d",
                              t->ndim, FATTN_MAX_DIMS);
    /* The copy checks the tensor and straightens its strides. */
    fattn_tensor plain = {0};
    fattn_status status =
        fattn_tensor_alloc(f->ctx, (fattn_dtype)t->dtype, t->ndim, t->shape, &plain);
    if (status != FATTN_OK) return status;
    status = fattn_tensor_copy(f->ctx, &plain, t);
    const int64_t bytes = fattn_tensor_numel(t) * (int64_t)fattn_dtype_size((fattn_dtype)t->dtype);
    const fattni_hush hush = fattni_hush_begin();
    if (status == FATTN_OK && bytes > FATTNI_FIXTURE_LIMIT)
        status =
            fattn_ctx_fail(f->ctx, FATTN_E_ARG, "fixture_put: %s has %lld bytes, at most %lld",
                           path ? path : "NULL", (long long)bytes, (long long)FATTNI_FIXTURE_LIMIT);
    if (status == FATTN_OK) status = put(f, path, &plain, bytes);
    fattni_hush_end(hush);
    fattn_tensor_free(f->ctx, &plain);
    return status;
}
