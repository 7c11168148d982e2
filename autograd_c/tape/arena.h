/* A bump allocator whose chunks are kept from step to step. */
#ifndef FATTNI_AUTOGRAD_TAPE_ARENA_H
#define FATTNI_AUTOGRAD_TAPE_ARENA_H

#include "core/base/internal.h"

typedef struct fattni_chunk {
    char *p;
    size_t bytes, used;
} fattni_chunk;

/* Initialise with {.ctx, .align, .least}. */
typedef struct fattni_arena {
    fattn_ctx *ctx;
    size_t align; /* of each block, a power of two up to FATTNI_ALIGN */
    size_t least; /* bytes of the smallest chunk */
    bool on_host; /* for records: host memory, also when the context is on a GPU */
    fattni_chunk *chunks;
    int count, capacity;
    size_t used; /* bytes handed out since the last reset, padding included */
} fattni_arena;

/* Contents undefined; valid until reset, also while the arena grows. 0 bytes give NULL. */
fattn_status fattni_arena_take(fattni_arena *a, size_t bytes, void **out);
/* Frees all blocks. Several chunks are replaced by one that is just large enough: after that, the same
   requests do not allocate. */
void fattni_arena_reset(fattni_arena *a);
/* Returns all memory; the arena can be used again. */
void fattni_arena_free(fattni_arena *a);

#endif
