/* Attention cases (tests/support/attention.h) on a GPU. */
#ifndef TEST_CUDA_DEVICE_H
#define TEST_CUDA_DEVICE_H

#include "attention.h"

/* A context on device 0, or NULL when this machine has none. */
fattn_ctx *device_context(int arch_cap);

/* For attention.on_device: fields are carried to the context's device, guards and all; the pass is
   queried and run there with a guarded, poisoned workspace; everything is carried back. */
void device_use(fattn_ctx *ctx);
fattn_status device_run(attention *a, enum fattni_pass pass);

#endif
