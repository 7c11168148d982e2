#define _POSIX_C_SOURCE 200809L /* nanosleep */

#include "comm_checks.h"

#include "core/comm/comm.h" /* exchanges */

#include <math.h>
#include <string.h>
#include <time.h>

enum { MOST_RANKS = 16, MOST_ELEMENTS = 50001, MOST_OPEN = 8 };

#define TRY(expression)                                                                                                \
    do {                                                                                                               \
        const fattn_status try_status = (expression);                                                                  \
        if (try_status) return try_status;                                                                             \
    } while (0)
#define CHECK(condition)                                                                                               \
    do {                                                                                                               \
        if (!(condition)) return fattn_ctx_fail(c->ctx, FATTN_E_MISMATCH, "line %d: %s", __LINE__, #condition);        \
    } while (0)

/* ---- tensors on the rank's device; the runner frees them ---- */

static fattn_status new_tensor(rank_call *c, fattn_dtype dtype, int64_t n, fattn_tensor *out) {
    *out = (fattn_tensor){0};
    CHECK(c->n_tensors < RANK_TENSORS);
    TRY(fattn_tensor_alloc(c->ctx, dtype, 1, &n, &c->tensors[c->n_tensors]));
    *out = c->tensors[c->n_tensors++];
    return FATTN_OK;
}

void free_rank_tensors(rank_call *c) {
    while (c->n_tensors > 0) fattn_tensor_free(c->ctx, &c->tensors[--c->n_tensors]);
}

static fattn_tensor part_of(const fattn_tensor *t, int64_t begin, int64_t n) {
    char *const p = (char *)t->data + (size_t)begin * fattn_dtype_size((fattn_dtype)t->dtype);
    return fattn_tensor_view(n > 0 ? p : NULL, (fattn_dtype)t->dtype, (fattn_device)t->device, t->device_id, 1, &n);
}

static fattn_tensor on_host(const void *p, fattn_dtype dtype, int64_t n) {
    void *data;
    memcpy(&data, &p, sizeof data);
    return fattn_tensor_view(n > 0 ? data : NULL, dtype, FATTN_CPU, 0, 1, &n);
}

static fattn_status put(rank_call *c, const fattn_tensor *to, const void *from) {
    const fattn_tensor t = on_host(from, (fattn_dtype)to->dtype, to->shape[0]);
    return fattn_tensor_copy(c->ctx, to, &t);
}

static fattn_status get(rank_call *c, void *to, const fattn_tensor *from) {
    const fattn_tensor t = on_host(to, (fattn_dtype)from->dtype, from->shape[0]);
    return fattn_tensor_copy(c->ctx, &t, from);
}

/* A number that says where it comes from. */
static float number(int rank, int64_t i) { return (float)(rank * 10000 + i % 5000); }

static fattn_status put_numbers(rank_call *c, const fattn_tensor *to) {
    float x[MOST_ELEMENTS];
    for (int64_t i = 0; i < to->shape[0]; ++i) x[i] = number(c->rank, i);
    return put(c, to, x);
}

static fattn_status expect_numbers(rank_call *c, const fattn_tensor *t, int rank) {
    float x[MOST_ELEMENTS];
    TRY(get(c, x, t));
    for (int64_t i = 0; i < t->shape[0]; ++i) CHECK(x[i] == number(rank, i));
    return FATTN_OK;
}

/* ---- collectives ---- */

fattn_status check_ring(rank_call *c) {
    static const int64_t lengths[] = {1, 37, MOST_ELEMENTS}; /* short and long messages take different ways */
    fattn_tensor a, b;
    TRY(new_tensor(c, FATTN_F32, MOST_ELEMENTS, &a));
    TRY(new_tensor(c, FATTN_F32, MOST_ELEMENTS, &b));
    for (size_t l = 0; l < sizeof lengths / sizeof *lengths; ++l) {
        const fattn_tensor first = part_of(&a, 0, lengths[l]), second = part_of(&b, 0, lengths[l]);
        TRY(put_numbers(c, &first));
        for (int hop = 1; hop <= 20; ++hop) { /* more than exchanges can be open */
            const fattn_tensor *const from = hop % 2 ? &first : &second, *const to = hop % 2 ? &second : &first;
            const int next = (c->rank + 1) % c->size, last = (c->rank + c->size - 1) % c->size;
            TRY(fattn_comm_send_receive(c->comm, from, next, to, last));
            TRY(expect_numbers(c, to, ((c->rank - hop) % c->size + c->size) % c->size));
        }
    }
    return FATTN_OK;
}

/* Rank 0 sends to each in turn, who only receive. */
fattn_status check_one_way(rank_call *c) {
    fattn_tensor t;
    TRY(new_tensor(c, FATTN_F32, 3, &t));
    TRY(put_numbers(c, &t));
    for (int r = 1; r < c->size; ++r) {
        if (c->rank == 0) TRY(fattn_comm_send_receive(c->comm, &t, r, NULL, -5));
        if (c->rank != r) continue;
        TRY(fattn_comm_send_receive(c->comm, NULL, 99, &t, 0));
        TRY(expect_numbers(c, &t, 0));
    }
    return FATTN_OK;
}

fattn_status check_all_gather(rank_call *c) {
    int32_t in[5], out[5 * MOST_RANKS];
    fattn_tensor a, b;
    TRY(new_tensor(c, FATTN_I32, 5, &a));
    TRY(new_tensor(c, FATTN_I32, 5 * c->size, &b));
    for (int i = 0; i < 5; ++i) in[i] = 100 * c->rank + i;
    TRY(put(c, &a, in));
    TRY(fattn_comm_all_gather(c->comm, &a, &b));
    TRY(get(c, out, &b));
    for (int i = 0; i < 5 * c->size; ++i) CHECK(out[i] == 100 * (i / 5) + i % 5);
    memset(out, 0, sizeof out);
    memcpy(out + 5 * c->rank, in, sizeof in);
    TRY(put(c, &b, out));
    const fattn_tensor own = part_of(&b, 5 * c->rank, 5); /* at its own place */
    TRY(fattn_comm_all_gather(c->comm, &own, &b));
    TRY(get(c, out, &b));
    for (int i = 0; i < 5 * c->size; ++i) CHECK(out[i] == 100 * (i / 5) + i % 5);
    const fattn_tensor nothing = part_of(&a, 0, 0);
    TRY(fattn_comm_all_gather(c->comm, &nothing, &nothing));
    return fattn_comm_barrier(c->comm);
}

fattn_status check_all_to_all(rank_call *c) {
    uint8_t in[3 * MOST_RANKS], out[3 * MOST_RANKS];
    fattn_tensor a, b;
    TRY(new_tensor(c, FATTN_U8, 3 * c->size, &a));
    TRY(new_tensor(c, FATTN_U8, 3 * c->size, &b));
    for (int i = 0; i < 3 * c->size; ++i) in[i] = (uint8_t)(16 * c->rank + i / 3);
    TRY(put(c, &a, in));
    const int64_t shape[2] = {c->size, 3};
    const fattn_tensor from = fattn_tensor_view(a.data, FATTN_U8, (fattn_device)a.device, a.device_id, 2, shape);
    const fattn_tensor to = fattn_tensor_view(b.data, FATTN_U8, (fattn_device)b.device, b.device_id, 2, shape);
    TRY(fattn_comm_all_to_all(c->comm, &from, &to));
    TRY(get(c, out, &b));
    for (int i = 0; i < 3 * c->size; ++i) CHECK(out[i] == (uint8_t)(16 * (i / 3) + c->rank));
    return FATTN_OK;
}

fattn_status check_broadcast(rank_call *c) {
    fattn_tensor t;
    TRY(new_tensor(c, FATTN_F32, MOST_ELEMENTS, &t));
    for (int root = 0; root < c->size; ++root) {
        TRY(put_numbers(c, &t));
        TRY(fattn_comm_broadcast(c->comm, &t, root));
        TRY(expect_numbers(c, &t, root));
    }
    return FATTN_OK;
}

/* The sum in the order that the header gives, rounded after each addition to F32. */
static float sum_of(const float *x, int n) {
    float all[MOST_RANKS];
    memcpy(all, x, (size_t)n * sizeof *x);
    for (int step = 1; step < n; step *= 2)
        for (int r = 0; r + step < n; r += 2 * step) all[r] += all[r + step];
    return all[0];
}

/* Numbers whose sum depends on the order. */
static float uneven(int rank, int64_t i) { return (float)sin((double)(rank * 7919 + i)) * (float)pow(10.0, rank % 5); }

static fattn_status sums_of(rank_call *c, const fattn_tensor *x, const fattn_tensor *own, int64_t n, int root) {
    const int64_t part = (n + c->size - 1) / c->size;
    const int64_t begin = part * c->rank < n ? part * c->rank : n, end = begin + part < n ? begin + part : n;
    float want[1000], mine[1000], got[1000];
    for (int64_t i = 0; i < n; ++i) {
        float all[MOST_RANKS];
        for (int r = 0; r < c->size; ++r) all[r] = uneven(r, i);
        want[i] = sum_of(all, c->size);
        mine[i] = uneven(c->rank, i);
    }
    const fattn_tensor t = part_of(x, 0, n), o = part_of(own, 0, end - begin);
    TRY(put(c, &t, mine));
    TRY(fattn_comm_reduce_scatter(c->comm, &t, &o));
    TRY(get(c, got, &o));
    CHECK(memcmp(got, want + begin, (size_t)(end - begin) * sizeof *got) == 0);
    TRY(get(c, got, &t));
    CHECK(memcmp(got, mine, (size_t)n * sizeof *got) == 0);
    TRY(fattn_comm_reduce(c->comm, &t, root));
    TRY(get(c, got, &t));
    CHECK(memcmp(got, c->rank == root ? want : mine, (size_t)n * sizeof *got) == 0);
    TRY(put(c, &t, mine));
    TRY(fattn_comm_all_reduce(c->comm, &t));
    TRY(get(c, got, &t));
    CHECK(memcmp(got, want, (size_t)n * sizeof *got) == 0);
    return FATTN_OK;
}

fattn_status check_sums(rank_call *c) {
    static const int64_t lengths[] = {0, 1, 2, 3, 15, 16, 17, 1000};
    fattn_tensor x, own;
    TRY(new_tensor(c, FATTN_F32, 1000, &x));
    TRY(new_tensor(c, FATTN_F32, 1000, &own));
    for (size_t l = 0; l < sizeof lengths / sizeof *lengths; ++l)
        TRY(sums_of(c, &x, &own, lengths[l], (int)(l % (size_t)c->size)));
    return FATTN_OK;
}

/* x = these numbers, rounded to x's 16 bits; and back. */
static fattn_status narrow(rank_call *c, const fattn_tensor *x, const fattn_tensor *wide, const float *from) {
    TRY(put(c, wide, from));
    return fattn_tensor_copy(c->ctx, x, wide);
}
static fattn_status widen(rank_call *c, float *to, const fattn_tensor *wide, const fattn_tensor *x) {
    TRY(fattn_tensor_copy(c->ctx, wide, x));
    return get(c, to, wide);
}

/* 1 and many quarters of its last bit: added in 16 bits they would vanish. */
fattn_status check_narrow_sums(rank_call *c) {
    for (int kind = 0; kind < 2; ++kind) {
        const double quarter_bit = kind ? 0x1p-9 : 0x1p-12;
        float x[33];
        fattn_tensor t, w;
        TRY(new_tensor(c, kind ? FATTN_BF16 : FATTN_F16, 33, &t));
        TRY(new_tensor(c, FATTN_F32, 33, &w));
        for (int i = 0; i < 33; ++i) x[i] = c->rank == 0 ? 1.0f : (float)quarter_bit;
        TRY(narrow(c, &t, &w, x));
        TRY(fattn_comm_all_reduce(c->comm, &t));
        TRY(widen(c, x, &w, &t));
        const double want = 1 + quarter_bit * (c->size - 1), unit = 4 * quarter_bit; /* the spacing above 1 */
        for (int i = 0; i < 33; ++i) CHECK(fabs((double)x[i] - want) <= unit / 2);
        const int root = c->size - 1;
        for (int i = 0; i < 33; ++i) x[i] = (float)(c->rank + i);
        TRY(narrow(c, &t, &w, x));
        TRY(fattn_comm_reduce(c->comm, &t, root));
        TRY(widen(c, x, &w, &t));
        const int total = c->size * (c->size - 1) / 2;
        for (int i = 0; i < 8; ++i) /* exact: below 256 */
            CHECK(x[i] == (float)(c->rank == root ? total + i * c->size : c->rank + i));
    }
    return FATTN_OK;
}

static fattn_status agree(rank_call *c, int odd) {
    static const char *const names[] = {"batch", "tokens"};
    const int64_t values[2] = {8, c->rank == odd ? 7 : 64};
    return fattn_comm_agree(c->comm, names, values, 2);
}

fattn_status check_agreement(rank_call *c) { return agree(c, -1); }

static fattn_status start_ring(rank_call *c, const fattn_tensor *in, const fattn_tensor *out, int64_t n,
                               void **request) {
    const fattn_message send = {.data = in->data, .bytes = 4 * (size_t)n, .peer = (c->rank + 1) % c->size};
    const fattn_message receive = {
        .data = out->data, .bytes = 4 * (size_t)n, .peer = (c->rank + c->size - 1) % c->size};
    return fattni_comm_start(c->comm, &send, 1, &receive, 1, request);
}

/* Exchanges that are open at once, long and short ones. */
fattn_status check_several_open(rank_call *c) {
    fattn_tensor in, out[MOST_OPEN];
    void *requests[MOST_OPEN];
    TRY(new_tensor(c, FATTN_F32, MOST_ELEMENTS, &in));
    TRY(put_numbers(c, &in));
    for (int n = 0; n < MOST_OPEN; ++n) TRY(new_tensor(c, FATTN_F32, n % 2 ? 5 + n : MOST_ELEMENTS - n, &out[n]));
    for (int round = 0; round < 3; ++round) {
        for (int n = 0; n < MOST_OPEN; ++n) TRY(start_ring(c, &in, &out[n], out[n].shape[0], &requests[n]));
        for (int n = 0; n < MOST_OPEN; ++n) {
            TRY(fattni_comm_finish(c->comm, requests[n]));
            TRY(expect_numbers(c, &out[n], (c->rank + c->size - 1) % c->size));
        }
    }
    return FATTN_OK;
}

/* ---- failures ---- */

static bool is_at_fault(const rank_call *c) { return c->rank == ((const comm_fault *)c->arg)->rank; }
static int64_t elements(const rank_call *c) { return ((const comm_fault *)c->arg)->n; }

fattn_status fails_to_agree(rank_call *c) { return agree(c, ((const comm_fault *)c->arg)->rank); }

fattn_status fails_by_shape(rank_call *c) {
    fattn_tensor all, in, out;
    TRY(new_tensor(c, FATTN_F32, elements(c), &all));
    TRY(new_tensor(c, FATTN_F32, elements(c) * c->size, &out));
    const int64_t n = is_at_fault(c) ? elements(c) / 2 : elements(c);
    in = part_of(&all, 0, n);
    out = part_of(&out, 0, n * c->size);
    for (int i = 0; i < 3; ++i) TRY(fattn_comm_all_gather(c->comm, &in, &out));
    return FATTN_OK;
}

fattn_status fails_by_argument(rank_call *c) {
    fattn_tensor t;
    TRY(new_tensor(c, FATTN_F32, elements(c), &t));
    if (is_at_fault(c)) t.shape[0] /= 2, t.stride[0] = 2;
    TRY(fattn_comm_all_reduce(c->comm, &t));
    return fattn_comm_barrier(c->comm);
}

fattn_status fails_by_overlap(rank_call *c) {
    fattn_tensor t;
    TRY(new_tensor(c, FATTN_F32, 3 * c->size + 3, &t));
    const int64_t shape[2] = {c->size, 3};
    const fattn_tensor in = fattn_tensor_view(t.data, FATTN_F32, (fattn_device)t.device, t.device_id, 2, shape);
    fattn_tensor out = in;
    if (!is_at_fault(c)) TRY(new_tensor(c, FATTN_F32, 3 * c->size, &out));
    return fattn_comm_all_to_all(c->comm, &in, &out);
}

fattn_status fails_by_sending(rank_call *c) {
    fattn_tensor t;
    TRY(new_tensor(c, FATTN_F32, 12, &t));
    TRY(put_numbers(c, &t));
    const fattn_tensor out = part_of(&t, 0, 6), in = part_of(&t, is_at_fault(c) ? 5 : 6, 6);
    TRY(fattn_comm_send_receive(c->comm, &out, (c->rank + 1) % c->size, &in, (c->rank + c->size - 1) % c->size));
    return fattn_comm_barrier(c->comm);
}

fattn_status fails_by_leaving(rank_call *c) {
    fattn_tensor t;
    TRY(new_tensor(c, FATTN_F32, elements(c), &t));
    TRY(put_numbers(c, &t));
    TRY(fattn_comm_all_reduce(c->comm, &t));
    return is_at_fault(c) ? FATTN_OK : fattn_comm_all_reduce(c->comm, &t);
}

fattn_status fails_to_answer(rank_call *c) {
    fattn_tensor t;
    TRY(new_tensor(c, FATTN_F32, elements(c), &t));
    TRY(put_numbers(c, &t));
    const struct timespec pause = {.tv_sec = ((const comm_fault *)c->arg)->sleeps};
    if (is_at_fault(c)) nanosleep(&pause, NULL);
    return fattn_comm_all_reduce(c->comm, &t);
}

/* Each rank waits for the one before it, the one behind the rank at fault half a time limit later than the others. */
fattn_status fails_in_a_chain(rank_call *c) {
    const comm_fault *const f = c->arg;
    const int behind = (c->rank - f->rank + c->size) % c->size;
    const bool late = behind == 1 && c->size > 2;
    const struct timespec pause = {.tv_sec = behind ? 0 : f->sleeps, .tv_nsec = late ? f->sleeps * 200000000L : 0};
    fattn_tensor t;
    TRY(new_tensor(c, FATTN_F32, elements(c), &t));
    TRY(put_numbers(c, &t));
    nanosleep(&pause, NULL);
    if (behind) TRY(fattn_comm_send_receive(c->comm, NULL, 0, &t, (c->rank + c->size - 1) % c->size));
    return behind == c->size - 1 ? FATTN_OK : fattn_comm_send_receive(c->comm, &t, (c->rank + 1) % c->size, NULL, 0);
}

fattn_status fails_by_aborting(rank_call *c) {
    fattn_tensor t;
    TRY(new_tensor(c, FATTN_F32, elements(c), &t));
    TRY(put_numbers(c, &t));
    if (is_at_fault(c)) fattn_comm_abort(c->comm, "the file is missing");
    return fattn_comm_all_reduce(c->comm, &t);
}

fattn_status fails_by_many_open(rank_call *c) {
    fattn_tensor in, out;
    void *request;
    TRY(new_tensor(c, FATTN_F32, elements(c), &in));
    TRY(new_tensor(c, FATTN_F32, elements(c), &out));
    TRY(put_numbers(c, &in));
    for (int n = 0; n <= MOST_OPEN; ++n) TRY(start_ring(c, &in, &out, elements(c), &request));
    return FATTN_OK;
}
