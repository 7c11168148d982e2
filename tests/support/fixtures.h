/* Shared by the tests of fixture files. */
#ifndef TEST_FIXTURES_H
#define TEST_FIXTURES_H

#include <fattn/fixture.h>

#include "core/attention/problem.h"

/* The references in single precision (ref_single.c). */
fattn_status fwd_ref_single(fattn_ctx *ctx, const fattni_problem *p);
fattn_status bwd_ref_single(fattn_ctx *ctx, const fattni_problem *p);

/* A new, empty file in the folder for temporary files; path has room for it. */
enum { FIXTURE_PATH = 64 };
void fixture_temporary(char path[FIXTURE_PATH]);

/* Reads everything in a file of attention cases. FATTN_OK, or the first failure; in both cases everything
   is closed and freed. The digest covers every value that was read. FATTN_E_STATE: a failed open has set
   *out. */
fattn_status fixture_read_all(fattn_ctx *ctx, const char *path, uint64_t *digest);

/* Reads a whole file, to be freed; writes one. */
unsigned char *fixture_bytes(const char *path, size_t *size);
void fixture_write_bytes(const char *path, const void *bytes, size_t size);

/* Recomputes the seal, the first FIXTURE_SEAL bytes, for the rest of the file. */
enum { FIXTURE_SEAL = 512 };
void fixture_reseal(unsigned char *bytes, size_t size);

/* Writes a small file of one attention case, "a", with every dataset and attribute. */
fattn_status fixture_write_sample(fattn_ctx *ctx, const char *path);

#endif
