/* One attention case of a fixture file: inputs from Philox, results from the fp64 reference. */
#include "generator.h"

#include "core/attention/ref.h"

#include <math.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>

#define IO(member) offsetof(fattn_attention_io, member)
static const struct {
    const char *name;
    size_t io;
    uint32_t adds; /* outputs: the flag under which the call adds to what <name>_in holds */
} slots[SLOTS] = {
    [Q] = {"q", IO(q), 0},
    [K] = {"k", IO(k), 0},
    [V] = {"v", IO(v), 0},
    [D_O] = {"d_o", IO(d_o), 0},
    [BIAS_IN] = {"bias", IO(bias), 0},
    [ALIBI] = {"alibi", IO(alibi), 0},
    [SINK] = {"sink", IO(sink), 0},
    [D_LSE] = {"d_lse", IO(d_lse), 0},
    [DELTA] = {"delta", IO(delta), 0},
    [SEQLENS_Q] = {"seqlens_q", IO(seqlens_q), 0},
    [SEQLENS_K] = {"seqlens_k", IO(seqlens_k), 0},
    [CU_Q] = {"cu_seqlens_q", IO(cu_seqlens_q), 0},
    [CU_K] = {"cu_seqlens_k", IO(cu_seqlens_k), 0},
    [STEP] = {"rng_step", IO(rng_step), 0},
    [O] = {"o", IO(o), FATTN_MERGE},
    [LSE] = {"lse", IO(lse), FATTN_MERGE},
    [DQ] = {"dq", IO(dq), FATTN_ACC_DQ},
    [DK] = {"dk", IO(dk), FATTN_ACC_DK},
    [DV] = {"dv", IO(dv), FATTN_ACC_DV},
    [D_BIAS] = {"d_bias", IO(d_bias), FATTN_ACC_DBIAS},
    [D_SINK] = {"d_sink", IO(d_sink), FATTN_ACC_DSINK},
};

/* The spec with its defaults. */
typedef struct sizes {
    int64_t B, Hq, Hkv, Sq, Sk, D, Dv, rows_q, rows_k;
} sizes;

static int64_t total(const int32_t *each, int64_t count) {
    int64_t sum = 0;
    for (int64_t n = 0; n < count; ++n) sum += each[n];
    return sum;
}

/* Packed buffers have rows of no sequence at their end: they must not be written. */
static sizes sizes_of(const attention_spec *s) {
    enum { SPARE_ROWS = 2 };
    sizes z = {.B = s->B || s->empty ? s->B : 1, .Hq = s->Hq ? s->Hq : 2, .Sq = s->Sq, .D = s->D};
    z.Hkv = s->Hkv ? s->Hkv : z.Hq;
    z.Sk = s->Sk || s->empty ? s->Sk : s->Sq;
    z.Dv = s->Dv ? s->Dv : s->D;
    const bool packed = s->lengths == PACKED;
    z.rows_q = packed ? total(s->length_q, z.B) + SPARE_ROWS : z.Sq;
    z.rows_k = packed ? total(s->length_k, z.B) + SPARE_ROWS : z.Sk;
    return z;
}

static fattn_status integers(attention_case *c, enum slot s, const int32_t *values, int64_t count, bool sums) {
    FATTNI_TRY(fattn_tensor_alloc(c->w->ctx, FATTN_I32, 1, &count, &c->t[s]));
    int32_t *const out = c->t[s].data, sum = 0;
    for (int64_t n = 0; n < count; ++n) {
        out[n] = sums ? sum : values[n];
        if (n < count - 1) sum += values[n];
    }
    return FATTN_OK;
}

static fattn_status take_lengths(attention_case *c, const sizes *z) {
    const attention_spec *const s = c->spec;
    const bool both = s->lengths == PADDED;
    if (s->lengths == PACKED) {
        FATTNI_TRY(integers(c, CU_Q, s->length_q, z->B + 1, true));
        FATTNI_TRY(integers(c, CU_K, s->length_k, z->B + 1, true));
        c->params.max_seqlen_q = z->Sq;
        c->params.max_seqlen_k = z->Sk;
    }
    if (both || s->lengths == PADDED_Q) FATTNI_TRY(integers(c, SEQLENS_Q, s->length_q, z->B, false));
    if (both || s->lengths == PADDED_K) FATTNI_TRY(integers(c, SEQLENS_K, s->length_k, z->B, false));
    return FATTN_OK;
}

/* Zero in rows that belong to no sequence, as in padded batches in practice. */
static void clear_padding(attention_case *c, enum slot s, const int32_t *used) {
    fattn_tensor *const t = &c->t[s];
    const bool packed = c->spec->lengths == PACKED;
    double *const x = t->data;
    const int64_t width = t->ndim == 4 ? t->shape[3] : 1, rows = t->shape[2];
    for (int64_t n = 0; n < fattn_tensor_numel(t) / (width ? width : 1); ++n) {
        const int64_t b = n / (t->shape[1] * rows), i = n % rows;
        const int64_t end = packed ? total(used, c->spec->B) : used[b];
        for (int64_t d = 0; i >= end && d < width; ++d) x[n * width + d] = 0;
    }
}

/* The published slopes, 2^(-8 (h+1)/H): powers of two here, exact in every type. */
static fattn_status take_slopes(attention_case *c, int64_t heads) {
    FATTNI_TRY(fattn_tensor_alloc(c->w->ctx, FATTN_F64, 1, &heads, &c->t[ALIBI]));
    for (int64_t h = 0; h < heads; ++h) ((double *)c->t[ALIBI].data)[h] = ldexp(1, (int)(-8 * (h + 1) / heads));
    return FATTN_OK;
}

static fattn_status draw_inputs(attention_case *c, const sizes *z) {
    const attention_spec *const s = c->spec;
    const fattn_dtype exact = s->exact ? s->exact : FATTN_F32;
    const int64_t B = s->lengths == PACKED ? 1 : z->B;
    const int64_t q[4] = {B, z->Hq, z->rows_q, z->D}, k[4] = {B, z->Hkv, z->rows_k, z->D};
    const int64_t v[4] = {B, z->Hkv, z->rows_k, z->Dv}, o[4] = {B, z->Hq, z->rows_q, z->Dv};
    const int64_t one[4] = {1, 1, 1, z->Dv}, none[1] = {0};
    const int64_t bias[4] = {s->bias & OVER_B ? 1 : z->B, s->bias & OVER_H ? 1 : z->Hq, s->bias & OVER_ROWS ? 1 : z->Sq,
                             s->bias & OVER_KEYS ? 1 : z->Sk};
    FATTNI_TRY(draw(c->w, exact, 4, q, &c->t[Q]));
    FATTNI_TRY(draw(c->w, exact, 4, k, &c->t[K]));
    FATTNI_TRY(draw(c->w, exact, 4, v, &c->t[V]));
    FATTNI_TRY(draw(c->w, exact, 4, s->sum_d_o ? one : o, &c->t[D_O]));
    if (s->bias) FATTNI_TRY(draw(c->w, exact, 4, bias, &c->t[BIAS_IN]));
    if (s->alibi) FATTNI_TRY(take_slopes(c, z->Hq));
    if (s->sink) FATTNI_TRY(draw(c->w, FATTN_F32, 1, &z->Hq, &c->t[SINK]));
    if (s->d_lse) FATTNI_TRY(draw(c->w, FATTN_F32, 3, o, &c->t[D_LSE]));
    if (s->step) {
        FATTNI_TRY(fattn_tensor_alloc(c->w->ctx, FATTN_I32, 0, none, &c->t[STEP]));
        *(int32_t *)c->t[STEP].data = 5;
    }
    FATTNI_TRY(take_lengths(c, z));
    const bool rows = s->lengths == PACKED || s->lengths == PADDED || s->lengths == PADDED_Q;
    const bool keys = s->lengths == PACKED || s->lengths == PADDED || s->lengths == PADDED_K;
    if (rows) clear_padding(c, Q, s->length_q);
    if (rows && !s->sum_d_o) clear_padding(c, D_O, s->length_q);
    if (rows && s->d_lse) clear_padding(c, D_LSE, s->length_q);
    if (keys) clear_padding(c, K, s->length_k);
    if (keys) clear_padding(c, V, s->length_k);
    return FATTN_OK;
}

static fattn_status take_output(attention_case *c, enum slot s, int ndim, const int64_t *shape) {
    const bool data = s != LSE && s != D_BIAS && s != D_SINK;
    const fattn_dtype exact = data && c->spec->exact ? c->spec->exact : FATTN_F32;
    FATTNI_TRY(fattn_tensor_alloc(c->w->ctx, FATTN_F64, ndim, shape, &c->t[s]));
    if (!(slots[s].adds & c->params.flags)) return FATTN_OK;
    return draw(c->w, s == O ? FATTN_F32 : exact, ndim, shape, &c->initial[s]);
}

static fattn_status take_outputs(attention_case *c) {
    const fattn_tensor *const t = c->t;
    const int64_t o[4] = {t[Q].shape[0], t[Q].shape[1], t[Q].shape[2], t[V].shape[3]};
    FATTNI_TRY(take_output(c, O, 4, o));
    FATTNI_TRY(take_output(c, LSE, 3, o));
    FATTNI_TRY(take_output(c, DQ, 4, t[Q].shape));
    FATTNI_TRY(take_output(c, DK, 4, t[K].shape));
    FATTNI_TRY(take_output(c, DV, 4, t[V].shape));
    if (c->spec->bias) FATTNI_TRY(take_output(c, D_BIAS, 4, t[BIAS_IN].shape));
    if (c->spec->sink) FATTNI_TRY(take_output(c, D_SINK, 1, t[SINK].shape));
    return FATTN_OK;
}

/* Outputs before a call: NaN, or the values that it adds to. */
static fattn_status reset(attention_case *c, enum slot first, enum slot last) {
    for (int s = (int)first; s <= (int)last; ++s) {
        double *const x = c->t[s].data;
        if (c->initial[s].data) {
            FATTNI_TRY(fattn_tensor_copy(c->w->ctx, &c->t[s], &c->initial[s]));
        } else if (x) {
            for (int64_t n = 0; n < fattn_tensor_numel(&c->t[s]); ++n) x[n] = NAN;
        }
    }
    return FATTN_OK;
}

static fattn_status forward(attention_case *c) {
    fattni_problem p;
    FATTNI_TRY(reset(c, O, LSE));
    FATTNI_TRY(fattni_problem_init(c->w->ctx, &c->params, &c->io, FATTNI_FWD, true, &p));
    return fattni_fwd_ref(c->w->ctx, &p);
}

static fattn_status backward(attention_case *c) {
    fattni_problem p;
    FATTNI_TRY(reset(c, DQ, D_SINK));
    FATTNI_TRY(fattni_problem_init(c->w->ctx, &c->params, &c->io, FATTNI_BWD, true, &p));
    return fattni_bwd_ref(c->w->ctx, &p);
}

/* delta = rowsum(dO O) - dL, rounded to F32 so that it can be loaded exactly. */
static fattn_status take_delta(attention_case *c) {
    const fattn_tensor *const o = &c->t[O];
    const int64_t Dv = o->shape[3];
    FATTNI_TRY(fattn_tensor_alloc(c->w->ctx, FATTN_F64, 3, o->shape, &c->t[DELTA]));
    const double *const x = o->data, *const d_o = c->t[D_O].data, *const d_lse = c->t[D_LSE].data;
    for (int64_t n = 0; n < fattn_tensor_numel(&c->t[DELTA]); ++n) {
        double sum = d_lse ? -d_lse[n] : 0;
        for (int64_t d = 0; d < Dv; ++d) sum += x[n * Dv + d] * d_o[n * Dv + d];
        ((double *)c->t[DELTA].data)[n] = (double)(float)sum;
    }
    return FATTN_OK;
}

/* sum dO O + sum dL L over the elements that forward writes; a row without keys has L = -inf, a constant. */
static fattn_status loss(void *user, double *out) {
    attention_case *const c = user;
    FATTNI_TRY(forward(c));
    const double *const o = c->t[O].data, *const lse = c->t[LSE].data;
    const double *const d_o = c->t[D_O].data, *const d_lse = c->t[D_LSE].data;
    const int64_t Dv = c->t[O].shape[3], rows = fattn_tensor_numel(&c->t[LSE]);
    double sum = 0;
    for (int64_t n = 0; n < rows; ++n) {
        if (isnan(lse[n])) continue; /* belongs to no sequence */
        for (int64_t d = 0; d < Dv; ++d) sum += o[n * Dv + d] * d_o[c->spec->sum_d_o ? d : n * Dv + d];
        if (d_lse && isfinite(lse[n])) sum += d_lse[n] * lse[n];
    }
    *out = sum;
    return FATTN_OK;
}

static fattn_status put_tensors(attention_case *c) {
    char path[128];
    for (int s = 0; s < SLOTS; ++s) {
        if (c->t[s].dtype == 0) continue;
        snprintf(path, sizeof path, "/cases/%s/%s", c->spec->name, slots[s].name);
        if (s >= O || c->t[s].dtype == FATTN_I32)
            FATTNI_TRY(fattn_fixture_put(c->w->file, path, &c->t[s]));
        else
            FATTNI_TRY(put_f32(c->w, path, &c->t[s]));
        if (c->initial[s].dtype == 0) continue;
        snprintf(path, sizeof path, "/cases/%s/%s_in", c->spec->name, slots[s].name);
        FATTNI_TRY(put_f32(c->w, path, &c->initial[s]));
    }
    return FATTN_OK;
}

static fattn_status put_attributes(attention_case *c) {
    const attention_spec *const s = c->spec;
    char path[128];
    snprintf(path, sizeof path, "/cases/%s", s->name);
    FATTNI_TRY(fattn_fixture_put_params(c->w->file, s->name, &c->params));
    FATTNI_TRY(fattn_fixture_put_text(c->w->file, path, "note", s->note));
    FATTNI_TRY(fattn_fixture_put_text(c->w->file, path, "layout", s->layout ? s->layout : "bhsd"));
    return fattn_fixture_put_text(c->w->file, path, "exact", fattn_dtype_name(s->exact ? s->exact : FATTN_F32));
}

static double largest(const fattn_tensor *t) {
    const double *const x = t->data;
    double most = 0;
    for (int64_t n = 0; n < fattn_tensor_numel(t); ++n) most = fmax(most, fabs(x[n]));
    return most;
}

/* The size of the terms of the sum that gives a result, where scores are exact. v and dO are normal numbers, so dP and
   delta have the size sqrt(Dv), and so do the roundings of dS; dq multiplies these by scale k, dk by scale q. */
static double unit_of(const attention_case *c, enum slot result) {
    if (result == O || result == LSE || result == DV) return 1;
    const double dp = sqrt((double)c->t[V].shape[3]), scale = (double)c->params.scale;
    if (result == DQ || result == DK) return dp * fmax(1, scale * largest(&c->t[result == DQ ? K : Q]));
    return dp;
}

/* Where scores are exact, errors do not grow with them: stores the sizes that they grow with. */
static fattn_status put_units(attention_case *c) {
    double unit[D_SINK - O + 1];
    const int64_t count = D_SINK - O + 1;
    char path[128];
    for (int s = O; s <= D_SINK; ++s) unit[s - O] = unit_of(c, (enum slot)s);
    snprintf(path, sizeof path, "/cases/%s/unit", c->spec->name);
    const fattn_tensor t = fattn_tensor_view(unit, FATTN_F64, FATTN_CPU, 0, 1, &count);
    return fattn_fixture_put(c->w->file, path, &t);
}

static fattn_status quotient_of_case(void *user, const double *at, double step, double *out) {
    return quad_quotient(user, at, step, out);
}

static fattn_status put_sample(attention_case *c) {
    static const struct {
        enum slot input, gradient;
    } pairs[] = {{Q, DQ}, {K, DK}, {V, DV}, {BIAS_IN, D_BIAS}, {SINK, D_SINK}};
    for (int n = 0; n < 5; ++n) {
        if (c->t[pairs[n].input].dtype == 0) continue;
        const bool exact = c->spec->far != 0; /* no step moves a score by more than 2^-24 */
        const difference d = {c->spec->name,
                              slots[pairs[n].input].name,
                              c->t[pairs[n].input],
                              c->t[pairs[n].gradient],
                              loss,
                              c,
                              exact ? quotient_of_case : NULL,
                              exact ? ldexp(1, -25 - ilogb(unit_of(c, pairs[n].gradient))) : 0};
        FATTNI_TRY(put_differences(c->w, &d));
    }
    return FATTN_OK;
}

static fattn_status build(attention_case *c) {
    const sizes z = sizes_of(c->spec);
    FATTNI_TRY(draw_inputs(c, &z));
    FATTNI_TRY(take_outputs(c));
    if (c->spec->adjust) c->spec->adjust(c);
    for (int s = 0; s < SLOTS; ++s)
        if (c->t[s].dtype) *(const fattn_tensor **)((char *)&c->io + slots[s].io) = &c->t[s];
    fattn_tensor every_row = c->t[D_O]; /* one row for all */
    if (c->spec->sum_d_o) {
        for (int d = 0; d < 3; ++d) every_row.shape[d] = c->t[O].shape[d], every_row.stride[d] = 0;
        c->io.d_o = &every_row;
    }
    FATTNI_TRY(forward(c));
    if (c->spec->delta) {
        FATTNI_TRY(take_delta(c));
        c->io.delta = &c->t[DELTA];
    }
    FATTNI_TRY(backward(c));
    FATTNI_TRY(put_attributes(c));
    FATTNI_TRY(put_tensors(c));
    if (c->spec->far != 0) FATTNI_TRY(put_units(c));
    /* Differences do not apply to a rounded delta, nor to a gradient that is added to. */
    const bool adds =
        c->params.flags & (FATTN_ACC_DQ | FATTN_ACC_DK | FATTN_ACC_DV | FATTN_ACC_DBIAS | FATTN_ACC_DSINK);
    return c->spec->steep || c->spec->delta || adds ? FATTN_OK : put_sample(c);
}

fattn_status put_attention(writer *w, const attention_spec *spec) {
    attention_case c = {.w = w, .spec = spec, .params = spec->params, .io = {.struct_size = sizeof c.io}};
    c.params.struct_size = sizeof c.params;
    const fattn_status status = build(&c);
    for (int s = 0; s < SLOTS; ++s) {
        fattn_tensor_free(w->ctx, &c.t[s]);
        fattn_tensor_free(w->ctx, &c.initial[s]);
    }
    return status;
}
