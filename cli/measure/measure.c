#include "cli/measure/measure.h"

#include "cli/output/progress.h"

#include <fattn/tape.h>

#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>

enum { SAMPLES_MAX = 101 };

static int by_value(const void *a, const void *b) {
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

fattn_status measure_time(timed run, void *arg, int64_t repeat, double budget, timing *out) {
    double sample[SAMPLES_MAX];
    const double begin = seconds_now();
    fattn_status s = run(arg);
    if (s != FATTN_OK) return s;
    sample[0] = seconds_now() - begin; /* the only sample when one run takes the whole budget */
    int n = 0;
    while (n < SAMPLES_MAX && n < repeat && seconds_now() - begin < budget) {
        const double start = seconds_now();
        s = run(arg);
        if (s != FATTN_OK) return s;
        sample[n++] = seconds_now() - start;
    }
    if (n == 0) n = 1;
    qsort(sample, (size_t)n, sizeof *sample, by_value);
    *out = (timing){.best = sample[0], .median = sample[n / 2]};
    return FATTN_OK;
}

typedef struct product {
    fattn_tape *tape;
    fattn_tensor a, b;
    int64_t count;
    fattn_ctx *ctx;
} product;

static fattn_status multiply(void *arg) {
    product *p = arg;
    for (int64_t n = 0; n < p->count; ++n) {
        fattn_tape_reset(p->tape);
        fattn_op_matmul(p->tape, fattn_input(p->tape, &p->a), fattn_input(p->tape, &p->b), 0, 0);
    }
    const fattn_status s = fattn_tape_status(p->tape);
    return s == FATTN_OK ? fattn_ctx_sync(p->ctx) : s;
}

fattn_status measure_product(fattn_ctx *ctx, fattn_dtype dtype, int64_t n, int64_t count, int64_t repeat,
                             double *flops) {
    product p = {.count = count, .ctx = ctx};
    timing t = {0};
    const int64_t shape[2] = {n, n};
    const fattn_rng rng = {.seed = 1};
    fattn_status s = fattn_tape_create(ctx, &p.tape);
    if (s == FATTN_OK) s = fattn_tensor_alloc(ctx, dtype, 2, shape, &p.a);
    if (s == FATTN_OK) s = fattn_tensor_alloc(ctx, dtype, 2, shape, &p.b);
    if (s == FATTN_OK) s = fattn_tensor_normal(ctx, &p.a, 0, 1, rng);
    if (s == FATTN_OK) s = fattn_tensor_normal(ctx, &p.b, 0, 1, rng);
    if (s == FATTN_OK) s = measure_time(multiply, &p, repeat, 60, &t);
    if (s == FATTN_OK) *flops = 2 * (double)count * (double)n * (double)n * (double)n / t.best;
    fattn_tensor_free(ctx, &p.b);
    fattn_tensor_free(ctx, &p.a);
    fattn_tape_destroy(p.tape);
    return s;
}

/* The number after `key` in a file of "key: number kB" lines; -1 without. */
static double kilobytes(const char *path, const char *key) {
    FILE *f = fopen(path, "r");
    if (!f) return -1;
    char line[256];
    double found = -1;
    while (found < 0 && fgets(line, sizeof line, f)) {
        if (strncmp(line, key, strlen(key)) == 0) found = strtod(line + strlen(key), NULL);
    }
    fclose(f);
    return found;
}

/* The number that a file consists of; infinite for "max" and when there is no such file. */
static double number_in(const char *path) {
    FILE *f = fopen(path, "r");
    if (!f) return INFINITY;
    char line[64] = "";
    const bool read = fgets(line, sizeof line, f) != NULL;
    fclose(f);
    return read && line[0] >= '0' && line[0] <= '9' ? strtod(line, NULL) : INFINITY;
}

double memory_available(void) {
    const double system = kilobytes("/proc/meminfo", "MemAvailable:");
    double least = system < 0 ? INFINITY : 1024 * system;
    const double limit = number_in("/sys/fs/cgroup/memory.max");
    const double used = number_in("/sys/fs/cgroup/memory.current");
    if (isfinite(limit) && isfinite(used)) least = fmin(least, fmax(0, limit - used));
    struct rlimit address_space;
    if (getrlimit(RLIMIT_AS, &address_space) == 0 && address_space.rlim_cur != RLIM_INFINITY)
        least = fmin(least, (double)address_space.rlim_cur);
    return least;
}

double memory_high_water(void) {
    const double kib = kilobytes("/proc/self/status", "VmHWM:");
    if (kib >= 0) return 1024 * kib;
    struct rusage usage;
    return getrusage(RUSAGE_SELF, &usage) == 0 ? 1024 * (double)usage.ru_maxrss : 0;
}

double memory_resident(void) {
    const double kib = kilobytes("/proc/self/status", "VmRSS:");
    return kib >= 0 ? 1024 * kib : 0;
}
