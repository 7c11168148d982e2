/* Contexts and calls of the tests of contracts, with Criterion. */
#ifndef TEST_CUDA_CONTEXTS_H
#define TEST_CUDA_CONTEXTS_H

#include "call.h"

#include <criterion/criterion.h>
#include <cuda_runtime_api.h>
#include <stdbool.h>

void must(cudaError_t e, const char *what);

/* On device 0; NULL without one. call_arch() and `arch_cap` cap it. */
fattn_ctx *context_of(fattn_stream stream, int sm_limit, int arch_cap);
fattn_ctx *context(fattn_stream stream, int sm_limit);
fattn_ctx *context_or_skip(void);
/* The same; skips unless it is sm_90, and not capped. Calls of attention_* run on it (device_use). */
fattn_ctx *hopper_or_skip(void);

/* Number n % 4 of BF16, where the device has it, F32, F64 and F16. */
fattn_dtype dtype_of(int n);

/* Many key blocks for few rows each, several waves of them; each kind in every dtype, dtype_of(n). */
enum { WIDE_CASES = 24 };
attention_case wide_case(int n);

#endif
