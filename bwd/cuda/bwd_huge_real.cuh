/* Backward attention of huge rows in F32 and F64 (core/attention/huge.h says which and why): bwd_huge.cuh by fused
   multiply-add. Its tasks and their order; TF32 calls are computed in F32, too.

   Tensors     q, d_o [b,h,i,d], k, v, dk, dv [b,g,j,d], lse [b,h,i]; delta of bwd_preprocess_real.cuh; dq, dk,
               dv are added to.
   Threads     of S: a row's neighbours have keys side by side; of gradients: threads have columns.
   Shared      Q, dO, K, V [EDGE][D + 1], P and dS [EDGE][EDGE + 1], statistics of the rows.

   Instances: bwd_kernels.def. */
#include "core/device/dropout.cuh"
#include "core/attention/huge.h"
#include "core/ptx/acquire.h"
#include "core/ptx/grid.h"
#include "core/device/float_types.cuh"

enum {
    D = K_D, PITCH = D + 1, EDGE = K_BM, THREADS = 32 * K_WARPS, S_PITCH = EDGE + 1,
    PLACES = EDGE * EDGE / THREADS, /* of S, a thread's */
    ACROSS = D < THREADS ? D : THREADS, SUMS = EDGE * D / THREADS /* of a gradient */
};
static_assert(EDGE == K_BN && (EDGE == 16 || EDGE == 32), "a row of S lies in one warp");
static_assert(THREADS % D == 0 && SUMS * THREADS == EDGE * D, "gradients");

/* Per row: m and log l, +inf where the row is not huge, and delta. */
typedef struct tiles {
    real *q, *d_o, *k, *v, *p, *ds, *max, *log_sum, *delta;
} tiles;

/* Element n of S of this thread. */
DEVICE int place_row(int n) { return (int)threadIdx.x / EDGE + n * (THREADS / EDGE); }
DEVICE int place_key(void) { return (int)threadIdx.x % EDGE; }
/* Sum n of a gradient's. */
DEVICE int sum_row(int n) { return (int)threadIdx.x / ACROSS + n * (THREADS / ACROSS); }
DEVICE int sum_column(void) { return (int)threadIdx.x % ACROSS; }

DEVICE void load_tile(real *tile, const real *from, int64_t pitch, int valid, int width) {
    for (int n = (int)threadIdx.x; n < EDGE * D; n += THREADS) {
        const int row = n / D, d = n % D;
        tile[row * PITCH + d] = row < valid && d < width ? from[row * pitch + d] : (real)0;
    }
}
DEVICE void load_rows(const fattni_cuda_args *a, const sequence *s, const tiles *t, int h, int i0) {
    load_tile(t->q, row_at(&a->q, s, h, s->q0 + i0), a->q.row, s->Sq - i0, a->D);
    load_tile(t->d_o, row_at(&a->d_o, s, h, s->q0 + i0), a->d_o.row, s->Sq - i0, a->Dv);
}
DEVICE void load_keys(const fattni_cuda_args *a, const sequence *s, const tiles *t, int hk, int j0) {
    load_tile(t->k, row_at(&a->k, s, hk, s->k0 + j0), a->k.row, s->Sk - j0, a->D);
    load_tile(t->v, row_at(&a->v, s, hk, s->k0 + j0), a->v.row, s->Sk - j0, a->Dv);
}

DEVICE real dot(const real *x, const real *y) {
    real sum = 0;
#pragma unroll 8
    for (int d = 0; d < D; ++d) sum = fma(x[d], y[d], sum);
    return sum;
}

/* Score of row i and key j from its dot product, -inf where the row does not see the key; every step rounded by
   itself, so that the bits are the same wherever this is inlined. steepness: 1 - tanh^2 under a softcap. */
DEVICE real score(real x, real *steepness, const fattni_cuda_args *a, const sequence *s, int b, int h, int i, int j) {
    if (i >= s->Sq || j >= s->Sk || j < i + s->lo || j > i + s->hi) return -(real)INFINITY;
    x = rounded_product(ARG(a, scale), x);
    if (ARG(a, softcap) > 0) {
        const real t = tanh(x / ARG(a, softcap));
        *steepness = 1 - t * t;
        x = rounded_product(ARG(a, softcap), t);
    }
    if (a->alibi.p) x = fma(-real_at(&a->alibi, h), fabs((real)(i - j + s->diagonal)), x);
    if (a->bias.p) x += ((const real *)a->bias.p)[b * a->bias.b + h * a->bias.h + i * a->bias.row + j * a->bias.column];
    return x;
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

/* Whether some row of the block is huge. All threads. */
DEVICE int has_huge_rows(const fattni_cuda_args *a, const sequence *s, int h, int i0) {
    const int i = i0 + (int)threadIdx.x;
    int huge = 0;
    if ((int)threadIdx.x < EDGE && i < s->Sq) {
        const real L = *row_at(&a->lse, s, h, s->q0 + i);
        huge = FATTNI_IS_HUGE(L);
    }
    return __syncthreads_or(huge);
}

/* m and l over all keys, to shared memory and, for the key blocks, to the workspace; the rows' part in dsink. */
DEVICE void find_statistics(const fattni_cuda_args *a, const sequence *s, const tiles *t, int b, int h, int i0,
                            int begin, int end) {
    __shared__ real sinks[EDGE];
    real max[PLACES], sum[PLACES], unused;
    const real sink = a->sink.p ? real_at(&a->sink, h) : -(real)INFINITY;
#pragma unroll
    for (int n = 0; n < PLACES; ++n) max[n] = sink, sum[n] = sink > -(real)INFINITY ? 1 : 0;
    for (int j0 = begin / EDGE * EDGE; j0 < end; j0 += EDGE) {
        __syncthreads(); /* nobody reads the last keys */
        load_keys(a, s, t, h / a->group, j0);
        __syncthreads();
#pragma unroll
        for (int n = 0; n < PLACES; ++n) {
            const real x = score(dot(t->q + place_row(n) * PITCH, t->k + place_key() * PITCH), &unused, a, s, b, h,
                                 i0 + place_row(n), j0 + place_key());
            const real top = fmax(max[n], row_max(x)), base = top == -(real)INFINITY ? (real)0 : top;
            sum[n] = sum[n] * exp(max[n] - base) + row_sum(exp(x - base));
            max[n] = top;
        }
    }
#pragma unroll
    for (int n = 0; n < PLACES; ++n) {
        const int r = place_row(n), i = i0 + r;
        if (place_key() != 0) continue;
        const real L = i < s->Sq ? *row_at(&a->lse, s, h, s->q0 + i) : (real)INFINITY;
        const int counts = FATTNI_IS_HUGE(L) && sum[n] > 0;
        real log_sum = (real)INFINITY, delta = 0;
        if (counts) {
            log_sum = log(sum[n]);
            const real more = L - max[n] - log_sum; /* than rounding: L is of other keys, too */
            if (fabs(more) > fabs(L) * (K_F64 ? (real)FATTNI_HUGE_ROUNDING_F64 : (real)FATTNI_HUGE_ROUNDING_F32)) log_sum += more;
        }
        if (i < s->Sq) {
            const int64_t at = row_number(a, s, h, i);
            delta = ((const real *)a->delta)[at];
            ((real *)a->huge_max)[at] = counts ? max[n] : (real)0, ((real *)a->huge_log_sum)[at] = log_sum;
        }
        t->max[r] = counts ? max[n] : (real)0;
        t->log_sum[r] = log_sum;
        t->delta[r] = delta;
        sinks[r] = counts && a->d_sink.p ? -exp(sink - max[n] - log_sum) * delta : (real)0;
    }
    __syncthreads();
    if (a->d_sink.p && threadIdx.x == 0) {
        real gradient = 0;
        for (int n = 0; n < EDGE; ++n) gradient += sinks[n];
        const int blocks = (a->Sq + EDGE - 1) / EDGE;
        ((real *)a->huge_sink)[((int64_t)h * a->B + b) * blocks + i0 / EDGE] = gradient;
    }
}

/* P, of what dropout keeps, and dS of one tile to shared memory; dbias, if it is to have its part. All threads. */
DEVICE void gradients(const fattni_cuda_args *a, const sequence *s, const tiles *t, int b, int h, int i0, int j0,
                      int with_bias) {
    const dropout_plane plane = dropout_plane_of(a, b, h);
#pragma unroll
    for (int n = 0; n < PLACES; ++n) {
        const int r = place_row(n), c = place_key(), i = i0 + r, j = j0 + c;
        real steepness = 1;
        const real x = score(dot(t->q + r * PITCH, t->k + c * PITCH), &steepness, a, s, b, h, i, j);
        real p = x == -(real)INFINITY ? (real)0 : exp(x - t->max[r] - t->log_sum[r]), g = 0;
        const int kept = !a->drop_T || keep_at(a, &plane, i, j);
        if (p != 0) {
            const real dp = kept ? ARG(a, keep_scale) * dot(t->d_o + r * PITCH, t->v + c * PITCH) : (real)0;
            g = p * (dp - t->delta[r]);
            if (with_bias && a->d_bias.p)
                atomicAdd((real *)a->d_bias.p + b * a->d_bias.b + h * a->d_bias.h + i * a->d_bias.row +
                              j * a->d_bias.column, g);
        }
        t->p[r * S_PITCH + c] = kept ? p : (real)0;
        t->ds[r * S_PITCH + c] = g * steepness;
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

DEVICE void row_block(const fattni_cuda_args *a, const tiles *t, int task) {
    const int blocks = (a->Sq + EDGE - 1) / EDGE, plane = task / blocks, h = plane % a->Hq, b = plane / a->Hq;
    const int i0 = task % blocks * EDGE;
    const sequence s = sequence_of(a, b);
    const int huge = i0 < s.Sq && has_huge_rows(a, &s, h, i0);
    if (threadIdx.x == 0) a->huge_blocks[task] = huge;
    if (!huge) return;
    load_rows(a, &s, t, h, i0);
    __syncthreads();
    const int rows = min(EDGE, s.Sq - i0);
    const int begin = max(0, min(i0 + s.lo, s.Sk)), end = max(0, min(i0 + rows + s.hi, s.Sk));
    find_statistics(a, &s, t, b, h, i0, begin, end);
    if (!a->dq.p && !a->d_bias.p) return;
    real dq[SUMS];
#pragma unroll
    for (int n = 0; n < SUMS; ++n) dq[n] = 0;
    for (int j0 = begin / EDGE * EDGE; j0 < end; j0 += EDGE) {
        __syncthreads(); /* nobody reads the last tiles */
        load_keys(a, &s, t, h / a->group, j0);
        __syncthreads();
        gradients(a, &s, t, b, h, i0, j0, 1);
        for (int c = 0; c < EDGE; ++c)
#pragma unroll
            for (int n = 0; n < SUMS; ++n)
                dq[n] = fma(t->ds[sum_row(n) * S_PITCH + c], t->k[c * PITCH + sum_column()], dq[n]);
    }
    if (a->dq.p) add_rows(dq, &a->dq, &s, h, s.q0 + i0, ARG(a, scale), rows, a->D);
}

DEVICE void key_block(const fattni_cuda_args *a, const tiles *t, int task) {
    const int blocks = (a->Sk + EDGE - 1) / EDGE, plane = task / blocks, hk = plane % a->Hkv, b = plane / a->Hkv;
    const int j0 = task % blocks * EDGE, row_blocks = (a->Sq + EDGE - 1) / EDGE;
    const sequence s = sequence_of(a, b);
    if (j0 >= s.Sk || !(a->dk.p || a->dv.p)) return;
    const int keys = min(EDGE, s.Sk - j0);
    const int begin = max(0, min(j0 - s.hi, s.Sq)), end = max(0, min(j0 + keys - s.lo, s.Sq));
    real dk[SUMS], dv[SUMS];
    int any = 0;
#pragma unroll
    for (int n = 0; n < SUMS; ++n) dk[n] = dv[n] = 0;
    for (int h = hk * a->group; h < (hk + 1) * a->group; ++h)
        for (int block = begin / EDGE; block * EDGE < end; ++block) {
            if (!a->huge_blocks[(b * a->Hq + h) * (int64_t)row_blocks + block]) continue;
            const int i0 = block * EDGE, i = i0 + (int)threadIdx.x;
            __syncthreads(); /* nobody reads the last tiles */
            if (!any) load_keys(a, &s, t, hk, j0);
            any = 1;
            load_rows(a, &s, t, h, i0);
            if ((int)threadIdx.x < EDGE) {
                const int inside = i < s.Sq;
                const int64_t at = inside ? row_number(a, &s, h, i) : 0;
                t->max[threadIdx.x] = inside ? ((const real *)a->huge_max)[at] : (real)0;
                t->log_sum[threadIdx.x] = inside ? ((const real *)a->huge_log_sum)[at] : (real)INFINITY;
                t->delta[threadIdx.x] = inside ? ((const real *)a->delta)[at] : (real)0;
            }
            __syncthreads();
            gradients(a, &s, t, b, h, i0, j0, 0);
            for (int r = 0; r < EDGE; ++r)
#pragma unroll
                for (int n = 0; n < SUMS; ++n) {
                    dk[n] = fma(t->ds[r * S_PITCH + sum_row(n)], t->q[r * PITCH + sum_column()], dk[n]);
                    dv[n] = fma(t->p[r * S_PITCH + sum_row(n)], t->d_o[r * PITCH + sum_column()], dv[n]);
                }
        }
    if (!any) return;
    if (a->dk.p) add_rows(dk, &a->dk, &s, hk, s.k0 + j0, ARG(a, scale), keys, a->D);
    if (a->dv.p) add_rows(dv, &a->dv, &s, hk, s.k0 + j0, ARG(a, keep_scale), keys, a->Dv);
}

extern "C" __global__ void __launch_bounds__(THREADS, K_CTAS)
    K_NAME(const __grid_constant__ fattni_cuda_args a) {
    extern __shared__ __align__(128) unsigned char shared[];
    await_last_grid();
    if (*(volatile const int32_t *)a.huge == 0) return;
    real *const x = (real *)shared, *const s = x + 4 * EDGE * PITCH, *const rows = s + 2 * EDGE * S_PITCH;
    const tiles t = {x, x + EDGE * PITCH, x + 2 * EDGE * PITCH, x + 3 * EDGE * PITCH, s, s + EDGE * S_PITCH,
                     rows, rows + EDGE, rows + 2 * EDGE};
    const int row_tasks = a.B * a.Hq * ((a.Sq + EDGE - 1) / EDGE),
              key_tasks = a.B * a.Hkv * ((a.Sk + EDGE - 1) / EDGE);
    for (;;) {
        __shared__ int claimed;
        __syncthreads();
        if (threadIdx.x == 0) claimed = atomicAdd(a.huge + 1, 1);
        __syncthreads();
        const int task = claimed;
        if (task >= row_tasks + key_tasks) return;
        if (task < row_tasks) {
            row_block(&a, &t, task);
            __threadfence();
            __syncthreads();
            if (threadIdx.x == 0) add_release(a.huge + 2, 1);
            continue;
        }
        if (threadIdx.x == 0)
            while (load_acquire(a.huge + 2) < row_tasks) {}
        __syncthreads();
        key_block(&a, &t, task - row_tasks);
    }
}
