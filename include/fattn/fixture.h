/* fattn/fixture.h - HDF5 files of cases. In libfattn_fixture, so that libfattn needs no HDF5.

   /cases/<name> is a group: its datasets are tensors, its attributes parameters; data/README.md
   has the schema. A path begins with "/"; each name in it has 1 to 63 characters out of A-Z a-z
   0-9 _ - . and does not begin with a dot. A file is read into memory when it is opened. It is written
   as a whole when it is closed, with its length and CRC in a header (its seal), so that damage is
   found before HDF5 parses it. Files of other programs have no seal; they are read if their format
   has checksums (HDF5 1.8 and later; h5py: libver="latest"). Only hard links are followed, no filter
   plug-in is loaded, and every size in a file is checked.

   HDF5's default build is not thread-safe, even for different files: serialise all these calls. */
#ifndef FATTN_FIXTURE_H
#define FATTN_FIXTURE_H

#include <fattn/attention.h>

typedef struct fattn_fixture fattn_fixture;
enum { FATTN_FIXTURE_SCHEMA = 1 }; /* attribute "schema" on "/"; other values are rejected */

/* create 0: read only; 1: a new file, replacing an old one. The context, on the CPU, allocates memory
   and receives error messages; it must outlive the fixture. On failure *out is NULL. A file that
   is missing, damaged, of another schema or larger than 1 GiB is FATTN_E_IO. */
FATTN_API FATTN_CHECKED fattn_status fattn_fixture_open(fattn_ctx *ctx, const char *path, int create,
                                                        fattn_fixture **out);
/* Writes a created file. IO when it could not be completed; f is freed in any case. NULL is allowed. */
FATTN_API FATTN_CHECKED fattn_status fattn_fixture_close(fattn_fixture *f);
FATTN_API int fattn_fixture_count(const fattn_fixture *f);               /* groups in /cases */
FATTN_API const char *fattn_fixture_case(const fattn_fixture *f, int i); /* sorted by name; NULL if out of range */
/* 1: there is a dataset; 0: there is none; -1: damaged, get has the error message. */
FATTN_API int fattn_fixture_has(fattn_fixture *f, const char *path);

/* The dataset at path ("/cases/causal/q"), converted to `as`, row-major, from the context's memory:
   free with fattn_tensor_free. IO: absent, damaged, more than 5 dimensions, not F64, F32, I32 or
   U8. */
FATTN_API FATTN_CHECKED fattn_status fattn_fixture_get(fattn_fixture *f, const char *path, fattn_dtype as,
                                                       fattn_tensor *out);
/* F64, F32, I32 and U8 (DTYPE otherwise), any strides. Creates the groups above it; an existing object
   is not replaced (ARG). This and the other puts: NOMEM when there is no memory for the larger file;
   what was put before is kept. */
FATTN_API FATTN_CHECKED fattn_status fattn_fixture_put(fattn_fixture *f, const char *path, const fattn_tensor *t);
/* Attribute attr of the object at path; "/" is the file. Any number is returned as double.
   put creates the group if there is nothing at path. Text: at most 4095 bytes. */
FATTN_API FATTN_CHECKED fattn_status fattn_fixture_get_f64(fattn_fixture *f, const char *path, const char *attr,
                                                           double *out);
FATTN_API FATTN_CHECKED fattn_status fattn_fixture_put_f64(fattn_fixture *f, const char *path, const char *attr,
                                                           double value);
FATTN_API FATTN_CHECKED fattn_status fattn_fixture_get_text(fattn_fixture *f, const char *path, const char *attr,
                                                            char *out, size_t size);
FATTN_API FATTN_CHECKED fattn_status fattn_fixture_put_text(fattn_fixture *f, const char *path, const char *attr,
                                                            const char *text);
/* Reads and writes the attributes of /cases/<name> as params: one attribute per field, the seed as a
   64-bit integer; unified_max only if it is not 0. Set out->struct_size. IO when another one is absent or one does not
   fit its field. */
FATTN_API FATTN_CHECKED fattn_status fattn_fixture_params(fattn_fixture *f, const char *name,
                                                          fattn_attention_params *out);
FATTN_API FATTN_CHECKED fattn_status fattn_fixture_put_params(fattn_fixture *f, const char *name,
                                                              const fattn_attention_params *p);

/* The expected values of one gradient. got NULL: the case has no such input. */
typedef struct fattn_fixture_gradient {
    const char *name;        /* "dq" "dk" "dv" "d_bias" "d_sink" */
    const fattn_tensor *got; /* where backward writes it: the tensor in io */
    fattn_tensor want;       /* F64, row-major, of the fp64 reference; NaN = must not be written */
    fattn_tensor fd_index;   /* I32 [n]: row-major positions of a sample, n may be 0 */
    fattn_tensor fd_value;   /* F64 [n]: central differences of sum dO*O + sum dL*L there */
    double fd_step;          /* h = fd_step*max(1,|x|), fd_step if the case has a dataset "unit" (see
                                data/README.md); 0 when n is 0 */
} fattn_fixture_gradient;
enum { FATTN_FIXTURE_GRADIENTS = 5 };

/* One attention case, ready to run. io points into this struct: do not copy or move it. */
typedef struct fattn_fixture_attention {
    uint32_t struct_size, reserved; /* sizeof(fattn_fixture_attention), set by the caller; 0 */
    fattn_attention_params params;
    fattn_attention_io io; /* complete except for saved and workspace; absent tensors are NULL */
    fattn_fixture_gradient gradient[FATTN_FIXTURE_GRADIENTS];
    fattn_tensor want_o, want_lse; /* F64, row-major; NaN = must not be written */
    fattn_tensor tensor[21];       /* what io points at */
    fattn_tensor memory[21];       /* private: the memory of these tensors */
} fattn_fixture_attention;

/* Inputs in dtype, statistics in F32 (F64), with the strides that the case specifies. Outputs are
   filled with NaN, or with the values that MERGE and ACC_* add to. DTYPE when a value of the case is not
   exact in dtype: the expected results would not apply. Free each case that was loaded, and no other. */
FATTN_API FATTN_CHECKED fattn_status fattn_fixture_attention_load(fattn_fixture *f, const char *name, fattn_dtype dtype,
                                                                  fattn_fixture_attention *out);
/* Query, then forward and backward, in memory from the context. Once after each load. */
FATTN_API FATTN_CHECKED fattn_status fattn_fixture_attention_run(fattn_ctx *ctx, fattn_fixture_attention *c);
FATTN_API void fattn_fixture_attention_free(fattn_ctx *ctx, fattn_fixture_attention *c);

#endif
