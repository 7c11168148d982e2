/* fattn_sample on the device: one launch. */
#include "core/sampling/sample_args.h"

#include "core/cuda/launch.h"

extern void fattn_sample_rows(fattni_sample_args);

fattn_status fattni_cuda_sample(fattn_ctx *ctx, const fattni_sample *job) {
    fattni_sample_args a = {.job = *job};
    const size_t four = 4 * fattn_dtype_size((fattn_dtype)job->dtype);
    a.fours = four <= 16 && (uintptr_t)job->logits % four == 0 && job->row_stride % 4 == 0 && job->stride == 1;
    return FATTNI_START(ctx, fattn_sample_rows, job->B, FATTNI_SAMPLE_THREADS, &a);
}
