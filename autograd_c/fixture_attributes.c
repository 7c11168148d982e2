/* Attributes: numbers, texts, and attention parameters field by field. */
#include "fixture_internal.h"

#include <math.h>
#include <stddef.h>
#include <string.h>

enum { TEXT_LIMIT = 4095 + 2 }; /* a text, its final 0 in the file, and one more for reading */

static fattn_status fail(fattn_fixture *f, const char *path, const char *attr, const char *what) {
    char text[FATTNI_FIXTURE_NAME + 64];
    snprintf(text, sizeof text, "attribute %s %s", attr, what);
    return fattni_fixture_fail(f, path, text);
}

static fattn_status check_name(fattn_fixture *f, const char *path, const char *attr) {
    if (fattni_fixture_sound_name(attr)) return FATTN_OK;
    return fattn_ctx_fail(f->ctx, FATTN_E_ARG, "%s: %s: '%.80s' is not an attribute name", f->path,
                          path, attr ? attr : "NULL");
}

/* Opens attribute attr of an open object if it holds one value. */
static fattn_status open_attribute(fattn_fixture *f, hid_t object, const char *path,
                                   const char *attr, hid_t *out) {
    fattn_status status = check_name(f, path, attr);
    if (status != FATTN_OK) return status;
    const htri_t exists = H5Aexists(object, attr);
    if (exists <= 0) return fail(f, path, attr, exists < 0 ? "is damaged" : "is absent");
    const hid_t attribute = H5Aopen(object, attr, H5P_DEFAULT);
    if (attribute < 0) return fail(f, path, attr, "is damaged");
    const hid_t space = H5Aget_space(attribute);
    if (H5Sget_simple_extent_npoints(space) == 1)
        *out = attribute;
    else
        status = fail(f, path, attr, "is not a single value");
    if (space >= 0) H5Sclose(space);
    if (status != FATTN_OK) H5Aclose(attribute);
    return status;
}

/* A number with the kind that the file gives it, so that 64-bit integers stay exact. */
typedef struct number {
    enum { SIGNED, UNSIGNED, REAL } kind;
    int64_t i;
    uint64_t u;
    double d; /* set for every kind */
} number;

static herr_t read_typed(hid_t attribute, hid_t type, number *n) {
    const size_t size = H5Tget_size(type);
    if (H5Tequal(type, H5T_IEEE_F64LE) > 0 || H5Tequal(type, H5T_IEEE_F32LE) > 0) {
        n->kind = REAL;
        return H5Aread(attribute, H5T_NATIVE_DOUBLE, &n->d);
    }
    if (H5Tget_class(type) != H5T_INTEGER || size > 8 || H5Tget_precision(type) != 8 * size)
        return -1;
    herr_t done;
    if (H5Tget_sign(type) == H5T_SGN_NONE) {
        n->kind = UNSIGNED;
        done = H5Aread(attribute, H5T_NATIVE_UINT64, &n->u);
        n->d = (double)n->u;
    } else {
        n->kind = SIGNED;
        done = H5Aread(attribute, H5T_NATIVE_INT64, &n->i);
        n->d = (double)n->i;
    }
    return done;
}

static fattn_status read_number(fattn_fixture *f, hid_t object, const char *path, const char *attr,
                                number *out) {
    hid_t attribute;
    fattn_status status = open_attribute(f, object, path, attr, &attribute);
    if (status != FATTN_OK) return status;
    const hid_t type = H5Aget_type(attribute);
    if (type < 0 || read_typed(attribute, type, out) < 0)
        status = fail(f, path, attr, "is not a number");
    if (type >= 0) H5Tclose(type);
    H5Aclose(attribute);
    return status;
}

static fattn_status read_text(fattn_fixture *f, hid_t object, const char *path, const char *attr,
                              char *out, size_t size) {
    hid_t attribute;
    fattn_status status = open_attribute(f, object, path, attr, &attribute);
    if (status != FATTN_OK) return status;
    const hid_t type = H5Aget_type(attribute), native = H5Tcopy(H5T_C_S1);
    char text[TEXT_LIMIT];
    const bool plain = H5Tget_class(type) == H5T_STRING && H5Tis_variable_str(type) == 0;
    const size_t bytes = plain ? H5Tget_size(type) : 0;
    if (bytes < 1 || bytes >= sizeof text || H5Tset_size(native, bytes + 1) < 0 ||
        H5Tset_cset(native, H5Tget_cset(type)) < 0 || H5Aread(attribute, native, text) < 0)
        status = fail(f, path, attr, "is not a text of fixed length");
    else if (strlen(text) >= size)
        status = fattn_ctx_fail(f->ctx, FATTN_E_ARG, "%s: %s: attribute %s has %zu bytes, out %zu",
                                f->path, path, attr, strlen(text) + 1, size);
    else
        strcpy(out, text);
    if (type >= 0) H5Tclose(type);
    H5Tclose(native);
    H5Aclose(attribute);
    return status;
}

fattn_status fattni_fixture_write_attribute(fattn_fixture *f, hid_t object, const char *path,
                                            const char *attr, hid_t type, hid_t native,
                                            const void *value) {
    const fattn_status status = check_name(f, path, attr);
    if (status != FATTN_OK) return status;
    if (H5Aexists(object, attr) > 0)
        return fattn_ctx_fail(f->ctx, FATTN_E_ARG, "%s: %s: attribute %s is already there", f->path,
                              path, attr);
    const hid_t space = H5Screate(H5S_SCALAR);
    const hid_t attribute = H5Acreate2(object, attr, type, space, H5P_DEFAULT, H5P_DEFAULT);
    const bool done = attribute >= 0 && H5Awrite(attribute, native, value) >= 0;
    if (attribute >= 0) H5Aclose(attribute);
    H5Sclose(space);
    if (done) return FATTN_OK;
    return fattni_fixture_break(f, path);
}

/* The object at path, a new group if there is nothing. */
static fattn_status open_for_attributes(fattn_fixture *f, const char *path, hid_t *out) {
    fattn_status status = fattni_fixture_make_parents(f, path, 0);
    if (status == FATTN_OK) status = fattni_fixture_find(f, path, out);
    if (status != FATTN_OK || *out >= 0) return status;
    status = fattni_fixture_make_group(f, path);
    return status == FATTN_OK ? fattni_fixture_at(f, path, out) : status;
}

static fattn_status put(fattn_fixture *f, const char *path, const char *attr, hid_t type,
                        hid_t native, const void *value) {
    hid_t object;
    fattn_status status = open_for_attributes(f, path, &object);
    if (status != FATTN_OK) return status;
    status = fattni_fixture_write_attribute(f, object, path, attr, type, native, value);
    H5Oclose(object);
    return status;
}

fattn_status fattn_fixture_get_f64(fattn_fixture *f, const char *path, const char *attr,
                                   double *out) {
    if (!f) return FATTN_E_ARG;
    if (!out) return fattn_ctx_fail(f->ctx, FATTN_E_ARG, "fixture_get_f64: out is NULL");
    const fattni_hush hush = fattni_hush_begin();
    hid_t object;
    number n;
    fattn_status status = fattni_fixture_at(f, path, &object);
    if (status == FATTN_OK) {
        status = read_number(f, object, path, attr, &n);
        H5Oclose(object);
    }
    if (status == FATTN_OK) *out = n.d;
    fattni_hush_end(hush);
    return status;
}

fattn_status fattn_fixture_put_f64(fattn_fixture *f, const char *path, const char *attr,
                                   double value) {
    if (!f) return FATTN_E_ARG;
    const fattni_hush hush = fattni_hush_begin();
    const fattn_status status = put(f, path, attr, H5T_IEEE_F64LE, H5T_NATIVE_DOUBLE, &value);
    fattni_hush_end(hush);
    return status;
}

fattn_status fattn_fixture_get_text(fattn_fixture *f, const char *path, const char *attr, char *out,
                                    size_t size) {
    if (!f) return FATTN_E_ARG;
    if (!out || !size) return fattn_ctx_fail(f->ctx, FATTN_E_ARG, "fixture_get_text: out is NULL");
    const fattni_hush hush = fattni_hush_begin();
    hid_t object;
    fattn_status status = fattni_fixture_at(f, path, &object);
    if (status == FATTN_OK) {
        status = read_text(f, object, path, attr, out, size);
        H5Oclose(object);
    }
    fattni_hush_end(hush);
    return status;
}

fattn_status fattn_fixture_put_text(fattn_fixture *f, const char *path, const char *attr,
                                    const char *text) {
    if (!f) return FATTN_E_ARG;
    if (!text || strnlen(text, TEXT_LIMIT) > TEXT_LIMIT - 2)
        return fattn_ctx_fail(f->ctx, FATTN_E_ARG, "fixture_put_text: NULL, or more than %d bytes",
                              TEXT_LIMIT - 2);
    const fattni_hush hush = fattni_hush_begin();
    const hid_t type = H5Tcopy(H5T_C_S1);
    H5Tset_size(type, strlen(text) + 1);
    H5Tset_cset(type, H5T_CSET_UTF8);
    const fattn_status status = put(f, path, attr, type, type, text);
    H5Tclose(type);
    fattni_hush_end(hush);
    return status;
}

/* The fields of fattn_attention_params that a file holds, each under its name. */
typedef enum field_type { U32, I32, I64, U64, F32 } field_type;
typedef struct field {
    const char *name;
    size_t offset;
    field_type type;
} field;
#define FIELD(member, type)                                                                        \
    { #member, offsetof(fattn_attention_params, member), type }
static const field fields[] = {
    FIELD(flags, U32),
    FIELD(algorithm, I32),
    FIELD(scale, F32),
    FIELD(softcap, F32),
    FIELD(dropout_p, F32),
    FIELD(window_left, I32),
    FIELD(window_right, I32),
    FIELD(max_seqlen_q, I64),
    FIELD(max_seqlen_k, I64),
    FIELD(q_pos0, I64),
    FIELD(k_pos0, I64),
    {"rng_seed", offsetof(fattn_attention_params, rng.seed), U64},
    {"rng_stream", offsetof(fattn_attention_params, rng.stream), U32},
    FIELD(rng_batch0, I32),
    FIELD(rng_head0, I32),
    FIELD(rng_heads, I32),
};
enum { FIELD_COUNT = sizeof fields / sizeof *fields };

/* Stores n if the field can hold it. A float field takes any real: 0.1 from Python is a double. */
static bool store(const number *n, field_type type, void *at) {
    const bool negative = n->kind == SIGNED && n->i < 0;
    const uint64_t u = n->kind == SIGNED ? (uint64_t)n->i : n->u;
    switch (type) {
    case F32: return *(float *)at = (float)n->d, true;
    case U64: return *(uint64_t *)at = u, n->kind != REAL && !negative;
    case U32: return *(uint32_t *)at = (uint32_t)u, n->kind != REAL && !negative && u <= UINT32_MAX;
    case I64: return *(int64_t *)at = (int64_t)u, n->kind != REAL && (negative || u <= INT64_MAX);
    case I32:
        return *(int32_t *)at = (int32_t)(int64_t)u,
                         n->kind != REAL && (negative ? n->i >= INT32_MIN : u <= INT32_MAX);
    }
    return false;
}

static hid_t file_type(field_type type) {
    switch (type) {
    case U32: return H5T_STD_U32LE;
    case I32: return H5T_STD_I32LE;
    case I64: return H5T_STD_I64LE;
    case U64: return H5T_STD_U64LE;
    case F32: return H5T_IEEE_F32LE;
    }
    return H5I_INVALID_HID;
}

static hid_t native_type(field_type type) {
    switch (type) {
    case U32: return H5T_NATIVE_UINT32;
    case I32: return H5T_NATIVE_INT32;
    case I64: return H5T_NATIVE_INT64;
    case U64: return H5T_NATIVE_UINT64;
    case F32: return H5T_NATIVE_FLOAT;
    }
    return H5I_INVALID_HID;
}

fattn_status fattn_fixture_params(fattn_fixture *f, const char *name, fattn_attention_params *out) {
    if (!f) return FATTN_E_ARG;
    if (!out) return fattn_ctx_fail(f->ctx, FATTN_E_ARG, "fixture_params: out is NULL");
    if (out->struct_size != sizeof *out)
        return fattn_ctx_fail(f->ctx, FATTN_E_ABI, "fixture_params: struct_size is %u, not %zu",
                              out->struct_size, sizeof *out);
    char path[FATTNI_FIXTURE_PATH];
    fattn_status status = fattni_fixture_case_path(f, name, path);
    if (status != FATTN_OK) return status;
    const fattni_hush hush = fattni_hush_begin();
    fattn_attention_params p = {.struct_size = sizeof p};
    hid_t object = H5I_INVALID_HID;
    status = fattni_fixture_at(f, path, &object);
    for (int n = 0; status == FATTN_OK && n < FIELD_COUNT; ++n) {
        number value = {0};
        status = read_number(f, object, path, fields[n].name, &value);
        if (status == FATTN_OK && !store(&value, fields[n].type, (char *)&p + fields[n].offset))
            status = fail(f, path, fields[n].name, "does not fit its field");
    }
    if (object >= 0) H5Oclose(object);
    fattni_hush_end(hush);
    if (status == FATTN_OK) *out = p;
    return status;
}

fattn_status fattn_fixture_put_params(fattn_fixture *f, const char *name,
                                      const fattn_attention_params *p) {
    if (!f) return FATTN_E_ARG;
    if (!p) return fattn_ctx_fail(f->ctx, FATTN_E_ARG, "fixture_put_params: p is NULL");
    if (p->struct_size != sizeof *p)
        return fattn_ctx_fail(f->ctx, FATTN_E_ABI, "fixture_put_params: struct_size is %u, not %zu",
                              p->struct_size, sizeof *p);
    char path[FATTNI_FIXTURE_PATH];
    fattn_status status = fattni_fixture_case_path(f, name, path);
    if (status != FATTN_OK) return status;
    const fattni_hush hush = fattni_hush_begin();
    hid_t object = H5I_INVALID_HID;
    status = open_for_attributes(f, path, &object);
    for (int n = 0; status == FATTN_OK && n < FIELD_COUNT; ++n)
        status = fattni_fixture_write_attribute(
            f, object, path, fields[n].name, file_type(fields[n].type), native_type(fields[n].type),
            (const char *)p + fields[n].offset);
    if (object >= 0) H5Oclose(object);
    fattni_hush_end(hush);
    return status;
}
