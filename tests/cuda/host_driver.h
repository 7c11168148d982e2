/* A driver without a GPU for the tests of host code: a stack of CUDA contexts, of one thread. */
#ifndef TEST_CUDA_HOST_DRIVER_H
#define TEST_CUDA_HOST_DRIVER_H

#include "core/base/internal.h"
#include "core/cuda/driver.h"

enum { DRIVER_DEPTH = 8 };
typedef struct driver_calls {
    CUcontext stack[DRIVER_DEPTH];
    int depth, looks, encoded, stray; /* contexts; times the current one was asked for; maps; memory calls in another */
} driver_calls;
extern driver_calls driver_state;
extern struct fattni_cuda_driver driver;

/* CUDA contexts by number; 0 is that of context_of. */
CUcontext other(int n);
CUcontext top(void); /* the current one, or NULL */
/* A GPU with Hopper's shared memory and 132 SMs. */
fattn_ctx context_of(int arch);

#endif
