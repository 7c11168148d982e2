#include "kv.h"

#include "cases.h"

#include "core/tensor/numeric.h"

#include <criterion/criterion.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

const char *const kv_names[KV_COUNT] = {"k",         "v",       "k_cache",  "v_cache",       "q",
                                        "q_rotated", "lengths", "new_rows", "lengths_after", "page_table"};

kv_case kv_case_of(int n, bool fits) {
    static const fattn_dtype dtypes[] = {FATTN_BF16, FATTN_F32, FATTN_F64, FATTN_F16};
    static const int64_t dims[] = {64, 8, 128, 34, 2, 256, 16, 80}, values[] = {64, 128, 1, 33, 256, 8, 16};
    static const int64_t rows[] = {1, 1, 2, 5, 1, 17, 33}, pages[] = {0, 16, 64, 32};
    uint64_t state = (uint64_t)n * 7919 + 1;
    kv_case c = {.dtype = dtypes[n % 4],
                 .B = 1 + n % 5,
                 .Hkv = 1 + n / 2 % 3,
                 .S = rows[n % 7],
                 .D = dims[n / 3 % 8],
                 .Dv = values[n / 2 % 7],
                 .page = pages[n / 5 % 4],
                 .layout = (enum kv_layout)(n / 4 % KV_LAYOUTS),
                 .base = n % 3 ? (n % 2 ? 1e4f : 5e5f) : 0,
                 .in_place = n / 3 % 2,
                 .ragged = n / 6 % 2,
                 .no_after = n % 11 == 10};
    c.Hq = n % 5 == 4 ? 0 : c.Hkv * (1 + n / 7 % 4);
    c.room = c.page ? c.page * (1 + cases_below(&state, 5)) + c.page * (c.S / c.page) : 40 + cases_below(&state, 60);
    if (n % 13 == 12) c.D -= 1 - c.D % 2, c.base = 0; /* an odd D without rotation */
    for (int64_t b = 0; b < c.B; ++b) {
        c.rows[b] = (int32_t)(c.ragged ? cases_below(&state, (int)c.S + 1) : c.S);
        const int64_t most = fits ? c.room - c.rows[b] : c.room;
        c.lengths[b] = cases_below(&state, (int)most + 1);
        if (n % 4 == 1 && b == 0) c.lengths[b] = (int32_t)most;
    }
    return c;
}

/* [n0,H,n2,D] full of NaN. */
static void place(kv *x, enum kv_tensor id, int64_t n0, int64_t H, int64_t n2, int64_t D) {
    const int64_t pitch = x->c.layout == KV_PITCH ? D + 1 : D;
    const size_t size = fattn_dtype_size(x->c.dtype);
    fattn_tensor *const t = &x->t[id];
    x->bytes[id] = (size_t)(n0 * H * n2 * pitch) * size;
    x->memory[id] = aligned_alloc(256, (x->bytes[id] + 511) / 256 * 256);
    cr_assert(x->memory[id]);
    for (size_t i = 0; i < x->bytes[id] / size; ++i) fattni_store(x->memory[id], (int32_t)x->c.dtype, (int64_t)i, NAN);
    *t = fattn_tensor_view(x->memory[id], x->c.dtype, FATTN_CPU, 0, 4, (const int64_t[]){n0, H, n2, D});
    const bool inside = x->c.layout == KV_HEADS_INSIDE;
    t->stride[0] = H * n2 * pitch;
    t->stride[1] = inside ? pitch : n2 * pitch;
    t->stride[2] = inside ? H * pitch : pitch;
    if (x->c.layout == KV_REVERSED && n2 > 1) {
        t->data = x->memory[id] + (size_t)((n2 - 1) * pitch) * size;
        t->stride[2] = -pitch;
    }
}

static void fill(kv *x, enum kv_tensor id, uint64_t state) {
    const fattn_tensor *const t = &x->t[id];
    for (int64_t n = 0; n < fattn_tensor_numel(t); ++n) {
        int64_t rest = n, at = 0;
        for (int d = 3; d >= 0; --d) {
            at += t->shape[d] > 1 ? rest % t->shape[d] * t->stride[d] : 0;
            rest /= t->shape[d];
        }
        fattni_store(t->data, t->dtype, at, (cases_below(&state, 4001) - 2000) / 500.0);
    }
}

static void place_integers(kv *x, enum kv_tensor id, const int32_t *values) {
    x->bytes[id] = (size_t)x->c.B * sizeof(int32_t);
    x->memory[id] = aligned_alloc(256, 256);
    cr_assert(x->memory[id] && x->bytes[id] <= 256);
    for (int64_t b = 0; b < x->c.B; ++b) ((int32_t *)x->memory[id])[b] = values ? values[b] : -99;
    x->t[id] = fattn_tensor_view(x->memory[id], FATTN_I32, FATTN_CPU, 0, 1, &x->c.B);
}

static void place_table(kv *x, int64_t pages, int64_t n) {
    uint64_t seed = 3;
    int32_t *const order = malloc((size_t)(pages + 1) * sizeof *order);
    x->bytes[KV_TABLE] = (size_t)(x->c.B * n) * sizeof(int32_t);
    x->memory[KV_TABLE] = aligned_alloc(256, (x->bytes[KV_TABLE] + 511) / 256 * 256);
    cr_assert(order && x->memory[KV_TABLE]);
    for (int64_t i = 0; i < pages; ++i) {
        const int j = cases_below(&seed, (int)i + 1);
        order[i] = order[j], order[j] = (int32_t)i;
    }
    for (int64_t b = 0; b < x->c.B; ++b)
        for (int64_t i = 0; i < n; ++i) {
            const int64_t begin = x->c.lengths[b], end = begin + x->c.rows[b];
            const bool used = x->c.rows[b] > 0 && (i + 1) * x->c.page > begin && i * x->c.page < end;
            ((int32_t *)x->memory[KV_TABLE])[b * n + i] = used ? order[b * n + i] : -1;
        }
    free(order);
    x->t[KV_TABLE] = fattn_tensor_view(x->memory[KV_TABLE], FATTN_I32, FATTN_CPU, 0, 2, (const int64_t[]){x->c.B, n});
}

static const fattn_tensor *given(const kv *x, enum kv_tensor id) { return x->t[id].dtype ? &x->t[id] : NULL; }

static void point(kv *x) {
    x->io = (fattn_kv_append_io){.struct_size = sizeof x->io,
                                 .rope_base = x->c.base,
                                 .k = given(x, KV_K),
                                 .v = given(x, KV_V),
                                 .k_cache = given(x, KV_K_CACHE),
                                 .v_cache = given(x, KV_V_CACHE),
                                 .lengths = given(x, KV_LENGTHS),
                                 .new_rows = given(x, KV_NEW_ROWS),
                                 .lengths_after = given(x, KV_AFTER),
                                 .page_table = given(x, KV_TABLE),
                                 .q = given(x, KV_Q),
                                 .q_rotated = given(x, KV_Q_ROTATED)};
}

kv *kv_new(const kv_case *c) {
    kv *const x = calloc(1, sizeof *x);
    cr_assert(x);
    x->c = *c;
    const int64_t n = c->page ? c->room / c->page : 0, blocks = c->page ? c->B * n + 2 : c->B;
    const int64_t rows = c->page ? c->page : c->room;
    place(x, KV_K, c->B, c->Hkv, c->S, c->D), fill(x, KV_K, 1);
    place(x, KV_V, c->B, c->Hkv, c->S, c->Dv), fill(x, KV_V, 2);
    place(x, KV_K_CACHE, blocks, c->Hkv, rows, c->D);
    place(x, KV_V_CACHE, blocks, c->Hkv, rows, c->Dv);
    if (c->Hq) {
        place(x, KV_Q, c->B, c->Hq, c->S, c->D), fill(x, KV_Q, 3);
        if (!c->in_place) place(x, KV_Q_ROTATED, c->B, c->Hq, c->S, c->D);
        if (c->in_place) x->t[KV_Q_ROTATED] = x->t[KV_Q];
    }
    place_integers(x, KV_LENGTHS, c->lengths);
    if (c->ragged) place_integers(x, KV_NEW_ROWS, c->rows);
    if (!c->no_after) place_integers(x, KV_AFTER, NULL);
    if (c->page) place_table(x, blocks, n);
    point(x);
    return x;
}

static void must(fattn_ctx *ctx, fattn_status s) { cr_assert_eq(s, FATTN_OK, "%s", fattn_ctx_error(ctx)); }

static fattn_tensor bytes_at(void *p, const fattn_tensor *like, size_t bytes) {
    const int64_t n = (int64_t)bytes;
    return fattn_tensor_view(p, FATTN_U8, (fattn_device)like->device, like->device_id, 1, &n);
}

kv *kv_to_device(fattn_ctx *ctx, const kv *x) {
    kv *const y = calloc(1, sizeof *y);
    cr_assert(y);
    *y = *x;
    for (int id = 0; id < KV_COUNT; ++id) {
        if (!x->memory[id]) continue;
        fattn_tensor room;
        const int64_t n = (int64_t)x->bytes[id] + 16;
        const fattn_tensor host = bytes_at(x->memory[id], &x->t[id], x->bytes[id]);
        must(ctx, fattn_tensor_alloc(ctx, FATTN_U8, 1, &n, &room));
        const fattn_tensor view = bytes_at(room.data, &room, x->bytes[id]);
        must(ctx, fattn_tensor_copy(ctx, &view, &host));
        y->memory[id] = room.data;
        y->t[id].data = y->memory[id] + ((unsigned char *)x->t[id].data - x->memory[id]);
        y->t[id].device = room.device, y->t[id].device_id = room.device_id;
    }
    if (x->c.Hq && x->c.in_place) y->t[KV_Q_ROTATED] = y->t[KV_Q];
    point(y);
    return y;
}

void kv_read(fattn_ctx *ctx, const kv *x, kv *to) {
    for (int id = 0; id < KV_COUNT; ++id) {
        if (!x->memory[id]) continue;
        const fattn_tensor device = bytes_at(x->memory[id], &x->t[id], x->bytes[id]);
        const fattn_tensor host = bytes_at(to->memory[id], &to->t[id], x->bytes[id]);
        must(ctx, fattn_tensor_copy(ctx, &host, &device));
    }
}

void kv_free(kv *x) {
    for (int id = 0; id < KV_COUNT; ++id) free(x->memory[id]);
    free(x);
}

void kv_free_on_device(fattn_ctx *ctx, kv *x) {
    for (int id = 0; id < KV_COUNT; ++id) {
        if (!x->memory[id]) continue;
        fattn_tensor t = bytes_at(x->memory[id], &x->t[id], x->bytes[id] + 16);
        fattn_tensor_free(ctx, &t);
    }
    free(x);
}

/* Rows 0..rows-1 of sequence b of x, turned from the position on or as they are. */
static fattn_tensor rows_of(fattn_ctx *ctx, fattn_tape *tape, const fattn_tensor *x, int64_t b, int64_t rows,
                            float base, int64_t position) {
    fattn_tensor t = fattn_tensor_slice(x, 0, b, b + 1);
    t = fattn_tensor_slice(&t, 2, 0, rows);
    if (base == 0) return t;
    fattn_tape_reset(tape);
    fattn_tensor value;
    must(ctx, fattn_tape_value(tape, fattn_op_rope(tape, fattn_input(tape, &t), base, position), &value));
    return value;
}

static void copy_row(fattn_ctx *ctx, const fattn_tensor *to, int64_t block, int64_t to_row, const fattn_tensor *from,
                     int64_t from_row) {
    fattn_tensor a = fattn_tensor_slice(to, 0, block, block + 1),
                 b = fattn_tensor_slice(from, 2, from_row, from_row + 1);
    a = fattn_tensor_slice(&a, 2, to_row, to_row + 1);
    must(ctx, fattn_tensor_copy(ctx, &a, &b));
}

void kv_expect(fattn_ctx *ctx, fattn_tape *tape, kv *x) {
    static const enum kv_tensor caches[2][2] = {{KV_K, KV_K_CACHE}, {KV_V, KV_V_CACHE}};
    const kv_case *const c = &x->c;
    int32_t after[KV_SEQUENCES];
    kv *const host = kv_new(c); /* has the table */
    for (int64_t b = 0; b < c->B; ++b) {
        const int64_t length = c->lengths[b];
        const int64_t rows = c->rows[b] < c->room - length ? c->rows[b] : c->room - length;
        after[b] = (int32_t)(length + rows);
        if (rows == 0) continue;
        for (int n = 0; n < 2; ++n) {
            const fattn_tensor from = rows_of(ctx, tape, &x->t[caches[n][0]], b, rows, n ? 0 : c->base, length);
            for (int64_t s = 0; s < rows; ++s) {
                const int64_t at = length + s, page = c->page ? c->page : c->room;
                const int64_t block =
                    c->page ? ((int32_t *)host->memory[KV_TABLE])[b * (c->room / page) + at / page] : b;
                copy_row(ctx, &x->t[caches[n][1]], block, at % page, &from, s);
            }
        }
        if (!c->Hq) continue;
        const fattn_tensor q = rows_of(ctx, tape, &x->t[KV_Q], b, rows, c->base, length);
        for (int64_t s = 0; s < rows && !(c->in_place && c->base == 0); ++s)
            copy_row(ctx, &x->t[KV_Q_ROTATED], b, s, &q, s);
    }
    kv_free(host);
    if (c->no_after) return;
    const fattn_tensor result = fattn_tensor_view(after, FATTN_I32, FATTN_CPU, 0, 1, &c->B);
    must(ctx, fattn_tensor_copy(ctx, &x->t[KV_AFTER], &result));
}

const char *kv_difference(const kv *a, const kv *b) {
    for (int id = 0; id < KV_COUNT; ++id)
        if (a->memory[id] && memcmp(a->memory[id], b->memory[id], a->bytes[id]) != 0) return kv_names[id];
    return NULL;
}
