#include "core/materialized/standard.h"

#include "core/cpu/gemm_cpu.h"
#include "core/cpu/scores.h"

#include <stdio.h>

/* P, the mask and dP must stay countable; q, k, v and their copies are, by validation. */
const char *fattni_standard_why_unsupported(const fattni_problem *p) {
    if (p->has_o_rest) return "has EXACT_DELTA only with an o in f32";
    int64_t elements;
    const bool fits = !__builtin_mul_overflow(p->B * p->Hq, p->Sq, &elements) &&
                      !__builtin_mul_overflow(elements, p->Sk, &elements) && elements < (int64_t)1 << 56;
    return fits ? NULL : "stores B Hq Sq Sk probabilities: more than 2^56";
}

static size_t bytes_of_P(const fattni_problem *p) {
    return (size_t)fattni_standard_at(p, p->B, 0, 0) * fattn_dtype_size(p->dtype);
}

static size_t bytes_before_L(const fattni_problem *p) {
    const size_t mask = p->drop_T ? (size_t)fattni_standard_at(p, p->B, 0, 0) : 0;
    return (bytes_of_P(p) + mask + sizeof(double) - 1) / sizeof(double) * sizeof(double);
}

void fattni_standard_plan(const fattni_problem *p, const char *family, size_t workspace, fattni_kernel_plan *out) {
    out->workspace = workspace;
    out->saved = bytes_before_L(p) + (size_t)(p->B * p->Hq * p->Sq) * fattn_dtype_size(fattni_real(p));
    out->deterministic = true;
    snprintf(out->name, sizeof out->name, "%s_%s", family, fattn_dtype_name(p->dtype));
}

uint8_t *fattni_standard_mask(const fattni_problem *p) {
    return p->drop_T ? (uint8_t *)p->saved + bytes_of_P(p) : NULL;
}

void *fattni_standard_L(const fattni_problem *p) { return (char *)p->saved + bytes_before_L(p); }

/* ---- on the CPU ---- */

int64_t fattni_standard_threads(const fattn_ctx *ctx, const fattni_problem *p) {
    const int64_t blocks = fattni_ceil_div(fattni_max(p->max_q, p->Sk), FATTNI_STANDARD_ROWS);
    /* A gradient of a broadcast bias has rows to zero even when the batch is empty. */
    return fattni_min(ctx->cpu_threads, fattni_max(p->B, 1) * p->Hq * fattni_max(blocks, 1));
}

bool fattni_standard_direct(const fattni_array *a, int64_t width) {
    if (a->dtype != FATTN_F32 && a->dtype != FATTN_F64) return false;
    return a->n[2] <= 1 || (a->s[2] >= width && a->s[2] <= INT32_MAX);
}

fattni_matrix fattni_standard_rows(const fattni_cpu_kernels *k, const fattni_array *a, int64_t b, int64_t h,
                                   int64_t row, int64_t count, int64_t width, void *copy) {
    const void *const first = fattni_at(a, b, h, row);
    if (fattni_standard_direct(a, width)) return (fattni_matrix){first, a->n[2] <= 1 ? width : a->s[2]};
    k->widen(count, width, (fattn_dtype)a->dtype, first, a->s[2], copy, width);
    return (fattni_matrix){copy, width};
}

/* c of rows of N. */
static fattni_gemm product(fattn_dtype dtype, int64_t M, int64_t N, int64_t K, double alpha, fattni_matrix a,
                           fattni_matrix b, void *c) {
    return (fattni_gemm){.dtype = dtype,
                         .M = M,
                         .N = N,
                         .K = K,
                         .alpha = alpha,
                         .a = a.p,
                         .lda = a.ld,
                         .b = b.p,
                         .ldb = b.ld,
                         .c = c,
                         .ldc = N};
}

void fattni_standard_a_bt(const fattn_ctx *ctx, fattn_dtype dtype, int64_t M, int64_t N, int64_t K, double alpha,
                          fattni_matrix a, fattni_matrix b, void *c, int64_t ldc) {
    fattni_gemm g = product(dtype, M, N, K, alpha, a, b, c);
    g.trans_b = true;
    g.ldc = ldc;
    fattni_gemm_task(ctx, &g);
}

void fattni_standard_a_b(const fattn_ctx *ctx, fattn_dtype dtype, int64_t M, int64_t N, int64_t K, double alpha,
                         fattni_matrix a, fattni_matrix b, void *c) {
    const fattni_gemm g = product(dtype, M, N, K, alpha, a, b, c);
    fattni_gemm_task(ctx, &g);
}

void fattni_standard_add_at_b(const fattn_ctx *ctx, fattn_dtype dtype, int64_t M, int64_t N, int64_t K, double alpha,
                              fattni_matrix a, fattni_matrix b, void *c) {
    fattni_gemm g = product(dtype, M, N, K, alpha, a, b, c);
    g.trans_a = true;
    g.beta = 1;
    fattni_gemm_task(ctx, &g);
}

#define BODY "core/materialized/standard.inc"
#include "core/base/for_each_real.inc"

void fattni_standard_drop(const fattni_cpu_kernels *k, fattn_dtype dtype, const void *P, const uint8_t *keep,
                          int64_t ld, int64_t rows, int64_t keys, void *out) {
    k->widen(rows, keys, dtype, P, ld, out, keys);
    if (keep) (k->dtype == FATTN_F64 ? drop_f64 : drop_f32)(keep, ld, rows, keys, out);
}
