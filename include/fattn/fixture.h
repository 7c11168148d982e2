/* fattn/fixture.h - HDF5 files of cases. In libfattn_fixture, so that libfattn needs no HDF5.

   HDF5's default build is not thread-safe, even for different files: serialise all these calls. */
#ifndef FATTN_FIXTURE_H
#define FATTN_FIXTURE_H

#include <fattn/attention.h>

typedef struct fattn_fixture fattn_fixture;
enum { FATTN_FIXTURE_SCHEMA = 1 }; /* attribute "schema" on "/"; other values are refused */

/* create 0: read only; 1: a new file, replacing an old one. The context gives memory and takes the
   error sentence; it must outlive the fixture. A file that is missing, damaged or of another schema
   is FATTN_E_IO. */
FATTN_API FATTN_CHECKED fattn_status fattn_fixture_open(fattn_ctx *ctx, const char *path, int create,
                                                        fattn_fixture **out);
/* Flushes and closes; NULL is fine. IO when the file could not be completed. */
FATTN_API FATTN_CHECKED fattn_status fattn_fixture_close(fattn_fixture *f);
FATTN_API int fattn_fixture_count(const fattn_fixture *f); /* groups in /cases */
FATTN_API const char *fattn_fixture_case(const fattn_fixture *f, int i); /* sorted by name */
FATTN_API int fattn_fixture_has(fattn_fixture *f, const char *path);     /* 1: there is a dataset */
/* path as "/cases/causal/q". get allocates from the context; free with fattn_tensor_free. */
FATTN_API FATTN_CHECKED fattn_status fattn_fixture_get(fattn_fixture *f, const char *path,
                                                       fattn_dtype as, fattn_tensor *out);
/* F64, F32, I32 and U8, CPU, any strides. Creates the groups above it. */
FATTN_API FATTN_CHECKED fattn_status fattn_fixture_put(fattn_fixture *f, const char *path,
                                                       const fattn_tensor *t);
/* Scalar attribute attr of the object at path. */
FATTN_API FATTN_CHECKED fattn_status fattn_fixture_get_f64(fattn_fixture *f, const char *path,
                                                           const char *attr, double *out);
FATTN_API FATTN_CHECKED fattn_status fattn_fixture_put_f64(fattn_fixture *f, const char *path,
                                                           const char *attr, double value);
/* The attributes of /cases/<name> as params, and back. */
FATTN_API FATTN_CHECKED fattn_status fattn_fixture_params(fattn_fixture *f, const char *name,
                                                          fattn_attention_params *out);
FATTN_API FATTN_CHECKED fattn_status fattn_fixture_put_params(fattn_fixture *f, const char *name,
                                                              const fattn_attention_params *p);

#endif
