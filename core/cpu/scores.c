#include "core/cpu/scores.h"

#include <float.h>
#include <math.h>

static const double log2_e = 1.4426950408889634;

fattni_score_tile fattni_score_tile_of(const fattni_problem *p, const fattni_cpu_kernels *k, const fattni_sequence *seq,
                                       int64_t b, int64_t h, int64_t i0, int64_t rows, int64_t j0, int64_t keys) {
    const int64_t g = h / p->group, row = seq->k0 + j0;
    fattni_score_tile at = {
        .p = p,
        .k = k,
        .seq = seq,
        .b = b,
        .h = h,
        .i0 = i0,
        .j0 = j0,
        .tile = {rows, keys, .lo = seq->band.lo + i0 - j0, .hi = seq->band.hi + i0 - j0},
    };
    if (fattni_is_narrow(p) || p->page) return at;
    at.key = fattni_at(&p->k, seq->batch, g, row), at.key_stride = p->k.s[2];
    at.value = fattni_at(&p->v, seq->batch, g, row), at.value_stride = p->v.s[2];
    return at;
}

size_t fattni_scores_scratch(const fattni_problem *p) { return p->bias.present ? FATTNI_TILE_BYTES : 0; }

bool fattni_adjusts(const fattni_problem *p) { return p->softcap > 0 || p->alibi.present || p->bias.present; }

double fattni_score_unit(const fattni_problem *p) { return fattni_adjusts(p) ? 1 : p->scale; }
double fattni_log2_factor(const fattni_problem *p) { return fattni_score_unit(p) * log2_e; }

fattni_logit fattni_logit_of(const fattni_problem *p, const fattni_cpu_kernels *k, double logit) {
    const bool wide = k->dtype == FATTN_F64;
    const double unit = fattni_score_unit(p), most = wide ? DBL_MAX : (double)FLT_MAX;
    const double limit = unit == 1 ? most : wide ? 0x1.8p1023 : 0x1.8p127; /* times the unit it may round up */
    double score = logit / unit;
    score = score > limit ? limit : score < -limit ? -limit : score;
    if (k->dtype == FATTN_F32) score = (double)(float)score;
    const double rest = logit - score * unit;
    return (fattni_logit){score, fabs(rest) <= 40 ? rest : 0};
}

/* bias[b, h, rows, keys] into [key][row]. */
static void load_bias(const fattni_score_tile *at, void *tile) {
    const fattni_array *const bias = &at->p->bias;
    const fattni_tile *const t = &at->tile;
    const fattni_cpu_kernels *const k = at->k;
    const int64_t first = at->b * bias->s[0] + at->h * bias->s[1] + at->i0 * bias->s[2] + at->j0 * bias->s[3];
    if (bias->s[3] == 1) {
        const fattn_dtype from = (fattn_dtype)bias->dtype;
        const char *const x = (const char *)bias->p + first * (int64_t)fattn_dtype_size(from);
        k->pack(t->rows, t->keys, from, x, bias->s[2], NULL, tile);
        return;
    }
    for (int64_t j = 0; j < t->keys; ++j)
        for (int64_t i = 0; i < t->rows; ++i)
            fattni_store(tile, k->dtype, j * k->rows + i,
                         fattni_load(bias->p, bias->dtype, first + i * bias->s[2] + j * bias->s[3]));
}

void fattni_scores(const fattni_score_tile *at, const void *q, void *scratch, void *s, void *derivative) {
    const fattni_problem *const p = at->p;
    at->k->scores(&at->tile, p->D, at->key, at->key_stride, q, s);
    fattni_adjust(at, scratch, s, derivative);
}

void fattni_adjust(const fattni_score_tile *at, void *scratch, void *s, void *derivative) {
    const fattni_problem *const p = at->p;
    if (!fattni_adjusts(p)) return;
    if (p->bias.present) load_bias(at, scratch);
    const fattni_adjustment a = {
        .scale = p->scale,
        .cap = p->softcap,
        .slope = p->alibi.present ? fattni_get(&p->alibi, at->h, 0, 0, 0) : 0,
        .distance = at->i0 - at->j0 + at->seq->diagonal,
        .bias = p->bias.present ? scratch : NULL,
        .derivative = derivative,
    };
    at->k->adjust(&at->tile, &a, s);
}

void fattni_keep_mask(const fattni_score_tile *at, double scale, void *mask) {
    const fattni_problem *const p = at->p;
    const fattni_dropout d = {
        .seed = p->rng.seed,
        .stream = p->rng.stream,
        .step = fattni_dropout_step(p),
        .plane = fattni_dropout_plane(p, at->b, at->h),
        .T = p->drop_T,
        .i = at->i0 + p->q_pos0,
        .j = at->j0 + p->k_pos0,
        .scale = scale,
    };
    at->k->keep(&at->tile, &d, mask);
}

int fattni_keep_exponent(const fattni_problem *p, const fattni_cpu_kernels *k) {
    int e = 0;
    if (p->drop_T && k->operand == FATTN_F16) frexp(p->keep_scale, &e);
    return e;
}
