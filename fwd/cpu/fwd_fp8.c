/* FATTN_FP8 on the CPU: the arithmetic of a GPU's kernel, by emulation in F32. fwd/README.md. */
#include "fwd/cpu/fwd_fp8.h"

#include "core/attention/kernel.h"
#include "core/fp8/fp8.h"
#include "fwd/cpu/fwd_cpu.h"

#include <math.h>
#include <stdio.h>

/* FATTN_FP8_INT8: a row of codes times its scale. */
static void load_integers(int64_t D, const int8_t *codes, float scale, float *x) {
    for (int64_t d = 0; d < D; ++d) x[d] = (float)codes[d] * scale;
}

static void load_q_integers(const fattni_fwd_rows *r, float *x) {
    const fattni_problem *const p = r->p;
    const int64_t row = r->seq->q0 + r->i0;
    for (int64_t i = 0; i < r->rows; ++i, x += p->D)
        load_integers(p->D, fattni_at(&p->fp8.q, r->seq->batch, r->h, row + i),
                      (float)fattni_get(&p->fp8.q_scale, r->seq->batch, r->h, row + i, 0), x);
}

static void load_k_integers(const fattni_problem *p, const fattni_sequence *seq, int64_t g, fattni_range keys,
                            float *x) {
    for (int64_t j = keys.begin; j < keys.end; ++j, x += p->D)
        load_integers(p->D, fattni_at(&p->fp8.k, seq->batch, g, seq->k0 + j),
                      (float)fattni_get(&p->fp8.k_scale, seq->batch, g, fattni_fp8_scale_of(p, seq, j), 0), x);
}

/* Scales are those of k, too. */
static void load_q_e4m3(const fattni_fwd_rows *r, float *x) {
    const fattni_problem *const p = r->p;
    const fattni_sequence *const seq = r->seq;
    const fattni_array *const q = &p->fp8.q;
    const int64_t row = seq->q0 + r->i0;
    const double k_scale = fattni_get(&p->fp8.k_scale, seq->b, r->h / p->group, 0, 0);
    r->k->load_e4m3(r->rows, p->D, fattni_at(q, seq->batch, r->h, row), q->s[2], x, p->D);
    for (int64_t i = 0; i < r->rows; ++i) {
        const float scale = (float)(fattni_get(&p->fp8.q_scale, seq->batch, r->h, row + i, 0) * k_scale);
        for (int64_t d = 0; d < p->D; ++d) x[i * p->D + d] *= scale;
    }
}

void fattni_fwd_fp8_load_q(const fattni_fwd_rows *r) {
    float *const x = r->room.key; /* no keys are there yet */
    if (r->p->flags & FATTN_FP8_INT8)
        load_q_integers(r, x);
    else
        load_q_e4m3(r, x);
    r->k->load_packed(r->rows, r->p->D, FATTN_F32, x, r->p->D, r->q);
}

fattni_fwd_keys fattni_fwd_fp8_load_keys(const fattni_problem *p, const fattni_cpu_kernels *k,
                                         const fattni_sequence *seq, int64_t g, fattni_range keys,
                                         const fattni_fwd_room *room) {
    const fattni_array *const k8 = &p->fp8.k, *const v8 = &p->fp8.v;
    const int64_t count = keys.end - keys.begin, first = fattni_fp8_first_chunk(p, seq) * FATTNI_FP8_CHUNK;
    const uint8_t *const v = fattni_at(v8, seq->batch, g, 0);
    if (p->flags & FATTN_FP8_INT8)
        load_k_integers(p, seq, g, keys, room->key);
    else
        k->load_e4m3(count, p->D, fattni_at(k8, seq->batch, g, seq->k0 + keys.begin), k8->s[2], room->key, p->D);
    k->load_e4m3_columns(count, p->Dv, v + first + keys.begin, v8->s[2], room->value, p->Dv);
    return (fattni_fwd_keys){room->key, room->value, p->D, p->Dv};
}

/* L with a sink in it; *weight is what remains of O. */
static double with_sink(double L, double sink, double *weight) {
    if (sink == -INFINITY || L == INFINITY) return L;
    if (sink == INFINITY) {
        *weight = 0;
        return sink;
    }
    const double larger = L > sink ? L : sink;
    const double all = larger + log(exp(L - larger) + exp(sink - larger));
    *weight = exp(L - all);
    return all;
}

void fattni_fwd_fp8_finish(const fattni_fwd_rows *r) {
    const fattni_problem *const p = r->p;
    const fattni_array *const o = &p->o, *const scales = &p->fp8.v_scale, *const means = &p->fp8.v_mean;
    const int64_t g = r->h / p->group, b = r->seq->b, row = r->seq->q0 + r->i0;
    const float *const v_scale = (const float *)scales->p + b * scales->s[0] + g * scales->s[1];
    const float *const v_mean = (const float *)means->p + b * means->s[0] + g * means->s[1];
    const float *const max = r->max, *const sum = r->sum;
    float *const inverse = r->decay, *const rows = r->o_rows;
    for (int64_t i = 0; i < r->rows; ++i) inverse[i] = sum[i] == 0 ? 0 : 1 / sum[i];
    r->k->unpack(0, r->rows, p->Dv, r->o, inverse, rows, p->Dv);
    for (int64_t i = 0; i < r->rows; ++i) {
        const bool any = sum[i] != 0; /* else the row saw no key */
        const double shift = fattni_get(&p->fp8.q_shift, r->seq->batch, r->h, row + i, 0);
        double L = any ? p->scale * ((double)max[i] + shift) + log((double)sum[i]) : -INFINITY, weight = 1;
        if (p->sink.present) L = with_sink(L, fattni_get(&p->sink, r->h, 0, 0, 0), &weight);
        fattni_set(&p->lse, r->seq->batch, r->h, row + i, 0, L);
        const float factor = (float)weight;
        float *const x = rows + i * p->Dv;
        for (int64_t d = 0; d < p->Dv; ++d) x[d] = any ? (x[d] * v_scale[d] + v_mean[d]) * factor : 0;
    }
    r->k->put(r->rows, p->Dv, rows, p->Dv, false, (fattn_dtype)o->dtype, fattni_at(o, r->seq->batch, r->h, row),
              o->s[2]);
}

/* The call as one on F32 tensors, whose workspace begins after the copies. */
static fattni_problem inner_of(const fattni_problem *p, size_t *copies) {
    fattni_problem inner = *p;
    *copies = p->fp8.q.present ? 0 : fattni_fp8_bytes(p);
    inner.dtype = FATTN_F32;
    if (p->workspace) inner.workspace = (char *)p->workspace + *copies;
    return inner;
}

static const char *plan(const fattn_ctx *ctx, const fattni_problem *p, fattni_kernel_plan *out) {
    size_t copies;
    const fattni_problem inner = inner_of(p, &copies);
    out->workspace = copies + fattni_fwd_blocks_workspace(ctx, &inner);
    out->deterministic = true;
    snprintf(out->name, sizeof out->name, "fattn_fwd_fp8_cpu_%s_%s", fattni_cpu_kernels_of(ctx, FATTN_F32)->isa,
             fattn_dtype_name(p->dtype));
    return NULL;
}

static fattn_status run(fattn_ctx *ctx, const fattni_problem *p, const fattni_kernel_plan *plan) {
    (void)plan;
    size_t copies;
    fattni_problem inner = inner_of(p, &copies);
    FATTNI_TRY(fattni_fp8_copies(ctx, p, &inner.fp8));
    fattni_fwd_blocks(ctx, &inner);
    return FATTN_OK;
}

const fattni_kernel fattni_fwd_fp8_cpu = {
    .family = "fattn_fwd_fp8_cpu",
    .device = FATTN_CPU,
    .algorithms = 1u << FATTN_ALGO_AUTO | 1u << FATTN_ALGO_FLASH2,
    .plan = plan,
    .run = run,
    .dtypes = 1u << FATTN_F32 | 1u << FATTN_F16 | 1u << FATTN_BF16,
    .fp8 = true,
};
