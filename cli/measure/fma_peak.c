/* The peak of this machine's FMA units: chains of multiply-adds in registers, enough of them to hide the
   latency, on all threads. */
#include "cli/measure/measure.h"
#include "cli/output/progress.h"

#include <omp.h>
#include <pthread.h>

enum { CHAINS = 12, ROUNDS = 1 << 22, TRIALS = 5, MOST_THREADS = 1024 };

typedef float (*chains)(void);

/* x = x a + b, in CHAINS independent chains; returning the result prevents dead-code elimination. */
#define DEFINE_CHAINS(name, attribute, vector, splat, multiply_add)                                                    \
    attribute static float name(void) {                                                                                \
        vector x[CHAINS];                                                                                              \
        const vector a = splat(0.999f), b = splat(0.001f);                                                             \
        for (int n = 0; n < CHAINS; ++n) x[n] = splat((float)n);                                                       \
        for (int round = 0; round < ROUNDS; ++round)                                                                   \
            for (int n = 0; n < CHAINS; ++n) x[n] = multiply_add(x[n], a, b);                                          \
        float sum = 0;                                                                                                 \
        for (int n = 0; n < CHAINS; ++n) sum += ((const float *)&x[n])[0];                                             \
        return sum;                                                                                                    \
    }

#if defined(__x86_64__)
#include <immintrin.h>
#define MULTIPLY_ADD_SSE(x, a, b) _mm_add_ps(_mm_mul_ps(x, a), b)
DEFINE_CHAINS(chains_sse, , __m128, _mm_set1_ps, MULTIPLY_ADD_SSE)
DEFINE_CHAINS(chains_avx2, __attribute__((target("avx2,fma"))), __m256, _mm256_set1_ps, _mm256_fmadd_ps)
DEFINE_CHAINS(chains_avx512, __attribute__((target("avx512f"))), __m512, _mm512_set1_ps, _mm512_fmadd_ps)

static chains widest(int *lanes) {
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f")) return *lanes = 16, chains_avx512;
    if (__builtin_cpu_supports("fma")) return *lanes = 8, chains_avx2;
    return *lanes = 4, chains_sse;
}
#elif defined(__aarch64__)
#include <arm_neon.h>
#define MULTIPLY_ADD_NEON(x, a, b) vfmaq_f32(b, x, a)
DEFINE_CHAINS(chains_neon, , float32x4_t, vdupq_n_f32, MULTIPLY_ADD_NEON)
static chains widest(int *lanes) { return *lanes = 4, chains_neon; }
#else
#define SPLAT(x) (x)
#define MULTIPLY_ADD(x, a, b) ((x) * (a) + (b))
DEFINE_CHAINS(chains_scalar, , float, SPLAT, MULTIPLY_ADD)
static chains widest(int *lanes) { return *lanes = 1, chains_scalar; }
#endif

typedef struct worker {
    pthread_t thread;
    chains run;
    float result;
} worker;

static void *work(void *arg) {
    worker *const w = arg;
    w->result = w->run();
    return NULL;
}

double measure_fma_peak(int threads) {
    worker workers[MOST_THREADS];
    int lanes;
    const chains run = widest(&lanes);
    if (threads <= 0) threads = omp_get_max_threads();
    if (threads > MOST_THREADS) threads = MOST_THREADS;
    double best = 0;
    for (int trial = 0; trial < TRIALS; ++trial) {
        int started = 0;
        const double begin = seconds_now();
        for (; started < threads; ++started) {
            workers[started].run = run;
            if (pthread_create(&workers[started].thread, NULL, work, &workers[started]) != 0) break;
        }
        for (int n = 0; n < started; ++n) pthread_join(workers[n].thread, NULL);
        const double flops = 2.0 * lanes * CHAINS * ROUNDS * started / (seconds_now() - begin);
        if (flops > best) best = flops;
    }
    return best;
}
