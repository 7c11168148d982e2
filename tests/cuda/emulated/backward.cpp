/* A backward kernel for 16 bits on the host, one line of bwd_kernels.def per program (K_INSTANCE), against the formulas
   of bwd/README.md in double: layouts, masks, features, lengths, deterministic accumulation. What lies beyond a
   sequence in its buffer is NaN. */
#include "fields.h"

#include K_INSTANCE
#include "core/device/dropout.cuh"

/* Hopper's kernels can prepare rows and finish dQ, need aligned tensors, and have others for a softcap. */
#define HOPPER (K_ARCH == 90)
/* Its kernels in which packed sequences follow each other, and may prepare their rows. */
#define PACKED_ROWS (HOPPER && K_VARIANT == FATTNI_VARIANT_BANDED && CTAS == 1)
/* Its kernels that find means of keys beside rows. */
#define FINDS_MEANS (HOPPER && (K_VARIANT < FATTNI_VARIANT_GENERAL || K_VARIANT == FATTNI_VARIANT_HEADS))
/* The kernel of dbias has no other results, and reads lse2 and delta; that of dq, dk and dv leaves it out. */
#define OF_DBIAS (K_VARIANT == FATTNI_VARIANT_DBIAS)
#define ROW_BLOCK                                                                                                      \
    ((OF_DBIAS || (HOPPER && OF_SUMS)) && K_D > 64 ? 64 : K_BM) /* of the kernel of dq, whose tensor maps it has */
#define KEY_BLOCK (OF_DBIAS && K_D > 128 ? 64 : K_BN)
/* The kernels of huge rows add to dq, dk and dv what the others leave out. */
#define OF_HUGE_ROWS (K_VARIANT == FATTNI_VARIANT_HUGE)
/* What rows of dS sum to where there is a softcap and keys have a mean, before the other kernels; nothing else. */
#define OF_SUMS (K_VARIANT == FATTNI_VARIANT_SUMS)
/* Prepares rows, of calls without dL, and finishes dQ; its work items are heads. */
#define OF_CAUSAL_ROWS (K_VARIANT == FATTNI_VARIANT_SHORT || K_VARIANT == FATTNI_VARIANT_HEADS)
#define OF_SHORT_ROWS (OF_CAUSAL_ROWS || K_VARIANT == FATTNI_VARIANT_HEADS_FULL)
#if !HOPPER || OF_DBIAS || OF_SUMS
enum { CTAS = 1 };
#endif

typedef struct test_case {
    const char *name;
    int B, Hq, Hkv, Sq, Sk, D;
    int causal, left, right; /* window: -1 is unbounded */
    float dropout;
    int alibi, bias, q_pos0, dq_semaphore;
    int packed, padded;
    int length_q[3], length_k[3];
    int rows;  /* the kernel also prepares rows and finishes dQ, in head groups of so many key heads */
    int mean;  /* of every fifth channel of K: so much, as much below zero, and half of it in turns of key heads */
    int exact; /* with rows: V has a mean of 100, and there is what rounding takes off O */
    int odd;   /* head_dim less 5: no accesses of 16 bytes */
    float softcap;
    int sink;
    int parts;   /* tasks are divided into up to so many, of as many row blocks each; */
    int divided; /* only so many at the end, of the last head group, or all */
    int heads;   /* tasks are divided into parts of so many query heads at most */
    int by_rows; /* a row block of all heads comes before the next one */
    int turns;   /* the same, and every second wave in the other order */
    fattni_block_order order;
} test_case;

/* Of kernels that always have one. With means scores are as large as these. */
static float softcap_of(const test_case *c) {
    const bool always = K_VARIANT == FATTNI_VARIANT_CAPPED || OF_SUMS;
    return c->softcap > 0 || !always ? c->softcap : c->mean ? 50 : 0.8f;
}
/* What rows sum to is there before the kernel runs. */
static bool knows_sums(const test_case *c) { return softcap_of(c) > 0 && c->mean && !OF_SUMS; }
enum { ROW_OF_MEANS = 256 };
static int width_of(const test_case *c) { return c->D - (c->odd ? 5 : 0); }
static int v_width_of(const test_case *c) { return width_of(c) - K_D + K_DV; }

/* Everything a call reads and writes, and what should come out. */
typedef struct problem {
    field q, k, v, o, d_o, dq, dk, dv;
    std::vector<int8_t> o_rest;
    std::vector<uint16_t> half_bias;
    std::vector<float> key_mean, dq_of_mean, sinks, slopes, bias, d_bias, lse, d_lse, lse2, delta, accumulator;
    std::vector<int32_t> key_mean_used, dq_semaphore, counters, huge, huge_blocks;
    std::vector<float> huge_max, huge_log_sum, huge_sink, part_sums;
    std::vector<int32_t> parts_stored;
    lengths of;                                                                           /* the sequences */
    std::vector<double> want_dq, want_dk, want_dv, want_d_bias, want_sums, sizes_of_sums; /* the last: of sum |G| */
    fattni_bwd_sm90_args args;
} problem;

static float mean_of_head(const test_case *c, size_t hk) {
    return (float)c->mean * (hk % 3 == 0 ? 1.0f : hk % 3 == 1 ? -1.0f : 0.5f);
}

static void set_up(problem *p, const test_case *c) {
    const int D = width_of(c), Dv = v_width_of(c);
    const int batches = c->packed ? 1 : c->B;
    int rows_q = c->Sq, rows_k = c->Sk;
    if (c->packed || c->padded) p->of = lengths_of(c->B, c->length_q, c->length_k);
    if (c->packed) rows_q = p->of.cu_q.back() + 5, rows_k = p->of.cu_k.back() + 7;
    p->q = random_field(batches, c->Hq, rows_q, D);
    p->d_o = random_field(batches, c->Hq, rows_q, Dv);
    p->k = random_field(batches, c->Hkv, rows_k, D);
    p->v = random_field(batches, c->Hkv, rows_k, Dv);
    for (size_t n = 0; n < p->k.x.size() && c->mean; ++n)
        if (n % (size_t)D % 5 == 0) {
            const float mean = mean_of_head(c, n / (size_t)(D * rows_k) % (size_t)c->Hkv);
            p->k.x[n] = half_of(pack_half(value_of(p->k.x[n]) + mean, 0), 0);
        }
    for (uint16_t &x : p->v.x)
        if (c->exact) x = half_of(pack_half(value_of(x) + 100, 0), 0);
    for (int b = 0; b < batches && (c->packed || c->padded); ++b) {
        const int end_q = c->packed ? p->of.cu_q.back() : c->length_q[b];
        const int end_k = c->packed ? p->of.cu_k.back() : c->length_k[b];
        spoil_rows(&p->q, b, end_q), spoil_rows(&p->d_o, b, end_q);
        spoil_rows(&p->k, b, end_k), spoil_rows(&p->v, b, end_k);
    }
    p->o = p->d_o, p->dq = p->q, p->dk = p->k, p->dv = p->v;
    for (field *f : {&p->dq, &p->dk, &p->dv})
        for (uint16_t &x : f->x) x = OF_HUGE_ROWS ? 0 : UNTOUCHED;
    for (int h = 0; h < c->Hq; ++h) p->sinks.push_back(c->sink ? 1.0f + (float)h : -INFINITY);
    for (int h = 0; h < c->Hq; ++h) p->slopes.push_back(h % 2 ? -0.03f : 0.05f + 0.1f * (float)h);
    for (int n = 0; n < (c->bias ? c->Hq * c->Sq * c->Sk : 0); ++n)
        p->bias.push_back(normal() - (OF_HUGE_ROWS && n / c->Sk % 3 ? 4096 : 0));
    p->d_bias.assign(p->bias.size(), OF_DBIAS ? NAN : 0);

    memset(&p->args, 0, sizeof p->args);
    fattni_bwd_args *const bwd = &p->args.bwd;
    fattni_attention_args *const a = &bwd->a;
    a->B = c->B, a->Hq = c->Hq, a->Hkv = c->Hkv, a->group = c->Hq / c->Hkv;
    a->Sq = c->Sq, a->Sk = c->Sk, a->D = D, a->Dv = Dv, a->rows_q = rows_q, a->rows_k = rows_k;
    a->at_once = 2;
    a->left = c->left < 0 ? FATTNI_FAR : c->left;
    a->right = c->causal ? 0 : c->right < 0 ? FATTNI_FAR : c->right;
    a->shift = a->q_pos0 = c->q_pos0;
    a->scale = 1 / sqrtf((float)D);
    const bool begins = FATTNI_BEGINS_WITH_L(K_VARIANT < FATTNI_VARIANT_GENERAL || OF_SHORT_ROWS, CTAS, K_BM);
    bwd->lse_factor = HOPPER && begins ? -1 / a->scale : 1 / logf(2.0f);
    a->softcap = softcap_of(c);
    a->vector_qkv = bwd->vector_gradients = !c->odd;
    a->drop_T = (uint32_t)lroundf(32768 * c->dropout);
    a->keep_scale = 32768.0f / (float)(32768 - a->drop_T);
    bwd->dq_scale = bwd->dk_scale = a->scale, bwd->dv_scale = a->keep_scale, bwd->dbias_scale = 1;
    a->seed = 99, a->rng_heads = (uint32_t)c->Hq;
    a->q = view_of(&p->q), a->k = view_of(&p->k), a->v = view_of(&p->v), a->o = view_of(&p->o),
    bwd->d_o = view_of(&p->d_o);
    bwd->dq = view_of(&p->dq), bwd->dk = view_of(&p->dk), bwd->dv = view_of(&p->dv);
    const int64_t pitch = FATTNI_O_REST_PITCH(Dv), head = rows_q * pitch;
    p->o_rest.assign((size_t)(batches * c->Hq * head), 0);
    const fattni_view o_rest = {p->o_rest.data(), batches > 1 ? c->Hq * head : 0, head, pitch, 1};
    if (c->exact) a->o_rest = o_rest;
    const fattni_line slopes = {p->slopes.data(), 1};
    if (c->alibi) a->alibi = slopes;
    const fattni_line sinks = {p->sinks.data(), 1};
    if (c->sink) a->sink = sinks;
    give_lengths(a, &p->of, c->packed, c->padded);
    const fattni_view bias = {p->bias.data(), 0, (int64_t)c->Sq * c->Sk, c->Sk, 1};
    if (c->bias) a->bias = bwd->d_bias = bias, bwd->d_bias.p = p->d_bias.data(), a->bias_f32 = 1;
#if STAGED_BIAS
    const fattni_map_step one_batch = {1, 0};
    p->args.bias = bias_map_of(&p->bias, &p->half_bias, c->Hq, c->Sq, c->Sk, ROW_BLOCK, true),
    p->args.bias_step = one_batch;
    const int64_t stored[4] = {1, c->Hq, c->Sq, c->Sk};
    memcpy(bwd->d_bias_n, stored, sizeof stored);
#endif

    bwd->row_block = ROW_BLOCK, bwd->D_padded = K_D;
    bwd->padded_rows = ((c->packed ? rows_q + c->B * ROW_BLOCK : c->Sq) + ROW_BLOCK - 1) / ROW_BLOCK * ROW_BLOCK;
    const size_t rows = (size_t)bwd->padded_rows * (size_t)(c->Hq * batches);
    p->lse2.assign(rows + 4, NAN), p->delta.assign(rows + 4, NAN);
    p->accumulator.assign(rows * K_D, NAN);
    p->dq_semaphore.assign((size_t)((c->Sq + K_BM - 1) / K_BM * c->Hq * c->B), 0);
    bwd->lse2 = p->lse2.data(), bwd->delta = p->delta.data(), bwd->dq_accumulator = p->accumulator.data();
    if (c->dq_semaphore) bwd->dq_semaphore = p->dq_semaphore.data();

    p->key_mean.resize((size_t)(c->B * c->Hkv * ROW_OF_MEANS)), p->key_mean_used.assign((size_t)(c->B * c->Hkv), 1);
    for (size_t n = 0; n < p->key_mean.size(); ++n)
        p->key_mean[n] = n % ROW_OF_MEANS % 5 == 0 && (int)(n % ROW_OF_MEANS) < D
                             ? mean_of_head(c, n / ROW_OF_MEANS % (size_t)c->Hkv)
                             : 0.0f;
    p->dq_of_mean.assign(rows, NAN), p->want_sums.assign(rows, NAN), p->sizes_of_sums.assign(rows, 0);
    if (c->mean) {
        bwd->key_mean = p->key_mean.data(), bwd->key_mean_used = p->key_mean_used.data();
        bwd->key_mean_pitch = ROW_OF_MEANS;
        if (!HOPPER || knows_sums(c) || OF_SUMS) bwd->dq_of_mean = p->dq_of_mean.data();
        if (c->rows && !OF_SHORT_ROWS) bwd->dq_of_mean = p->dq_of_mean.data(); /* of dL */
        p->args.finds_means = c->rows && !c->packed && FINDS_MEANS;
        if (p->args.finds_means) { /* whatever there was before */
            p->key_mean.assign(p->key_mean.size(), NAN), p->key_mean_used.assign(p->key_mean_used.size(), 1);
        }
    }

    p->args.q = map_of(&p->q, ROW_BLOCK), p->args.d_o = map_of(&p->d_o, ROW_BLOCK);
    p->args.k = map_of(&p->k, KEY_BLOCK), p->args.v = map_of(&p->v, KEY_BLOCK);
    p->args.dk = map_of(&p->dk, 16), p->args.dv = map_of(&p->dv, 16);
    p->args.o_rows = map_of(&p->o, FATTNI_ROWS_OF_UNIT(K_D));
    p->args.d_o_rows = map_of(&p->d_o, FATTNI_ROWS_OF_UNIT(K_D));
    const fattni_map_step step = {1, batches > 1};
    p->args.q_step = p->args.k_step = p->args.v_step = p->args.o_step = p->args.d_o_step = step;
    p->args.dk_step = p->args.dv_step = step;
    const bool packed = c->packed && PACKED_ROWS;
    p->args.schedule.blocks =
        packed ? FATTNI_PACKED_BLOCKS(rows_k, K_BN, c->B) : (c->Sk + CTAS * K_BN - 1) / (CTAS * K_BN);
    p->args.schedule.planes = packed ? c->Hkv : c->Hkv * c->B;
    const int most_parts = c->heads   ? (a->group + c->heads - 1) / c->heads
                           : c->parts ? c->parts
                                      : 1,
              tasks = p->args.schedule.blocks * p->args.schedule.planes;
    const int group = c->rows ? c->rows : 2, planes = p->args.schedule.planes;
    const int of_others = (planes - 1) / group * group * p->args.schedule.blocks;
    p->args.whole = !c->parts && !c->heads ? tasks : c->divided ? max(tasks - c->divided, of_others) : 0;
    const int divided = tasks - p->args.whole;
    const size_t sums = (size_t)divided * (size_t)(most_parts - 1) * K_BN * (K_D + K_DV);
    p->args.most_parts = most_parts, p->args.part_heads = c->heads;
    if (!c->heads) p->args.part_blocks = (c->Sq + K_BM * most_parts - 1) / (K_BM * most_parts);
    p->args.by_rows = c->by_rows || c->turns, p->args.turns = c->turns;
    p->part_sums.assign(sums, NAN), p->parts_stored.assign((size_t)divided, 0);
    p->args.part_sums = p->part_sums.data(), p->args.parts_stored = p->parts_stored.data();
    p->args.schedule.tiles = p->args.whole + divided * most_parts;
    p->args.schedule.head_group = group;
    p->args.schedule.order = c->order;
    p->args.items = p->args.schedule.tiles;
    p->counters.assign((size_t)(2 + FATTNI_COUNTERS * c->B * c->Hkv), 0);
    p->args.schedule.next_tile = p->counters.data();
    p->lse.assign((size_t)(batches * c->Hq * rows_q), -INFINITY), p->d_lse.resize(p->lse.size());
    const fattni_view lse = {p->lse.data(), (int64_t)c->Hq * rows_q, rows_q, 1, 1};
    if (OF_HUGE_ROWS) {
        a->lse = lse;
        p->huge = {1, 0, 0}, p->huge_blocks.resize(rows), p->huge_sink.resize(rows);
        p->huge_max.assign(rows, NAN), p->huge_log_sum.assign(rows, NAN);
        bwd->huge = p->huge.data(), bwd->huge_blocks = p->huge_blocks.data(), bwd->huge_sink = p->huge_sink.data();
        bwd->huge_max = p->huge_max.data(), bwd->huge_log_sum = p->huge_log_sum.data(), bwd->huge_block = K_BM;
    }
    if (OF_SUMS) {
        for (float &x : p->d_lse) x = normal();
        a->lse = bwd->d_lse = lse, bwd->d_lse.p = p->d_lse.data();
    }
    if (c->rows) {
        for (float &x : p->d_lse) x = OF_SHORT_ROWS ? 0 : normal();
        a->lse = bwd->d_lse = lse, bwd->d_lse.p = OF_SHORT_ROWS ? NULL : p->d_lse.data();
        fattni_schedule_backward(&p->args, CTAS, c->rows > 1 ? 132 : 2); /* few rows in a work item, or many */
        p->dq_semaphore.assign(p->dq_semaphore.size(), 1);
    }
    p->want_dq.resize(p->q.x.size()), p->want_dk.resize(p->k.x.size()), p->want_dv.resize(p->v.x.size());
    p->want_d_bias.resize(p->bias.size());
}

/* Row i of a sequence in lse and d_lse. */
static size_t row_of_lse(const fattni_attention_args *a, const sequence *s, int h, int i) {
    return (size_t)(s->batch * a->Hq + h) * (size_t)a->rows_q + (size_t)(s->q0 + i);
}
/* One row of the formulas: its L and delta to the kernel, its share to what is wanted. */
static void expect_row(problem *p, const sequence *s, int b, int h, int i) {
    const fattni_attention_args *const a = &p->args.bwd.a;
    const int hk = h / a->group, D = a->D, Dv = a->Dv, row = s->q0 + i;
    const dropout_plane plane = dropout_plane_of(a, b, h);
    std::vector<double> score(s->Sk), dp(s->Sk), slope(s->Sk);
    std::vector<int> keep(s->Sk);
    const int begin = max(0, i + s->lo), end = min(s->Sk, i + s->hi + 1);
    const uint16_t *const q = p->q.row(s->batch, h, row), *const d_o = p->d_o.row(s->batch, h, row);
    double sum = 0, delta = 0, top = -INFINITY;
    for (int j = begin; j < end; ++j) {
        double x = a->scale * dot(q, p->k.row(s->batch, hk, s->k0 + j), D);
        const double y = dot(d_o, p->v.row(s->batch, hk, s->k0 + j), Dv);
        const double t = a->softcap > 0 ? tanh(x / a->softcap) : 0;
        slope[j] = 1 - t * t;
        if (a->softcap > 0) x = a->softcap * t;
        if (a->alibi.p) x -= p->slopes[h] * fabs((double)(i - j + s->diagonal));
        if (a->bias.p) x += p->bias[((size_t)h * a->Sq + i) * a->Sk + j];
        keep[j] = !a->drop_T || keep_at(a, &plane, i, j);
        dp[j] = keep[j] ? y * a->keep_scale : 0;
        score[j] = x;
        top = fmax(top, x);
    }
    for (int j = begin; j < end; ++j) sum += exp(score[j] - top);
    if (sum > 0) sum += exp(p->sinks[h] - top); /* rows without keys are left out */
    const int64_t padded = row_base(&p->args.bwd, s, b, h) + i;
    if (sum == 0) return;
    const double L = top + log(sum);
    for (int j = begin; j < end; ++j) delta += exp(score[j] - L) * dp[j];
    const bool with_rows = p->args.progress || OF_SUMS;
    if (with_rows) {
        const size_t at = row_of_lse(a, s, h, i);
        std::vector<double> o((size_t)Dv);
        for (int j = begin; j < end; ++j)
            if (keep[j]) add_row(o.data(), exp(score[j] - L) * a->keep_scale, p->v.row(s->batch, hk, s->k0 + j), Dv);
        for (int d = 0; d < Dv; ++d) {
            const float x = (float)o[d];
            const uint16_t rounded = half_of(pack_half(x, 0), 0);
            const int32_t rest = fattni_o_rest(__float_as_uint(x), __float_as_uint(value_of(rounded)), O_REST);
            p->o.x[p->o.at(s->batch, h, row, d)] = rounded;
            p->o_rest[at * FATTNI_O_REST_PITCH((size_t)Dv) + (size_t)d] = (int8_t)rest;
        }
        p->lse[at] = (float)L;
        delta -= p->d_lse[at];
    } else {
        const int64_t at = row_base(&p->args.bwd, s, b, h) + i;
        p->lse2[at] = (float)(p->args.bwd.lse_factor * L);
        if (p->args.bwd.dq_of_mean && !(a->softcap > 0))
            store_sum_of_ds(&p->args.bwd, at, (float)L, (float)delta, p->sinks[h], 0);
        p->delta[at] = (float)delta;
        /* As far off as by an O of 16 bits. */
        if (p->args.bwd.dq_of_mean && a->softcap > 0) p->delta[at] = (float)(delta * (1 + 0x1p-9));
        p->lse[row_of_lse(a, s, h, i)] = (float)L;
    }
    if (OF_HUGE_ROWS && !FATTNI_IS_HUGE(L)) return;
    for (int j = begin; j < end; ++j) {
        const double P = exp(score[j] - L), G = P * (dp[j] - delta), dX = G * slope[j];
        p->want_sums[padded] += dX, p->sizes_of_sums[padded] += fabs(G);
        if (a->bias.p) p->want_d_bias[((size_t)h * a->Sq + i) * a->Sk + j] += G;
        add_row(&p->want_dq[p->q.at(s->batch, h, row, 0)], dX, p->k.row(s->batch, hk, s->k0 + j), D);
        add_row(&p->want_dk[p->k.at(s->batch, hk, s->k0 + j, 0)], a->scale * dX, q, D);
        if (keep[j]) add_row(&p->want_dv[p->v.at(s->batch, hk, s->k0 + j, 0)], P * a->keep_scale, d_o, Dv);
    }
}
/* As bwd_preprocess.cu leaves the workspace: rows beyond the end have L = inf, delta = 0. Or as it was. */
static void expect(problem *p) {
    const fattni_attention_args *const a = &p->args.bwd.a;
    for (int b = 0; b < a->B; ++b) {
        const sequence s = sequence_of(a, b);
        for (int h = 0; h < a->Hq; ++h)
            for (int i = 0; i < (s.Sq + ROW_BLOCK - 1) / ROW_BLOCK * ROW_BLOCK; ++i) {
                const int64_t at = row_base(&p->args.bwd, &s, b, h) + i;
                for (int d = 0; d < K_D && !p->args.progress; ++d)
                    p->lse2[at] = p->args.bwd.lse_factor * INFINITY, p->delta[at] = 0, p->accumulator[at * K_D + d] = 0;
                if (!HOPPER || a->softcap > 0) p->dq_of_mean[at] = OF_SUMS ? NAN : 0;
                p->want_sums[at] = 0;
                if (i < s.Sq) expect_row(p, &s, b, h, i);
                if (i < s.Sq && a->softcap > 0 && !OF_SUMS) p->dq_of_mean[at] = (float)p->want_sums[at];
            }
    }
}

#if OF_SUMS
static float accumulated(const problem *, int64_t, int, int) { return 0; }
#elif OF_HUGE_ROWS
static float accumulated(const problem *, int64_t, int, int) { return 0; }

static const fattni_bwd_args *args_of_run;
static void run_kernel(void) { K_NAME(*args_of_run); }
static void run_all(const problem *p) { /* two CTAs share the tasks */
    args_of_run = &p->args.bwd;
    machine_run(0, 2, 32 * K_WARPS, 0, run_kernel);
}
#elif HOPPER
/* dQ(i, d) without its scale, where bwd/cuda/rows/bwd_postprocess.cu finds it: two parts, each in wgmma's order. */
static float accumulated(const problem *p, int64_t base, int i, int d) {
    const int i0 = i / K_BM * K_BM, r = i - i0;
    const int by_rows = K_BM > 64, width = by_rows ? 64 : K_D % 64 ? 48 : K_D / 2;
    const int part = by_rows ? r / 64 : d / width, row = r % 64, column = by_rows ? d : d % width;
    const int thread = row / 16 * 32 + row % 8 * 4 + column % 8 / 2;
    return p->accumulator[(base + i0) * K_D + part * 64 * width + (column / 8 * 128 + thread) * 4 + row % 16 / 8 * 2 +
                          column % 2];
}

static const fattni_bwd_sm90_args *args_of_run;
static void run_kernel(void) { K_NAME(*args_of_run); }
static void run_all(const problem *p) {
    args_of_run = &p->args;
    gridDim.x = CTAS == 1 ? 2 : 1;
    if (CTAS == 1) /* two CTAs share the work items */
        machine_run(0, 2, 32 * K_WARPS, 0, run_kernel);
    for (int n = 0; n < p->args.items && CTAS > 1; ++n)
        machine_run(n * CTAS, CTAS, 32 * K_WARPS, (unsigned)n, run_kernel);
}
#else
/* dQ(i, d) without its scale, and without what is added for a mean: warps have 32 rows, tiles are 8 columns. */
static float accumulated(const problem *p, int64_t base, int i, int d) {
    const int i0 = i / K_BM * K_BM, r = i - i0, row_warps = K_BM / 32, columns = K_D / (K_WARPS / row_warps);
    const int tile = r % 32 / 16 * (columns / 8) + d % columns / 8;
    const int thread = (d / columns * row_warps + r / 32) * 32 + r % 8 * 4 + d % 8 / 2;
    return p->accumulator[(base + i0) * K_D + (tile * 32 * K_WARPS + thread) * 4 + r % 16 / 8 * 2 + d % 2];
}
#endif

#if OF_SUMS || !(OF_HUGE_ROWS || HOPPER)
static const fattni_bwd_sm90_args *args_of_run;
static void run_kernel(void) {
#if HOPPER
    K_NAME(*args_of_run);
#else
    K_NAME(args_of_run->bwd);
#endif
}
static void run_all(const problem *p) { /* a CTA for each row block, or each key block */
    const fattni_attention_args *const a = &p->args.bwd.a;
    const int by_rows = (a->Sq + K_BM - 1) / K_BM * a->Hq, by_keys = (a->Sk + K_BN - 1) / K_BN * a->Hkv;
    args_of_run = &p->args;
    gridDim.x = (unsigned)((OF_SUMS ? by_rows : by_keys) * a->B);
    for (unsigned n = 0; n < gridDim.x; ++n) machine_run((int)n, 1, 32 * K_WARPS, n, run_kernel);
}
#endif

/* With what a mean of the keys adds to it, where the kernel leaves that to another one. */
static double dq_at(const problem *p, const sequence *s, int b, int h, int i, int d) {
    const fattni_bwd_args *const bwd = &p->args.bwd;
    const int64_t base = row_base(bwd, s, b, h);
    const float *const mean = bwd->dq_of_mean ? key_mean_of(bwd, b, h / bwd->a.group) : NULL;
    return accumulated(p, base, i, d) + (mean ? (double)p->dq_of_mean[(size_t)(base + i)] * mean[d] : 0);
}

/* Relative errors: P and dS are rounded to 2^-9, of which sums of many terms keep a part. */
static int check(const test_case *c) {
    problem p;
    set_up(&p, c);
    expect(&p);
    run_all(&p);
    const fattni_attention_args *const a = &p.args.bwd.a;
    error dq = {0, 0}, dk = {0, 0}, dv = {0, 0}, d_bias = {0, 0};
    for (int b = 0; b < c->B && !OF_DBIAS && !OF_SUMS; ++b) {
        const sequence s = sequence_of(a, b);
        for (int h = 0; h < c->Hq; ++h)
            for (int i = 0; i < s.Sq; ++i)
                for (int d = 0; d < a->D; ++d) {
                    const size_t at = p.q.at(s.batch, h, s.q0 + i, d);
                    if (c->rows || OF_HUGE_ROWS)
                        add(&dq, value_of(p.dq.x[at]), a->scale * p.want_dq[at]);
                    else
                        add(&dq, dq_at(&p, &s, b, h, i, d), p.want_dq[at]);
                    p.dq.x[at] = UNTOUCHED;
                }
        for (int h = 0; h < c->Hkv; ++h)
            for (int j = 0; j < s.Sk; ++j)
                for (int d = 0; d < a->D; ++d) {
                    const size_t at = p.k.at(s.batch, h, s.k0 + j, d);
                    add(&dk, value_of(p.dk.x[at]), p.want_dk[at]);
                    p.dk.x[at] = UNTOUCHED;
                }
        for (int h = 0; h < c->Hkv; ++h)
            for (int j = 0; j < s.Sk; ++j)
                for (int d = 0; d < a->Dv; ++d) {
                    const size_t at = p.v.at(s.batch, h, s.k0 + j, d);
                    add(&dv, value_of(p.dv.x[at]), p.want_dv[at]);
                    p.dv.x[at] = UNTOUCHED;
                }
    }
    for (size_t n = 0; n < p.d_bias.size() && K_VARIANT != FATTNI_VARIANT_BIASED && !OF_SUMS; ++n)
        add(&d_bias, p.d_bias[n], p.want_d_bias[n]);
    int beyond = 0, means = 0; /* written beyond the end; wrong ones */
    error sums = {0, 0};
    for (size_t n = 0; n < p.want_sums.size() && OF_SUMS; ++n) {
        if (c->packed && isnan(p.want_sums[n])) { /* of no sequence */
            beyond += !isnan(p.dq_of_mean[n]);
            continue;
        }
        const double want = isnan(p.want_sums[n]) ? 0 : p.want_sums[n]; /* 0: of a padded row */
        sums.off += pow(p.dq_of_mean[n] - want, 2), sums.size += pow(p.sizes_of_sums[n], 2);
    }
    /* A wrong mean changes how dQ is rounded, which the errors hardly show. The sample is of 20 keys or more. */
    for (size_t n = 0; n < p.key_mean.size() && OF_SHORT_ROWS && c->mean; ++n)
        if (n % ROW_OF_MEANS % 5 == 0 && (int)(n % ROW_OF_MEANS) < a->D)
            means += !(fabsf(p.key_mean[n] - mean_of_head(c, n / ROW_OF_MEANS % (size_t)c->Hkv)) < 2);
    for (const field *f : {&p.dq, &p.dk, &p.dv})
        for (uint16_t x : f->x) beyond += x != UNTOUCHED && !(OF_HUGE_ROWS && x == 0);
    /* A score of 4096 is rounded to 2^-12; with means it is as large as they are, and a walk of D roundings. */
    const double of_delta = knows_sums(c) ? 0x1p-9 : 0; /* what it is off, and dbias P times that */
    const double most = 0x1p-8,
                 most_bias = of_delta + (OF_HUGE_ROWS ? 0x1p-12 : 1e-5 + c->mean * sqrt((double)a->D) * 0x1p-24);
    /* P and dP are as far off as what they are sums of, walks of D roundings; their sums, and c, by a few. */
    const double most_sums = 1e-5 + (c->mean + (c->exact ? 100 : 0)) * sqrt((double)a->D) * 0x1p-24;
    const int good = relative(&dq) < most && relative(&dk) < most && relative(&dv) < most &&
                     relative(&d_bias) < most_bias && relative(&sums) < most_sums && !beyond && !means;
    printf("%s%s d %d: dq %.1e dk %.1e dv %.1e dbias %.1e sums %.1e, %d means wrong, %d written beyond the end: %s\n",
           c->name,
           !c->parts    ? ""
           : c->divided ? ", the last in parts"
                        : ", in parts",
           K_D, relative(&dq), relative(&dk), relative(&dv), relative(&d_bias), relative(&sums), means, beyond,
           good ? "ok" : "WRONG");
    return !good;
}

#define CASE(N, B_, HQ, HKV, SQ, SK, D_, C, L, R)                                                                      \
    .name = N, .B = B_, .Hq = HQ, .Hkv = HKV, .Sq = SQ, .Sk = SK, .D = D_, .causal = C, .left = L, .right = R
static test_case cases[] = {
#if OF_SUMS
    {CASE("full", 1, 2, 1, 150, 200, K_D, 0, -1, -1), .mean = 100},
    {CASE("full, V with a mean", 1, 1, 1, 70, 300, K_D, 0, -1, -1), .mean = 10, .exact = 1, .softcap = 5},
    {CASE("causal, odd head, small cap", 1, 2, 1, 100, 70, K_D, 1, -1, -1), .mean = 10, .odd = 1, .softcap = 2},
    {CASE("causal, F32 would not cap", 1, 1, 1, 130, 140, K_D - 8, 1, -1, -1), .mean = 10, .softcap = 1e6f},
    {CASE("window, sink", 1, 2, 2, 200, 170, K_D, 0, 50, 21), .mean = 100, .sink = 1},
    {CASE("rows without keys", 1, 1, 1, 200, 70, K_D, 0, 20, 5), .mean = 100},
    {CASE("dropout, sink", 1, 2, 1, 150, 200, K_D - 8, 1, -1, -1), .dropout = 0.3f, .mean = 100, .sink = 1},
    {CASE("dropout at position 5", 1, 1, 1, 70, 130, K_D, 1, -1, -1), .dropout = 0.3f, .q_pos0 = 5, .mean = 10},
    {CASE("alibi, bias", 1, 2, 1, 100, 150, K_D, 0, -1, -1), .alibi = 1, .bias = 1, .mean = 100},
    {CASE("packed", 3, 4, 2, 140, 150, K_D, 1, -1, -1), .packed = 1, .length_q = {140, 0, 33}, .length_k = {71, 4, 150},
     .mean = 100, .sink = 1},
    {CASE("padded", 3, 2, 1, 100, 150, K_D, 1, -1, -1), .padded = 1, .length_q = {50, 100, 0}, .length_k = {150, 71, 3},
     .mean = 100},
#elif OF_HUGE_ROWS
    {CASE("huge", 1, 2, 1, 70, 90, K_D, 0, -1, -1), .bias = 1},
    {CASE("huge, causal, odd head", 1, 1, 1, 70, 80, K_D, 1, -1, -1), .bias = 1, .odd = 1},
    {CASE("huge, means", 1, 1, 1, 40, 130, K_D - 8, 0, 90, -1), .bias = 1, .mean = 100},
    {CASE("huge, means, softcap", 1, 1, 1, 40, 130, K_D - 8, 0, 90, -1), .bias = 1, .mean = 100, .softcap = 50},
    {CASE("huge, means, small softcap, dropout", 1, 1, 1, 70, 90, K_D, 1, -1, -1), .dropout = 0.3f, .bias = 1,
     .mean = 10, .softcap = 4},
    {CASE("huge, all", 2, 1, 1, 70, 100, K_D - 8, 1, 60, -1), .dropout = 0.2f, .alibi = 1, .bias = 1, .q_pos0 = 16,
     .padded = 1, .length_q = {60, 30}, .length_k = {100, 81}, .softcap = 3},
#else
#if K_VARIANT == FATTNI_VARIANT_FULL || K_VARIANT == FATTNI_VARIANT_PLAIN
    {CASE("full", 1, 2, 1, 150, 200, K_D, 0, -1, -1)},
    {CASE("full, odd head", 1, 2, 1, 100, 70, K_D, 0, -1, -1), .odd = 1},
    {CASE("full, short rows, deterministic", 1, 1, 1, 70, 280, K_D - 8, 0, -1, -1), .dq_semaphore = 1},
    {CASE("full, with rows", 1, 4, 2, 150, 140, K_D, 0, -1, -1), .rows = 1},
#if K_D <= 128 /* CTAs that share work items */
    {CASE("full, one head group", 1, 1, 1, 150, 300, K_D, 0, -1, -1), .rows = 2},
#endif
    {CASE("full, means", 1, 2, 1, 150, 200, K_D, 0, -1, -1), .mean = 100},
    {CASE("full, means, with rows", 1, 4, 2, 150, 140, K_D, 0, -1, -1), .rows = 1, .mean = 100},
    {CASE("full, exact, means, with rows", 1, 4, 2, 150, 140, K_D, 0, -1, -1), .rows = 1, .mean = 100, .exact = 1},
    {CASE("full, many heads", 6, 1, 1, 70, 50, K_D - 8, 0, -1, -1), .rows = 1},
#endif
#if K_VARIANT == FATTNI_VARIANT_CAUSAL || K_VARIANT == FATTNI_VARIANT_PLAIN
    {CASE("causal", 1, 2, 1, 200, 150, K_D, 1, -1, -1)},
    {CASE("causal, odd head", 1, 1, 1, 100, 70, K_D, 1, -1, -1), .odd = 1},
    {CASE("causal, short rows, deterministic", 2, 1, 1, 150, 280, K_D - 8, 1, -1, -1), .dq_semaphore = 1},
    {CASE("causal, with rows", 1, 6, 3, 150, 140, K_D, 1, -1, -1), .rows = 2},
    {CASE("causal, another order", 3, 2, 1, 450, 600, K_D, 1, -1, -1), .rows = 3, .order = {1, 3, 1}},
    {CASE("causal, turns", 1, 6, 2, 150, 1200, K_D, 1, -1, -1), .rows = 2, .turns = 1},
    {CASE("causal, five heads of a group", 1, 5, 1, 150, 200, K_D, 1, -1, -1), .rows = 1},
    {CASE("causal, by rows", 1, 4, 2, 150, 200, K_D, 1, -1, -1), .rows = 2, .by_rows = 1},
    {CASE("causal, by rows, deterministic", 1, 3, 1, 100, 280, K_D, 1, -1, -1), .dq_semaphore = 1, .rows = 1,
     .by_rows = 1},
    {CASE("causal, many heads", 7, 2, 1, 150, 200, K_D - 8, 1, -1, -1), .rows = 1},
    {CASE("causal, means, deterministic", 2, 1, 1, 150, 280, K_D - 8, 1, -1, -1), .dq_semaphore = 1, .mean = 50},
    {CASE("causal, means, with rows", 1, 6, 3, 150, 140, K_D, 1, -1, -1), .rows = 2, .mean = 100},
    {CASE("causal, exact, means, with rows", 1, 6, 3, 150, 140, K_D, 1, -1, -1), .rows = 2, .mean = 100, .exact = 1},
    {CASE("causal, with rows, deterministic", 2, 1, 1, 100, 280, K_D - 8, 1, -1, -1), .dq_semaphore = 1, .rows = 1},
#elif OF_SHORT_ROWS
    {CASE("short, eleven heads, means", 1, 11, 11, 128, 128, K_D, OF_CAUSAL_ROWS, -1, -1), .rows = 1, .mean = 100},
    {CASE("short, one block", 1, 2, 2, 100, 100, K_D, OF_CAUSAL_ROWS, -1, -1), .rows = 1},
    {CASE("short, two blocks", 1, 3, 3, 256, 256, K_D, OF_CAUSAL_ROWS, -1, -1), .rows = 1},
    {CASE("short, narrow heads", 2, 3, 3, 300, 300, K_D - 32, OF_CAUSAL_ROWS, -1, -1), .rows = 1},
    {CASE("short, four blocks", 1, 2, 2, 500, 500, K_D - 8, OF_CAUSAL_ROWS, -1, -1), .rows = 1},
    {CASE("short, means", 2, 3, 3, 200, 200, K_D, OF_CAUSAL_ROWS, -1, -1), .rows = 1, .mean = 100},
    {CASE("short, few keys, means", 1, 4, 4, 20, 20, K_D, OF_CAUSAL_ROWS, -1, -1), .rows = 1, .mean = 100},
    {CASE("short, exact, means", 1, 3, 3, 150, 150, K_D, OF_CAUSAL_ROWS, -1, -1), .rows = 1, .mean = 100, .exact = 1},
    {CASE("short, deterministic", 2, 2, 2, 130, 130, K_D, OF_CAUSAL_ROWS, -1, -1), .dq_semaphore = 1, .rows = 1},
#elif K_VARIANT != FATTNI_VARIANT_FULL
    {CASE("no feature", 1, 2, 1, 150, 200, K_D, 0, -1, -1)},
    {CASE("odd head", 1, 1, 1, 100, 70, K_D, 1, -1, -1), .odd = 1},
    {CASE("softcap", 1, 1, 1, 100, 130, K_D, 1, -1, -1), .softcap = 0.8f},
    {CASE("window", 1, 1, 1, 200, 170, K_D, 0, 50, 21)},
    {CASE("alibi", 1, 2, 2, 130, 129, K_D, 0, -1, -1), .alibi = 1},
    {CASE("bias", 1, 2, 1, 70, 140, K_D, 1, -1, -1), .bias = 1},
    {CASE("dropout", 1, 1, 1, 150, 200, K_D - 8, 0, -1, -1), .dropout = 0.3f},
    {CASE("most dropped, causal", 1, 2, 1, 150, 200, K_D, 1, -1, -1), .dropout = 0.7f},
    {CASE("dropout at position 5", 1, 1, 1, 70, 130, K_D, 1, -1, -1), .dropout = 0.3f, .q_pos0 = 5},
    {CASE("packed", 3, 1, 1, 140, 150, K_D, 1, -1, -1), .packed = 1, .length_q = {140, 0, 33},
     .length_k = {71, 4, 150}},
    {CASE("packed, full", 3, 1, 1, 80, 150, K_D, 0, -1, -1), .packed = 1, .length_q = {50, 80, 33},
     .length_k = {71, 130, 150}},
    {CASE("padded", 2, 2, 1, 100, 150, K_D, 1, -1, -1), .padded = 1, .length_q = {50, 100}, .length_k = {150, 71}},
    {CASE("all, deterministic", 2, 2, 1, 100, 150, K_D - 8, 1, 90, -1), .dropout = 0.2f, .alibi = 1, .bias = 1,
     .q_pos0 = 16, .dq_semaphore = 1, .padded = 1, .length_q = {90, 70}, .length_k = {150, 131}},
    {CASE("window, means", 1, 1, 1, 200, 170, K_D, 0, 50, 21), .mean = 100},
    {CASE("softcap, means, sink", 1, 2, 1, 150, 200, K_D, 0, -1, -1), .mean = 100, .softcap = 50, .sink = 1},
    {CASE("small softcap, causal, means", 1, 2, 1, 150, 150, K_D, 1, -1, -1), .mean = 10, .softcap = 5},
    {CASE("softcap, means, sink, with rows", 1, 4, 2, 200, 300, K_D, 0, -1, -1), .rows = 1, .mean = 100, .softcap = 50,
     .sink = 1},
    {CASE("packed, means", 3, 1, 1, 140, 150, K_D, 1, -1, -1), .packed = 1, .length_q = {140, 0, 33},
     .length_k = {71, 4, 150}, .mean = 100},
    {CASE("narrow window, means, with rows", 1, 2, 1, 300, 170, K_D, 0, 20, 5), .rows = 1, .mean = 100},
    {CASE("dropout, means, with rows", 1, 2, 1, 200, 300, K_D, 0, -1, -1), .dropout = 0.3f, .rows = 1, .mean = 100},
    {CASE("dropout, exact, means, with rows", 1, 2, 1, 200, 300, K_D, 0, -1, -1), .dropout = 0.3f, .rows = 1,
     .mean = 100, .exact = 1},
#if PACKED_ROWS
    {CASE("packed, with rows", 3, 4, 2, 140, 150, K_D, 1, -1, -1), .packed = 1, .length_q = {140, 0, 33},
     .length_k = {71, 4, 150}, .rows = 1},
    {CASE("packed, no keys, with rows", 2, 2, 1, 72, 1, K_D, 0, -1, -1), .packed = 1, .length_q = {64, 72},
     .length_k = {0, 0}, .rows = 1},
    {CASE("packed, full, with rows", 3, 2, 2, 140, 300, K_D, 0, -1, -1), .packed = 1, .length_q = {3, 140, 66},
     .length_k = {300, 0, 5}, .rows = 2},
    {CASE("packed, window, means, with rows, deterministic", 3, 2, 1, 260, 260, K_D, 1, 70, -1), .dq_semaphore = 1,
     .packed = 1, .length_q = {260, 50, 129}, .length_k = {260, 70, 129}, .rows = 1, .mean = 100},
    {CASE("packed, exact, means, with rows", 3, 1, 1, 80, 150, K_D - 8, 0, -1, -1), .packed = 1,
     .length_q = {50, 80, 33}, .length_k = {71, 130, 150}, .rows = 2, .mean = 100, .exact = 1},
#endif
    {CASE("window, deterministic", 1, 1, 1, 300, 300, K_D, 0, 40, 70), .dq_semaphore = 1},
    {CASE("window, alibi, with rows", 1, 4, 2, 200, 300, K_D, 0, 50, 21), .alibi = 1, .rows = 1},
    {CASE("window, with rows", 1, 4, 2, 200, 300, K_D, 1, 150, -1), .rows = 1},
    {CASE("padded, with rows, deterministic", 2, 2, 1, 200, 290, K_D - 8, 1, -1, -1), .dq_semaphore = 1, .padded = 1,
     .length_q = {50, 200}, .length_k = {290, 71}, .rows = 1},
    {CASE("padded, a sequence without keys, with rows", 3, 1, 1, 100, 150, K_D, 0, -1, -1), .padded = 1,
     .length_q = {50, 100, 0}, .length_k = {130, 0, 40}, .rows = 2},
    {CASE("padded, a sequence without keys, means, with rows", 3, 1, 1, 100, 150, K_D, 0, -1, -1), .padded = 1,
     .length_q = {50, 100, 0}, .length_k = {130, 0, 40}, .rows = 2, .mean = 100},
#endif
#endif
};

static bool runs(const test_case *c) {
    if (!HOPPER) return !c->rows;
    if (OF_SUMS) return !c->odd;
    const bool terms = c->dropout > 0 || c->alibi || (c->bias && !STAGED_BIAS), lengths = c->packed || c->padded;
    if (STAGED_BIAS && (terms || (OF_DBIAS && c->rows))) return false;
    if (c->softcap > 0 && K_VARIANT != FATTNI_VARIANT_CAPPED) return false;
    return !c->odd && !(K_VARIANT == FATTNI_VARIANT_BANDED && (terms || (CTAS > 1 && lengths)));
}

/* Kernels whose tasks may be divided; never where sequences are packed or dQ is summed in an order. */
static bool divides(const test_case *c) {
    return HOPPER && CTAS == 1 && !OF_SHORT_ROWS && !OF_DBIAS && !OF_SUMS && !c->packed && !c->dq_semaphore;
}

/* Tasks of the same time, of which only the last may be divided. */
static bool is_full(const test_case *c) {
    return !c->causal && c->left < 0 && c->right < 0 && !c->padded && !STAGED_BIAS;
}

/* Cases whose names have the argument in them, or all. */
int main(int count, char **arguments) {
    int wrong = 0;
    for (test_case &x : cases) {
        if (!strstr(x.name, count > 1 ? arguments[1] : "")) continue;
        x.bias |= STAGED_BIAS;
        if (runs(&x)) wrong += check(&x);
        x.parts = 3;
        if (runs(&x) && divides(&x)) wrong += check(&x);
        x.divided = 2;
        if (runs(&x) && divides(&x) && (is_full(&x) || x.turns)) wrong += check(&x);
        x.parts = x.divided = 0, x.heads = (x.Hq / x.Hkv + 1) / 2, x.turns = 1;
        if (runs(&x) && divides(&x) && x.Hq > x.Hkv) wrong += check(&x);
        x.divided = 2;
        if (runs(&x) && divides(&x) && x.Hq > x.Hkv) wrong += check(&x);
    }
    return wrong != 0;
}
