/* Speed of the attention kernels on a GPU, with that of a matrix product and a copy in the same run.

   A timing covers a batch of calls and one synchronisation; the batch is long enough to hide the latter's cost. */
#include "cli/measure/bench.h"
#include "cli/measure/device_clock.h"
#include "cli/output/progress.h"

#include <stdio.h>

enum { TOKENS = 16384, COLUMNS = 2048 };
static const double batch_seconds = 10e-3;
static const int64_t copy_bytes = 1 << 30;

typedef struct ceilings {
    double product, copy; /* FLOP/s in the dtype; bytes read and written per second */
} ceilings;

typedef fattn_status pass(fattn_ctx *, const fattn_attention_params *, const fattn_attention_io *);

/* `count` calls of one pass, and a synchronisation. */
typedef struct batch {
    layer *l;
    pass *run;
    int64_t count;
} batch;

static fattn_status enqueue(const batch *b) {
    for (int64_t n = 0; n < b->count; ++n) {
        const fattn_status s = b->run(b->l->ctx, &b->l->params, &b->l->io);
        if (s != FATTN_OK) return s;
    }
    return FATTN_OK;
}

static fattn_status run_batch(void *arg) {
    const batch *const b = arg;
    const fattn_status s = enqueue(b);
    return s == FATTN_OK ? fattn_ctx_sync(b->l->ctx) : s;
}

static fattn_status measure_pass(layer *l, pass *run, const bench_options *o, double work, bench_speed *out) {
    batch b = {l, run, 3};
    timing t = {0};
    fattn_status s = measure_time(run_batch, &b, 1, o->seconds, &t);
    if (s != FATTN_OK) return s;
    const double once = t.best / (double)b.count;
    b.count = once < batch_seconds ? (int64_t)(batch_seconds / once) + 1 : 1;
    s = measure_time(run_batch, &b, o->repeat, o->seconds, &t);
    out->time = (timing){t.best / (double)b.count, t.median / (double)b.count};
    out->flops = work / out->time.best;
    return s;
}

/* The clock while forward calls run, enough of them for NVML to start. */
static fattn_status clock_under_load(layer *l, const bench_speed *f, int *mhz) {
    const batch b = {l, fattn_attention_fwd, (int64_t)(10 * batch_seconds / f->time.best) + 1};
    const fattn_status s = enqueue(&b);
    *mhz = device_clock();
    const fattn_status done = fattn_ctx_sync(l->ctx);
    return s == FATTN_OK ? done : s;
}

static fattn_status measure_layer(layer *l, const bench_options *o, double work, bench_speed *f, bench_speed *b,
                                  int *mhz) {
    const size_t forward = l->plan.fwd_workspace, backward = l->plan.bwd_workspace;
    const int64_t bytes[1] = {(int64_t)(forward > backward ? forward : backward)};
    fattn_status s = layer_start(l);
    if (s == FATTN_OK) s = layer_forward(l);
    if (s == FATTN_OK) s = layer_backward(l);
    if (s == FATTN_OK) s = fattn_tensor_alloc(l->ctx, FATTN_U8, 1, bytes, &l->workspace);
    l->io.workspace = l->workspace.data;
    l->io.workspace_bytes = (size_t)bytes[0];
    if (s == FATTN_OK) s = measure_pass(l, fattn_attention_fwd, o, work, f);
    if (s == FATTN_OK) s = clock_under_load(l, f, mhz);
    if (s == FATTN_OK) s = measure_pass(l, fattn_attention_bwd, o, 2.5 * work, b);
    return s;
}

static int bench_row(fattn_ctx *ctx, const bench_options *o, int64_t n, int64_t head_dim, bool causal, int algorithm,
                     const ceilings *c, json *j) {
    const int64_t sequences = o->batch ? o->batch : n < TOKENS ? TOKENS / n : 1;
    const int64_t heads = o->heads ? o->heads : head_dim < COLUMNS ? COLUMNS / head_dim : 1;
    const layer_shape shape = {bench_dtype(o->dtype), sequences, heads, heads, n, n, head_dim};
    layer l;
    bench_speed f, b;
    int mhz = 0;
    fattn_status s = layer_plan(&l, ctx, &shape, (fattn_algorithm)algorithm, bench_flags(o, causal));
    printf("%4lld  %-6s %6lld  %-9s", (long long)head_dim, causal ? "causal" : "full", (long long)n,
           bench_algorithms[algorithm]);
    if (s == FATTN_E_UNSUPPORTED) {
        printf(" not supported\n");
        return CLI_OK;
    }
    cli_flush();
    if (s == FATTN_OK) s = measure_layer(&l, o, bench_work(&shape, causal), &f, &b, &mhz);
    layer_free(&l);
    if (s == FATTN_E_NOMEM) {
        char text[32];
        printf(" does not fit: %s needed\n", text_of_bytes((double)l.predicted_peak, text));
        return CLI_OK;
    }
    if (s != FATTN_OK) {
        putchar('\n');
        return cli_status(ctx, s, bench_algorithms[algorithm]);
    }
    printf(" %9.3f %7.1f %5.1f%%  %9.3f %7.1f %5.1f%% %6d\n", 1e3 * f.time.best, 1e-12 * f.flops,
           100 * f.flops / c->product, 1e3 * b.time.best, 1e-12 * b.flops, 100 * b.flops / c->product, mhz);
    cli_flush();
    json_begin(j);
    bench_log(j, &l, causal, &f, &b);
    json_real(j, "product_gflops", 1e-9 * c->product);
    json_real(j, "copy_gbytes_per_second", 1e-9 * c->copy);
    json_int(j, "clock_mhz", mhz);
    return json_end(j) ? CLI_OK : CLI_FAILURE; /* json_close reports it */
}

typedef struct copy {
    fattn_ctx *ctx;
    fattn_tensor from, to;
} copy;

static fattn_status run_copy(void *arg) {
    const copy *const c = arg;
    fattn_status s = FATTN_OK;
    for (int n = 0; s == FATTN_OK && n < 10; ++n) s = fattn_tensor_copy(c->ctx, &c->to, &c->from);
    return s == FATTN_OK ? fattn_ctx_sync(c->ctx) : s;
}

static fattn_status measure_copy(fattn_ctx *ctx, double *rate) {
    copy c = {.ctx = ctx};
    timing t = {0};
    const int64_t count[1] = {copy_bytes / 4};
    fattn_status s = fattn_tensor_alloc(ctx, FATTN_F32, 1, count, &c.from);
    if (s == FATTN_OK) s = fattn_tensor_alloc(ctx, FATTN_F32, 1, count, &c.to);
    if (s == FATTN_OK) s = fattn_tensor_normal(ctx, &c.from, 0, 1, (fattn_rng){.seed = 1});
    if (s == FATTN_OK) s = measure_time(run_copy, &c, 5, 5, &t);
    if (s == FATTN_OK) *rate = 10 * 2 * (double)copy_bytes / t.best;
    fattn_tensor_free(ctx, &c.to);
    fattn_tensor_free(ctx, &c.from);
    return s;
}

static int measure_ceilings(fattn_ctx *ctx, fattn_dtype dtype, bool fp8, ceilings *c) {
    const int64_t n = fattn_dtype_size(dtype) == 2 ? 8192 : 4096;
    fattn_status s = measure_product(ctx, dtype, n, 10, 5, &c->product);
    if (s == FATTN_OK) s = measure_copy(ctx, &c->copy);
    if (s != FATTN_OK) return cli_status(ctx, s, "ceilings");
    printf("attention on the GPU, %s%s; in the same run: product of %lld^3 %.1f TFLOP/s, copy "
           "%.2f TB/s\n"
           "forward is 4 B H N^2 d FLOP, half of it when causal, backward 2.5 times as much; "
           "best of the batches\n\n",
           fattn_dtype_name(dtype), fp8 ? ", forward on 8-bit copies made in it" : "", (long long)n, 1e-12 * c->product,
           1e-12 * c->copy);
    printf("%4s  %-6s %6s  %-9s %9s %7s %6s  %9s %7s %6s %6s\n", "d", "mask", "N", "algorithm", "fwd ms", "TF/s",
           "share", "bwd ms", "TF/s", "share", "MHz");
    return CLI_OK;
}

int bench_attention_cuda(fattn_ctx *ctx, const bench_options *given, json *j) {
    bench_options o = *given;
    if (o.rows.count == 0) o.rows = (cli_list){6, {512, 1024, 2048, 4096, 8192, 16384}};
    if (o.dtype < 0) o.dtype = 3;
    if (o.algorithm < 0) o.algorithm = FATTN_ALGO_AUTO;
    static const int64_t usual[] = {64, 128, 256};
    ceilings c;
    int code = measure_ceilings(ctx, bench_dtype(o.dtype), o.fp8, &c);
    for (int d = 0; d < (o.head_dim ? 1 : 3); ++d)
        for (int causal = o.causal; causal < 2; ++causal)
            for (int i = 0; i < o.rows.count; ++i)
                for (int a = 0; a < BENCH_ALGORITHMS; ++a) {
                    const bool wanted = o.algorithm == a || (o.algorithm == BENCH_ALGORITHMS && a);
                    if (code == CLI_OK && wanted)
                        code = bench_row(ctx, &o, o.rows.at[i], o.head_dim ? o.head_dim : usual[d], causal, a, &c, j);
                }
    return code;
}
