/* Forward attention in F32, one thread per row: a minimal family of kernels. test_new_kernel.sh
   adds it to a copy of the tree.

   S = scale Q K^T, P = exp(S - m), O = P V / l, L = m + ln l, online, one key after the other.

   Tensors     q, o [b,h,i,d], k, v [b,g,j,d], lse [b,h,i]; any strides, d contiguous. Every feature.
   Threads     thread n has row n of the BM = THREADS rows of a CTA.

   Instances: fwd_kernels.def. Macros in: cmake/instance.cu.in. */
#include "core/device/describe.cuh"
#include "core/device/float_types.cuh"
#include "core/device/dropout.cuh"

enum { D = K_D, THREADS = 32 * K_WARPS };
static_assert(K_BM == THREADS && !K_F64, "a row for each thread");

DEVICE real score_of(const fattni_attention_args *a, const sequence *s, int b, int h, int i, int j, real product) {
    real x = a->scale * product;
    if (a->softcap > 0) x = a->softcap * tanhf(x / a->softcap);
    if (a->alibi.p) x -= real_at(&a->alibi, h) * fabsf((real)(i - j + s->diagonal));
    if (a->bias.p) x += ((const real *)a->bias.p)[b * a->bias.b + h * a->bias.h + i * a->bias.row + j * a->bias.column];
    return x;
}

/* Rescales (m, l) and O to a new maximum. */
DEVICE void raise(real *m, real *l, real o[D], real to) {
    const real factor = *m == to ? (real)1 : expf(*m - to);
    *m = to, *l *= factor;
    for (int d = 0; d < D; ++d) o[d] *= factor;
}

extern "C" __global__ void __launch_bounds__(THREADS, K_CTAS)
    K_NAME(const __grid_constant__ fattni_attention_args args) {
    const fattni_attention_args *const a = &args;
    const int blocks = (a->Sq + K_BM - 1) / K_BM, plane = (int)blockIdx.x / blocks;
    const int h = plane % a->Hq, b = plane / a->Hq, i = (int)blockIdx.x % blocks * K_BM + (int)threadIdx.x;
    const sequence s = sequence_of(a, b);
    if (i >= s.Sq) return;
    const dropout_plane random = dropout_plane_of(a, b, h);
    const real *const q = row_at(&a->q, &s, h, s.q0 + i);
    real *const o = row_at(&a->o, &s, h, s.q0 + i), *const lse = row_at(&a->lse, &s, h, s.q0 + i);

    real m = -INFINITY, l = 0, sum[D];
    for (int d = 0; d < D; ++d) sum[d] = 0;
    for (int j = max(0, i + s.lo); j < s.Sk && j <= i + s.hi; ++j) {
        const real *const k = row_at(&a->k, &s, h / a->group, s.k0 + j), *const v =
                                                                             row_at(&a->v, &s, h / a->group, s.k0 + j);
        real product = 0;
        for (int d = 0; d < a->D; ++d) product += q[d] * k[d];
        const real x = score_of(a, &s, b, h, i, j, product);
        if (x > m) raise(&m, &l, sum, x);
        const real p = m == -INFINITY ? (real)0 : expf(x - m);
        l += p;
        for (int d = 0; d < a->Dv; ++d) sum[d] += a->drop_T && !keep_at(a, &random, i, j) ? (real)0 : p * v[d];
    }
    const real sink = a->sink.p ? real_at(&a->sink, h) : -(real)INFINITY;
    if (sink > m) raise(&m, &l, sum, sink);
    if (sink > -INFINITY) l += expf(sink - m);
    const real L = l > 0 ? m + logf(l) : -(real)INFINITY, before = a->flags & FATTN_MERGE ? *lse : -(real)INFINITY;
    const real high = fmaxf(L, before),
               joint = high == -INFINITY ? high : high + logf(expf(L - high) + expf(before - high));
    const real scale = l > 0 ? a->keep_scale / l * share_of(L, joint) : (real)0;
    for (int d = 0; d < a->Dv; ++d)
        o[d] = scale * sum[d] + (before == -INFINITY ? (real)0 : share_of(before, joint) * o[d]);
    *lse = joint;
}

DESCRIBE_KERNEL(fattni_attention_args, 0, 1);
