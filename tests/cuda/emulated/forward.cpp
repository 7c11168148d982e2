/* A Hopper forward kernel on the host, one instance per program (K_D, K_MASK, K_BM, K_BN, K_WARPS),
   O and L against the formulas of fwd/README.md in double: layouts, the diagonal, the pipeline over
   tiles. */
#include "fields.h"

#include "fwd/fwd_sm90.cuh"

typedef struct test_case {
    const char *name;
    int B, Hq, Hkv, Sq, Sk, D, top_left;
    float q_factor; /* large scores rise by more than the fast way takes */
} test_case;

/* One row in double: L, and O to o[D]. */
static double expect_row(const field *q, const field *k, const field *v, const fattni_cuda_args *a,
                         int b, int h, int i, double *o) {
    const int hk = h / a->group, last = CAUSAL ? i + diagonal_of(a, a->Sq, a->Sk) : a->Sk - 1;
    std::vector<double> score;
    double top = -INFINITY, sum = 0;
    for (int j = 0; j <= last && j < a->Sk; ++j) {
        double x = 0;
        for (int d = 0; d < a->D; ++d) x += q->get(b, h, i, d) * k->get(b, hk, j, d);
        score.push_back(x * a->scale);
        top = fmax(top, score.back());
    }
    for (int d = 0; d < a->D; ++d) o[d] = 0;
    for (double x : score) sum += exp(x - top);
    for (size_t j = 0; j < score.size(); ++j)
        for (int d = 0; d < a->D; ++d) o[d] += exp(score[j] - top) / sum * v->get(b, hk, (int)j, d);
    return score.empty() ? -INFINITY : top + log(sum);
}

static const fattni_sm90_args *args_of_run;
static void run_kernel(void) { K_NAME(*args_of_run); }

static int check(const test_case *c) {
    field q = random_field(c->B, c->Hq, c->Sq, c->D), k = random_field(c->B, c->Hkv, c->Sk, c->D),
          v = random_field(c->B, c->Hkv, c->Sk, c->D), o = q;
    for (uint16_t &x : q.x) x = half_of(pack_bf16(c->q_factor * value_of(x), 0), 0);
    for (uint16_t &x : o.x) x = NAN_BITS;
    std::vector<float> lse((size_t)(c->B * c->Hq * c->Sq), NAN);
    fattni_sm90_args args;
    memset(&args, 0, sizeof args);
    fattni_cuda_args *const a = &args.a;
    a->B = c->B, a->Hq = c->Hq, a->Hkv = c->Hkv, a->group = c->Hq / c->Hkv;
    a->Sq = c->Sq, a->Sk = c->Sk, a->D = a->Dv = c->D, a->rows_q = c->Sq, a->rows_k = c->Sk;
    a->left = FATTNI_FAR, a->right = CAUSAL ? 0 : FATTNI_FAR, a->top_left = c->top_left;
    a->scale = 1 / sqrtf((float)c->D), a->keep_scale = 1;
    const fattni_view l = {lse.data(), (int64_t)c->Hq * c->Sq, c->Sq, 1, 0};
    a->o = view_of(&o), a->lse = l;
    args.q = map_of(&q, K_BM), args.k = map_of(&k, K_BN), args.v = map_of(&v, K_BN);
    const fattni_map_step step = {1, c->B > 1};
    args.q_step = args.k_step = args.v_step = step;
    int32_t next_tile = 0;
    args.next_tile = &next_tile;
    args.blocks = (c->Sq + K_BM - 1) / K_BM;
    args.tiles = args.blocks * c->Hq * c->B;
    args.section = 2;
    args_of_run = &args;
    gridDim.x = (unsigned)min(2, args.tiles);
    for (unsigned n = 0; n < gridDim.x; ++n) machine_run((int)n, 32 * K_WARPS, n, run_kernel);

    error off = {0, 0};
    double l_off = 0;
    std::vector<double> want((size_t)c->D);
    for (int b = 0; b < c->B; ++b)
        for (int h = 0; h < c->Hq; ++h)
            for (int i = 0; i < c->Sq; ++i) {
                const double L = expect_row(&q, &k, &v, a, b, h, i, want.data());
                const double got =
                    lse[((size_t)b * (size_t)c->Hq + (size_t)h) * (size_t)c->Sq + (size_t)i];
                const double away = got == L ? 0 : fabs(got - L) / fmax(1, fabs(L));
                if (!(away <= l_off)) l_off = away;
                for (int d = 0; d < c->D; ++d) add(&off, o.get(b, h, i, d), want[(size_t)d]);
            }
    /* P is rounded to 2^-9; a score is a sum of at most 256 products in float. */
    const int good = relative(&off) < 0x1p-8 && l_off < 16 * 0x1p-24;
    printf("%s d %d: o %.1e L %.1e: %s\n", c->name, K_D, relative(&off), l_off,
           good ? "ok" : "WRONG");
    return !good;
}

static const test_case cases[] = {
    {"one tile", 1, 1, 1, 37, 50, K_D, 0, 1},
    {"tiles", 1, 2, 1, 300, 290, K_D, 0, 1},
    {"two sequences, short rows", 2, 1, 1, 200, 70, K_D - 8, 0, 1},
    {"more rows than keys", 1, 1, 1, 260, 130, K_D, 1, 1},
    {"large scores", 1, 1, 1, 150, 400, K_D, 0, 40},
};

int main(void) {
    int wrong = 0;
    for (size_t n = 0; n < sizeof cases / sizeof *cases; ++n) wrong += check(&cases[n]);
    return wrong != 0;
}
