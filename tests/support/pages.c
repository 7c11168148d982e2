#include "pages.h"

#include "cases.h"

#include "core/tensor/numeric.h"

#include <criterion/criterion.h>
#include <math.h>
#include <stdlib.h>

/* [count,H,page,D] full of NaN. */
static void *place(fattn_tensor *t, fattn_dtype dtype, int64_t count, int64_t H, int64_t page, int64_t D,
                   enum pages_layout layout) {
    const int64_t pitch = layout == PAGES_PITCH ? D + 3 : D, room = count * H * page * pitch;
    const size_t size = fattn_dtype_size(dtype);
    void *const memory = aligned_alloc(256, ((size_t)(room > 0 ? room : 1) * size + 255) / 256 * 256);
    cr_assert(memory);
    for (int64_t i = 0; i < room; ++i) fattni_store(memory, dtype, i, NAN);
    *t = fattn_tensor_view(memory, dtype, FATTN_CPU, 0, 4, (const int64_t[]){count, H, page, D});
    const bool inside = layout == PAGES_HEADS_INSIDE;
    t->stride[0] = H * page * pitch;
    t->stride[1] = inside ? pitch : page * pitch;
    t->stride[2] = inside ? H * pitch : pitch;
    if (layout == PAGES_REVERSED && count > 0) {
        t->data = (char *)memory + (page - 1) * pitch * (int64_t)size;
        t->stride[2] = -pitch;
    }
    return memory;
}

static int64_t index_of(const fattn_tensor *t, int64_t b, int64_t h, int64_t i, int64_t d) {
    const int64_t at[4] = {b, h, i, d};
    int64_t offset = 0;
    for (int n = 0; n < 4; ++n) offset += t->shape[n] > 1 ? at[n] * t->stride[n] : 0;
    return offset;
}

int32_t *pages_entry(const pages *p, int64_t b, int64_t n) {
    return (int32_t *)p->table.data + b * p->table.stride[0] + n * p->table.stride[1];
}

double pages_get(const pages *p, const fattn_tensor *t, int64_t b, int64_t g, int64_t j, int64_t d) {
    const int64_t page = t->shape[2];
    return fattni_load(t->data, t->dtype, index_of(t, *pages_entry(p, b, j / page), g, j % page, d));
}

static void copy_row(const pages *p, const fattn_tensor *to, const fattn_tensor *from, int64_t b, int64_t j) {
    const int64_t page = to->shape[2];
    for (int64_t g = 0; g < to->shape[1]; ++g)
        for (int64_t d = 0; d < to->shape[3]; ++d)
            fattni_store(to->data, to->dtype, index_of(to, *pages_entry(p, b, j / page), g, j % page, d),
                         fattni_load(from->data, from->dtype, index_of(from, b, g, j, d)));
}

/* lengths NULL: all entries are given. */
static pages build(fattn_dtype dtype, int64_t B, int64_t Hkv, int64_t n, int64_t page, int64_t D, int64_t Dv,
                   const int32_t *lengths, int64_t spare, enum pages_layout layout, uint64_t seed) {
    pages p;
    int64_t count = spare, next = 0;
    for (int64_t b = 0; b < B; ++b) count += lengths ? (lengths[b] + page - 1) / page : n;
    p.memory[0] = place(&p.k, dtype, count, Hkv, page, D, layout);
    p.memory[1] = place(&p.v, dtype, count, Hkv, page, Dv, layout);
    p.memory[2] = malloc((size_t)(B * n + 1) * sizeof(int32_t));
    int32_t *const order = malloc((size_t)(count + 1) * sizeof *order);
    cr_assert(p.memory[2] && order);
    for (int64_t i = 0; i < count; ++i) {
        const int j = cases_below(&seed, (int)i + 1);
        order[i] = order[j], order[j] = (int32_t)i;
    }
    p.table = fattn_tensor_view(p.memory[2], FATTN_I32, FATTN_CPU, 0, 2, (const int64_t[]){B, n});
    for (int64_t b = 0; b < B; ++b)
        for (int64_t i = 0; i < n; ++i) *pages_entry(&p, b, i) = lengths && i * page >= lengths[b] ? -1 : order[next++];
    free(order);
    return p;
}

pages pages_of(const fattn_tensor *k, const fattn_tensor *v, const int32_t *lengths, int64_t page, int64_t spare,
               enum pages_layout layout, uint64_t seed) {
    const int64_t B = k->shape[0], n = (k->shape[2] + page - 1) / page;
    const pages p =
        build((fattn_dtype)k->dtype, B, k->shape[1], n, page, k->shape[3], v->shape[3], lengths, spare, layout, seed);
    for (int64_t b = 0; b < B; ++b)
        for (int64_t j = 0; j < lengths[b]; ++j) {
            copy_row(&p, &p.k, k, b, j);
            copy_row(&p, &p.v, v, b, j);
        }
    return p;
}

pages pages_empty(fattn_dtype dtype, int64_t B, int64_t Hkv, int64_t n, int64_t page, int64_t D, int64_t Dv,
                  enum pages_layout layout, uint64_t seed) {
    return build(dtype, B, Hkv, n, page, D, Dv, NULL, 2, layout, seed);
}

void pages_free(pages *p) {
    for (int n = 0; n < 3; ++n) free(p->memory[n]);
}
