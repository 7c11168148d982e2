/* fattn_sample on the device: one launch, of some CTAs for each row where they can exchange what they find. */
#include "core/sampling/sample_args.h"

#include "core/cuda/launch.h"

extern void fattn_sample_rows(fattni_sample_args);

fattn_status fattni_cuda_sample(fattn_ctx *ctx, const fattni_sample *job) {
    fattni_sample_args a = {.job = *job};
    const size_t four = 4 * fattn_dtype_size((fattn_dtype)job->dtype);
    a.fours = four <= 16 && (uintptr_t)job->logits % four == 0 && job->row_stride % 4 == 0 && job->stride == 1;
    a.cluster = 1;
    while (ctx->gpu.arch >= 90 && a.cluster < FATTNI_SAMPLE_CLUSTER && a.cluster * FATTNI_SAMPLE_CHUNK < job->V)
        a.cluster *= 2;
    return fattni_cuda_start_clusters(ctx, "fattn_sample_rows", (fattni_cuda_any)fattn_sample_rows, job->B * a.cluster,
                                      a.cluster, FATTNI_SAMPLE_THREADS, sizeof(fattni_sample_told), &a, true);
}
