/* Tensors of the emulated tests of 16-bit kernels: dense, and their tensor maps. */
#ifndef EMULATED_FIELDS_H
#define EMULATED_FIELDS_H

#include "ptx.h"

#include "core/cuda/sm90_args.h"

#include <random>
#include <vector>

/* [batch][head][row][D] of 16-bit numbers. */
typedef struct field {
    int batches, heads, rows, D;
    std::vector<uint16_t> x;
    size_t at(int b, int h, int i, int d) const {
        return (((size_t)b * (size_t)heads + (size_t)h) * (size_t)rows + (size_t)i) * (size_t)D + (size_t)d;
    }
    const uint16_t *row(int b, int h, int i) const { return x.data() + at(b, h, i, 0); }
} field;
/* What is wanted of rows of n numbers; plain loops over memory, since most of a test's time is here. */
static UNSEEN double dot(const uint16_t *x, const uint16_t *y, int n) {
    double sum = 0;
    for (int d = 0; d < n; ++d) sum += (double)value_of(x[d]) * value_of(y[d]);
    return sum;
}
static UNSEEN void add_row(double *to, double factor, const uint16_t *x, int n) {
    for (int d = 0; d < n; ++d) to[d] += factor * value_of(x[d]);
}

enum { NAN_BITS = 0x7fff, UNTOUCHED = 0x1234 };
static std::mt19937 generator(7);
static inline float normal(void) {
    static std::normal_distribution<float> draw;
    return draw(generator);
}
static inline field random_field(int batches, int heads, int rows, int D) {
    field f = {batches, heads, rows, D, {}};
    f.x.resize(f.at(batches, 0, 0, 0));
    for (uint16_t &x : f.x) x = half_of(pack_half(normal(), 0), 0);
    return f;
}
static inline void spoil_rows(field *f, int batch, int from) {
    for (int h = 0; h < f->heads; ++h)
        for (int i = from; i < f->rows; ++i)
            for (int d = 0; d < f->D; ++d) f->x[f->at(batch, h, i, d)] = NAN_BITS;
}
static inline fattni_view view_of(field *f) {
    const fattni_view v = {f->x.data(), f->batches > 1 ? (int64_t)f->at(1, 0, 0, 0) : 0, (int64_t)f->rows * f->D, f->D,
                           1};
    return v;
}
static inline CUtensorMap map_of(field *f, int box) {
    const int64_t row = 2 * f->D, head = row * f->rows, batch = head * f->heads;
    const plain_map plain = {(const char *)f->x.data(), f->D, f->rows, f->heads, f->batches, row, head, batch, box};
    CUtensorMap map;
    memset(&map, 0, sizeof map);
    memcpy(&map, &plain, sizeof plain);
    return map;
}

#define STAGED_BIAS (K_VARIANT == FATTNI_VARIANT_BIASED || K_VARIANT == FATTNI_VARIANT_DBIAS)
/* The map of a copy of bias [heads][rows][columns] in 16 bits, whose rows are padded to 16 bytes; bias is rounded. */
static inline CUtensorMap bias_map_of(std::vector<float> *bias, std::vector<uint16_t> *copy, int heads, int rows,
                                      int columns, int box, bool masks) {
    const size_t pitch = (size_t)(columns + 7) / 8 * 8;
    copy->assign((size_t)(heads * rows) * pitch, NAN_BITS);
    for (size_t n = 0; n < bias->size(); ++n) {
        const size_t j = n % (size_t)columns % 16; /* two keys of 16 are masked, as far as F16 goes alike */
        if (masks && (j == 5 || j == 9)) (*bias)[n] = j == 5 ? -1e9f : -INFINITY;
        uint16_t *const x = &(*copy)[n / (size_t)columns * pitch + n % (size_t)columns];
        *x = half_of(pack_half((*bias)[n], 0), 0);
        (*bias)[n] = value_of(*x);
    }
    const int64_t row = 2 * (int64_t)pitch, head = row * rows;
    const plain_map plain = {(const char *)copy->data(), columns, rows, heads, 1, row, head, 0, box};
    CUtensorMap map;
    memset(&map, 0, sizeof map);
    memcpy(&map, &plain, sizeof plain);
    return map;
}

/* Lengths of a batch, as packed and as padded calls get them. */
typedef struct lengths {
    std::vector<int32_t> cu_q, cu_k, q, k;
} lengths;
static inline lengths lengths_of(int sequences, const int *q, const int *k) {
    lengths l = {{0}, {0}, {}, {}};
    for (int b = 0; b < sequences; ++b) {
        l.cu_q.push_back(l.cu_q.back() + q[b]), l.q.push_back(q[b]);
        l.cu_k.push_back(l.cu_k.back() + k[b]), l.k.push_back(k[b]);
    }
    return l;
}
static inline void give_lengths(fattni_attention_args *a, lengths *l, int packed, int padded) {
    const fattni_line cu_q = {l->cu_q.data(), 1}, cu_k = {l->cu_k.data(), 1}, q = {l->q.data(), 1},
                      k = {l->k.data(), 1};
    if (packed) a->cu_seqlens_q = cu_q, a->cu_seqlens_k = cu_k;
    if (padded) a->seqlens_q = q, a->seqlens_k = k;
}

typedef struct error {
    double off, size;
} error;
static inline void add(error *e, double got, double want) {
    e->off += (got - want) * (got - want);
    e->size += want * want;
}
static inline double relative(const error *e) { return sqrt(e->off / (e->size > 0 ? e->size : 1)); }

#endif
