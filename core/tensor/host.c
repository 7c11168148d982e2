#include "core/tensor/host.h"

#include "core/base/isa_clones.h"
#include "core/tensor/normal.h"
#include "core/tensor/rows.h"

#include <string.h>

enum { ROWS_PER_TASK = 256 };

typedef struct copy_job {
    const fattn_tensor *dst, *src;
    fattni_rows to, from;
    bool add;
    int isa;
} copy_job;

/* Neighbours between F32 and BF16, without the way through double: its bits. */
static FATTNI_CLONED void widen(void *to, const void *from, int64_t n) {
    for (int64_t i = 0; i < n; ++i) ((float *)to)[i] = fattni_bf16_to_float(((const uint16_t *)from)[i]);
}
static FATTNI_CLONED void narrow(void *to, const void *from, int64_t n) {
    for (int64_t i = 0; i < n; ++i) ((uint16_t *)to)[i] = fattni_float_to_bf16(((const float *)from)[i]);
}
typedef void (*converter)(void *to, const void *from, int64_t n);
FATTNI_CLONES(converter, widen, (void *to, const void *from, int64_t n), (to, from, n))
FATTNI_CLONES(converter, narrow, (void *to, const void *from, int64_t n), (to, from, n))

/* False: other dtypes. */
static bool convert(int isa, void *to, int32_t to_dtype, const void *from, int32_t from_dtype, int64_t n) {
    if (to_dtype == FATTN_F32 && from_dtype == FATTN_BF16)
        widen_by_isa[isa](to, from, n);
    else if (to_dtype == FATTN_BF16 && from_dtype == FATTN_F32)
        narrow_by_isa[isa](to, from, n);
    else
        return false;
    return true;
}

static void copy_rows(void *arg, int64_t task, int thread) {
    (void)thread;
    const copy_job *job = arg;
    const int64_t width = job->to.columns, step_to = job->to.step, step_from = job->from.step;
    const size_t size = fattn_dtype_size((fattn_dtype)job->dst->dtype);
    const int64_t end = fattni_min(job->to.count, (task + 1) * ROWS_PER_TASK);
    for (int64_t row = task * ROWS_PER_TASK; row < end; ++row) {
        const int64_t to = fattni_row(&job->to, row), from = fattni_row(&job->from, row);
        if (job->dst->dtype == job->src->dtype && !job->add) { /* bits, not values: NaN payloads survive */
            const char *in = (const char *)job->src->data + from * (int64_t)size;
            char *out = (char *)job->dst->data + to * (int64_t)size;
            if (step_to == 1 && step_from == 1) {
                memmove(out, in, (size_t)width * size);
                continue;
            }
            for (int64_t i = 0; i < width; ++i)
                memmove(out + i * step_to * (int64_t)size, in + i * step_from * (int64_t)size, size);
            continue;
        }
        const size_t size_from = fattn_dtype_size((fattn_dtype)job->src->dtype);
        if (!job->add && step_to == 1 && step_from == 1 &&
            convert(job->isa, (char *)job->dst->data + to * (int64_t)size, job->dst->dtype,
                    (const char *)job->src->data + from * (int64_t)size_from, job->src->dtype, width))
            continue;
        if (job->add && job->dst->dtype == FATTN_F32 && job->src->dtype == FATTN_F32) {
            float *const d = (float *)job->dst->data + to;
            const float *const x = (const float *)job->src->data + from;
            for (int64_t i = 0; i < width; ++i) d[i * step_to] += x[i * step_from];
            continue;
        }
        for (int64_t i = 0; i < width; ++i) {
            const int64_t at = to + i * step_to;
            const double old = job->add ? fattni_load(job->dst->data, job->dst->dtype, at) : 0;
            const double x = fattni_load(job->src->data, job->src->dtype, from + i * step_from);
            fattni_store(job->dst->data, job->dst->dtype, at, job->add ? old + x : x);
        }
    }
}

static fattn_status run_copy(const fattn_ctx *ctx, const fattn_tensor *dst, const fattn_tensor *src, bool add) {
    copy_job job = {
        .dst = dst, .src = src, .to = fattni_rows_of(dst), .from = fattni_rows_of(src), .add = add, .isa = ctx->isa};
    fattni_parallel(ctx, fattni_ceil_div(job.to.count, ROWS_PER_TASK), copy_rows, &job);
    return FATTN_OK;
}

fattn_status fattni_host_copy(fattn_ctx *ctx, const fattn_tensor *dst, const fattn_tensor *src) {
    return run_copy(ctx, dst, src, false);
}

fattn_status fattni_host_add(fattn_ctx *ctx, const fattn_tensor *dst, const fattn_tensor *src) {
    return run_copy(ctx, dst, src, true);
}

typedef struct normal_job {
    const fattn_tensor *dst;
    fattni_rows to;
    double mean, std;
    fattn_rng rng;
} normal_job;

static void normal_rows(void *arg, int64_t task, int thread) {
    (void)thread;
    const normal_job *job = arg;
    const int64_t width = job->to.columns;
    const int64_t end = fattni_min(job->to.count, (task + 1) * ROWS_PER_TASK);
    for (int64_t row = task * ROWS_PER_TASK; row < end; ++row) {
        const int64_t to = fattni_row(&job->to, row);
        for (int64_t i = 0; i < width; ++i)
            fattni_store(job->dst->data, job->dst->dtype, to + i * job->to.step,
                         job->mean + job->std * fattni_normal_at(&job->rng, row * width + i));
    }
}

fattn_status fattni_host_normal(fattn_ctx *ctx, const fattn_tensor *dst, double mean, double std, fattn_rng rng) {
    normal_job job = {.dst = dst, .to = fattni_rows_of(dst), .mean = mean, .std = std, .rng = rng};
    fattni_parallel(ctx, fattni_ceil_div(job.to.count, ROWS_PER_TASK), normal_rows, &job);
    return FATTN_OK;
}

fattn_status fattni_host_zero_rows(fattn_ctx *ctx, void *p, size_t pitch, size_t width, int64_t rows) {
    (void)ctx;
    for (int64_t row = 0; row < rows && width > 0; ++row) memset((char *)p + (size_t)row * pitch, 0, width);
    return FATTN_OK;
}
