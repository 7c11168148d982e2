/* cuRAND's Philox4x32-10, its rounds as core/tensor/philox.h takes them for masks, and the dropout mask against
   Random123. argv[1]: "host" = these functions compiled for the host, "device" = on the GPU. */
#define QUALIFIERS static inline __host__ __device__ /* cuRAND's own hook */
#include <curand_kernel.h>

#include "philox_host.h"

#include <curand_kernel.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { SKIPPED = 77, COUNT = 1000000 };

/* One case: a seed, a counter, and a threshold for the keep bit of element (i, j). */
typedef struct one {
    uint64_t seed;
    fattni_block counter;
    int64_t i, j;
    uint32_t stream, step, plane, threshold;
} one;

typedef struct result {
    uint32_t block[4];    /* curand_Philox4x32_10 */
    uint32_t mask[4];     /* fattni_mask_philox */
    uint32_t sequence[4]; /* curand_init, curand4 */
    uint32_t keep, reserved;
} result;

/* The sequence API reaches w1 < 2^30 (an offset counts single words), which is every row that a
   31-bit position has. */
static one make_case(uint32_t n) {
    const fattni_block a = philox_host(1, {{n, 0, 0, 0}}), b = philox_host(2, {{n, 0, 0, 0}});
    one c = {};
    c.seed = (uint64_t)a.w[0] << 32 | a.w[1];
    c.i = a.w[2] >> 1, c.j = a.w[3] >> 1;
    c.stream = b.w[0], c.step = b.w[1], c.plane = b.w[2], c.threshold = 1 + b.w[3] % (FATTNI_DROP_ALL - 1);
    c.counter = fattni_dropout_counter(c.stream, c.step, c.plane, c.i, c.j);
    return c;
}

static __host__ __device__ void ask_curand(const one *c, result *r) {
    const uint4 counter = {c->counter.w[0], c->counter.w[1], c->counter.w[2], c->counter.w[3]};
    const uint2 key = {(uint32_t)c->seed, (uint32_t)(c->seed >> 32)};
    const uint4 x = curand_Philox4x32_10(counter, key);
    curandStatePhilox4_32_10_t state;
    curand_init(c->seed, (unsigned long long)counter.w << 32 | counter.z,
                4 * ((unsigned long long)counter.y << 32 | counter.x), &state);
    const uint4 y = curand4(&state);
    r->block[0] = x.x, r->block[1] = x.y, r->block[2] = x.z, r->block[3] = x.w;
    r->sequence[0] = y.x, r->sequence[1] = y.y, r->sequence[2] = y.z, r->sequence[3] = y.w;
    const fattni_block z = fattni_mask_philox(c->seed, c->counter);
    for (int n = 0; n < 4; ++n) r->mask[n] = z.w[n];
}

__global__ void compute_cases(const one *cases, result *results, int count) {
    const int n = (int)(blockIdx.x * blockDim.x + threadIdx.x);
    if (n >= count) return;
    const one c = cases[n];
    ask_curand(&c, &results[n]);
    results[n].keep = (uint32_t)fattni_keep(c.seed, c.stream, c.step, c.plane, c.i, c.j, c.threshold);
}

static int check(const one *cases, const result *results, bool with_keep) {
    int wrong = 0, kept = 0;
    for (int n = 0; n < COUNT; ++n) {
        const one *const c = &cases[n];
        const fattni_block want = philox_host(c->seed, c->counter), mask = mask_philox_host(c->seed, c->counter);
        const uint32_t draw = fattni_lane16(mask, fattni_dropout_lane(c->i, c->j));
        wrong += memcmp(results[n].block, want.w, sizeof want.w) != 0;
        wrong += memcmp(results[n].sequence, want.w, sizeof want.w) != 0;
        wrong += memcmp(results[n].mask, mask.w, sizeof mask.w) != 0;
        if (with_keep) wrong += results[n].keep != (uint32_t)fattni_keeps(draw, c->threshold);
        kept += (int)results[n].keep;
    }
    printf("%d cases, %d results differ from Random123", COUNT, wrong);
    if (with_keep) printf(", %d kept", kept);
    printf("\n");
    return wrong != 0 || (with_keep && (kept < COUNT * 0.49 || kept > COUNT * 0.51));
}

static int on_the_device(const one *cases, result *results) {
    one *device_cases = NULL;
    result *device_results = NULL;
    cudaError_t e = cudaMalloc((void **)&device_cases, COUNT * sizeof *cases);
    if (e == cudaSuccess) e = cudaMalloc((void **)&device_results, COUNT * sizeof *results);
    if (e == cudaSuccess) e = cudaMemcpy(device_cases, cases, COUNT * sizeof *cases, cudaMemcpyHostToDevice);
    if (e == cudaSuccess) {
        compute_cases<<<(COUNT + 255) / 256, 256>>>(device_cases, device_results, COUNT);
        e = cudaGetLastError();
    }
    if (e == cudaSuccess) e = cudaMemcpy(results, device_results, COUNT * sizeof *results, cudaMemcpyDeviceToHost);
    cudaFree(device_cases);
    cudaFree(device_results);
    if (e != cudaSuccess) printf("%s\n", cudaGetErrorString(e));
    return e != cudaSuccess || check(cases, results, true);
}

int main(int argc, char **argv) {
    const bool device = argc > 1 && strcmp(argv[1], "device") == 0;
    int devices = 0;
    if (device && (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0)) {
        printf("skipped: no CUDA device\n");
        return SKIPPED;
    }
    one *const cases = (one *)malloc(COUNT * sizeof *cases);
    result *const results = (result *)calloc(COUNT, sizeof *results);
    if (!cases || !results) return 1;
    for (uint32_t n = 0; n < COUNT; ++n) cases[n] = make_case(n);
    if (!device)
        for (int n = 0; n < COUNT; ++n) ask_curand(&cases[n], &results[n]);
    const int failed = device ? on_the_device(cases, results) : check(cases, results, false);
    free(cases);
    free(results);
    return failed;
}
