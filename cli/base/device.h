/* The device that a command computes on: its context, and copies to and from it. */
#ifndef FATTNI_CLI_BASE_DEVICE_H
#define FATTNI_CLI_BASE_DEVICE_H

#include <fattn/graph.h>
#include <fattn/tape.h>

/* Value of an option "cpu|cuda". */
enum { ON_CPU, ON_CUDA };
enum { DEVICE_MESSAGE = 512 };

/* A context; on failure `why` has the error message. `why` must live as long as the context, whose log is
   written there; warnings go to standard error, unless the thread keeps its messages (cli_keep_messages). */
fattn_status device_create(int device, uint32_t flags, int64_t threads, char why[DEVICE_MESSAGE], fattn_ctx **out);
/* The same on GPU `number`; a CPU has no number. FATTN_E_UNSUPPORTED: there is none of this number. */
fattn_status device_create_at(int device, int number, uint32_t flags, int64_t threads, char why[DEVICE_MESSAGE],
                              fattn_ctx **out);
/* The same as device_create: CLI_OK, or CLI_FAILURE after an error message. */
int device_open(int device, uint32_t flags, int64_t threads, char why[DEVICE_MESSAGE], fattn_ctx **out);

/* Ends a recording whose calls have returned s. On failure *graph is NULL; of two failures the message is theirs. */
fattn_status device_end_recording(fattn_ctx *ctx, fattn_status s, fattn_graph **graph);

/* Copies a tensor to host memory as F32, row-major; synchronises. `to` has room for all elements. */
fattn_status device_read(fattn_ctx *ctx, const fattn_tensor *t, float *to);
fattn_status device_write(fattn_ctx *ctx, const fattn_tensor *t, const float *from);
/* Copies I32 from host memory to a tensor. */
fattn_status device_write_i32(fattn_ctx *ctx, const fattn_tensor *t, const int32_t *from);

#endif
