/* Attention cases (tests/support/attention.h) on a GPU. */
#ifndef TEST_CUDA_DEVICE_H
#define TEST_CUDA_DEVICE_H

#include "attention.h"

/* A context on device 0, or NULL when this machine has none. */
fattn_ctx *device_context(int arch_cap);

/* For attention.on_device: copies the fields with their guards to the context's device, queries and runs the
   pass there with a guarded workspace full of NaN, and copies everything back. */
void device_use(fattn_ctx *ctx);
fattn_status device_run(attention *a, enum fattni_pass pass);
/* Of the last pass. */
const fattn_attention_plan *device_plan(void);
/* From now on each pass is captured into a CUDA graph, which is then launched. */
void device_capture(bool on);
/* From now on forward reads 8-bit copies that fattn_fp8_quantize has made before it, between guards. */
void device_copies(bool on);

/* Memory on the device between guards, filled with NaN of every float type; freed by the check of the guards. `name`
   is the case's, `what` the memory's. */
unsigned char *device_memory(size_t bytes);
void device_memory_check(const char *name, unsigned char *d, size_t bytes, const char *what);

/* The tensors of a call on the device, to which io points. */
typedef struct device_tensors {
    unsigned char *fields[T_COUNT]; /* copies, guards included */
    fattn_tensor t[T_COUNT];
    fattn_attention_io io;
} device_tensors;
void device_upload(const attention *a, device_tensors *x);
void device_download(attention *a, device_tensors *x); /* everything back, and frees the copies */

/* The case on that device against the fp64 reference on the same rounded inputs: F64 to 1e-12, F32 within its
   roundings, 16 bits within three times the error of the unfused computation. */
void device_check(fattn_ctx *cpu, const attention_case *c);

#endif
