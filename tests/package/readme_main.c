/* A main for a block of the README, which test_readme.sh puts before this text. */
#include <math.h>
#include <stdlib.h>

#ifdef README_CALL

/* The attention call, whose main is renamed here: compares its results with the definition, in double, for the
   first and the last head. */
#undef main

/* Largest difference from `want`, relative to its largest element. Scores are sums of D = 64 products
   of normal numbers, off by at most 64 x 2^-24 x |q||k| / 8 < 2^-13, and so is P; a wrong mask, scale
   or tensor is off by more than 2^-10. */
static int differs(const char *name, const float *got, const double *want, int count) {
    double most = 0, off = 0;
    for (int e = 0; e < count; ++e) {
        const double apart = fabs(got[e] - want[e]);
        most = fmax(most, fabs(want[e]));
        if (!(apart <= off) && !isnan(off)) off = apart; /* a NaN stays */
    }
    printf("%s: off by %.1e of the largest\n", name, off / most);
    return !(most > 0 && off <= most / 1024);
}

static double dot(const float *x, const float *y) {
    double sum = 0;
    for (int d = 0; d < D; ++d) sum += (double)x[d] * y[d];
    return sum;
}

static int check_head(int head) {
    static double O[S * D], L[S], dQ[S * D], dK[S * D], dV[S * D], P[S], dP[S];
    const int at = head * S * D;
    for (int e = 0; e < S * D; ++e) O[e] = dQ[e] = dK[e] = dV[e] = 0;
    for (int i = 0; i < S; ++i) {
        const float *const qi = q + at + i * D, *const gi = d_o + at + i * D;
        double sum = 0, delta = 0;
        for (int j = 0; j <= i; ++j) sum += exp(dot(qi, k + at + j * D) / 8); /* sqrt(D) */
        L[i] = log(sum);
        for (int j = 0; j <= i; ++j) {
            P[j] = exp(dot(qi, k + at + j * D) / 8 - L[i]);
            dP[j] = dot(gi, v + at + j * D);
            delta += P[j] * dP[j];
            for (int d = 0; d < D; ++d) O[i * D + d] += P[j] * v[at + j * D + d];
        }
        for (int j = 0; j <= i; ++j) {
            const double dS = P[j] * (dP[j] - delta) / 8;
            for (int d = 0; d < D; ++d) {
                dQ[i * D + d] += dS * k[at + j * D + d];
                dK[j * D + d] += dS * qi[d];
                dV[j * D + d] += P[j] * gi[d];
            }
        }
    }
    return differs("o", o + at, O, S * D) || differs("lse", lse + head * S, L, S) ||
           differs("dq", dq + at, dQ, S * D) || differs("dk", dk + at, dK, S * D) || differs("dv", dv + at, dV, S * D);
}

int main(void) {
    const fattn_tensor inputs[] = {view(q, 4), view(k, 4), view(v, 4), view(d_o, 4)};
    fattn_ctx *ctx;
    if (fattn_ctx_create(NULL, &ctx)) return 1;
    for (uint32_t n = 0; n < 4; ++n)
        if (fattn_tensor_normal(ctx, &inputs[n], 0, 1, (fattn_rng){.seed = 1, .stream = n})) return 1;
    fattn_ctx_destroy(ctx);
    return readme_call() || check_head(0) || check_head(B * H - 1);
}

#else

/* The training step: the loss on one batch must fall. */
enum { V = 32, C = H * D, B = 2, S = 16, STEPS = 12, PARAMS = 8 };

static fattn_status make(fattn_ctx *ctx, fattn_param *p, uint32_t stream, int64_t rows, int64_t columns) {
    const int64_t shape[2] = {rows, columns};
    const int ndim = columns ? 2 : 1;
    fattn_status s = fattn_tensor_alloc(ctx, FATTN_F32, ndim, shape, &p->value);
    if (!s) s = fattn_tensor_alloc(ctx, FATTN_F32, ndim, shape, &p->grad);
    if (!s) s = fattn_tensor_normal(ctx, &p->grad, 0, 0, (fattn_rng){0});
    return s ? s
             : fattn_tensor_normal(ctx, &p->value, ndim == 1, ndim == 1 ? 0 : 0.04,
                                   (fattn_rng){.seed = 1, .stream = stream});
}

int main(void) {
    fattn_ctx *ctx;
    fattn_tape *tape;
    fattn_adamw *opt;
    struct model m = {0};
    fattn_param *const params[PARAMS] = {&m.emb, &m.g1, &m.wqkv, &m.wo, &m.g2, &m.wup, &m.wdn, &m.gf};
    static const int64_t shapes[PARAMS][2] = {{V, C}, {C, 0},     {3 * C, C}, {C, C},
                                              {C, 0}, {4 * C, C}, {C, 4 * C}, {C, 0}};
    int32_t ids[B][S], next[B][S];
    for (int b = 0; b < B; ++b)
        for (int i = 0; i < S; ++i) ids[b][i] = (i * i + 3 * b) % V, next[b][i] = (i * 7 + b) % V;
    const fattn_tensor x = fattn_tensor_view(ids, FATTN_I32, FATTN_CPU, 0, 2, (int64_t[]){B, S});
    const fattn_tensor y = fattn_tensor_view(next, FATTN_I32, FATTN_CPU, 0, 2, (int64_t[]){B, S});
    if (fattn_ctx_create(NULL, &ctx) || fattn_tape_create(ctx, &tape)) return 1;
    for (uint32_t i = 0; i < PARAMS; ++i)
        if (make(ctx, params[i], i, shapes[i][0], shapes[i][1])) return 1;
    if (fattn_adamw_create(ctx, NULL, params, PARAMS, &opt)) return 1;
    double first = 0, last = 0;
    for (unsigned step = 0; step < STEPS; ++step) {
        if (train_step(ctx, tape, opt, &m, &x, &y, step)) return 1;
        fattn_tape_reset(tape);
        if (fattn_tape_item(tape, forward(tape, &m, &x, &y), step ? &last : &first)) return 1;
    }
    printf("loss %.3f after the first step, %.3f after the last\n", first, last);
    fattn_adamw_destroy(opt);
    fattn_tape_destroy(tape);
    for (int i = 0; i < PARAMS; ++i) {
        fattn_tensor_free(ctx, &params[i]->value);
        fattn_tensor_free(ctx, &params[i]->grad);
    }
    const size_t leaked = fattn_ctx_mem(ctx).live;
    fattn_ctx_destroy(ctx);
    return leaked || !(last < 0.3 * first);
}

#endif
