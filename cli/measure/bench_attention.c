/* Speed of the attention kernels, with the speed of a matrix product on the same threads in the same run and
   the peak of the FMA units. */
#include "cli/measure/bench.h"
#include "cli/output/progress.h"

#include <stdio.h>

const char *const bench_algorithms[BENCH_ALGORITHMS] = {"auto", "standard", "flash1", "flash2"};

fattn_dtype bench_dtype(int choice) {
    static const fattn_dtype dtypes[] = {FATTN_F32, FATTN_F64, FATTN_F16, FATTN_BF16};
    return dtypes[choice];
}

uint32_t bench_flags(const bench_options *o, bool causal) {
    return (causal ? FATTN_CAUSAL : 0u) | (o->fp8 ? FATTN_FP8 : 0u);
}

double bench_work(const layer_shape *s, bool causal) {
    const double pairs = (double)s->rows * (double)s->keys * (double)(s->batch * s->heads);
    return 4 * pairs * (double)s->head_dim * (causal ? 0.5 : 1);
}

typedef struct references {
    double sgemm, peak;
} references; /* FLOP/s in float32 */

static fattn_status forward(void *arg) { return layer_forward(arg); }
static fattn_status backward(void *arg) { return layer_backward(arg); }

static fattn_status measure(layer *l, const bench_options *o, double work, bench_speed *f, bench_speed *b) {
    fattn_status s = layer_start(l);
    if (s == FATTN_OK) s = measure_time(forward, l, o->repeat, o->seconds, &f->time);
    if (s == FATTN_OK) s = measure_time(backward, l, o->repeat, o->seconds, &b->time);
    if (s != FATTN_OK) return s;
    f->flops = work / f->time.best;
    b->flops = 2.5 * work / b->time.best;
    return FATTN_OK;
}

void bench_log(json *j, const layer *l, bool causal, const bench_speed *f, const bench_speed *b) {
    const fattn_tensor *const q = &l->tensor[LAYER_Q];
    json_text(j, "device", fattn_ctx_device(l->ctx) == FATTN_CPU ? "cpu" : "cuda");
    json_text(j, "algorithm", bench_algorithms[l->params.algorithm]);
    json_text(j, "forward_kernel", l->plan.fwd_kernel);
    json_text(j, "backward_kernel", l->plan.bwd_kernel);
    json_text(j, "dtype", fattn_dtype_name((fattn_dtype)q->dtype));
    json_int(j, "batch", q->shape[0]);
    json_int(j, "heads", q->shape[1]);
    json_int(j, "n", q->shape[2]);
    json_int(j, "head_dim", q->shape[3]);
    json_bool(j, "causal", causal);
    json_bool(j, "fp8", l->params.flags & FATTN_FP8);
    json_real(j, "forward_seconds_best", f->time.best);
    json_real(j, "forward_seconds_median", f->time.median);
    json_real(j, "forward_gflops", 1e-9 * f->flops);
    json_real(j, "backward_seconds_best", b->time.best);
    json_real(j, "backward_seconds_median", b->time.median);
    json_real(j, "backward_gflops", 1e-9 * b->flops);
    json_int(j, "peak_bytes", (int64_t)l->predicted_peak);
}

static void log_row(json *j, const bench_options *o, const layer *l, const bench_speed *f, const bench_speed *b,
                    const references *y) {
    json_begin(j);
    bench_log(j, l, o->causal, f, b);
    json_real(j, "sgemm_gflops", 1e-9 * y->sgemm);
    json_real(j, "fma_peak_gflops", 1e-9 * y->peak);
    json_end(j);
}

static void print_pass(const bench_speed *s, const references *y) {
    printf(" %9.3f %9.3f %7.1f %5.1f%% %5.1f%% ", 1e3 * s->time.best, 1e3 * s->time.median, 1e-9 * s->flops,
           100 * s->flops / y->sgemm, 100 * s->flops / y->peak);
}

static int bench_row(fattn_ctx *ctx, const bench_options *o, int64_t n, int algorithm, const references *y, json *j) {
    const layer_shape shape = {bench_dtype(o->dtype), o->batch, o->heads, o->heads, n, n, o->head_dim};
    layer l;
    fattn_status s = layer_plan(&l, ctx, &shape, (fattn_algorithm)algorithm, bench_flags(o, o->causal));
    printf("%7lld  %-9s", (long long)n, bench_algorithms[algorithm]);
    char text[32];
    if (s == FATTN_E_UNSUPPORTED) {
        printf(" not supported\n");
        return CLI_OK;
    }
    if (s == FATTN_OK && (double)l.predicted_peak > 0.9 * memory_available()) {
        printf(" does not fit: %s needed\n", text_of_bytes((double)l.predicted_peak, text));
        return CLI_OK;
    }
    cli_flush();
    bench_speed f, b;
    if (s == FATTN_OK) s = measure(&l, o, bench_work(&shape, o->causal), &f, &b);
    layer_free(&l);
    if (s != FATTN_OK) {
        putchar('\n');
        return cli_status(ctx, s, bench_algorithms[algorithm]);
    }
    print_pass(&f, y);
    print_pass(&b, y);
    printf(" %9s\n", text_of_bytes((double)l.predicted_peak, text));
    cli_flush();
    log_row(j, o, &l, &f, &b, y);
    return json_failed(j) ? CLI_FAILURE : CLI_OK; /* json_close reports it */
}

/* Keeps the larger values: other programs on the machine can only lower them. */
static int measure_references(fattn_ctx *ctx, const bench_options *o, int64_t repeat, references *y) {
    double flops = 0;
    const fattn_status s = measure_product(ctx, FATTN_F32, SGEMM_N, 1, o->repeat < repeat ? o->repeat : repeat, &flops);
    if (s != FATTN_OK) return cli_status(ctx, s, "sgemm");
    if (flops > y->sgemm) y->sgemm = flops;
    const double peak = measure_fma_peak((int)o->threads);
    if (peak > y->peak) y->peak = peak;
    return CLI_OK;
}

int bench_attention(fattn_ctx *ctx, const bench_options *o, json *j) {
    references y = {0, 0};
    int code = measure_references(ctx, o, 10, &y);
    if (code != CLI_OK) return code;
    printf("attention, %s%s, B %lld, H %lld, d %lld, %s\n"
           "on the same threads: sgemm %d^3 %.1f GFLOP/s, peak of the multiply-adds %.1f GFLOP/s\n"
           "forward is 4 B H N^2 d FLOP%s, backward 2.5 times as much; GFLOP/s of the best run\n\n",
           fattn_dtype_name(bench_dtype(o->dtype)), o->fp8 ? ", forward on 8-bit copies" : "", (long long)o->batch,
           (long long)o->heads, (long long)o->head_dim, o->causal ? "causal" : "full", SGEMM_N, 1e-9 * y.sgemm,
           1e-9 * y.peak, o->causal ? ", half of it when causal" : "");
    printf("%7s  %-9s %-41s %-41s\n", "", "", "forward", "backward");
    printf("%7s  %-9s", "N", "algorithm");
    for (int pass = 0; pass < 2; ++pass)
        printf(" %9s %9s %7s %6s %6s ", "best ms", "median ms", "GF/s", "sgemm", "peak");
    printf(" %9s\n", "memory");
    for (int i = 0; code == CLI_OK && i < o->rows.count; ++i) {
        if (i > 0) code = measure_references(ctx, o, 3, &y);
        for (int a = 0; code == CLI_OK && a < BENCH_ALGORITHMS; ++a) {
            const bool wanted = o->algorithm == a || (o->algorithm == BENCH_ALGORITHMS && a > 0);
            if (wanted) code = bench_row(ctx, o, o->rows.at[i], a, &y, j);
        }
    }
    return code;
}
