/* Keys less their mean (bwd_key_mean.cu), for dQ alone: S is of the keys as they are. Include after defining BN and
   K_BF16. */
#ifndef FATTNI_BWD_CUDA_SM90_BWD_SM90_CENTRE_H
#define FATTNI_BWD_CUDA_SM90_BWD_SM90_CENTRE_H

#include "core/device/sm90_tile.cuh"

/* Eight elements in shared memory less m[0..7]; differences that F16 does not hold become its largest number. */
DEVICE void subtract_8(uint32_t address, const float m[8]) {
    uint32_t pairs[4];
    load_shared_4(pairs, address);
#pragma unroll
    for (int e = 0; e < 4; ++e) {
        const float2 y = unpack(pairs[e]);
        float low = y.x - m[2 * e], high = y.y - m[2 * e + 1];
        if (!K_BF16) low = fminf(fmaxf(low, -65504.0f), 65504.0f), high = fminf(fmaxf(high, -65504.0f), 65504.0f);
        pairs[e] = pack(low, high);
    }
    store_shared_words(address, pairs);
}

/* A tile of K, which has arrived, less the mean of the head's keys, in place; panel x begins with column x * `step`. By
   256 threads, who must meet at a barrier before wgmma reads it. */
DEVICE void centre_tile(uint32_t tile, int panels, int step, const float *mean) {
    const int thread = (int)threadIdx.x % 256, chunk = thread % 8 ^ thread / 8 % 8; /* of each row that it has */
#pragma unroll 1
    for (int x = 0; x < panels; ++x) {
        const float4 low = *(const float4 *)(mean + step * x + 8 * chunk),
                     high = *(const float4 *)(mean + step * x + 8 * chunk + 4);
        const float m[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
        for (int at = 0; at < BN * 128; at += 256 * 16) subtract_8(tile + x * BN * 128 + at + thread * 16, m);
    }
    async_proxy_fence();
}

#endif
