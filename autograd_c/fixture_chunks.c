/* Chunked datasets, decoded here. HDF5 1.10 inflates a chunk to whatever size it has, then reads as
   many bytes as it ought to have: a short one is read past its end, a long one fills the memory.
   Here every step has a bound, and the checksum, when there is one, must hold. */
#include "fixture_internal.h"

#include <string.h>
#include <zlib.h>

enum { MAX_FILTERS = 4, CHECKSUM_BYTES = 4 };

/* Two buffers; each filter moves the chunk from one to the other. */
typedef struct scratch {
    fattn_tensor buffer[2];
    int at;      /* which one holds the chunk */
    size_t size; /* of the chunk as it is now */
} scratch;

static uint8_t *source(const scratch *s) { return s->buffer[s->at].data; }
static uint8_t *target(const scratch *s) { return s->buffer[1 - s->at].data; }
static size_t room(const scratch *s) { return (size_t)s->buffer[0].shape[0]; }

static void moved(scratch *s, size_t size) {
    s->at = 1 - s->at;
    s->size = size;
}

/* Fletcher's checksum over 16-bit big-endian words, the last one padded with 0. */
static uint32_t fletcher32(const uint8_t *p, size_t n) {
    uint32_t a = 0, b = 0;
    for (size_t i = 0; i < n; i += 2) {
        a += (uint32_t)p[i] << 8 | (i + 1 < n ? p[i + 1] : 0u);
        a = (a & 0xffff) + (a >> 16);
        b += a;
        b = (b & 0xffff) + (b >> 16);
    }
    return b << 16 | a;
}

static const char *check_sum(scratch *s) {
    if (s->size < CHECKSUM_BYTES) return "a chunk is too short";
    s->size -= CHECKSUM_BYTES;
    const uint8_t *const at = source(s) + s->size;
    const uint32_t stored =
        (uint32_t)at[0] | (uint32_t)at[1] << 8 | (uint32_t)at[2] << 16 | (uint32_t)at[3] << 24;
    return fletcher32(source(s), s->size) == stored ? NULL : "a chunk's checksum is wrong";
}

static const char *inflate_chunk(scratch *s) {
    uLongf size = room(s);
    if (uncompress(target(s), &size, source(s), s->size) != Z_OK)
        return "a chunk does not inflate to its size";
    moved(s, size);
    return NULL;
}

/* Shuffled: all first bytes, all second bytes, ...; an incomplete last element is left in place. */
static void unshuffle(scratch *s, size_t element) {
    const size_t count = s->size / element, whole = count * element;
    for (size_t byte = 0; byte < element; ++byte)
        for (size_t i = 0; i < count; ++i)
            target(s)[i * element + byte] = source(s)[byte * count + i];
    memcpy(target(s) + whole, source(s) + whole, s->size - whole);
    moved(s, s->size);
}

/* Undoes the filters, last first; bit n of skipped: filter n was not applied to this chunk. */
static const char *decode(const H5Z_filter_t *filters, int count, uint32_t skipped, size_t element,
                          size_t want, scratch *s) {
    for (int n = count - 1; n >= 0; --n) {
        const char *problem = NULL;
        if (skipped >> n & 1) continue;
        if (filters[n] == H5Z_FILTER_FLETCHER32)
            problem = check_sum(s);
        else if (filters[n] == H5Z_FILTER_DEFLATE)
            problem = inflate_chunk(s);
        else
            unshuffle(s, element);
        if (problem) return problem;
    }
    return s->size == want ? NULL : "a chunk does not have its size";
}

/* Copies the part of the chunk at `offset` that lies inside the array. */
static void place(const fattni_chunked *c, const hsize_t *chunk, const hsize_t *offset,
                  const uint8_t *from, uint8_t *to) {
    const int last = c->rank - 1;
    int64_t extent[FATTN_MAX_DIMS], at[FATTN_MAX_DIMS] = {0};
    for (int d = 0; d <= last; ++d) {
        const int64_t inside = c->shape[d] - (int64_t)offset[d];
        extent[d] = inside < (int64_t)chunk[d] ? inside : (int64_t)chunk[d];
    }
    for (int d = 0; d >= 0;) { /* one row of the last dimension a time */
        int64_t source_row = 0, target_row = 0;
        for (d = 0; d < last; ++d) {
            source_row = (source_row + at[d]) * (int64_t)chunk[d + 1];
            target_row = (target_row + (int64_t)offset[d] + at[d]) * c->shape[d + 1];
        }
        memcpy(to + (size_t)(target_row + (int64_t)offset[last]) * c->element,
               from + (size_t)source_row * c->element, (size_t)extent[last] * c->element);
        for (d = last - 1; d >= 0 && ++at[d] == extent[d]; --d)
            at[d] = 0;
    }
}

static const char *read_chunk(const fattni_chunked *c, const hsize_t *offset,
                              const H5Z_filter_t *filters, int count, size_t want, scratch *s) {
    unsigned mask = 0;
    haddr_t address = HADDR_UNDEF;
    hsize_t stored = 0;
    if (H5Dget_chunk_info_by_coord(c->dataset, offset, &mask, &address, &stored) < 0 ||
        address == HADDR_UNDEF || stored == 0)
        return "a chunk is missing";
    if (stored > room(s)) return "a chunk is larger than what it holds";
    uint32_t skipped = 0;
    s->at = 0;
    s->size = (size_t)stored;
    if (H5Dread_chunk(c->dataset, H5P_DEFAULT, offset, &skipped, source(s)) < 0)
        return "a chunk could not be read";
    return decode(filters, count, skipped, c->element, want, s);
}

static fattn_status walk(fattn_fixture *f, const char *path, const fattni_chunked *c,
                         const hsize_t *chunk, const H5Z_filter_t *filters, int count, size_t want,
                         scratch *s, uint8_t *data) {
    hsize_t offset[FATTN_MAX_DIMS] = {0};
    for (int d = 0; d >= 0;) {
        const char *const problem = read_chunk(c, offset, filters, count, want, s);
        if (problem) return fattni_fixture_fail(f, path, problem);
        place(c, chunk, offset, source(s), data);
        for (d = c->rank - 1; d >= 0; --d) {
            offset[d] += chunk[d];
            if ((int64_t)offset[d] < c->shape[d]) break;
            offset[d] = 0;
        }
    }
    return FATTN_OK;
}

fattn_status fattni_fixture_read_chunks(fattn_fixture *f, const char *path, const fattni_chunked *c,
                                        void *data) {
    hsize_t chunk[FATTN_MAX_DIMS];
    H5Z_filter_t filters[MAX_FILTERS];
    const int count = H5Pget_nfilters(c->create_list);
    if (count < 0 || count > MAX_FILTERS)
        return fattni_fixture_fail(f, path, "has too many filters");
    for (int n = 0; n < count; ++n) {
        unsigned flags, config;
        size_t values = 0;
        filters[n] =
            H5Pget_filter2(c->create_list, (unsigned)n, &flags, &values, NULL, 0, NULL, &config);
        if (filters[n] != H5Z_FILTER_SHUFFLE && filters[n] != H5Z_FILTER_DEFLATE &&
            filters[n] != H5Z_FILTER_FLETCHER32)
            return fattni_fixture_fail(f, path, "has a filter that is not read here");
    }
    int64_t want = (int64_t)c->element;
    bool fits = H5Pget_chunk(c->create_list, FATTN_MAX_DIMS, chunk) == c->rank;
    for (int d = 0; d < c->rank && fits; ++d)
        fits = chunk[d] > 0 && chunk[d] <= INT32_MAX &&
               !__builtin_mul_overflow(want, (int64_t)chunk[d], &want);
    if (!fits)
        return fattni_fixture_fail(f, path, "its chunks are too large, or not of its shape");
    if (want > FATTNI_FIXTURE_LIMIT || (!f->sink && want > f->bytes * FATTNI_DEFLATE_RATIO))
        return fattni_fixture_fail(f, path, "its chunks are larger than this file can hold");

    /* deflate adds 5 bytes per 16 KiB and 6 to what it cannot compress; a checksum adds 4. */
    const int64_t capacity = want + want / 1024 + 64;
    scratch s = {0};
    fattn_status status = fattn_tensor_alloc(f->ctx, FATTN_U8, 1, &capacity, &s.buffer[0]);
    if (status == FATTN_OK)
        status = fattn_tensor_alloc(f->ctx, FATTN_U8, 1, &capacity, &s.buffer[1]);
    if (status == FATTN_OK)
        status = walk(f, path, c, chunk, filters, count, (size_t)want, &s, data);
    fattn_tensor_free(f->ctx, &s.buffer[0]);
    fattn_tensor_free(f->ctx, &s.buffer[1]);
    return status;
}
