/* fattn_kv_append on the device: some CTAs per row s of a sequence and all its heads. Angles are computed once for the
   row, in double. Loads come first, and what needs their results last: a call for one row is a few latencies long. */
#include "core/kv_cache/kv_append_args.h"

#include "core/device/any_dtype.cuh"
#include "core/device/rotate.cuh"

enum { ROOM = FATTNI_KV_WIDTH / 2 };

/* A row s of sequence b. */
typedef struct place {
    int64_t b, s;
    int64_t length, rows;         /* of the sequence, as given */
    int64_t position, block, row; /* in the caches */
} place;

DEVICE place row_of_block(const fattni_kv_append_args *a) {
    const fattni_kv_append *const job = &a->job;
    const uint32_t S = job->S > 0 ? (uint32_t)job->S : 1, n = blockIdx.x / (uint32_t)a->parts, b = n / S;
    place p;
    p.b = b, p.s = n - b * S;
    p.length = job->lengths[p.b * job->lengths_step];
    p.rows = job->S;
    if (job->new_rows) p.rows = job->new_rows[p.b * job->new_rows_step];
    return p;
}

/* Where it goes, though the block may be none; false: it does not count, or there is no room. One thread of a sequence
   writes lengths_after. */
DEVICE bool find_place(const fattni_kv_append_args *a, place *p) {
    const fattni_kv_append *const job = &a->job;
    const int64_t length = p->length < 0 ? 0 : p->length < job->room ? p->length : job->room;
    int64_t rows = p->rows < 0 ? 0 : p->rows < job->S ? p->rows : job->S;
    rows = rows < job->room - length ? rows : job->room - length;
    if (job->lengths_after && p->s == 0 && blockIdx.x % (uint32_t)a->parts == 0 && threadIdx.x == 0)
        job->lengths_after[p->b * job->lengths_after_step] = (int32_t)(length + rows);
    if (p->s >= rows) return false;
    p->position = length + p->s;
    p->block = fattni_kv_block(job, p->b, p->position);
    p->row = job->page_table ? p->position & (job->page - 1) : p->position;
    return true;
}

#define REAL double
#define FN(name) name##_f64
#define ELEMENT double
#define NAME(name) name##_f64
#define WIDEN(x) (x)
#define NARROW(x) (x)
#include "core/kv_cache/kv_append_cuda.inc"

#define REAL float
#define FN(name) name##_f32
#define ELEMENT float
#define NAME(name) name##_f32
#define WIDEN(x) (x)
#define NARROW(x) (x)
#include "core/kv_cache/kv_append_cuda.inc"

#define REAL float
#define FN(name) name##_f32
#define ELEMENT __half
#define NAME(name) name##_f16
#define WIDEN(x) __half2float(x)
#define NARROW(x) __float2half_rn(x)
#include "core/kv_cache/kv_append_cuda.inc"

#define REAL float
#define FN(name) name##_f32
#define ELEMENT __nv_bfloat16
#define NAME(name) name##_bf16
#define WIDEN(x) __bfloat162float(x)
#define NARROW(x) __float2bfloat16_rn(x)
#include "core/kv_cache/kv_append_cuda.inc"
