/* Validation of attention calls: from params and io to a fattni_problem. */
#include "core/attention/problem.h"

#include "core/attention/o_rest.h"
#include "core/fp8/fp8.h"
#include "core/tensor/philox.h"
#include "core/tensor/spans.h"

#include <fattn/fp8.h>

#include <math.h>
#include <stdio.h>
#include <string.h>

static const int64_t MAX_POSITION = (int64_t)1 << 29; /* of row 0: a GPU adds positions in 32 bits */
static const int64_t MAX_ROWS = (int64_t)1 << 48;     /* of all heads: sizes in bytes stay below 2^63 */
static const uint32_t known_flags = FATTN_CAUSAL | FATTN_CAUSAL_TOP_LEFT | FATTN_WINDOW | FATTN_DETERMINISTIC |
                                    FATTN_TF32 | FATTN_MERGE | FATTN_EXACT_DELTA | FATTN_TOP_LEFT | FATTN_ACC_DQ |
                                    FATTN_ACC_DK | FATTN_ACC_DV | FATTN_ACC_DBIAS | FATTN_ACC_DSINK | FATTN_FP8 |
                                    FATTN_FP8_HADAMARD | FATTN_UNIFIED_MAX | FATTN_FP8_RENEW | FATTN_FP8_INT8;

/* Dtype sets as bit masks. */
#define BIT(dtype) (1u << (dtype))
#define FLOATS (BIT(FATTN_F64) | BIT(FATTN_F32) | BIT(FATTN_F16) | BIT(FATTN_BF16))

typedef struct expect {
    const char *name;
    int ndim;
    int64_t shape[4];
    uint32_t dtypes;
    bool output;     /* no two elements may share an address */
    bool contiguous; /* the last dimension has stride 1 */
    bool broadcast;  /* a dimension may also be 1 */
} expect;

/* Checks t against e and normalises it into a. t may be NULL (absent). */
static fattn_status take(fattn_ctx *ctx, const fattn_tensor *t, const expect *e, fattni_array *a) {
    *a = (fattni_array){0};
    if (!t) return FATTN_OK;
    FATTNI_TRY(fattni_check_tensor(ctx, e->name, t));
    char text[96];
    if (t->ndim != e->ndim)
        return fattn_ctx_fail(ctx, FATTN_E_SHAPE, "%s: has %d dimensions %s, must have %d", e->name, t->ndim,
                              fattni_shape_text(t, text, sizeof text), e->ndim);
    if (!(e->dtypes & BIT(t->dtype)))
        return fattn_ctx_fail(ctx, FATTN_E_DTYPE, "%s: dtype %s does not match the other tensors", e->name,
                              fattn_dtype_name((fattn_dtype)t->dtype));
    *a = (fattni_array){.p = t->data, .dtype = t->dtype, .present = true};
    const bool empty = a->empty = fattn_tensor_numel(t) == 0; /* its strides are not read */
    for (int d = 0; d < t->ndim; ++d) {
        const int64_t want = e->shape[d], got = t->shape[d];
        if (got != want && !(e->broadcast && got == 1))
            return fattn_ctx_fail(ctx, FATTN_E_SHAPE, "%s: %s, but dimension %d must be %lld", e->name,
                                  fattni_shape_text(t, text, sizeof text), d, (long long)want);
        a->n[d] = got;
        a->s[d] = got > 1 && !empty ? t->stride[d] : 0;
        if (e->output && got > 1 && a->s[d] == 0 && !e->broadcast && !empty)
            return fattn_ctx_fail(ctx, FATTN_E_SHAPE, "%s: stride[%d] is 0: several results share one address", e->name,
                                  d);
    }
    if (e->contiguous && !empty && t->shape[e->ndim - 1] > 1 && t->stride[e->ndim - 1] != 1)
        return fattn_ctx_fail(ctx, FATTN_E_SHAPE, "%s: stride[%d] is %lld, the head dimension must be contiguous",
                              e->name, e->ndim - 1, (long long)t->stride[e->ndim - 1]);
    if (e->contiguous) a->s[e->ndim - 1] = 1;
    return FATTN_OK;
}

static fattn_status require(fattn_ctx *ctx, const char *name, const fattn_tensor *t) {
    if (t) return FATTN_OK;
    return fattn_ctx_fail(ctx, FATTN_E_ARG, "%s: NULL, but it is required", name);
}

static fattn_status take_params(fattn_ctx *ctx, const fattn_attention_params *p, fattni_problem *out) {
    if (p->flags & ~known_flags)
        return fattn_ctx_fail(ctx, FATTN_E_ARG, "flags: unknown bits 0x%x", p->flags & ~known_flags);
    if (p->rng.reserved) return fattn_ctx_fail(ctx, FATTN_E_ARG, "params: rng.reserved is %u, not 0", p->rng.reserved);
    if ((p->flags & FATTN_CAUSAL) && (p->flags & FATTN_CAUSAL_TOP_LEFT))
        return fattn_ctx_fail(ctx, FATTN_E_ARG, "flags: FATTN_CAUSAL and FATTN_CAUSAL_TOP_LEFT exclude each other");
    if ((p->flags & FATTN_FP8_HADAMARD) && !(p->flags & FATTN_FP8))
        return fattn_ctx_fail(ctx, FATTN_E_ARG, "flags: FATTN_FP8_HADAMARD is given without FATTN_FP8");
    if ((p->flags & FATTN_FP8_RENEW) && !(p->flags & FATTN_FP8))
        return fattn_ctx_fail(ctx, FATTN_E_ARG, "flags: FATTN_FP8_RENEW is given without FATTN_FP8");
    if ((p->flags & FATTN_FP8_INT8) && !(p->flags & FATTN_FP8))
        return fattn_ctx_fail(ctx, FATTN_E_ARG, "flags: FATTN_FP8_INT8 is given without FATTN_FP8");
    if (p->algorithm < FATTN_ALGO_AUTO || p->algorithm > FATTN_ALGO_FLASH2)
        return fattn_ctx_fail(ctx, FATTN_E_ARG, "algorithm: %d is not in %d..%d", p->algorithm, FATTN_ALGO_AUTO,
                              FATTN_ALGO_FLASH2);
    if (p->scale != 0 && !(isfinite(p->scale) && p->scale > 0))
        return fattn_ctx_fail(ctx, FATTN_E_ARG, "scale: %g is not finite and positive (0 = default)", (double)p->scale);
    if (p->softcap != 0 && !(isfinite(p->softcap) && p->softcap > 0))
        return fattn_ctx_fail(ctx, FATTN_E_ARG, "softcap: %g is not finite and positive (0 = off)", (double)p->softcap);
    if (!(p->dropout_p >= 0 && p->dropout_p < 1))
        return fattn_ctx_fail(ctx, FATTN_E_ARG, "dropout_p: %g is not in [0, 1)", (double)p->dropout_p);
    if (p->dropout_p > 0) {
        const long T = lround(FATTNI_DROP_ALL * (double)p->dropout_p);
        if (T < 1 || T >= FATTNI_DROP_ALL)
            return fattn_ctx_fail(ctx, FATTN_E_ARG, "dropout_p: %g rounds to %ld/%d, which is outside 1..%d",
                                  (double)p->dropout_p, T, FATTNI_DROP_ALL, FATTNI_DROP_ALL - 1);
        out->drop_T = (uint32_t)T;
    }
    out->keep_scale = FATTNI_DROP_ALL / (double)(FATTNI_DROP_ALL - out->drop_T);
    if (p->q_pos0 < 0 || p->k_pos0 < 0 || p->q_pos0 > MAX_POSITION || p->k_pos0 > MAX_POSITION)
        return fattn_ctx_fail(ctx, FATTN_E_ARG, "q_pos0 %lld, k_pos0 %lld: not in 0..2^29", (long long)p->q_pos0,
                              (long long)p->k_pos0);
    if (p->rng_batch0 < 0 || p->rng_head0 < 0 || p->rng_heads < 0)
        return fattn_ctx_fail(ctx, FATTN_E_ARG, "rng_batch0 %d, rng_head0 %d, rng_heads %d: negative", p->rng_batch0,
                              p->rng_head0, p->rng_heads);
    if ((p->flags & FATTN_UNIFIED_MAX) && !isfinite(p->unified_max))
        return fattn_ctx_fail(ctx, FATTN_E_ARG, "unified_max: %g is not finite", (double)p->unified_max);
    out->unified_max = (double)p->unified_max;
    out->flags = p->flags | (ctx->flags & FATTN_CTX_DETERMINISTIC ? FATTN_DETERMINISTIC : 0u) |
                 (ctx->flags & FATTN_CTX_TF32 ? FATTN_TF32 : 0u);
    out->algorithm = p->algorithm;
    out->scale = (double)p->scale;
    out->softcap = (double)p->softcap;
    out->q_pos0 = p->q_pos0;
    out->k_pos0 = p->k_pos0;
    out->window_left = out->window_right = FATTNI_UNBOUNDED;
    if (p->flags & FATTN_WINDOW) {
        if (p->window_left >= 0) out->window_left = p->window_left;
        if (p->window_right >= 0) out->window_right = p->window_right;
    }
    out->rng = p->rng;
    out->rng_batch0 = p->rng_batch0;
    out->rng_head0 = p->rng_head0;
    out->rng_heads = p->rng_heads;
    return FATTN_OK;
}

/* k and v in pages: their size, and Sk. */
static fattn_status take_pages(fattn_ctx *ctx, const fattn_attention_io *io, fattni_problem *p) {
    const int64_t *const k = io->k->shape, *const v = io->v->shape;
    const fattn_tensor *const table = io->page_table;
    char text[96];
    FATTNI_TRY(fattni_check_tensor(ctx, "page_table", table));
    if (table->ndim != 2 || table->shape[0] != p->B)
        return fattn_ctx_fail(ctx, FATTN_E_SHAPE, "page_table is %s, not [%lld,pages of a sequence]",
                              fattni_shape_text(table, text, sizeof text), (long long)p->B);
    if (io->cu_seqlens_q || io->cu_seqlens_k)
        return fattn_ctx_fail(ctx, FATTN_E_ARG, "page_table and cu_seqlens (packed) exclude each other");
    if (!io->seqlens_k) return fattn_ctx_fail(ctx, FATTN_E_ARG, "page_table needs seqlens_k: which keys are in use");
    if (p->algorithm == FATTN_ALGO_STANDARD || p->algorithm == FATTN_ALGO_FLASH1)
        return fattn_ctx_fail(ctx, FATTN_E_UNSUPPORTED, "page_table: algorithms STANDARD and FLASH1 have no pages");
    if (v[0] != k[0])
        return fattn_ctx_fail(ctx, FATTN_E_SHAPE, "k has %lld pages, v has %lld", (long long)k[0], (long long)v[0]);
    if (k[2] < 16 || (k[2] & (k[2] - 1)))
        return fattn_ctx_fail(ctx, FATTN_E_SHAPE, "k has pages of %lld keys: not a power of two of 16 or more",
                              (long long)k[2]);
    if (__builtin_mul_overflow(table->shape[1], k[2], &p->Sk) || p->Sk > INT32_MAX)
        return fattn_ctx_fail(ctx, FATTN_E_SHAPE, "page_table is %s with pages of %lld keys: more than 2^31-1 keys",
                              fattni_shape_text(table, text, sizeof text), (long long)k[2]);
    p->page = k[2];
    p->max_k = p->rows_k = p->Sk;
    return FATTN_OK;
}

/* q, k, v fix all sizes; B, Sq, Sk of a packed batch come from cu_seqlens and max_seqlen. */
static fattn_status take_sizes(fattn_ctx *ctx, const fattn_attention_params *params, const fattn_attention_io *io,
                               fattni_problem *p) {
    const fattn_tensor *const qkv[3] = {io->q, io->k, io->v};
    static const char *const names[3] = {"q", "k", "v"};
    char a[96], b[96];
    for (int n = 0; n < 3; ++n) {
        FATTNI_TRY(fattni_check_tensor(ctx, names[n], qkv[n]));
        if (qkv[n]->ndim != 4)
            return fattn_ctx_fail(ctx, FATTN_E_SHAPE, "%s: has %d dimensions, must have 4: [B,H,S,D]", names[n],
                                  qkv[n]->ndim);
        if (fattni_is_code(qkv[n]->dtype))
            return fattn_ctx_fail(ctx, FATTN_E_DTYPE,
                                  "%s: dtype %s; attention makes 8-bit copies of f32, f16 or bf16 itself, with "
                                  "FATTN_FP8 (fattn/fp8.h)",
                                  names[n], fattn_dtype_name((fattn_dtype)qkv[n]->dtype));
        if (!(FLOATS & BIT(qkv[n]->dtype)))
            return fattn_ctx_fail(ctx, FATTN_E_DTYPE, "%s: dtype %s is not a float type", names[n],
                                  fattn_dtype_name((fattn_dtype)qkv[n]->dtype));
        if (qkv[n]->dtype != io->q->dtype)
            return fattn_ctx_fail(ctx, FATTN_E_DTYPE, "%s is %s, but q is %s", names[n],
                                  fattn_dtype_name((fattn_dtype)qkv[n]->dtype),
                                  fattn_dtype_name((fattn_dtype)io->q->dtype));
    }
    const int64_t *const q = io->q->shape, *const k = io->k->shape, *const v = io->v->shape;
    if (k[2] != v[2])
        return fattn_ctx_fail(ctx, FATTN_E_SHAPE, "k: Sk=%lld but v: Sk=%lld", (long long)k[2], (long long)v[2]);
    if (q[3] != k[3])
        return fattn_ctx_fail(ctx, FATTN_E_SHAPE, "q: D=%lld but k: D=%lld", (long long)q[3], (long long)k[3]);
    if (k[1] != v[1] || (!io->page_table && (q[0] != k[0] || q[0] != v[0])))
        return fattn_ctx_fail(ctx, FATTN_E_SHAPE, "k is %s, v is %s, q has B=%lld: they do not match",
                              fattni_shape_text(io->k, a, sizeof a), fattni_shape_text(io->v, b, sizeof b),
                              (long long)q[0]);
    if (q[1] < 1 || k[1] < 1 || q[1] % k[1])
        return fattn_ctx_fail(ctx, FATTN_E_SHAPE, "q has %lld heads, k has %lld: not a positive multiple",
                              (long long)q[1], (long long)k[1]);
    if (q[3] < 1 || q[3] > FATTNI_MAX_HEAD_DIM || v[3] < 1 || v[3] > FATTNI_MAX_HEAD_DIM)
        return fattn_ctx_fail(ctx, FATTN_E_SHAPE, "head_dim: D=%lld, Dv=%lld are not in 1..%d", (long long)q[3],
                              (long long)v[3], FATTNI_MAX_HEAD_DIM);
    p->dtype = (fattn_dtype)io->q->dtype;
    p->B = q[0], p->Hq = q[1], p->Hkv = k[1], p->group = q[1] / k[1];
    p->Sq = p->max_q = p->rows_q = q[2], p->Sk = p->max_k = p->rows_k = k[2];
    p->D = q[3], p->Dv = v[3];
    if (io->page_table) FATTNI_TRY(take_pages(ctx, io, p));

    if (!io->cu_seqlens_q != !io->cu_seqlens_k)
        return fattn_ctx_fail(ctx, FATTN_E_ARG, "cu_seqlens_q and cu_seqlens_k: only one is given");
    if (io->cu_seqlens_q && (io->seqlens_q || io->seqlens_k))
        return fattn_ctx_fail(ctx, FATTN_E_ARG, "cu_seqlens (packed) and seqlens (padded) exclude each other");
    p->padded = io->seqlens_q || io->seqlens_k;
    p->packed = io->cu_seqlens_q;
    if (p->packed) {
        FATTNI_TRY(fattni_check_tensor(ctx, "cu_seqlens_q", io->cu_seqlens_q));
        if (io->cu_seqlens_q->ndim != 1 || io->cu_seqlens_q->shape[0] < 1 || q[0] != 1)
            return fattn_ctx_fail(ctx, FATTN_E_SHAPE,
                                  "packed: q is %s and cu_seqlens_q %s, not [1,Hq,total,D] and "
                                  "[Nseq+1]",
                                  fattni_shape_text(io->q, a, sizeof a),
                                  fattni_shape_text(io->cu_seqlens_q, b, sizeof b));
        if (params->max_seqlen_q < 0 || params->max_seqlen_q > INT32_MAX || params->max_seqlen_k < 0 ||
            params->max_seqlen_k > INT32_MAX)
            return fattn_ctx_fail(ctx, FATTN_E_ARG, "max_seqlen_q %lld, max_seqlen_k %lld: not in 0..2^31-1",
                                  (long long)params->max_seqlen_q, (long long)params->max_seqlen_k);
        p->B = io->cu_seqlens_q->shape[0] - 1;
        p->max_q = params->max_seqlen_q, p->max_k = params->max_seqlen_k;
        p->Sq = fattni_min(p->max_q, p->rows_q);
        p->Sk = fattni_min(p->max_k, p->rows_k);
    }
    if (p->Sq > INT32_MAX - 1 - p->q_pos0 || p->Sk > INT32_MAX - 1 - p->k_pos0)
        return fattn_ctx_fail(ctx, FATTN_E_SHAPE, "sequence: Sq=%lld, Sk=%lld with positions do not fit in 31 bits",
                              (long long)p->Sq, (long long)p->Sk);
    int64_t rows, held; /* of all heads; tensors that are empty or broadcast may have any number */
    const int64_t longest = fattni_max(fattni_max(p->max_q, p->max_k), 1);
    if (__builtin_mul_overflow(fattni_max(p->B, 1), p->Hq, &rows) || __builtin_mul_overflow(rows, longest, &rows) ||
        rows > MAX_ROWS || __builtin_mul_overflow(p->Hq, fattni_max(p->rows_q, p->rows_k), &held) || held > MAX_ROWS)
        return fattn_ctx_fail(
            ctx, FATTN_E_SHAPE, "B=%lld Hq=%lld, sequences of %lld in buffers of %lld: more than 2^48 rows",
            (long long)p->B, (long long)p->Hq, (long long)longest, (long long)fattni_max(p->rows_q, p->rows_k));
    if (p->scale == 0) p->scale = 1 / sqrt((double)p->D);
    if (p->rng_heads == 0) p->rng_heads = p->Hq;
    if (p->drop_T && p->rng_head0 + p->Hq > p->rng_heads)
        return fattn_ctx_fail(ctx, FATTN_E_ARG, "rng_head0 %lld + Hq %lld is more than rng_heads %lld",
                              (long long)p->rng_head0, (long long)p->Hq, (long long)p->rng_heads);
    return FATTN_OK;
}

static fattn_status take_tensors(fattn_ctx *ctx, const fattn_attention_io *io, bool backward, fattni_problem *p) {
    const int64_t Bt = p->packed ? 1 : p->B; /* dimension 0 of the buffers */
    const uint32_t same = BIT(p->dtype);
    const uint32_t wide = p->dtype == FATTN_F64 ? same : BIT(FATTN_F32); /* statistics */
    const uint32_t either = same | wide;
    const expect q = {"q", 4, {Bt, p->Hq, p->rows_q, p->D}, same, .contiguous = true};
    const int64_t Bk = p->page ? io->k->shape[0] : Bt, rows_k = p->page ? p->page : p->rows_k;
    const expect k = {"k", 4, {Bk, p->Hkv, rows_k, p->D}, same, .contiguous = true};
    const expect v = {"v", 4, {Bk, p->Hkv, rows_k, p->Dv}, same, .contiguous = true};
    const expect o = {"o", 4, {Bt, p->Hq, p->rows_q, p->Dv}, either, true, true, false};
    const expect lse = {"lse", 3, {Bt, p->Hq, p->rows_q}, wide, .output = true};
    const expect bias = {"bias", 4, {p->B, p->Hq, p->max_q, p->max_k}, either, .broadcast = true};
    const expect alibi = {"alibi", 1, {p->Hq}, wide};
    const expect sink = {"sink", 1, {p->Hq}, wide};
    const expect lengths_q = {"seqlens_q", 1, {p->B}, BIT(FATTN_I32)};
    const expect lengths_k = {"seqlens_k", 1, {p->B}, BIT(FATTN_I32)};
    const expect cu_q = {"cu_seqlens_q", 1, {p->B + 1}, BIT(FATTN_I32)};
    const expect cu_k = {"cu_seqlens_k", 1, {p->B + 1}, BIT(FATTN_I32)};
    const expect step = {"rng_step", 0, {0}, BIT(FATTN_I32)};
    const expect pages = {"page_table", 2, {p->B, p->page ? p->Sk / p->page : 0}, BIT(FATTN_I32)};
    FATTNI_TRY(require(ctx, "o", io->o));
    FATTNI_TRY(require(ctx, "lse", io->lse));
    FATTNI_TRY(take(ctx, io->q, &q, &p->q));
    FATTNI_TRY(take(ctx, io->k, &k, &p->k));
    FATTNI_TRY(take(ctx, io->v, &v, &p->v));
    FATTNI_TRY(take(ctx, io->o, &o, &p->o));
    FATTNI_TRY(take(ctx, io->lse, &lse, &p->lse));
    FATTNI_TRY(take(ctx, io->bias, &bias, &p->bias));
    FATTNI_TRY(take(ctx, io->alibi, &alibi, &p->alibi));
    FATTNI_TRY(take(ctx, io->sink, &sink, &p->sink));
    FATTNI_TRY(take(ctx, io->seqlens_q, &lengths_q, &p->seqlens_q));
    FATTNI_TRY(take(ctx, io->seqlens_k, &lengths_k, &p->seqlens_k));
    FATTNI_TRY(take(ctx, io->cu_seqlens_q, &cu_q, &p->cu_seqlens_q));
    FATTNI_TRY(take(ctx, io->cu_seqlens_k, &cu_k, &p->cu_seqlens_k));
    FATTNI_TRY(take(ctx, io->rng_step, &step, &p->rng_step));
    FATTNI_TRY(take(ctx, io->page_table, &pages, &p->page_table));

    if (p->pass == FATTNI_BWD && backward) FATTNI_TRY(require(ctx, "d_o", io->d_o));
    if (!backward) return FATTN_OK;
    expect d_o = o, delta = lse, d_lse = lse, dq = q, dk = k, dv = v, d_sink = sink;
    d_o.name = "d_o", d_o.output = false, d_o.dtypes = either;
    d_lse.name = "d_lse", d_lse.output = false;
    delta.name = "delta", delta.output = false;
    dq.name = "dq", dq.output = true, dq.dtypes = either;
    dk.name = "dk", dk.output = true, dk.dtypes = either;
    dv.name = "dv", dv.output = true, dv.dtypes = either;
    d_sink.name = "d_sink", d_sink.output = true;
    const expect d_bias = {"d_bias", 4, {p->B, p->Hq, p->max_q, p->max_k}, wide, .output = true, .broadcast = true};
    FATTNI_TRY(take(ctx, io->d_o, &d_o, &p->d_o));
    FATTNI_TRY(take(ctx, io->d_lse, &d_lse, &p->d_lse));
    FATTNI_TRY(take(ctx, io->delta, &delta, &p->delta));
    FATTNI_TRY(take(ctx, io->dq, &dq, &p->dq));
    FATTNI_TRY(take(ctx, io->dk, &dk, &p->dk));
    FATTNI_TRY(take(ctx, io->dv, &dv, &p->dv));
    FATTNI_TRY(take(ctx, io->d_bias, &d_bias, &p->d_bias));
    FATTNI_TRY(take(ctx, io->d_sink, &d_sink, &p->d_sink));
    if (p->d_bias.present && !p->bias.present) return fattn_ctx_fail(ctx, FATTN_E_ARG, "d_bias: given without bias");
    if (p->d_sink.present && !p->sink.present) return fattn_ctx_fail(ctx, FATTN_E_ARG, "d_sink: given without sink");
    const bool sums = p->d_bias.present && fattn_tensor_numel(io->bias) > 0 && fattn_tensor_numel(io->d_bias) > 0;
    for (int d = 0; sums && d < 4; ++d)
        if (bias.shape[d] > 1 && !p->d_bias.s[d] != !p->bias.s[d])
            return fattn_ctx_fail(ctx, FATTN_E_SHAPE, "d_bias: dimension %d %s, but bias's %s: both or neither", d,
                                  p->d_bias.s[d] ? "does not broadcast" : "broadcasts",
                                  p->bias.s[d] ? "does not" : "does");
    return FATTN_OK;
}

/* The caller's 8-bit copies. */
static fattn_status take_fp8(fattn_ctx *ctx, const fattn_fp8 *given, fattni_problem *p) {
    fattn_fp8 known;
    FATTNI_TRY(fattni_take_struct(ctx, "fattn_fp8", given, &known, sizeof known));
    if (!(isfinite(known.rope_base) && known.rope_base >= 0))
        return fattn_ctx_fail(ctx, FATTN_E_ARG, "fp8.rope_base: %g is not finite and positive (0 = no rotation)",
                              (double)known.rope_base);
    if (known.rope_base > 0 && p->D % 16)
        return fattn_ctx_fail(ctx, FATTN_E_SHAPE, "fp8.rope_base: %g, but D=%lld is not a multiple of 16",
                              (double)known.rope_base, (long long)p->D);
    const fattni_fp8 want = fattni_fp8_lay_out(p, NULL);
    fattni_fp8 got = {.rope_base = known.rope_base};
    const bool by_32_keys = p->flags & FATTN_FP8_INT8;
    const struct {
        const char *name;
        const fattn_tensor *t;
        const fattni_array *want;
        fattni_array *got;
        int ndim;
    } all[] = {{"fp8.q8", &known.q8, &want.q, &got.q, 4},
               {"fp8.k8", &known.k8, &want.k, &got.k, 4},
               {"fp8.v8", &known.v8, &want.v, &got.v, 4},
               {"fp8.q_scale", &known.q_scale, &want.q_scale, &got.q_scale, 3},
               {"fp8.q_shift", &known.q_shift, &want.q_shift, &got.q_shift, 3},
               {"fp8.k_scale", &known.k_scale, &want.k_scale, &got.k_scale, by_32_keys ? 3 : 2},
               {"fp8.v_scale", &known.v_scale, &want.v_scale, &got.v_scale, 3},
               {"fp8.v_mean", &known.v_mean, &want.v_mean, &got.v_mean, 3},
               {"fp8.partials", &known.partials, &want.partials, &got.partials, 4}};
    for (size_t n = 0; n < sizeof all / sizeof *all; ++n) {
        const fattni_array *const w = all[n].want;
        fattni_array *const a = all[n].got;
        const int last = all[n].ndim - 1;
        const expect e = {
            all[n].name, all[n].ndim, {w->n[0], w->n[1], w->n[2], w->n[3]}, BIT(w->dtype), .output = true};
        if (w->dtype != all[n].t->dtype && fattni_is_code(w->dtype) && fattni_is_code(all[n].t->dtype))
            return fattn_ctx_fail(ctx, FATTN_E_DTYPE, "%s: dtype %s, but %s FATTN_FP8_INT8 it is %s", e.name,
                                  fattn_dtype_name((fattn_dtype)all[n].t->dtype), by_32_keys ? "with" : "without",
                                  fattn_dtype_name((fattn_dtype)w->dtype));
        FATTNI_TRY(take(ctx, all[n].t, &e, a));
        if (!a->empty && a->n[last] > 1 && a->s[last] != 1)
            return fattn_ctx_fail(ctx, FATTN_E_SHAPE, "%s: stride[%d] is %lld, must be 1", e.name, last,
                                  (long long)a->s[last]);
        a->s[last] = 1;
        const bool copied = fattni_is_code(w->dtype) || (by_32_keys && a == &got.k_scale); /* in bulk, by kernels */
        if (!copied || a->empty) continue;
        const int64_t unit = 16 / (int64_t)fattn_dtype_size((fattn_dtype)w->dtype);
        if ((uintptr_t)a->p % 16)
            return fattn_ctx_fail(ctx, FATTN_E_ARG, "%s: data %p is not aligned to 16 bytes", e.name, a->p);
        for (int d = 0; d < last; ++d)
            if (a->s[d] < 0 || a->s[d] % unit)
                return fattn_ctx_fail(ctx, FATTN_E_SHAPE, "%s: stride[%d] is %lld, not a positive multiple of %lld",
                                      e.name, d, (long long)a->s[d], (long long)unit);
    }
    p->fp8 = got;
    return FATTN_OK;
}

static int32_t length_at(const fattni_array *a, int64_t b) { return ((const int32_t *)a->p)[b * a->s[0]]; }

static fattn_status check_pages(fattn_ctx *ctx, const fattni_problem *p) {
    const fattni_array *const t = &p->page_table;
    for (int64_t b = 0; b < p->B; ++b)
        for (int64_t n = 0; n * p->page < length_at(&p->seqlens_k, b); ++n) {
            const int32_t page = ((const int32_t *)t->p)[b * t->s[0] + n * t->s[1]];
            if (page < 0 || page >= p->k.n[0])
                return fattn_ctx_fail(ctx, FATTN_E_ARG, "page_table[%lld,%lld] = %d is not in 0..%lld", (long long)b,
                                      (long long)n, page, (long long)p->k.n[0] - 1);
        }
    return FATTN_OK;
}

/* On the CPU invalid lengths are rejected before anything is computed. */
fattn_status fattni_check_lengths(fattn_ctx *ctx, const fattni_problem *p) {
    if (ctx->device != FATTN_CPU) return FATTN_OK;
    const fattni_array *const padded[2] = {&p->seqlens_q, &p->seqlens_k};
    const fattni_array *const packed[2] = {&p->cu_seqlens_q, &p->cu_seqlens_k};
    const int64_t bound[2] = {p->Sq, p->Sk}, rows[2] = {p->rows_q, p->rows_k};
    for (int n = 0; n < 2; ++n) {
        const char side = n ? 'k' : 'q';
        for (int64_t b = 0; padded[n]->present && b < p->B; ++b) {
            const int32_t length = length_at(padded[n], b);
            if (length < 0 || length > bound[n])
                return fattn_ctx_fail(ctx, FATTN_E_ARG, "seqlens_%c[%lld] = %d is not in 0..%lld", side, (long long)b,
                                      length, (long long)bound[n]);
        }
        if (!packed[n]->present) continue;
        const int32_t first = length_at(packed[n], 0), last = length_at(packed[n], p->B);
        if (first < 0 || last > rows[n])
            return fattn_ctx_fail(ctx, FATTN_E_ARG, "cu_seqlens_%c runs from %d to %d, the buffer has %lld rows", side,
                                  first, last, (long long)rows[n]);
        for (int64_t b = 0; b < p->B; ++b) {
            const int64_t length = (int64_t)length_at(packed[n], b + 1) - (int64_t)length_at(packed[n], b);
            if (length < 0 || length > bound[n])
                return fattn_ctx_fail(ctx, FATTN_E_ARG,
                                      "cu_seqlens_%c: sequence %lld has length %lld, not in 0..%lld "
                                      "(max_seqlen_%c)",
                                      side, (long long)b, (long long)length, (long long)bound[n], side);
        }
    }
    return p->page ? check_pages(ctx, p) : FATTN_OK;
}

/* A query that gives no gradient tensor plans for all of them. */
static void want_all_gradients_if_none(fattni_problem *p) {
    if (p->dq.present || p->dk.present || p->dv.present || p->d_bias.present || p->d_sink.present) return;
    const fattni_array wanted = {.dtype = p->dtype, .present = true};
    p->dq = p->dk = p->dv = wanted;
    const fattni_array statistic = {.dtype = p->lse.dtype, .present = true};
    if (p->bias.present) {
        p->d_bias = p->bias; /* which dimensions broadcast */
        p->d_bias.dtype = statistic.dtype;
    }
    if (p->sink.present) p->d_sink = statistic;
}

fattni_array fattni_o_rest_of(const fattni_problem *p) {
    if (!p->has_o_rest) return (fattni_array){0};
    const int64_t pitch = FATTNI_O_REST_PITCH(p->Dv), head = p->rows_q * pitch;
    return (fattni_array){.p = p->saved,
                          .n = {p->packed ? 1 : p->B, p->Hq, p->rows_q, p->Dv},
                          .s = {p->packed ? 0 : p->Hq * head, head, pitch, 1},
                          .dtype = FATTN_U8,
                          .present = true};
}

size_t fattni_o_rest_bytes(const fattni_problem *p) {
    const fattni_array rest = fattni_o_rest_of(p);
    return (size_t)(rest.n[0] * rest.n[1] * rest.n[2] * rest.s[2]);
}

fattn_status fattni_problem_init(fattn_ctx *ctx, const fattn_attention_params *params, const fattn_attention_io *io,
                                 enum fattni_pass pass, bool running, fattni_problem *out) {
    if (!ctx) return FATTN_E_ARG;
    if (!io) return fattn_ctx_fail(ctx, FATTN_E_ARG, "io: NULL");
    fattn_attention_params known_params = {.struct_size = sizeof known_params};
    fattn_attention_io known_io;
    if (params)
        FATTNI_TRY(fattni_take_struct(ctx, "fattn_attention_params", params, &known_params, sizeof known_params));
    FATTNI_TRY(fattni_take_struct(ctx, "fattn_attention_io", io, &known_io, sizeof known_io));
    if (known_io.reserved) return fattn_ctx_fail(ctx, FATTN_E_ARG, "io: reserved is %u, not 0", known_io.reserved);
    fattni_problem p = {.pass = pass};
    FATTNI_TRY(take_params(ctx, &known_params, &p));
    FATTNI_TRY(take_sizes(ctx, &known_params, &known_io, &p));
    /* A query plans both passes from one io: those of backward's tensors that are given are checked.
       A forward call does not read them. */
    const bool backward = pass == FATTNI_BWD;
    if (backward && running && p.page)
        return fattn_ctx_fail(ctx, FATTN_E_UNSUPPORTED, "page_table: backward has no pages");
    if (backward && !running && !known_io.d_o) known_io.d_o = known_io.o, p.any_d_o = true;
    FATTNI_TRY(take_tensors(ctx, &known_io, backward, &p));
    const bool narrow_o = p.o.dtype == FATTN_F16 || p.o.dtype == FATTN_BF16;
    if (!(backward && running) && (p.flags & FATTN_MERGE) && narrow_o)
        return fattn_ctx_fail(ctx, FATTN_E_DTYPE, "o: %s cannot hold a partial result (MERGE): use f32",
                              fattn_dtype_name((fattn_dtype)p.o.dtype));
    if ((p.flags & FATTN_EXACT_DELTA) && (p.flags & FATTN_MERGE) && narrow_o)
        return fattn_ctx_fail(ctx, FATTN_E_DTYPE,
                              "o: %s, but no forward call with MERGE has one: EXACT_DELTA needs f32",
                              fattn_dtype_name((fattn_dtype)p.o.dtype));
    const bool renews = backward && (p.flags & FATTN_FP8_RENEW);
    if (renews && p.delta.present)
        return fattn_ctx_fail(ctx, FATTN_E_ARG,
                              "delta: given beside FATTN_FP8_RENEW, which computes it from its own O");
    if ((p.flags & FATTN_FP8) && (renews || !(backward && running))) {
        const char *const why = fattni_fp8_why_unsupported(&p);
        if (why) return fattn_ctx_fail(ctx, FATTN_E_UNSUPPORTED, "FATTN_FP8 %s", why);
        if (known_io.fp8 && !(backward && running)) FATTNI_TRY(take_fp8(ctx, known_io.fp8, &p));
    }
    if (backward && running) {
        fattni_forget_fp8(&p);
        p.flags &= ~(uint32_t)FATTN_UNIFIED_MAX;
    }
    if ((p.flags & FATTN_UNIFIED_MAX) && p.dtype == FATTN_F16)
        return fattn_ctx_fail(ctx, FATTN_E_UNSUPPORTED,
                              "FATTN_UNIFIED_MAX in f16: P, not relative to a row's own maximum, leaves its range");
    if (backward && !running) want_all_gradients_if_none(&p);
    if (running) FATTNI_TRY(fattni_check_lengths(ctx, &p));
    p.saved = known_io.saved, p.saved_bytes = known_io.saved_bytes;
    p.has_o_rest = (p.flags & FATTN_EXACT_DELTA) && narrow_o;
    p.workspace = known_io.workspace, p.workspace_bytes = known_io.workspace_bytes;
    *out = p;
    return FATTN_OK;
}

void fattni_forget_fp8(fattni_problem *p) {
    p->flags &= ~(uint32_t)(FATTN_FP8 | FATTN_FP8_HADAMARD | FATTN_FP8_INT8);
    p->fp8 = (fattni_fp8){0};
    if (p->flags & FATTN_FP8_RENEW) (void)fattni_fp8_renew(p, NULL);
}

fattni_problem fattni_forward_of(const fattni_problem *bwd) {
    fattni_problem p = *bwd;
    const fattni_array none = {0};
    p.pass = FATTNI_FWD;
    p.d_o = p.d_lse = p.delta = p.dq = p.dk = p.dv = p.d_bias = p.d_sink = none;
    p.any_d_o = false;
    return p;
}

/* ---- overlaps ---- */

static void add_array(fattni_span *all, int *n, const char *name, const fattni_array *a) {
    if (!a->present || a->empty) return;
    all[(*n)++] = fattni_span_of(name, a->p, fattn_dtype_size((fattn_dtype)a->dtype), 4, a->n, a->s);
}

static void add_memory(fattni_span *all, int *n, const char *name, const void *p, size_t bytes) {
    const int64_t one = 1, count = (int64_t)bytes;
    if (bytes) all[(*n)++] = fattni_span_of(name, p, 1, 1, &count, &one);
}

static void add_inputs(fattni_span *all, int *n, const fattni_problem *p) {
    add_array(all, n, "q", &p->q);
    add_array(all, n, "k", &p->k);
    add_array(all, n, "v", &p->v);
    add_array(all, n, "seqlens_q", &p->seqlens_q);
    add_array(all, n, "seqlens_k", &p->seqlens_k);
    add_array(all, n, "cu_seqlens_q", &p->cu_seqlens_q);
    add_array(all, n, "cu_seqlens_k", &p->cu_seqlens_k);
}

static void add_fp8(fattni_span *all, int *n, const fattni_fp8 *fp8) {
    add_array(all, n, "fp8.q8", &fp8->q);
    add_array(all, n, "fp8.k8", &fp8->k);
    add_array(all, n, "fp8.v8", &fp8->v);
    add_array(all, n, "fp8.q_scale", &fp8->q_scale);
    add_array(all, n, "fp8.q_shift", &fp8->q_shift);
    add_array(all, n, "fp8.k_scale", &fp8->k_scale);
    add_array(all, n, "fp8.v_scale", &fp8->v_scale);
    add_array(all, n, "fp8.v_mean", &fp8->v_mean);
    add_array(all, n, "fp8.partials", &fp8->partials);
}

fattn_status fattni_check_fp8_overlaps(fattn_ctx *ctx, const fattni_problem *p) {
    fattni_span all[16];
    int n = 0;
    add_fp8(all, &n, &p->fp8);
    const int written = n;
    add_inputs(all, &n, p);
    return fattni_check_spans(ctx, all, written, n);
}

fattn_status fattni_check_overlaps(fattn_ctx *ctx, const fattni_problem *p, size_t workspace, size_t saved) {
    const bool forward = p->pass == FATTNI_FWD;
    fattni_span all[33]; /* what is written comes first */
    int n = 0;
    add_memory(all, &n, "workspace", p->workspace, workspace);
    if (forward) {
        add_memory(all, &n, "saved", p->saved, saved);
        add_array(all, &n, "o", &p->o);
        add_array(all, &n, "lse", &p->lse);
    } else {
        add_array(all, &n, "dq", &p->dq);
        add_array(all, &n, "dk", &p->dk);
        add_array(all, &n, "dv", &p->dv);
        add_array(all, &n, "d_bias", &p->d_bias);
        add_array(all, &n, "d_sink", &p->d_sink);
    }
    const int written = n;
    add_inputs(all, &n, p);
    add_array(all, &n, "bias", &p->bias);
    add_array(all, &n, "alibi", &p->alibi);
    add_array(all, &n, "sink", &p->sink);
    add_fp8(all, &n, &p->fp8);
    add_array(all, &n, "rng_step", &p->rng_step);
    add_array(all, &n, "page_table", &p->page_table);
    if (!forward) {
        const bool reads_o = !(p->flags & FATTN_FP8_RENEW); /* the caller's */
        add_memory(all, &n, "saved", p->saved, saved);
        if (reads_o) add_array(all, &n, "o", &p->o);
        if (reads_o) add_array(all, &n, "lse", &p->lse);
        add_array(all, &n, "d_o", &p->d_o);
        add_array(all, &n, "d_lse", &p->d_lse);
        add_array(all, &n, "delta", &p->delta);
    }
    return fattni_check_spans(ctx, all, written, n);
}

fattni_sequence fattni_sequence_of(const fattni_problem *p, int64_t b) {
    fattni_sequence s = {.band = {.Sq = p->Sq, .Sk = p->Sk}, .b = b, .batch = p->packed ? 0 : b};
    if (p->packed) {
        s.q0 = length_at(&p->cu_seqlens_q, b);
        s.k0 = length_at(&p->cu_seqlens_k, b);
        s.band.Sq = length_at(&p->cu_seqlens_q, b + 1) - s.q0;
        s.band.Sk = length_at(&p->cu_seqlens_k, b + 1) - s.k0;
    }
    if (p->seqlens_q.present) s.band.Sq = length_at(&p->seqlens_q, b);
    if (p->seqlens_k.present) s.band.Sk = length_at(&p->seqlens_k, b);
    const int64_t off = p->flags & (FATTN_CAUSAL_TOP_LEFT | FATTN_TOP_LEFT) ? 0 : s.band.Sk - s.band.Sq;
    s.diagonal = p->q_pos0 + off - p->k_pos0;
    const bool causal = p->flags & (FATTN_CAUSAL | FATTN_CAUSAL_TOP_LEFT);
    const int64_t right = causal ? 0 : p->window_right;
    s.band.lo = p->window_left == FATTNI_UNBOUNDED ? -FATTNI_UNBOUNDED : s.diagonal - p->window_left;
    s.band.hi = right == FATTNI_UNBOUNDED ? FATTNI_UNBOUNDED : s.diagonal + right;
    return s;
}

void fattni_problem_text(const fattni_problem *p, char *buffer, size_t size) {
    snprintf(buffer, size, "%s, B=%lld Hq=%lld Hkv=%lld Sq=%lld Sk=%lld D=%lld Dv=%lld", fattn_dtype_name(p->dtype),
             (long long)p->B, (long long)p->Hq, (long long)p->Hkv, (long long)p->Sq, (long long)p->Sk, (long long)p->D,
             (long long)p->Dv);
}
