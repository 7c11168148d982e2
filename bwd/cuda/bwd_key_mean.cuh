/* Of which keys of a head the mean is taken, and whether it is used (bwd_key_mean.cu, sm90/). */
#ifndef FATTNI_BWD_CUDA_BWD_KEY_MEAN_H
#define FATTNI_BWD_CUDA_BWD_KEY_MEAN_H

#include "core/device/helpers.cuh"

/* Key number n of the sample: of each `stride` keys another one, so that no period of them shows. */
DEVICE int sampled_key(int n, int stride) { return n * stride + n * 5 % stride; }

/* Where m of a channel may be: in each part of the sample not farther from its mean than 0 is, or a deviation. */
typedef struct mean_range {
    float least, most;
} mean_range;
DEVICE mean_range any_mean(void) {
    const mean_range any = {-INFINITY, INFINITY};
    return any;
}
/* Of `count` keys of a part: sums of what they are above `origin`, and of the squares of that. A NaN is no bound, and
   no deviation (of variance 0). Products that are added are explicit: the same bits wherever it is inlined. */
DEVICE void bound_mean(mean_range *range, float origin, float sum, float square, float count) {
    const float weight = __fdividef(1.0f, count), shift = sum * weight, mean = fmaf(sum, weight, origin);
    const float variance = fmaf(square, weight, -shift * shift),
                reach = fmaxf(fabsf(mean), variance * rsqrtf(variance));
    range->least = fmaxf(range->least, mean - reach);
    range->most = fminf(range->most, mean + reach);
}
DEVICE float bounded_mean(const mean_range *range, float mean) { return fmaxf(range->least, fminf(range->most, mean)); }

/* What a sample of `count` keys says of one channel: the mean, 0 where chance explains it; z += mean^2 count /
   variance. Without means z of D channels is about chi-square. */
DEVICE float channel_mean(float *z, float mean, float variance, int count) {
    const float y = mean == 0.0f ? 0.0f : __fdividef(mean * mean * (float)count, variance); /* variance 0: infinity */
    *z += y;
    return y > 4.0f && fabsf(mean) < INFINITY ? mean : 0.0f;
}
/* Of NaN: 0. */
DEVICE int shows_means(float z, int D, int count) {
    return count >= 16 && z > (float)D + 10.0f * sqrtf(2.0f * (float)D);
}

#endif
