/* Products with one row on the device: which they are, and their launch. */
#include "autograd_c/ops/matrix/row_product.h"

#include "autograd_c/ops/op_cuda.h"

extern void fattn_row_product_f32(fattni_row_product_args), fattn_row_product_norm_f32(fattni_row_product_args);
extern void fattn_row_product_f16(fattni_row_product_args), fattn_row_product_norm_f16(fattni_row_product_args);
extern void fattn_row_product_bf16(fattni_row_product_args), fattn_row_product_norm_bf16(fattni_row_product_args);

enum { PACK_BYTES = 16, LANES = 32, WARPS_PER_SM = 8 };

static bool is_aligned(const void *p) { return (uintptr_t)p % PACK_BYTES == 0; }

bool fattni_cuda_is_row_product(const fattni_cuda_gemm *g, const fattni_row_norm *norm) {
    const int64_t size = (int64_t)fattn_dtype_size(g->dtype);
    if (norm && (g->K % FATTNI_PACK || g->K > FATTNI_ROW_PRODUCT_NORM_COLUMNS || !is_aligned(norm->gain) ||
                 !is_aligned(norm->bias)))
        return false;
    return g->M == 1 && g->batches == 1 && g->trans_b && !g->trans_a && g->dtype != FATTN_F64 && g->alpha == 1 &&
           g->beta == 0 && g->N > 0 && g->K > 0 && g->N <= INT32_MAX / FATTNI_ROW_PRODUCT_WARPS &&
           g->K <= INT32_MAX / PACK_BYTES && g->K * size % PACK_BYTES == 0 && g->ldb * size % PACK_BYTES == 0 &&
           is_aligned(g->a) && is_aligned(g->b);
}

/* A lane loads all of its packs at once where it can, and SMs have as many warps as hide that a load takes long. */
static int sharing_of(const fattn_ctx *ctx, int64_t N, int64_t packs) {
    int sharing = 1;
    while (sharing < FATTNI_ROW_PRODUCT_WARPS && packs > sharing * LANES &&
           (packs > sharing * LANES * FATTNI_ROW_PRODUCT_AHEAD || N * sharing < (int64_t)WARPS_PER_SM * ctx->gpu.sms))
        sharing *= 2;
    return sharing;
}

fattn_status fattni_cuda_row_product(fattn_ctx *ctx, const fattni_cuda_gemm *g, bool early,
                                     const fattni_row_norm *norm) {
    const int64_t size = (int64_t)fattn_dtype_size(g->dtype), packs = g->K * size / PACK_BYTES;
    fattni_row_product_args a = {.x = g->a,
                                 .w = g->b,
                                 .row = g->row,
                                 .onto = g->from,
                                 .c = g->c,
                                 .gelu = g->gelu,
                                 .pitch = g->ldb * size,
                                 .N = (int32_t)g->N,
                                 .K = (int32_t)g->K,
                                 .packs = (int32_t)packs,
                                 .sharing = sharing_of(ctx, g->N, packs),
                                 .c_dtype = (int32_t)g->c_dtype,
                                 .early = early};
    const int64_t grid = fattni_ceil_div(g->N, FATTNI_ROW_PRODUCT_WARPS / a.sharing);
#define START(name, shared)                                                                                            \
    fattni_cuda_start(ctx, #name, (fattni_cuda_any)(name), grid, FATTNI_ROW_PRODUCT_THREADS, shared, &a)
    if (norm) {
        const size_t row = (size_t)(g->K * size);
        a.gain = norm->gain, a.bias = norm->bias, a.eps = norm->eps, a.centred = norm->centred;
        switch (g->dtype) {
        case FATTN_F32: return START(fattn_row_product_norm_f32, row);
        case FATTN_F16: return START(fattn_row_product_norm_f16, row);
        default: return START(fattn_row_product_norm_bf16, row);
        }
    }
    switch (g->dtype) {
    case FATTN_F32: return START(fattn_row_product_f32, 0);
    case FATTN_F16: return START(fattn_row_product_f16, 0);
    default: return START(fattn_row_product_bf16, 0);
    }
#undef START
}
