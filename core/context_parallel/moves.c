/* Rows and heads between the ranks. What goes from one rank to another is one message: the tensors one after the other,
   each row-major, at multiples of FATTNI_ALIGN bytes. */
#include "core/context_parallel/cp.h"

/* Of a tensor [B,H,rows,W] with its strides: so many heads from `head` on, and rows begin..end-1. */
static fattn_tensor part_of(const fattn_tensor *t, int64_t head, int64_t heads, int64_t begin, int64_t end) {
    const fattn_tensor some = fattn_tensor_slice(t, 1, head, head + heads);
    return fattn_tensor_slice(&some, 2, begin, end);
}

static int64_t share(const fattni_cp_call *c, const fattn_tensor *t, bool by_heads) {
    return by_heads ? t->shape[1] / c->cp->comm->size : t->shape[1];
}

/* Tensor i of a message with so many rows and heads, which begins at `base`; its offset and, for i = n, the length. */
static fattn_tensor packed_at(const fattni_cp_call *c, const fattn_tensor *like, int n, int i, int64_t rows,
                              bool by_heads, bool local, void *base, size_t *length) {
    size_t offset = 0;
    fattn_tensor t = {0};
    for (int m = 0; m <= i && m < n; ++m) {
        const fattn_tensor *const x = &like[m];
        const int64_t heads = local ? share(c, x, by_heads) : x->shape[1];
        const int64_t shape[4] = {x->shape[0], heads, rows, x->shape[3]};
        t = fattni_cp_view(c->cp, base ? (char *)base + offset : NULL, (fattn_dtype)x->dtype, 4, shape);
        offset += (size_t)fattni_round_up((int64_t)fattni_cp_bytes(&t), FATTNI_ALIGN);
    }
    if (length) *length = offset;
    return t;
}

/* Bytes of a message of all n tensors. */
static size_t length_of(const fattni_cp_call *c, const fattn_tensor *like, int n, int64_t rows, bool by_heads,
                        bool local) {
    size_t length;
    packed_at(c, like, n, n - 1, rows, by_heads, local, NULL, &length);
    return length;
}

static fattn_status exchange(const fattni_cp_call *c, int n_sends, int n_receives) {
    fattn_cp *const cp = c->cp;
    void *request;
    FATTNI_TRY(fattni_comm_start(cp->comm, cp->messages, n_sends, cp->messages + cp->comm->size, n_receives, &request));
    return fattni_comm_finish(cp->comm, request);
}

/* Rows of rank r: between `rows`, as they lie on a rank, and `whole`. */
static fattn_status move_rows(const fattni_cp_call *c, int r, const fattn_tensor *rows, const fattn_tensor *whole,
                              bool to_whole) {
    fattni_cp_span chunks[FATTNI_CP_CHUNKS];
    const int n = fattni_cp_chunks(c->cp, r, chunks);
    for (int i = 0; i < n; ++i) {
        const fattni_cp_span *const k = &chunks[i];
        const fattn_tensor a = fattn_tensor_slice(rows, 2, k->at, k->at + k->end - k->begin);
        const fattn_tensor b = fattn_tensor_slice(whole, 2, k->begin, k->end);
        FATTNI_TRY(to_whole ? fattn_tensor_copy(c->cp->ctx, &b, &a) : fattn_tensor_copy(c->cp->ctx, &a, &b));
    }
    return FATTN_OK;
}

fattn_status fattni_cp_to_whole(const fattni_cp_call *c, const fattn_tensor *local, int n, bool by_heads,
                                const fattn_tensor *whole) {
    fattn_cp *const cp = c->cp;
    const int size = cp->comm->size, me = cp->comm->rank;
    const size_t length = length_of(c, local, n, c->rows, by_heads, true);
    size_t total = 0;
    for (int r = 0; r < size; ++r)
        total += r == me ? 0 : length_of(c, local, n, fattni_cp_rows_of(cp, r), by_heads, true);
    void *sent, *received;
    FATTNI_TRY(fattni_cp_room(cp, FATTNI_CP_SEND, length * (size_t)(by_heads ? size : 1), &sent));
    FATTNI_TRY(fattni_cp_room(cp, FATTNI_CP_RECEIVE, total, &received));
    int count = 0;
    size_t at = 0;
    for (int r = 0; r < size; ++r) {
        if (r == me) continue;
        void *const base = by_heads ? (char *)sent + (size_t)r * length : sent;
        for (int i = 0; i < n && (by_heads || count == 0); ++i) {
            const int64_t heads = share(c, &local[i], by_heads);
            const fattn_tensor to = packed_at(c, local, n, i, c->rows, by_heads, true, base, NULL);
            const fattn_tensor from = part_of(&local[i], by_heads ? r * heads : 0, heads, 0, c->rows);
            FATTNI_TRY(fattn_tensor_copy(cp->ctx, &to, &from));
        }
        const size_t expected = length_of(c, local, n, fattni_cp_rows_of(cp, r), by_heads, true);
        cp->messages[count] = (fattn_message){.data = base, .bytes = length, .peer = r};
        cp->messages[size + count] = (fattn_message){.data = (char *)received + at, .bytes = expected, .peer = r};
        at += expected;
        count += 1;
    }
    FATTNI_TRY(exchange(c, count, count));
    count = 0;
    for (int r = 0; r < size; ++r)
        for (int i = 0; i < n; ++i) {
            const int64_t heads = share(c, &local[i], by_heads);
            fattn_tensor rows = part_of(&local[i], by_heads ? me * heads : 0, heads, 0, c->rows);
            if (r != me) {
                const int before = r < me ? r : r - 1;
                rows = packed_at(c, local, n, i, fattni_cp_rows_of(cp, r), by_heads, true,
                                 cp->messages[size + before].data, NULL);
            }
            FATTNI_TRY(move_rows(c, r, &rows, &whole[i], true));
        }
    return FATTN_OK;
}

fattn_status fattni_cp_own_rows(const fattni_cp_call *c, const fattn_tensor *whole, const fattn_tensor *local) {
    return move_rows(c, c->cp->comm->rank, local, whole, false);
}

/* Sends every rank its rows of `whole`, and receives this rank's from all: at received + r * *length. */
static fattn_status scatter_rows(const fattni_cp_call *c, const fattn_tensor *whole, int n, void **received,
                                 size_t *length) {
    fattn_cp *const cp = c->cp;
    const int size = cp->comm->size;
    size_t total = 0;
    *length = length_of(c, whole, n, c->rows, false, false);
    for (int r = 0; r < size; ++r) total += length_of(c, whole, n, fattni_cp_rows_of(cp, r), false, false);
    void *sent;
    FATTNI_TRY(fattni_cp_room(cp, FATTNI_CP_SEND, total, &sent));
    FATTNI_TRY(fattni_cp_room(cp, FATTNI_CP_RECEIVE, *length * (size_t)size, received));
    size_t at = 0;
    for (int r = 0; r < size; ++r) {
        const int64_t rows = fattni_cp_rows_of(cp, r);
        void *const base = (char *)sent + at;
        const size_t bytes = length_of(c, whole, n, rows, false, false);
        for (int i = 0; i < n; ++i) {
            const fattn_tensor to = packed_at(c, whole, n, i, rows, false, false, base, NULL);
            FATTNI_TRY(move_rows(c, r, &to, &whole[i], false));
        }
        cp->messages[r] = (fattn_message){.data = base, .bytes = bytes, .peer = r};
        cp->messages[size + r] =
            (fattn_message){.data = (char *)*received + (size_t)r * *length, .bytes = *length, .peer = r};
        at += bytes;
    }
    return exchange(c, size, size);
}

fattn_status fattni_cp_to_rows(const fattni_cp_call *c, const fattn_tensor *whole, int n, const fattn_tensor *local) {
    void *received;
    size_t length;
    FATTNI_TRY(scatter_rows(c, whole, n, &received, &length));
    for (int r = 0; r < c->cp->comm->size; ++r)
        for (int i = 0; i < n; ++i) {
            const int64_t heads = whole[i].shape[1];
            const fattn_tensor from =
                packed_at(c, whole, n, i, c->rows, false, false, (char *)received + (size_t)r * length, NULL);
            const fattn_tensor to = part_of(&local[i], r * heads, heads, 0, c->rows);
            FATTNI_TRY(fattn_tensor_copy(c->cp->ctx, &to, &from));
        }
    return FATTN_OK;
}

fattn_status fattni_cp_sum_rows(const fattni_cp_call *c, const fattn_tensor *whole, int n, const fattn_tensor *local,
                                const bool *add) {
    const int size = c->cp->comm->size;
    void *received;
    size_t length;
    FATTNI_TRY(scatter_rows(c, whole, n, &received, &length));
    for (int i = 0; i < n; ++i) {
        for (int step = 1; step < size; step *= 2)
            for (int r = 0; r + step < size; r += 2 * step) {
                const fattn_tensor a =
                    packed_at(c, whole, n, i, c->rows, false, false, (char *)received + (size_t)r * length, NULL);
                const fattn_tensor b = packed_at(c, whole, n, i, c->rows, false, false,
                                                 (char *)received + (size_t)(r + step) * length, NULL);
                FATTNI_TRY(fattn_tensor_add(c->cp->ctx, &a, &b));
            }
        const fattn_tensor sum = packed_at(c, whole, n, i, c->rows, false, false, received, NULL);
        FATTNI_TRY(fattni_cp_store(c->cp, &local[i], &sum, add[i]));
    }
    return FATTN_OK;
}

fattn_tensor fattni_cp_rows_4d(const fattn_tensor *t) {
    fattn_tensor x = *t;
    if (t->ndim == 3) x.ndim = 4, x.shape[3] = 1, x.stride[3] = 1;
    return x;
}

fattn_status fattni_cp_wholes(const fattni_cp_call *c, fattn_tensor *whole, int n) {
    size_t total = 0;
    for (int i = 0; i < n; ++i) total += (size_t)fattni_round_up((int64_t)fattni_cp_bytes(&whole[i]), FATTNI_ALIGN);
    void *p;
    FATTNI_TRY(fattni_cp_room(c->cp, FATTNI_CP_WHOLE, total, &p));
    for (int i = 0; i < n; ++i) {
        const size_t bytes = fattni_cp_bytes(&whole[i]);
        whole[i].data = bytes ? p : NULL;
        p = (char *)p + (size_t)fattni_round_up((int64_t)bytes, FATTNI_ALIGN);
    }
    return FATTN_OK;
}
