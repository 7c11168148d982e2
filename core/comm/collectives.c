/* Collective calls, made of exchanges and of additions in a fixed order. */
#include "core/comm/comm.h"
#include "core/tensor/spans.h"

#include <stdio.h>
#include <string.h>

enum { MOST_AGREED = 32 };

/* ---- checks ---- */

static fattn_status check(fattn_comm *c, const char *name, const fattn_tensor *t) {
    FATTNI_TRY(fattni_check_tensor(c->ctx, name, t));
    if (!fattni_is_row_major(t)) return fattn_ctx_fail(c->ctx, FATTN_E_SHAPE, "%s: is not row-major", name);
    return FATTN_OK;
}

static size_t bytes_of(const fattn_tensor *t) {
    return (size_t)fattn_tensor_numel(t) * fattn_dtype_size((fattn_dtype)t->dtype);
}

static fattn_status check_peer(fattn_comm *c, const char *name, int rank) {
    if (rank >= 0 && rank < c->size) return FATTN_OK;
    return fattn_ctx_fail(c->ctx, FATTN_E_ARG, "%s: rank %d is not in 0..%d", name, rank, c->size - 1);
}

static fattn_status check_dtypes(fattn_comm *c, const fattn_tensor *in, const fattn_tensor *out) {
    if (in->dtype == out->dtype) return FATTN_OK;
    return fattn_ctx_fail(c->ctx, FATTN_E_DTYPE, "in is %s, out is %s", fattn_dtype_name((fattn_dtype)in->dtype),
                          fattn_dtype_name((fattn_dtype)out->dtype));
}

static fattn_status check_floats(fattn_comm *c, const fattn_tensor *t) {
    if (t->dtype >= FATTN_F64 && t->dtype <= FATTN_BF16) return FATTN_OK;
    return fattn_ctx_fail(c->ctx, FATTN_E_DTYPE, "%s cannot be summed", fattn_dtype_name((fattn_dtype)t->dtype));
}

static void *at(void *p, size_t offset) { return p ? (char *)p + offset : NULL; }

static fattn_status exchange(fattn_comm *c, const fattn_message *sends, int n_sends, const fattn_message *receives,
                             int n_receives) {
    void *request;
    FATTNI_TRY(fattni_comm_start(c, sends, n_sends, receives, n_receives, &request));
    return fattni_comm_finish(c, request);
}

/* Host memory for a message to and one from each rank. */
typedef struct envelopes {
    fattn_message *sends, *receives;
    size_t bytes;
} envelopes;

static fattn_status open_envelopes(fattn_comm *c, envelopes *e) {
    e->bytes = 2 * (size_t)c->size * sizeof *e->sends;
    FATTNI_TRY(fattni_host_alloc(c->ctx, e->bytes, (void **)&e->sends));
    memset(e->sends, 0, e->bytes);
    e->receives = e->sends + c->size;
    for (int r = 0; r < c->size; ++r) e->sends[r].peer = e->receives[r].peer = r;
    return FATTN_OK;
}

static fattn_status exchange_all(fattn_comm *c, envelopes *e) {
    const fattn_status s = exchange(c, e->sends, c->size, e->receives, c->size);
    fattni_host_free(c->ctx, e->sends, e->bytes);
    return s;
}

/* ---- moves ---- */

static fattni_span span_of(const char *name, const fattn_tensor *t) {
    return fattni_span_of(name, t->data, fattn_dtype_size((fattn_dtype)t->dtype), t->ndim, t->shape, t->stride);
}

/* What is sent while results arrive must not be overwritten. */
static fattn_status check_apart(fattn_comm *c, const char *out_name, const fattn_tensor *out, const char *in_name,
                                const fattn_tensor *in) {
    if (fattn_tensor_numel(in) == 0 || fattn_tensor_numel(out) == 0) return FATTN_OK;
    const fattni_span spans[] = {span_of(out_name, out), span_of(in_name, in)};
    return fattni_check_spans(c->ctx, spans, 1, 2);
}

static fattn_status send_receive(fattn_comm *c, const fattn_tensor *send, int to, const fattn_tensor *receive,
                                 int from) {
    fattn_message s = {0}, r = {0};
    if (send) {
        FATTNI_TRY(check(c, "send", send));
        FATTNI_TRY(check_peer(c, "to", to));
        s = (fattn_message){.data = send->data, .bytes = bytes_of(send), .peer = to};
    }
    if (receive) {
        FATTNI_TRY(check(c, "receive", receive));
        FATTNI_TRY(check_peer(c, "from", from));
        r = (fattn_message){.data = receive->data, .bytes = bytes_of(receive), .peer = from};
    }
    if (send && receive) FATTNI_TRY(check_apart(c, "receive", receive, "send", send));
    return exchange(c, &s, 1, &r, 1);
}

static fattn_status check_ratio(fattn_comm *c, const fattn_tensor *in, const fattn_tensor *out, int64_t ratio) {
    FATTNI_TRY(check(c, "in", in));
    FATTNI_TRY(check(c, "out", out));
    FATTNI_TRY(check_dtypes(c, in, out));
    const int64_t n = fattn_tensor_numel(in), m = fattn_tensor_numel(out);
    if (m == n * ratio) return FATTN_OK;
    return fattn_ctx_fail(c->ctx, FATTN_E_SHAPE, "in has %lld elements, out %lld, not %lld for %d ranks", (long long)n,
                          (long long)m, (long long)(n * ratio), c->size);
}

static fattn_status all_gather(fattn_comm *c, const fattn_tensor *in, const fattn_tensor *out) {
    envelopes e;
    FATTNI_TRY(check_ratio(c, in, out, c->size));
    const size_t part = bytes_of(in);
    const bool in_place = in->data == at(out->data, (size_t)c->rank * part);
    if (!in_place) FATTNI_TRY(check_apart(c, "out", out, "in", in));
    FATTNI_TRY(open_envelopes(c, &e));
    for (int r = 0; r < c->size; ++r) {
        e.sends[r].data = in->data, e.sends[r].bytes = part;
        e.receives[r].data = at(out->data, (size_t)r * part), e.receives[r].bytes = part;
    }
    if (in_place) e.sends[c->rank].bytes = e.receives[c->rank].bytes = 0;
    return exchange_all(c, &e);
}

static fattn_status all_to_all(fattn_comm *c, const fattn_tensor *in, const fattn_tensor *out) {
    envelopes e;
    FATTNI_TRY(check_ratio(c, in, out, 1));
    const size_t all = bytes_of(in), part = all / (size_t)c->size;
    if (in->ndim < 1 || in->shape[0] != c->size)
        return fattn_ctx_fail(c->ctx, FATTN_E_SHAPE, "in: dimension 0 is %lld, not the %d ranks",
                              in->ndim < 1 ? 0ll : (long long)in->shape[0], c->size);
    FATTNI_TRY(check_apart(c, "out", out, "in", in));
    FATTNI_TRY(open_envelopes(c, &e));
    for (int r = 0; r < c->size; ++r) {
        e.sends[r].data = at(in->data, (size_t)r * part), e.sends[r].bytes = part;
        e.receives[r].data = at(out->data, (size_t)r * part), e.receives[r].bytes = part;
    }
    return exchange_all(c, &e);
}

static fattn_status broadcast(fattn_comm *c, const fattn_tensor *x, int root) {
    envelopes e;
    FATTNI_TRY(check(c, "x", x));
    FATTNI_TRY(check_peer(c, "root", root));
    FATTNI_TRY(open_envelopes(c, &e));
    for (int r = 0; r < c->size && c->rank == root; ++r)
        if (r != root) e.sends[r].data = x->data, e.sends[r].bytes = bytes_of(x);
    if (c->rank != root) e.receives[root].data = x->data, e.receives[root].bytes = bytes_of(x);
    return exchange_all(c, &e);
}

/* ---- sums ---- */

/* Elements of rank r's part of n. */
static int64_t part_begin(const fattn_comm *c, int64_t n, int r) {
    return fattni_min(n, r * fattni_ceil_div(n, c->size));
}

static fattn_tensor view_of(const fattn_comm *c, void *data, fattn_dtype dtype, int64_t n) {
    return fattn_tensor_view(n > 0 ? data : NULL, dtype, c->ctx->device, c->ctx->device_id, 1, &n);
}

/* Bytes of the parts [size][n] as they are received, behind which their F32 copies lie. */
static size_t narrow_bytes(const fattn_comm *c, int64_t n) {
    return (size_t)fattni_round_up(c->size * n * (int64_t)sizeof(uint16_t), FATTNI_ALIGN);
}

size_t fattni_comm_sum_bytes(const fattn_comm *c, fattn_dtype dtype, int64_t n) {
    const size_t size = fattn_dtype_size(dtype), all = (size_t)(c->size * n);
    return size == 2 ? narrow_bytes(c, n) + all * sizeof(float) : all * size;
}

fattn_status fattni_comm_add(fattn_comm *c, void *parts, fattn_dtype dtype, int64_t n, void *sum) {
    const bool narrow = fattn_dtype_size(dtype) == 2;
    const fattn_dtype wide = narrow ? FATTN_F32 : dtype;
    void *const terms = narrow ? at(parts, narrow_bytes(c, n)) : parts;
    if (narrow) {
        const fattn_tensor from = view_of(c, parts, dtype, c->size * n), to = view_of(c, terms, wide, c->size * n);
        FATTNI_TRY(fattn_tensor_copy(c->ctx, &to, &from));
    }
    const size_t part = (size_t)n * fattn_dtype_size(wide);
    for (int step = 1; step < c->size; step *= 2)
        for (int r = 0; r + step < c->size; r += 2 * step) {
            const fattn_tensor a = view_of(c, at(terms, (size_t)r * part), wide, n);
            const fattn_tensor b = view_of(c, at(terms, (size_t)(r + step) * part), wide, n);
            FATTNI_TRY(fattn_tensor_add(c->ctx, &a, &b));
        }
    const fattn_tensor first = view_of(c, terms, wide, n), to = view_of(c, sum, dtype, n);
    return fattn_tensor_copy(c->ctx, &to, &first);
}

/* Every rank gets its part of x from all: parts [size][n], in the scratch memory. */
static fattn_status gather_parts(fattn_comm *c, const fattn_tensor *x, void **parts, int64_t *n) {
    const size_t size = fattn_dtype_size((fattn_dtype)x->dtype);
    const int64_t all = fattn_tensor_numel(x);
    *n = part_begin(c, all, c->rank + 1) - part_begin(c, all, c->rank);
    FATTNI_TRY(fattni_comm_scratch(c, fattni_comm_sum_bytes(c, (fattn_dtype)x->dtype, *n), parts));
    envelopes e;
    FATTNI_TRY(open_envelopes(c, &e));
    for (int r = 0; r < c->size; ++r) {
        const int64_t begin = part_begin(c, all, r), end = part_begin(c, all, r + 1);
        e.sends[r].data = at(x->data, (size_t)begin * size), e.sends[r].bytes = (size_t)(end - begin) * size;
        e.receives[r].data = at(*parts, (size_t)(r * *n) * size), e.receives[r].bytes = (size_t)*n * size;
    }
    return exchange_all(c, &e);
}

/* x's part of this rank = the sum; the other parts stay. */
static fattn_status sum_own_part(fattn_comm *c, const fattn_tensor *x, const fattn_tensor *to) {
    void *parts;
    int64_t n;
    FATTNI_TRY(gather_parts(c, x, &parts, &n));
    return fattni_comm_add(c, parts, (fattn_dtype)x->dtype, n, to->data);
}

static fattn_tensor own_part(const fattn_comm *c, const fattn_tensor *x) {
    const int64_t all = fattn_tensor_numel(x), begin = part_begin(c, all, c->rank);
    const size_t size = fattn_dtype_size((fattn_dtype)x->dtype);
    return view_of(c, at(x->data, (size_t)begin * size), (fattn_dtype)x->dtype,
                   part_begin(c, all, c->rank + 1) - begin);
}

static fattn_status check_sum(fattn_comm *c, const char *name, const fattn_tensor *x) {
    FATTNI_TRY(check(c, name, x));
    return check_floats(c, x);
}

static fattn_status all_reduce(fattn_comm *c, const fattn_tensor *x) {
    FATTNI_TRY(check_sum(c, "x", x));
    if (c->size == 1) return FATTN_OK;
    const fattn_tensor own = own_part(c, x);
    FATTNI_TRY(sum_own_part(c, x, &own));
    envelopes e;
    FATTNI_TRY(open_envelopes(c, &e));
    const int64_t all = fattn_tensor_numel(x);
    const size_t size = fattn_dtype_size((fattn_dtype)x->dtype);
    for (int r = 0; r < c->size; ++r) {
        if (r == c->rank) continue;
        const int64_t begin = part_begin(c, all, r), end = part_begin(c, all, r + 1);
        e.sends[r].data = own.data, e.sends[r].bytes = bytes_of(&own);
        e.receives[r].data = at(x->data, (size_t)begin * size), e.receives[r].bytes = (size_t)(end - begin) * size;
    }
    return exchange_all(c, &e);
}

static fattn_status reduce(fattn_comm *c, const fattn_tensor *x, int root) {
    FATTNI_TRY(check_sum(c, "x", x));
    FATTNI_TRY(check_peer(c, "root", root));
    if (c->size == 1) return FATTN_OK;
    void *parts;
    int64_t n;
    FATTNI_TRY(gather_parts(c, x, &parts, &n));
    const fattn_tensor sum = view_of(c, parts, (fattn_dtype)x->dtype, n); /* in the place of the first part */
    FATTNI_TRY(fattni_comm_add(c, parts, (fattn_dtype)x->dtype, n, parts));
    envelopes e;
    FATTNI_TRY(open_envelopes(c, &e));
    e.sends[root].data = sum.data, e.sends[root].bytes = bytes_of(&sum);
    const int64_t all = fattn_tensor_numel(x);
    const size_t size = fattn_dtype_size((fattn_dtype)x->dtype);
    for (int r = 0; r < c->size && c->rank == root; ++r) {
        const int64_t begin = part_begin(c, all, r), end = part_begin(c, all, r + 1);
        e.receives[r].data = at(x->data, (size_t)begin * size), e.receives[r].bytes = (size_t)(end - begin) * size;
    }
    return exchange_all(c, &e);
}

static fattn_status reduce_scatter(fattn_comm *c, const fattn_tensor *in, const fattn_tensor *out) {
    FATTNI_TRY(check_sum(c, "in", in));
    FATTNI_TRY(check(c, "out", out));
    FATTNI_TRY(check_dtypes(c, in, out));
    const fattn_tensor own = own_part(c, in);
    if (fattn_tensor_numel(out) != fattn_tensor_numel(&own))
        return fattn_ctx_fail(c->ctx, FATTN_E_SHAPE, "out has %lld elements, not %lld: rank %d's part of %lld",
                              (long long)fattn_tensor_numel(out), (long long)fattn_tensor_numel(&own), c->rank,
                              (long long)fattn_tensor_numel(in));
    return sum_own_part(c, in, out);
}

/* ---- agreement ---- */

static fattn_status gather_integers(fattn_comm *c, const int64_t *values, int n, int64_t *all) {
    const size_t part = (size_t)n * sizeof *values;
    const int64_t shape[2] = {c->size, (int64_t)part};
    void *p;
    FATTNI_TRY(fattni_comm_scratch(c, part * (size_t)(c->size + 1), &p));
    const int32_t id = c->ctx->device_id;
    const fattn_device device = c->ctx->device;
    const fattn_tensor own = fattn_tensor_view(at(p, part * (size_t)c->size), FATTN_U8, device, id, 1, shape + 1);
    const fattn_tensor gathered = fattn_tensor_view(p, FATTN_U8, device, id, 2, shape);
    int64_t mine[MOST_AGREED];
    memcpy(mine, values, part);
    const fattn_tensor from = fattn_tensor_view(mine, FATTN_U8, FATTN_CPU, 0, 1, shape + 1);
    const fattn_tensor to = fattn_tensor_view(all, FATTN_U8, FATTN_CPU, 0, 2, shape);
    FATTNI_TRY(fattn_tensor_copy(c->ctx, &own, &from));
    FATTNI_TRY(all_gather(c, &own, &gathered));
    return fattn_tensor_copy(c->ctx, &to, &gathered);
}

static fattn_status agree(fattn_comm *c, const char *const *names, const int64_t *values, int n) {
    if (n < 1 || n > MOST_AGREED || !names || !values)
        return fattn_ctx_fail(c->ctx, FATTN_E_ARG, "agree: %d numbers, not 1..%d, or NULL", n, MOST_AGREED);
    int64_t *all;
    const size_t bytes = (size_t)(c->size * n) * sizeof *all;
    FATTNI_TRY(fattni_host_alloc(c->ctx, bytes, (void **)&all));
    fattn_status s = gather_integers(c, values, n, all);
    for (int i = 0; i < n * c->size && !s; ++i)
        if (all[i] != all[i % n])
            s = fattn_ctx_fail(c->ctx, FATTN_E_COMM, "%s is %lld on rank %d, %lld on rank 0", names[i % n],
                               (long long)all[i], i / n, (long long)all[i % n]);
    fattni_host_free(c->ctx, all, bytes);
    return s;
}

fattn_status fattni_comm_least(fattn_comm *c, int64_t value, int64_t *least) {
    int64_t *all;
    const size_t bytes = (size_t)c->size * sizeof *all;
    FATTNI_TRY(fattni_host_alloc(c->ctx, bytes, (void **)&all));
    const fattn_status s = gather_integers(c, &value, 1, all);
    if (!s) *least = all[0];
    for (int r = 1; r < c->size && !s; ++r) *least = fattni_min(*least, all[r]);
    fattni_host_free(c->ctx, all, bytes);
    return s;
}

static fattn_status barrier(fattn_comm *c) {
    envelopes e;
    void *p;
    FATTNI_TRY(fattni_comm_scratch(c, 2 * (size_t)c->size, &p));
    FATTNI_TRY(open_envelopes(c, &e));
    for (int r = 0; r < c->size; ++r) {
        e.sends[r].data = at(p, (size_t)r), e.sends[r].bytes = 1;
        e.receives[r].data = at(p, (size_t)(c->size + r)), e.receives[r].bytes = 1;
    }
    return exchange_all(c, &e);
}

/* ---- the public calls: a failure of a rank's own arguments ends the group, too ---- */

#define CALL(c, call) ((c) ? fattni_comm_end(c, call) : FATTN_E_ARG)

fattn_status fattn_comm_send_receive(fattn_comm *c, const fattn_tensor *send, int to, const fattn_tensor *receive,
                                     int from) {
    return CALL(c, send_receive(c, send, to, receive, from));
}
fattn_status fattn_comm_all_gather(fattn_comm *c, const fattn_tensor *in, const fattn_tensor *out) {
    return CALL(c, all_gather(c, in, out));
}
fattn_status fattn_comm_all_to_all(fattn_comm *c, const fattn_tensor *in, const fattn_tensor *out) {
    return CALL(c, all_to_all(c, in, out));
}
fattn_status fattn_comm_broadcast(fattn_comm *c, const fattn_tensor *x, int root) {
    return CALL(c, broadcast(c, x, root));
}
fattn_status fattn_comm_all_reduce(fattn_comm *c, const fattn_tensor *x) { return CALL(c, all_reduce(c, x)); }
fattn_status fattn_comm_reduce(fattn_comm *c, const fattn_tensor *x, int root) { return CALL(c, reduce(c, x, root)); }
fattn_status fattn_comm_reduce_scatter(fattn_comm *c, const fattn_tensor *in, const fattn_tensor *out) {
    return CALL(c, reduce_scatter(c, in, out));
}
fattn_status fattn_comm_barrier(fattn_comm *c) { return CALL(c, barrier(c)); }
fattn_status fattn_comm_agree(fattn_comm *c, const char *const *names, const int64_t *values, int n) {
    return CALL(c, agree(c, names, values, n));
}
