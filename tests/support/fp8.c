#include "fp8.h"

#include "core/tensor/philox.h"

#include <criterion/criterion.h>
#include <math.h>
#include <stdlib.h>

static double *numbers(int64_t n) {
    double *const x = malloc((size_t)(n > 0 ? n : 1) * sizeof *x);
    cr_assert(x);
    for (int64_t i = 0; i < n; ++i) x[i] = NAN;
    return x;
}

double fp8_get(const fattn_tensor *t, int64_t n0, int64_t n1, int64_t n2, int64_t n3) {
    const int64_t at[4] = {n0, n1, n2, n3};
    int64_t offset = 0;
    for (int d = 0; d < t->ndim; ++d) offset += at[d] * t->stride[d];
    return fattni_load(t->data, t->dtype, offset);
}

int64_t fp8_column(int64_t j) {
    const int64_t a = j / 16, b = j / 8 % 2, t = j / 2 % 4, c = j % 2;
    return 16 * a + 4 * t + 2 * b + c;
}

double fp8_round(double x) {
    if (isnan(x)) return x;
    int exponent;
    (void)frexp(x, &exponent); /* |x| in 2^(exponent - 1) .. 2^exponent */
    const double unit = ldexp(1, (exponent - 1 < -6 ? -6 : exponent - 1) - 3);
    const double r = rint(x / unit) * unit;
    return r > 448 ? 448 : r < -448 ? -448 : r;
}

double fp8_code(uint32_t flags, double x) {
    return flags & FATTN_FP8_INT8 ? fmax(-127, fmin(127, rint(x))) : fp8_round(x);
}
double fp8_largest(uint32_t flags) { return flags & FATTN_FP8_INT8 ? 127 : 448; }

fp8_copies fp8_quantize_turned(const attention *a, float rope_base) {
    fp8_copies c = {.fp8 = {.struct_size = 0}};
    cr_assert_eq(fattn_fp8_layout(a->ctx, &a->params, &a->io, NULL, &c.bytes, NULL), FATTN_OK, "%s: %s", a->c.name,
                 fattn_ctx_error(a->ctx));
    c.memory = aligned_alloc(FATTNI_ALIGN, c.bytes + FATTNI_ALIGN);
    cr_assert(c.memory);
    memset(c.memory, 0xff, c.bytes + FATTNI_ALIGN);
    cr_assert_eq(fattn_fp8_layout(a->ctx, &a->params, &a->io, c.memory, &c.bytes, &c.fp8), FATTN_OK, "%s: %s",
                 a->c.name, fattn_ctx_error(a->ctx));
    cr_assert_eq(c.fp8.rope_base, 0);
    c.fp8.rope_base = rope_base;
    fattn_attention_io io = a->io;
    io.fp8 = &c.fp8;
    cr_assert_eq(fattn_fp8_quantize(a->ctx, &a->params, &io), FATTN_OK, "%s: %s", a->c.name, fattn_ctx_error(a->ctx));
    for (size_t n = 0; n < FATTNI_ALIGN; ++n) cr_assert_eq(((unsigned char *)c.memory)[c.bytes + n], 0xff);
    return c;
}

fp8_copies fp8_quantize(const attention *a) { return fp8_quantize_turned(a, 0); }

void fp8_forward(attention *a, const fp8_copies *copies) {
    a->io.fp8 = &copies->fp8;
    attention_forward(a, LIBRARY);
    a->io.fp8 = NULL;
}

void fp8_free(fp8_copies *c) {
    free(c->memory);
    *c = (fp8_copies){.bytes = 0};
}

/* The call; *Bt is dimension 0 of the buffers. */
static fattni_problem problem_of(const attention *a, int64_t *Bt) {
    fattni_problem p;
    cr_assert_eq(fattni_problem_init(a->ctx, &a->params, &a->io, FATTNI_FWD, true, &p), FATTN_OK, "%s",
                 fattn_ctx_error(a->ctx));
    *Bt = p.packed ? 1 : p.B;
    return p;
}

static fp8_numbers numbers_new(const fattni_problem *p, int64_t Bt) {
    const int64_t Rq = Bt * p->Hq * p->rows_q, Rk = Bt * p->Hkv * p->rows_k, heads = p->B * p->Hkv;
    return (fp8_numbers){.q8 = numbers(Rq * p->D),
                         .k8 = numbers(Rk * p->D),
                         .v8 = numbers(Rk * p->Dv),
                         .q_scale = numbers(Rq),
                         .q_shift = numbers(Rq),
                         .k_scale = numbers(Rk),
                         .v_scale = numbers(heads * p->Dv),
                         .v_mean = numbers(heads * p->Dv)};
}

void fp8_numbers_free(fp8_numbers *n) {
    double *const all[] = {n->q8,      n->k8,      n->v8,      n->q,       n->k,      n->v,
                           n->q_scale, n->q_shift, n->k_scale, n->v_scale, n->v_mean, n->k_mean};
    for (size_t i = 0; i < sizeof all / sizeof *all; ++i) free(all[i]);
    *n = (fp8_numbers){0};
}

/* A row of q or k times diag(signs) H / sqrt(D), H[i][j] = (-1)^popcount(i & j). */
static void rotate(const fattni_problem *p, double *x) {
    double y[FATTNI_MAX_HEAD_DIM];
    if (!(p->flags & FATTN_FP8_HADAMARD)) return;
    for (int64_t d = 0; d < p->D; ++d) {
        const fattni_block counter = {{(uint32_t)(d / 128), 0, p->rng.stream, 0x48414441u}};
        const fattni_block r = fattni_philox(p->rng.seed, counter);
        y[d] = r.w[d % 128 / 32] >> d % 32 & 1 ? -x[d] : x[d];
    }
    for (int64_t i = 0; i < p->D; ++i) {
        x[i] = 0;
        for (int64_t j = 0; j < p->D; ++j) x[i] += __builtin_parityll((unsigned long long)(i & j)) ? -y[j] : y[j];
        x[i] /= sqrt((double)p->D);
    }
}

static void quantize_keys(const fattni_problem *p, int64_t b, int64_t g, fp8_numbers *n) {
    const fattni_sequence s = fattni_sequence_of(p, b);
    const int64_t D = p->D, Dv = p->Dv, head = b * p->Hkv + g, row0 = (s.batch * p->Hkv + g) * p->rows_k + s.k0;
    double *const k_mean = n->k_mean + head * D, *const v_mean = n->v_mean + head * Dv;
    for (int64_t d = 0; d < D; ++d) k_mean[d] = 0;
    for (int64_t d = 0; d < Dv; ++d) v_mean[d] = 0;
    for (int64_t j = 0; j < s.band.Sk; ++j) {
        double *const k = n->k + (row0 + j) * D, *const v = n->v + (row0 + j) * Dv;
        for (int64_t d = 0; d < D; ++d) k[d] = fattni_get(&p->k, s.batch, g, s.k0 + j, d);
        for (int64_t d = 0; d < Dv; ++d) v[d] = fattni_get(&p->v, s.batch, g, s.k0 + j, d);
        rotate(p, k);
        for (int64_t d = 0; d < D; ++d) k_mean[d] += k[d] / (double)s.band.Sk;
        for (int64_t d = 0; d < Dv; ++d) v_mean[d] += v[d] / (double)s.band.Sk;
    }
    const int64_t together = p->flags & FATTN_FP8_INT8 ? 32 : s.band.Sk; /* keys of a scale */
    for (int64_t first = 0; first < s.band.Sk; first += together) {
        const int64_t end = fattni_min(first + together, s.band.Sk);
        double most = 1e-30;
        for (int64_t j = first; j < end; ++j)
            for (int64_t d = 0; d < D; ++d) most = fmax(most, fabs(n->k[(row0 + j) * D + d] -= k_mean[d]));
        for (int64_t j = first; j < end; ++j) n->k_scale[row0 + j] = most / fp8_largest(p->flags);
    }
    for (int64_t d = 0; d < Dv; ++d) {
        double in_channel = 1e-30;
        for (int64_t j = 0; j < s.band.Sk; ++j)
            in_channel = fmax(in_channel, fabs(n->v[(row0 + j) * Dv + d] -= v_mean[d]));
        n->v_scale[head * Dv + d] = in_channel / 448;
    }
    for (int64_t j = 0; j < s.band.Sk; ++j) {
        for (int64_t d = 0; d < D; ++d) {
            const int64_t at = (row0 + j) * D + d;
            n->k8[at] = fp8_code(p->flags, n->k[at] /= n->k_scale[row0 + j]);
        }
        for (int64_t d = 0; d < Dv; ++d) {
            const int64_t at = (row0 + j) * Dv + d;
            n->v8[at] = fp8_round(n->v[at] /= n->v_scale[head * Dv + d]);
            v_mean[d] += n->v_scale[head * Dv + d] * (n->v[at] - n->v8[at]) / (double)s.band.Sk;
        }
    }
}

static void quantize_rows(const fattni_problem *p, int64_t b, int64_t h, fp8_numbers *n) {
    const fattni_sequence s = fattni_sequence_of(p, b);
    const int64_t D = p->D, row0 = (s.batch * p->Hq + h) * p->rows_q + s.q0;
    const double *const k_mean = n->k_mean + (b * p->Hkv + h / p->group) * D;
    for (int64_t i = 0; i < s.band.Sq; ++i) {
        double *const q = n->q + (row0 + i) * D, most = 1e-30, shift = 0;
        for (int64_t d = 0; d < D; ++d) q[d] = fattni_get(&p->q, s.batch, h, s.q0 + i, d);
        rotate(p, q);
        for (int64_t d = 0; d < D; ++d) most = fmax(most, fabs(q[d])), shift += q[d] * k_mean[d];
        n->q_scale[row0 + i] = most / fp8_largest(p->flags);
        n->q_shift[row0 + i] = shift;
        for (int64_t d = 0; d < D; ++d) n->q8[(row0 + i) * D + d] = fp8_code(p->flags, q[d] /= n->q_scale[row0 + i]);
    }
}

fp8_numbers fp8_numbers_of(const attention *a) {
    int64_t Bt;
    const fattni_problem p = problem_of(a, &Bt);
    fp8_numbers n = numbers_new(&p, Bt);
    n.q = numbers(Bt * p.Hq * p.rows_q * p.D);
    n.k = numbers(Bt * p.Hkv * p.rows_k * p.D), n.v = numbers(Bt * p.Hkv * p.rows_k * p.Dv);
    n.k_mean = numbers(p.B * p.Hkv * p.D);
    for (int64_t b = 0; b < p.B; ++b) {
        for (int64_t g = 0; g < p.Hkv; ++g) quantize_keys(&p, b, g, &n);
        for (int64_t h = 0; h < p.Hq; ++h) quantize_rows(&p, b, h, &n);
    }
    return n;
}

fp8_numbers fp8_numbers_read(const attention *a, const fp8_copies *copies) {
    int64_t Bt;
    const fattni_problem p = problem_of(a, &Bt);
    const fattn_fp8 *const f = &copies->fp8;
    fp8_numbers n = numbers_new(&p, Bt);
    for (int64_t b = 0; b < p.B; ++b) {
        const fattni_sequence s = fattni_sequence_of(&p, b);
        const int64_t first = p.packed ? s.k0 / 128 * 128 + 128 * b : 0;
        for (int64_t g = 0; g < p.Hkv; ++g) {
            const int64_t head = b * p.Hkv + g, row0 = (s.batch * p.Hkv + g) * p.rows_k + s.k0;
            for (int64_t d = 0; d < p.Dv; ++d) {
                n.v_scale[head * p.Dv + d] = fp8_get(&f->v_scale, b, g, d, 0);
                n.v_mean[head * p.Dv + d] = fp8_get(&f->v_mean, b, g, d, 0);
            }
            for (int64_t j = 0; j < s.band.Sk; ++j) {
                n.k_scale[row0 + j] = p.flags & FATTN_FP8_INT8 ? fp8_get(&f->k_scale, s.batch, g, (first + j) / 8, 0)
                                                               : fp8_get(&f->k_scale, b, g, 0, 0);
                for (int64_t d = 0; d < p.D; ++d) n.k8[(row0 + j) * p.D + d] = fp8_get(&f->k8, s.batch, g, s.k0 + j, d);
                for (int64_t d = 0; d < p.Dv; ++d)
                    n.v8[(row0 + j) * p.Dv + d] = fp8_get(&f->v8, s.batch, g, d, first + fp8_column(j));
            }
        }
        for (int64_t h = 0; h < p.Hq; ++h)
            for (int64_t i = 0; i < s.band.Sq; ++i) {
                const int64_t row = (s.batch * p.Hq + h) * p.rows_q + s.q0 + i;
                n.q_scale[row] = fp8_get(&f->q_scale, s.batch, h, s.q0 + i, 0);
                n.q_shift[row] = fp8_get(&f->q_shift, s.batch, h, s.q0 + i, 0);
                for (int64_t d = 0; d < p.D; ++d) n.q8[row * p.D + d] = fp8_get(&f->q8, s.batch, h, s.q0 + i, d);
            }
    }
    return n;
}

static void model_row(const fattni_problem *p, const fattni_sequence *s, int64_t h, int64_t i, const fp8_numbers *n,
                      double *o, double *lse, double *ties) {
    enum { TILE = 64 };
    const int64_t g = h / p->group, head = s->b * p->Hkv + g, row = (s->batch * p->Hq + h) * p->rows_q + s->q0 + i;
    const int64_t key0 = (s->batch * p->Hkv + g) * p->rows_k + s->k0;
    const double *const q = n->q8 + row * p->D, scale = p->scale * n->q_scale[row];
    double max = -INFINITY, sum = 0, acc[FATTNI_MAX_HEAD_DIM] = {0}, other[FATTNI_MAX_HEAD_DIM] = {0};
    for (int64_t j0 = 0; j0 < s->band.Sk; j0 += TILE) {
        double score[TILE], far[TILE], top = max;
        for (int64_t j = j0; j < j0 + TILE; ++j) {
            double dot = 0, size = 0;
            score[j - j0] = -INFINITY;
            if (!fattni_visible(&s->band, i, j)) continue;
            for (int64_t d = 0; d < p->D; ++d) {
                const double x = q[d] * n->k8[(key0 + j) * p->D + d];
                dot += x, size += fabs(x);
            }
            score[j - j0] = scale * n->k_scale[key0 + j] * dot;
            far[j - j0] = 0x1p-22 * (1 + scale * n->k_scale[key0 + j] * size);
            top = fmax(top, score[j - j0]);
        }
        if (top == -INFINITY) continue;
        const double decay = exp(max - top);
        max = top;
        sum *= decay;
        for (int64_t d = 0; d < p->Dv; ++d) acc[d] *= decay, other[d] *= decay;
        for (int64_t j = j0; j < j0 + TILE; ++j) {
            if (score[j - j0] == -INFINITY) continue;
            const double e = exp(score[j - j0] - max), rounded = fp8_round(64 * e) / 64;
            sum += e;
            const double up = fp8_round(64 * e * (1 + far[j - j0])), down = fp8_round(64 * e * (1 - far[j - j0]));
            for (int64_t d = 0; d < p->Dv; ++d) {
                const double v = n->v8[(key0 + j) * p->Dv + d];
                acc[d] += rounded * v, other[d] += (up - down) / 64 * fabs(v);
            }
        }
    }
    const double sink = p->sink.present ? fattni_get(&p->sink, h, 0, 0, 0) : -INFINITY;
    const double L = sum > 0 ? max + log(sum) + p->scale * n->q_shift[row] : -INFINITY;
    const double larger = fmax(L, sink);
    const double all = larger == -INFINITY ? larger : larger + log(exp(L - larger) + exp(sink - larger));
    *lse = all;
    for (int64_t d = 0; d < p->Dv; ++d) {
        const int64_t at = head * p->Dv + d;
        if (ties) ties[d] = sum > 0 ? other[d] * n->v_scale[at] / sum * exp(L - all) : 0;
        o[d] = sum > 0 ? (acc[d] * n->v_scale[at] / sum + n->v_mean[at]) * exp(L - all) : 0;
    }
}

void fp8_model(const attention *a, const fp8_numbers *n, double *o, double *lse, double *ties) {
    int64_t Bt;
    const fattni_problem p = problem_of(a, &Bt);
    for (int64_t i = 0; i < Bt * p.Hq * p.rows_q; ++i) lse[i] = NAN;
    for (int64_t i = 0; i < Bt * p.Hq * p.rows_q * p.Dv; ++i) o[i] = NAN;
    for (int64_t b = 0; b < p.B; ++b) {
        const fattni_sequence s = fattni_sequence_of(&p, b);
        for (int64_t h = 0; h < p.Hq; ++h)
            for (int64_t i = 0; i < s.band.Sq; ++i) {
                const int64_t row = (s.batch * p.Hq + h) * p.rows_q + s.q0 + i;
                model_row(&p, &s, h, i, n, o + row * p.Dv, lse + row, ties ? ties + row * p.Dv : NULL);
            }
    }
}

double *fp8_values(const attention *a, enum tensor_id id) {
    const fattn_tensor *const t = &a->t[id];
    const int64_t count = fattn_tensor_numel(t);
    double *const x = numbers(count);
    int64_t at[FATTN_MAX_DIMS] = {0};
    for (int64_t n = 0; n < count; ++n) {
        attention_index(t, n, at);
        x[n] = attention_get(t, at);
    }
    return x;
}

double fp8_error(const attention *a, enum tensor_id id, const double *x, const double *want) {
    const fattn_tensor *const t = &a->t[id];
    double off = 0, size = 0;
    int64_t at[FATTN_MAX_DIMS] = {0};
    for (int64_t n = 0; n < fattn_tensor_numel(t); ++n) {
        attention_index(t, n, at);
        if (!attention_in_use(a, id, at) || x[n] == want[n]) continue; /* also infinities */
        off += (x[n] - want[n]) * (x[n] - want[n]);
        size += want[n] * want[n];
    }
    return off == 0 ? 0 : 100 * sqrt(off / size);
}
