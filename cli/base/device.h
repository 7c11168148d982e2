/* The device that a command computes on: its context, and numbers on their way there and back. */
#ifndef FATTNI_CLI_BASE_DEVICE_H
#define FATTNI_CLI_BASE_DEVICE_H

#include <fattn/tape.h>

/* Value of an option "cpu|cuda". */
enum { ON_CPU, ON_CUDA };
enum { DEVICE_SENTENCE = 512 };

/* A context; when there is none, `why` says why. `why` must live as long as the context, whose log
   goes there; warnings go to standard error. */
fattn_status device_create(int device, uint32_t flags, int64_t threads, char why[DEVICE_SENTENCE],
                           fattn_ctx **out);
/* The same: CLI_OK, or CLI_FAILURE after a sentence. */
int device_open(int device, uint32_t flags, int64_t threads, char why[DEVICE_SENTENCE],
                fattn_ctx **out);

/* Numbers of a tensor as F32 in the host's memory, row-major; waits. `to` has room for all. */
fattn_status device_read(fattn_ctx *ctx, const fattn_tensor *t, float *to);
fattn_status device_write(fattn_ctx *ctx, const fattn_tensor *t, const float *from);
/* The same for a tensor of I32. */
fattn_status device_write_i32(fattn_ctx *ctx, const fattn_tensor *t, const int32_t *from);

#endif
