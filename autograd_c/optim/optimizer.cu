/* AdamW and SGD on the device: norm of all parameters' chunks, one thread that decides, update. */
#include "autograd_c/optim/optimizer_cuda.h"

#include "core/device/any_dtype.cuh"
#include "core/tensor/stochastic_rounding.h"

/* The parameter of this block's chunk, and the chunk's elements [begin, end) of it: none in a chunk of another rank. */
DEVICE const fattni_optimizer_part *part_of(const fattni_optimizer_args *a, int64_t *begin, int64_t *end) {
    const int64_t chunk = a->first_chunk + blockIdx.x;
    int low = 0, high = a->parts - 1; /* the last one that begins at or before the chunk */
    while (low < high) {
        const int middle = (low + high + 1) / 2;
        if (a->part[middle].first_chunk <= chunk)
            low = middle;
        else
            high = middle - 1;
    }
    const fattni_optimizer_part *const p = &a->part[low];
    *begin = (chunk - p->first_chunk) * FATTNI_OPTIMIZER_CHUNK;
    *end = *begin < p->begin ? *begin : min(p->end, *begin + FATTNI_OPTIMIZER_CHUNK);
    return p;
}

/* Over the block: of g's elements [i, end), times factor. */
DEVICE double sum_squares(const fattni_optimizer_part *p, int64_t i, int64_t end, double factor) {
    const int64_t in_packs = p->packs && i < end ? end - end % 4 : i;
    const int64_t rest = in_packs;
    double sum = 0;
#pragma unroll 4
    for (i += 4 * threadIdx.x; i < in_packs; i += 4 * ROW_THREADS) {
        const float4 g = *(const float4 *)((const float *)p->grad + i);
        sum += (double)g.x * g.x + (double)g.y * g.y + (double)g.z * g.z + (double)g.w * g.w;
    }
#pragma unroll 8
    for (i = rest + threadIdx.x; i < end; i += ROW_THREADS) {
        const double g = load_f64(p->grad, p->grad_dtype, i) * factor;
        sum += g * g;
    }
    return block_sum_f64(sum);
}

/* A norm may be finite though its squares are not. Those of packs, which are F32, are. */
DEVICE double norm_of(const fattni_optimizer_part *p, int64_t begin, int64_t end) {
    const double squares = sum_squares(p, begin, end, 1), unit = FATTNI_OPTIMIZER_UNIT;
    if (p->packs || isfinite(squares)) return sqrt(squares);
    return sqrt(sum_squares(p, begin, end, 1 / unit)) * unit;
}

/* partial[chunk] = the norm of g over a chunk. */
extern "C" __global__ void __launch_bounds__(ROW_THREADS)
    fattn_optimizer_norm(const __grid_constant__ fattni_optimizer_args a) {
    begin_grid();
    int64_t i, end;
    const fattni_optimizer_part *const p = part_of(&a, &i, &end);
    if (p->frozen) end = i; /* since creation: there may be no gradient */
    const double norm = norm_of(p, i, end);
    if (threadIdx.x == 0) a.partial[a.first_chunk + blockIdx.x] = norm;
}

/* One block: the norm of all, then what the step will do. */
extern "C" __global__ void __launch_bounds__(ROW_THREADS)
    fattn_optimizer_begin(const __grid_constant__ fattni_optimizer_args a) {
    begin_grid();
    const fattni_optimizer_part norms = {.grad = a.partial, .grad_dtype = FATTN_F64};
    const double norm = norm_of(&norms, 0, a.chunks);
    if (threadIdx.x == 0) fattni_optimizer_begin(a.state, norm, a.limit, a.beta1, a.beta2, &a.scaling);
}

extern "C" __global__ void fattn_optimizer_set(const __grid_constant__ fattni_optimizer_args a) {
    begin_grid();
    fattni_optimizer_apply(a.state, &a.change);
}

#define OPTIMIZER_MOST_f32 FATTNI_OPTIMIZER_MOST_F32
#define OPTIMIZER_MOST_f64 FATTNI_OPTIMIZER_MOST_F64
#define BODY "autograd_c/optim/optimizer_cuda.inc"
#include "core/device/for_each_real.inc"

extern "C" __global__ void __launch_bounds__(ROW_THREADS)
    fattn_adamw_update_f64(const __grid_constant__ fattni_optimizer_args a) {
    begin_grid();
    int64_t i, end;
    const fattni_optimizer_part *const p = part_of(&a, &i, &end);
    const fattni_optimizer_rule_f64 r = rule_f64(&a, p);
    if (!p->frozen) update_elements_f64(p, &r, i + threadIdx.x, end, ROW_THREADS, false);
}

/* Four elements of a 16-bit value, from or to F32, rounded to nearest. */
DEVICE void load_narrow(float x[4], const fattni_optimizer_part *p, int64_t i) {
    const uint2 both = *(const uint2 *)((const uint16_t *)p->value + i);
    const uint32_t pair[2] = {both.x, both.y};
#pragma unroll
    for (int e = 0; e < 4; ++e) x[e] = load_f32(pair, p->value_dtype, e);
}
DEVICE uint2 round_nearest(const float x[4], int32_t dtype) {
    if (dtype == FATTN_BF16) {
        const __nv_bfloat162 pair[2] = {__floats2bfloat162_rn(x[0], x[1]), __floats2bfloat162_rn(x[2], x[3])};
        return *(const uint2 *)pair;
    }
    const __half2 pair[2] = {__floats2half2_rn(x[0], x[1]), __floats2half2_rn(x[2], x[3])};
    return *(const uint2 *)pair;
}

/* Of elements i to i + 3, i a multiple of 4. */
DEVICE uint2 round_stochastic(const float x[4], const fattni_optimizer_part *p, const fattni_optimizer_rule_f32 *r,
                              int64_t i) {
    const fattni_block bits = fattni_rounding_bits(r->seed, r->step, p->param, i / 4);
    uint32_t h[4];
#pragma unroll
    for (int e = 0; e < 4; ++e) h[e] = fattni_half_stochastic(p->value_dtype, x[e], bits.w[e]);
    return make_uint2(h[0] | h[1] << 16, h[2] | h[3] << 16);
}

/* F32 moments: in packs of four where that is possible; the last elements of a parameter, which fill
   none, are one thread's. */
extern "C" __global__ void __launch_bounds__(ROW_THREADS)
    fattn_adamw_update_f32(const __grid_constant__ fattni_optimizer_args a) {
    begin_grid();
    int64_t i, end;
    const fattni_optimizer_part *const p = part_of(&a, &i, &end);
    if (p->frozen) return;
    const fattni_optimizer_rule_f32 r = rule_f32(&a, p);
    if (!p->packs) {
        update_elements_f32(p, &r, i + threadIdx.x, end, ROW_THREADS, false);
        return;
    }
    float *const wide = (float *)(p->master ? p->master : p->value); /* but for narrow values */
#pragma unroll 2
    for (i += 4 * threadIdx.x; i + 4 <= end; i += 4 * ROW_THREADS) {
        if (!r.skip) {
            float g[4], m[4], v[4], w[4];
            *(float4 *)g = *(const float4 *)((const float *)p->grad + i);
            *(float4 *)m = *(const float4 *)((const float *)p->m + i);
            *(float4 *)v = *(const float4 *)((const float *)p->v + i);
            if (p->narrow)
                load_narrow(w, p, i);
            else
                *(float4 *)w = *(const float4 *)(wide + i);
#pragma unroll
            for (int e = 0; e < 4; ++e) update_one_f32(&r, g[e], &m[e], &v[e], &w[e]);
            *(float4 *)((float *)p->m + i) = *(const float4 *)m;
            *(float4 *)((float *)p->v + i) = *(const float4 *)v;
            if (!p->narrow) *(float4 *)(wide + i) = *(const float4 *)w;
            if (p->value_dtype == FATTN_BF16 || p->value_dtype == FATTN_F16)
                *(uint2 *)((uint16_t *)p->value + i) =
                    r.stochastic ? round_stochastic(w, p, &r, i) : round_nearest(w, p->value_dtype);
        }
        *(float4 *)((float *)p->grad + i) = make_float4(0, 0, 0, 0);
    }
    if (i < end) update_elements_f32(p, &r, i, min(end, i + 4), 1, false);
}
