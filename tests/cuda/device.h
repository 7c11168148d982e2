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
/* From now on each pass is captured into a CUDA graph, which is then launched. */
void device_capture(bool on);

/* The case on that device against the fp64 reference on the same rounded inputs: F64 to 1e-12, F32 within its
   roundings, 16 bits within three times the error of the unfused computation. */
void device_check(fattn_ctx *cpu, const attention_case *c);

#endif
