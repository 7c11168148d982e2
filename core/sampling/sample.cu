/* fattn_sample on the device: a CTA or a cluster per row, which walks it once for the largest logit, once for each
   digit of a border, and once for the contest; threads that may have its winner walk their part again. Threads take
   fours of tokens, whose random words are one block of Philox. */
#include "core/sampling/sample_args.h"

#include "core/device/any_dtype.cuh"
#include "core/ptx/cluster.h"

enum {
    THREADS = FATTNI_SAMPLE_THREADS,
    WARPS = THREADS / 32,
    AHEAD = FATTNI_SAMPLE_FOURS,
    BITS = 3, /* of a digit */
    BINS = FATTNI_SAMPLE_BINS
};
static_assert(BINS == 1 << BITS && WARPS == 2 * BINS, "half of a bin's columns for each warp");

extern __shared__ __align__(16) unsigned char shared[]; /* fattni_sample_told */

/* All CTAs of the row have told what they had to. */
DEVICE void meet(const fattni_sample_args *a) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
    if (a->cluster > 1) {
        cluster_sync();
        return;
    }
#endif
    __syncthreads();
}
DEVICE const fattni_sample_told *told_by(const fattni_sample_args *a, int rank) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
    if (a->cluster > 1) return (const fattni_sample_told *)cluster_pointer(shared, (uint32_t)rank);
#endif
    return (const fattni_sample_told *)shared;
}

/* The fours of this thread: from the first one of a chunk on, THREADS apart; then of the CTA's next chunk. */
DEVICE uint32_t first_four(const fattni_sample_args *a) {
    return blockIdx.x % (uint32_t)a->cluster * (AHEAD * THREADS) + threadIdx.x;
}
DEVICE uint32_t to_next_chunk(const fattni_sample_args *a) { return (uint32_t)a->cluster * (AHEAD * THREADS); }

/* The first token of a thread's four number n, counted from the four `first`. */
DEVICE uint32_t token_of(uint32_t first, int n) { return 4 * (first + (uint32_t)n * THREADS); }

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
        const uint32_t i = token_of(first, n);
        if (a->fours && i + 4 <= V) {
            load_four(job, row + i, x[n]);
            continue;
        }
#pragma unroll
        for (int e = 0; e < 4; ++e)
            if (i + e < V) x[n][e] = load_f32(job->logits, job->dtype, row + (int64_t)(i + e) * job->stride);
    }
}

/* Calls see(n, i) for each four of this thread: number n of those at once, in x[n], from token i of the row on. Its
   last tokens may be beyond the row. Without `loads` x is what the walk before has left, of a row of one chunk. */
template <typename function>
DEVICE void walk(const fattni_sample_args *a, int64_t row, bool loads, float x[AHEAD][4], function see) {
    const uint32_t V = (uint32_t)a->job.V;
    for (uint32_t first = first_four(a); 4 * first < V; first += to_next_chunk(a)) {
        if (loads) load_fours(a, row, first, x);
#pragma unroll
        for (int n = 0; n < AHEAD; ++n) see(n, token_of(first, n));
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
    walk(a, row, true, x, [&](int n, uint32_t i) {
#pragma unroll
        for (uint32_t e = 0; e < 4; ++e) {
            if (i + e >= V) continue;
            const uint64_t place = fattni_sample_place(x[n][e], i + e);
            bad |= fattni_sample_is_bad(x[n][e]);
            most = place > most ? place : most;
        }
    });
#pragma unroll
    for (int step = 16; step > 0; step /= 2) {
        const uint64_t other = other_lane(most, step);
        most = other > most ? other : most;
    }
    if (threadIdx.x % 32 == 0) part[threadIdx.x / 32] = most;
    bad = __syncthreads_or(bad);
    if (threadIdx.x == 0) {
        fattni_sample_told *const own = (fattni_sample_told *)shared;
        for (int warp = 0; warp < WARPS; ++warp) most = part[warp] > most ? part[warp] : most;
        own->top = most, own->bad = bad;
    }
    meet(a);
    for (int rank = 0; rank < a->cluster; ++rank) {
        const fattni_sample_told *const there = told_by(a, rank);
        most = rank == 0 || there->top > most ? there->top : most;
        bad |= there->bad != 0;
    }
    *top = most;
    return !bad && fattni_sample_logit(most) > -INFINITY;
}

/* As border_of of sample.c. A thread counts in a column of its own. Where it has one chunk, logits and weights stay in
   its registers from digit to digit. */
DEVICE uint64_t border_of(const fattni_sample_args *a, int64_t row, float top, uint64_t least, bool by_weight,
                          uint64_t wanted) {
    __shared__ uint64_t column[BINS][THREADS];
    __shared__ uint64_t part[WARPS], amounts[BINS];
    const fattni_sample *const job = &a->job;
    const uint32_t V = (uint32_t)job->V;
    const int warp = (int)threadIdx.x / 32, lane = (int)threadIdx.x % 32;
    const bool once = (int64_t)V <= a->cluster * FATTNI_SAMPLE_CHUNK;
    uint64_t border = 0, weight[AHEAD][4];
    float x[AHEAD][4];
    /* Digits from 29 to 31 down to -1 to 1, of which two bits exist, of each half of a place. */
#pragma unroll 1
    for (int digit = 0; digit < 22; ++digit) {
        const int half = digit < 11 ? 32 : 0, low = 29 - digit % 11 * BITS;
        const int shift = half + (low < 0 ? 0 : low), bits = low < 0 ? BITS - 1 : BITS;
#pragma unroll
        for (int bin = 0; bin < BINS; ++bin) column[bin][threadIdx.x] = 0;
        const bool is_new = !once || digit == 0;
        walk(a, row, is_new, x, [&](int n, uint32_t i) {
#pragma unroll
            for (uint32_t e = 0; e < 4; ++e) {
                const uint64_t place = fattni_sample_place(x[n][e], i + e);
                if (i + e >= V || place < least || (place ^ border) >> shift >> bits) continue;
                if (by_weight && is_new) weight[n][e] = fattni_sample_weight(job, x[n][e], top);
                column[place >> shift & ((1 << bits) - 1)][threadIdx.x] += by_weight ? weight[n][e] : 1;
            }
        });
        __syncthreads();
        uint64_t sum = 0; /* of half of a bin's columns */
#pragma unroll
        for (int n = 0; n < THREADS / 2; n += 32) sum += column[warp / 2][warp % 2 * (THREADS / 2) + n + lane];
#pragma unroll
        for (int step = 16; step > 0; step /= 2) sum += other_lane(sum, step);
        if (lane == 0) part[warp] = sum;
        __syncthreads();
        if (threadIdx.x < BINS)
            ((fattni_sample_told *)shared)->bins[digit % 2][threadIdx.x] =
                part[2 * threadIdx.x] + part[2 * threadIdx.x + 1];
        meet(a);
        if (threadIdx.x < BINS) {
            uint64_t amount = 0;
            for (int rank = 0; rank < a->cluster; ++rank) amount += told_by(a, rank)->bins[digit % 2][threadIdx.x];
            amounts[threadIdx.x] = amount;
        }
        __syncthreads();
        if (digit == 0 && by_weight) {
            uint64_t all = 0;
            for (int n = 0; n < BINS; ++n) all += amounts[n];
            wanted = fattni_sample_part(job, all);
        }
        int bin = (1 << bits) - 1;
        while (amounts[bin] < wanted) wanted -= amounts[bin--];
        border |= (uint64_t)bin << shift;
        if (amounts[bin] == wanted) break;
        if (by_weight && shift == 32) { /* all that are left have one weight */
            const uint64_t each = fattni_sample_weight(job, fattni_sample_logit(border), top);
            wanted = (wanted + each - 1) / each, by_weight = false;
        }
    }
    meet(a); /* all have read bins and amounts */
    return border > least ? border : least;
}

DEVICE void challenge(fattni_contest *c, double score, int64_t i) {
    if (fattni_contest_beats(score, i, c)) c->highest = score, c->chosen = i;
}

DEVICE int64_t winner_of(const fattni_sample_args *a, const fattni_contest *own) {
    __shared__ double score[WARPS];
    __shared__ int64_t token[WARPS];
    fattni_contest c = *own;
#pragma unroll
    for (int step = 16; step > 0; step /= 2)
        challenge(&c, __shfl_xor_sync(0xffffffffu, c.highest, step), (int64_t)other_lane((uint64_t)c.chosen, step));
    if (threadIdx.x % 32 == 0) score[threadIdx.x / 32] = c.highest, token[threadIdx.x / 32] = c.chosen;
    __syncthreads();
    if (threadIdx.x == 0) {
        fattni_sample_told *const told = (fattni_sample_told *)shared;
        for (int warp = 0; warp < WARPS; ++warp) challenge(&c, score[warp], token[warp]);
        told->highest = c.highest, told->chosen = c.chosen;
    }
    meet(a);
    for (int rank = 0; rank < a->cluster; ++rank) challenge(&c, told_by(a, rank)->highest, told_by(a, rank)->chosen);
    return c.chosen;
}

/* A score that is off by at most a third of slack_of. Near u = 1, -log u is a series: 2^-22, by which the logarithm may
   be off, would be too much of it. */
DEVICE float score_about(float scaled, uint32_t word) {
    const float rest = ((float)~word + 0.5f) * 0x1p-32f; /* 1 - u */
    const float series = rest * (1 + rest * (0.5f + rest * (1 / 3.0f + rest * 0.25f)));
    const float exponential = rest < 0x1p-5f ? series : -LN2 * log2_approx(((float)word + 0.5f) * 0x1p-32f);
    return scaled - LN2 * log2_approx(exponential);
}
DEVICE float slack_of(float score) { return 1e-4f + 1e-5f * fabsf(score); }

DEVICE float most_of_block(float x) {
    __shared__ float part[WARPS];
#pragma unroll
    for (int step = 16; step > 0; step /= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, step));
    if (threadIdx.x % 32 == 0) part[threadIdx.x / 32] = x;
    __syncthreads();
    for (int warp = 0; warp < WARPS; ++warp) x = fmaxf(x, part[warp]);
    return x;
}

/* Gumbel's contest of the tokens from `border` on: first about, then in double by the threads that have one which may
   win. */
DEVICE int64_t hold_contest(const fattni_sample_args *a, int64_t row, float top, uint64_t border, int32_t draw) {
    const fattni_sample *const job = &a->job;
    const uint32_t V = (uint32_t)job->V;
    const bool narrow = job->inverse > 0x1p-100 && job->inverse < 0x1p100; /* F32 has differences times it */
    const float inverse = (float)job->inverse;
    fattni_contest c = {-INFINITY, job->V};
    float x[AHEAD][4], most = -INFINITY, enough = -INFINITY;
#pragma unroll 1
    for (int exact = 0; exact < 2; ++exact) {
        const auto enter = [&](int n, uint32_t i) {
            uint32_t kept = 0;
#pragma unroll
            for (uint32_t e = 0; e < 4; ++e)
                if (i + e < V && fattni_sample_place(x[n][e], i + e) >= border) kept |= 1u << e;
            if (!kept) return;
            const fattni_block words = fattni_philox(job->seed, fattni_sample_counter(job, draw, i / 4));
#pragma unroll
            for (uint32_t e = 0; e < 4; ++e) {
                if (!(kept >> e & 1)) continue;
                const float scaled =
                    narrow ? (x[n][e] - top) * inverse : (float)fattni_sample_scaled(job, x[n][e], top);
                const float score = score_about(scaled, words.w[e]);
                if (!exact)
                    most = fmaxf(most, score);
                else if (score >= enough)
                    fattni_contest_enter(&c, fattni_sample_scaled(job, x[n][e], top), words.w[e], i + e);
            }
        };
        if (most >= enough) walk(a, row, true, x, enter);
        if (exact) break;
        const float highest = most_of_block(most);
        enough = highest - slack_of(highest);
    }
    return winner_of(a, &c);
}

DEVICE int64_t choose(const fattni_sample_args *a, int64_t row, uint64_t top_place, int32_t draw) {
    const fattni_sample *const job = &a->job;
    const float top = fattni_sample_logit(top_place);
    uint64_t border = 0;
    if (job->inverse == 0) return fattni_sample_index(top_place);
    if (job->top_k < job->V) border = border_of(a, row, top, 0, false, (uint64_t)job->top_k);
    if (job->top_p < 1) border = border_of(a, row, top, border, true, 0);
    return hold_contest(a, row, top, border, draw);
}

extern "C" __global__ void __launch_bounds__(FATTNI_SAMPLE_THREADS)
    fattn_sample_rows(const __grid_constant__ fattni_sample_args a) {
    begin_grid();
    const fattni_sample *const job = &a.job;
    const int64_t b = blockIdx.x / (uint32_t)a.cluster, row = b * job->row_stride;
    const int32_t draw = job->draws ? job->draws[b * job->draws_step] : (int32_t)b;
    uint64_t top;
    const bool right = find_top(&a, row, &top);
    const int64_t chosen = right ? choose(&a, row, top, draw) : -1;
    meet(&a); /* all have read draws, and what others told */
    if (threadIdx.x > 0 || blockIdx.x % (uint32_t)a.cluster > 0) return;
    job->tokens[b * job->tokens_step] = (int32_t)chosen;
    if (job->draws_after) job->draws_after[b * job->draws_after_step] = (int32_t)((uint32_t)draw + 1);
}
