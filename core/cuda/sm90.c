#include "core/cuda/sm90.h"

#include "core/cuda/device.h"
#include "core/cuda/driver.h"
#include "core/cuda/launch.h"
#include "core/cuda/tensor.h"

void fattn_zero_counters(fattni_zero_args x);

/* Dimension 2 is rows, which cannot broadcast. */
bool fattni_sm90_maps(const fattni_array *a, int64_t width) {
    if (!fattni_cuda_vector(a, width) || (a->s[2] <= 0 && a->n[2] > 1)) return false;
    for (int d = 0; d < 3; ++d)
        if (a->s[d] < 0 || a->s[d] >= (int64_t)1 << 39) return false;
    return true;
}

bool fattni_sm90_maps_inputs(const fattni_problem *p) {
    return p->Sq > 0 && p->Sk > 0 && p->B > 0 && p->rows_q > 0 && p->rows_k > 0 && fattni_sm90_maps(&p->q, p->D) &&
           fattni_sm90_maps(&p->k, p->D) && fattni_sm90_maps(&p->v, p->Dv);
}

bool fattni_sm90_stages_bias(const fattni_problem *p) {
    return p->bias.present && p->bias.dtype == (int32_t)p->dtype && fattni_sm90_maps(&p->bias, p->max_k) &&
           (p->bias.s[2] != 0 || p->max_q <= 1) && !(p->softcap > 0 || p->alibi.present || p->drop_T);
}

/* How a map reads elements. */
typedef struct element {
    CUtensorMapDataType type;
    int64_t bytes;
} element;

static fattn_status encode(fattn_ctx *ctx, const fattni_array *a, element e, int64_t width, int columns, int rows,
                           CUtensorMap *map, fattni_map_step *step) {
    step->head = a->s[1] != 0;
    step->batch = a->s[0] != 0;
    const cuuint64_t extent[4] = {(cuuint64_t)width, (cuuint64_t)a->n[2], (cuuint64_t)(step->head ? a->n[1] : 1),
                                  (cuuint64_t)(step->batch ? a->n[0] : 1)};
    const int64_t row = a->s[2] ? a->s[2] : fattni_round_up(width, 16 / e.bytes); /* one row */
    const cuuint64_t stride[3] = {(cuuint64_t)(row * e.bytes), (cuuint64_t)((step->head ? a->s[1] : row) * e.bytes),
                                  (cuuint64_t)((step->batch ? a->s[0] : row) * e.bytes)};
    const cuuint32_t boxes[4] = {(cuuint32_t)columns, (cuuint32_t)rows, 1, 1}, unit[4] = {1, 1, 1, 1};
    const int64_t span = columns * e.bytes; /* of the swizzle */
    /* A load from memory brings 128 bytes to L2, as many as a box has of a row. With 256, few rows over many keys read
       6 to 8 % slower (bench/HOPPER.md). */
    const CUresult result =
        ctx->gpu.driver->encode(map, e.type, 4, a->p, extent, stride, boxes, unit, CU_TENSOR_MAP_INTERLEAVE_NONE,
                                span == 128  ? CU_TENSOR_MAP_SWIZZLE_128B
                                : span == 64 ? CU_TENSOR_MAP_SWIZZLE_64B
                                             : CU_TENSOR_MAP_SWIZZLE_32B,
                                CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    if (result == CUDA_SUCCESS) return FATTN_OK;
    return fattn_ctx_fail(ctx, FATTN_E_CUDA,
                          "cuTensorMapEncodeTiled: result %d for extents %lld, %lld, %lld, %lld and "
                          "strides of %lld, %lld, %lld bytes",
                          (int)result, (long long)extent[0], (long long)extent[1], (long long)extent[2],
                          (long long)extent[3], (long long)stride[0], (long long)stride[1], (long long)stride[2]);
}

fattn_status fattni_sm90_map(fattn_ctx *ctx, const fattni_array *a, fattn_dtype dtype, int64_t width, int box,
                             CUtensorMap *map, fattni_map_step *step) {
    const element e = {dtype == FATTN_BF16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16, 2};
    return encode(ctx, a, e, width, 64, box, map, step);
}

fattn_status fattni_sm90_map_codes(fattn_ctx *ctx, const fattni_array *a, int64_t width, int columns, int rows,
                                   CUtensorMap *map, fattni_map_step *step) {
    const element e = {CU_TENSOR_MAP_DATA_TYPE_UINT8, 1};
    return encode(ctx, a, e, width, columns, rows, map, step);
}

bool fattni_sm90_counts(int64_t blocks, int64_t planes) { return blocks * planes <= 1 << 28; }

fattni_sm90_schedule fattni_sm90_schedule_of(int64_t blocks, int64_t planes, int64_t head_group) {
    return (fattni_sm90_schedule){.tiles = (int32_t)(blocks * planes),
                                  .blocks = (int32_t)blocks,
                                  .planes = (int32_t)planes,
                                  .head_group = (int32_t)fattni_min(head_group, planes)};
}

fattn_status fattni_sm90_start(fattn_ctx *ctx, const fattni_cuda_kernel *k, int64_t grid, const void *args,
                               size_t args_bytes, int32_t *next_tile, int64_t count) {
    if (count == 1) FATTNI_TRY(fattni_cuda_zero(ctx, next_tile, sizeof *next_tile)); /* less work for the host */
    if (count <= 1) return fattni_cuda_launch(ctx, k, grid, args, args_bytes);
    const fattni_zero_args zero = {next_tile, (int32_t)count};
    FATTNI_TRY(fattni_cuda_ready(ctx, k));
    /* Not itself started early: then what comes before it has ended when the kernel starts. */
    FATTNI_TRY(fattni_cuda_start_clusters(ctx, "fattn_zero_counters", (fattni_cuda_any)fattn_zero_counters, 1, 1,
                                          FATTNI_ZERO_THREADS, 0, &zero, false));
    return fattni_cuda_start_clusters(ctx, k->name, k->stub, grid, 1, k->threads, k->shared, args, true);
}
