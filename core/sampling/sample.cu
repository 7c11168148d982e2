/* fattn_sample on the device: one CTA per row, which walks it once for the largest logit, once for each digit of a
   border, and once for the contest. Threads take fours of tokens, whose random words are one block of Philox. */
#include "core/sampling/sample_args.h"

#include "core/device/any_dtype.cuh"

enum {
    THREADS = FATTNI_SAMPLE_THREADS,
    WARPS = THREADS / 32,
    AHEAD = 4, /* fours that a thread loads before it looks at one */
    BITS = 3,  /* of a digit */
    BINS = 1 << BITS
};

/* Token e of a thread's four number n, counted from the four `first`. */
DEVICE uint32_t token_of(uint32_t first, int n, int e) { return 4 * (first + (uint32_t)n * THREADS) + (uint32_t)e; }

/* F32 or 16 bits, aligned. */
DEVICE void load_four(const fattni_sample *job, int64_t i, float x[4]) {
    if (job->dtype == FATTN_F32) {
        *(float4 *)x = *(const float4 *)((const float *)job->logits + i);
        return;
    }
    const uint2 four = *(const uint2 *)((const uint16_t *)job->logits + i);
    const uint32_t pair[2] = {four.x, four.y};
#pragma unroll
    for (int e = 0; e < 4; ++e) x[e] = load_f32(pair, job->dtype, e);
}

/* x = the logits of fours first, first + THREADS ...; beyond the row it is not written. */
DEVICE void load_fours(const fattni_sample_args *a, int64_t row, uint32_t first, float x[AHEAD][4]) {
    const fattni_sample *const job = &a->job;
    const uint32_t V = (uint32_t)job->V;
#pragma unroll
    for (int n = 0; n < AHEAD; ++n) {
        const uint32_t i = token_of(first, n, 0);
        if (a->fours && i + 4 <= V) {
            load_four(job, row + i, x[n]);
            continue;
        }
#pragma unroll
        for (int e = 0; e < 4; ++e)
            if (i + e < V) x[n][e] = load_f32(job->logits, job->dtype, row + (int64_t)(i + e) * job->stride);
    }
}

DEVICE uint64_t other_lane(uint64_t x, int step) {
    const uint32_t low = __shfl_xor_sync(0xffffffffu, (uint32_t)x, step);
    const uint32_t high = __shfl_xor_sync(0xffffffffu, (uint32_t)(x >> 32), step);
    return (uint64_t)high << 32 | low;
}

/* The likeliest token, to every thread; false: a logit is NaN or infinity, or all are -infinity. */
DEVICE bool find_top(const fattni_sample_args *a, int64_t row, uint64_t *top) {
    __shared__ uint64_t part[WARPS];
    const uint32_t V = (uint32_t)a->job.V;
    uint64_t most = 0;
    int bad = 0;
    float x[AHEAD][4];
    for (uint32_t first = threadIdx.x; 4 * first < V; first += AHEAD * THREADS) {
        load_fours(a, row, first, x);
#pragma unroll
        for (int n = 0; n < AHEAD; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const uint32_t i = token_of(first, n, e);
                if (i >= V) continue;
                const uint64_t place = fattni_sample_place(x[n][e], i);
                bad |= fattni_sample_is_bad(x[n][e]);
                most = place > most ? place : most;
            }
    }
#pragma unroll
    for (int step = 16; step > 0; step /= 2) {
        const uint64_t other = other_lane(most, step);
        most = other > most ? other : most;
    }
    if (threadIdx.x % 32 == 0) part[threadIdx.x / 32] = most;
    bad = __syncthreads_or(bad);
    for (int warp = 0; warp < WARPS; ++warp) most = part[warp] > most ? part[warp] : most;
    *top = most;
    return !bad && fattni_sample_logit(most) > -INFINITY;
}

/* As border_of of sample.c. A thread counts in a column of its own. */
DEVICE uint64_t border_of(const fattni_sample_args *a, int64_t row, float top, uint64_t least, bool by_weight,
                          uint64_t wanted) {
    __shared__ uint64_t column[BINS][THREADS];
    __shared__ uint64_t part[WARPS];
    const fattni_sample *const job = &a->job;
    const uint32_t V = (uint32_t)job->V;
    const int warp = (int)threadIdx.x / 32, lane = (int)threadIdx.x % 32;
    uint64_t border = 0;
    float x[AHEAD][4];
    /* Digits from 29 to 31 down to -1 to 1, of which two bits exist, of each half of a place. */
#pragma unroll 1
    for (int digit = 0; digit < 22; ++digit) {
        const int half = digit < 11 ? 32 : 0, low = 29 - digit % 11 * BITS;
        const int shift = half + (low < 0 ? 0 : low), bits = low < 0 ? BITS - 1 : BITS;
#pragma unroll
        for (int bin = 0; bin < BINS; ++bin) column[bin][threadIdx.x] = 0;
        for (uint32_t first = threadIdx.x; 4 * first < V; first += AHEAD * THREADS) {
            load_fours(a, row, first, x);
#pragma unroll
            for (int n = 0; n < AHEAD; ++n)
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    const uint32_t i = token_of(first, n, e);
                    const uint64_t place = fattni_sample_place(x[n][e], i);
                    if (i >= V || place < least || (place ^ border) >> shift >> bits) continue;
                    column[place >> shift & ((1 << bits) - 1)][threadIdx.x] +=
                        by_weight ? fattni_sample_weight(job, x[n][e], top) : 1;
                }
        }
        __syncthreads();
        uint64_t sum = 0; /* of half of a bin's columns */
#pragma unroll
        for (int n = 0; n < THREADS / 2; n += 32) sum += column[warp / 2][warp % 2 * (THREADS / 2) + n + lane];
#pragma unroll
        for (int step = 16; step > 0; step /= 2) sum += other_lane(sum, step);
        if (lane == 0) part[warp] = sum;
        __syncthreads();
        if (digit == 0 && by_weight) {
            uint64_t all = 0;
            for (int n = 0; n < WARPS; ++n) all += part[n];
            wanted = fattni_sample_part(job, all);
        }
        int bin = (1 << bits) - 1;
        uint64_t amount = part[2 * bin] + part[2 * bin + 1];
        while (amount < wanted) {
            wanted -= amount, bin -= 1;
            amount = part[2 * bin] + part[2 * bin + 1];
        }
        border |= (uint64_t)bin << shift;
        if (amount == wanted) break;
        if (by_weight && shift == 32) { /* all that are left have one weight */
            const uint64_t each = fattni_sample_weight(job, fattni_sample_logit(border), top);
            wanted = (wanted + each - 1) / each, by_weight = false;
        }
    }
    __syncthreads(); /* all have read part */
    return border > least ? border : least;
}

DEVICE int64_t winner_of(const fattni_contest *own) {
    __shared__ double score[WARPS];
    __shared__ int64_t token[WARPS];
    fattni_contest c = *own;
#pragma unroll
    for (int step = 16; step > 0; step /= 2) {
        const double highest = __shfl_xor_sync(0xffffffffu, c.highest, step);
        const int64_t chosen = (int64_t)other_lane((uint64_t)c.chosen, step);
        if (fattni_contest_beats(highest, chosen, &c)) c.highest = highest, c.chosen = chosen;
    }
    if (threadIdx.x % 32 == 0) score[threadIdx.x / 32] = c.highest, token[threadIdx.x / 32] = c.chosen;
    __syncthreads();
    for (int warp = 0; warp < WARPS; ++warp)
        if (fattni_contest_beats(score[warp], token[warp], &c)) c.highest = score[warp], c.chosen = token[warp];
    return c.chosen;
}

DEVICE int64_t choose(const fattni_sample_args *a, int64_t row, uint64_t top_place, int32_t draw) {
    const fattni_sample *const job = &a->job;
    const uint32_t V = (uint32_t)job->V;
    const float top = fattni_sample_logit(top_place);
    fattni_contest c = {-INFINITY, fattni_sample_index(top_place)};
    uint64_t border = 0;
    float x[AHEAD][4];
    if (job->inverse == 0) return c.chosen;
    if (job->top_k < job->V) border = border_of(a, row, top, 0, false, (uint64_t)job->top_k);
    if (job->top_p < 1) border = border_of(a, row, top, border, true, 0);
    for (uint32_t first = threadIdx.x; 4 * first < V; first += AHEAD * THREADS) {
        load_fours(a, row, first, x);
#pragma unroll
        for (int n = 0; n < AHEAD; ++n) {
            const uint32_t i = token_of(first, n, 0);
            uint32_t kept = 0;
#pragma unroll
            for (uint32_t e = 0; e < 4; ++e)
                if (i + e < V && fattni_sample_place(x[n][e], i + e) >= border) kept |= 1u << e;
            if (!kept) continue;
            const fattni_block words = fattni_philox(job->seed, fattni_sample_counter(job, draw, i / 4));
#pragma unroll
            for (uint32_t e = 0; e < 4; ++e)
                if (kept >> e & 1) fattni_contest_enter(&c, fattni_sample_scaled(job, x[n][e], top), words.w[e], i + e);
        }
    }
    return winner_of(&c);
}

extern "C" __global__ void __launch_bounds__(FATTNI_SAMPLE_THREADS)
    fattn_sample_rows(const __grid_constant__ fattni_sample_args a) {
    begin_grid();
    const fattni_sample *const job = &a.job;
    const int64_t b = blockIdx.x, row = b * job->row_stride;
    const int32_t draw = job->draws ? job->draws[b * job->draws_step] : (int32_t)b;
    uint64_t top;
    const bool right = find_top(&a, row, &top);
    const int64_t chosen = right ? choose(&a, row, top, draw) : -1;
    if (threadIdx.x > 0) return;
    job->tokens[b * job->tokens_step] = (int32_t)chosen;
    if (job->draws_after) job->draws_after[b * job->draws_after_step] = (int32_t)((uint32_t)draw + 1);
}
