/* fattn bench: measures the speed on this machine. */
#include "cli/measure/bench.h"
#include "cli/base/device.h"

#include <stdio.h>
#include <string.h>

static const bench_options defaults = {.repeat = 20, .seconds = 2, .dtype = -1, .algorithm = -1};

/* Defaults on the CPU; those for a GPU are in bench_cuda.c. */
static bench_options on_cpu(const bench_options *given) {
    bench_options o = *given;
    if (o.rows.count == 0) o.rows = (cli_list){5, {128, 256, 512, 1024, 2048}};
    if (o.head_dim == 0) o.head_dim = 64;
    if (o.heads == 0) o.heads = 8;
    if (o.batch == 0) o.batch = 1;
    if (o.dtype < 0) o.dtype = 0;
    if (o.algorithm < 0) o.algorithm = BENCH_ALGORITHMS;
    return o;
}

#define FIELD(name) offsetof(bench_options, name)
static const cli_option table[] = {
    {"device", CLI_CHOICE, FIELD(device), "D", 0, 0, "cpu|cuda", "where to compute"},
    {"n", CLI_INTS, FIELD(rows), "N,...", 1, 1e7, NULL, "sequence lengths"},
    {"d", CLI_INT, FIELD(head_dim), "D", 1, 256, NULL, "head dimension"},
    {"heads", CLI_INT, FIELD(heads), "H", 1, 1024, NULL, "heads"},
    {"batch", CLI_INT, FIELD(batch), "B", 1, 65536, NULL, "sequences"},
    {"causal", CLI_FLAG, FIELD(causal), NULL, 0, 0, NULL, "causal mask"},
    {"fp8", CLI_FLAG, FIELD(fp8), NULL, 0, 0, NULL, "forward on 8-bit copies, which it makes first (FATTN_FP8)"},
    {"dtype", CLI_CHOICE, FIELD(dtype), "T", 0, 0, "f32|f64|f16|bf16", "type of the tensors"},
    {"algorithm", CLI_CHOICE, FIELD(algorithm), "A", 0, 0, "auto|standard|flash1|flash2|all", "which to run"},
    {"threads", CLI_INT, FIELD(threads), "T", 0, 1024, NULL, "CPU threads; 0: OpenMP's choice"},
    {"repeat", CLI_INT, FIELD(repeat), "R", 1, 101, NULL, "runs of each pass, at most"},
    {"seconds", CLI_REAL, FIELD(seconds), "S", 0, 3600, NULL, "start no further run of a pass after S seconds"},
    {"json", CLI_TEXT, FIELD(json), "FILE", 0, 0, NULL, "write one JSON object per row; - = standard output"},
    {0}};

static int run(const void *options, int n_operands, char *const *operands) {
    const bench_options *o = options;
    for (int i = 0; i < n_operands; ++i) {
        if (strcmp(operands[i], "attention") != 0)
            return cli_fail(CLI_USAGE, "\"%s\" cannot be measured; there is: attention", operands[i]);
    }
    json j;
    if (!json_open(&j, o->json, false)) return CLI_FAILURE;
    fattn_ctx *ctx = NULL;
    char why[DEVICE_MESSAGE];
    int code = device_open(o->device, 0, o->threads, why, &ctx);
    if (!code && o->device == ON_CUDA) {
        code = bench_attention_cuda(ctx, o, &j);
    } else if (!code) {
        const bench_options all = on_cpu(o);
        code = bench_attention(ctx, &all, &j);
    }
    fattn_ctx_destroy(ctx);
    if (!json_close(&j)) code = CLI_FAILURE;
    return code;
}

const cli_command cmd_bench = {
    .name = "bench",
    .operands = "[attention]",
    .summary = "Measure the speed of the attention kernels",
    .details = "GFLOP/s forward and backward, their share of what a float32 matrix product (OpenBLAS\n"
               "or oneDNN) reaches on the same threads in the same run, and their share of the multiply-add\n"
               "units' peak. standard is the composition of products and a softmax that stores N x N.\n"
               "Without options: f32, 8 heads of dimension 64, N 128 to 2048, all algorithms.\n"
               "\n"
               "--device cuda: TFLOP/s, with the rate of a matrix product and of a copy measured in\n"
               "the same run and the clock of the multiprocessors under load. Without options: bf16,\n"
               "16384 tokens, heads of 64, 128 and 256 that make 2048 columns, full and causal,\n"
               "N 512 to 16384, the algorithm that the library would choose.",
    .options = table,
    .defaults = &defaults,
    .size = sizeof defaults,
    .run = run,
};
