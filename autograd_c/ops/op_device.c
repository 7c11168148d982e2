/* Which loops run an op where: one line per op. */
#include "autograd_c/ops/op_device.h"

#include "autograd_c/ops/sequence/op_embedding.h"
#include "autograd_c/ops/loss/op_loss.h"
#include "autograd_c/ops/norm/op_norm.h"
#include "autograd_c/ops/sequence/op_rope.h"
#ifdef FATTNI_HAVE_CUDA
#include "core/cuda/launch.h"
#define ROW(op) {&fattni_##op##_cpu, &fattni_##op##_cuda}
#else
#define ROW(op) {&fattni_##op##_cpu, NULL}
#endif

#include <string.h>

static const struct { const fattni_code *cpu, *cuda; } table[] = {
    [FATTNI_NORM] = ROW(norm),
    [FATTNI_ROPE] = ROW(rope),
    [FATTNI_EMBEDDING] = ROW(embedding),
    [FATTNI_CROSS_ENTROPY] = ROW(cross_entropy),
    [FATTNI_LINEAR_CROSS_ENTROPY] = ROW(linear_cross_entropy),
};

const fattni_code *fattni_code_of(const fattn_op_call *c, enum fattni_coded op) {
    return c->ctx->device == FATTN_CPU ? table[op].cpu : table[op].cuda;
}

fattn_status fattni_zero(fattn_ctx *ctx, void *p, size_t pitch, size_t width, int64_t rows) {
#ifdef FATTNI_HAVE_CUDA
    if (ctx->device == FATTN_CUDA) return fattni_cuda_zero_rows(ctx, p, pitch, width, rows);
#endif
    (void)ctx;
    for (int64_t row = 0; row < rows && width > 0; ++row)
        memset((char *)p + (size_t)row * pitch, 0, width);
    return FATTN_OK;
}
