/* fattn memory: peak memory of a training step, N x N stored against flash, predicted and measured.

   Every size runs in a forked child, so that each row has its own high-water mark, and a row that the system
   kills for lack of memory does not end the command. This process itself must neither run a parallel region
   nor open a GPU: OpenMP and CUDA do not survive a fork. */
#include "cli/base/cli.h"
#include "cli/base/device.h"
#include "cli/output/json.h"
#include "cli/measure/layer.h"
#include "cli/measure/measure.h"
#include "cli/train/model.h"
#include "cli/output/plot.h"
#include "cli/output/progress.h"

#include <fattn/optim.h>

#include <math.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

struct options {
    cli_list rows;
    int64_t head_dim, heads, batch, layers, vocab, threads, limit;
    int dtype, mask, device;
    const char *plot, *json;
};

static const struct options defaults = {
    .rows = {5, {512, 1024, 2048, 4096, 8192}}, .head_dim = 64, .heads = 2, .batch = 1, .layers = 2, .vocab = 96};

#define FIELD(name) offsetof(struct options, name)
static const cli_option table[] = {
    {"n", CLI_INTS, FIELD(rows), "N,...", 1, 1e7, NULL, "sequence lengths"},
    {"d", CLI_INT, FIELD(head_dim), "D", 2, 256, NULL, "head dimension, even"},
    {"heads", CLI_INT, FIELD(heads), "H", 1, 1024, NULL, "heads"},
    {"batch", CLI_INT, FIELD(batch), "B", 1, 1024, NULL, "sequences"},
    {"layers", CLI_INT, FIELD(layers), "L", 0, 96, NULL, "layers of the whole model; 0: leave it out"},
    {"vocab", CLI_INT, FIELD(vocab), "V", 2, 1e6, NULL, "symbols of the whole model"},
    {"dtype", CLI_CHOICE, FIELD(dtype), "T", 0, 0, "f32|f64|bf16|f16",
     "of the attention layer; with bf16 and f16 of the model, too"},
    {"mask", CLI_CHOICE, FIELD(mask), "M", 0, 0, "causal|full", "which keys a row sees"},
    {"device", CLI_CHOICE, FIELD(device), "D", 0, 0, "cpu|cuda", "where to compute"},
    {"limit", CLI_INT, FIELD(limit), "MIB", 0, 1e9, NULL,
     "start no row predicted to need more MiB; 0: what is available (a GPU says so itself)"},
    {"threads", CLI_INT, FIELD(threads), "T", 0, 1024, NULL, "CPU threads; 0: OpenMP's choice"},
    {"plot", CLI_TEXT, FIELD(plot), "FILE", 0, 0, NULL, "write a log-log picture, SVG; - = standard output"},
    {"json", CLI_TEXT, FIELD(json), "FILE", 0, 0, NULL, "write one JSON object per row; - = standard output"},
    {0}};

typedef enum kind { ONE_LAYER, WHOLE_MODEL } kind;
static const fattn_dtype dtypes[] = {FATTN_F32, FATTN_F64, FATTN_BF16, FATTN_F16};
static const char *const dtype_names[] = {"f32", "f64", "bf16", "f16"};
enum { STORED, FLASH, WAYS };
static const fattn_algorithm algorithm_of[WAYS] = {FATTN_ALGO_STANDARD, FATTN_ALGO_AUTO};
static const char *const name_of[WAYS] = {"standard", "flash"};

typedef enum state { MEASURED, NO_FIT, KILLED, FAILED } state;
typedef struct reading {
    state state;
    double predicted;            /* bytes, from the library's query; for a whole model a lower bound */
    double counted, process;     /* measured: by the allocator, by the system (NAN on a GPU) */
    double matrix_to_statistics; /* ratio of N x N storage to L */
    char text[512];              /* FAILED: why */
} reading;

/* ---- in the child ---- */

/* Touches every page, so that all allocated memory becomes resident, even if it is never written. */
static void *touching_alloc(void *user, size_t bytes, size_t align, fattn_stream stream) {
    (void)user, (void)stream;
    unsigned char *p = aligned_alloc(align, (bytes + align - 1) / align * align);
    for (size_t i = 0; p && i < bytes; i += 4096) p[i] = 0xff;
    return p;
}

static void touching_free(void *user, void *p, size_t bytes, fattn_stream stream) {
    (void)user, (void)bytes, (void)stream;
    free(p);
}

static fattn_status layer_step(fattn_ctx *ctx, const struct options *o, int64_t n, fattn_algorithm algorithm) {
    const layer_shape shape = {dtypes[o->dtype], o->batch, o->heads, o->heads, n, n, o->head_dim};
    layer l;
    fattn_status s = layer_plan(&l, ctx, &shape, algorithm, o->mask == 0 ? FATTN_CAUSAL : 0);
    if (s == FATTN_OK) s = layer_start(&l);
    if (s == FATTN_OK) s = layer_forward(&l);
    if (s == FATTN_OK) s = layer_backward(&l);
    layer_free(&l);
    return s;
}

static fattn_dtype model_dtype(const struct options *o) {
    return dtypes[o->dtype] == FATTN_F64 ? FATTN_F32 : dtypes[o->dtype];
}

/* Forward, backward and AdamW of a small language model on arbitrary symbols. */
static fattn_status model_step(fattn_ctx *ctx, const struct options *o, int64_t n, fattn_algorithm algorithm) {
    const model_config config = {.vocab = o->vocab,
                                 .context = n,
                                 .channels = o->heads * o->head_dim,
                                 .layers = (int)o->layers,
                                 .heads = (int)o->heads,
                                 .kv_heads = (int)o->heads,
                                 .mlp_ratio = 4,
                                 .algorithm = algorithm,
                                 .dtype = model_dtype(o),
                                 .seed = 1};
    model *m = NULL;
    fattn_tape *tape = NULL;
    fattn_adamw *optimiser = NULL;
    fattn_tensor ids = {0};
    int32_t *const symbols = malloc((size_t)(o->batch * n) * sizeof *symbols);
    fattn_status s = symbols ? model_create(ctx, &config, &m) : FATTN_E_NOMEM;
    if (s != FATTN_OK) goto done;
    int count;
    fattn_param *const *params = model_params(m, &count);
    if ((s = fattn_adamw_create(ctx, NULL, params, count, &optimiser)) != FATTN_OK) goto done;
    if ((s = fattn_tape_create(ctx, &tape)) != FATTN_OK) goto done;
    const int64_t shape[2] = {o->batch, n};
    if ((s = fattn_tensor_alloc(ctx, FATTN_I32, 2, shape, &ids)) != FATTN_OK) goto done;
    for (int64_t i = 0; i < o->batch * n; ++i) symbols[i] = (int32_t)(i * i % o->vocab);
    if ((s = device_write_i32(ctx, &ids, symbols)) != FATTN_OK) goto done;
    s = fattn_tape_backward(tape, model_loss(m, tape, &ids, &ids, NULL));
    if (s == FATTN_OK) s = fattn_adamw_step(optimiser);
done:
    free(symbols);
    fattn_tensor_free(ctx, &ids);
    fattn_adamw_destroy(optimiser);
    fattn_tape_destroy(tape);
    model_destroy(m);
    return s;
}

static fattn_status step(kind what, fattn_ctx *ctx, const struct options *o, int64_t n, fattn_algorithm algorithm) {
    return what == ONE_LAYER ? layer_step(ctx, o, n, algorithm) : model_step(ctx, o, n, algorithm);
}

/* A context whose counters match the resident memory: on the CPU every page is touched. */
static fattn_status open_context(const struct options *o, reading *r, fattn_ctx **ctx) {
    if (o->device == ON_CUDA) return device_create(ON_CUDA, 0, 0, r->text, ctx);
    const fattn_ctx_options options = {.struct_size = sizeof options,
                                       .cpu_threads = (int)o->threads,
                                       .allocator = {.alloc = touching_alloc, .free = touching_free}};
    return fattn_ctx_create(&options, ctx);
}

/* The library's prediction, before anything is allocated. */
static fattn_status predict(kind what, fattn_ctx *ctx, const struct options *o, int64_t n, int way, reading *r) {
    const layer_shape shape = {
        what == WHOLE_MODEL ? model_dtype(o) : dtypes[o->dtype], o->batch, o->heads, o->heads, n, n, o->head_dim};
    layer l;
    const fattn_status s = layer_plan(&l, ctx, &shape, algorithm_of[way], o->mask == 0 ? FATTN_CAUSAL : 0);
    if (s != FATTN_OK) return s;
    r->matrix_to_statistics = (double)l.plan.materialized_bytes / (double)l.plan.lse_bytes;
    r->predicted = (double)l.predicted_peak;
    if (what == WHOLE_MODEL) r->predicted += (double)l.plan.saved_bytes * (double)(o->layers - 1);
    return FATTN_OK;
}

/* A tiny step first, so that threads, code pages and buffers of a BLAS are not counted. */
static void measure(kind what, const struct options *o, int64_t n, int way, reading *r) {
    fattn_ctx *ctx = NULL;
    fattn_status s = open_context(o, r, &ctx);
    if (s == FATTN_OK) s = predict(what, ctx, o, n, way, r);
    const double most = o->limit               ? 1048576.0 * (double)o->limit
                        : o->device == ON_CUDA ? INFINITY
                                               : 0.9 * memory_available();
    if (s == FATTN_OK && r->predicted > most) {
        r->state = NO_FIT;
        fattn_ctx_destroy(ctx);
        return;
    }
    if (s == FATTN_OK) s = step(what, ctx, o, n < 64 ? n : 64, algorithm_of[way]);
    if (s == FATTN_OK) {
        const double before = memory_resident();
        fattn_ctx_mem_reset_peak(ctx);
        s = step(what, ctx, o, n, algorithm_of[way]);
        if (s == FATTN_OK) s = fattn_ctx_sync(ctx);
        r->counted = (double)fattn_ctx_mem(ctx).peak;
        r->process = o->device == ON_CUDA ? NAN : memory_high_water() - before;
    }
    r->state = s == FATTN_OK ? MEASURED : s == FATTN_E_NOMEM ? KILLED : FAILED;
    const char *message = fattn_ctx_error(ctx);
    if (ctx) snprintf(r->text, sizeof r->text, "%s", *message ? message : fattn_status_text(s));
    fattn_ctx_destroy(ctx);
}

/* ---- in this process ---- */

static void end_first(void) {
    FILE *f = fopen("/proc/self/oom_score_adj", "w");
    if (!f) return;
    fputs("1000", f);
    fclose(f);
}

static void measure_in_child(kind what, const struct options *o, int64_t n, int way, reading *r) {
    r->state = FAILED;
    snprintf(r->text, sizeof r->text, "could not start a process");
    fflush(NULL);
    int ends[2];
    if (pipe(ends) != 0) return;
    const pid_t self = getpid(), child = fork();
    if (child == 0) {
        /* It ends with its parent, which may have ended before it asked for that. */
        if (prctl(PR_SET_PDEATHSIG, SIGKILL) != 0 || getppid() != self) _exit(1);
        close(ends[0]);
        end_first();
        reading here = *r;
        measure(what, o, n, way, &here);
        const bool written = write(ends[1], &here, sizeof here) == (ssize_t)sizeof here;
        _exit(written ? 0 : 1);
    }
    close(ends[1]);
    if (child > 0) {
        reading there;
        int status = 0;
        const bool answered = read(ends[0], &there, sizeof there) == (ssize_t)sizeof there;
        waitpid(child, &status, 0);
        if (answered)
            *r = there;
        else if (WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL)
            r->state = KILLED;
        else
            snprintf(r->text, sizeof r->text, "the measuring process ended with status %d", status);
    }
    close(ends[0]);
}

typedef struct row {
    reading way[WAYS];
} row;

static const char *measured_text(const reading *r, double bytes, char *buffer) {
    static const char *const other[] = {[NO_FIT] = "no fit", [KILLED] = "no memory", [FAILED] = "failed"};
    if (r->state != MEASURED) return other[r->state];
    return isnan(bytes) ? "-" : text_of_bytes(bytes, buffer);
}

/* The ratio of N x N stored to flash, as far as both are known. */
static void ratio_text(const row *r, char *buffer, size_t size) {
    const reading *stored = &r->way[STORED], *flash = &r->way[FLASH];
    if (flash->state != MEASURED)
        snprintf(buffer, size, "-");
    else if (stored->state == MEASURED)
        snprintf(buffer, size, "%.1fx", stored->counted / flash->counted);
    else
        snprintf(buffer, size, "> %.0fx", stored->predicted / flash->counted);
}

static void print_row(kind what, int64_t n, const row *r) {
    char text[32], ratio[32];
    printf("%7lld ", (long long)n);
    for (int w = 0; w < WAYS; ++w) {
        const reading *v = &r->way[w];
        if (what == ONE_LAYER) printf(" %10s", text_of_bytes(v->predicted, text));
        printf(" %10s", measured_text(v, v->counted, text));
        printf(" %10s ", measured_text(v, v->process, text));
    }
    ratio_text(r, ratio, sizeof ratio);
    printf(" %9s", ratio);
    if (what == ONE_LAYER) printf(" %10.0fx", r->way[FLASH].matrix_to_statistics);
    putchar('\n');
    cli_flush();
}

/* Whole, or null: not known. A prediction may be beyond 64 bits. */
static void log_bytes(json *j, const char *key, double bytes) {
    if (bytes < 0x1p63)
        json_int(j, key, (int64_t)bytes);
    else
        json_real(j, key, bytes);
}

static void log_row(json *j, kind what, int64_t n, const row *r) {
    for (int w = 0; w < WAYS; ++w) {
        const reading *v = &r->way[w];
        static const char *const states[] = {"measured", "no fit", "no memory", "failed"};
        json_begin(j);
        json_text(j, "what", what == ONE_LAYER ? "layer" : "model");
        json_text(j, "algorithm", name_of[w]);
        json_int(j, "n", n);
        json_text(j, "state", states[v->state]);
        log_bytes(j, what == ONE_LAYER ? "predicted_bytes" : "predicted_at_least_bytes", v->predicted);
        log_bytes(j, "counted_bytes", v->state == MEASURED ? v->counted : NAN);
        log_bytes(j, "process_bytes", v->state == MEASURED ? v->process : NAN); /* null on a GPU */
        json_end(j);
    }
}

static int run_table(kind what, const struct options *o, row *rows, json *j) {
    const bool one = what == ONE_LAYER;
    const int width = one ? 33 : 22; /* of the columns of one algorithm */
    printf("%7s %*s %*s\n", "", width, "N x N stored", width, "flash");
    printf("%7s ", "N");
    for (int w = 0; w < WAYS; ++w) {
        if (one) printf(" %10s", "predicted");
        printf(" %10s %10s ", "counted", "process");
    }
    printf(" %9s", "ratio");
    printf(one ? " %11s\n" : "\n", "N x N : L");
    for (int i = 0; i < o->rows.count; ++i) {
        const int64_t n = o->rows.at[i];
        for (int w = 0; w < WAYS; ++w) {
            reading *r = &rows[i].way[w];
            measure_in_child(what, o, n, w, r);
            if (r->state == FAILED) return cli_fail(CLI_FAILURE, "N %lld, %s: %s", (long long)n, name_of[w], r->text);
        }
        print_row(what, n, &rows[i]);
        log_row(j, what, n, &rows[i]);
        if (json_failed(j)) return CLI_FAILURE; /* json_close reports it */
    }
    return CLI_OK;
}

static bool draw(const struct options *o, row rows[2][CLI_LIST_MAX], output *to) {
    double x[CLI_LIST_MAX], predicted[WAYS][CLI_LIST_MAX], counted[2][WAYS][CLI_LIST_MAX];
    for (int i = 0; i < o->rows.count; ++i) {
        x[i] = (double)o->rows.at[i];
        for (int w = 0; w < WAYS; ++w) {
            predicted[w][i] = rows[ONE_LAYER][i].way[w].predicted;
            for (int k = 0; k < 2; ++k) {
                const reading *r = &rows[k][i].way[w];
                counted[k][w][i] = r->state == MEASURED ? r->counted : NAN;
            }
        }
    }
    const int n = o->rows.count;
    const plot_series series[] = {
        {"layer, N \u00d7 N stored", x, predicted[STORED], n, PLOT_DASHED, 1},
        {NULL, x, counted[ONE_LAYER][STORED], n, PLOT_POINTS, 1},
        {"layer, flash", x, predicted[FLASH], n, PLOT_DASHED, 0},
        {NULL, x, counted[ONE_LAYER][FLASH], n, PLOT_POINTS, 0},
        {"model, N \u00d7 N stored", x, counted[WHOLE_MODEL][STORED], n, PLOT_MARKED, 4},
        {"model, flash", x, counted[WHOLE_MODEL][FLASH], n, PLOT_MARKED, 2},
    };
    char subtitle[200], more[48] = "";
    if (o->layers > 0) snprintf(more, sizeof more, ", and a model of %lld", (long long)o->layers);
    snprintf(subtitle, sizeof subtitle,
             "Points measured, dashes predicted: one attention layer%s; B %lld, H %lld, d %lld, %s, %s", more,
             (long long)o->batch, (long long)o->heads, (long long)o->head_dim, dtype_names[o->dtype],
             o->mask == 0 ? "causal" : "full");
    const plot p = {.title = "Peak memory of a training step",
                    .subtitle = subtitle,
                    .x = {"sequence length N", PLOT_LOG2, PLOT_NUMBER, 0, 0},
                    .y = {"peak memory", PLOT_LOG2, PLOT_BYTES, 0, 0},
                    .series = series,
                    .n_series = o->layers > 0 ? 6 : 4};
    return plot_write(&p, to);
}

static int run(const void *options, int n_operands, char *const *operands) {
    (void)n_operands, (void)operands;
    const struct options *o = options;
    if (o->head_dim % 2) return cli_fail(CLI_USAGE, "--d: %lld is odd", (long long)o->head_dim);
    if (o->layers > 0 && model_dtype(o) == FATTN_BF16 && o->device != ON_CUDA)
        return cli_fail(CLI_USAGE, "--dtype bf16: the memory of a whole model is predicted for a GPU only: "
                                   "add --device cuda, or leave the model out with --layers 0");
    if (!output_differ(o->json, o->plot)) return CLI_USAGE;
    static row rows[2][CLI_LIST_MAX];
    output picture;
    json j;
    if (!output_open(&picture, o->plot, OUTPUT_LATER)) return CLI_FAILURE;
    if (!json_open(&j, o->json, false)) {
        output_close(&picture);
        return CLI_FAILURE;
    }
    printf("Peak memory of one training step. B %lld, %lld heads, d %lld, %s mask.\n"
           "predicted: by fattn_attention_query. counted: the context's allocator. process: the\n"
           "high-water mark of the resident set of a process of its own, above its start.\n",
           (long long)o->batch, (long long)o->heads, (long long)o->head_dim, o->mask == 0 ? "causal" : "full");
    printf("\none attention layer, %s, forward and backward; N x N : L is the ratio of what attention\n"
           "alone keeps for backward\n\n",
           dtype_names[o->dtype]);
    int code = run_table(ONE_LAYER, o, rows[ONE_LAYER], &j);
    if (code == CLI_OK && o->layers > 0) {
        printf("\nwhole model, %s: %lld layers, %lld channels, %lld symbols; parameters, gradients, "
               "AdamW,\nactivations\n\n",
               fattn_dtype_name(model_dtype(o)), (long long)o->layers, (long long)(o->heads * o->head_dim),
               (long long)o->vocab);
        code = run_table(WHOLE_MODEL, o, rows[WHOLE_MODEL], &j);
    }
    if (!json_close(&j)) code = CLI_FAILURE;
    if (code == CLI_OK && o->plot) {
        if (!draw(o, rows, &picture)) return CLI_FAILURE;
        if (!output_is_stdout(picture.path)) printf("\npicture: %s\n", o->plot);
    }
    output_close(&picture);
    return code;
}

const cli_command cmd_memory = {
    .name = "memory",
    .summary = "Compare the peak memory of a training step: N x N stored against flash",
    .details = "Each size runs in a process of its own. A row that is predicted not to fit is not started\n"
               "(\"no fit\"); one that runs out of memory says \"no memory\".",
    .options = table,
    .defaults = &defaults,
    .size = sizeof defaults,
    .run = run,
};
