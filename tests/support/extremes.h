/* Ops of the tape on numbers near the limits of their type, against their definition in long double. */
#ifndef FATTN_TEST_EXTREMES_H
#define FATTN_TEST_EXTREMES_H

#include <fattn/fattn.h>

/* Values and gradients on the context's device; each asserts. */
void extremes_unary(fattn_ctx *ctx, fattn_dtype dtype);         /* gelu, silu, relu, tanh, scale */
void extremes_norm(fattn_ctx *ctx, fattn_dtype dtype);          /* layernorm, rmsnorm */
void extremes_cross_entropy(fattn_ctx *ctx, fattn_dtype dtype); /* and masked classes */
void extremes_rope(fattn_ctx *ctx, fattn_dtype dtype);

#endif
