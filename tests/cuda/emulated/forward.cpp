/* A forward kernel for 16 bits on the host, one line of fwd_kernels.def per program (K_INSTANCE), against
   the formulas of fwd/README.md in double: layouts, masks, features, lengths, schedule. What lies beyond a
   sequence in its buffer is NaN. */
#include "fields.h"

#include <algorithm>
#include <random>

#include K_INSTANCE

#define FEW (K_VARIANT >= FATTNI_VARIANT_FEW && !STAGED_BIAS && K_VARIANT != FATTNI_VARIANT_PARTS)
#define HOPPER (K_ARCH == 90 && !FEW)
#define ROWS (FEW && K_BM > 16) /* fwd_decode_rows.cuh */
#ifdef FATTNI_DECODE_SHARED
#define DECODE (!ROWS) /* fwd_decode.cuh */
#define ONE_HEAD_DIM 1
#else
#define DECODE 0
#define ONE_HEAD_DIM 0
#endif
#define IN_PARTS (K_VARIANT == FATTNI_VARIANT_PARTS)
#if !HOPPER
#include "core/device/dropout.cuh"
#include "fwd/cuda/fwd_args.h"
#define HAS_BIAS 1
#if !FEW
#define K_HALF 1
#include "parts.h"
#undef IN_PARTS
#define IN_PARTS has_parts(K_NAME)
#endif
#endif

#define TMA_STORES (HOPPER && K_VARIANT < FATTNI_VARIANT_BANDED && FATTNI_FWD_SM90_STAGES_O(K_DV, K_BN))
#define CAUSAL_VARIANT (K_VARIANT == FATTNI_VARIANT_CAUSAL || K_VARIANT == FATTNI_VARIANT_SHORT)

typedef struct test_case {
    const char *name;
    int B, Hq, Hkv, Sq, Sk, D, Dv;
    int causal, left, right; /* window: -1 is unbounded */
    float softcap, dropout;
    int alibi, bias, sink, merge, q_pos0; /* sink 2: NaN */
    int packed, padded;
    int length_q[3], length_k[3];
    float q_factor; /* of all scores */
    int top_left, half_o;
    float growth; /* of scores, from the last key to the first, in units of log2 */
    float peak;   /* of key 3's scores above the others', which are small, in those units; O must be F32 */
    int far;      /* scores that floats do not resolve: far_score */
    int exact;    /* what rounding takes off O is stored, too; P is 1, so that O has no other rounding */
    int opposite; /* q positive and every fifth key negative: low scores without high ones */
    fattni_block_order order;
} test_case;

static const float UNWRITTEN = 1232.0f;
/* Of kernels with a unified maximum: near the scores, and so far above and below that sums leave their range. */
static const float maxima[] = {2, 75, -75};
static float unified_max;

typedef struct problem {
    field q, k, v;
    std::vector<float> slopes, sinks, bias, o, lse, old_o, old_lse;
    std::vector<uint16_t> half_o, half_bias;
    std::vector<int8_t> o_rest;
    lengths of; /* the sequences */
    int32_t next_tile;
    fattni_fwd_sm90_args args;
} problem;

static size_t row_of_o(const problem *p, int batch, int h, int row) {
    return ((size_t)batch * (size_t)p->q.heads + (size_t)h) * (size_t)p->q.rows + (size_t)row;
}

/* Kernels for plain masks that store by the TMA unit know no other way. */
static int is_half(const test_case *c) { return c->half_o || TMA_STORES; }

/* Of all rows alike, before scale; exact in bf16. 1: a few keys, the last that are visited, far above. 2: all far
   below. 3: the first ones far above, others less far. 4: the first ones far below. 5: as 1, further than a plain
   block takes. */
static float far_score(int how, int key, int keys) {
    const float far = 0x1p30f * (1 + (float)(key % 3) / 4), near = (float)(key % 5);
    if (how == 1) return key < 20 ? far / 16 : near;
    if (how == 5) return key < 20 ? far * 64 : near;
    if (how == 2) return -far;
    if (how == 3) return key > keys - 30 ? 2 * far : far;
    return key > keys - 200 ? -far : near;
}

static void set_up(problem *p, const test_case *c) {
    const int batches = c->packed ? 1 : c->B;
    int rows_q = c->Sq, rows_k = c->Sk;
    if (c->packed || c->padded) p->of = lengths_of(c->B, c->length_q, c->length_k);
    if (c->packed) rows_q = p->of.cu_q.back() + 5, rows_k = p->of.cu_k.back() + 7;
    p->q = random_field(batches, c->Hq, rows_q, c->D);
    p->k = random_field(batches, c->Hkv, rows_k, c->D);
    p->v = random_field(batches, c->Hkv, rows_k, c->Dv);
    for (uint16_t &x : p->q.x)
        if (c->q_factor > 0 || c->exact) x = half_of(pack_half((c->exact ? 1e-30f : c->q_factor) * value_of(x), 0), 0);
    for (uint16_t &x : p->q.x)
        if (c->opposite) x &= 0x7fff;
    for (size_t n = 0; n < p->k.x.size(); ++n)
        if (c->opposite && n / (size_t)c->D % 5 == 2)
            p->k.x[n] = half_of(pack_half(-3 * fabsf(value_of(p->k.x[n])), 0), 0);
    /* The blocks are visited from right to left; column 0 of q is 1, and that of k times scale is what is added. */
    const int raised = c->growth > 0 || c->peak > 0;
    for (size_t n = 0; n < p->q.x.size() && raised; n += (size_t)c->D) p->q.x[n] = half_of(pack_half(1, 0), 0);
    for (size_t n = 0; n < p->k.x.size() && raised; n += (size_t)c->D) {
        const size_t key = n / (size_t)c->D % (size_t)rows_k;
        const float more = c->growth * (float)((size_t)rows_k - key) / (float)rows_k + (key == 3 ? c->peak : 0);
        p->k.x[n] = half_of(pack_half(0.6931f * more * sqrtf((float)c->D), 0), 0);
    }
    for (size_t n = 0; n < p->q.x.size() && c->far; ++n) p->q.x[n] = half_of(pack_half(n % (size_t)c->D ? 0 : 1, 0), 0);
    for (size_t n = 0; n < p->k.x.size() && c->far; ++n)
        p->k.x[n] = half_of(
            pack_half(n % (size_t)c->D ? 0 : far_score(c->far, (int)(n / (size_t)c->D) % rows_k, rows_k), 0), 0);
    for (int b = 0; b < batches && (c->packed || c->padded); ++b) {
        spoil_rows(&p->q, b, c->packed ? p->of.cu_q.back() : c->length_q[b]);
        const int end_k = c->packed ? p->of.cu_k.back() : c->length_k[b];
        spoil_rows(&p->k, b, end_k), spoil_rows(&p->v, b, end_k);
    }
    for (int h = 0; h < c->Hq; ++h) {
        p->slopes.push_back(h < 2 ? 0.05f + 0.7f * (float)h : -0.01f);
        p->sinks.push_back(c->sink == 2 ? NAN : 3.0f - 2.0f * (float)h);
    }
    const int special = c->far || c->exact || c->opposite || c->growth > 0 || c->peak > 0; /* scores are chosen */
    for (int n = 0; n < (c->bias ? c->Hq * c->Sq * c->Sk : 0); ++n) p->bias.push_back(special ? 0 : normal());
    const size_t rows = row_of_o(p, batches, 0, 0);
    p->o.assign(rows * (size_t)c->Dv, UNWRITTEN), p->lse.assign(rows, UNWRITTEN);
    if (c->merge) {
        for (float &x : p->o) x = normal();
        for (float &x : p->lse) x = normal() > -1 ? 3 + normal() : -INFINITY;
        for (size_t n = 0; n < rows; ++n)
            if (p->lse[n] == -INFINITY)
                for (int d = 0; d < c->Dv; ++d) p->o[n * (size_t)c->Dv + (size_t)d] = NAN; /* is not read */
    }
    p->old_o = p->o, p->old_lse = p->lse;

    memset(&p->args, 0, sizeof p->args);
    fattni_attention_args *const a = &p->args.a;
    a->B = c->B, a->Hq = c->Hq, a->Hkv = c->Hkv, a->group = c->Hq / c->Hkv;
    a->Sq = c->Sq, a->Sk = c->Sk, a->D = c->D, a->Dv = c->Dv, a->rows_q = rows_q, a->rows_k = rows_k;
    a->left = c->left < 0 ? FATTNI_FAR : c->left;
    a->right = c->causal ? 0 : c->right < 0 ? FATTNI_FAR : c->right;
    a->shift = a->q_pos0 = c->q_pos0;
    a->scale = 1 / sqrtf((float)c->D);
    a->softcap = c->softcap;
    a->drop_T = (uint32_t)lroundf(32768 * c->dropout);
    a->keep_scale = 32768.0f / (float)(32768 - a->drop_T);
    a->seed = 99, a->rng_heads = (uint32_t)c->Hq;
    a->top_left = c->top_left;
    a->vector_qkv = c->D % 8 == 0 && c->Dv % 8 == 0;
    a->q = view_of(&p->q), a->k = view_of(&p->k), a->v = view_of(&p->v);
    const int half = is_half(c);
    a->o_f32 = !half;
    const int64_t plane = (int64_t)rows_q * c->Dv;
    const fattni_view o = {p->o.data(), batches > 1 ? c->Hq * plane : 0, plane, c->Dv, 1};
    const fattni_view lse = {p->lse.data(), batches > 1 ? (int64_t)c->Hq * rows_q : 0, rows_q, 1, 0};
    a->o = o, a->lse = lse;
    p->half_o.assign(p->o.size(), half_of(pack_half(UNWRITTEN, 0), 0)); /* which is exact */
    if (half) a->o.p = p->half_o.data();
    const int64_t pitch = FATTNI_O_REST_PITCH(c->Dv);
    p->o_rest.assign((size_t)(batches * c->Hq * rows_q * pitch), 0);
    for (size_t n = 0; n < p->o_rest.size(); ++n)
        if (n % (size_t)pitch >= (size_t)c->Dv) p->o_rest[n] = 0x55;
    const fattni_view o_rest = {p->o_rest.data(), batches > 1 ? c->Hq * rows_q * pitch : 0, rows_q * pitch, pitch, 1};
    if (c->exact) a->o_rest = o_rest;
    const plain_map places = {
        (const char *)p->half_o.data(), c->Dv, rows_q, c->Hq, batches, 2 * o.row, 2 * o.h, 2 * o.b, 16};
    memcpy(&p->args.o, &places, sizeof places);
    p->args.o_by_tma = half;
    p->args.scale_log2 = a->scale * 1.4426950408889634f;
    const fattni_line slopes = {p->slopes.data(), 1}, sinks = {p->sinks.data(), 1};
    if (c->alibi) a->alibi = slopes;
    if (c->sink) a->sink = sinks;
    give_lengths(a, &p->of, c->packed, c->padded);
    if (c->merge) a->flags = FATTN_MERGE;
    const fattni_view bias = {p->bias.data(), 0, (int64_t)c->Sq * c->Sk, c->Sk, 1};
    if (c->bias) a->bias = bias, a->bias_f32 = 1;
    const fattni_map_step one_batch = {1, 0};
    if (STAGED_BIAS)
        p->args.bias = bias_map_of(&p->bias, &p->half_bias, c->Hq, c->Sq, c->Sk, 64, !special),
        p->args.bias_step = one_batch;

    p->args.q = map_of(&p->q, FATTNI_FWD_SM90_Q_ROWS(K_VARIANT, K_D, K_BM));
    p->args.k = map_of(&p->k, K_BN), p->args.v = map_of(&p->v, K_BN);
    const fattni_map_step step = {1, batches > 1};
    p->args.q_step = p->args.k_step = p->args.v_step = p->args.o_step = step;
    const int blocks = (c->Sq + K_BM - 1) / K_BM;
    if (CAUSAL_VARIANT && half) p->args.keyless = fattni_fwd_keyless(diagonal_of(a, c->Sq, c->Sk), K_BM, blocks);
    p->args.schedule.blocks = blocks - p->args.keyless;
    p->args.schedule.planes = c->Hq * c->B;
    p->args.part_blocks = fattni_divider_of(1 << 20);
    p->args.schedule.tiles = p->args.schedule.blocks * p->args.schedule.planes;
    p->args.schedule.head_group = c->B > 1 ? 1 : 2; /* and a last group of two heads at least, or of what is left */
    p->args.schedule.order = c->order;
    p->args.order = fattni_fwd_order_of(&p->args.schedule, c->Hq, 1, K_VARIANT != FATTNI_VARIANT_FULL, c->B);
    p->next_tile = 0;
    p->args.schedule.next_tile = &p->next_tile;
}

/* One row of the formulas against what the kernel stored, which becomes UNWRITTEN again. */
static void compare_row(problem *p, const sequence *s, int b, int h, int i, error *o, double *worst_L) {
    const fattni_attention_args *const a = &p->args.a;
    const int hk = h / a->group, row = s->q0 + i;
    const dropout_plane plane = dropout_plane_of(a, b, h);
    std::vector<double> want((size_t)a->Dv, 0.0);
    const int begin = max(0, i + s->lo), end = min(s->Sk, i + s->hi + 1);
    std::vector<double> score((size_t)max(end, 0), 0.0);
    double top = a->sink.p ? p->sinks[(size_t)h] : -INFINITY;
    for (int j = begin; j < end; ++j) {
        double x = a->scale * dot(p->q.row(s->batch, h, row), p->k.row(s->batch, hk, s->k0 + j), a->D);
        if (a->softcap > 0) x = a->softcap * tanh(x / a->softcap);
        if (a->alibi.p) x -= p->slopes[(size_t)h] * fabs((double)(i - j + s->diagonal));
        if (a->bias.p) x += p->bias[((size_t)h * (size_t)a->Sq + (size_t)i) * (size_t)a->Sk + (size_t)j];
        score[(size_t)j] = x;
        top = fmax(top, x);
    }
    double sum = a->sink.p ? exp(p->sinks[(size_t)h] - top) : 0;
    for (int j = begin; j < end; ++j) {
        const double P = exp(score[(size_t)j] - top);
        sum += P;
        if (a->drop_T && !keep_at(a, &plane, i, j)) continue;
        add_row(want.data(), a->keep_scale * P, p->v.row(s->batch, hk, s->k0 + j), a->Dv);
    }
    const size_t at = row_of_o(p, s->batch, h, row), first = at * (size_t)a->Dv;
    double L = sum > 0 ? top + log(sum) : -INFINITY, weight = sum > 0 ? 1 / sum : 0, old = 0;
    if ((a->flags & FATTN_MERGE) && p->old_lse[at] > -INFINITY) {
        const double most = fmax(L, p->old_lse[at]), both = most + log(exp(L - most) + exp(p->old_lse[at] - most));
        weight *= exp(L - both), old = exp(p->old_lse[at] - both), L = both;
    }
    for (size_t d = 0; d < want.size(); ++d) {
        add(o, p->o[first + d], weight * want[d] + (old > 0 ? old * p->old_o[first + d] : 0));
        p->o[first + d] = UNWRITTEN;
    }
    const double off = p->lse[at] == L ? 0 : fabs(p->lse[at] - L) / fmax(1, fabs(L));
    if (!(off <= *worst_L)) *worst_L = off;
    p->lse[at] = UNWRITTEN;
}

#if HOPPER
static const fattni_fwd_sm90_args *args_of_run;
static void run_kernel(void) { K_NAME(*args_of_run); }
/* Parts of `part` keys; one fewer than the longest row block has of these, if it has many. CTAs run one after the
   other: parts, which wait for others, in one. */
static int run_all(problem *p, int part) {
    fattni_fwd_sm90_args *const x = &p->args;
    args_of_run = x;
    gridDim.x = part ? 1 : 2;
    std::vector<int32_t> stored;
    std::vector<float> sums;
    std::vector<fattni_part_row> rows;
    if (part) {
        const int keys = (x->a.Sk + part - 1) / part, most = keys > 4 ? keys - 1 : keys,
                  blocks = x->schedule.blocks * x->schedule.planes;
        x->part_blocks = fattni_divider_of(part / K_BN),
        x->order = fattni_fwd_order_of(&x->schedule, x->a.Hq, most, 1, 0);
        x->schedule.tiles *= most;
        stored.resize((size_t)blocks);
        sums.resize((size_t)(blocks * (most - 1) * K_BM * K_DV), NAN);
        rows.resize((size_t)(blocks * most * K_BM), {NAN, NAN, NAN, NAN});
        x->parts_stored = stored.data(), x->part_sums = sums.data(), x->part_rows = rows.data();
        printf("in up to %d parts, ", most);
    }
    for (int n = 0; n < (int)gridDim.x; ++n) machine_run(n, 1, 32 * K_WARPS, (unsigned)n, run_kernel);
    return 1;
}
#elif FEW
#if DECODE
static const fattni_fwd_decode_args *args_of_run;
#elif ROWS
static const fattni_fwd_rows_args *args_of_run;
/* Of k or v, whose batches may be pages. */
static CUtensorMap key_map(const fattni_view *of, int rows, int heads, int batches, int box) {
    const plain_map plain = {(const char *)of->p, K_D, rows, heads, batches, 2 * of->row, 2 * of->h, 2 * of->b, box};
    CUtensorMap map;
    memset(&map, 0, sizeof map);
    memcpy(&map, &plain, sizeof plain);
    return map;
}
#else
static const fattni_fwd_parts_args *args_of_run;
#endif
static void run_kernel(void) { K_NAME(*args_of_run); }
/* As fwd_cuda.c splits keys, with a larger bound of their parts; CTAs run in another order than that of their
   numbers. */
static void run(const problem *p, fattni_fwd_parts_args x) {
    const fattni_attention_args *const a = &p->args.a;
    const int heads = a->alibi.p || a->bias.p || a->drop_T ? 1 : a->group;
    const int per_head = (heads * a->Sq + K_BM - 1) / K_BM, tiles = a->B * a->Hq / heads * per_head;
    static int runs;
#if DECODE /* with one to all parts in a CTA, and CTAs in clusters or not */
    const int most = fattni_decode_most_parts(a->Sk, a->Hq / heads, 1, K_BM, K_D);
    const int several = most > FATTNI_DECODE_SLOTS && a->Hq / heads < FATTNI_DECODE_MANY_HEADS;
    const int is_long = most > FATTNI_DECODE_SLOTS && !several;
    static const int parts_of_cta[] = {2, 16, 3, 2, 8, 5, 4, 7};
    const int each = several ? 1 : parts_of_cta[runs % 8] - !is_long;
    int parts = (most + each - 1) / each;
    x.cluster = several ? (int)FATTNI_DECODE_SLOTS : most > 4 && runs % 3 ? 1 : parts;
    const int results_of_tile = FATTNI_DECODE_GROUPS * min(heads * a->Sq, K_BM) * (K_D + 2);
#elif ROWS /* with one to all parts in an item */
    const int banded = a->left != FATTNI_FAR && a->right != FATTNI_FAR;
    const int keys = banded ? min(a->Sk, a->left + a->right + a->Sq + (int)ALIGNED) : a->Sk;
    const int most = fattni_rows_most_parts(a->Hq / heads),
              most_here = min(most, (keys + FATTNI_ROWS_LEAST - 1) / FATTNI_ROWS_LEAST);
    const int each = min(1 + runs % 4 * (runs % 4), most_here), groups = fattni_rows_most_results(most_here, each);
    const int parts = (most_here + each - 1) / each;
    x.cluster = runs % 3 && parts <= 8 ? parts : 1;
    const int results_of_tile = groups * min(heads * a->Sq, K_BM) * (K_D + 2);
#else
    int parts = a->Sk / fattni_cuda_least_part(K_D) + 1;
    x.cluster = 1;
    while (K_ARCH == 90 && x.cluster < FATTNI_PARTS_ADDED && x.cluster < parts) x.cluster *= 2;
    parts = (parts + x.cluster - 1) / x.cluster * x.cluster;
#endif
    x.tile_heads = fattni_divider_of(heads), x.heads = fattni_divider_of(a->Hq / heads);
    x.tiles = fattni_divider_of(per_head), x.parts = fattni_divider_of(parts);
    x.unified_max = unified_max / a->scale;
    x.rows = min(heads * a->Sq, K_BM), x.width = (a->Dv + 7) / 8 * 8;
    static const int stages[] = {FATTNI_FEW_STAGES_OF_HALF, FATTNI_FEW_STAGES, FATTNI_FEW_STAGES_OF_ONE};
    x.stages = stages[runs++ % 3];
    x.counters = fattni_cuda_parts_counters(parts);
    std::vector<int32_t> arrived((size_t)(tiles * x.counters + tiles));
#if !ONE_HEAD_DIM
    const int results_of_tile = parts * x.rows * (x.width + 2);
#endif
    std::vector<float> results((size_t)(tiles * results_of_tile), NAN);
    x.arrived = arrived.data(), x.results = results.data();
#if DECODE
    const int kept = fattni_decode_keeps(K_D, K_BM, each, x.rows);
    fattni_fwd_decode_args z = {x, (uint32_t)a->k.row * 2, (uint32_t)a->v.row * 2, kept, parts, each};
    z.slots = kept ? most : x.cluster > 1 ? min(most, each * x.cluster) - each : 0;
    z.streams = a->Sk <= 64 && K_BM * K_D <= 1024 ? 4 : 8, z.warps = z.streams == 4 ? 4 : K_WARPS;
    z.prefetch = !x.page_table.p && !a->seqlens_q.p && !a->seqlens_k.p && !a->cu_seqlens_q.p;
    args_of_run = &z;
#elif ROWS
    const int ragged = x.page_table.p || a->seqlens_k.p || a->cu_seqlens_k.p;
    const int rows_k = x.page_table.p ? x.page_mask + 1 : a->rows_k, batches = x.page_table.p ? x.pages : a->B,
              box = x.page_table.p ? min(rows_k, K_BN) : K_BN;
    const CUtensorMap k_map = key_map(&x.a.k, rows_k, a->Hkv, x.a.k.b ? batches : 1, box),
                      v_map = key_map(&x.a.v, rows_k, a->Hkv, x.a.v.b ? batches : 1, box);
    const fattni_map_step step = {1, x.a.k.b != 0};
    fattni_fwd_rows_args z = {k_map, v_map, step, step, x, tiles * parts, each, most, groups, 1 + runs % 7, ragged};
    args_of_run = &z;
    gridDim.x = (unsigned)(x.cluster > 1 ? z.items : max(1, min(z.items, 1 + runs % 3 * 2)));
    for (int n = (int)gridDim.x - x.cluster; n >= 0; n -= x.cluster)
        machine_run(n, x.cluster, 32 * K_WARPS, (unsigned)n, run_kernel);
    if (parts == x.cluster) return;
    z.adds = 1;
    z.x.parts = fattni_divider_of((x.rows * K_D + 4 * FATTNI_ROWS_ADDING - 1) / (4 * FATTNI_ROWS_ADDING));
    for (int n = 0; n < tiles * (int)z.x.parts.by; ++n) machine_run(n, 1, FATTNI_ROWS_ADDING, (unsigned)n, run_kernel);
    return;
#else
    args_of_run = &x;
#endif
    std::vector<int> order((size_t)(tiles * parts / x.cluster));
    for (size_t n = 0; n < order.size(); ++n) order[n] = (int)n * x.cluster;
    std::shuffle(order.begin(), order.end(), std::minstd_rand(7));
#if DECODE
    int threads = 32 * z.warps;
#else
    const int threads = 32 * K_WARPS;
#endif
    for (int n : order) machine_run(n, x.cluster, threads, (unsigned)n, run_kernel);
#if DECODE
    z.adds = 1, z.warps = 2, threads = 64;
    z.x.parts = fattni_divider_of((x.rows * K_D + 255) / 256);
    if (parts > x.cluster)
        for (int n = 0; n < tiles * (int)z.x.parts.by; ++n) machine_run(n, 1, threads, (unsigned)n, run_kernel);
#endif
}

/* The same keys in pages of 16 << log2, in any order; what no sequence uses is NaN, and pages that it lacks are -1. */
struct pages {
    std::vector<uint16_t> k, v;
    std::vector<int32_t> table;
    fattni_fwd_parts_args args;
    pages(problem *p, int log2) : args{p->args.a} {
        fattni_attention_args *const a = &args.a;
        const int page = 16 << log2, each = (a->Sk + page - 1) / page, count = a->B * each + 3;
        const uint16_t nan = half_of(pack_half(NAN, 0), 0);
        k.assign((size_t)count * (size_t)(a->Hkv * page * a->D), nan);
        v.assign((size_t)count * (size_t)(a->Hkv * page * a->Dv), nan);
        table.assign((size_t)(a->B * each), -1);
        std::vector<int> places((size_t)count);
        for (size_t n = 0; n < places.size(); ++n) places[n] = (int)n;
        std::shuffle(places.begin(), places.end(), std::minstd_rand(5));
        for (int b = 0; b < a->B; ++b)
            for (int j = 0; j < sequence_of(a, b).Sk; ++j) {
                const int64_t at = table[(size_t)(b * each + j / page)] = places[(size_t)(b * each + j / page)];
                for (int g = 0; g < a->Hkv; ++g) {
                    const int64_t to = (at * a->Hkv + g) * page + j % page;
                    const int64_t in_k = b * a->k.b + g * a->k.h + j * a->k.row;
                    const int64_t in_v = b * a->v.b + g * a->v.h + j * a->v.row;
                    std::copy_n((const uint16_t *)a->k.p + in_k, a->D, k.begin() + to * a->D);
                    std::copy_n((const uint16_t *)a->v.p + in_v, a->Dv, v.begin() + to * a->Dv);
                }
            }
        const fattni_view rows = {table.data(), each, 1, 0, 0};
        args.page_table = rows, args.pages = count, args.page_log2 = 4 + log2, args.page_mask = page - 1;
        const fattni_view of_k = {k.data(), (int64_t)a->Hkv * page * a->D, (int64_t)page * a->D, a->D, 1};
        const fattni_view of_v = {v.data(), (int64_t)a->Hkv * page * a->Dv, (int64_t)page * a->Dv, a->Dv, 1};
        a->k = of_k, a->v = of_v;
    }
};

/* Gives 0 if keys in pages have other results. */
static int run_all(problem *p, int) {
    fattni_fwd_parts_args whole = {p->args.a};
    whole.page_mask = -1;
    const problem before = *p;
    run(p, whole);
    if (p->args.a.cu_seqlens_k.p) return 1;
    const std::vector<float> o = p->o, lse = p->lse;
    const std::vector<uint16_t> half_o = p->half_o;
    const std::vector<int8_t> o_rest = p->o_rest;
    std::copy(before.o.begin(), before.o.end(), p->o.begin());
    std::copy(before.lse.begin(), before.lse.end(), p->lse.begin());
    std::copy(before.half_o.begin(), before.half_o.end(), p->half_o.begin());
    std::copy(before.o_rest.begin(), before.o_rest.end(), p->o_rest.begin());
    static int calls;
    const pages in_pages(p, calls++ % 3);
    run(p, in_pages.args);
    const int same = half_o == p->half_o && o_rest == p->o_rest && !memcmp(o.data(), p->o.data(), 4 * o.size()) &&
                     !memcmp(lse.data(), p->lse.data(), 4 * lse.size());
    if (!same) printf("keys in pages have other results\n");
    return same;
}
#else
static int run_all(problem *p, int least_part) {
    const int parts = run_forward(&p->args.a, least_part);
    if (least_part) printf("in up to %d parts, ", parts);
    return 1;
}
#endif

static int check(const test_case *c, int least_part) {
    problem p;
    set_up(&p, c);
    const int same_in_pages = run_all(&p, least_part);
    const fattni_attention_args *const a = &p.args.a;
    for (size_t n = 0; n < p.o.size() && is_half(c); ++n) {
        const int64_t pitch = FATTNI_O_REST_PITCH(c->Dv), row = (int64_t)n / c->Dv;
        const float rounded = value_of(p.half_o[n]);
        p.o[n] = __uint_as_float(
            fattni_o_exact(__float_as_uint(rounded), p.o_rest[(size_t)(row * pitch) + n % (size_t)c->Dv], O_REST));
    }
    if (c->sink == 2) {
        size_t numbers = 0;
        for (size_t n = 0; n < p.lse.size(); ++n) numbers += !isnan(p.lse[n]) || !isnan(p.o[n * (size_t)c->Dv]);
        printf("%s d %d: O or L is a number in %zu rows: %s\n", c->name, K_D, numbers, numbers ? "WRONG" : "ok");
        return numbers != 0;
    }
    int late = 0;
    for (int i = 0; i < c->Sq && c->far == 5; ++i) late += isnan(p.lse[i]) && isnan(p.o[(size_t)(i * c->Dv)]);
    error o = {0, 0};
    double worst_L = 0;
    for (int b = 0; b < c->B; ++b) {
        const sequence s = sequence_of(a, b);
        for (int h = 0; h < c->Hq; ++h)
            for (int i = 0; i < s.Sq; ++i) compare_row(&p, &s, b, h, i, &o, &worst_L);
    }
    int beyond = 0;
    for (size_t n = 0; n < p.o_rest.size() && c->exact && !c->padded && !c->packed; ++n) {
        const size_t pitch = FATTNI_O_REST_PITCH(c->Dv), d = n % pitch;
        beyond += d >= (size_t)c->Dv && d < ((size_t)c->Dv + 7) / 8 * 8 && p.o_rest[n] != 0; /* backward reads them */
    }
    for (size_t n = 0; n < p.o.size() && !c->merge; ++n) beyond += p.o[n] != UNWRITTEN;
    for (size_t n = 0; n < p.lse.size() && !c->merge; ++n) beyond += p.lse[n] != UNWRITTEN;
    /* Without a rounding of P: 2^-17 and float sums. P is rounded to 2^-9; a score is a sum of at most 256 products in
       float, with terms of its size. A weight that is most of its row is not rounded: what is left is the others'
       rounding. */
    if (c->far == 5 && HOPPER) {
        printf("%s d %d: O and L of %s\n", c->name, K_D, late == c->Sq ? "NaN: ok" : "something: WRONG");
        return late != c->Sq;
    }
    /* Relative to a unified maximum scores have errors of its size, and a weight w that is large in its row is rounded:
       what remains of that when O is scaled is w (1 - w) 2^-9, at most 2^-11. */
    const int good = relative(&o) < (c->exact      ? 0x1p-15
                                     : c->peak > 0 ? (K_VARIANT == FATTNI_VARIANT_FEW_UNIFIED ? 0x1p-10 : 0x1p-11)
                                                   : 0x1p-8) &&
                     worst_L < (32 + 2 * fabsf(unified_max)) * 0x1p-24 && !beyond && same_in_pages;
    if (K_VARIANT == FATTNI_VARIANT_FEW_UNIFIED) printf("maximum %g, ", (double)unified_max);
    printf("%s d %d: o %.1e L %.1e, %d written beyond the end: %s\n", c->name, K_D, relative(&o), worst_L, beyond,
           good ? "ok" : "WRONG");
    return !good;
}

#define CASE(N, B_, HQ, HKV, SQ, SK, D_, DV, C, L, R)                                                                  \
    .name = N, .B = B_, .Hq = HQ, .Hkv = HKV, .Sq = SQ, .Sk = SK, .D = D_, .Dv = DV, .causal = C, .left = L, .right = R
static test_case cases[] = {
#if FEW
    {CASE("one row", 2, 2, 2, 1, 900, K_D, K_DV, 0, -1, -1), .half_o = 1},
    {CASE("a group of rows", 1, 6, 2, 1, 1500, K_D, K_DV - 16, 0, -1, -1)},
    {CASE("ten parts", 1, 3, 1, 1, 10 * 65536 / K_D - 77, K_D, K_DV, 1, -1, -1)},
#if DECODE
    {CASE("long", 1, 5, 5, 1, 8300, K_D, K_DV, 0, -1, -1), .half_o = 1},
    {CASE("long, sink, merge", 1, 10, 5, 2, 16500, K_D, K_DV, 1, -1, -1), .sink = 1, .merge = 1},
    {CASE("long, padded, group", 2, 15, 5, 1, 8900, K_D, K_DV, 1, -1, -1), .padded = 1, .length_q = {1, 1},
     .length_k = {8900, 900}},
    {CASE("clusters", 1, 3, 1, 1, 8500, K_D, K_DV, 1, -1, -1), .half_o = 1},
    {CASE("clusters, padded", 2, 1, 1, 9, 9000, K_D, K_DV, 1, -1, -1), .padded = 1, .length_q = {9, 2},
     .length_k = {1100, 9000}},
#endif
#if ROWS
    {CASE("two tiles", 1, 9, 1, 16, 1300, K_D, K_DV, 1, -1, -1), .half_o = 1},
    {CASE("more parts, window", 2, 4, 2, 16, 3100, K_D, K_DV, 0, 2500, 3)},
    {CASE("window that begins in a block", 1, 3, 1, 16, 2001, K_D, K_DV, 0, 992, 0)},
    {CASE("parts of two blocks more", 1, 16, 8, 3, 8300, K_D, K_DV, 0, -1, -1), .half_o = 1},
    {CASE("parts, padded, merge", 2, 24, 2, 11, 2200, K_D, K_DV, 1, -1, -1), .merge = 1, .padded = 1,
     .length_q = {11, 7}, .length_k = {2200, 1101}},
    {CASE("halves, one sequence's in one CTA", 2, 12, 2, 7, 1300, K_D, K_DV, 1, -1, -1), .padded = 1,
     .length_q = {7, 4}, .length_k = {1300, 900}},
    {CASE("halves, one sequence's in one CTA, the first", 2, 12, 2, 7, 1300, K_D, K_DV, 0, -1, -1), .padded = 1,
     .length_q = {7, 4}, .length_k = {600, 1300}},
#endif
    {CASE("groups, causal", 2, 6, 2, 5, 700, K_D - 8, K_DV, 1, -1, -1), .half_o = 1},
    {CASE("several tiles, window", 1, 5, 1, 9, 500, K_D, K_DV, 0, 130, 20)},
    {CASE("window past parts", 1, 2, 1, 3, 1300, K_D, K_DV, 0, 40, 10)},
    {CASE("rows without keys", 1, 2, 1, 9, 4, K_D, K_DV, 1, -1, -1)},
    {CASE("no keys", 2, 2, 1, 3, 150, K_D, K_DV, 0, -1, -1), .padded = 1, .length_q = {3, 2}, .length_k = {0, 150}},
    {CASE("padded", 3, 4, 2, 4, 1250, K_D, K_DV, 1, -1, -1), .padded = 1, .length_q = {4, 0, 3},
     .length_k = {250, 71, 1250}, .half_o = 1},
    {CASE("packed, sink", 3, 4, 2, 7, 450, K_D, K_DV, 1, -1, -1), .sink = 1, .packed = 1, .length_q = {7, 1, 3},
     .length_k = {450, 3, 129}},
    {CASE("sink, merge", 1, 4, 2, 3, 400, K_D, K_DV, 0, -1, -1), .sink = 1, .merge = 1},
    {CASE("exact", 2, 4, 2, 3, 400, K_D, K_DV - 13, 0, -1, -1), .half_o = 1, .exact = 1},
    {CASE("NaN sink", 1, 2, 1, 3, 400, K_D, K_DV, 0, -1, -1), .sink = 2},
    {CASE("NaN sink, rows without keys", 1, 2, 1, 9, 4, K_D, K_DV, 1, -1, -1), .sink = 2},
#if K_VARIANT == FATTNI_VARIANT_FEW_GENERAL
    {CASE("softcap", 1, 4, 2, 5, 700, K_D, K_DV, 1, -1, -1), .softcap = 5},
    {CASE("alibi", 1, 2, 1, 20, 529, K_D, K_DV, 1, -1, -1), .alibi = 1},
    {CASE("bias", 1, 2, 1, 17, 340, K_D, K_DV, 1, -1, -1), .bias = 1},
    {CASE("dropout", 2, 2, 1, 17, 340, K_D, K_DV, 0, 100, 20), .dropout = 0.3f, .q_pos0 = 16},
#endif
    {CASE("large scores", 1, 4, 1, 4, 1100, K_D, K_DV, 0, -1, -1), .q_factor = 40},
    {CASE("scores that grow", 1, 1, 1, 20, 1100, K_D, K_DV, 0, -1, -1), .growth = 80},
    {CASE("one key that dominates", 1, 1, 1, 20, 680, K_D, K_DV, 0, -1, -1), .q_factor = 0.05f, .peak = 7.5f},
    {CASE("far above, the last", 1, 1, 1, 20, 600, K_D, K_DV, 0, -1, -1), .far = 1},
    {CASE("further than it may be, the last", 1, 1, 1, 20, 600, K_D, K_DV, 0, -1, -1), .far = 5},
    {CASE("far below, window, sink", 1, 2, 1, 20, 600, K_D, K_DV, 0, 120, 90), .sink = 1, .far = 2},
    {CASE("far above, the first furthest", 1, 1, 1, 20, 600, K_D, K_DV, 0, -1, -1), .far = 3},
    {CASE("the first far below, sink, merge", 1, 1, 1, 20, 600, K_D, K_DV, 0, -1, -1), .sink = 1, .merge = 1, .far = 4},
#if K_VARIANT == FATTNI_VARIANT_FEW_GENERAL
    {CASE("all", 2, 4, 2, 17, 650, K_D - 8, K_DV, 1, 490, -1), .softcap = 3, .dropout = 0.2f, .alibi = 1, .bias = 1,
     .sink = 1, .merge = 1, .q_pos0 = 16, .padded = 1, .length_q = {9, 17}, .length_k = {650, 331}},
#endif
};
#else
#if K_VARIANT < FATTNI_VARIANT_BANDED
    {CASE("tiles", 1, 2, 1, 450, 600, K_D, K_DV, CAUSAL_VARIANT, -1, -1), .half_o = 1},
    {CASE("a consumer without rows", 2, 2, 1, 2 * K_BM + 17, 1000, K_D, K_DV, CAUSAL_VARIANT, -1, -1), .half_o = 1},
    {CASE("another order", 1, 2, 1, 5 * K_BM - 10, 700, K_D, K_DV, CAUSAL_VARIANT, -1, -1), .half_o = 1,
     .order = {1, 4, 1}},
    {CASE("exact", 2, 2, 1, 150, 260, K_D, K_DV - 8, CAUSAL_VARIANT, -1, -1), .half_o = 1, .exact = 1},
    {CASE("two sequences, short rows", 2, 1, 1, 70, 60, K_D - 8, K_DV, CAUSAL_VARIANT, -1, -1)},
    {CASE("rows without keys", 2, 2, 1, 3 * K_BM + 40, 90, K_D - 8, K_DV - 8, CAUSAL_VARIANT, -1, -1), .half_o = 1,
     .exact = 1},
    {CASE("more rows than keys", 1, 1, 1, 300, 150, K_D, K_DV - 16, CAUSAL_VARIANT, -1, -1), .top_left = 1,
     .half_o = 1},
    {CASE("large scores", 1, 1, 1, 200, 400, K_D, K_DV, CAUSAL_VARIANT, -1, -1), .q_factor = 40},
    {CASE("scores that grow slowly", 1, 1, 1, 200, 900, K_D, K_DV, CAUSAL_VARIANT, -1, -1), .growth = 9},
    {CASE("scores that grow fast", 1, 1, 1, 200, 900, K_D, K_DV, CAUSAL_VARIANT, -1, -1), .growth = 80},
#else
    {CASE("no feature", 1, 2, 1, 350, 400, K_D, K_DV, 0, -1, -1)},
    {CASE("far below, window, sink", 1, 2, 1, 300, 400, K_D, K_DV, 0, 120, 90), .sink = 1, .far = 2},
    {CASE("the first far below, sink, merge", 1, 1, 1, 200, 400, K_D, K_DV, 0, -1, -1), .sink = 1, .merge = 1,
     .far = 4},
#endif
    {CASE("far above, the last", 1, 1, 1, 200, 600, K_D, K_DV, CAUSAL_VARIANT, -1, -1), .far = 1},
    {CASE("further than it may be, the last", 1, 1, 1, 200, 600, K_D, K_DV, CAUSAL_VARIANT, -1, -1), .far = 5},
    {CASE("far below", 1, 1, 1, 200, 400, K_D, K_DV, CAUSAL_VARIANT, -1, -1), .far = 2},
    {CASE("far above, the first furthest", 1, 1, 1, 400, 400, K_D, K_DV, CAUSAL_VARIANT, -1, -1), .far = 3},
    {CASE("the first far below", 1, 1, 1, 200, 600, K_D, K_DV, CAUSAL_VARIANT, -1, -1), .far = 4},
#if !CAUSAL_VARIANT && !TMA_STORES
    {CASE("one key that dominates, the last", 1, 1, 1, 200, 280, K_D, K_DV, 0, -1, -1), .q_factor = 0.05f,
     .peak = 7.5f},
#endif
#if K_VARIANT >= FATTNI_VARIANT_BANDED
    {CASE("window", 1, 1, 1, 400, 370, K_D, K_DV, 0, 50, 21)},
    {CASE("wide window", 1, 1, 1, 330, 700, K_D, K_DV, 0, 300, 200)},
    {CASE("causal window", 1, 1, 1, 300, 500, K_D, K_DV, 1, 130, -1), .half_o = 1},
    {CASE("window beyond the keys", 1, 1, 1, 300, 100, K_D, K_DV, 0, 20, 10)},
    {CASE("sink", 1, 2, 1, 140, 200, K_D, K_DV, 1, -1, -1), .sink = 1},
    {CASE("NaN sink, some rows without keys", 1, 2, 1, 140, 70, K_D, K_DV, 1, -1, -1), .sink = 2},
    {CASE("merge", 1, 2, 1, 200, 200, K_D, K_DV, 1, -1, -1), .merge = 1},
    {CASE("packed", 3, 1, 1, 300, 250, K_D, K_DV, 1, -1, -1), .packed = 1, .length_q = {300, 0, 33},
     .length_k = {171, 4, 250}, .half_o = 1},
    {CASE("packed, full", 3, 2, 1, 200, 350, K_D, K_DV, 0, -1, -1), .packed = 1, .length_q = {50, 200, 133},
     .length_k = {71, 130, 350}},
    {CASE("exact, packed, sink", 3, 2, 1, 200, 350, K_D, K_DV - 8, 0, -1, -1), .sink = 1, .packed = 1,
     .length_q = {50, 200, 133}, .length_k = {71, 130, 350}, .half_o = 1, .exact = 1},
    {CASE("exact, padded, window", 2, 1, 1, 300, 250, K_D, K_DV, 0, 120, 90), .padded = 1, .length_q = {50, 300},
     .length_k = {250, 71}, .half_o = 1, .exact = 1},
#if !HOPPER && !FEW
    {CASE("the longest sequence has fewer parts", 2, 32, 1, 1, 8 * K_BN + 1, K_D, K_DV, 0, -1, -1), .padded = 1,
     .length_q = {1, 1}, .length_k = {8 * K_BN, 8 * K_BN + 1}},
#endif
    {CASE("no keys", 2, 1, 1, 100, 150, K_D, K_DV, 0, -1, -1), .packed = 1, .length_q = {100, 50},
     .length_k = {0, 150}},
    {CASE("padded", 2, 2, 1, 300, 250, K_D, K_DV, 1, -1, -1), .padded = 1, .length_q = {50, 300}, .length_k = {250, 71},
     .half_o = 1},
#if K_VARIANT == FATTNI_VARIANT_GENERAL
    {CASE("softcap", 1, 1, 1, 200, 300, K_D, K_DV, 1, -1, -1), .softcap = 5},
    {CASE("wide softcap", 1, 2, 1, 330, 500, K_D, K_DV, 1, -1, -1), .softcap = 30},
    {CASE("wide softcap, window, large scores", 1, 1, 1, 300, 500, K_D, K_DV, 0, 200, 150), .softcap = 50,
     .q_factor = 2.5f},
    {CASE("low scores, softcap", 1, 1, 1, 130, 500, K_D, K_DV, 0, -1, -1), .softcap = 10, .q_factor = 0.5f,
     .opposite = 1},
    {CASE("hard softcap", 1, 1, 1, 200, 300, K_D, K_DV, 0, -1, -1), .softcap = 0.8f},
    {CASE("alibi", 1, 2, 2, 330, 329, K_D, K_DV, 0, -1, -1), .alibi = 1},
    {CASE("alibi, causal", 1, 2, 2, 330, 529, K_D, K_DV, 1, -1, -1), .alibi = 1},
    {CASE("alibi, window, packed", 3, 3, 1, 300, 600, K_D, K_DV, 0, 250, 200), .alibi = 1, .packed = 1,
     .length_q = {300, 0, 133}, .length_k = {471, 4, 600}},
    {CASE("alibi, top left, positions", 1, 1, 1, 200, 600, K_D, K_DV, 0, -1, -1), .alibi = 1, .q_pos0 = 250,
     .top_left = 1},
    {CASE("alibi, far to the right", 1, 1, 1, 130, 700, K_D, K_DV, 0, -1, -1), .alibi = 1, .top_left = 1},
    {CASE("alibi, dropout", 1, 2, 1, 200, 300, K_D, K_DV, 0, -1, -1), .dropout = 0.3f, .alibi = 1},
#if HAS_BIAS
    {CASE("bias", 1, 2, 1, 170, 240, K_D, K_DV, 1, -1, -1), .bias = 1},
#endif
    {CASE("dropout", 1, 2, 1, 350, 300, K_D - 8, K_DV, 0, -1, -1), .dropout = 0.3f},
    {CASE("dropout, causal", 2, 1, 1, 300, 600, K_D, K_DV, 1, -1, -1), .dropout = 0.7f, .q_pos0 = 16},
    {CASE("all", 2, 2, 1, 200, 250, K_D - 8, K_DV, 1, 190, -1), .softcap = 3, .dropout = 0.2f, .alibi = 1,
     .bias = HAS_BIAS, .sink = 1, .merge = 1, .q_pos0 = 16, .padded = 1, .length_q = {90, 170}, .length_k = {250, 131}},
#endif
#endif
};
#endif

/* name: of cases that have it in theirs. */
static int check_all(int causal, const char *name) {
    int wrong = 0;
    for (test_case &x : cases) {
        const int n = (int)(&x - cases);
        if ((causal && x.peak != 0) || !strstr(x.name, name)) continue;
        x.causal |= causal;
        x.bias |= STAGED_BIAS;
        if (ONE_HEAD_DIM) x.D = K_D, x.Dv = K_DV;
        for (int split = 0; split < (IN_PARTS ? 2 : 1); ++split) /* keys whole, and in parts of a block or three */
            if (!(EMULATED_F16 && x.far))                        /* F16 has no numbers as far */
                wrong += check(&x, split ? (n % 2 ? 1 : 3) * K_BN : 0);
    }
    return wrong;
}

/* Cases whose names have the argument in them, or all. */
int main(int count, char **arguments) {
    int wrong = 0;
    for (int n = 0; n < (K_VARIANT == FATTNI_VARIANT_FEW_UNIFIED ? 3 : 1); ++n) {
        unified_max = K_VARIANT == FATTNI_VARIANT_FEW_UNIFIED ? maxima[n] : 0;
        for (int causal = 0; causal < (K_VARIANT == FATTNI_VARIANT_PLAIN ? 2 : 1); ++causal)
            wrong += check_all(causal, count > 1 ? arguments[1] : "");
    }
    return wrong != 0;
}
