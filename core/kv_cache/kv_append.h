/* An append to a cache of keys and values, after validation. */
#ifndef FATTNI_CORE_KV_CACHE_KV_APPEND_H
#define FATTNI_CORE_KV_CACHE_KV_APPEND_H

#include "core/tensor/numeric.h"

#include <stdbool.h>

enum { FATTNI_KV_WIDTH = 256 }; /* of D and Dv, at most */

/* Rows of one tensor, [B,heads,S,width], to their places. */
typedef struct fattni_kv_move {
    void *to;
    const void *from;
    int64_t to_stride[3], from_stride[3]; /* elements: of b or the page, head, row */
    int64_t heads, width;
    int32_t turns;    /* rotated on the way */
    int32_t in_cache; /* to its position there; else to row s */
} fattni_kv_move;

enum { FATTNI_KV_MOVES = 3 }; /* k, v, q; the last one may have no heads */

typedef struct fattni_kv_append {
    fattni_kv_move move[FATTNI_KV_MOVES];
    const int32_t *lengths;    /* [B] */
    const int32_t *new_rows;   /* [B] or NULL */
    int32_t *lengths_after;    /* [B] or NULL */
    const int32_t *page_table; /* [B][room / page] or NULL */
    int64_t lengths_step, new_rows_step, lengths_after_step, table_stride[2];
    int64_t B, S, D, room;
    int64_t page, pages; /* keys of a page and how many there are; without pages room and B */
    double base;         /* of the angles; 0: nothing is rotated */
    int32_t dtype, reserved;
} fattni_kv_append;

/* The index in dimension 0 of the caches of a position below the room; with pages any number may stand there. */
FATTNI_INLINE int64_t fattni_kv_block(const fattni_kv_append *a, int64_t b, int64_t position) {
    const int64_t n = a->page_table ? (uint32_t)position / (uint32_t)a->page : 0; /* both below 2^31 */
    return a->page_table ? a->page_table[b * a->table_stride[0] + n * a->table_stride[1]] : b;
}

#ifndef __CUDACC__
#include "core/base/internal.h"

/* Of fattni_device_ops (core/base/device.h). The CPU's checks the values of lengths and pages before it writes. */
fattn_status fattni_host_kv_append(fattn_ctx *ctx, const fattni_kv_append *a);
fattn_status fattni_cuda_kv_append(fattn_ctx *ctx, const fattni_kv_append *a);
#endif

#endif
