#include "fwd/cuda/fwd_pages.h"

#include "core/cuda/device.h"

extern void fattn_gather_pages(fattni_pages_args);

/* [B,Hkv,Sk,width] with rows of a multiple of 16 bytes, at `bytes` of the workspace. */
static fattni_array gathered(const fattni_problem *p, const fattni_array *paged, int64_t width, size_t *bytes) {
    const int64_t size = (int64_t)fattn_dtype_size(p->dtype), row = fattni_round_up(width * size, 16) / size;
    const fattni_array a = {.p = p->workspace ? (char *)p->workspace + *bytes : NULL,
                            .n = {p->B, p->Hkv, p->Sk, width},
                            .s = {p->Hkv * p->Sk * row, p->Sk * row, row, 1},
                            .dtype = paged->dtype,
                            .present = true,
                            .empty = p->B * p->Sk == 0};
    *bytes += (size_t)fattni_round_up(p->B * p->Hkv * p->Sk * row * size, FATTNI_ALIGN);
    return a;
}

fattni_problem fattni_without_pages(const fattni_problem *p, size_t *bytes) {
    fattni_problem dense = *p;
    const fattni_array none = {0};
    *bytes = 0;
    dense.k = gathered(p, &p->k, p->D, bytes);
    dense.v = gathered(p, &p->v, p->Dv, bytes);
    dense.page = 0;
    dense.page_table = none;
    dense.workspace = p->workspace ? (char *)p->workspace + *bytes : NULL;
    return dense;
}

static fattni_view in_units(const fattni_array *a, int64_t elements) {
    return (fattni_view){a->p, a->s[0] / elements, a->s[1] / elements, a->s[2] / elements, 1};
}

/* Elements of a unit. */
static int64_t elements_of(const fattni_problem *p) {
    const bool by_16 = fattni_cuda_vector(&p->k, p->D) && fattni_cuda_vector(&p->v, p->Dv);
    return by_16 ? 16 / (int64_t)fattn_dtype_size(p->dtype) : 1;
}

int64_t fattni_pages_blocks(const fattni_problem *p) {
    return fattni_ceil_div(p->B * p->Hkv * p->Sk * ((p->D + p->Dv) / elements_of(p)), FATTNI_PAGES_THREADS);
}

fattn_status fattni_gather_pages(fattn_ctx *ctx, const fattni_problem *paged, const fattni_problem *dense) {
    const int64_t elements = elements_of(paged), rows = paged->B * paged->Hkv * paged->Sk;
    fattni_pages_args a = {.from = {in_units(&paged->k, elements), in_units(&paged->v, elements)},
                           .to = {in_units(&dense->k, elements), in_units(&dense->v, elements)},
                           .row_units = {paged->D / elements, paged->Dv / elements},
                           .page_table = fattni_cuda_view_of(&paged->page_table),
                           .lengths = fattni_cuda_line_of(&paged->seqlens_k),
                           .Hkv = (int32_t)paged->Hkv,
                           .Sk = (int32_t)paged->Sk,
                           .pages = (int32_t)paged->k.n[0],
                           .page_log2 = fattni_page_log2(paged),
                           .unit = (int32_t)(elements * (int64_t)fattn_dtype_size(paged->dtype))};
    a.k_threads = rows * a.row_units[0], a.threads = rows * (a.row_units[0] + a.row_units[1]);
    return FATTNI_START(ctx, fattn_gather_pages, fattni_pages_blocks(paged), FATTNI_PAGES_THREADS, &a);
}
