/* fattn_kv_append on the device: one launch. */
#include "core/kv_cache/kv_append_args.h"

#include "core/cuda/launch.h"

extern void fattn_kv_append_f64(fattni_kv_append_args);
extern void fattn_kv_append_f32(fattni_kv_append_args);
extern void fattn_kv_append_f16(fattni_kv_append_args);
extern void fattn_kv_append_bf16(fattni_kv_append_args);
_Static_assert(sizeof(fattni_kv_append_args) <= 4096, "the limit of a kernel's argument");

enum { CTAS_PER_SM = 2 };      /* that few rows are shared among, at most */
enum { MOST_HEADS = 1 << 21 }; /* so that 32 bits count the pieces of a row */
_Static_assert((int64_t)MOST_HEADS *FATTNI_KV_WIDTH *FATTNI_KV_MOVES <= INT32_MAX, "pieces of a row");

/* Whether all rows of a move, and the halves of those that turn, begin and end at multiples of 16 bytes. */
static bool is_wide(const fattni_kv_move *m, int64_t size) {
    const int64_t run = m->turns ? m->width / 2 : m->width;
    bool wide = run * size % 16 == 0 && (uintptr_t)m->to % 16 == 0 && (uintptr_t)m->from % 16 == 0;
    for (int d = 0; d < 3; ++d) wide = wide && m->to_stride[d] * size % 16 == 0 && m->from_stride[d] * size % 16 == 0;
    return wide;
}

/* A row with q in place has nothing to move when nothing turns. */
static bool is_idle(const fattni_kv_move *m) { return m->heads == 0 || (m->to == m->from && !m->turns); }

fattn_status fattni_cuda_kv_append(fattn_ctx *ctx, const fattni_kv_append *job) {
    fattni_kv_append_args a = {.job = *job};
    const int64_t size = (int64_t)fattn_dtype_size((fattn_dtype)job->dtype);
    int64_t pieces = 0;
    for (int n = 0; n < FATTNI_KV_MOVES; ++n) {
        const fattni_kv_move *const m = &job->move[n];
        a.wide[n] = is_wide(m, size);
        a.each[n] = (int32_t)((m->turns ? m->width / 2 : m->width) / (a.wide[n] ? 16 / size : 1));
        if (m->heads > MOST_HEADS)
            return fattn_ctx_fail(ctx, FATTN_E_UNSUPPORTED, "kv_append: %lld heads, a GPU takes up to %d",
                                  (long long)m->heads, MOST_HEADS);
        pieces += is_idle(m) ? 0 : m->heads * a.each[n];
        a.until[n] = (int32_t)pieces;
    }
    const int64_t rows = job->B * fattni_max(job->S, 1); /* without new ones, for the lengths */
    if (rows > INT32_MAX)
        return fattn_ctx_fail(ctx, FATTN_E_UNSUPPORTED, "kv_append: B=%lld with S=%lld: more than 2^31-1 new rows",
                              (long long)job->B, (long long)job->S);
    a.parts = (int32_t)fattni_max(
        1, fattni_min(fattni_ceil_div(pieces, FATTNI_KV_THREADS), fattni_ceil_div(CTAS_PER_SM * ctx->gpu.sms, rows)));
    const int64_t grid = rows * a.parts;
    switch (job->dtype) {
    case FATTN_F64: return FATTNI_START(ctx, fattn_kv_append_f64, grid, FATTNI_KV_THREADS, &a);
    case FATTN_F32: return FATTNI_START(ctx, fattn_kv_append_f32, grid, FATTNI_KV_THREADS, &a);
    case FATTN_F16: return FATTNI_START(ctx, fattn_kv_append_f16, grid, FATTNI_KV_THREADS, &a);
    default: return FATTNI_START(ctx, fattn_kv_append_bf16, grid, FATTNI_KV_THREADS, &a);
    }
}
