/* Calls and contexts of the tests of the CUDA backend's host code, host_*.c: tensors with addresses but
   without memory, and contexts without a GPU. */
#ifndef TEST_CUDA_HOST_CALLS_H
#define TEST_CUDA_HOST_CALLS_H

#include "core/base/internal.h"
#include "core/cuda/kernel.h"

enum { ARCHITECTURES = 10 };
extern const fattn_dtype dtypes[4]; /* BF16, F16, F32, F64 */
extern const int architectures[ARCHITECTURES];

enum { Q, K, V, O, D_O, DQ, DK, DV, TENSORS };
typedef struct shapes {
    fattn_tensor t[TENSORS], lse;
    fattn_attention_params p;
    fattn_attention_io io; /* points to t and lse */
} shapes;

/* Addresses of tensor n, the workspace and saved, far from each other. */
void *place(int n);
/* One sequence of H heads, row-major. */
void describe(shapes *x, fattn_dtype dtype, int64_t H, int64_t Sq, int64_t Sk, int64_t D);

/* A context that plans for sm_`arch`, on any machine. */
fattn_ctx *planner(int arch);
/* Both fail the test if there is none. */
fattn_attention_plan plan_of(fattn_ctx *ctx, const shapes *x);
const fattni_cuda_kernel *kernel_called(const fattni_cuda_kernel *const *list, const char *name);

#endif
