/* fattn_kv_append: checks, and the CPU's code. */
#include "core/kv_cache/kv_append.h"

#include "core/base/device.h"
#include "core/tensor/rows.h"
#include "core/tensor/spans.h"

#include <fattn/kv_cache.h>

#include <math.h>

enum { ROWS_PER_TASK = 16 };

/* ---- the CPU ---- */

static int64_t length_of(const fattni_kv_append *a, int64_t b) { return a->lengths[b * a->lengths_step]; }
static int64_t rows_of(const fattni_kv_append *a, int64_t b) {
    return a->new_rows ? a->new_rows[b * a->new_rows_step] : a->S;
}

static void load_row_f64(double *x, const void *from, int32_t dtype, int64_t n) {
    (void)dtype;
    memcpy(x, from, (size_t)n * sizeof *x);
}
static void store_row_f64(void *to, const double *x, int32_t dtype, int64_t n) {
    (void)dtype;
    memcpy(to, x, (size_t)n * sizeof *x);
}

static void load_row_f32(float *x, const void *from, int32_t dtype, int64_t n) {
    const uint16_t *const narrow = from;
    if (dtype == FATTN_F32)
        memcpy(x, from, (size_t)n * sizeof *x);
    else if (dtype == FATTN_BF16)
        for (int64_t i = 0; i < n; ++i) x[i] = fattni_bf16_to_float(narrow[i]);
    else
        for (int64_t i = 0; i < n; ++i) x[i] = fattni_f16_to_float(narrow[i]);
}
static void store_row_f32(void *to, const float *x, int32_t dtype, int64_t n) {
    uint16_t *const narrow = to;
    if (dtype == FATTN_F32)
        memcpy(to, x, (size_t)n * sizeof *x);
    else if (dtype == FATTN_BF16)
        for (int64_t i = 0; i < n; ++i) narrow[i] = fattni_float_to_bf16(x[i]);
    else
        for (int64_t i = 0; i < n; ++i) narrow[i] = fattni_float_to_f16(x[i]);
}

#define BODY "core/kv_cache/kv_append.inc"
#include "core/base/for_each_real.inc"

static fattn_status check_sequence(fattn_ctx *ctx, const fattni_kv_append *a, int64_t b) {
    const int64_t length = length_of(a, b), rows = rows_of(a, b);
    if (length < 0 || length > a->room)
        return fattn_ctx_fail(ctx, FATTN_E_ARG, "lengths[%lld] = %lld is not in 0..%lld", (long long)b,
                              (long long)length, (long long)a->room);
    if (rows < 0 || rows > a->S)
        return fattn_ctx_fail(ctx, FATTN_E_ARG, "new_rows[%lld] = %lld is not in 0..%lld", (long long)b,
                              (long long)rows, (long long)a->S);
    if (rows > a->room - length)
        return fattn_ctx_fail(ctx, FATTN_E_ARG,
                              "kv_append: sequence %lld has %lld keys and %lld new ones, room for %lld", (long long)b,
                              (long long)length, (long long)rows, (long long)a->room);
    if (!a->page_table || rows == 0) return FATTN_OK;
    for (int64_t n = length / a->page; n <= (length + rows - 1) / a->page; ++n) {
        const int64_t page = fattni_kv_block(a, b, n * a->page);
        if (page < 0 || page >= a->pages)
            return fattn_ctx_fail(ctx, FATTN_E_ARG, "page_table[%lld,%lld] = %lld is not in 0..%lld", (long long)b,
                                  (long long)n, (long long)page, (long long)a->pages - 1);
    }
    return FATTN_OK;
}

fattn_status fattni_host_kv_append(fattn_ctx *ctx, const fattni_kv_append *a) {
    for (int64_t b = 0; b < a->B; ++b) FATTNI_TRY(check_sequence(ctx, a, b));
    const int64_t tasks = a->B * fattni_ceil_div(a->S, ROWS_PER_TASK);
    fattni_kv_append job = *a;
    fattni_parallel(ctx, tasks, a->dtype == FATTN_F64 ? append_f64 : append_f32, &job);
    for (int64_t b = 0; a->lengths_after && b < a->B; ++b)
        a->lengths_after[b * a->lengths_after_step] = (int32_t)(length_of(a, b) + rows_of(a, b));
    return FATTN_OK;
}

/* ---- checks ---- */

/* A tensor of the call: shape and dtype as they must be; a dimension of -1 is any. */
typedef struct expect {
    const char *name, *meaning;
    int ndim;
    int64_t shape[4];
    int32_t dtype;
    bool written;
} expect;

static fattn_status check(fattn_ctx *ctx, const fattn_tensor *t, const expect *e) {
    char text[96], want[96];
    FATTNI_TRY(fattni_check_tensor(ctx, e->name, t));
    if (t->dtype != e->dtype)
        return fattn_ctx_fail(ctx, FATTN_E_DTYPE, "%s: is %s, must be %s", e->name,
                              fattn_dtype_name((fattn_dtype)t->dtype), fattn_dtype_name((fattn_dtype)e->dtype));
    if (t->ndim != e->ndim)
        return fattn_ctx_fail(ctx, FATTN_E_SHAPE, "%s: is %s, not %s", e->name, fattni_shape_text(t, text, sizeof text),
                              e->meaning);
    fattn_tensor expected = {.ndim = e->ndim};
    bool same = true;
    for (int d = 0; d < e->ndim; ++d) {
        expected.shape[d] = e->shape[d] < 0 ? t->shape[d] : e->shape[d];
        same = same && t->shape[d] == expected.shape[d];
    }
    if (!same)
        return fattn_ctx_fail(ctx, FATTN_E_SHAPE, "%s: is %s, must be %s = %s", e->name,
                              fattni_shape_text(t, text, sizeof text), e->meaning,
                              fattni_shape_text(&expected, want, sizeof want));
    if (fattn_tensor_numel(t) == 0) return FATTN_OK;
    for (int d = 0; e->written && d < t->ndim; ++d)
        if (t->shape[d] > 1 && t->stride[d] == 0)
            return fattn_ctx_fail(ctx, FATTN_E_SHAPE, "%s: stride[%d] is 0: several elements share one address",
                                  e->name, d);
    if (t->ndim == 4 && t->shape[3] > 1 && t->stride[3] != 1)
        return fattn_ctx_fail(ctx, FATTN_E_SHAPE, "%s: stride[3] is %lld, the head dimension must be contiguous",
                              e->name, (long long)t->stride[3]);
    return FATTN_OK;
}

static fattn_status check_width(fattn_ctx *ctx, const char *name, const fattn_tensor *t) {
    char text[96];
    if (t->shape[3] >= 1 && t->shape[3] <= FATTNI_KV_WIDTH && t->shape[1] >= 1) return FATTN_OK;
    return fattn_ctx_fail(ctx, FATTN_E_SHAPE, "%s: is %s: no head, or a head dimension that is not in 1..%d", name,
                          fattni_shape_text(t, text, sizeof text), FATTNI_KV_WIDTH);
}

/* Sizes that k, v and the cache of k fix. */
static fattn_status take_sizes(fattn_ctx *ctx, const fattn_kv_append_io *io, fattni_kv_append *a) {
    const fattn_tensor *const k = io->k, *const cache = io->k_cache, *const table = io->page_table;
    char text[96];
    FATTNI_TRY(fattni_check_tensor(ctx, "k", k));
    FATTNI_TRY(fattni_check_tensor(ctx, "v", io->v));
    FATTNI_TRY(fattni_check_tensor(ctx, "k_cache", cache));
    FATTNI_TRY(fattni_check_tensor(ctx, "v_cache", io->v_cache));
    if (k->dtype < FATTN_F64 || k->dtype > FATTN_BF16)
        return fattn_ctx_fail(ctx, FATTN_E_DTYPE, "k: is %s, not f64, f32, f16 or bf16",
                              fattn_dtype_name((fattn_dtype)k->dtype));
    if (k->ndim != 4 || cache->ndim != 4 || io->v->ndim != 4)
        return fattn_ctx_fail(ctx, FATTN_E_SHAPE, "k, v, k_cache have %d, %d, %d dimensions, must have 4", k->ndim,
                              io->v->ndim, cache->ndim);
    FATTNI_TRY(check_width(ctx, "k", k));
    FATTNI_TRY(check_width(ctx, "v", io->v));
    a->dtype = k->dtype;
    a->B = k->shape[0], a->S = k->shape[2], a->D = k->shape[3];
    a->base = (double)io->rope_base;
    if (!(isfinite(a->base) && a->base >= 0))
        return fattn_ctx_fail(ctx, FATTN_E_ARG, "rope_base: %g is not finite and positive (0 = no rotation)", a->base);
    if (a->base > 0 && a->D % 2)
        return fattn_ctx_fail(ctx, FATTN_E_SHAPE, "k: D=%lld is odd, but rope turns pairs", (long long)a->D);
    a->page = a->room = cache->shape[2], a->pages = a->B;
    if (table) {
        const expect e = {"page_table", "[B,pages of a sequence]", 2, {a->B, -1}, FATTN_I32, false};
        FATTNI_TRY(check(ctx, table, &e));
        if (a->page < 16 || (a->page & (a->page - 1)))
            return fattn_ctx_fail(ctx, FATTN_E_SHAPE, "k_cache: pages of %lld keys: not a power of two of 16 or more",
                                  (long long)a->page);
        a->pages = cache->shape[0];
        if (__builtin_mul_overflow(table->shape[1], a->page, &a->room)) a->room = INT64_MAX;
    }
    if (a->room > INT32_MAX)
        return fattn_ctx_fail(ctx, FATTN_E_SHAPE, "k_cache: is %s%s: room for more than 2^31-1 keys",
                              fattni_shape_text(cache, text, sizeof text), table ? ", in pages" : "");
    return FATTN_OK;
}

static fattni_kv_move move_of(const fattn_tensor *to, const fattn_tensor *from, bool turns, bool in_cache) {
    return (fattni_kv_move){.to = to->data,
                            .from = from->data,
                            .to_stride = {fattni_step(to, 0), fattni_step(to, 1), fattni_step(to, 2)},
                            .from_stride = {fattni_step(from, 0), fattni_step(from, 1), fattni_step(from, 2)},
                            .heads = from->shape[1],
                            .width = from->shape[3],
                            .turns = turns,
                            .in_cache = in_cache};
}

static bool same_place(const fattn_tensor *a, const fattn_tensor *b) {
    bool same = a->data == b->data;
    for (int d = 0; d < 4; ++d) same = same && fattni_step(a, d) == fattni_step(b, d);
    return same;
}

static fattn_status check_overlaps(fattn_ctx *ctx, const fattn_kv_append_io *io) {
    fattni_span all[10];
    int n = 0;
    fattni_add_span(all, &n, "k_cache", io->k_cache);
    fattni_add_span(all, &n, "v_cache", io->v_cache);
    fattni_add_span(all, &n, "lengths_after", io->lengths_after);
    fattni_add_span(all, &n, "q_rotated", io->q_rotated);
    const int written = n;
    fattni_add_span(all, &n, "k", io->k);
    fattni_add_span(all, &n, "v", io->v);
    if (io->q && !same_place(io->q, io->q_rotated)) fattni_add_span(all, &n, "q", io->q);
    fattni_add_span(all, &n, "lengths", io->lengths);
    fattni_add_span(all, &n, "new_rows", io->new_rows);
    fattni_add_span(all, &n, "page_table", io->page_table);
    return fattni_check_spans(ctx, all, written, n);
}

static fattn_status take_tensors(fattn_ctx *ctx, const fattn_kv_append_io *io, fattni_kv_append *a) {
    const int64_t B = a->B, S = a->S, D = a->D, H = io->k->shape[1], Dv = io->v->shape[3];
    const int64_t blocks = a->pages, rows = a->page;
    const char *const places = io->page_table ? "[pages,Hkv,page,D]" : "[B,Hkv,room,D]";
    const expect k = {"k", "[B,Hkv,S,D]", 4, {B, H, S, D}, a->dtype, false};
    const expect v = {"v", "[B,Hkv,S,Dv]", 4, {B, H, S, Dv}, a->dtype, false};
    const expect k_cache = {"k_cache", places, 4, {blocks, H, rows, D}, a->dtype, true};
    const expect v_cache = {"v_cache", places, 4, {blocks, H, rows, Dv}, a->dtype, true};
    const expect lengths = {"lengths", "[B]", 1, {B}, FATTN_I32, false};
    const expect new_rows = {"new_rows", "[B]", 1, {B}, FATTN_I32, false};
    const expect after = {"lengths_after", "[B]", 1, {B}, FATTN_I32, true};
    const expect q = {"q", "[B,Hq,S,D]", 4, {B, -1, S, D}, a->dtype, false};
    FATTNI_TRY(check(ctx, io->k, &k));
    FATTNI_TRY(check(ctx, io->v, &v));
    FATTNI_TRY(check(ctx, io->k_cache, &k_cache));
    FATTNI_TRY(check(ctx, io->v_cache, &v_cache));
    FATTNI_TRY(check(ctx, io->lengths, &lengths));
    if (io->new_rows) FATTNI_TRY(check(ctx, io->new_rows, &new_rows));
    if (io->lengths_after) FATTNI_TRY(check(ctx, io->lengths_after, &after));
    if (!io->q != !io->q_rotated) return fattn_ctx_fail(ctx, FATTN_E_ARG, "q and q_rotated: only one is given");
    a->move[0] = move_of(io->k_cache, io->k, a->base > 0, true);
    a->move[1] = move_of(io->v_cache, io->v, false, true);
    if (io->q) {
        FATTNI_TRY(check(ctx, io->q, &q));
        const expect rotated = {"q_rotated", "[B,Hq,S,D]", 4, {B, io->q->shape[1], S, D}, a->dtype, true};
        FATTNI_TRY(check(ctx, io->q_rotated, &rotated));
        a->move[2] = move_of(io->q_rotated, io->q, a->base > 0, false);
    }
    a->lengths = io->lengths->data, a->lengths_step = fattni_step(io->lengths, 0);
    if (io->new_rows) a->new_rows = io->new_rows->data, a->new_rows_step = fattni_step(io->new_rows, 0);
    if (io->lengths_after)
        a->lengths_after = io->lengths_after->data, a->lengths_after_step = fattni_step(io->lengths_after, 0);
    if (io->page_table) {
        a->page_table = io->page_table->data;
        a->table_stride[0] = fattni_step(io->page_table, 0), a->table_stride[1] = fattni_step(io->page_table, 1);
    }
    return FATTN_OK;
}

fattn_status fattn_kv_append(fattn_ctx *ctx, const fattn_kv_append_io *given) {
    if (!ctx) return FATTN_E_ARG;
    if (!given) return fattn_ctx_fail(ctx, FATTN_E_ARG, "io: NULL");
    fattn_kv_append_io io;
    fattni_kv_append a = {0};
    FATTNI_TRY(fattni_take_struct(ctx, "fattn_kv_append_io", given, &io, sizeof io));
    FATTNI_TRY(take_sizes(ctx, &io, &a));
    FATTNI_TRY(take_tensors(ctx, &io, &a));
    FATTNI_TRY(check_overlaps(ctx, &io));
    return a.B > 0 ? ctx->ops->kv_append(ctx, &a) : FATTN_OK;
}
