/* The measurements of `fattn bench`. */
#ifndef FATTNI_CLI_MEASURE_BENCH_H
#define FATTNI_CLI_MEASURE_BENCH_H

#include "cli/base/cli.h"
#include "cli/output/json.h"
#include "cli/measure/layer.h"
#include "cli/measure/measure.h"

enum { SGEMM_N = 2048 };
enum { BENCH_ALGORITHMS = 4 };

typedef struct bench_options { /* 0, or -1 for a choice: not given */
    cli_list rows;
    int64_t head_dim, heads, batch, threads, repeat;
    double seconds;
    bool causal;
    bool fp8;      /* FATTN_FP8 */
    int device;    /* ON_CPU, ON_CUDA */
    int dtype;     /* f32, f64, f16, bf16 */
    int algorithm; /* a fattn_algorithm; BENCH_ALGORITHMS: all but auto */
    const char *json;
} bench_options;

typedef struct bench_speed { /* of one pass */
    timing time;
    double flops; /* per second, in the best run */
} bench_speed;

extern const char *const bench_algorithms[BENCH_ALGORITHMS];
fattn_dtype bench_dtype(int choice);
/* FLOP of one forward pass: 4 B H N^2 d, half of it when causal; backward is 2.5 times as much. */
double bench_work(const layer_shape *s, bool causal);

/* Print a table, log its rows; return an exit code. On the CPU all options are given. */
int bench_attention(fattn_ctx *ctx, const bench_options *o, json *j);
int bench_attention_cuda(fattn_ctx *ctx, const bench_options *o, json *j);

/* Of attention_params. */
uint32_t bench_flags(const bench_options *o, bool causal);

/* The log entries of a row that both tables share, between json_begin and json_end. */
void bench_log(json *j, const layer *l, bool causal, const bench_speed *forward, const bench_speed *backward);

#endif
