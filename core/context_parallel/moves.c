/* Rows and heads between the ranks. A transport that moves parts copies them from where they lie to where they shall
   lie; on a GPU copy engines do, if the rows of each head are one run, else a rank copies them to a buffer first, or
   from one. Other transports have messages: what goes from one rank to another is one, the tensors one after the other,
   each row-major, at multiples of FATTNI_ALIGN bytes. Tensors are copied to buffers and from them by few launches. */
#include "core/context_parallel/cp.h"

/* Of a tensor [B,H,rows,W] with its strides: so many heads from `head` on, and rows begin..end-1. */
static fattn_tensor part_of(const fattn_tensor *t, int64_t head, int64_t heads, int64_t begin, int64_t end) {
    const fattn_tensor some = fattn_tensor_slice(t, 1, head, head + heads);
    return fattn_tensor_slice(&some, 2, begin, end);
}

/* ---- lists of copies ---- */

static void list(fattn_cp *cp, const fattn_tensor *to, const fattn_tensor *from) {
    cp->pairs[cp->n_pairs++] = (fattni_copy_pair){*to, *from};
}

/* The rows of rank r; those that follow each other in the whole are one span, none is empty. */
static int spans_of(const fattn_cp *cp, int r, fattni_cp_span out[FATTNI_CP_CHUNKS]) {
    fattni_cp_span chunks[FATTNI_CP_CHUNKS];
    const int n = fattni_cp_chunks(cp, r, chunks);
    int count = 0;
    for (int i = 0; i < n; ++i) {
        if (chunks[i].begin == chunks[i].end) continue;
        if (count > 0 && out[count - 1].end == chunks[i].begin)
            out[count - 1].end = chunks[i].end;
        else
            out[count++] = chunks[i];
    }
    return count;
}

/* Rows of rank r: between `rows`, as they lie on a rank, and `whole`. */
static void list_rows(fattn_cp *cp, int r, const fattn_tensor *rows, const fattn_tensor *whole, bool to_whole) {
    fattni_cp_span spans[FATTNI_CP_CHUNKS];
    const int n = spans_of(cp, r, spans);
    for (int i = 0; i < n; ++i) {
        const fattni_cp_span *const k = &spans[i];
        const fattn_tensor a = fattn_tensor_slice(rows, 2, k->at, k->at + k->end - k->begin);
        const fattn_tensor b = fattn_tensor_slice(whole, 2, k->begin, k->end);
        list(cp, to_whole ? &b : &a, to_whole ? &a : &b);
    }
}

static fattn_status copy_list(fattn_cp *cp) {
    const int n = cp->n_pairs;
    cp->n_pairs = 0;
    return n ? cp->ctx->ops->copy_pairs(cp->ctx, cp->pairs, n) : FATTN_OK;
}

/* ---- heads and messages of a move ---- */

/* Heads of tensor i for each of the keys' heads. */
static int64_t group_of(const fattni_cp_move *m, int i) { return m->local[i].shape[1] / m->c->Hkv; }
static int64_t count_of(const fattni_cp_move *m, int i) {
    return m->by_heads ? m->heads * group_of(m, i) : m->local[i].shape[1];
}
/* The first one of rank r in `local`, and in `whole`. */
static int64_t local_head(const fattni_cp_move *m, int i, int r) {
    return m->by_heads ? (r * (m->c->Hkv / m->c->cp->comm->size) + m->head) * group_of(m, i) : 0;
}
static int64_t whole_head(const fattni_cp_move *m, int i) { return m->by_heads ? m->head * group_of(m, i) : 0; }

static fattn_tensor local_part(const fattni_cp_move *m, int i, int r) {
    return part_of(&m->local[i], local_head(m, i, r), count_of(m, i), 0, m->c->rows);
}
static fattn_tensor whole_part(const fattni_cp_move *m, int i) {
    return part_of(&m->whole[i], whole_head(m, i), count_of(m, i), 0, m->c->cp->N);
}

/* Tensor i of a message of so many rows that begins at `base`. length, which may be NULL: of the tensors up to it. */
static fattn_tensor message_part(const fattni_cp_move *m, int i, int64_t rows, void *base, size_t *length) {
    size_t offset = 0;
    fattn_tensor t = {0};
    for (int k = 0; k <= i; ++k) {
        const fattn_tensor *const x = &m->whole[k];
        const int64_t shape[4] = {x->shape[0], count_of(m, k), rows, x->shape[3]};
        t = fattni_cp_view(m->c->cp, base ? (char *)base + offset : NULL, (fattn_dtype)x->dtype, 4, shape);
        offset += (size_t)fattni_round_up((int64_t)fattni_cp_bytes(&t), FATTNI_ALIGN);
    }
    if (length) *length = offset;
    return t;
}

static size_t length_of(const fattni_cp_move *m, int64_t rows) {
    size_t length;
    message_part(m, m->n - 1, rows, NULL, &length);
    return length;
}

static fattn_status open_buffers(fattni_cp_move *m, size_t send, size_t receive, char **sent) {
    void *p;
    FATTNI_TRY(fattni_cp_room(m->c->cp, FATTNI_CP_SEND + m->slot, send, &p));
    *sent = p;
    FATTNI_TRY(fattni_cp_room(m->c->cp, FATTNI_CP_RECEIVE + m->slot, receive, &p));
    m->received = p;
    return FATTN_OK;
}

/* Copies what is in the list, then starts the first `count` messages, or parts, each way. */
static fattn_status start(fattni_cp_move *m, int count) {
    fattn_cp *const cp = m->c->cp;
    const int size = cp->comm->size;
    m->request = NULL;
    cp->n_tensors = 0;
    FATTNI_TRY(copy_list(cp));
    if (count == 0) return FATTN_OK;
    if (cp->comm->parts)
        return fattni_comm_start_parts(cp->comm, cp->parts, count, cp->parts + size, count, &m->request);
    return fattni_comm_start(cp->comm, cp->messages, count, cp->messages + size, count, &m->request);
}

static fattn_status finish(fattni_cp_move *m) {
    return m->request ? fattni_comm_finish(m->c->cp->comm, m->request) : FATTN_OK;
}

/* ---- parts of a move ---- */

/* Begins the parts with a rank, as number n of `of`. */
static fattni_parts *open_parts(fattn_cp *cp, fattni_parts *of, int n, int peer) {
    of[n] = (fattni_parts){.t = cp->tensors + cp->n_tensors, .peer = peer};
    return &of[n];
}

static void add_part(fattn_cp *cp, fattni_parts *p, const fattn_tensor *t) {
    if (fattn_tensor_numel(t) == 0) return;
    cp->tensors[cp->n_tensors++] = *t;
    p->n += 1;
}

/* Rows of rank r, as they lie there or in the whole. */
static void add_rows(fattn_cp *cp, fattni_parts *p, int r, const fattn_tensor *t, bool in_whole) {
    fattni_cp_span spans[FATTNI_CP_CHUNKS];
    const int n = spans_of(cp, r, spans);
    for (int i = 0; i < n; ++i) {
        const int64_t begin = in_whole ? spans[i].begin : spans[i].at;
        const fattn_tensor part = fattn_tensor_slice(t, 2, begin, begin + spans[i].end - spans[i].begin);
        add_part(cp, p, &part);
    }
}

/* The rows of each head are one run, and no two heads share any. */
static bool in_runs(const fattni_cp_move *m) {
    for (int i = 0; i < m->n; ++i) {
        const fattn_tensor *const t = &m->local[i];
        const int64_t run = t->shape[2] * t->shape[3];
        const bool columns = t->shape[3] == 1 || t->stride[3] == 1;
        const bool rows = t->shape[2] == 1 || t->stride[2] == t->shape[3];
        const bool heads = t->shape[1] == 1 || t->stride[1] >= run, batch = t->shape[0] == 1 || t->stride[0] >= run;
        if (fattn_tensor_numel(t) > 0 && !(columns && rows && heads && batch)) return false;
    }
    return true;
}

/* ---- rows to whole sequences ---- */

fattn_status fattni_cp_own_to_whole(fattni_cp_move *m) {
    fattn_cp *const cp = m->c->cp;
    for (int i = 0; i < m->n; ++i) {
        const fattn_tensor own = local_part(m, i, cp->comm->rank), whole = whole_part(m, i);
        list_rows(cp, cp->comm->rank, &own, &whole, true);
    }
    return copy_list(cp);
}

/* Lists the copies to the message to rank r that begins at `base`. */
static void list_message(fattni_cp_move *m, int r, char *base) {
    for (int i = 0; i < m->n; ++i) {
        const fattn_tensor to = message_part(m, i, m->c->rows, base, NULL), from = local_part(m, i, r);
        list(m->c->cp, &to, &from);
    }
}

static fattn_status start_parts_to_whole(fattni_cp_move *m) {
    const fattni_cp_call *const c = m->c;
    fattn_cp *const cp = c->cp;
    const int size = cp->comm->size, me = cp->comm->rank;
    const bool direct = in_runs(m);
    const size_t length = length_of(m, c->rows);
    char *sent;
    FATTNI_TRY(open_buffers(m, direct ? 0 : length * (size_t)(m->by_heads ? size - 1 : 1), 0, &sent));
    m->unpacks = false;
    int count = 0;
    for (int r = 0; r < size; ++r) {
        if (r == me) continue;
        char *const base = direct ? NULL : m->by_heads ? sent + (size_t)count * length : sent;
        if (!direct && (m->by_heads || count == 0)) list_message(m, r, base);
        fattni_parts *const out = open_parts(cp, cp->parts, count, r);
        for (int i = 0; i < m->n; ++i) {
            const fattn_tensor from = direct ? local_part(m, i, r) : message_part(m, i, c->rows, base, NULL);
            add_rows(cp, out, me, &from, false);
        }
        fattni_parts *const in = open_parts(cp, cp->parts + size, count, r);
        in->exposed = m->exposed;
        for (int i = 0; i < m->n; ++i) {
            const fattn_tensor to = whole_part(m, i);
            add_rows(cp, in, r, &to, true);
        }
        count += 1;
    }
    return start(m, count);
}

fattn_status fattni_cp_start_to_whole(fattni_cp_move *m) {
    const fattni_cp_call *const c = m->c;
    fattn_cp *const cp = c->cp;
    const int size = cp->comm->size, me = cp->comm->rank;
    if (cp->comm->parts) return start_parts_to_whole(m);
    const size_t length = length_of(m, c->rows);
    size_t total = 0;
    for (int r = 0; r < size; ++r) total += r == me ? 0 : length_of(m, fattni_cp_rows_of(cp, r));
    char *sent;
    FATTNI_TRY(open_buffers(m, length * (size_t)(m->by_heads ? size - 1 : 1), total, &sent));
    m->unpacks = true;
    int count = 0;
    size_t at = 0;
    for (int r = 0; r < size; ++r) {
        if (r == me) continue;
        char *const base = m->by_heads ? sent + (size_t)count * length : sent;
        if (m->by_heads || count == 0) list_message(m, r, base);
        const size_t expected = length_of(m, fattni_cp_rows_of(cp, r));
        cp->messages[count] = (fattn_message){.data = base, .bytes = length, .peer = r};
        cp->messages[size + count] = (fattn_message){.data = m->received + at, .bytes = expected, .peer = r};
        at += expected;
        count += 1;
    }
    return start(m, count);
}

fattn_status fattni_cp_receive_whole(fattni_cp_move *m) {
    return m->request ? fattni_comm_receive(m->c->cp->comm, m->request, true) : FATTN_OK;
}

fattn_status fattni_cp_finish_to_whole(fattni_cp_move *m) {
    fattn_cp *const cp = m->c->cp;
    size_t at = 0;
    FATTNI_TRY(finish(m));
    for (int r = 0; r < cp->comm->size; ++r) {
        const int64_t rows = fattni_cp_rows_of(cp, r);
        if (r == cp->comm->rank || !m->unpacks) continue;
        for (int i = 0; i < m->n; ++i) {
            const fattn_tensor come = message_part(m, i, rows, m->received + at, NULL), whole = whole_part(m, i);
            list_rows(cp, r, &come, &whole, true);
        }
        at += length_of(m, rows);
    }
    return copy_list(cp);
}

fattn_status fattni_cp_to_whole(const fattni_cp_call *c, const fattn_tensor *local, int n, const fattn_tensor *whole) {
    fattni_cp_move m = {.c = c, .local = local, .whole = whole, .n = n, .exposed = true};
    FATTNI_TRY(fattni_cp_start_to_whole(&m));
    FATTNI_TRY(fattni_cp_own_to_whole(&m));
    return fattni_cp_finish_to_whole(&m);
}

/* ---- whole sequences to rows ---- */

fattn_status fattni_cp_own_rows(const fattni_cp_call *c, const fattn_tensor *whole, const fattn_tensor *local) {
    list_rows(c->cp, c->cp->comm->rank, local, whole, false);
    return copy_list(c->cp);
}

/* What comes from rank r, in m->received. */
static char *received_from(const fattni_cp_move *m, int r) {
    return m->received + (size_t)r * length_of(m, m->c->rows);
}

static fattn_status start_parts_to_rows(fattni_cp_move *m) {
    const fattni_cp_call *const c = m->c;
    fattn_cp *const cp = c->cp;
    const int size = cp->comm->size, me = cp->comm->rank;
    char *unused;
    FATTNI_TRY(open_buffers(m, 0, m->unpacks ? length_of(m, c->rows) * (size_t)size : 0, &unused));
    int count = 0;
    for (int r = 0; r < size; ++r) {
        if (r == me) continue;
        fattni_parts *const out = open_parts(cp, cp->parts, count, r);
        for (int i = 0; i < m->n; ++i) {
            const fattn_tensor from = whole_part(m, i);
            add_rows(cp, out, r, &from, true);
        }
        fattni_parts *const in = open_parts(cp, cp->parts + size, count, r);
        in->exposed = m->exposed;
        for (int i = 0; i < m->n; ++i) {
            const fattn_tensor to =
                m->unpacks ? message_part(m, i, c->rows, received_from(m, r), NULL) : local_part(m, i, r);
            add_rows(cp, in, me, &to, false);
        }
        count += 1;
    }
    return start(m, count);
}

/* Starts to send every rank its rows. */
static fattn_status scatter(fattni_cp_move *m) {
    const fattni_cp_call *const c = m->c;
    fattn_cp *const cp = c->cp;
    const int size = cp->comm->size, me = cp->comm->rank;
    if (cp->comm->parts) return start_parts_to_rows(m);
    const size_t length = length_of(m, c->rows);
    size_t total = 0;
    for (int r = 0; r < size; ++r) total += r == me ? 0 : length_of(m, fattni_cp_rows_of(cp, r));
    char *sent;
    FATTNI_TRY(open_buffers(m, total, length * (size_t)size, &sent));
    int count = 0;
    size_t at = 0;
    for (int r = 0; r < size; ++r) {
        const int64_t rows = fattni_cp_rows_of(cp, r);
        char *const base = sent + at;
        if (r == me) continue;
        for (int i = 0; i < m->n; ++i) {
            const fattn_tensor whole = whole_part(m, i), to = message_part(m, i, rows, base, NULL);
            list_rows(cp, r, &to, &whole, false);
        }
        const size_t bytes = length_of(m, rows);
        cp->messages[count] = (fattn_message){.data = base, .bytes = bytes, .peer = r};
        cp->messages[size + count] = (fattn_message){.data = received_from(m, r), .bytes = length, .peer = r};
        at += bytes;
        count += 1;
    }
    return start(m, count);
}

fattn_status fattni_cp_start_to_rows(fattni_cp_move *m) {
    fattn_cp *const cp = m->c->cp;
    m->unpacks = !cp->comm->parts || !in_runs(m);
    return scatter(m);
}

fattn_status fattni_cp_own_to_rows(fattni_cp_move *m) {
    fattn_cp *const cp = m->c->cp;
    for (int i = 0; i < m->n; ++i) {
        const fattn_tensor whole = whole_part(m, i), own = local_part(m, i, cp->comm->rank);
        list_rows(cp, cp->comm->rank, &own, &whole, false);
    }
    return copy_list(cp);
}

static fattn_status unpack_rows(fattni_cp_move *m) {
    fattn_cp *const cp = m->c->cp;
    for (int r = 0; r < cp->comm->size; ++r)
        for (int i = 0; i < m->n && m->unpacks && r != cp->comm->rank; ++i) {
            const fattn_tensor from = message_part(m, i, m->c->rows, received_from(m, r), NULL);
            const fattn_tensor to = local_part(m, i, r);
            list(cp, &to, &from);
        }
    return copy_list(cp);
}

fattn_status fattni_cp_finish_to_rows(fattni_cp_move *m) {
    FATTNI_TRY(finish(m));
    return unpack_rows(m);
}

fattn_status fattni_cp_finish_all(fattni_cp_move *to_whole, int n_to_whole, fattni_cp_move *to_rows, int n_to_rows) {
    void *requests[FATTNI_CP_MOVES];
    int n = 0;
    for (int i = 0; i < n_to_whole + n_to_rows; ++i) {
        const fattni_cp_move *const m = i < n_to_whole ? &to_whole[i] : &to_rows[i - n_to_whole];
        if (m->request) requests[n++] = m->request;
    }
    if (n) FATTNI_TRY(fattni_comm_finish_parts(to_whole[0].c->cp->comm, requests, n));
    for (int i = 0; i < n_to_rows; ++i) FATTNI_TRY(unpack_rows(&to_rows[i]));
    return FATTN_OK;
}

fattn_status fattni_cp_sum_rows(const fattni_cp_call *c, const fattn_tensor *whole, int n, const fattn_tensor *local,
                                const bool *add) {
    const int size = c->cp->comm->size, me = c->cp->comm->rank;
    fattni_cp_move m = {.c = c, .local = local, .whole = whole, .n = n, .exposed = true, .unpacks = true};
    FATTNI_TRY(scatter(&m));
    for (int i = 0; i < n; ++i) {
        const fattn_tensor own = message_part(&m, i, c->rows, received_from(&m, me), NULL);
        list_rows(c->cp, me, &own, &whole[i], false);
    }
    FATTNI_TRY(copy_list(c->cp));
    FATTNI_TRY(finish(&m));
    for (int i = 0; i < n; ++i) {
        for (int step = 1; step < size; step *= 2)
            for (int r = 0; r + step < size; r += 2 * step) {
                const fattn_tensor a = message_part(&m, i, c->rows, received_from(&m, r), NULL);
                const fattn_tensor b = message_part(&m, i, c->rows, received_from(&m, r + step), NULL);
                FATTNI_TRY(fattn_tensor_add(c->cp->ctx, &a, &b));
            }
        const fattn_tensor sum = message_part(&m, i, c->rows, m.received, NULL);
        FATTNI_TRY(fattni_cp_store(c->cp, &local[i], &sum, add[i]));
    }
    return FATTN_OK;
}

/* ---- memory ---- */

fattn_tensor fattni_cp_rows_4d(const fattn_tensor *t) {
    fattn_tensor x = *t;
    if (t->ndim == 3) x.ndim = 4, x.shape[3] = 1, x.stride[3] = 1;
    return x;
}

size_t fattni_cp_lay_out(fattn_tensor *whole, int n, void *memory) {
    size_t total = 0;
    for (int i = 0; i < n; ++i) {
        const size_t bytes = fattni_cp_bytes(&whole[i]);
        whole[i].data = bytes && memory ? (char *)memory + total : NULL;
        total += (size_t)fattni_round_up((int64_t)bytes, FATTNI_ALIGN);
    }
    return total;
}

fattn_status fattni_cp_wholes(const fattni_cp_call *c, fattn_tensor *whole, int n) {
    void *p;
    FATTNI_TRY(fattni_cp_room(c->cp, FATTNI_CP_WHOLE, fattni_cp_lay_out(whole, n, NULL), &p));
    fattni_cp_lay_out(whole, n, p);
    return FATTN_OK;
}
