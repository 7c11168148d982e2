/* The 8-bit copies on the CPU. All arithmetic is in F32 and in one order, so that a GPU gives the same bits
   (quantize_cuda.c): sums over a chunk's keys in their order, then over chunks; fused only where fmaf says so. */
#include "core/fp8/fp8.h"
#include "core/fp8/rest.h"
#include "core/fp8/rope.h"
#include "core/tensor/philox.h"

#include <math.h>
#include <string.h>

enum {
    CHUNK = FATTNI_FP8_CHUNK,
    SCALED = FATTNI_FP8_SCALED_KEYS,
    WIDTH = FATTNI_MAX_HEAD_DIM,
    ROWS_PER_TASK = 64,
    LANES = 32
};

static const float LARGEST = 448.0f, LARGEST_INTEGER = 127.0f, SMALLEST = 1e-30f; /* codes; of what is scaled */

typedef struct job {
    const fattni_problem *p;
    const fattni_fp8 *to;
    int64_t chunks, blocks;        /* of the longest sequence: of keys, of rows of q */
    bool rotates, integers;        /* FATTN_FP8_HADAMARD, FATTN_FP8_INT8 */
    float sign[WIDTH], root;       /* of the Hadamard matrix, 1 / sqrt(D) */
    uint64_t frequency[WIDTH / 2]; /* with rope_base */
} job;

static void load_row(const fattni_array *a, const fattni_sequence *s, int64_t h, int64_t row, int64_t n, float *x) {
    const void *const from = fattni_at(a, s->batch, h, row);
    const uint16_t *const half = from;
    switch (a->dtype) {
    case FATTN_F32: memcpy(x, from, (size_t)n * sizeof *x); break;
    case FATTN_BF16:
        for (int64_t d = 0; d < n; ++d) x[d] = fattni_bf16_to_float(half[d]);
        break;
    default:
        for (int64_t d = 0; d < n; ++d) x[d] = fattni_f16_to_float(half[d]);
    }
}

/* Pairs (x[i], x[i + D/2]) by the angles of a position. */
static void turn(const job *j, int64_t position, float *x) {
    const int64_t half = j->p->D / 2;
    for (int64_t i = 0; i < half; ++i) {
        const float low = x[i], high = x[i + half];
        float cosine, sine;
        fattni_fp8_angle(position, j->frequency[i], &cosine, &sine);
        x[i] = fattni_fp8_turn_low(low, high, cosine, sine);
        x[i + half] = fattni_fp8_turn_high(low, high, cosine, sine);
    }
}

/* A row of q or k of a sequence, turned and rotated if the call says so. */
static void load_rotated(const job *j, bool of_q, const fattni_sequence *s, int64_t h, int64_t row, float *x) {
    const fattni_problem *const p = j->p;
    const int64_t D = p->D;
    load_row(of_q ? &p->q : &p->k, s, h, (of_q ? s->q0 : s->k0) + row, D, x);
    if (j->to->rope_base > 0) turn(j, p->k_pos0 + (of_q ? s->diagonal : 0) + row, x);
    if (!j->rotates) return;
    for (int64_t d = 0; d < D; ++d) x[d] *= j->sign[d];
    for (int64_t step = 1; step < D; step *= 2)
        for (int64_t i = 0; i < D; i += 2 * step)
            for (int64_t d = i; d < i + step; ++d) {
                const float a_d = x[d], b_d = x[d + step];
                x[d] = a_d + b_d;
                x[d + step] = a_d - b_d;
            }
    for (int64_t d = 0; d < D; ++d) x[d] *= j->root;
}

/* [3][D + Dv] of chunk c of a sequence: sums, minima, maxima. Of the first chunk, once they have been reduced: means
   and what k (once) and v (by channel) are multiplied by. */
static float *partials_of(const job *j, const fattni_sequence *s, int64_t g, int64_t c) {
    return fattni_at(&j->to->partials, s->batch, g, fattni_fp8_first_chunk(j->p, s) + c);
}

/* [Dv] of chunk c, in place of the maxima of v once codes are written: sums of fattni_fp8_rest. */
static int32_t *rests_of(const job *j, const fattni_sequence *s, int64_t g, int64_t c) {
    return (int32_t *)partials_of(j, s, g, c) + 2 * (j->p->D + j->p->Dv) + j->p->D;
}

static void add_row(const float *x, int64_t n, float *sum, float *min, float *max) {
    for (int64_t d = 0; d < n; ++d) {
        sum[d] += x[d];
        min[d] = fminf(min[d], x[d]);
        max[d] = fmaxf(max[d], x[d]);
    }
}

/* Task: a chunk of a key head. */
static void sum_chunk(void *arg, int64_t task, int thread) {
    (void)thread;
    const job *const j = arg;
    const fattni_problem *const p = j->p;
    const int64_t c = task % j->chunks, g = task / j->chunks % p->Hkv, b = task / j->chunks / p->Hkv;
    const fattni_sequence s = fattni_sequence_of(p, b);
    const int64_t end = fattni_min((c + 1) * CHUNK, s.band.Sk), all = p->D + p->Dv;
    if (c * CHUNK >= end) return;
    float *const sum = partials_of(j, &s, g, c), *const min = sum + all, *const max = min + all;
    for (int64_t d = 0; d < all; ++d) sum[d] = 0, min[d] = INFINITY, max[d] = -INFINITY;
    for (int64_t row = c * CHUNK; row < end; ++row) {
        float x[WIDTH];
        load_rotated(j, false, &s, g, row, x);
        add_row(x, p->D, sum, min, max);
        load_row(&p->v, &s, g, s.k0 + row, p->Dv, x);
        add_row(x, p->Dv, sum + p->D, min + p->D, max + p->D);
    }
}

/* Task: scales and means of a key head. */
static void reduce(void *arg, int64_t task, int thread) {
    (void)thread;
    const job *const j = arg;
    const fattni_problem *const p = j->p;
    const int64_t g = task % p->Hkv, b = task / p->Hkv, all = p->D + p->Dv;
    const fattni_sequence s = fattni_sequence_of(p, b);
    float total[2 * WIDTH] = {0}, min[2 * WIDTH], max[2 * WIDTH], k_most = 0;
    for (int64_t d = 0; d < all; ++d) min[d] = INFINITY, max[d] = -INFINITY;
    for (int64_t c = 0; c * CHUNK < s.band.Sk; ++c) {
        const float *const part = partials_of(j, &s, g, c);
        for (int64_t d = 0; d < all; ++d) {
            total[d] += part[d];
            min[d] = fminf(min[d], part[all + d]);
            max[d] = fmaxf(max[d], part[2 * all + d]);
        }
    }
    float *const mean = partials_of(j, &s, g, 0), *const inverse = mean + all;
    const fattni_fp8 *const to = j->to;
    float *const v_scale = (float *)to->v_scale.p + b * to->v_scale.s[0] + g * to->v_scale.s[1];
    for (int64_t d = 0; d < all; ++d) {
        const bool any = s.band.Sk > 0;
        mean[d] = any ? total[d] / (float)s.band.Sk : 0;
        const float most = any ? fmaxf(mean[d] - min[d], max[d] - mean[d]) : 0;
        if (d < p->D) {
            k_most = fmaxf(k_most, most);
            continue;
        }
        const float scaled = fmaxf(most, SMALLEST);
        v_scale[d - p->D] = scaled / LARGEST;
        inverse[d] = LARGEST / scaled;
    }
    if (j->integers) return; /* scales of k come with its codes */
    k_most = fmaxf(k_most, SMALLEST);
    ((float *)to->k_scale.p)[b * to->k_scale.s[0] + g * to->k_scale.s[1]] = k_most / LARGEST;
    inverse[0] = LARGEST / k_most;
}

/* Of a sequence's key j (include/fattn/fp8.h). */
static int64_t column_of(int64_t j) { return j / 16 * 16 + j % 8 / 2 * 4 + j / 8 % 2 * 2 + j % 2; }

/* Codes of a row of q or k, of numbers times `inverse`. */
static void write_row(const job *j, const float *x, float inverse, void *codes) {
    uint8_t *const e4m3 = codes;
    int8_t *const integers = codes;
    if (j->integers)
        for (int64_t d = 0; d < j->p->D; ++d) integers[d] = fattni_float_to_i8(x[d] * inverse);
    else
        for (int64_t d = 0; d < j->p->D; ++d) e4m3[d] = fattni_float_to_e4m3(x[d] * inverse);
}

/* k - mean, up to SCALED rows from `begin` on; their largest magnitude. */
static float center_keys(const job *j, const fattni_sequence *s, int64_t g, int64_t begin, int64_t end,
                         float (*x)[WIDTH]) {
    const float *const mean = partials_of(j, s, g, 0);
    float most = 0;
    for (int64_t row = begin; row < end; ++row, ++x) {
        load_rotated(j, false, s, g, row, *x);
        for (int64_t d = 0; d < j->p->D; ++d) (*x)[d] -= mean[d];
        for (int64_t d = 0; d < j->p->D; ++d) most = fmaxf(most, fabsf((*x)[d]));
    }
    return most;
}

/* A chunk of k. With integers also k_scale, of all its keys, whether they exist or not. */
static void write_keys(const job *j, const fattni_sequence *s, int64_t g, int64_t begin) {
    const fattni_problem *const p = j->p;
    const fattni_array *const scale = &j->to->k_scale;
    const float inverse = partials_of(j, s, g, 0)[p->D + p->Dv];
    for (int64_t row = begin; row < begin + CHUNK; row += SCALED) {
        const int64_t end = fattni_min(row + SCALED, s->band.Sk);
        float x[SCALED][WIDTH];
        const float most = fmaxf(center_keys(j, s, g, row, end, x), SMALLEST);
        for (int64_t i = row; i < end; ++i)
            write_row(j, x[i - row], j->integers ? LARGEST_INTEGER / most : inverse,
                      fattni_at(&j->to->k, s->batch, g, s->k0 + i));
        float *const of_keys = (float *)scale->p + s->batch * scale->s[0] + g * scale->s[1];
        for (int64_t i = row; j->integers && i < row + SCALED; i += FATTNI_FP8_KEYS_OF_SCALE)
            of_keys[fattni_fp8_scale_of(p, s, i)] = most / LARGEST_INTEGER;
    }
}

static void write_chunk(const job *j, int64_t b, int64_t g, int64_t c) {
    const fattni_problem *const p = j->p;
    const fattni_sequence s = fattni_sequence_of(p, b);
    const int64_t begin = c * CHUNK, end = fattni_min(begin + CHUNK, s.band.Sk);
    if (begin >= end && c > 0) return; /* the first chunk of a sequence without keys is 0 */
    const float *const v_mean = partials_of(j, &s, g, 0) + p->D, *const v_inverse = v_mean + p->D + p->Dv;
    int32_t *const rests = rests_of(j, &s, g, c);
    uint8_t v8[WIDTH][CHUNK];
    memset(rests, 0, (size_t)p->Dv * sizeof *rests);
    memset(v8, 0, (size_t)p->Dv * CHUNK);
    write_keys(j, &s, g, begin);
    for (int64_t row = begin; row < end; ++row) {
        float x[WIDTH];
        load_row(&p->v, &s, g, s.k0 + row, p->Dv, x);
        const int64_t column = column_of(row - begin);
        for (int64_t d = 0; d < p->Dv; ++d) {
            const float y = (x[d] - v_mean[d]) * v_inverse[d];
            v8[d][column] = fattni_float_to_e4m3(y);
            rests[d] += fattni_fp8_rest(y, fattni_e4m3_to_float(v8[d][column]));
        }
    }
    const int64_t first = fattni_fp8_first_chunk(p, &s);
    for (int64_t d = 0; d < p->Dv; ++d)
        memcpy((uint8_t *)fattni_at(&j->to->v, s.batch, g, d) + (first + c) * CHUNK, v8[d], CHUNK);
}

/* q.mean, in the order of a warp: each lane has 8 channels, then lanes add in pairs. */
static float shift_of(const float *q, const float *mean, int64_t D) {
    float lane[LANES] = {0}, other[LANES];
    for (int64_t d = 0; d < D; ++d) lane[d / 8] = fmaf(q[d], mean[d], lane[d / 8]);
    for (int step = 1; step < LANES; step *= 2) {
        for (int t = 0; t < LANES; ++t) other[t] = lane[t ^ step];
        for (int t = 0; t < LANES; ++t) lane[t] += other[t];
    }
    return lane[0];
}

static void write_rows(const job *j, int64_t b, int64_t h, int64_t block) {
    const fattni_problem *const p = j->p;
    const fattni_sequence s = fattni_sequence_of(p, b);
    const fattni_array *const scale = &j->to->q_scale, *const shift = &j->to->q_shift;
    const float *const mean = partials_of(j, &s, h / p->group, 0), largest = j->integers ? LARGEST_INTEGER : LARGEST;
    const int64_t end = fattni_min((block + 1) * ROWS_PER_TASK, s.band.Sq);
    for (int64_t i = block * ROWS_PER_TASK; i < end; ++i) {
        const int64_t row = s.q0 + i;
        float x[WIDTH], most = 0;
        load_rotated(j, true, &s, h, i, x);
        for (int64_t d = 0; d < p->D; ++d) most = fmaxf(most, fabsf(x[d]));
        most = fmaxf(most, SMALLEST);
        write_row(j, x, largest / most, fattni_at(&j->to->q, s.batch, h, row));
        /* Integers have no NaN: the scale has that of q and of the keys' mean instead. */
        const float of_mean = shift_of(x, mean, p->D), q_scale = most / largest;
        ((float *)scale->p)[s.batch * scale->s[0] + h * scale->s[1] + row * scale->s[2]] =
            j->integers ? fmaf(0, of_mean, q_scale) : q_scale;
        ((float *)shift->p)[s.batch * shift->s[0] + h * shift->s[1] + row * shift->s[2]] = of_mean;
    }
}

/* Task: a chunk of k and v, or a block of rows of q. */
static void write_codes(void *arg, int64_t task, int thread) {
    (void)thread;
    const job *const j = arg;
    const fattni_problem *const p = j->p;
    const int64_t of_keys = p->B * p->Hkv * j->chunks, n = task - of_keys;
    if (n < 0)
        write_chunk(j, task / j->chunks / p->Hkv, task / j->chunks % p->Hkv, task % j->chunks);
    else
        write_rows(j, n / j->blocks / p->Hq, n / j->blocks % p->Hq, n % j->blocks);
}

/* Task: v_mean of a key head. */
static void write_means(void *arg, int64_t task, int thread) {
    (void)thread;
    const job *const j = arg;
    const fattni_problem *const p = j->p;
    const int64_t g = task % p->Hkv, b = task / p->Hkv;
    const fattni_sequence s = fattni_sequence_of(p, b);
    const fattni_array *const to = &j->to->v_mean, *const scale = &j->to->v_scale;
    float *const v_mean = (float *)to->p + b * to->s[0] + g * to->s[1];
    const float *const v_scale = (float *)scale->p + b * scale->s[0] + g * scale->s[1], *const mean =
                                                                                            partials_of(j, &s, g, 0) +
                                                                                            p->D;
    int64_t rests[WIDTH] = {0};
    for (int64_t c = 0; c * CHUNK < s.band.Sk; ++c)
        for (int64_t d = 0; d < p->Dv; ++d) rests[d] += rests_of(j, &s, g, c)[d];
    for (int64_t d = 0; d < p->Dv; ++d)
        v_mean[d] = s.band.Sk > 0 ? fattni_fp8_mean(mean[d], v_scale[d], rests[d], s.band.Sk) : 0;
}

static void draw_signs(job *j) {
    const fattn_rng *const rng = &j->p->rng;
    for (int64_t d = 0; d < j->p->D; ++d) {
        const fattni_block counter = {{(uint32_t)(d / 128), 0, rng->stream, 0x48414441u}}; /* "HADA" */
        const fattni_block r = fattni_philox(rng->seed, counter);
        j->sign[d] = r.w[d % 128 / 32] >> (d % 32) & 1 ? -1.0f : 1.0f;
    }
    j->root = (float)(1 / sqrt((double)j->p->D));
}

fattn_status fattni_fp8_quantize_cpu(fattn_ctx *ctx, const fattni_problem *p, const fattni_fp8 *to) {
    job j = {.p = p, .to = to, .rotates = p->flags & FATTN_FP8_HADAMARD, .integers = p->flags & FATTN_FP8_INT8};
    j.chunks = fattni_max(fattni_ceil_div(p->Sk, CHUNK), 1), j.blocks = fattni_ceil_div(p->Sq, ROWS_PER_TASK);
    if (j.rotates) draw_signs(&j);
    for (int64_t i = 0; to->rope_base > 0 && i < p->D / 2; ++i)
        j.frequency[i] = fattni_fp8_frequency((double)to->rope_base, i, p->D / 2);
    const int64_t of_keys = p->B * p->Hkv * j.chunks;
    fattni_parallel(ctx, of_keys, sum_chunk, &j);
    fattni_parallel(ctx, p->B * p->Hkv, reduce, &j);
    fattni_parallel(ctx, of_keys + p->B * p->Hq * j.blocks, write_codes, &j);
    fattni_parallel(ctx, p->B * p->Hkv, write_means, &j);
    return FATTN_OK;
}
