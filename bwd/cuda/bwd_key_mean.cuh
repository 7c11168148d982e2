/* Of which keys of a head the mean is taken, and whether it is used (bwd_key_mean.cu, sm90/). */
#ifndef FATTNI_BWD_CUDA_BWD_KEY_MEAN_H
#define FATTNI_BWD_CUDA_BWD_KEY_MEAN_H

#include "core/device/helpers.cuh"

/* Key number n of the sample: of each `stride` keys another one, so that no period of them shows. */
DEVICE int sampled_key(int n, int stride) { return n * stride + n * 5 % stride; }

/* What a sample of `count` keys says of one channel: the mean to use, 0 where chance explains it; z += mean^2 count /
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
