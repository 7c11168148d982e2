/* A kernel of family sm90_f8 or sm90_i8 on the host, one line of fwd_kernels.def per program (K_INSTANCE), on random
   codes and scales against the formulas of include/fattn/fp8.h in double: layouts, masks, lengths, schedule. Codes that
   lie beyond a sequence are NaN, and so is what v8 has after the columns that are 0. */
#include "fields.h"

#include K_INSTANCE

#define PLAIN (K_VARIANT < FATTNI_VARIANT_BANDED)
#define CAUSAL_VARIANT (K_VARIANT == FATTNI_VARIANT_CAUSAL)

enum { NAN_CODE = 0x7f, CHUNK = 128 };

typedef struct test_case {
    const char *name;
    int B, Hq, Hkv, Sq, Sk, D, Dv;
    int causal, left, right; /* window: -1 is unbounded */
    int sink, q_pos0, top_left;
    int packed, padded;
    int length_q[3], length_k[3];
    int kind;     /* of O: KIND_F16, KIND_BF16 or KIND_F32 */
    float factor; /* of all scores; 0: 1 */
    float growth; /* of scores, from the last key to the first, in units of log2 */
    int far;      /* scores that floats do not resolve, few of them different */
} test_case;

/* [batch][head][row] with rows of `pitch` codes. */
typedef struct codes {
    int batches, heads, rows, D, pitch;
    std::vector<uint8_t> x;
    size_t at(int b, int h, int i, int d) const {
        return (((size_t)b * (size_t)heads + (size_t)h) * (size_t)rows + (size_t)i) * (size_t)pitch + (size_t)d;
    }
    double get(int b, int h, int i, int d) const { return float_of_e4m3.of[x[at(b, h, i, d)]]; }
    double integer(int b, int h, int i, int d) const { return (int8_t)x[at(b, h, i, d)]; }
    double of_qk(int b, int h, int i, int d) const { return INT8 ? integer(b, h, i, d) : get(b, h, i, d); }
} codes;
/* Of q and k. */
static uint8_t code_of(float x) {
    return INT8 ? (uint8_t)(int8_t)rintf(fminf(fmaxf(x, -127.0f), 127.0f)) : (uint8_t)pack_e4m3(x, 0, 0, 0);
}
static codes codes_of(int batches, int heads, int rows, int D, float size, uint8_t (*code)(float)) {
    codes c = {batches, heads, rows, D, (D + 15) / 16 * 16, {}};
    c.x.assign(c.at(batches, 0, 0, 0), NAN_CODE);
    for (int b = 0; b < batches; ++b)
        for (int h = 0; h < heads; ++h)
            for (int i = 0; i < rows; ++i)
                for (int d = 0; d < D; ++d) c.x[c.at(b, h, i, d)] = code(size * normal());
    return c;
}
static CUtensorMap map_of_codes(const codes *c, int columns, int rows) {
    const int64_t head = (int64_t)c->rows * c->pitch;
    const plain_map plain = {(const char *)c->x.data(), c->D, c->rows, c->heads, c->batches, c->pitch, head,
                             head * c->heads,           rows, columns};
    CUtensorMap map;
    memset(&map, 0, sizeof map);
    memcpy(&map, &plain, sizeof plain);
    return map;
}

static const float UNWRITTEN = 1232.0f; /* exact in all types of O */

typedef struct problem {
    codes q, k, v;
    std::vector<float> q_scale, q_shift, k_scale, v_scale, v_mean, sinks, o, lse;
    std::vector<uint16_t> half_o;
    lengths of; /* the sequences */
    int32_t next_tile;
    fattni_fwd_sm90_args args;
} problem;

static size_t row_of(const problem *p, int batch, int h, int row) {
    return ((size_t)batch * (size_t)p->q.heads + (size_t)h) * (size_t)p->q.rows + (size_t)row;
}
/* The column of key j of sequence b. */
static int column_of(const problem *p, const sequence *s, int b, int j) {
    const int first = p->args.a.cu_seqlens_k.p ? s->k0 / CHUNK * CHUNK + CHUNK * b : 0;
    return first + j / 16 * 16 + j % 8 / 2 * 4 + j / 8 % 2 * 2 + j % 2;
}
/* INT8: where key j's scale is. */
static size_t scale_of(const problem *p, const sequence *s, int b, int h, int j) {
    const int first = column_of(p, s, b, 0);
    return ((size_t)s->batch * (size_t)p->k.heads + (size_t)h) * (size_t)(p->v.pitch / KEYS_OF_SCALE) +
           (size_t)((first + j) / KEYS_OF_SCALE);
}
static void randomise(std::vector<float> *x, size_t n, float low, float high) {
    std::uniform_real_distribution<float> draw(low, high);
    for (size_t i = 0; i < n; ++i) x->push_back(draw(generator));
}

static uint8_t e4m3_of(float x) { return (uint8_t)pack_e4m3(x, 0, 0, 0); }

/* Column 0 of the codes gives scores that grow, or all of them. */
static void raise_scores(problem *p, const test_case *c, float k_size) {
    const float largest = INT8 ? 127.0f : 448.0f;
    for (int h = 0; h < c->Hq; ++h)
        for (int i = 0; i < p->q.rows; ++i)
            for (int d = 0; d < (c->far ? c->D : 1); ++d)
                p->q.x[p->q.at(0, h, i, d)] = code_of(d ? 0.0f : c->far ? 1.0f : largest);
    for (int h = 0; h < c->Hkv; ++h)
        for (int j = 0; j < p->k.rows; ++j)
            for (int d = 0; d < (c->far ? c->D : 1); ++d) {
                const float grown = c->growth * (float)(p->k.rows - j) / (float)p->k.rows, code = k_size / largest * 64;
                const float high = c->far == 1   ? (j < 20 ? 16.0f : (float)(j % 3) / (INT8 ? 1 : 8))
                                   : c->far == 2 ? -16.0f - (float)(j % 5)
                                                 : 16.0f - (float)(j / 100);
                const float x = d ? 0.0f : c->far ? high : 0.6931f * grown * sqrtf((float)c->D) * code;
                p->k.x[p->k.at(0, h, j, d)] = code_of(x);
            }
}

static void set_up(problem *p, const test_case *c) {
    const int batches = c->packed ? 1 : c->B;
    int rows_q = c->Sq, rows_k = c->Sk;
    if (c->packed || c->padded) p->of = lengths_of(c->B, c->length_q, c->length_k);
    if (c->packed) rows_q = p->of.cu_q.back() + 5, rows_k = p->of.cu_k.back() + 7;
    const int columns = c->packed ? (rows_k / CHUNK + c->B) * CHUNK : (c->Sk + CHUNK - 1) / CHUNK * CHUNK;
    const float k_size = INT8 ? (c->growth > 0 ? 0.25f : 40.0f) : c->growth > 0 ? 8.0f : 64.0f;
    p->q = codes_of(batches, c->Hq, rows_q, c->D, INT8 ? 40 : 64, code_of);
    p->k = codes_of(batches, c->Hkv, rows_k, c->D, k_size, code_of);
    p->v = codes_of(batches, c->Hkv, c->Dv, columns, 64, e4m3_of);
    if (c->growth > 0 || c->far) raise_scores(p, c, k_size);

    memset(&p->args, 0, sizeof p->args);
    fattni_attention_args *const a = &p->args.a;
    a->B = c->B, a->Hq = c->Hq, a->Hkv = c->Hkv, a->group = c->Hq / c->Hkv;
    a->Sq = c->Sq, a->Sk = c->Sk, a->D = c->D, a->Dv = c->Dv, a->rows_q = rows_q, a->rows_k = rows_k;
    a->left = c->left < 0 ? FATTNI_FAR : c->left;
    a->right = c->causal ? 0 : c->right < 0 ? FATTNI_FAR : c->right;
    a->shift = a->q_pos0 = c->q_pos0;
    a->top_left = c->top_left;
    a->kind = c->kind, a->o_f32 = c->kind == KIND_F32;
    a->vector_qkv = a->o_f32 || c->Dv % 8 == 0;
    a->keep_scale = 1;
    a->scale = (c->factor > 0 ? c->factor : 1) / sqrtf((float)c->D);
    give_lengths(a, &p->of, c->packed, c->padded);

    /* Rows past a sequence: NaN in all that has rows. */
    const size_t rows = row_of(p, batches, 0, 0), heads = (size_t)(c->B * c->Hkv);
    randomise(&p->q_scale, rows, c->far ? 1.0f / 64 : 0.5f / 64, c->far ? 1.0f / 64 : 1.5f / 64);
    randomise(&p->q_shift, rows, -5, 5);
    if (INT8)
        p->k_scale.assign((size_t)(batches * c->Hkv) * (size_t)(columns / KEYS_OF_SCALE), NAN);
    else
        randomise(&p->k_scale, heads, 1 / k_size, 1 / k_size);
    randomise(&p->v_scale, heads * (size_t)c->Dv, 0.5f / 64, 2.0f / 64);
    randomise(&p->v_mean, heads * (size_t)c->Dv, -2, 2);
    for (int h = 0; h < c->Hq; ++h) p->sinks.push_back(3.0f - 2.0f * (float)h);
    std::vector<uint8_t> used(p->v.x.size());
    for (int b = 0; b < c->B; ++b) {
        const sequence s = sequence_of(a, b);
        for (int h = 0; h < c->Hkv; ++h)
            for (int d = 0; d < c->Dv; ++d)
                for (int j = 0; j < max((s.Sk + CHUNK - 1) / CHUNK, 1) * CHUNK; ++j) {
                    const size_t at = p->v.at(s.batch, h, d, column_of(p, &s, b, j));
                    used[at] = 1;
                    if (j >= s.Sk) p->v.x[at] = 0;
                }
        const int groups = max((s.Sk + CHUNK - 1) / CHUNK, 1) * CHUNK / 32;
        std::uniform_real_distribution<float> draw(c->growth > 0 || c->far ? 1.0f : 0.5f,
                                                   c->growth > 0 || c->far ? 1.0f : 1.5f);
        for (int h = 0; h < c->Hkv && INT8; ++h)
            for (int n = 0; n < groups; ++n) {
                float *const of_32 = &p->k_scale[scale_of(p, &s, b, h, 32 * n)];
                for (int e = 0; e < 4; ++e) of_32[e] = e ? of_32[0] : draw(generator) / k_size;
            }
        const int end_q = c->packed ? p->of.cu_q.back() : s.Sq, end_k = c->packed ? p->of.cu_k.back() : s.Sk;
        for (int h = 0; h < c->Hq; ++h)
            for (int i = end_q; i < rows_q; ++i) {
                p->q_scale[row_of(p, s.batch, h, i)] = p->q_shift[row_of(p, s.batch, h, i)] = NAN;
                memset(&p->q.x[p->q.at(s.batch, h, i, 0)], NAN_CODE, (size_t)p->q.pitch);
            }
        for (int h = 0; h < c->Hkv; ++h)
            for (int j = end_k; j < rows_k; ++j)
                memset(&p->k.x[p->k.at(s.batch, h, j, 0)], NAN_CODE, (size_t)p->k.pitch);
    }
    for (size_t n = 0; n < used.size(); ++n)
        if (!used[n]) p->v.x[n] = NAN_CODE;

    p->o.assign(rows * (size_t)c->Dv, UNWRITTEN), p->lse.assign(rows, UNWRITTEN);
    const uint32_t unwritten = c->kind == KIND_BF16 ? pack_bf16(UNWRITTEN, 0) : pack_f16(UNWRITTEN, 0);
    p->half_o.assign(p->o.size(), half_of(unwritten, 0));
    const int64_t plane = (int64_t)rows_q * c->Dv;
    void *const to = a->o_f32 ? (void *)p->o.data() : (void *)p->half_o.data();
    const fattni_view o = {to, batches > 1 ? c->Hq * plane : 0, plane, c->Dv, 1};
    const fattni_view lse = {p->lse.data(), batches > 1 ? (int64_t)c->Hq * rows_q : 0, rows_q, 1, 0};
    a->o = o, a->lse = lse;
    const plain_map places = {
        (const char *)p->half_o.data(), c->Dv, rows_q, c->Hq, batches, 2 * o.row, 2 * o.h, 2 * o.b, 16, 0};
    memcpy(&p->args.o, &places, sizeof places);
    p->args.o_by_tma = !a->o_f32 && c->Dv % 8 == 0;
    p->args.scale_log2 = a->scale * 1.4426950408889634f;
    const fattni_line sinks = {p->sinks.data(), 1};
    if (c->sink) a->sink = sinks;
    const fattni_view q_scale = {p->q_scale.data(), lse.b, lse.h, 1, 0},
                      q_shift = {p->q_shift.data(), lse.b, lse.h, 1, 0},
                      k_scale = {p->k_scale.data(), INT8 ? c->Hkv * columns / KEYS_OF_SCALE : c->Hkv,
                                 INT8 ? columns / KEYS_OF_SCALE : 1, INT8, 0},
                      v_scale = {p->v_scale.data(), c->Hkv * c->Dv, c->Dv, 1, 0},
                      v_mean = {p->v_mean.data(), c->Hkv * c->Dv, c->Dv, 1, 0};
    const fattni_f8_args f8 = {q_scale, q_shift, k_scale, v_scale, v_mean};
    p->args.f8 = f8;

    const int box = K_D < 128 ? K_D : 128, keys = K_BN % 128 == 0 ? 128 : K_BN % 64 == 0 ? 64 : 32;
    p->args.q = map_of_codes(&p->q, box, FATTNI_FWD_SM90_Q_ROWS(K_VARIANT, K_D, K_BM));
    p->args.k = map_of_codes(&p->k, box, K_BN), p->args.v = map_of_codes(&p->v, keys, K_D);
    const fattni_map_step step = {1, batches > 1};
    p->args.q_step = p->args.k_step = p->args.v_step = p->args.o_step = step;
    p->args.schedule.blocks = (c->Sq + K_BM - 1) / K_BM;
    p->args.schedule.planes = c->Hq * c->B;
    p->args.schedule.tiles = p->args.schedule.blocks * p->args.schedule.planes;
    p->args.schedule.head_group = c->B > 1 ? 1 : 2; /* and a last group of two heads at least, or of what is left */
    p->args.order = fattni_fwd_order_of(&p->args.schedule, c->Hq, 1, K_VARIANT != FATTNI_VARIANT_FULL, c->B);
    p->next_tile = 0;
    p->args.schedule.next_tile = &p->next_tile;
}

/* Errors of all O in squares, and what P's rounding leads one to expect of them; the worst element and the worst L, in
   units of their bounds. */
typedef struct errors {
    double off, expected, worst_o, worst_L;
    int rows;
} errors;

/* One row of the formulas against what the kernel stored, which becomes UNWRITTEN again. */
static void compare_row(problem *p, const sequence *s, int b, int h, int i, errors *e) {
    const fattni_attention_args *const a = &p->args.a;
    const int g = h / a->group, row = s->q0 + i, head = b * a->Hkv + g;
    const size_t at = row_of(p, s->batch, h, row), width = (size_t)a->Dv;
    const double q_unit = (double)a->scale * p->q_scale[at], half_unit = a->o_f32               ? 0x1p-22
                                                                         : a->kind == KIND_BF16 ? 0x1p-8
                                                                                                : 0x1p-11;
    const int begin = max(0, i + s->lo), end = min(s->Sk, i + s->hi + 1);
    std::vector<double> score((size_t)max(end, 0)), sums(width), squares(width), sizes(width), all(width);
    double top = -INFINITY, sum = 0, largest_unit = 0;
    for (int j = begin; j < end; ++j) {
        double x = 0;
        for (int d = 0; d < a->D; ++d) x += p->q.of_qk(s->batch, h, row, d) * p->k.of_qk(s->batch, g, s->k0 + j, d);
        const double unit = q_unit * p->k_scale[INT8 ? scale_of(p, s, b, g, j) : (size_t)head];
        largest_unit = fmax(largest_unit, unit);
        score[(size_t)j] = unit * x;
        top = fmax(top, unit * x);
    }
    for (int j = begin; j < end; ++j) {
        const double P = exp(score[(size_t)j] - top);
        sum += P;
        for (size_t d = 0; d < width; ++d) {
            const double v = p->v.get(s->batch, g, (int)d, column_of(p, s, b, j));
            sums[d] += P * v, squares[d] += P * P * v * v, sizes[d] += P * fabs(v), all[d] += fabs(v);
        }
    }
    const double own = sum > 0 ? top + log(sum) + (double)a->scale * p->q_shift[at] : -INFINITY;
    const double sink = a->sink.p ? p->sinks[(size_t)h] : -INFINITY, larger = fmax(own, sink);
    const double L = larger == -INFINITY ? larger : larger + log(exp(own - larger) + exp(sink - larger));
    const double part = sum > 0 ? exp(own - L) : 0;
    for (size_t d = 0; d < width; ++d) {
        const size_t channel = (size_t)head * width + d;
        const double scale = sum > 0 ? part * p->v_scale[channel] / sum : 0;
        const double want = scale * sums[d] + part * p->v_mean[channel], by = fabs(p->o[at * width + d] - want);
        const double bound = scale * (1.01 / 17 * sizes[d] + 0x1p-16 * all[d]) +
                             (half_unit + 0x1p-16) * (fabs(want) + part * fabs(p->v_mean[channel])) + 0x1p-24;
        if (!(by / bound <= e->worst_o)) e->worst_o = by / bound;
        e->off += by * by;
        e->expected += scale * scale * 0.0265 * 0.0265 * squares[d] + half_unit * half_unit * want * want / 3;
        p->o[at * width + d] = UNWRITTEN;
    }
    /* A score is a float sum of D terms and is rounded twice; floats of that size. INT8: what is added to a sum of
       integers, ORIGIN in its unit, is rounded, too. */
    const double rounding = INT8 && fabs(top) < 1e6 ? 2 * largest_unit : 0;
    const double by =
        p->lse[at] == L ? 0 : fabs(p->lse[at] - L) / (32 * 0x1p-24 * fmax(8, fmax(fabs(L), fabs(top))) + rounding);
    if (!(by <= e->worst_L)) e->worst_L = by;
    p->lse[at] = UNWRITTEN;
    ++e->rows;
}

static const fattni_fwd_sm90_args *args_of_run;
static void run_kernel(void) { K_NAME(*args_of_run); }

static int check(const test_case *c) {
    problem p;
    set_up(&p, c);
    args_of_run = &p.args;
    gridDim.x = 2;
    for (int n = 0; n < (int)gridDim.x; ++n) machine_run(n, 1, 32 * K_WARPS, (unsigned)n, run_kernel);
    for (size_t n = 0; n < p.o.size() && c->kind != KIND_F32; ++n)
        p.o[n] = c->kind == KIND_BF16 ? fattni_bf16_to_float(p.half_o[n]) : fattni_f16_to_float(p.half_o[n]);
    errors e = {0, 0, 0, 0, 0};
    for (int b = 0; b < c->B; ++b) {
        const sequence s = sequence_of(&p.args.a, b);
        for (int h = 0; h < c->Hq; ++h)
            for (int i = 0; i < s.Sq; ++i) compare_row(&p, &s, b, h, i, &e);
    }
    int beyond = 0;
    for (float x : p.o) beyond += x != UNWRITTEN;
    for (float x : p.lse) beyond += x != UNWRITTEN;
    /* Weights that are all the same, or of few keys, are not rounded at random. */
    const int random = c->growth == 0 && c->far == 0 && !(c->factor > 0);
    const double most = 1.05 + 3 / sqrt((double)max(e.rows, 1)), off = sqrt(e.off / (e.expected > 0 ? e.expected : 1));
    const int good = e.worst_o <= 1 && e.worst_L <= 1 && (!random || off <= most) && !beyond;
    printf("%s d %d: o %.2f of its bound, all %.2f of what is expected, L %.2f; %d written beyond the end: %s\n",
           c->name, K_D, e.worst_o, off, e.worst_L, beyond, good ? "ok" : "WRONG");
    return !good;
}

#define CASE(N, B_, HQ, HKV, SQ, SK, D_, DV, C, L, R)                                                                  \
    .name = N, .B = B_, .Hq = HQ, .Hkv = HKV, .Sq = SQ, .Sk = SK, .D = D_, .Dv = DV, .causal = C, .left = L, .right = R
static const test_case cases[] = {
#if PLAIN
    {CASE("tiles", 1, 2, 1, 450, 600, K_D, K_D, CAUSAL_VARIANT, -1, -1), .kind = KIND_BF16},
    {CASE("two sequences, short rows", 2, 1, 1, 70, 60, K_D - 8, K_D - 16, CAUSAL_VARIANT, -1, -1)},
    {CASE("more rows than keys", 1, 1, 1, 300, 150, K_D, K_D, CAUSAL_VARIANT, -1, -1), .top_left = 1},
    {CASE("one key", 1, 1, 1, 20, 1, K_D, K_D, CAUSAL_VARIANT, -1, -1), .kind = KIND_BF16},
#else
    {CASE("no feature", 1, 2, 1, 300, 400, K_D, K_D, 0, -1, -1), .kind = KIND_F32},
    {CASE("window, short rows", 1, 1, 1, 300, 370, K_D - 7, K_D - 13, 0, 50, 21), .kind = KIND_BF16},
    {CASE("causal window", 1, 1, 1, 300, 500, K_D, K_D, 1, 130, -1)},
    {CASE("window beyond the keys", 1, 1, 1, 300, 100, K_D, K_D, 0, 20, 10), .kind = KIND_F32},
    {CASE("sink", 1, 2, 1, 140, 200, K_D, K_D, 1, -1, -1), .sink = 1, .kind = KIND_BF16},
    {CASE("packed", 3, 1, 1, 300, 250, K_D, K_D, 1, -1, -1), .packed = 1, .length_q = {300, 0, 33},
     .length_k = {171, 4, 250}, .kind = KIND_BF16},
    {CASE("packed, sink", 3, 2, 1, 200, 350, K_D, K_D - 8, 0, -1, -1), .sink = 1, .packed = 1,
     .length_q = {50, 200, 133}, .length_k = {71, 130, 350}},
    {CASE("no keys", 2, 1, 1, 100, 150, K_D, K_D, 0, -1, -1), .packed = 1, .length_q = {100, 50}, .length_k = {0, 150}},
    {CASE("padded", 2, 2, 1, 300, 250, K_D, K_D, 1, -1, -1), .padded = 1, .length_q = {50, 300}, .length_k = {250, 71},
     .kind = KIND_F32},
    {CASE("far below, window, sink", 1, 1, 1, 200, 300, K_D, K_D, 0, 120, 90), .sink = 1, .factor = 1e11f, .far = 2},
#endif
    {CASE("many tiles of one block", 2, 8, 2, 300, 40, K_D, K_D, CAUSAL_VARIANT, -1, -1)},
    {CASE("large scores", 1, 1, 1, 200, 300, K_D, K_D, CAUSAL_VARIANT, -1, -1), .kind = KIND_BF16, .factor = 20},
    {CASE("scores that grow slowly", 1, 1, 1, 200, 700, K_D, K_D, CAUSAL_VARIANT, -1, -1), .growth = 9},
    {CASE("scores that grow fast", 1, 1, 1, 200, 700, K_D, K_D, CAUSAL_VARIANT, -1, -1), .growth = 50},
    {CASE("far above, the last", 1, 1, 1, 200, 500, K_D, K_D, CAUSAL_VARIANT, -1, -1), .factor = 1e11f, .far = 1},
    {CASE("far below", 1, 1, 1, 200, 300, K_D, K_D, CAUSAL_VARIANT, -1, -1), .factor = 1e11f, .far = 2},
    {CASE("far above, further right", 1, 1, 1, 200, 300, K_D, K_D, CAUSAL_VARIANT, -1, -1), .factor = 1e11f, .far = 3},
};

int main(void) {
    int wrong = 0;
    for (const test_case &c : cases) wrong += check(&c);
    return wrong != 0;
}
