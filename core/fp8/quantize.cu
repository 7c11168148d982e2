/* 8-bit copies of q, k and v (include/fattn/fp8.h): sums and extremes of each channel over FATTNI_FP8_KEYS keys, from
   those means and scales, then codes, and v_mean from what rounding took off. A row is shared by as many neighbouring
   lanes as it has chunks of 8 channels. The order of every sum of floats is fixed, and is that of quantize_cpu.c: same
   bits. */
#include "core/fp8/fp8_args.h"

#include "core/device/load_8.cuh"
#include "core/device/sequence.cuh"
#include "core/fp8/rest.h"
#include "core/fp8/rope.h"
#include "core/ptx/f8.h"
#include "core/ptx/grid.h"
#include "core/tensor/philox.h"

enum {
    THREADS = FATTNI_FP8_THREADS,
    CHANNELS = FATTNI_FP8_CHANNELS,
    VALUES = FATTNI_FP8_CHANNELS / 2, /* channels of v, at most */
    FOUR = 4,                         /* rows of q or k that lanes take at once, keys of a word of v8 */
    KEYS = FATTNI_FP8_KEYS,
    WORDS = FATTNI_FP8_WORDS,
    AT_ONCE = 8,
    SCALED = FATTNI_FP8_SCALED,
    OF_ELEMENT = FATTNI_FP8_KEYS_OF_ELEMENT
};
static_assert((int)FATTNI_FP8_KIND_F32 == (int)KIND_F32 && (int)THREADS == (int)VALUES &&
                  (int)FOUR == (int)FATTNI_FP8_ROWS,
              "one number");
#define LEAST_MAX 1e-30f
#define LARGEST_CODE 448.0f
#define LARGEST_INTEGER 127.0f

/* Block n of a sequence's head. Heads follow each other: what CTAs read at a time lies side by side if heads of a row
   do. */
typedef struct place {
    int b, h, n;
} place;
DEVICE place place_of(int number, int heads, int blocks) {
    const int row = number / heads;
    const place p = {row / blocks, number % heads, row % blocks};
    return p;
}

/* The sequence's first chunk in partials, and its first column of v8 in units of KEYS. */
DEVICE int first_chunk(const fattni_attention_args *a, const sequence *s, int b) {
    return a->cu_seqlens_k.p ? s->k0 / KEYS + b : 0;
}
/* Of one chunk: sums, minima, maxima [D + Dv] each. */
DEVICE float *partials_of(const fattni_fp8_args *x, const sequence *s, int b, int g, int chunk) {
    const fattni_view *const p = &x->partials;
    return (float *)p->p + s->batch * p->b + g * p->h + (first_chunk(&x->a, s, b) + chunk) * p->row;
}
/* Of one chunk, [Dv], in place of the maxima of v once codes are written: sums of fattni_fp8_rest. */
DEVICE int *rests_of(const fattni_fp8_args *x, const sequence *s, int b, int g, int chunk) {
    return (int *)partials_of(x, s, b, g, chunk) + 2 * (x->a.D + x->a.Dv) + x->a.D;
}
DEVICE const char *row_at(const fattni_attention_args *a, const fattni_view *view, const sequence *s, int h, int row) {
    return (const char *)view->p + (s->batch * view->b + h * view->h + row * view->row) * (a->kind == KIND_F32 ? 4 : 2);
}
/* What a call is, and the usual one: in functions that get its constants the compiler leaves out the rest, which is
   most of their instructions. */
typedef struct call_type {
    int kind, vector, rotates;
} call_type;
DEVICE call_type type_of(const fattni_fp8_args *x) {
    const call_type t = {x->a.kind, x->a.vector_qkv, x->hadamard};
    return t;
}
DEVICE call_type usual_type(void) {
    const call_type t = {KIND_BF16, 1, 0};
    return t;
}
DEVICE int is_usual(call_type t) { return t.kind == KIND_BF16 && t.vector && !t.rotates; }

/* Eight channels from c on of a row, 0 where it is NULL or from `width` on: start_row loads them where that is 16
   bytes, finish_row converts or loads them. */
DEVICE uint4 start_row(const char *row, call_type t, int c, int width) {
    const int inside = row && c < width && t.kind != KIND_F32 && t.vector;
    return inside ? *(const uint4 *)(row + 2 * c) : make_uint4(0, 0, 0, 0);
}
DEVICE void finish_row(float y[8], uint4 bits, const char *row, call_type t, int c, int width) {
    if (t.kind != KIND_F32 && t.vector) {
        convert_8(y, (const uint16_t *)&bits, t.kind);
    } else if (row) {
        load_8(y, row, t.kind, c, width, t.vector);
    } else
#pragma unroll
        for (int e = 0; e < 8; ++e) y[e] = 0.0f;
}
/* Both, of FOUR rows. */
DEVICE void load_rows(float (*y)[8], const char *const *rows, call_type t, int c, int width) {
    uint4 bits[FOUR];
#pragma unroll
    for (int n = 0; n < FOUR; ++n) bits[n] = start_row(rows[n], t, c, width);
#pragma unroll
    for (int n = 0; n < FOUR; ++n) finish_row(y[n], bits[n], rows[n], t, c, width);
}
/* Eight floats of partials from channel c on, 0 from `width` on. */
DEVICE void load_partials(float y[8], const float *from, int c, int width, call_type t) {
    if (t.vector && c + 8 <= width) {
        const float4 low = *(const float4 *)(from + c), high = *(const float4 *)(from + c + 4);
        y[0] = low.x, y[1] = low.y, y[2] = low.z, y[3] = low.w;
        y[4] = high.x, y[5] = high.y, y[6] = high.z, y[7] = high.w;
        return;
    }
#pragma unroll
    for (int e = 0; e < 8; ++e) y[e] = c + e < width ? from[c + e] : 0.0f;
}

/* Signs of channels 8 lane .. 8 lane + 7, one bit each, for FATTN_FP8_HADAMARD. */
DEVICE uint32_t signs_of(const fattni_fp8_args *x, int lane) {
    if (!x->hadamard) return 0;
    const fattni_block counter = {{(uint32_t)lane / 16, 0, x->a.stream, 0x48414441u}};
    const fattni_block r = fattni_philox(x->a.seed, counter);
    const uint32_t word = lane / 4 % 4 == 0 ? r.w[0] : lane / 4 % 4 == 1 ? r.w[1] : lane / 4 % 4 == 2 ? r.w[2] : r.w[3];
    return word >> lane % 4 * 8 & 0xff;
}
/* A row times the Hadamard matrix: butterflies within a thread, then between the lanes of the row. */
DEVICE void rotate(float y[8], const fattni_fp8_args *x, int lane, uint32_t signs) {
#pragma unroll
    for (int e = 0; e < 8; ++e)
        if (signs >> e & 1) y[e] = -y[e];
#pragma unroll
    for (int h = 1; h < 8; h *= 2)
#pragma unroll
        for (int e = 0; e < 8; ++e)
            if (!(e & h)) {
                const float low = y[e], high = y[e + h];
                y[e] = low + high, y[e + h] = low - high;
            }
    for (int h = 1; h < x->a.D / 8; h *= 2)
#pragma unroll
        for (int e = 0; e < 8; ++e) {
            const float other = __shfl_xor_sync(ALL_LANES, y[e], h);
            y[e] = lane & h ? other - y[e] : y[e] + other;
        }
#pragma unroll
    for (int e = 0; e < 8; ++e) y[e] = __fmul_rn(y[e], x->hadamard_scale);
}

/* Frequencies of all channels, in shared memory: of channel 8 n + e [e][n]. */
typedef uint64_t frequencies[8][CHANNELS / 16];
DEVICE void load_frequencies(frequencies to, const fattni_fp8_args *x) {
    to[threadIdx.x / 32][threadIdx.x % 32] = x->frequency[threadIdx.x / 32][threadIdx.x % 32];
    __syncthreads();
}
static_assert((int)THREADS == (int)CHANNELS / 2, "one number for each thread");
/* Pairs of a row (y[i], y[i + D/2]) by the angles of a position; the other half lies in other lanes. */
DEVICE void turn(float y[8], const frequencies frequency, int64_t position, int lane, int D) {
    const int half = D / 16, of_high = lane >= half && lane < 2 * half; /* lanes; more than 2 half have no channels */
    const int partner = (int)threadIdx.x % 32 + (of_high ? -half : lane < half ? half : 0);
#pragma unroll
    for (int e = 0; e < 8; ++e) {
        float cosine, sine;
        const float other = __shfl_sync(ALL_LANES, y[e], partner, 32);
        fattni_fp8_angle(position, frequency[e][lane], &cosine, &sine);
        y[e] =
            of_high ? fattni_fp8_turn_high(other, y[e], cosine, sine) : fattni_fp8_turn_low(y[e], other, cosine, sine);
    }
}

/* Sums and extremes of 8 channels over rows of a chunk. */
typedef struct statistics {
    float sum[8], low[8], high[8];
} statistics;
DEVICE void add_row(statistics *to, const float y[8]) {
#pragma unroll
    for (int e = 0; e < 8; ++e) {
        to->sum[e] += y[e];
        to->low[e] = fminf(to->low[e], y[e]), to->high[e] = fmaxf(to->high[e], y[e]);
    }
}

/* Lanes of a row take a chunk of k or of v: even numbers are chunks of k. frequency: NULL without rope. */
DEVICE void add_chunk(const fattni_fp8_args *x, call_type type, const uint64_t (*frequency)[CHANNELS / 16]) {
    const fattni_attention_args *const a = &x->a;
    const int lanes = max(x->lanes_k, x->lanes_v), lane = (int)threadIdx.x % lanes;
    const int number = (int)blockIdx.x * (THREADS / lanes) + (int)threadIdx.x / lanes, of_v = number & 1;
    const place at = place_of(number / 2, a->Hkv, x->chunks);
    const bool inside = at.b < a->B;
    const sequence s = sequence_of(a, inside ? at.b : 0);
    const int first = at.n * KEYS, count = inside ? min(s.Sk - first, KEYS) : 0, width = of_v ? a->Dv : a->D;
    const fattni_view *const view = of_v ? &a->v : &a->k;
    const uint32_t signs = signs_of(x, lane);
    statistics all_rows;
#pragma unroll
    for (int e = 0; e < 8; ++e) all_rows.sum[e] = 0.0f, all_rows.low[e] = INFINITY, all_rows.high[e] = -INFINITY;
    /* Lanes of a warp have different counts: they shuffle together. */
    const int turns = type.rotates || frequency, most = turns ? (int)KEYS : count;
    const char *const rows = row_at(a, view, &s, at.h, s.k0 + first);
    const int64_t step = view->row * (type.kind == KIND_F32 ? 4 : 2);
    int j = 0;
    if (!turns && type.vector && type.kind != KIND_F32 && 8 * lane < width) { /* all rows of these are there */
        const char *from = rows + 16 * lane;
        for (; j + AT_ONCE <= count; j += AT_ONCE, from += AT_ONCE * step) {
            uint4 bits[AT_ONCE];
#pragma unroll
            for (int n = 0; n < AT_ONCE; ++n) bits[n] = *(const uint4 *)(from + n * step);
#pragma unroll
            for (int n = 0; n < AT_ONCE; ++n) {
                float y[8];
                convert_8(y, (const uint16_t *)(bits + n), type.kind);
                add_row(&all_rows, y);
            }
        }
    }
    for (; j < most; j += AT_ONCE) {
        uint4 bits[AT_ONCE];
#pragma unroll
        for (int n = 0; n < AT_ONCE; ++n)
            bits[n] = start_row(j + n < count ? rows + (j + n) * step : NULL, type, 8 * lane, width);
#pragma unroll
        for (int n = 0; n < AT_ONCE; ++n) {
            float y[8];
            finish_row(y, bits[n], j + n < count ? rows + (j + n) * step : NULL, type, 8 * lane, width);
            if (turns) {
                float turned[8];
#pragma unroll
                for (int e = 0; e < 8; ++e) turned[e] = y[e];
                if (frequency) turn(turned, frequency, (int64_t)a->k_pos0 + first + j + n, lane, a->D);
                if (type.rotates) rotate(turned, x, lane, signs);
#pragma unroll
                for (int e = 0; e < 8; ++e)
                    if (!of_v) y[e] = turned[e];
            }
            if (j + n < count) add_row(&all_rows, y);
        }
    }
    if (count <= 0) return;
    float *const to = partials_of(x, &s, at.b, at.h, at.n) + (of_v ? a->D : 0);
    const int all = a->D + a->Dv;
#pragma unroll
    for (int e = 0; e < 8; ++e)
        if (8 * lane + e < width) {
            const int c = 8 * lane + e;
            to[c] = all_rows.sum[e], to[all + c] = all_rows.low[e], to[2 * all + c] = all_rows.high[e];
        }
}
extern "C" __global__ void __launch_bounds__(THREADS)
    fattn_fp8_statistics(const __grid_constant__ fattni_fp8_args args) {
    begin_grid();
    const call_type type = type_of(&args);
    if (is_usual(type))
        add_chunk(&args, usual_type(), NULL);
    else
        add_chunk(&args, type, NULL);
}
extern "C" __global__ void __launch_bounds__(THREADS)
    fattn_fp8_statistics_rope(const __grid_constant__ fattni_fp8_args args) {
    begin_grid();
    __shared__ frequencies frequency;
    load_frequencies(frequency, &args);
    add_chunk(&args, type_of(&args), frequency);
}

/* One CTA per key head of a sequence, a thread per channel of k and v. The first chunk's partials become what
   fattn_fp8_codes reads: means in place of sums, 448 / largest magnitude in place of minima. */
extern "C" __global__ void __launch_bounds__(CHANNELS) fattn_fp8_scales(const __grid_constant__ fattni_fp8_args args) {
    begin_grid();
    const fattni_fp8_args *const x = &args;
    const fattni_attention_args *const a = &x->a;
    const place at = place_of((int)blockIdx.x, a->Hkv, 1);
    const sequence s = sequence_of(a, at.b);
    const int all = a->D + a->Dv, c = (int)threadIdx.x, d = c - a->D, chunks = (s.Sk + KEYS - 1) / KEYS;
    float *const partials = partials_of(x, &s, at.b, at.h, 0);
    float total = 0.0f, low = INFINITY, high = -INFINITY, mean = 0.0f, most = 0.0f;
    __shared__ float of_warp[CHANNELS / 32];
    if (c < all && chunks > 0) {
#pragma unroll 8
        for (int n = 0; n < chunks; ++n) {
            const float *const from = partials + n * x->partials.row + c;
            total += from[0];
            low = fminf(low, from[all]), high = fmaxf(high, from[2 * all]);
        }
        mean = total / (float)s.Sk;
        most = fmaxf(mean - low, high - mean);
    }
    float k_most = c < a->D ? most : 0.0f;
    for (int lanes = 16; lanes > 0; lanes /= 2) k_most = fmaxf(k_most, __shfl_xor_sync(ALL_LANES, k_most, lanes));
    if (c % 32 == 0) of_warp[c / 32] = k_most;
    __syncthreads();
    for (int w = 0; w < CHANNELS / 32; ++w) k_most = fmaxf(k_most, of_warp[w]);
    if (c >= all) return;
    const float largest = fmaxf(c < a->D ? k_most : most, LEAST_MAX);
    if (chunks > 0) partials[c] = mean, partials[all + c] = LARGEST_CODE / largest;
    if (c == 0 && !x->integers)
        ((float *)x->k_scale.p)[at.b * x->k_scale.b + at.h * x->k_scale.h] = largest / LARGEST_CODE;
    if (d < 0) return;
    ((float *)x->v_scale.p)[at.b * x->v_scale.b + at.h * x->v_scale.h + d] = largest / LARGEST_CODE;
}

DEVICE uint32_t pack_integers(float x0, float x1, float x2, float x3) {
    const uint32_t low = (uint8_t)fattni_float_to_i8(x0) | (uint32_t)(uint8_t)fattni_float_to_i8(x1) << 8;
    const uint32_t high = (uint8_t)fattni_float_to_i8(x2) | (uint32_t)(uint8_t)fattni_float_to_i8(x3) << 8;
    return low | high << 16;
}

/* Eight codes; rows are padded to multiples of 16 bytes. */
DEVICE void store_codes(char *to, const float y[8], float factor, int c, int width, bool integers) {
    float z[8];
#pragma unroll
    for (int e = 0; e < 8; ++e) z[e] = __fmul_rn(y[e], factor);
    const uint2 codes = integers
                            ? make_uint2(pack_integers(z[0], z[1], z[2], z[3]), pack_integers(z[4], z[5], z[6], z[7]))
                            : make_uint2(pack_e4m3(z[0], z[1], z[2], z[3]), pack_e4m3(z[4], z[5], z[6], z[7]));
    if (c < width) *(uint2 *)(to + c) = codes;
}

/* Magnitudes of whole warps' rows, of the CTA's rows n * (its groups) + group of the call: [n][warp]. */
typedef float warp_magnitudes[FOUR][THREADS / 32];
/* FATTN_FP8_INT8: most[n], the largest magnitude of the SCALED keys of row n, at least LEAST_MAX, of all threads of the
   CTA. A warp's rows n are 32 / lanes neighbours, so that a scale has `lanes` numbers of warps. */
DEVICE void magnitudes_of(float most[FOUR], warp_magnitudes of_warps, int lanes) {
#pragma unroll
    for (int n = 0; n < FOUR; ++n) {
        for (int step = 16; step > 0; step /= 2) most[n] = fmaxf(most[n], __shfl_xor_sync(ALL_LANES, most[n], step));
        if (threadIdx.x % 32 == 0) of_warps[n][threadIdx.x / 32] = most[n];
    }
    __syncthreads();
#pragma unroll
    for (int n = 0; n < FOUR; ++n) {
        const int place = n * (THREADS / 32) + (int)threadIdx.x / 32;
        most[n] = (&of_warps[0][0])[place / lanes * lanes + (int)threadIdx.x % lanes];
        for (int step = 1; step < lanes; step *= 2) most[n] = fmaxf(most[n], __shfl_xor_sync(ALL_LANES, most[n], step));
        most[n] = fmaxf(most[n], LEAST_MAX);
    }
}

/* FATTN_FP8_INT8: codes and scales of rows of k, as below, turned and rotated; first: this thread's. Elements of
   k_scale go on to the end of the sequence's last chunk. */
DEVICE void code_integer_keys(const fattni_fp8_args *x, const place at, const sequence *s, float (*y)[8],
                              const float mean[8], int first) {
    __shared__ warp_magnitudes of_warps;
    const int lanes = x->lanes_k, lane = (int)threadIdx.x % lanes, groups = THREADS / lanes, c = 8 * lane;
    const int scaled = (max(s->Sk, 1) + KEYS - 1) / KEYS * KEYS;
    float *const scale = (float *)x->k_scale.p + s->batch * x->k_scale.b + at.h * x->k_scale.h +
                         (int64_t)first_chunk(&x->a, s, at.b) * (KEYS / OF_ELEMENT);
    float most[FOUR];
#pragma unroll
    for (int n = 0; n < FOUR; ++n) {
        most[n] = 0.0f;
#pragma unroll
        for (int e = 0; e < 8; ++e) {
            y[n][e] -= mean[e];
            if (first + n * groups < s->Sk) most[n] = fmaxf(most[n], fabsf(y[n][e]));
        }
    }
    magnitudes_of(most, of_warps, lanes);
#pragma unroll
    for (int n = 0; n < FOUR; ++n) {
        const int row = first + n * groups;
        char *const codes = (char *)x->k8.p + s->batch * x->k8.b + at.h * x->k8.h + (int64_t)(s->k0 + row) * x->k8.row;
        if (row < s->Sk) store_codes(codes, y[n], LARGEST_INTEGER / most[n], c, x->a.D, true);
        if (lane == 0 && row % OF_ELEMENT == 0 && row < scaled) scale[row / OF_ELEMENT] = most[n] / LARGEST_INTEGER;
    }
}

/* Four values of a lane, of as many rows that a group of lanes shares, added up over the group, by fewer shuffles than
   one row after the other: lane n of each four gets row n's. Sums are those of a butterfly of each row. */
DEVICE float sum_of_rows(const float x[FOUR], int lanes) {
    const int lane = (int)threadIdx.x % 32, odd = lane & 1, high = lane & 2;
    const float low_rows = (odd ? x[1] : x[0]) + __shfl_xor_sync(ALL_LANES, odd ? x[0] : x[1], 1),
                high_rows = (odd ? x[3] : x[2]) + __shfl_xor_sync(ALL_LANES, odd ? x[2] : x[3], 1);
    float sum = (high ? high_rows : low_rows) + __shfl_xor_sync(ALL_LANES, high ? low_rows : high_rows, 2);
    for (int step = FOUR; step < lanes; step *= 2) sum += __shfl_xor_sync(ALL_LANES, sum, step);
    return sum;
}
DEVICE float most_of_rows(const float x[FOUR], int lanes) {
    const int lane = (int)threadIdx.x % 32, odd = lane & 1, high = lane & 2;
    const float low_rows = fmaxf(odd ? x[1] : x[0], __shfl_xor_sync(ALL_LANES, odd ? x[0] : x[1], 1)),
                high_rows = fmaxf(odd ? x[3] : x[2], __shfl_xor_sync(ALL_LANES, odd ? x[2] : x[3], 1));
    float most = fmaxf(high ? high_rows : low_rows, __shfl_xor_sync(ALL_LANES, high ? low_rows : high_rows, 2));
    for (int step = FOUR; step < lanes; step *= 2) most = fmaxf(most, __shfl_xor_sync(ALL_LANES, most, step));
    return most;
}
/* The lane of the warp that has row n of this lane's group. */
DEVICE int lane_of_row(int n, int lanes) { return (int)threadIdx.x % 32 / lanes * lanes + n; }

/* Codes of rows of q (`of_q`) or k: FOUR rows, the CTA's rows apart, by each group of lanes. */
DEVICE void code_rows(const fattni_fp8_args *x, call_type type, const place at, int of_q,
                      const uint64_t (*frequency)[CHANNELS / 16], bool integers) {
    const float largest = integers ? LARGEST_INTEGER : LARGEST_CODE;
    const fattni_attention_args *const a = &x->a;
    const sequence s = sequence_of(a, at.b);
    const int lanes = x->lanes_k, lane = (int)threadIdx.x % lanes, group = (int)threadIdx.x / lanes,
              groups = THREADS / lanes, g = of_q ? at.h / a->group : at.h, rows = of_q ? s.Sq : s.Sk;
    const int first = at.n * FOUR * groups + group, row0 = of_q ? s.q0 : s.k0, c = 8 * lane;
    const fattni_view *const from = of_q ? &a->q : &a->k, *const to = of_q ? &x->q8 : &x->k8;
    const uint32_t signs = signs_of(x, lane);
    const float *const partials = partials_of(x, &s, at.b, g, 0);
    float y[FOUR][8], mean[8], most[FOUR], shift[FOUR];
    const char *at_row[FOUR], *const first_row = row_at(a, from, &s, at.h, row0 + first);
    const int64_t row_bytes = from->row * (type.kind == KIND_F32 ? 4 : 2);
    char *const first_codes = (char *)to->p + s.batch * to->b + at.h * to->h + (int64_t)(row0 + first) * to->row;
#pragma unroll
    for (int n = 0; n < FOUR; ++n) at_row[n] = first + n * groups < rows ? first_row + n * groups * row_bytes : NULL;
    load_rows(y, at_row, type, c, a->D);
    load_partials(mean, partials, c, s.Sk > 0 ? a->D : 0, type);
    const float k_factor = s.Sk > 0 ? partials[a->D + a->Dv] : 0.0f;
#pragma unroll
    for (int n = 0; n < FOUR; ++n) {
        const int row = first + n * groups;
        if (frequency) turn(y[n], frequency, (int64_t)a->k_pos0 + (of_q ? s.diagonal : 0) + row, lane, a->D);
        if (type.rotates) rotate(y[n], x, lane, signs);
        if (!of_q) {
            if (integers) continue;
#pragma unroll
            for (int e = 0; e < 8; ++e) y[n][e] -= mean[e];
            if (row < rows) store_codes(first_codes + n * groups * to->row, y[n], k_factor, c, a->D, false);
            continue;
        }
        most[n] = shift[n] = 0.0f;
#pragma unroll
        for (int e = 0; e < 8; ++e) {
            most[n] = fmaxf(most[n], fabsf(y[n][e]));
            shift[n] = fmaf(y[n][e], mean[e], shift[n]);
        }
    }
    if (of_q) {
        const float all_shift = sum_of_rows(shift, lanes), all_most = fmaxf(most_of_rows(most, lanes), LEAST_MAX);
#pragma unroll
        for (int n = 0; n < FOUR; ++n) {
            const int row = first + n * groups;
            const float of_row = __shfl_sync(ALL_LANES, all_most, lane_of_row(n, lanes), 32);
            if (row < rows) store_codes(first_codes + n * groups * to->row, y[n], largest / of_row, c, a->D, integers);
        }
        /* A lane has a row. */
        const int row = first + lane % FOUR * groups;
        if (lane < FOUR && row < rows) {
            const int64_t i = row0 + row;
            const float scale = all_most / largest;
            ((float *)x->q_scale.p)[s.batch * x->q_scale.b + at.h * x->q_scale.h + i * x->q_scale.row] =
                integers ? fmaf(0.0f, all_shift, scale) : scale; /* with a NaN, which no integer is */
            ((float *)x->q_shift.p)[s.batch * x->q_shift.b + at.h * x->q_shift.h + i * x->q_shift.row] = all_shift;
        }
    }
    if (integers && !of_q) code_integer_keys(x, at, &s, y, mean, first);
}

/* A chunk of V^T, of zeros where there are no keys: a thread takes 8 channels of the four keys that share a word of
   v8. A channel's words are rotated in shared memory, so that those of a warp are in different banks. */
DEVICE void code_values(const fattni_fp8_args *x, call_type type, const place at, uint32_t (*words)[WORDS]) {
    const fattni_attention_args *const a = &x->a;
    const sequence s = sequence_of(a, at.b);
    const int lanes = x->lanes_v, lane = (int)threadIdx.x % lanes, c = 8 * lane, first = at.n * KEYS;
    if (first >= max(s.Sk, 1)) return;
    const float *const partials = partials_of(x, &s, at.b, at.h, 0) + a->D;
    float mean[8], factor[8];
    __shared__ int rests[8][VALUES / 8]; /* of channel 8 n + e: [e][n] */
    rests[threadIdx.x % 8][threadIdx.x / 8] = 0;
    __syncthreads();
    load_partials(mean, partials, c, s.Sk > 0 ? a->Dv : 0, type);
    load_partials(factor, partials + a->D + a->Dv, c, s.Sk > 0 ? a->Dv : 0, type);
    const int turn = 32 / lanes; /* words from 8 channels to the next ones */
    int rest[8] = {0, 0, 0, 0, 0, 0, 0, 0};
    for (int word = (int)threadIdx.x / lanes; word < WORDS; word += THREADS / lanes) {
        const int key = word / 4 * 16 + word % 4 * 2; /* and those after it by 1, 8 and 9 */
        float y[4][8];
        const char *rows[4], *const first_row = row_at(a, &a->v, &s, at.h, s.k0 + first + key);
        const int64_t row_bytes = a->v.row * (type.kind == KIND_F32 ? 4 : 2);
#pragma unroll
        for (int n = 0; n < 4; ++n) {
            const int j = n / 2 * 8 + n % 2;
            rows[n] = first + key + j < s.Sk ? first_row + j * row_bytes : NULL;
        }
        load_rows(y, rows, type, c, a->Dv);
#pragma unroll
        for (int n = 0; n < 4; ++n)
#pragma unroll
            for (int e = 0; e < 8; ++e) y[n][e] = rows[n] ? y[n][e] : mean[e]; /* whose code is 0 */
#pragma unroll
        for (int e = 0; e < 8; ++e) {
#pragma unroll
            for (int n = 0; n < 4; ++n) y[n][e] = __fmul_rn(y[n][e] - mean[e], factor[e]);
            const uint32_t codes = pack_e4m3(y[0][e], y[1][e], y[2][e], y[3][e]);
            float rounded[4];
            unpack_e4m3(rounded, codes);
#pragma unroll
            for (int n = 0; n < 4; ++n) rest[e] += fattni_fp8_rest(y[n][e], rounded[n]);
            words[c + e][(word + turn * lane) % WORDS] = codes;
        }
    }
#pragma unroll
    for (int e = 0; e < 8; ++e) {
        for (int step = lanes; step < 32; step *= 2)
            rest[e] += (int)__shfl_xor_sync(ALL_LANES, (uint32_t)rest[e], step);
        if ((int)threadIdx.x % 32 < lanes) atomicAdd(&rests[e][lane], rest[e]);
    }
    __syncthreads();
    int *const sums = rests_of(x, &s, at.b, at.h, at.n);
    for (int d = (int)threadIdx.x; d < a->Dv; d += THREADS) sums[d] = rests[d % 8][d / 8];
    char *const to =
        (char *)x->v8.p + s.batch * x->v8.b + at.h * x->v8.h + (int64_t)(first_chunk(a, &s, at.b) + at.n) * KEYS;
    for (int d = (int)threadIdx.x / 32; d < a->Dv; d += THREADS / 32)
        ((uint32_t *)(to + d * x->v8.row))[threadIdx.x % 32] = words[d][((int)threadIdx.x + turn * (d / 8)) % WORDS];
}

/* Blocks of q, of k, of v. */
DEVICE void write_codes(const fattni_fp8_args *x, call_type type, const uint64_t (*frequency)[CHANNELS / 16],
                        bool integers) {
    extern __shared__ uint32_t words[];
    int number = (int)blockIdx.x;
    const int of_q = x->q_blocks * x->a.Hq * x->a.B, of_k = x->k_blocks * x->a.Hkv * x->a.B;
    if (number < of_q)
        code_rows(x, type, place_of(number, x->a.Hq, x->q_blocks), 1, frequency, integers);
    else if ((number -= of_q) < of_k)
        code_rows(x, type, place_of(number, x->a.Hkv, x->k_blocks), 0, frequency, integers);
    else
        code_values(x, type, place_of(number - of_k, x->a.Hkv, x->chunks), (uint32_t(*)[WORDS])words);
}
extern "C" __global__ void __launch_bounds__(THREADS, 3) fattn_fp8_codes(const __grid_constant__ fattni_fp8_args args) {
    begin_grid();
    const call_type type = type_of(&args);
    if (is_usual(type))
        write_codes(&args, usual_type(), NULL, false);
    else
        write_codes(&args, type, NULL, false);
}
extern "C" __global__ void __launch_bounds__(THREADS, 3)
    fattn_fp8_codes_int8(const __grid_constant__ fattni_fp8_args args) {
    begin_grid();
    write_codes(&args, type_of(&args), NULL, true);
}
extern "C" __global__ void __launch_bounds__(THREADS, 2)
    fattn_fp8_codes_rope(const __grid_constant__ fattni_fp8_args args) {
    begin_grid();
    __shared__ frequencies frequency;
    load_frequencies(frequency, &args);
    write_codes(&args, type_of(&args), frequency, false);
}
extern "C" __global__ void __launch_bounds__(THREADS, 2)
    fattn_fp8_codes_int8_rope(const __grid_constant__ fattni_fp8_args args) {
    begin_grid();
    __shared__ frequencies frequency;
    load_frequencies(frequency, &args);
    write_codes(&args, type_of(&args), frequency, true);
}

/* One CTA per key head of a sequence, a thread per channel: v_mean. */
extern "C" __global__ void __launch_bounds__(VALUES) fattn_fp8_means(const __grid_constant__ fattni_fp8_args args) {
    begin_grid();
    const fattni_fp8_args *const x = &args;
    const fattni_attention_args *const a = &x->a;
    const place at = place_of((int)blockIdx.x, a->Hkv, 1);
    const sequence s = sequence_of(a, at.b);
    const int d = (int)threadIdx.x, chunks = (s.Sk + KEYS - 1) / KEYS;
    if (d >= a->Dv) return;
    const int *const from = rests_of(x, &s, at.b, at.h, 0) + d;
    int64_t rests = 0;
#pragma unroll 8
    for (int n = 0; n < chunks; ++n) rests += from[n * x->partials.row];
    const float scale = ((const float *)x->v_scale.p)[at.b * x->v_scale.b + at.h * x->v_scale.h + d];
    ((float *)x->v_mean.p)[at.b * x->v_mean.b + at.h * x->v_mean.h + d] =
        chunks > 0 ? fattni_fp8_mean(partials_of(x, &s, at.b, at.h, 0)[a->D + d], scale, rests, s.Sk) : 0.0f;
}
