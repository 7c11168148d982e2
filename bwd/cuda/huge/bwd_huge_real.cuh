/* Backward attention of huge rows in F32 and F64 (core/attention/huge.h says which and why): as bwd_huge.cuh, by fused
   multiply-add. TF32 calls are computed in F32, too.

   Tensors     q, d_o [b,h,i,d], k, v, dk, dv [b,g,j,d], lse [b,h,i]; delta of bwd_preprocess_real.cuh; dq, dk,
               dv are added to.
   Threads     of S: a row's neighbours have keys side by side; of gradients: threads have columns.
   Shared      struct shared_memory.

   Instances: bwd_kernels.def. Macros in: cmake/instance.cu.in. */
#include "core/device/describe.cuh"
#include "bwd/cuda/bwd_args.h"
#include "core/device/dropout.cuh"
#include "core/device/float_types.cuh"

enum {
    D = K_D,
    PITCH = D + 1,
    EDGE = K_BM,
    BM = EDGE,
    BN = EDGE,
    THREADS = 32 * K_WARPS,
    S_PITCH = EDGE + 1,
    ELEMENTS = EDGE * EDGE / THREADS, /* elements of S that a thread has */
    ACROSS = D < THREADS ? D : THREADS,
    SUMS = EDGE * D / THREADS /* of a gradient */
};
static_assert(EDGE == K_BN && (EDGE == 16 || EDGE == 32), "a row of S lies in one warp");
static_assert(THREADS % D == 0 && SUMS * THREADS == EDGE * D, "gradients");

typedef struct shared_memory {
    real q[EDGE * PITCH], d_o[EDGE * PITCH], k[EDGE * PITCH], v[EDGE * PITCH], p[EDGE * S_PITCH], ds[EDGE * S_PITCH];
    real max[EDGE], log_sum[EDGE], delta[EDGE]; /* per row: m; log l, +inf where the row is not huge */
} shared_memory;
typedef shared_memory cta_memory;
enum { SHARED_BYTES = sizeof(shared_memory) };

#include "core/device/score_real.cuh"
#include "bwd/cuda/huge/bwd_huge_common.cuh"

/* Element n of S of this thread. */
DEVICE int element_row(int n) { return (int)threadIdx.x / EDGE + n * (THREADS / EDGE); }
DEVICE int element_key(void) { return (int)threadIdx.x % EDGE; }
/* Sum n of this thread's part of a gradient. */
DEVICE int sum_row(int n) { return (int)threadIdx.x / ACROSS + n * (THREADS / ACROSS); }
DEVICE int sum_column(void) { return (int)threadIdx.x % ACROSS; }

DEVICE void load_tile(real *tile, const real *from, int64_t pitch, int valid, int width) {
    for (int n = (int)threadIdx.x; n < EDGE * D; n += THREADS) {
        const int row = n / D, d = n % D;
        tile[row * PITCH + d] = row < valid && d < width ? from[row * pitch + d] : (real)0;
    }
}
DEVICE void load_rows(const fattni_bwd_args *bwd, const sequence *s, cta_memory *m, int h, int i0) {
    const fattni_attention_args *const a = &bwd->a;
    load_tile(m->q, row_at(&a->q, s, h, s->q0 + i0), a->q.row, s->Sq - i0, a->D);
    load_tile(m->d_o, row_at(&bwd->d_o, s, h, s->q0 + i0), bwd->d_o.row, s->Sq - i0, a->Dv);
}
DEVICE void load_keys(const fattni_attention_args *a, const sequence *s, cta_memory *m, int hk, int j0) {
    load_tile(m->k, row_at(&a->k, s, hk, s->k0 + j0), a->k.row, s->Sk - j0, a->D);
    load_tile(m->v, row_at(&a->v, s, hk, s->k0 + j0), a->v.row, s->Sk - j0, a->Dv);
}

DEVICE real dot(const real *x, const real *y) {
    real sum = 0;
#pragma unroll 8
    for (int d = 0; d < D; ++d) sum = fma(x[d], y[d], sum);
    return sum;
}

/* Over the keys of a row of S. */
DEVICE real row_max(real x) {
    for (int step = EDGE / 2; step > 0; step /= 2) x = fmax(x, __shfl_xor_sync(0xffffffffu, x, step));
    return x;
}
DEVICE real row_sum(real x) {
    for (int step = EDGE / 2; step > 0; step /= 2) x += __shfl_xor_sync(0xffffffffu, x, step);
    return x;
}

/* m and l over all keys, to shared memory and, for the key blocks, to the workspace; the rows' part of dsink. */
DEVICE void find_statistics(const fattni_bwd_args *bwd, const sequence *s, cta_memory *m, int b, int h, int i0,
                            int begin, int end) {
    const fattni_attention_args *const a = &bwd->a;
    __shared__ real sinks[EDGE];
    real max[ELEMENTS], sum[ELEMENTS], unused;
    const real sink = a->sink.p ? real_at(&a->sink, h) : -(real)INFINITY;
#pragma unroll
    for (int n = 0; n < ELEMENTS; ++n) max[n] = sink, sum[n] = sink > -(real)INFINITY ? 1 : 0;
    for (int j0 = begin / EDGE * EDGE; j0 < end; j0 += EDGE) {
        __syncthreads(); /* no warp reads the last keys */
        load_keys(a, s, m, h / a->group, j0);
        __syncthreads();
#pragma unroll
        for (int n = 0; n < ELEMENTS; ++n) {
            const real x = score(dot(m->q + element_row(n) * PITCH, m->k + element_key() * PITCH), &unused, a, s, b, h,
                                 i0 + element_row(n), j0 + element_key());
            const real top = fmax(max[n], row_max(x)), base = top == -(real)INFINITY ? (real)0 : top;
            sum[n] = sum[n] * exp(max[n] - base) + row_sum(exp(x - base));
            max[n] = top;
        }
    }
#pragma unroll
    for (int n = 0; n < ELEMENTS; ++n) {
        const int r = element_row(n), i = i0 + r;
        if (element_key() != 0) continue;
        const real L = lse_at(a, s, h, i);
        const int counts = FATTNI_IS_HUGE(L) && sum[n] > 0;
        const real log_sum = counts ? log_sum_of(L, max[n], sum[n]) : (real)INFINITY;
        real delta = 0;
        if (i < s->Sq) {
            const int64_t at = row_number(a, s, h, i);
            delta = ((const real *)bwd->delta)[at];
            ((real *)bwd->huge_max)[at] = counts ? max[n] : (real)0, ((real *)bwd->huge_log_sum)[at] = log_sum;
        }
        m->max[r] = counts ? max[n] : (real)0;
        m->log_sum[r] = log_sum;
        m->delta[r] = delta;
        sinks[r] = counts && bwd->d_sink.p ? -exp(sink - max[n] - log_sum) * delta : (real)0;
    }
    __syncthreads();
    if (bwd->d_sink.p && threadIdx.x == 0) store_sink_part(bwd, b, h, i0, sinks);
}

/* P, of what dropout keeps, and dS of one tile to shared memory; adds to dbias on demand. All threads. */
DEVICE void gradients(const fattni_bwd_args *bwd, const sequence *s, cta_memory *m, int b, int h, int i0, int j0,
                      int with_bias) {
    const fattni_attention_args *const a = &bwd->a;
    const dropout_plane plane = dropout_plane_of(a, b, h);
#pragma unroll
    for (int n = 0; n < ELEMENTS; ++n) {
        const int r = element_row(n), c = element_key(), i = i0 + r, j = j0 + c;
        real dcap = 1;
        const real x = score(dot(m->q + r * PITCH, m->k + c * PITCH), &dcap, a, s, b, h, i, j);
        real p = x == -(real)INFINITY ? (real)0 : exp(x - m->max[r] - m->log_sum[r]), g = 0;
        const int kept = !a->drop_T || keep_at(a, &plane, i, j);
        if (p != 0) {
            const real dp = kept ? ARG(a, keep_scale) * dot(m->d_o + r * PITCH, m->v + c * PITCH) : (real)0;
            g = p * (dp - m->delta[r]);
            if (with_bias && bwd->d_bias.p)
                atomicAdd((real *)bwd->d_bias.p + b * bwd->d_bias.b + h * bwd->d_bias.h + i * bwd->d_bias.row +
                              j * bwd->d_bias.column,
                          g);
        }
        m->p[r * S_PITCH + c] = kept ? p : (real)0;
        m->ds[r * S_PITCH + c] = g * dcap;
    }
    __syncthreads();
}

/* The gradient's rows below `rows` += scale sums. */
DEVICE void add_rows(const real sums[SUMS], const fattni_view *to, const sequence *s, int head, int64_t row, real scale,
                     int rows, int width) {
#pragma unroll
    for (int n = 0; n < SUMS; ++n)
        if (sum_row(n) < rows && sum_column() < width)
            row_at(to, s, head, row + sum_row(n))[sum_column()] += scale * sums[n];
}

DEVICE void row_task(const fattni_bwd_args *bwd, cta_memory *m, int task) {
    const fattni_attention_args *const a = &bwd->a;
    huge_rows work;
    if (!find_huge_rows(bwd, task, &work)) return;
    const int b = work.b, h = work.h, i0 = work.i0, rows = work.rows;
    const sequence s = work.s;
    load_rows(bwd, &s, m, h, i0);
    __syncthreads();
    const interval keys = keys_seen_by(&s, i0, rows);
    find_statistics(bwd, &s, m, b, h, i0, keys.begin, keys.end);
    if (!bwd->dq.p && !bwd->d_bias.p) return;
    real dq[SUMS];
#pragma unroll
    for (int n = 0; n < SUMS; ++n) dq[n] = 0;
    for (int j0 = keys.begin / EDGE * EDGE; j0 < keys.end; j0 += EDGE) {
        __syncthreads(); /* no warp reads the last tiles */
        load_keys(a, &s, m, h / a->group, j0);
        __syncthreads();
        gradients(bwd, &s, m, b, h, i0, j0, 1);
        for (int c = 0; c < EDGE; ++c)
#pragma unroll
            for (int n = 0; n < SUMS; ++n)
                dq[n] = fma(m->ds[sum_row(n) * S_PITCH + c], m->k[c * PITCH + sum_column()], dq[n]);
    }
    if (bwd->dq.p) add_rows(dq, &bwd->dq, &s, h, s.q0 + i0, ARG(a, scale), rows, a->D);
}

DEVICE void key_task(const fattni_bwd_args *bwd, cta_memory *m, int task) {
    const fattni_attention_args *const a = &bwd->a;
    key_block work;
    if (!(bwd->dk.p || bwd->dv.p) || !find_key_block(a, (unsigned)task, EDGE, EDGE, &work)) return;
    const int b = work.b, hk = work.hk, j0 = work.j0, keys = work.keys;
    const row_blocks rows = work.rows;
    const sequence s = work.s;
    real dk[SUMS], dv[SUMS];
    int any = 0;
#pragma unroll
    for (int n = 0; n < SUMS; ++n) dk[n] = dv[n] = 0;
    for (int step = 0; step < rows.steps; ++step) {
        const row_block now = row_block_of(&rows, step);
        const int h = now.h, i0 = now.i0, row = (int)threadIdx.x, inside = i0 + row < s.Sq;
        if (!is_huge(bwd, b, h, i0)) continue;
        __syncthreads(); /* no warp reads the last tiles */
        if (!any) load_keys(a, &s, m, hk, j0);
        any = 1;
        load_rows(bwd, &s, m, h, i0);
        if (row < EDGE) load_statistics(m, bwd, row, inside ? row_number(a, &s, h, i0 + row) : 0, inside);
        __syncthreads();
        gradients(bwd, &s, m, b, h, i0, j0, 0);
        for (int r = 0; r < EDGE; ++r)
#pragma unroll
            for (int n = 0; n < SUMS; ++n) {
                dk[n] = fma(m->ds[r * S_PITCH + sum_row(n)], m->q[r * PITCH + sum_column()], dk[n]);
                dv[n] = fma(m->p[r * S_PITCH + sum_row(n)], m->d_o[r * PITCH + sum_column()], dv[n]);
            }
    }
    if (!any) return;
    if (bwd->dk.p) add_rows(dk, &bwd->dk, &s, hk, s.k0 + j0, ARG(a, scale), keys, a->D);
    if (bwd->dv.p) add_rows(dv, &bwd->dv, &s, hk, s.k0 + j0, ARG(a, keep_scale), keys, a->Dv);
}

extern "C" __global__ void __launch_bounds__(THREADS, K_CTAS) K_NAME(const __grid_constant__ fattni_bwd_args args) {
    extern __shared__ __align__(128) unsigned char SHARED_MEMORY[];
    if (has_tasks(&args)) run_tasks(&args, (shared_memory *)SHARED_MEMORY);
}

DESCRIBE_KERNEL(fattni_bwd_args, SHARED_BYTES, 1);
