/* Gradient memory of the tape: where gradients are written, when they are zeroed, when memory is reused. */
#include "autograd_c/ops/op_device.h"
#include "autograd_c/tape/tape_nodes.h"

#include <stdlib.h>

static int64_t step_of(int64_t stride) { return stride < 0 ? -stride : stride; }

/* Dimensions of more than one element, by ascending distance between elements. */
typedef struct layout {
    int64_t shape[FATTN_MAX_DIMS], stride[FATTN_MAX_DIMS];
    int ndim;
} layout;

static layout layout_of(const fattn_tensor *t) {
    layout l = {.ndim = 0};
    for (int d = 0; d < t->ndim; ++d) {
        if (t->shape[d] <= 1) continue;
        int at = l.ndim++;
        const int64_t step = step_of(t->stride[d]);
        for (; at > 0 && l.stride[at - 1] > step; --at) {
            l.stride[at] = l.stride[at - 1];
            l.shape[at] = l.shape[at - 1];
        }
        l.stride[at] = step;
        l.shape[at] = t->shape[d];
    }
    return l;
}

int64_t fattni_footprint(const fattn_tensor *t) {
    int64_t extent = 1;
    for (int d = 0; d < t->ndim; ++d) {
        if (t->shape[d] == 0) return 0;
        extent += (t->shape[d] - 1) * step_of(t->stride[d]);
    }
    return extent;
}

int64_t fattni_before(const fattn_tensor *t) {
    int64_t before = 0;
    for (int d = 0; d < t->ndim; ++d) {
        if (t->shape[d] == 0) return 0;
        if (t->stride[d] < 0) before -= (t->shape[d] - 1) * t->stride[d];
    }
    return before;
}

/* The first dimension whose stride brings elements to addresses of others; ndim: none. */
static int overlap_of(const layout *l) {
    int64_t reach = 0; /* largest offset of the dimensions so far: the next stride must exceed it */
    int d = 0;
    for (; d < l->ndim && l->stride[d] > reach; ++d) reach += (l->shape[d] - 1) * l->stride[d];
    return d;
}

bool fattni_elements_overlap(const fattn_tensor *t) {
    if (fattn_tensor_numel(t) == 0) return false;
    const layout l = layout_of(t);
    return overlap_of(&l) < l.ndim;
}

fattn_status fattni_check_layout(fattn_ctx *ctx, const char *who, const fattn_tensor *t) {
    if (!fattni_elements_overlap(t)) return FATTN_OK;
    const layout l = layout_of(t);
    const int d = overlap_of(&l);
    return fattn_ctx_fail(ctx, FATTN_E_SHAPE, "%s: stride %lld of a dimension of %lld: elements overlap", who,
                          (long long)l.stride[d], (long long)l.shape[d]);
}

static const fattni_variable *base_of(const fattn_tape *t, int32_t id) { return &t->variables[t->variables[id].base]; }

static int64_t offset_in_base(const fattni_variable *v, const fattni_variable *base) {
    return ((const char *)v->value.data - (const char *)base->value.data) /
           (int64_t)fattn_dtype_size((fattn_dtype)v->value.dtype);
}

static fattni_columns columns_of(const fattni_variable *v, const fattni_variable *base) {
    const layout l = layout_of(&v->value);
    const int64_t extent = fattni_footprint(&base->value);
    const int64_t begin = offset_in_base(v, base) - fattni_before(&v->value);
    int64_t run = 1, rows = 1;
    int d = 0;
    while (d < l.ndim && l.stride[d] == run) run *= l.shape[d++];
    if (d == l.ndim) return (fattni_columns){.pitch = extent, .begin = begin, .end = begin + run};
    const int64_t pitch = l.stride[d];
    while (d < l.ndim && l.stride[d] == pitch * rows) rows *= l.shape[d++];
    /* In every row, and inside the base, which implies begin + run <= pitch. */
    const bool is_columns = d == l.ndim && rows == fattni_ceil_div(extent, pitch);
    return is_columns ? (fattni_columns){pitch, begin, begin + run} : (fattni_columns){0};
}

/* The gradient of id as a view of the gradient of its base, which must exist. */
static fattn_tensor place_of(const fattn_tape *t, int32_t id) {
    const fattni_variable *v = &t->variables[id], *base = base_of(t, id);
    fattn_tensor g = v->value;
    g.dtype = base->grad.dtype;
    g.data = (char *)base->grad.data + offset_in_base(v, base) * (int64_t)fattn_dtype_size((fattn_dtype)g.dtype);
    return g;
}

static fattn_status zero_untouched(fattn_ctx *ctx, fattni_variable *base) {
    fattni_cover *c = &base->cover;
    if (c->all) return FATTN_OK;
    const int64_t extent = fattni_footprint(&base->value);
    const size_t size = fattn_dtype_size((fattn_dtype)base->grad.dtype);
    const int64_t pitch = c->runs ? c->pitch : extent;
    for (int gap = 0; gap <= c->runs && extent > 0; ++gap) {
        const int64_t begin = gap ? c->end[gap - 1] : 0, end = gap < c->runs ? c->begin[gap] : pitch;
        const int64_t rows = extent / pitch, rest = fattni_min(end, extent % pitch);
        char *const first = (char *)base->grad.data + (size_t)begin * size;
        const size_t step = (size_t)pitch * size;
        if (begin < end) FATTNI_TRY(ctx->ops->zero_rows(ctx, first, step, (size_t)(end - begin) * size, rows));
        if (begin < rest) /* the last row, which may be shorter */
            FATTNI_TRY(ctx->ops->zero_rows(ctx, first + (size_t)rows * step, step, (size_t)(rest - begin) * size, 1));
    }
    c->all = true;
    return FATTN_OK;
}

/* Inserts [begin, end) into the sorted runs, merging neighbours; false when there are too many. */
static bool insert_run(fattni_cover *c, int64_t begin, int64_t end) {
    int at = 0;
    while (at < c->runs && c->end[at] < begin) ++at;
    if (at < c->runs && c->end[at] == begin) {
        c->end[at] = end;
        if (at + 1 < c->runs && c->begin[at + 1] == end) {
            c->end[at] = c->end[at + 1];
            --c->runs;
            for (int r = at + 1; r < c->runs; ++r) c->begin[r] = c->begin[r + 1], c->end[r] = c->end[r + 1];
        }
    } else if (at < c->runs && c->begin[at] == end) {
        c->begin[at] = begin;
    } else {
        if (c->runs == FATTNI_COVER_RUNS) return false;
        for (int r = c->runs++; r > at; --r) c->begin[r] = c->begin[r - 1], c->end[r] = c->end[r - 1];
        c->begin[at] = begin, c->end[at] = end;
    }
    c->all = c->runs == 1 && c->begin[0] == 0 && c->end[0] == c->pitch;
    return true;
}

/* *fresh: the region of v was not written before. Marks it as written, and zeroes what must be zeroed. */
static fattn_status mark_written(fattn_ctx *ctx, fattni_variable *base, const fattni_variable *v, uint8_t *fresh) {
    fattni_cover *c = &base->cover;
    *fresh = 0;
    if (c->all) return FATTN_OK;
    const fattni_columns region = columns_of(v, base);
    if (region.pitch && region.begin == 0 && region.end == region.pitch && !c->runs) {
        c->all = true;
        *fresh = 1;
        return FATTN_OK;
    }
    if (region.pitch && (!c->runs || c->pitch == region.pitch)) {
        bool disjoint = true;
        for (int r = 0; r < c->runs; ++r) {
            if (region.begin >= c->begin[r] && region.end <= c->end[r]) return FATTN_OK;
            disjoint = disjoint && (region.end <= c->begin[r] || region.begin >= c->end[r]);
        }
        c->pitch = region.pitch;
        if (disjoint && insert_run(c, region.begin, region.end)) {
            *fresh = 1;
            return FATTN_OK;
        }
    }
    return zero_untouched(ctx, base);
}

static int class_of(size_t bytes) { return 63 - __builtin_clzll((unsigned long long)bytes); }

fattn_status fattni_tape_block_take(fattn_tape *t, fattni_arena *from, size_t bytes, fattni_tape_block **out) {
    if (bytes > (size_t)PTRDIFF_MAX / 2) return fattn_ctx_fail(t->ctx, FATTN_E_NOMEM, "no memory for %zu bytes", bytes);
    bytes = (bytes + FATTNI_ALIGN - 1) / FATTNI_ALIGN * FATTNI_ALIGN;
    fattni_tape_block **best = NULL;
    for (int class = class_of(bytes); class <= class_of(bytes) + 1; ++class) {
        fattni_tape_block **free = &t->free_blocks[class];
        for (int seen = 0; *free && seen < FATTNI_PIECES_SEEN; ++seen, free = &(*free)->next)
            if ((*free)->bytes >= bytes && (*free)->bytes / 2 <= bytes && (!best || (*free)->bytes < (*best)->bytes))
                best = free;
    }
    if (best) {
        *out = *best;
        *best = (*best)->next;
        return FATTN_OK;
    }
    void *record, *p;
    FATTNI_TRY(fattni_arena_take(&t->records, sizeof(fattni_tape_block), &record));
    FATTNI_TRY(fattni_arena_take(from, bytes, &p));
    *out = record;
    **out = (fattni_tape_block){.p = p, .bytes = bytes};
    return FATTN_OK;
}

void fattni_tape_block_give(fattn_tape *t, fattni_tape_block *block) {
    if (!block) return;
    if (block->shares > 0) {
        block->shares -= 1;
        return;
    }
    fattni_tape_block **list = &t->free_blocks[class_of(block->bytes)];
    block->next = *list;
    *list = block;
}

static size_t grad_bytes(const fattni_variable *base) {
    return (size_t)fattni_footprint(&base->value) * fattn_dtype_size((fattn_dtype)base->value.dtype);
}

/* Before a write: a gradient that shares its memory is copied to a block of its own. */
static fattn_status stop_sharing(fattn_tape *t, fattni_variable *base) {
    fattni_tape_block *const shared = base->memory;
    if (!shared || shared->shares == 0) return FATTN_OK;
    const fattn_tensor old = base->grad;
    FATTNI_TRY(fattni_tape_block_take(t, &t->grads, grad_bytes(base), &base->memory));
    base->grad.data = base->memory->p;
    shared->shares -= 1;
    return fattni_accumulate(t->ctx, &base->grad, &old, true);
}

static bool same_layout(const fattn_tensor *a, const fattn_tensor *b) {
    bool same = a->dtype == b->dtype;
    for (int d = 0; d < a->ndim && same; ++d) same = a->shape[d] <= 1 || a->stride[d] == b->stride[d];
    return same;
}

fattn_status fattni_grad_pass(fattn_tape *t, int32_t from, int32_t to) {
    fattni_variable *const y = &t->variables[from], *const x = &t->variables[to];
    if (!y->grad.data) return FATTN_OK;
    const bool shares =
        x->base == to && !x->is_param && !x->grad.data && y->memory && same_layout(&x->value, &y->value);
    if (shares) {
        x->memory = y->memory;
        x->memory->shares += 1;
        x->grad = x->value;
        x->grad.data = y->grad.data;
        x->cover = (fattni_cover){.all = true};
        return FATTN_OK;
    }
    fattn_tensor d;
    uint8_t fresh;
    FATTNI_TRY(fattni_grad_open(t, to, &d, &fresh));
    return d.data ? fattni_accumulate(t->ctx, &d, &y->grad, fresh) : FATTN_OK;
}

static const char *end_of(const fattni_variable *v) {
    return (const char *)v->grad.data +
           fattn_tensor_numel(&v->grad) * (int64_t)fattn_dtype_size((fattn_dtype)v->grad.dtype);
}

static int by_address(const void *a, const void *b) {
    const uintptr_t x = (uintptr_t)(*(fattni_variable *const *)a)->grad.data,
                    y = (uintptr_t)(*(fattni_variable *const *)b)->grad.data;
    return x < y ? -1 : x > y;
}

static fattn_status zero_grad(fattn_ctx *ctx, fattni_variable *v) {
    v->cover = (fattni_cover){0};
    return zero_untouched(ctx, v);
}

fattn_status fattni_grads_begin(fattn_tape *t) {
    int32_t count = 0;
    for (int32_t id = 1; id <= t->count; ++id) count += t->variables[id].one_pass;
    if (!count) return FATTN_OK;
    void *p;
    FATTNI_TRY(fattni_arena_take(&t->records, (size_t)count * sizeof(fattni_variable *), &p));
    fattni_variable **const params = p;
    count = 0;
    for (int32_t id = 1; id <= t->count; ++id)
        if (t->variables[id].one_pass) params[count++] = &t->variables[id];
    qsort(params, (size_t)count, sizeof *params, by_address);
    fattni_variable *last = NULL; /* of those before, the one that ends last */
    for (int32_t n = 0; n < count; ++n) {
        fattni_variable *const v = params[n];
        const bool overlaps =
            last && (const char *)v->grad.data < end_of(last) && end_of(v) > (const char *)v->grad.data;
        v->cover = (fattni_cover){0};
        if (overlaps) FATTNI_TRY(zero_grad(t->ctx, last));
        if (overlaps) FATTNI_TRY(zero_grad(t->ctx, v));
        if (!last || end_of(v) > end_of(last)) last = v;
    }
    return FATTN_OK;
}

fattn_status fattni_grad_finish(fattn_tape *t, int32_t id) {
    fattni_variable *const base = &t->variables[t->variables[id].base];
    return base->one_pass ? zero_untouched(t->ctx, base) : FATTN_OK;
}

fattn_status fattni_grad_open(fattn_tape *t, int32_t id, fattn_tensor *d, uint8_t *fresh) {
    fattni_variable *v = &t->variables[id], *base = &t->variables[v->base];
    *d = v->value;
    d->data = NULL;
    *fresh = 0;
    if (base->is_param) d->dtype = base->grad.dtype;
    if (!v->wants_grad || fattn_tensor_numel(&v->value) == 0) return FATTN_OK;
    if (!base->grad.data) {
        FATTNI_TRY(fattni_tape_block_take(t, &t->grads, grad_bytes(base), &base->memory));
        base->grad = base->value;
        base->grad.data = base->memory->p;
        base->cover = (fattni_cover){0};
    }
    FATTNI_TRY(stop_sharing(t, base));
    FATTNI_TRY(mark_written(t->ctx, base, v, fresh));
    *d = place_of(t, id);
    return FATTN_OK;
}

fattn_status fattni_grad_read(fattn_tape *t, int32_t id, fattn_tensor *d) {
    fattni_variable *v = &t->variables[id], *base = &t->variables[v->base];
    *d = v->value;
    d->data = NULL;
    if (!v->wants_grad || !base->grad.data) return FATTN_OK;
    FATTNI_TRY(zero_untouched(t->ctx, base));
    *d = place_of(t, id);
    return FATTN_OK;
}

void fattni_grad_release(fattn_tape *t, int32_t id) {
    fattni_variable *v = &t->variables[id];
    if (v->base != id || !v->memory || v->keep_grad) return;
    fattni_tape_block_give(t, v->memory);
    v->memory = NULL;
    v->grad.data = NULL;
}

bool fattni_grads_overlap(const fattn_tape *t, int32_t a, int32_t b) {
    const fattni_variable *const base_a = base_of(t, a), *const base_b = base_of(t, b);
    if (base_a == base_b) {
        const fattni_columns x = columns_of(&t->variables[a], base_a);
        const fattni_columns y = columns_of(&t->variables[b], base_b);
        return !x.pitch || x.pitch != y.pitch || (x.begin < y.end && y.begin < x.end);
    }
    /* Two parameters may share one gradient. */
    const fattn_tensor x = place_of(t, a), y = place_of(t, b);
    const int64_t size_x = (int64_t)fattn_dtype_size((fattn_dtype)x.dtype);
    const int64_t size_y = (int64_t)fattn_dtype_size((fattn_dtype)y.dtype);
    const char *const begin_x = (const char *)x.data - fattni_before(&x) * size_x;
    const char *const begin_y = (const char *)y.data - fattni_before(&y) * size_y;
    return begin_x < begin_y + fattni_footprint(&y) * size_y && begin_y < begin_x + fattni_footprint(&x) * size_x;
}
