/* The tensor functions of fattni_device_ops (core/base/device.h) for host memory, with a context of any device:
   the tensors are checked and in host memory. Always FATTN_OK. */
#ifndef FATTNI_CORE_TENSOR_HOST_H
#define FATTNI_CORE_TENSOR_HOST_H

#include "core/base/internal.h"

fattn_status fattni_host_copy(fattn_ctx *ctx, const fattn_tensor *dst, const fattn_tensor *src);
fattn_status fattni_host_add(fattn_ctx *ctx, const fattn_tensor *dst, const fattn_tensor *src);
fattn_status fattni_host_normal(fattn_ctx *ctx, const fattn_tensor *dst, double mean, double std, fattn_rng rng);
fattn_status fattni_host_zero_rows(fattn_ctx *ctx, void *p, size_t pitch, size_t width, int64_t rows);

#endif
