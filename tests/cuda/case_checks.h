/* How test_cuda_attention.c and test_cuda_few_rows.c check an attention case on the device: against the fp64
   reference on the same rounded inputs. In 16 bits the bound is twice (backward three times) the error of the
   unfused computation in the same dtype. TF32 has F16's significand, and so its bound. F32 and F64 have the bounds of
   the CPU tiles. */
#ifndef TEST_CUDA_CASE_CHECKS_H
#define TEST_CUDA_CASE_CHECKS_H

#include "attention.h"

/* Head dims that a kernel must round up, vectorise or not. */
enum { DIMS = 10 };
extern const int64_t dims[DIMS];

/* The context of the device to which cases are copied; without a device the test is skipped. */
fattn_ctx *device_or_skip(void);
/* PART=k/n in the environment: every n-th case from number k - 1 on. */
bool mine(int n);
/* The device's 16-bit types in turn: BF16 if it has that and is asked for. */
fattn_dtype half_type(bool bf16);
/* Whether none of the kernels is STANDARD's. */
bool is_fused(fattn_ctx *ctx, const attention_case *c);

void check(fattn_ctx *cpu, const attention_case *c, fattn_dtype dtype); /* 16 bits */
void check_tf32(fattn_ctx *cpu, const attention_case *c);
void check_real(const attention_case *c, fattn_dtype dtype); /* F32, F64 */

#endif
