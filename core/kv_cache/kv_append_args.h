/* What the kernels of fattn_kv_append are told. */
#ifndef FATTNI_CORE_KV_CACHE_KV_APPEND_ARGS_H
#define FATTNI_CORE_KV_CACHE_KV_APPEND_ARGS_H

#include "core/kv_cache/kv_append.h"

enum { FATTNI_KV_THREADS = 256 };

/* A thread moves pieces of 16 bytes, or of one element where rows are not aligned to 16 bytes; of rows that turn, one
   of each half. The pieces of all heads are counted through, those of k first. */
typedef struct fattni_kv_append_args {
    fattni_kv_append job;
    int32_t wide[FATTNI_KV_MOVES];  /* pieces of 16 bytes */
    int32_t each[FATTNI_KV_MOVES];  /* pieces that threads take of a row */
    int32_t until[FATTNI_KV_MOVES]; /* pieces of this move and of those before it */
    int32_t parts;                  /* CTAs that share a row of all heads */
} fattni_kv_append_args;

#endif
