/* A kernel for F32 or F64 on the host, one line of a list per program (K_INSTANCE; K_FORWARD: of which), against
   the formulas of fwd/README.md and bwd/README.md in double: tiles, masks, features,
   lengths, deterministic accumulation. What lies beyond a sequence in its buffer is NaN. */
#include "real.h"

#include K_INSTANCE
#include "bwd/cuda/bwd_args.h"
#if K_FORWARD
#define K_HALF 0
#include "parts.h"
#endif

#include <random>
#include <vector>

/* What rows of dS sum to where there is a softcap and keys have a mean: what that adds to dq, and nothing else. */
#define OF_SUMS (K_VARIANT == FATTNI_VARIANT_SUMS)

typedef struct test_case {
    const char *name;
    int B, Hq, Hkv, Sq, Sk, D, Dv, vectors;
    int causal, left, right; /* window: -1 is unbounded */
    float softcap, dropout;
    int alibi, bias, sink, merge, dq_semaphore, padded;
    int length_q[2], length_k[2];
    int mean; /* of every fifth channel of K */
    int far;  /* three of 40 keys have scores of 131072, the others small ones: all are exact */
} test_case;

typedef std::vector<real> reals;
typedef struct problem {
    reals q, k, v, o, lse, d_o, dq, dk, dv, delta, slopes, sinks, bias, d_bias, old_o, old_lse, d_lse;
    std::vector<float> key_mean;
    std::vector<int32_t> key_mean_used;
    std::vector<double> want_o, want_L, want_dq, want_dk, want_dv, want_d_bias;
    std::vector<int32_t> lengths_q, lengths_k, dq_semaphore;
    fattni_bwd_args args; /* forward: its head */
} problem;

static const real UNWRITTEN = 1232;

static real normal(void) {
    static std::mt19937 random(1);
    static std::normal_distribution<double> distribution;
    return (real)distribution(random);
}
/* [B][H][rows][columns], NaN from row lengths[b] on. */
static reals field(int B, int H, int rows, int columns, const std::vector<int32_t> &lengths) {
    reals x;
    for (int n = 0; n < B * H * rows * columns; ++n) {
        const int row = n / columns % rows, b = n / columns / rows / H;
        x.push_back(lengths.empty() || row < lengths[(size_t)b] ? normal() : (real)NAN);
    }
    return x;
}
static fattni_view view_of(reals *x, int H, int rows, int columns) {
    const fattni_view view = {x->data(), (int64_t)H * rows * columns, (int64_t)rows * columns, columns, 1};
    return view;
}

static void set_up(problem *p, const test_case *c) {
    const int B = c->B, Hq = c->Hq, Hkv = c->Hkv, Sq = c->Sq, Sk = c->Sk;
    for (int b = 0; b < B && c->padded; ++b) {
        p->lengths_q.push_back(c->length_q[b]);
        p->lengths_k.push_back(c->length_k[b]);
    }
    p->q = field(B, Hq, Sq, c->D, p->lengths_q), p->d_o = field(B, Hq, Sq, c->Dv, p->lengths_q);
    p->k = field(B, Hkv, Sk, c->D, p->lengths_k), p->v = field(B, Hkv, Sk, c->Dv, p->lengths_k);
    for (size_t n = 0; n < p->q.size() && c->far; ++n) p->q[n] = n % (size_t)c->D == 0;
    for (size_t n = 0; n < p->k.size() && c->far; ++n) {
        const int key = (int)(n / (size_t)c->D) % Sk;
        p->k[n] = n % (size_t)c->D ? 0 : key % 40 < 3 ? 0x1p20 : key % 5;
    }
#if OF_SUMS /* operands that are in TF32 as they are: it would round scores as large as the means */
    for (size_t n = 0; n < p->k.size(); ++n) p->k[n] += n % (size_t)c->D % 5 ? 0 : (real)c->mean;
    for (reals *x : {&p->q, &p->k, &p->v, &p->d_o})
        for (real &y : *x) y = round_tf32(y);
#endif
    p->o.assign(p->d_o.size(), UNWRITTEN), p->lse.assign((size_t)(B * Hq * Sq), UNWRITTEN);
    if (c->merge) {
        for (real &x : p->o) x = normal();
        for (real &x : p->lse) x = normal() > -1 ? 3 + normal() : -(real)INFINITY;
    }
    p->old_o = p->o, p->old_lse = p->lse;
    p->dq.assign(p->q.size(), 0), p->dk.assign(p->k.size(), UNWRITTEN);
    p->dv.assign(p->v.size(), UNWRITTEN), p->delta.assign(p->lse.size(), (real)NAN);
    for (int h = 0; h < Hq; ++h) {
        p->slopes.push_back((real)(0.05 + 0.1 * h));
        p->sinks.push_back((real)(3 - 2 * h));
    }
    p->bias = field(1, Hq, c->bias ? Sq : 0, Sk, {});
    p->d_bias.resize(p->bias.size());
    p->want_o.assign(p->o.begin(), p->o.end()), p->want_L.assign(p->lse.begin(), p->lse.end());
    p->want_dq.resize(p->q.size()), p->want_dk.resize(p->k.size()), p->want_dv.resize(p->v.size());
    p->want_d_bias.resize(p->bias.size());
    p->dq_semaphore.assign((size_t)((Sq + K_BM - 1) / K_BM * Hq * B), 0);

    fattni_bwd_args *const bwd = &p->args;
    fattni_attention_args *const a = &bwd->a;
    memset(bwd, 0, sizeof *bwd);
    a->B = B, a->Hq = Hq, a->Hkv = Hkv, a->group = Hq / Hkv;
    a->Sq = a->rows_q = Sq, a->Sk = a->rows_k = Sk, a->D = c->D, a->Dv = c->Dv;
    a->at_once = 2;
    a->left = c->left < 0 ? FATTNI_FAR : c->left;
    a->right = c->causal ? 0 : c->right < 0 ? FATTNI_FAR : c->right;
    a->scale_f64 = a->scale = c->far ? 0.125f : 1 / sqrtf((float)c->D);
    a->softcap_f64 = a->softcap = c->softcap;
    a->drop_T = (uint32_t)lroundf(32768 * c->dropout);
    a->keep_scale_f64 = a->keep_scale = 32768.0f / (float)(32768 - a->drop_T);
    a->seed = 99, a->rng_heads = (uint32_t)Hq;
    a->vector_qkv = bwd->vector_gradients = c->vectors;
    a->q = view_of(&p->q, Hq, Sq, c->D), bwd->d_o = view_of(&p->d_o, Hq, Sq, c->Dv);
    a->k = view_of(&p->k, Hkv, Sk, c->D), a->v = view_of(&p->v, Hkv, Sk, c->Dv);
    a->o = view_of(&p->o, Hq, Sq, c->Dv), a->lse = view_of(&p->lse, Hq, Sq, 1);
    bwd->dq = view_of(&p->dq, Hq, Sq, c->D);
    bwd->dk = view_of(&p->dk, Hkv, Sk, c->D), bwd->dv = view_of(&p->dv, Hkv, Sk, c->Dv);
    bwd->delta = (float *)p->delta.data(), bwd->row_block = K_BM;
    const fattni_line slopes = {p->slopes.data(), 1}, sinks = {p->sinks.data(), 1},
                      lengths_q = {p->lengths_q.data(), 1}, lengths_k = {p->lengths_k.data(), 1};
    if (c->alibi) a->alibi = slopes;
    if (c->sink) a->sink = sinks;
    if (c->padded) a->seqlens_q = lengths_q, a->seqlens_k = lengths_k;
    if (c->merge) a->flags = FATTN_MERGE;
    if (c->dq_semaphore) bwd->dq_semaphore = p->dq_semaphore.data();
    const fattni_view bias = {p->bias.data(), 0, (int64_t)Sq * Sk, Sk, 1};
    if (c->bias) a->bias = bwd->d_bias = bias, bwd->d_bias.p = p->d_bias.data();
    if (!OF_SUMS) return;
    for (int n = 0; n < B * Hkv * K_D; ++n) p->key_mean.push_back(n % K_D % 5 ? 0 : (float)c->mean);
    p->key_mean_used.assign((size_t)(B * Hkv), 1);
    bwd->key_mean = p->key_mean.data(), bwd->key_mean_used = p->key_mean_used.data(), bwd->key_mean_pitch = K_D;
    p->d_lse = field(B, Hq, Sq, 1, p->lengths_q);
    bwd->d_lse = view_of(&p->d_lse, Hq, Sq, 1), bwd->dbias_scale = 1;
}

/* Row i of (b, h) by the formulas: O and L, and for the backward kernel its share of the gradients,
   L and delta. */
static void expect_row(problem *p, const sequence *s, int b, int h, int i) {
    const fattni_attention_args *const a = &p->args.a;
    const int hk = h / a->group, D = a->D, Dv = a->Dv;
    const size_t row = ((size_t)b * a->Hq + h) * a->Sq + i, keys = ((size_t)b * a->Hkv + hk) * a->Sk;
    const dropout_plane plane = dropout_plane_of(a, b, h);
    const int begin = max(0, i + s->lo), end = min(s->Sk, i + s->hi + 1);
    std::vector<double> score(s->Sk), dp(s->Sk), slope(s->Sk);
    std::vector<int> keep(s->Sk);
    const bool sinks = (K_FORWARD || OF_SUMS) && a->sink.p;
    double top = sinks ? (double)p->sinks[h] : -INFINITY, delta = 0;
    for (int j = begin; j < end; ++j) {
        double x = 0, y = 0;
        for (int d = 0; d < D; ++d) x += (double)p->q[row * D + d] * p->k[(keys + j) * D + d];
        for (int d = 0; d < Dv; ++d) y += (double)p->d_o[row * Dv + d] * p->v[(keys + j) * Dv + d];
        x *= a->scale_f64;
        const double t = a->softcap > 0 ? tanh(x / a->softcap) : 0;
        slope[j] = 1 - t * t;
        if (a->softcap > 0) x = a->softcap * t;
        if (a->alibi.p) x -= p->slopes[h] * fabs((double)(i - j + s->diagonal));
        if (a->bias.p) x += p->bias[((size_t)h * a->Sq + i) * a->Sk + j];
        keep[j] = !a->drop_T || keep_at(a, &plane, i, j);
        dp[j] = keep[j] ? y * a->keep_scale_f64 : 0;
        score[j] = x;
        top = fmax(top, x);
    }
    double sum = sinks ? exp((double)p->sinks[h] - top) : 0;
    for (int j = begin; j < end; ++j) sum += exp(score[j] - top);
    double L = sum > 0 ? top + log(sum) : -INFINITY, weight = sum > 0 ? 1 / sum : 0, old = 0;
    if ((a->flags & FATTN_MERGE) && p->old_lse[row] > -INFINITY) {
        const double before = p->old_lse[row], high = fmax(L, before),
                     both = high + log(exp(L - high) + exp(before - high));
        weight *= exp(L - both), old = exp(before - both), L = both;
    }
    p->want_L[row] = L;
    for (int d = 0; d < Dv; ++d) {
        double x = old > 0 ? old * p->old_o[row * Dv + d] : 0;
        for (int j = begin; j < end; ++j)
            if (keep[j]) x += a->keep_scale_f64 * weight * exp(score[j] - top) * p->v[(keys + j) * Dv + d];
        p->want_o[row * Dv + d] = x;
    }
    if (K_FORWARD) return;
    for (int j = begin; j < end; ++j) delta += exp(score[j] - L) * dp[j];
    if (OF_SUMS) delta -= p->d_lse[row];
    p->lse[row] = (real)L, p->delta[row] = (real)(OF_SUMS ? delta * 1.0625 : delta); /* sums need to be near it only */
    for (int j = begin; j < end; ++j) {
        const double P = exp(score[j] - L), G = P * (dp[j] - delta), dX = G * slope[j];
        if (OF_SUMS) {
            for (int d = 0; d < D; ++d)
                p->want_dq[row * D + d] += a->scale_f64 * dX * p->key_mean[((size_t)b * a->Hkv + hk) * K_D + d];
            continue;
        }
        if (a->bias.p) p->want_d_bias[((size_t)h * a->Sq + i) * a->Sk + j] += G;
        for (int d = 0; d < D; ++d) {
            p->want_dq[row * D + d] += a->scale_f64 * dX * p->k[(keys + j) * D + d];
            p->want_dk[(keys + j) * D + d] += a->scale_f64 * dX * p->q[row * D + d];
        }
        for (int d = 0; d < Dv && keep[j]; ++d)
            p->want_dv[(keys + j) * Dv + d] += P * a->keep_scale_f64 * p->d_o[row * Dv + d];
    }
}

/* Relative to the norm of what is wanted; infinite where a place was written or left wrongly. */
static double difference(const reals &got, const std::vector<double> &want) {
    double off = 0, size = 0;
    for (size_t n = 0; n < want.size(); ++n) {
        if (got[n] == want[n]) continue;
        if (want[n] == (double)UNWRITTEN) return INFINITY;
        off += (got[n] - want[n]) * (got[n] - want[n]), size += want[n] * want[n];
    }
    return sqrt(off / (size > 0 ? size : 1));
}

static const fattni_bwd_args *args_of_run;
#if K_FORWARD
static void run_all(const test_case *, int least_part) {
    const int parts = run_forward(&args_of_run->a, least_part);
    if (least_part) printf("in up to %d parts, ", parts);
}
#else
static void run_kernel(void) { K_NAME(*args_of_run); }
static void run_all(const test_case *c, int) {
    const int by_keys = (c->Sk + K_BN - 1) / K_BN * c->Hkv * c->B, by_rows = (c->Sq + K_BM - 1) / K_BM * c->Hq * c->B;
    gridDim.x = (unsigned)(OF_SUMS ? by_rows : by_keys);
    for (int n = 0; n < (int)gridDim.x; ++n) machine_run(n, 1, 32 * K_WARPS, (unsigned)n, run_kernel);
}
#endif

static int check(const test_case *c, int least_part) {
    problem p;
    set_up(&p, c);
    args_of_run = &p.args;
    for (int b = 0; b < c->B; ++b) {
        const sequence s = sequence_of(&p.args.a, b);
        for (int h = 0; h < c->Hq; ++h)
            for (int i = 0; i < s.Sq; ++i) expect_row(&p, &s, b, h, i);
        for (int h = 0; h < c->Hkv; ++h)
            for (int j = OF_SUMS ? 0 : s.Sk; j < c->Sk; ++j) { /* of OF_SUMS all */
                const size_t row = ((size_t)b * c->Hkv + h) * c->Sk + j;
                for (int d = 0; d < c->D; ++d) p.want_dk[row * c->D + d] = UNWRITTEN;
                for (int d = 0; d < c->Dv; ++d) p.want_dv[row * c->Dv + d] = UNWRITTEN;
            }
    }
    run_all(c, least_part);
    /* TF32 rounds operands to 2^-11; sums in F32 have up to a few hundred terms. */
    const double most = K_F64 ? 1e-14 * c->D : K_TF32 ? 0x1p-9 : 0x1p-24 * 64;
    int good = 1;
    const double errors[] = {
        K_FORWARD ? difference(p.o, p.want_o) : 0,   K_FORWARD ? difference(p.lse, p.want_L) : 0,
        K_FORWARD ? 0 : difference(p.dq, p.want_dq), K_FORWARD ? 0 : difference(p.dk, p.want_dk),
        K_FORWARD ? 0 : difference(p.dv, p.want_dv), K_FORWARD ? 0 : difference(p.d_bias, p.want_d_bias)};
    printf("%s:", c->name);
    for (double e : errors) {
        printf(" %.1e", e);
        good &= e <= most; /* NaN is not */
    }
    printf(" of %.1e: %s\n", most, good ? "ok" : "WRONG");
    return !good;
}

#define CASE(N, B_, HQ, HKV, SQ, SK, D_, DV, VECTORS, C, L, R)                                                         \
    .name = N, .B = B_, .Hq = HQ, .Hkv = HKV, .Sq = SQ, .Sk = SK, .D = D_, .Dv = DV, .vectors = VECTORS, .causal = C,  \
    .left = L, .right = R
static const test_case cases[] = {
#if OF_SUMS
    {CASE("full", 1, 2, 1, 2 * K_BM + 5, 2 * K_BN + 3, K_D, K_D, 1, 0, -1, -1), .softcap = 50, .mean = 100},
    {CASE("causal, odd head, sink", 1, 1, 1, 70, 83, K_D - 7, K_D - 3, 0, 1, -1, -1), .softcap = 5, .sink = 1,
     .mean = 10},
    {CASE("window, dropout", 2, 1, 1, 90, 100, K_D - 8, K_D - 16, 1, 0, 40, 21), .softcap = 50, .dropout = 0.2f,
     .mean = 100},
    {CASE("rows without keys", 1, 1, 1, 100, 40, K_D, K_D, 1, 0, 20, 5), .softcap = 50, .mean = 100},
    {CASE("all", 2, 2, 1, 100, 90, K_D - 8, K_D, 1, 1, 90, -1), .softcap = 3, .dropout = 0.2f, .alibi = 1, .bias = 1,
     .sink = 1, .padded = 1, .length_q = {90, 70}, .length_k = {86, 61}, .mean = 10},
    {CASE("no keys", 2, 1, 1, 40, 30, K_D, K_D, 1, 0, -1, -1), .softcap = 50, .padded = 1, .length_q = {40, 17},
     .length_k = {0, 30}, .mean = 10},
#else
    {CASE("full", 1, 2, 1, 2 * K_BM + 5, 2 * K_BN + 3, K_D, K_D, 1, 0, -1, -1)},
    {CASE("causal, odd head", 1, 1, 1, 70, 83, K_D - 7, K_D - 3, 0, 1, -1, -1)},
    {CASE("window, deterministic", 2, 1, 1, 90, 100, K_D - 8, K_D - 16, 1, 0, 40, 21), .dq_semaphore = 1},
    {CASE("all", 2, 2, 1, 100, 90, K_D - 8, K_D, 1, 1, 90, -1), .softcap = 3, .dropout = 0.2f, .alibi = 1, .bias = 1,
     .sink = K_FORWARD, .merge = K_FORWARD, .dq_semaphore = 1, .padded = 1, .length_q = {90, 70}, .length_k = {86, 61}},
    {CASE("no keys", 2, 1, 1, 40, 30, K_D, K_D, 1, 0, -1, -1), .padded = 1, .length_q = {40, 17}, .length_k = {0, 30}},
#endif
#if K_FORWARD
    {CASE("few rows", 2, 3, 1, 1, 7 * K_BN + 5, K_D, K_D - 4, 1, 1, -1, -1), .merge = 1},
    {CASE("far scores", 1, 2, 2, 20, 6 * K_BN + 5, K_D, K_D, 1, 0, -1, -1), .far = 1},
    {CASE("far scores, sink, merge", 1, 1, 1, 20, 6 * K_BN + 5, K_D, K_D, 1, 1, 3 * K_BN, -1), .sink = 1, .merge = 1,
     .far = 1},
    {CASE("the longest sequence has fewer parts", 2, 32, 1, 1, 16 * K_BN + 1, K_D, K_D, 1, 0, -1, -1), .padded = 1,
     .length_q = {1, 1}, .length_k = {16 * K_BN, 16 * K_BN + 1}},
#endif
};

int main(void) {
    int wrong = 0;
    for (size_t n = 0; n < sizeof cases / sizeof *cases; ++n) {
        wrong += check(&cases[n], 0);
#if K_FORWARD
        if (has_parts(K_NAME)) wrong += check(&cases[n], (n % 2 ? 1 : 2) * K_BN);
#endif
    }
    return wrong != 0;
}
