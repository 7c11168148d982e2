/* The same work on the device and on the CPU, with Criterion. */
#ifndef TEST_CUDA_PAIR_H
#define TEST_CUDA_PAIR_H

#include <criterion/criterion.h>
#include <fattn/fattn.h>

typedef struct pair {
    fattn_ctx *gpu, *cpu;
} pair;

/* flags: FATTN_CTX_... of the context on the device. Skips the test without one. */
pair pair_or_skip(uint32_t flags);
void pair_free(pair *p); /* nothing may be allocated on the device */

/* A tensor on either device as F64 on the host. */
fattn_tensor to_host(const pair *p, const fattn_tensor *t);

#define MUST(ctx, call) cr_assert_eq(call, FATTN_OK, "%s", fattn_ctx_error(ctx))

#endif
