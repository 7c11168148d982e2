/* For test_gpt2_parity.py: what fattn computes of a GPT-2 on one batch.

       gpt2_steps cpu|cuda f32|bf16|f16 MODEL.bin TOKENS.bin B T STEPS BETA2 DECAY CLIP FOLDER

   TOKENS.bin holds B T + 1 tokens. Writes FOLDER/logits and FOLDER/gradients, F32, before the first update: logits
   [B,T,Vp], gradients in the order of model_params, without a loss scale; and FOLDER/model.bin after the last. Prints
   the loss before each update, learning rate 1e-3. Exit code 77: no such device.

       gpt2_steps batches PATTERN B T N

   Prints the tokens of the first N training batches and the token after each, a batch a line. For test_gpt2_llmc.py. */
#include "cli/base/cli.h"
#include "cli/base/device.h"
#include "cli/llmc/model_file.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static fattn_ctx *ctx;
static char why[DEVICE_MESSAGE];

static void must(fattn_status s, const char *what) {
    if (!s) return;
    fprintf(stderr, "%s: %s (%s)\n", what, ctx ? fattn_ctx_error(ctx) : why, fattn_status_name(s));
    exit(s == FATTN_E_UNSUPPORTED ? 77 : 1);
}

static void require(bool ok) {
    if (!ok) exit(1);
}

/* t / scale */
static void append(FILE *f, const fattn_tensor *t, float scale) {
    const size_t n = (size_t)fattn_tensor_numel(t);
    float *const x = malloc(n * sizeof *x);
    require(x != NULL);
    must(device_read(ctx, t, x), "copy");
    for (size_t i = 0; i < n; ++i) x[i] /= scale;
    require(fwrite(x, sizeof *x, n, f) == n);
    free(x);
}

static FILE *file_in(const char *folder, const char *name) {
    char path[4096];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    FILE *const f = fopen(path, "wb");
    require(f != NULL);
    return f;
}

static int print_batches(char **argv) {
    const int64_t B = atoll(argv[3]), T = atoll(argv[4]), n = atoll(argv[5]);
    task *const t = shards_task(argv[2], argv[2], B, T, 1 << 20);
    int32_t *const ids = malloc(2 * (size_t)T * sizeof *ids);
    require(t && ids);
    for (int64_t i = 0; i < n * B; ++i) {
        t->train(t, i, ids, ids + T);
        for (int64_t k = 0; k < T; ++k) printf("%d ", ids[k]);
        if (i % B == B - 1) printf("%d\n", ids[2 * T - 1]);
    }
    require(!t->error[0]);
    free(ids);
    t->close(t);
    return 0;
}

int main(int argc, char **argv) {
    if (argc == 6 && strcmp(argv[1], "batches") == 0) return print_batches(argv);
    if (argc != 12) return 2;
    const int device = strcmp(argv[1], "cuda") == 0 ? ON_CUDA : ON_CPU;
    const char *const folder = argv[11];
    llmc_model m;
    require(llmc_model_sizes(argv[3], &m));
    must(device_create(device, FATTN_CTX_DETERMINISTIC, 0, why, &ctx), "context");
    const int64_t B = atoll(argv[5]), T = atoll(argv[6]), steps = atoll(argv[7]);
    task *const t = shards_task(argv[4], argv[4], B, T, m.vocab);
    require(t != NULL);
    const model_config shape = {.arch = ARCH_GPT2,
                                .vocab = m.vocab,
                                .context = T,
                                .positions = m.positions,
                                .channels = m.channels,
                                .layers = (int)m.layers,
                                .heads = (int)m.heads,
                                .kv_heads = (int)m.heads,
                                .mlp_ratio = 4,
                                .dtype = strcmp(argv[2], "bf16") == 0  ? FATTN_BF16
                                         : strcmp(argv[2], "f16") == 0 ? FATTN_F16
                                                                       : FATTN_F32};
    const trainer_config config = {.batch = B,
                                   .steps = steps,
                                   .lr = 1e-3,
                                   .schedule = SCHEDULE_CONSTANT,
                                   .beta2 = atof(argv[8]),
                                   .weight_decay = atof(argv[9]),
                                   .clip = atof(argv[10])};
    trainer r;
    must(trainer_create(&r, ctx, t, &shape, &config), "model");
    require(llmc_model_read(argv[3], &r));

    evaluation e;
    fattn_tensor logits;
    must(trainer_evaluate(&r, B, &e), "evaluation"); /* sends the batch to the device */
    fattn_tape_reset(r.tape);
    must(fattn_tape_value(r.tape, model_logits(r.model, r.tape, &r.feed.ids), &logits), "logits");
    FILE *f = file_in(folder, "logits");
    append(f, &logits, 1);
    require(fclose(f) == 0);
    fattn_tape_reset(r.tape);
    const fattn_var loss = model_loss(r.model, r.tape, &r.feed.ids, &r.feed.targets, NULL);
    must(fattn_tape_backward_from(r.tape, loss, &r.scale), "backward");
    f = file_in(folder, "gradients");
    int n;
    fattn_param *const *const p = model_params(r.model, &n);
    for (int i = 0; i < n; ++i) {
        append(f, &p[i]->grad, r.scaling.scale);
        must(fattn_tensor_normal(ctx, &p[i]->grad, 0, 0, (fattn_rng){0}), "zeros");
    }
    require(fclose(f) == 0);
    for (int64_t s = 0; s < steps; ++s) {
        must(trainer_step(&r), "step");
        printf("%.9g\n", r.history.loss[s]);
    }
    require(llmc_model_write(folder, "model.bin", &r, false));
    trainer_destroy(&r);
    t->close(t);
    fattn_ctx_destroy(ctx);
    return 0;
}
