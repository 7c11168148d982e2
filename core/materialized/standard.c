#include "core/materialized/standard.h"

/* P, the mask and dP must stay countable; q, k, v and their copies are, by validation. */
bool fattni_standard_fits(const fattni_problem *p) {
    int64_t elements;
    return !__builtin_mul_overflow(p->B * p->Hq, p->Sq, &elements) &&
           !__builtin_mul_overflow(elements, p->Sk, &elements) && elements < (int64_t)1 << 56;
}

const char *fattni_standard_refuses(const fattn_ctx *ctx, const fattni_problem *p) {
    (void)ctx;
    return fattni_standard_fits(p) ? NULL : "stores B Hq Sq Sk probabilities: more than 2^56";
}

static size_t elements(const fattni_problem *p) {
    return (size_t)fattni_standard_at(p, p->B, 0, 0);
}

size_t fattni_standard_saved(const fattni_problem *p) {
    return elements(p) * (fattn_dtype_size(p->dtype) + (p->drop_T ? 1 : 0));
}

uint8_t *fattni_standard_mask(const fattni_problem *p) {
    return p->drop_T ? (uint8_t *)p->saved + elements(p) * fattn_dtype_size(p->dtype) : NULL;
}

bool fattni_standard_direct(const fattni_array *a, int64_t width) {
    if (a->dtype != FATTN_F32 && a->dtype != FATTN_F64) return false;
    return a->n[2] <= 1 || (a->s[2] >= width && a->s[2] <= INT32_MAX);
}

int64_t fattni_standard_threads(const fattn_ctx *ctx, const fattni_problem *p) {
    const int64_t blocks = fattni_ceil_div(fattni_max(p->max_q, p->Sk), FATTNI_STANDARD_ROWS);
    /* A gradient of a broadcast bias has rows to zero even when the batch is empty. */
    return fattni_min(ctx->cpu_threads, fattni_max(p->B, 1) * p->Hq * fattni_max(blocks, 1));
}

size_t fattni_standard_reserve(size_t *bytes, int64_t count, size_t element) {
    const size_t offset = *bytes;
    *bytes += (size_t)fattni_round_up(count * (int64_t)element, FATTNI_ALIGN);
    return offset;
}
