/* Copies with conversion, zeroes, normal numbers and dropout masks: a thread per element or Philox block. */
#include "core/cuda/tensor.h"
#include "core/ptx/grid.h"
#include "core/tensor/normal.h"

static __device__ inline int64_t thread_number() { return (int64_t)blockIdx.x * FATTNI_GRID_THREADS + threadIdx.x; }

static __device__ inline bool is_narrow_float(int32_t t) { return t == FATTN_F32 || t == FATTN_F16 || t == FATTN_BF16; }

static __device__ inline float load_float(const void *p, int32_t t, int64_t i) {
    if (t == FATTN_F32) return ((const float *)p)[i];
    const uint16_t h = ((const uint16_t *)p)[i];
    return t == FATTN_BF16 ? fattni_bf16_to_float(h) : fattni_f16_to_float(h);
}

static __device__ inline void store_float(void *p, int32_t t, int64_t i, float x) {
    if (t == FATTN_F32)
        ((float *)p)[i] = x;
    else
        ((uint16_t *)p)[i] = t == FATTN_BF16 ? fattni_float_to_bf16(x) : fattni_float_to_f16(x);
}

/* The host's arithmetic (numeric.h), so the host's bits. Between equal dtypes bits move, not
   values. */
static __device__ inline void copy_element(const fattni_copy_args *a, int64_t to, int64_t from) {
    const int32_t t = a->to_dtype, f = a->from_dtype;
    if (a->add)
        fattni_store(a->to, t, to, fattni_load(a->to, t, to) + fattni_load(a->from, f, from));
    else if (t == f && t == FATTN_F64)
        ((uint64_t *)a->to)[to] = ((const uint64_t *)a->from)[from];
    else if (t == f && (t == FATTN_F32 || t == FATTN_I32))
        ((uint32_t *)a->to)[to] = ((const uint32_t *)a->from)[from];
    else if (t == f && t != FATTN_U8 && t != FATTN_F8E4M3 && t != FATTN_I8)
        ((uint16_t *)a->to)[to] = ((const uint16_t *)a->from)[from];
    else if (t == f)
        ((uint8_t *)a->to)[to] = ((const uint8_t *)a->from)[from];
    else if (is_narrow_float(t) && is_narrow_float(f))
        store_float(a->to, t, to, load_float(a->from, f, from));
    else
        fattni_store(a->to, t, to, fattni_load(a->from, f, from));
}

extern "C" __global__ void __launch_bounds__(FATTNI_GRID_THREADS)
    fattn_copy(const __grid_constant__ fattni_copy_args a) {
    begin_grid();
    const int64_t n = thread_number();
    if (n >= a.grid.count) return;
    int64_t offset[FATTNI_GRID_OPERANDS];
    grid_offsets(&a.grid, n, offset);
    copy_element(&a, offset[0], offset[1]);
}

static __device__ inline float4 load_four(const void *p, int32_t t, int64_t four) {
    if (t == FATTN_F32) return ((const float4 *)p)[four];
    const ushort4 h = ((const ushort4 *)p)[four];
    const uint16_t x[4] = {h.x, h.y, h.z, h.w};
    return make_float4(load_float(x, t, 0), load_float(x, t, 1), load_float(x, t, 2), load_float(x, t, 3));
}

static __device__ inline void store_four(void *p, int32_t t, int64_t four, float4 x) {
    if (t == FATTN_F32) {
        ((float4 *)p)[four] = x;
        return;
    }
    uint16_t h[4];
    const float from[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) store_float(h, t, i, from[i]);
    ((ushort4 *)p)[four] = make_ushort4(h[0], h[1], h[2], h[3]);
}

/* The same bits, four elements per thread: an F32 sum of two numbers is that of fattn_copy, whose F64 sum is rounded
   once more, without effect (F64 has more than twice the bits). */
extern "C" __global__ void __launch_bounds__(FATTNI_GRID_THREADS)
    fattn_copy_fours(const __grid_constant__ fattni_copy_args a) {
    begin_grid();
    const int64_t n = thread_number();
    if (n >= a.grid.count) return;
    int64_t offset[FATTNI_GRID_OPERANDS];
    grid_offsets(&a.grid, n, offset);
    float4 x = load_four(a.from, a.from_dtype, offset[1]);
    if (a.add) {
        const float4 y = load_four(a.to, a.to_dtype, offset[0]);
        x = make_float4(y.x + x.x, y.y + x.y, y.z + x.z, y.w + x.w);
    }
    store_four(a.to, a.to_dtype, offset[0], x);
}

static __device__ inline void copy_block(const fattni_copies_args &a, int64_t block) {
    int k = 0;
    while (k + 1 < a.n && a.first_block[k + 1] <= block) ++k;
    const fattni_grid *const g = &a.grid[k];
    const int64_t first = (block - a.first_block[k]) * (FATTNI_GRID_THREADS * FATTNI_COPY_PIECES);
    const int64_t nowhere = INT64_MIN; /* rows that run backwards have offsets below 0 */
    uint4 piece[FATTNI_COPY_PIECES];
    int64_t to[FATTNI_COPY_PIECES];
#pragma unroll
    for (int i = 0; i < FATTNI_COPY_PIECES; ++i) {
        const int64_t n = first + i * FATTNI_GRID_THREADS + threadIdx.x;
        int64_t offset[FATTNI_GRID_OPERANDS];
        to[i] = nowhere;
        if (n >= g->count) continue;
        grid_offsets(g, n, offset);
        to[i] = offset[0];
        piece[i] = ((const uint4 *)a.from[k])[offset[1]];
    }
#pragma unroll
    for (int i = 0; i < FATTNI_COPY_PIECES; ++i)
        if (to[i] != nowhere) ((uint4 *)a.to[k])[to[i]] = piece[i];
}

extern "C" __global__ void __launch_bounds__(FATTNI_GRID_THREADS)
    fattn_copies(const __grid_constant__ fattni_copies_args a) {
    begin_grid();
    for (int64_t block = blockIdx.x; block < a.blocks; block += gridDim.x) copy_block(a, block);
}

extern "C" __global__ void __launch_bounds__(FATTNI_ZERO_THREADS)
    fattn_zero_counters(const __grid_constant__ fattni_zero_args x) {
    begin_grid();
    for (int n = (int)threadIdx.x; n < x.count; n += FATTNI_ZERO_THREADS) x.counters[n] = 0;
}

extern "C" __global__ void __launch_bounds__(FATTNI_GRID_THREADS)
    fattn_normal(const __grid_constant__ fattni_normal_args a) {
    begin_grid();
    const int64_t n = thread_number();
    if (n >= a.grid.count) return;
    int64_t offset[FATTNI_GRID_OPERANDS];
    grid_offsets(&a.grid, n, offset);
    fattni_store(a.to, a.dtype, offset[0], a.mean + a.std * fattni_normal_at(&a.rng, n));
}

/* One warp per 16 x 16 patch: a lane's block is rows {i, i+8} by columns {j, j+1, j+8, j+9}. */
extern "C" __global__ void __launch_bounds__(FATTNI_GRID_THREADS)
    fattn_mask(const __grid_constant__ fattni_mask_args a) {
    begin_grid();
    const int64_t patch = thread_number() / 32, plane = patch / a.patches_k / a.patches_q;
    const int lane = (int)threadIdx.x % 32;
    if (plane >= a.planes) return;
    const int64_t h = plane % a.Hq, b = plane / a.Hq;
    const int64_t i = (patch / a.patches_k % a.patches_q + a.q_pos0 / 16) * 16 + lane / 4;
    const int64_t j = (patch % a.patches_k + a.k_pos0 / 16) * 16 + lane % 4 * 2;
    const uint32_t number = a.plane0 + (uint32_t)b * a.plane_heads + (uint32_t)h;
    const uint32_t step = a.step ? (uint32_t)*a.step : 0u;
    const fattni_block r = fattni_mask_philox(a.seed, fattni_dropout_counter(a.stream, step, number, i, j));
    for (int e = 0; e < 8; ++e) {
        const int64_t y = i + (e & 2) * 4, x = j + (e & 1) + (e & 4) * 2;
        const int64_t row = y - a.q_pos0, column = x - a.k_pos0;
        if (row < 0 || row >= a.rows || column < 0 || column >= a.columns) continue;
        a.keep[b * a.stride[0] + h * a.stride[1] + row * a.stride[2] + column * a.stride[3]] =
            fattni_keeps(fattni_lane16(r, fattni_dropout_lane(y, x)), a.T);
    }
}
