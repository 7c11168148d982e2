/* AdamW and SGD on the device: norms of all parameters' chunks, what the step will do, update. */
#include "autograd_c/optim/optimizer_cuda.h"

#include "core/device/any_dtype.cuh"
#include "core/tensor/stochastic_rounding.h"

/* The part of this block, and the block's number among its own. */
DEVICE int part_of(const fattni_optimizer_args *a, int64_t *block) {
    const int here = (int)blockIdx.x;
    int low = 0, high = a->parts - 1; /* the last one that begins at or before the block */
    while (low < high) {
        const int middle = (low + high + 1) / 2;
        if (a->first[middle] <= here)
            low = middle;
        else
            high = middle - 1;
    }
    *block = here - a->first[low];
    return low;
}

/* Of a launch for norms: the elements [begin, end) of this block's chunk, none in one of another rank. */
DEVICE const fattni_optimizer_part *chunk_of(const fattni_optimizer_args *a, int64_t *begin, int64_t *end) {
    int64_t chunk;
    const fattni_optimizer_part *const p = &a->part[part_of(a, &chunk)];
    *begin = chunk * FATTNI_OPTIMIZER_CHUNK;
    *end = *begin < p->begin ? *begin : min(p->end, *begin + FATTNI_OPTIMIZER_CHUNK);
    return p;
}

/* Of an update: the elements [begin, end) of this block. */
DEVICE const fattni_optimizer_part *piece_of(const fattni_optimizer_args *a, int64_t *begin, int64_t *end) {
    int64_t piece;
    const fattni_optimizer_part *const p = &a->part[part_of(a, &piece)];
    *begin = p->begin + piece * FATTNI_OPTIMIZER_PIECE;
    *end = min(p->end, *begin + FATTNI_OPTIMIZER_PIECE);
    return p;
}

/* Over the block: of g's elements [i, end), times factor. */
DEVICE double sum_squares(const fattni_optimizer_part *p, int64_t i, int64_t end, double factor) {
    const int64_t in_packs = p->packs && i < end ? end - end % 4 : i;
    const int64_t rest = in_packs;
    double sum = 0;
#pragma unroll 8
    for (i += 4 * threadIdx.x; i < in_packs; i += 4 * ROW_THREADS) {
        const float4 g = *(const float4 *)((const float *)p->grad + i);
        sum += (double)g.x * g.x + (double)g.y * g.y + (double)g.z * g.z + (double)g.w * g.w;
    }
#pragma unroll 4
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

/* Over the block: of the norms of all chunks, times factor. Volatile: of those that other blocks of the launch have
   written, none may be in L1. */
DEVICE double sum_norms(const fattni_optimizer_args *a, double factor) {
    const volatile double *const norm = a->partial;
    double sum = 0;
#pragma unroll 8
    for (int64_t chunk = threadIdx.x; chunk < a->chunks; chunk += ROW_THREADS) {
        const double x = norm[chunk] * factor;
        sum += x * x;
    }
    return block_sum_f64(sum);
}

/* By one block: the norm of all, then what the step will do. The powers take long, two warps make one each. */
DEVICE void decide(const fattni_optimizer_args *a) {
    __shared__ double power[2];
    const double unit = FATTNI_OPTIMIZER_UNIT;
    if (threadIdx.x == 0 || threadIdx.x == 32)
        power[threadIdx.x / 32] = pow(threadIdx.x ? a->beta2 : a->beta1, (double)(a->state->step + 1));
    double norm = sum_norms(a, 1);
    norm = isfinite(norm) ? sqrt(norm) : sqrt(sum_norms(a, 1 / unit)) * unit;
    if (threadIdx.x == 0) fattni_optimizer_begin(a->state, norm, a->limit, power[0], power[1], &a->scaling);
}

/* True in one block of a launch: all the others have written what they write. */
DEVICE bool is_last_block(int32_t *arrived) {
    __shared__ int32_t last;
    if (threadIdx.x == 0) {
        __threadfence();
        last = atomicAdd(arrived, 1) == (int32_t)gridDim.x - 1;
        if (last) *arrived = 0;
        __threadfence();
    }
    __syncthreads();
    return last;
}

/* partial[chunk] = the norm of g over a chunk; then, of the last launch, what begin does, in the same order whichever
   block is the last. */
extern "C" __global__ void __launch_bounds__(ROW_THREADS)
    fattn_optimizer_norm(const __grid_constant__ fattni_optimizer_args a) {
    begin_grid();
    int64_t i, end;
    const fattni_optimizer_part *const p = chunk_of(&a, &i, &end);
    if (p->frozen) end = i; /* since creation: there may be no gradient */
    const double norm = norm_of(p, i, end);
    if (threadIdx.x == 0) a.partial[a.first_chunk + blockIdx.x] = norm;
    if (a.decides && is_last_block(&a.state->arrived)) decide(&a);
}

/* One block, where no launch for norms decides. */
extern "C" __global__ void __launch_bounds__(ROW_THREADS)
    fattn_optimizer_begin(const __grid_constant__ fattni_optimizer_args a) {
    begin_grid();
    decide(&a);
}

extern "C" __global__ void fattn_optimizer_set(const __grid_constant__ fattni_optimizer_set_args a) {
    begin_grid();
    fattni_optimizer_apply(a.state, &a.change);
}

/* Of an SM: registers for no more. One of sm_75 holds 1024 threads. */
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
enum { ADAMW_BLOCKS = 4 };
#else
enum { ADAMW_BLOCKS = 5 };
#endif

#define OPTIMIZER_MOST_f32 FATTNI_OPTIMIZER_MOST_F32
#define OPTIMIZER_MOST_f64 FATTNI_OPTIMIZER_MOST_F64
#define BODY "autograd_c/optim/optimizer_cuda.inc"
#include "core/device/for_each_real.inc"

extern "C" __global__ void __launch_bounds__(ROW_THREADS)
    fattn_adamw_update_f64(const __grid_constant__ fattni_optimizer_args a) {
    begin_grid();
    int64_t i, end;
    const fattni_optimizer_part *const p = piece_of(&a, &i, &end);
    const fattni_optimizer_rule_f64 r = rule_f64(&a, p);
    update_elements_f64(p, &r, i + threadIdx.x, end, ROW_THREADS, false);
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

DEVICE void load_four(float x[4], const void *p, int64_t i) {
    const float4 four = *(const float4 *)((const float *)p + i);
    x[0] = four.x, x[1] = four.y, x[2] = four.z, x[3] = four.w;
}
/* An assignment becomes four stores. */
DEVICE void store_four(void *p, int64_t i, const float x[4]) {
    __stcg((float4 *)((float *)p + i), make_float4(x[0], x[1], x[2], x[3]));
}
/* F32 moments: a thread has one pack of four elements where that is possible; the last elements of a parameter, which
   fill none, are one thread's. The pack is read beside the state, not after it. */
extern "C" __global__ void __launch_bounds__(ROW_THREADS, ADAMW_BLOCKS)
    fattn_adamw_update_f32(const __grid_constant__ fattni_optimizer_args a) {
    begin_grid();
    int64_t i, end;
    const fattni_optimizer_part *const p = piece_of(&a, &i, &end);
    if (!p->packs) {
        const fattni_optimizer_rule_f32 r = rule_f32(&a, p);
        update_elements_f32(p, &r, i + threadIdx.x, end, ROW_THREADS, false);
        return;
    }
    i += 4 * threadIdx.x;
    if (i >= end) return;
    if (i + 4 > end) {
        const fattni_optimizer_rule_f32 r = rule_f32(&a, p);
        update_elements_f32(p, &r, i, end, 1, false);
        return;
    }
    void *const wide = p->master ? p->master : p->value; /* but for narrow values */
    float g[4], m[4], v[4], w[4];
    load_four(g, p->grad, i), load_four(m, p->m, i), load_four(v, p->v, i);
    if (p->narrow)
        load_narrow(w, p, i);
    else
        load_four(w, wide, i);
    const fattni_optimizer_rule_f32 r = rule_f32(&a, p);
    if (!r.skip) {
#pragma unroll
        for (int e = 0; e < 4; ++e) update_one_f32(&r, g[e], &m[e], &v[e], &w[e]);
        store_four(p->m, i, m), store_four(p->v, i, v);
        if (!p->narrow) store_four(wide, i, w);
        if (p->value_dtype == FATTN_BF16 || p->value_dtype == FATTN_F16)
            *(uint2 *)((uint16_t *)p->value + i) =
                r.stochastic ? round_stochastic(w, p, &r, i) : round_nearest(w, p->value_dtype);
    }
    if (p->keeps) return;
    const float zeros[4] = {0, 0, 0, 0};
    store_four(p->grad, i, zeros);
}
