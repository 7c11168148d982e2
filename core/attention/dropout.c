#include "core/attention/dropout.h"

#include "core/base/device.h"
#include "core/tensor/philox.h"

enum { PATCH = 16, ROWS_PER_TASK = 4 * PATCH };

/* A rectangle of one plane, in positions of the whole sequence, and where it is stored. */
typedef struct rectangle {
    int64_t i0, i1, j0, j1;
    uint8_t *keep;
    int64_t row, column;
} rectangle;

/* Stores the lanes of one block that fall into the rectangle. */
static void store_block(const rectangle *r, fattni_block block, int64_t i, int64_t j, uint32_t T) {
    static const int64_t across[4] = {0, 1, 8, 9};
    for (int64_t y = i; y <= i + 8; y += 8) {
        if (y < r->i0 || y >= r->i1) continue;
        uint8_t *const line = r->keep + (y - r->i0) * r->row;
        for (int n = 0; n < 4; ++n) {
            const int64_t x = j + across[n];
            if (x < r->j0 || x >= r->j1) continue;
            line[(x - r->j0) * r->column] = (uint8_t)fattni_keeps(fattni_lane16(block, fattni_dropout_lane(y, x)), T);
        }
    }
}

static fattni_block block_of(const fattni_problem *p, uint32_t plane, uint32_t step, int64_t i, int64_t j) {
    return fattni_mask_philox(p->rng.seed, fattni_dropout_counter(p->rng.stream, step, plane, i, j));
}

void fattni_dropout_rows(const fattni_problem *p, int64_t b, int64_t h, int64_t begin, int64_t end, int64_t Sk,
                         uint8_t *keep, int64_t row, int64_t column) {
    const rectangle r = {begin + p->q_pos0, end + p->q_pos0, p->k_pos0, Sk + p->k_pos0, keep, row, column};
    const uint32_t plane = fattni_dropout_plane(p, b, h), step = fattni_dropout_step(p);
    for (int64_t patch = r.i0 / PATCH * PATCH; patch < r.i1; patch += PATCH)
        for (int64_t i = patch; i < patch + 8; ++i) {
            if (i + 8 < r.i0 || i >= r.i1) continue;
            for (int64_t j = r.j0 / PATCH * PATCH; j < r.j1; j += j % 8 == 6 ? 10 : 2)
                store_block(&r, block_of(p, plane, step, i, j), i, j, p->drop_T);
        }
}

typedef struct mask_job {
    const fattni_problem *p;
    uint8_t *keep;
    const int64_t *stride;
    int64_t rows, columns;
    int64_t blocks; /* of rows, per plane */
} mask_job;

static void mask_rows(void *arg, int64_t task, int thread) {
    (void)thread;
    const mask_job *job = arg;
    const fattni_problem *p = job->p;
    const int64_t *const s = job->stride;
    const int64_t block = task % job->blocks, plane = task / job->blocks;
    const int64_t b = plane / p->Hq, h = plane % p->Hq;
    const int64_t begin = block * ROWS_PER_TASK, end = fattni_min(job->rows, begin + ROWS_PER_TASK);
    uint8_t *const at = job->keep + b * s[0] + h * s[1] + begin * s[2];
    fattni_dropout_rows(p, b, h, begin, end, job->columns, at, s[2], s[3]);
}

fattn_status fattni_host_mask(fattn_ctx *ctx, const fattni_problem *p, uint8_t *keep, const int64_t stride[4],
                              int64_t rows, int64_t columns) {
    mask_job job = {.p = p, .keep = keep, .stride = stride, .rows = rows, .columns = columns};
    job.blocks = fattni_ceil_div(rows, ROWS_PER_TASK);
    fattni_parallel(ctx, p->B * p->Hq * job.blocks, mask_rows, &job);
    return FATTN_OK;
}

fattn_status fattn_dropout_mask(fattn_ctx *ctx, const fattn_attention_params *params, const fattn_attention_io *io,
                                const fattn_tensor *keep) {
    fattni_problem p;
    FATTNI_TRY(fattni_problem_init(ctx, params, io, FATTNI_FWD, true, &p));
    FATTNI_TRY(fattni_check_tensor(ctx, "keep", keep));
    if (keep->dtype != FATTN_U8)
        return fattn_ctx_fail(ctx, FATTN_E_DTYPE, "keep: dtype %s, must be u8",
                              fattn_dtype_name((fattn_dtype)keep->dtype));
    const int64_t want[4] = {p.B, p.Hq, p.max_q, p.max_k};
    bool fits = keep->ndim == 4;
    for (int d = 0; d < 4 && fits; ++d) fits = keep->shape[d] == want[d];
    if (!fits) {
        char text[96];
        return fattn_ctx_fail(ctx, FATTN_E_SHAPE, "keep: %s, must be [%lld,%lld,%lld,%lld]",
                              fattni_shape_text(keep, text, sizeof text), (long long)want[0], (long long)want[1],
                              (long long)want[2], (long long)want[3]);
    }
    if (fattn_tensor_numel(keep) == 0) return FATTN_OK;
    for (int d = 0; d < 4; ++d)
        if (keep->shape[d] > 1 && keep->stride[d] == 0)
            return fattn_ctx_fail(ctx, FATTN_E_SHAPE, "keep: stride[%d] is 0: several results share one address", d);
    return ctx->ops->dropout_mask(ctx, &p, keep->data, keep->stride, p.max_q, p.max_k);
}
