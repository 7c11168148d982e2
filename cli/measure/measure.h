/* Measurement of time and memory. */
#ifndef FATTNI_CLI_MEASURE_MEASURE_H
#define FATTNI_CLI_MEASURE_MEASURE_H

#include <fattn/tensor.h>

typedef struct timing {
    double best, median;
} timing; /* seconds */

/* Calls run once to warm up, then up to `repeat` times, at least once, and no more once `budget`
   seconds are spent. The first status that is not FATTN_OK ends it. */
typedef fattn_status (*timed)(void *arg);
fattn_status measure_time(timed run, void *arg, int64_t repeat, double budget, timing *out);

/* FLOP/s of `count` matrix products n x n x n through the library (OpenBLAS or oneDNN on ctx's
   threads, or cuBLAS), timed until all are done; attention kernels are compared with it. Best of `repeat`. */
fattn_status measure_product(fattn_ctx *ctx, fattn_dtype dtype, int64_t n, int64_t count, int64_t repeat,
                             double *flops);

/* Peak FLOP/s of the FMA units in float32 on `threads` threads, 0 for OpenMP's choice. */
double measure_fma_peak(int threads);

/* Bytes that this process could still use without swapping, within the limits of the system and its cgroup. */
double memory_available(void);
/* High-water mark of the resident memory of this process; a forked child starts anew. 0 = unknown.
 */
double memory_high_water(void);
double memory_resident(void); /* of this process now; 0 = unknown */

#endif
