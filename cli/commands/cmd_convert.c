/* fattn convert: GPT-2 between checkpoints of `fattn train` and files of llm.c. */
#include "cli/base/cli.h"
#include "cli/base/device.h"
#include "cli/commands/gpt2_run.h"
#include "cli/train/durable.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

typedef struct conversion {
    train_options o;
    const char *from, *to;
    fattn_ctx *ctx;
    task *task;
    trainer r;
    char why[DEVICE_MESSAGE];
} conversion;

static bool ends_with(const char *text, const char *end) {
    const size_t n = strlen(text), m = strlen(end);
    return n >= m && strcmp(text + n - m, end) == 0;
}

/* A trainer on the CPU, in F32 whatever the run computes in: values are masters. */
static int make_trainer(conversion *c) {
    const int code = device_open(ON_CPU, 0, c->o.threads, c->why, &c->ctx);
    if (code) return code;
    model_config shape = train_model_config(&c->o, c->task->vocab);
    shape.dtype = FATTN_F32;
    trainer_config config = train_trainer_config(&c->o);
    config.batch = 1;                  /* of memory; the file has the run's */
    config.tree = config.zero = false; /* nothing is trained */
    config.rounding = ROUNDING_MASTERS;
    const fattn_status status = trainer_create(&c->r, c->ctx, c->task, &shape, &config);
    c->r.config.batch = c->o.batch;
    return status ? cli_status(c->ctx, status, "model") : CLI_OK;
}

static void free_trainer(conversion *c) {
    trainer_destroy(&c->r);
    if (c->task) c->task->close(c->task);
    fattn_ctx_destroy(c->ctx);
}

/* Splits TO into a folder and a name. */
static void split(const char *path, char folder[LLMC_PATH], const char **name) {
    const char *const slash = strrchr(path, '/');
    snprintf(folder, LLMC_PATH, "%.*s", slash ? (int)(slash - path + (slash == path)) : 1, slash ? path : ".");
    *name = slash ? slash + 1 : path;
}

/* Whether a file that would be lost is there. */
static bool may_write(const conversion *c, const char *path) {
    struct stat status;
    if (c->o.overwrite || lstat(path, &status) != 0) return true;
    cli_fail(CLI_FAILURE, "%s is there: name another one, or replace it with --overwrite", path);
    return false;
}

/* ---- to llm.c ---- */

static int write_model(const conversion *c, bool bf16) {
    char folder[LLMC_PATH];
    const char *name;
    split(c->to, folder, &name);
    if (!may_write(c, c->to) || !llmc_model_write(folder, name, &c->r, bf16)) return CLI_FAILURE;
    printf("%s: model of step %lld, %s, %lld parameters\n", c->to, (long long)c->r.step, bf16 ? "bf16" : "f32",
           (long long)model_size(c->r.model));
    return CLI_OK;
}

static int write_run(conversion *c, bool bf16) {
    loader *const l = c->o.task == TASK_SHARDS ? shards_loader(c->task) : NULL;
    char done[LLMC_PATH + 64];
    if (l) loader_go(l, c->r.cursor / c->o.batch);
    const long long step = (long long)c->r.step, newest = (long long)llmc_run_newest(c->to);
    if (newest > step && !c->o.overwrite)
        return cli_fail(CLI_FAILURE,
                        "%s has DONE_%08lld, and readers would take that instead of step %lld: name another folder, or "
                        "remove later steps with --overwrite",
                        c->to, newest, step);
    snprintf(done, sizeof done, "%s/DONE_%08lld", c->to, step);
    if (!may_write(c, done) || !llmc_run_write(c->to, &c->r, bf16, l) || !llmc_run_remove_after(c->to, step))
        return CLI_FAILURE;
    printf("%s: model (%s), state%s and DONE of step %lld\n", c->to, bf16 ? "bf16" : "f32",
           l ? "" : " (at the start of its data: the run had no shards)", step);
    return CLI_OK;
}

static int from_checkpoint(conversion *c, checkpoint *from) {
    const bool model_only = ends_with(c->to, ".bin");
    c->o.device = ON_CUDA; /* for the checks of options: bf16 is fine here */
    int code = train_options_complete(&c->o, from);
    if (code) return code;
    if (c->o.arch != ARCH_GPT2)
        return cli_fail(CLI_FAILURE, "%s is a model of --arch fattn: llm.c has GPT-2 only", checkpoint_path(from));
    /* The place among shards needs the files, the weights do not. A text's symbols are bytes. */
    const int64_t symbols = c->o.task == TASK_TEXT ? TEXT_SYMBOLS : c->o.vocab;
    const bool alone = c->o.task == TASK_TEXT || (c->o.task == TASK_SHARDS && model_only);
    c->task = alone ? tokens_open(0, c->o.context, symbols) : open_task(&c->o);
    if (!c->task || (alone && !checkpoint_fingerprint(from, &c->task->fingerprint))) return CLI_FAILURE;
    code = make_trainer(c);
    if (code) return code;
    if (!checkpoint_restore(from, &c->r)) return CLI_FAILURE;
    return model_only ? write_model(c, c->o.dtype == 1) : write_run(c, c->o.dtype == 1);
}

/* ---- from llm.c ---- */

/* Removes what checkpoint_save has left beside the new checkpoint: the latest earlier one, of another run. */
static bool remove_earlier(const char *folder) {
    char names[CHECKPOINT_NAMES], path[LLMC_PATH];
    const char *const earlier = checkpoint_after(folder, -1, names) > 1 ? strchr(names, ' ') : NULL; /* newest first */
    if (!earlier || snprintf(path, sizeof path, "%s/%s", folder, earlier + 1) >= LLMC_PATH || unlink(path) == 0)
        return true;
    cli_fail(CLI_FAILURE, "cannot remove %s: %s", path, strerror(errno));
    return false;
}

static int write_checkpoint(const conversion *c) {
    char names[CHECKPOINT_NAMES];
    durable_lock lock = {0};
    if (!durable_hold(&lock, c->to)) return CLI_FAILURE;
    int code = CLI_OK;
    if (!c->o.overwrite && checkpoint_after(c->to, -1, names) > 0)
        code = cli_fail(CLI_FAILURE, "%s has checkpoints: %s; remove them with --overwrite, or name another folder",
                        c->to, names);
    if (!code && (!checkpoint_save(c->to, train_table, &c->o, train_not_stored, &c->r) || !remove_earlier(c->to)))
        code = CLI_FAILURE;
    durable_release(&lock);
    if (!code)
        printf("%s: checkpoint of step %lld, %lld parameters; go on with fattn train --resume %s%s\n", c->to,
               (long long)c->r.step, (long long)model_size(c->r.model), c->to,
               c->o.task == TASK_TOKENS ? " (on random tokens: no --data was given)" : "");
    return code;
}

static int from_llmc(conversion *c) {
    gpt2_start start;
    const bool model_only = ends_with(c->to, ".bin");
    if (!gpt2_start_open(&start, c->from)) return CLI_FAILURE;
    const int asked = c->o.dtype;
    c->o.device = ON_CUDA;
    int code = gpt2_start_options(&start, c->from, &c->o);
    if (c->o.task == -1 && !c->o.data) c->o.task = TASK_TOKENS;
    if (c->o.dtype == -1) c->o.dtype = start.sizes.bf16;
    if (!code) code = train_options_complete(&c->o, NULL);
    if (code) return code;
    if (model_only) start.state[0] = 0;
    if (model_only && asked == -1) c->o.dtype = !start.sizes.bf16; /* what else would be converted */
    c->task = open_task(&c->o);
    if (!c->task) return CLI_FAILURE;
    code = make_trainer(c);
    if (code) return code;
    if (!gpt2_start_load(&start, &c->r, c->o.task == TASK_SHARDS)) return CLI_FAILURE;
    return model_only ? write_model(c, c->o.dtype == 1) : write_checkpoint(c);
}

static bool is_checkpoint(const char *path) {
    char names[CHECKPOINT_NAMES];
    struct stat status;
    if (stat(path, &status) == 0 && S_ISDIR(status.st_mode)) return checkpoint_after(path, -1, names) > 0;
    return ends_with(path, ".h5");
}

/* An option that was given and that says nothing about a conversion; NULL: none. */
static const char *refused(const train_options *o) {
    const train_options *const unset = &train_unset;
    return o->init                    ? "init"
           : o->resume                ? "resume"
           : o->checkpoint            ? "checkpoint"
           : o->ranks != unset->ranks ? "ranks"
           : o->gpus != unset->gpus   ? "gpus"
           : o->zero                  ? "zero"
                                      : NULL;
}

static int run(const void *options, int n_operands, char *const *operands) {
    conversion c = {.o = *(const train_options *)options};
    const char *const name = refused(&c.o);
    if (name) return cli_fail(CLI_USAGE, "--%s is for fattn train, not for convert", name);
    if (n_operands != 2) return cli_fail(CLI_USAGE, "two operands are needed: FROM TO");
    c.from = operands[0], c.to = operands[1];
    const bool stored = is_checkpoint(c.from);
    if ((stored || ends_with(c.to, ".bin")) && c.o.dtype == IN_F16)
        return cli_fail(CLI_USAGE, "--dtype f16: llm.c's models are f32 or bf16");
    int code;
    if (stored) {
        checkpoint *const from = checkpoint_open(c.from);
        code = from ? from_checkpoint(&c, from) : CLI_FAILURE;
        checkpoint_close(from);
    } else {
        code = from_llmc(&c);
    }
    free_trainer(&c);
    return code;
}

const cli_command cmd_convert = {
    .name = "convert",
    .operands = "FROM TO",
    .summary = "Convert GPT-2 between checkpoints of fattn train and files of llm.c",
    .details = "FROM                              TO\n"
               "checkpoint (folder, step-*.h5)    NAME.bin: the model as llm.c's model file\n"
               "checkpoint                        folder: llm.c's model, state and DONE, to resume with -y 1\n"
               "llm.c's model file                NAME.bin: the same in the other dtype, or in --dtype\n"
               "llm.c's model file or folder      folder: a checkpoint, for fattn train --resume\n"
               "\n"
               "Values are F32 (a bf16 run's masters); bf16 rounds them to nearest. A checkpoint\n"
               "gets its options from here: those of fattn train, except --init, --resume,\n"
               "--checkpoint, --ranks, --gpus and --zero. --data must name the files that a\n"
               "folder's run reads, with its --batch and --context; without it the checkpoint's\n"
               "training goes on with random tokens. What is there is replaced, and later steps\n"
               "in a folder are removed, only with --overwrite.",
    .options = train_table,
    .defaults = &train_unset,
    .size = sizeof train_unset,
    .run = run,
};
