/* What `fattn bench` can measure. */
#ifndef CLI_BENCH_H
#define CLI_BENCH_H

#include "cli.h"
#include "json.h"

enum { SGEMM_N = 2048 };

typedef struct bench_options {
    cli_list rows;
    int64_t head_dim, heads, batch, threads, repeat;
    double seconds;
    bool causal;
    int dtype;     /* f32, f64, f16, bf16 */
    int algorithm; /* a fattn_algorithm; the next one: all but auto */
    const char *json;
} bench_options;

/* Prints a table, logs its rows; returns an exit code. */
int bench_attention(fattn_ctx *ctx, const bench_options *o, json *j);

#endif
