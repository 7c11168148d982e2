/* Which code runs ops where: one row per device, one line per primitive and op. */
#include "autograd_c/ops/ops.h"

#include "autograd_c/ops/dropout/op_dropout.h"
#include "autograd_c/ops/loss/op_loss.h"
#include "autograd_c/ops/norm/op_norm.h"
#include "autograd_c/ops/norm/op_softmax.h"
#include "autograd_c/ops/sequence/op_embedding.h"
#include "autograd_c/ops/sequence/op_rope.h"
#include "core/base/with_cuda.h"

extern const fattni_element_code fattni_elements_cpu, fattni_elements_cuda;
extern const fattni_product_code fattni_products_cpu, fattni_products_cuda;

#define CODE(on)                                                                                                       \
    {                                                                                                                  \
        .elements = &fattni_elements_##on, .products = &fattni_products_##on,                                          \
        .code = {                                                                                                      \
            [FATTNI_DROPOUT] = &fattni_dropout_##on,                                                                   \
            [FATTNI_SOFTMAX] = &fattni_softmax_##on,                                                                   \
            [FATTNI_NORM] = &fattni_norm_##on,                                                                         \
            [FATTNI_ROPE] = &fattni_rope_##on,                                                                         \
            [FATTNI_EMBEDDING] = &fattni_embedding_##on,                                                               \
            [FATTNI_CROSS_ENTROPY] = &fattni_cross_entropy_##on,                                                       \
            [FATTNI_LINEAR_CROSS_ENTROPY] = &fattni_linear_cross_entropy_##on,                                         \
        },                                                                                                             \
    }

static const fattni_op_device devices[] = {[FATTN_CPU] = CODE(cpu), FATTNI_WITH_CUDA([FATTN_CUDA] = CODE(cuda))};

const fattni_op_device *fattni_op_device_of(const fattn_ctx *ctx) { return &devices[ctx->device]; }

fattn_status fattni_fill(fattn_ctx *ctx, const fattn_tensor *d, double value, bool fresh) {
    return fattni_op_device_of(ctx)->elements->fill(ctx, d, value, fresh);
}

fattn_status fattni_accumulate(fattn_ctx *ctx, const fattn_tensor *d, const fattn_tensor *x, bool fresh) {
    return fattni_op_device_of(ctx)->elements->accumulate(ctx, d, x, fresh);
}

fattn_status fattni_each_element(fattn_ctx *ctx, const fattni_elements *f, const fattn_tensor *const *t, int n,
                                 bool fresh) {
    return fattni_op_device_of(ctx)->elements->each(ctx, f, t, n, fresh);
}

size_t fattni_reduce_workspace(const fattn_ctx *ctx, const fattn_tensor *d, const fattn_tensor *x) {
    return fattni_op_device_of(ctx)->elements->reduce_workspace(d, x);
}

fattn_status fattni_reduce(fattn_ctx *ctx, const fattn_tensor *d, bool fresh, const fattn_tensor *x,
                           const fattn_tensor *y, void *workspace) {
    return fattni_op_device_of(ctx)->elements->reduce(ctx, d, fresh, x, y, 1, workspace);
}

fattn_status fattni_reduce_divided(fattn_ctx *ctx, const fattn_tensor *d, const fattn_tensor *x, double divisor,
                                   void *workspace) {
    return fattni_op_device_of(ctx)->elements->reduce(ctx, d, true, x, NULL, divisor, workspace);
}
