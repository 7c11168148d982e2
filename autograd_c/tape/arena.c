#include "autograd_c/tape/arena.h"

#include <string.h>

enum { FIRST_CAPACITY = 16, CHUNKS_SEEN = 8 };

static fattn_status get(const fattni_arena *a, size_t bytes, void **out) {
    return (a->on_host ? fattni_host_alloc : fattni_alloc)(a->ctx, bytes, out);
}

static void give_back(const fattni_arena *a, void *p, size_t bytes) {
    (a->on_host ? fattni_host_free : fattni_free)(a->ctx, p, bytes);
}

/* A chunk is as large as the block that needs it, not a power of two, so that the first step's peak is not
   larger than needed. */
static fattn_status add_chunk(fattni_arena *a, size_t bytes) {
    if (a->count == a->capacity) {
        const int capacity = a->capacity ? 2 * a->capacity : FIRST_CAPACITY;
        void *chunks;
        FATTNI_TRY(fattni_host_alloc(a->ctx, (size_t)capacity * sizeof *a->chunks, &chunks));
        if (a->count) memcpy(chunks, a->chunks, (size_t)a->count * sizeof *a->chunks);
        fattni_host_free(a->ctx, a->chunks, (size_t)a->capacity * sizeof *a->chunks);
        a->chunks = chunks;
        a->capacity = capacity;
    }
    void *p;
    FATTNI_TRY(get(a, bytes, &p));
    a->chunks[a->count++] = (fattni_chunk){.p = p, .bytes = bytes};
    return FATTN_OK;
}

fattn_status fattni_arena_take(fattni_arena *a, size_t bytes, void **out) {
    *out = NULL;
    if (bytes == 0) return FATTN_OK;
    if (bytes > (size_t)PTRDIFF_MAX - a->align)
        return fattn_ctx_fail(a->ctx, FATTN_E_NOMEM, "no memory for %zu bytes", bytes);
    const size_t padded = (bytes + a->align - 1) & ~(a->align - 1);
    fattni_chunk *fit = NULL;
    for (int i = a->count - 1; i >= 0 && i >= a->count - CHUNKS_SEEN && !fit; --i)
        if (a->chunks[i].bytes - a->chunks[i].used >= padded) fit = &a->chunks[i];
    if (!fit) {
        FATTNI_TRY(add_chunk(a, padded > a->least ? padded : a->least));
        fit = &a->chunks[a->count - 1];
    }
    *out = fit->p + fit->used;
    fit->used += padded;
    a->used += padded;
    return FATTN_OK;
}

static void free_chunks(fattni_arena *a) {
    for (int i = 0; i < a->count; ++i) give_back(a, a->chunks[i].p, a->chunks[i].bytes);
    a->count = 0;
}

void fattni_arena_reset(fattni_arena *a) {
    if (a->count > 1) {
        free_chunks(a);
        /* If there is no memory now, the next take tries again and reports it. */
        (void)!add_chunk(a, a->used);
    }
    if (a->count) a->chunks[0].used = 0;
    a->used = 0;
}

void fattni_arena_free(fattni_arena *a) {
    free_chunks(a);
    fattni_host_free(a->ctx, a->chunks, (size_t)a->capacity * sizeof *a->chunks);
    a->chunks = NULL;
    a->capacity = 0;
    a->used = 0;
}
