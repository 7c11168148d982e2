#include "cli/train/train_options.h"

#include "cli/base/device.h"
#include "cli/output/files.h"

#include <math.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define FIELD(name) offsetof(train_options, name)
static const double ANY = 9e15;

const cli_option train_table[] = {
    {"preset", CLI_CHOICE, FIELD(preset), "P", 0, 0, "gpt2-124m|gpt2-350m|gpt2-774m|gpt2-1558m",
     "GPT-2 of this size in bf16 (--device cuda), on shards (--data) or random tokens; other options override it"},
    {"task", CLI_CHOICE, FIELD(task), "TASK", 0, 0, "recall|text|tokens|shards", "what to learn"},
    {"arch", CLI_CHOICE, FIELD(arch), "A", 0, 0, "fattn|gpt2",
     "this program's own transformer, or GPT-2 as PyTorch and llm.c train it"},
    {"data", CLI_TEXT, FIELD(data), "PATTERN", 0, 0, NULL, "files of tokens to train on (fattn tokens, llm.c)"},
    {"val", CLI_TEXT, FIELD(val), "PATTERN", 0, 0, NULL, "files of held-out tokens"},
    {"hellaswag", CLI_TEXT, FIELD(hellaswag), "FILE", 0, 0, NULL,
     "examples (llm.c's format) that are asked with every held-out evaluation but the first"},
    {"examples", CLI_INT, FIELD(examples), "N", 1, ANY, NULL, "of them at most"},
    {"tokenizer", CLI_TEXT, FIELD(tokenizer), "FILE", 0, 0, NULL,
     "of the shards (llm.c's format): their vocabulary, and the sample's text"},
    {"init", CLI_TEXT, FIELD(init), "PATH", 0, 0, NULL,
     "begin with llm.c's model file, or go on with its run: the newest DONE in a folder"},
    {"text", CLI_TEXT, FIELD(text), "FILE", 0, 0, NULL, "text to learn: a file, or a folder of fortune files"},
    {"vocab", CLI_INT, FIELD(vocab), "V", 0, 1 << 20, NULL,
     "tokens there are, at least 2; of random tokens and of shards"},
    {"layers", CLI_INT, FIELD(layers), "N", 1, 1000, NULL, "transformer blocks"},
    {"channels", CLI_INT, FIELD(channels), "N", 2, 65536, NULL, "width of the residual stream"},
    {"heads", CLI_INT, FIELD(heads), "N", 1, 1024, NULL, "query heads; must divide the channels"},
    {"kv-heads", CLI_INT, FIELD(kv_heads), "N", 1, 1024, NULL, "key and value heads; must divide the heads"},
    {"mlp", CLI_INT, FIELD(mlp), "N", 1, 64, NULL, "hidden width of the MLP in channels"},
    {"context", CLI_INT, FIELD(context), "N", 8, 1 << 20, NULL, "tokens of a sequence"},
    {"positions", CLI_INT, FIELD(positions), "N", 0, 1 << 20, NULL,
     "learned positions of gpt2, at least the context; 0 = the context"},
    {"batch", CLI_INT, FIELD(batch), "N", 1, 65536, NULL, "sequences at a time, of a rank"},
    {"total-batch", CLI_INT, FIELD(total_batch), "N", 0, ANY, NULL,
     "tokens of a step, over all ranks, whose gradients are added up; 0 = batch x context x ranks"},
    {"steps", CLI_INT, FIELD(steps), "N", 0, ANY, NULL, "stop after N steps; 0 = no limit"},
    {"seconds", CLI_REAL, FIELD(seconds), "S", 0, ANY, NULL,
     "stop after S seconds, of all parts of a resumed run; 0 = no limit"},
    {"lr", CLI_REAL, FIELD(lr), "LR", 0, 10, NULL, "peak learning rate"},
    {"schedule", CLI_CHOICE, FIELD(schedule), "S", 0, 0, "budget|cosine|linear|constant|wsd",
     "of the learning rate: a cosine to a tenth over steps or seconds, or one of llm.c's over steps"},
    {"final-lr", CLI_REAL, FIELD(final_lr), "Q", 0, 1, NULL, "last learning rate of llm.c's schedules over the peak"},
    {"warmup", CLI_INT, FIELD(warmup), "N", 0, ANY, NULL, "steps until the peak learning rate"},
    {"weight-decay", CLI_REAL, FIELD(weight_decay), "W", 0, 10, NULL, "AdamW's, of matrices"},
    {"beta2", CLI_REAL, FIELD(beta2), "B", 1e-6, 0.999999, NULL, "AdamW's, of the second moment"},
    {"clip", CLI_REAL, FIELD(clip), "G", 0, ANY, NULL, "largest norm of a gradient; 0 = no limit"},
    {"dropout", CLI_REAL, FIELD(dropout), "P", 0, 0.9, NULL, "of attention weights"},
    {"seed", CLI_INT, FIELD(seed), "N", 0, ANY, NULL, "of weights, data, dropout and the sample"},
    {"algorithm", CLI_CHOICE, FIELD(algorithm), "A", 0, 0, "flash|standard",
     "attention that keeps O and L, or the one that stores N x N"},
    {"deterministic", CLI_FLAG, FIELD(deterministic), NULL, 0, 0, NULL,
     "bitwise repeatable gradients, or an error (a CPU's always are)"},
    {"device", CLI_CHOICE, FIELD(device), "D", 0, 0, "cpu|cuda", "where to compute; a run may be resumed on another"},
    {"dtype", CLI_CHOICE, FIELD(dtype), "T", 0, 0, "f32|bf16|f16",
     "of weights and activations; 16 bits have F32 masters and gradients, and an exact delta in "
     "attention (FATTN_EXACT_DELTA; not with standard)"},
    {"tf32", CLI_FLAG, FIELD(tf32), NULL, 0, 0, NULL,
     "of f32: a GPU rounds operands of products to TF32, 10 bits of fraction (FATTN_CTX_TF32); a CPU does not"},
    {"rounding", CLI_CHOICE, FIELD(rounding), "R", 0, 0, "masters|stochastic|nearest|stochastic-masters",
     "of updated 16-bit weights: F32 masters to nearest; or without masters, 4 bytes less per parameter, "
     "stochastically, so that small updates add up, or to nearest, which loses them; or F32 masters, "
     "stochastically, as llm.c does; masters unless given"},
    {"fp8", CLI_FLAG, FIELD(fp8), NULL, 0, 0, NULL,
     "in training attention multiplies 8-bit copies of queries, keys and values in forward (FATTN_FP8, without an "
     "exact delta): on a CPU to see what that does, on a Hopper GPU for speed; not with standard or dropout"},
    {"fp8-renew", CLI_FLAG, FIELD(fp8_renew), NULL, 0, 0, NULL,
     "with --fp8: backward computes attention again in the dtype first, so that its gradients are exact for it "
     "(FATTN_FP8_RENEW); costs a forward pass of the dtype"},
    {"fp8-int8", CLI_FLAG, FIELD(fp8_int8), NULL, 0, 0, NULL,
     "with --fp8: copies of queries and keys are integers, for scores that are three times as exact "
     "(FATTN_FP8_INT8)"},
    {"loss-scale", CLI_TEXT, FIELD(loss_scale), "S", 0, 0, NULL,
     "of f16: a fixed number, or auto: 65536 at first, half after gradients that overflow, twice after 2000 "
     "steps that do not; auto unless given"},
    {"no-graph", CLI_FLAG, FIELD(no_graph), NULL, 0, 0, NULL,
     "op by op: else a GPU's passes are one CUDA graph, launched again and again, with the same results (one rank; not "
     "where --deterministic adds up several passes)"},
    {"threads", CLI_INT, FIELD(threads), "N", 0, 1024, NULL, "0 = one per processor; ranks on the CPU divide them"},
    {"ranks", CLI_INT, FIELD(ranks), "N", 1, RANKS_MOST, NULL,
     "models that share each batch, threads of this process, on GPUs in turn; 1 unless given"},
    {"gpus", CLI_INT, FIELD(gpus), "N", 1, RANKS_MOST, NULL, "as many ranks, each on a GPU of its own (--device cuda)"},
    {"zero", CLI_FLAG, FIELD(zero), NULL, 0, 0, NULL, "ranks divide AdamW's moments and masters (ZeRO, stage 1)"},
    {"time-limit", CLI_REAL, FIELD(time_limit), "S", 0.1, 1e6, NULL,
     "seconds that a rank waits for another, which may be saving a checkpoint; 600 unless given"},
    {"target", CLI_REAL, FIELD(target), "A", 0, 1, NULL,
     "stop when this share of held-out answers is right; 0 = never"},
    {"eval-every", CLI_INT, FIELD(eval_every), "N", 1, ANY, NULL, "steps between held-out evaluations"},
    {"eval-sequences", CLI_INT, FIELD(eval_sequences), "N", 1, ANY, NULL,
     "held-out sequences of each; the last one uses all"},
    {"checkpoint", CLI_TEXT, FIELD(checkpoint), "DIR", 0, 0, NULL,
     "folder for checkpoints, the last two are kept; - = none"},
    {"checkpoint-every", CLI_INT, FIELD(checkpoint_every), "N", 1, ANY, NULL, "steps between checkpoints"},
    {"overwrite", CLI_FLAG, FIELD(overwrite), NULL, 0, 0, NULL,
     "remove checkpoints of other runs, or of later steps, in that folder; cut its log"},
    {"resume", CLI_TEXT, FIELD(resume), "DIR", 0, 0, NULL, "resume from the newest checkpoint there, or from a file"},
    {"json", CLI_TEXT, FIELD(json), "FILE", 0, 0, NULL, "log as JSON lines; - = standard output"},
    {"plot", CLI_TEXT, FIELD(plot), "FILE", 0, 0, NULL, "loss curve as SVG; - = standard output"},
    {"sample", CLI_INT, FIELD(sample), "N", 0, 1 << 20, NULL, "bytes, or tokens, to write at the end"},
    {"prompt", CLI_TEXT, FIELD(prompt), "TEXT", 0, 0, NULL, "text that the sample continues"},
    {"temperature", CLI_REAL, FIELD(temperature), "T", 0, 100, NULL, "of the sample; 0 = greedy"},
    {"top-k", CLI_INT, FIELD(top_k), "K", 0, ANY, NULL, "choose among the K likeliest symbols; 0 = all"},
    {"top-p", CLI_REAL, FIELD(top_p), "P", 1e-6, 1, NULL,
     "of these among the likeliest whose probabilities sum to P; 1 = all"},
    {NULL}};

const char *const train_roundings[] = {"masters", "stochastic", "nearest", "stochastic-masters"};
enum { UNSET = -1, GPT2_VOCAB = 50257, LOSS_SCALE_LOG2 = 126 };
const train_options train_unset = {.preset = UNSET,
                                   .task = UNSET,
                                   .arch = UNSET,
                                   .schedule = UNSET,
                                   .positions = UNSET,
                                   .examples = UNSET,
                                   .total_batch = UNSET,
                                   .final_lr = UNSET,
                                   .beta2 = UNSET,
                                   .algorithm = UNSET,
                                   .device = UNSET,
                                   .dtype = UNSET,
                                   .rounding = UNSET,
                                   .vocab = UNSET,
                                   .layers = UNSET,
                                   .channels = UNSET,
                                   .heads = UNSET,
                                   .kv_heads = UNSET,
                                   .mlp = UNSET,
                                   .context = UNSET,
                                   .batch = UNSET,
                                   .steps = UNSET,
                                   .warmup = UNSET,
                                   .seed = UNSET,
                                   .threads = UNSET,
                                   .ranks = UNSET,
                                   .gpus = UNSET,
                                   .time_limit = UNSET,
                                   .eval_every = UNSET,
                                   .eval_sequences = UNSET,
                                   .checkpoint_every = UNSET,
                                   .sample = UNSET,
                                   .top_k = UNSET,
                                   .top_p = UNSET,
                                   .seconds = UNSET,
                                   .lr = UNSET,
                                   .weight_decay = UNSET,
                                   .clip = UNSET,
                                   .dropout = UNSET,
                                   .target = UNSET,
                                   .temperature = UNSET};

static const train_options defaults[] = {[TASK_RECALL] = {.task = TASK_RECALL,
                                                          .examples = 1 << 20,
                                                          .beta2 = 0.99,
                                                          .layers = 2,
                                                          .channels = 64,
                                                          .heads = 2,
                                                          .kv_heads = 2,
                                                          .mlp = 2,
                                                          .context = 64,
                                                          .batch = 32,
                                                          .steps = 4000,
                                                          .warmup = 50,
                                                          .seed = 1,
                                                          .eval_every = 50,
                                                          .eval_sequences = 128,
                                                          .checkpoint_every = 200,
                                                          .seconds = 0,
                                                          .lr = 3e-3,
                                                          .weight_decay = 0.01,
                                                          .clip = 1,
                                                          .target = 0.995,
                                                          .checkpoint = "fattn-recall",
                                                          .prompt = "-",
                                                          .temperature = 1,
                                                          .top_p = 1},
                                         [TASK_TEXT] = {.task = TASK_TEXT,
                                                        .examples = 1 << 20,
                                                        .beta2 = 0.99,
                                                        .layers = 4,
                                                        .channels = 128,
                                                        .heads = 4,
                                                        .kv_heads = 4,
                                                        .mlp = 4,
                                                        .context = 256,
                                                        .batch = 8,
                                                        .warmup = 50,
                                                        .seed = 1,
                                                        .eval_every = 50,
                                                        .eval_sequences = 32,
                                                        .checkpoint_every = 200,
                                                        .sample = 400,
                                                        .seconds = 120,
                                                        .lr = 2e-3,
                                                        .weight_decay = 0.1,
                                                        .clip = 1,
                                                        .temperature = 0.8,
                                                        .top_p = 1,
                                                        .text = "/usr/share/games/fortunes",
                                                        .checkpoint = "fattn-text",
                                                        .prompt = "\n"},
                                         [TASK_TOKENS] = {.task = TASK_TOKENS,
                                                          .examples = 1 << 20,
                                                          .beta2 = 0.99,
                                                          .vocab = 50304,
                                                          .layers = 12,
                                                          .channels = 768,
                                                          .heads = 12,
                                                          .kv_heads = 12,
                                                          .mlp = 4,
                                                          .context = 1024,
                                                          .batch = 64,
                                                          .warmup = 50,
                                                          .seed = 1,
                                                          .steps = 30,
                                                          .eval_every = 1000000,
                                                          .eval_sequences = 1,
                                                          .lr = 6e-4,
                                                          .checkpoint_every = 1000000,
                                                          .weight_decay = 0.1,
                                                          .clip = 1,
                                                          .checkpoint = "-",
                                                          .prompt = "-",
                                                          .temperature = 1,
                                                          .top_p = 1},
                                         [TASK_SHARDS] = {.task = TASK_SHARDS,
                                                          .examples = 1 << 20,
                                                          .beta2 = 0.99,
                                                          .vocab = GPT2_VOCAB,
                                                          .layers = 12,
                                                          .channels = 768,
                                                          .heads = 12,
                                                          .kv_heads = 12,
                                                          .mlp = 4,
                                                          .context = 1024,
                                                          .batch = 4,
                                                          .seed = 1,
                                                          .eval_every = 250,
                                                          .eval_sequences = 80,
                                                          .checkpoint_every = 1000,
                                                          .lr = 6e-4,
                                                          .weight_decay = 0.1,
                                                          .clip = 1,
                                                          .checkpoint = "fattn-shards",
                                                          .temperature = 1,
                                                          .top_p = 1}};

/* The values of a preset; the other defaults come from its task. */
static train_options preset_of(int preset) {
    static const struct {
        int64_t layers, channels, heads, batch;
    } sizes[] = {{12, 768, 12, 64}, {24, 1024, 16, 32}, {36, 1280, 20, 16}, {48, 1600, 25, 8}};
    train_options o = train_unset;
    o.arch = ARCH_GPT2, o.dtype = IN_BF16, o.context = 1024;
    o.layers = sizes[preset].layers, o.channels = sizes[preset].channels;
    o.heads = sizes[preset].heads, o.batch = sizes[preset].batch;
    return o;
}

/* What GPT-2 and the tasks of tokens leave open after the user and the preset. */
static void take_gpt2(train_options *o) {
    const bool tokens = o->task == TASK_TOKENS || o->task == TASK_SHARDS;
    if (o->vocab == UNSET && tokens) o->vocab = GPT2_VOCAB;
    if (o->seed == UNSET) o->seed = 42;
    if (o->beta2 == UNSET) o->beta2 = 0.95;
    /* A text's budget is time: llm.c's schedules need steps. */
    const bool steps = o->steps > 0 || (o->steps == UNSET && o->seconds == UNSET && o->task != TASK_TEXT);
    if (o->schedule == UNSET && steps) o->schedule = SCHEDULE_COSINE;
    if (o->mlp == UNSET) o->mlp = 4;
}

const char train_details[] = "recall: key-value pairs, then the keys again: the model must answer with the\n"
                             "values. It stops when held-out answers are right, and fails if they never are.\n"
                             "text: a model of a text's bytes, Debian's fortunes by default, in any encoding;\n"
                             "about a tenth of the records is held out.\n"
                             "tokens: random tokens, to measure tokens/s and memory of a model of any size.\n"
                             "shards: files of tokens as fattn tokens and llm.c write them, in llm.c's order;\n"
                             "one epoch by default, and --arch gpt2.\n"
                             "\n"
                             "Defaults, none of which is shown below:\n"
                             "          layers channels heads context batch   lr  budget      checkpoints\n"
                             "  recall       2       64     2      64    32 3e-3  4000 steps  fattn-recall\n"
                             "  text         4      128     4     256     8 2e-3  120 s       fattn-text\n"
                             "  tokens      12      768    12    1024    64 6e-4  30 steps    none\n"
                             "  shards      12      768    12    1024     4 6e-4  one epoch   fattn-shards\n"
                             "          warmup weight-decay mlp  eval-every -sequences checkpoint-every sample\n"
                             "  recall      50         0.01   2          50        128              200      0\n"
                             "  text        50         0.1    4          50         32              200    400\n"
                             "  tokens      50         0.1    4     1000000          1          1000000      0\n"
                             "  shards       0         0.1    4         250         80             1000      0\n"
                             "of all: clip 1, dropout 0, beta2 0.99, seed 1, temperature 1 (text 0.8), top-k 0,\n"
                             "top-p 1, schedule budget, target 0 (recall 0.995); vocab of tokens 50304;\n"
                             "and with --arch gpt2: vocabulary 50257 (tokens, shards), seed 42, beta2 0.95,\n"
                             "--schedule cosine down to --final-lr 0 where the budget is steps.\n"
                             "\n"
                             "Ctrl-C or SIGTERM ends the run after the current step, with a checkpoint and\n"
                             "exit code 130. --resume continues a run with bitwise the same results as without\n"
                             "the interruption. It takes the options of the checkpoint; those of the model, the\n"
                             "data and the optimiser cannot be changed. Human-readable text goes to standard\n"
                             "error when an output is standard output. Only one run at a time can use a folder.\n"
                             "A run replaces checkpoints of another run, or later ones than the step that it\n"
                             "resumes from, only with --overwrite. A resumed run cuts its own log back to that\n"
                             "step, but not the log of another run.\n"
                             "\n"
                             "--ranks, --gpus and mpirun -n N fattn train: N models share each batch. --batch\n"
                             "is the sequences of one pass of one of them, --total-batch the tokens of all\n"
                             "passes of a step, which they must divide evenly. With --deterministic the\n"
                             "results are bitwise those of one rank, if each rank has one, two, four ...\n"
                             "passes. A run may be resumed on any number of them, with --zero or without.\n"
                             "mpirun gives each process a GPU of its own (--device cuda). Rank 0 does all that\n"
                             "is not training; one that fails ends all. mpirun kills its processes a second\n"
                             "after Ctrl-C: with longer steps, mpirun --mca odls_base_sigkill_timeout 60 lets\n"
                             "them save, or, as with Open MPI 5 in any case, SIGTERM to one of them.";

const char *const train_not_stored[] = {"preset", "resume", "overwrite",  "device",   "init", "ranks",
                                        "gpus",   "zero",   "time-limit", "no-graph", NULL};

/* Options that a resumed run must not change. The path of the text may differ: its fingerprint is
   compared. */
static const char *const fixed[] = {"vocab",     "task",    "arch",         "layers", "channels", "heads",
                                    "kv-heads",  "mlp",     "context",      "batch",  "lr",       "warmup",
                                    "positions", "clip",    "total-batch",  "beta2",  "schedule", "final-lr",
                                    "seed",      "dropout", "weight-decay", NULL};

static size_t size_of(const cli_option *o) {
    switch (o->type) {
    case CLI_FLAG: return sizeof(bool);
    case CLI_INT: return sizeof(int64_t);
    case CLI_REAL: return sizeof(double);
    case CLI_TEXT: return sizeof(const char *);
    case CLI_CHOICE: return sizeof(int);
    case CLI_INTS: return sizeof(cli_list);
    }
    return 0;
}

static bool contains(const char *const *names, const char *name) {
    while (*names && strcmp(*names, name) != 0) ++names;
    return *names != NULL;
}

/* Options that were not given take the value of `from`; fixed ones that were given must equal it. */
static int take_missing(train_options *o, const train_options *from, bool check) {
    for (const cli_option *p = train_table; p->name; ++p) {
        char *field = (char *)o + p->offset;
        const char *other = (const char *)from + p->offset;
        const char *unset = (const char *)&train_unset + p->offset;
        char given[64], stored[64];
        if (memcmp(field, unset, size_of(p)) == 0)
            memcpy(field, other, size_of(p));
        else if (check && contains(fixed, p->name) && memcmp(field, other, size_of(p)) != 0)
            return cli_fail(CLI_FAILURE, "--%s %s differs from the checkpoint's %s: a resumed run cannot change it",
                            p->name, cli_value_text(p, field, given, sizeof given),
                            cli_value_text(p, other, stored, sizeof stored));
    }
    return CLI_OK;
}

/* *scale of --loss-scale; 0: auto. */
static bool scale_of(const char *text, double *scale) {
    char *end;
    *scale = 0;
    if (!text || strcmp(text, "auto") == 0) return true;
    *scale = strtod(text, &end);
    return *end == 0 && *scale >= ldexp(1, -LOSS_SCALE_LOG2) && *scale <= ldexp(1, LOSS_SCALE_LOG2);
}

/* A step's tokens are passes, which the ranks divide. A resumed run keeps them. */
static int check_passes(const train_options *o, bool resumed) {
    const int64_t pass = o->batch * o->context, unit = pass * o->ranks, fits = o->total_batch / unit * unit;
    char smaller[40] = "";
    if (o->total_batch % pass != 0)
        return cli_fail(CLI_USAGE,
                        "--total-batch %lld is not a multiple of --batch %lld x --context %lld = %lld tokens",
                        (long long)o->total_batch, (long long)o->batch, (long long)o->context, (long long)pass);
    if (o->total_batch == fits) return CLI_OK;
    int64_t ranks = o->ranks;
    while (o->total_batch / pass % ranks != 0) ranks -= 1;
    if (resumed)
        return cli_fail(CLI_USAGE,
                        "a step of this run has %lld passes of --batch %lld x --context %lld, which %lld ranks cannot "
                        "divide: --ranks %lld can",
                        (long long)(o->total_batch / pass), (long long)o->batch, (long long)o->context,
                        (long long)o->ranks, (long long)ranks);
    if (fits > 0) snprintf(smaller, sizeof smaller, "%lld or ", (long long)fits);
    return cli_fail(CLI_USAGE,
                    "a step of --total-batch %lld tokens has %lld passes of --batch %lld x --context %lld, which %lld "
                    "ranks cannot divide: %s%lld tokens would fit",
                    (long long)o->total_batch, (long long)(o->total_batch / pass), (long long)o->batch,
                    (long long)o->context, (long long)o->ranks, smaller, (long long)(fits + unit));
}

static int check_dtype(const train_options *o, bool by_preset) {
    double scale;
    if (by_preset && o->dtype == IN_BF16 && o->device != ON_CUDA)
        return cli_fail(CLI_USAGE,
                        "a preset's bf16 is for a GPU: add --device cuda, or --dtype bf16, f16 or f32 for the CPU");
    if (o->loss_scale && o->dtype != IN_F16)
        return cli_fail(CLI_USAGE,
                        "--loss-scale %s needs --dtype f16: gradients of f32 and bf16 have the range for none",
                        o->loss_scale);
    if (o->rounding != ROUNDING_MASTERS && o->dtype == IN_F32)
        return cli_fail(CLI_USAGE, "--rounding %s is for --dtype bf16 and f16: weights in f32 have no masters",
                        train_roundings[o->rounding]);
    if (o->tf32 && o->dtype != IN_F32) return cli_fail(CLI_USAGE, "--tf32 needs --dtype f32");
    if (o->fp8 && o->algorithm == 1)
        return cli_fail(CLI_USAGE, "--fp8 needs --algorithm flash: standard has no 8-bit copies");
    if (o->fp8 && o->dropout > 0)
        return cli_fail(CLI_USAGE, "--fp8 with --dropout %g: attention on 8-bit copies has no dropout", o->dropout);
    if (o->fp8_renew && !o->fp8) return cli_fail(CLI_USAGE, "--fp8-renew needs --fp8");
    if (o->fp8_int8 && !o->fp8) return cli_fail(CLI_USAGE, "--fp8-int8 needs --fp8");
    if (!scale_of(o->loss_scale, &scale))
        return cli_fail(CLI_USAGE, "--loss-scale %s is neither auto nor a number in 2^-%d to 2^%d", o->loss_scale,
                        LOSS_SCALE_LOG2, LOSS_SCALE_LOG2);
    return CLI_OK;
}

static int check(const train_options *o, bool preset_dtype, bool resumed) {
    const bool shards = o->task == TASK_SHARDS;
    if (shards && !o->data) return cli_fail(CLI_USAGE, "--task shards needs files of tokens: --data PATTERN");
    if (shards && !o->val) return cli_fail(CLI_USAGE, "--task shards needs held-out tokens: --val PATTERN");
    if (!shards && (o->data || o->val))
        return cli_fail(CLI_USAGE, "--%s needs --task shards", o->data ? "data" : "val");
    if (o->task != TASK_TEXT && o->text) return cli_fail(CLI_USAGE, "--text needs --task text");
    if (o->task == TASK_TEXT && !o->text) return cli_fail(CLI_USAGE, "--task text needs a --text");
    if (shards && o->sample > 0 && !o->tokenizer)
        return cli_fail(CLI_USAGE, "--sample needs the tokens' text: --tokenizer FILE");
    if (!shards && o->task != TASK_TEXT && o->sample > 0)
        return cli_fail(CLI_USAGE, "--sample %lld needs --task text or shards", (long long)o->sample);
    if (!shards && o->hellaswag) return cli_fail(CLI_USAGE, "--hellaswag needs --task shards");
    if (!shards && o->tokenizer) return cli_fail(CLI_USAGE, "--tokenizer needs --task shards");
    if (!shards && o->sample > 0 && (!o->prompt || !*o->prompt))
        return cli_fail(CLI_USAGE, "--sample needs a --prompt of at least one byte");
    if (o->task != TASK_TOKENS && !shards && o->vocab)
        return cli_fail(CLI_USAGE, "--vocab needs --task tokens or shards");
    if ((o->task == TASK_TOKENS || shards) && o->vocab < 2)
        return cli_fail(CLI_USAGE, "--vocab %lld: tokens need at least 2", (long long)o->vocab);
    if (o->task == TASK_RECALL && o->context % 4 != 0)
        return cli_fail(CLI_USAGE, "--context %lld: recall needs a multiple of 4", (long long)o->context);
    const int code = check_dtype(o, preset_dtype);
    if (code) return code;
    if (o->arch == ARCH_GPT2) {
        if (o->channels % o->heads != 0)
            return cli_fail(CLI_USAGE, "--channels %lld is not a multiple of --heads %lld", (long long)o->channels,
                            (long long)o->heads);
        if (o->kv_heads != o->heads || o->mlp != 4)
            return cli_fail(CLI_USAGE, "--arch gpt2 has as many --kv-heads as --heads, and --mlp 4; not %lld and %lld",
                            (long long)o->kv_heads, (long long)o->mlp);
        if (o->positions > 0 && o->positions < o->context)
            return cli_fail(CLI_USAGE, "--positions %lld is less than --context %lld", (long long)o->positions,
                            (long long)o->context);
    } else if (o->positions > 0) {
        return cli_fail(CLI_USAGE, "--positions needs --arch gpt2");
    } else if (o->channels % o->heads != 0 || o->channels / o->heads % 2 != 0)
        return cli_fail(CLI_USAGE, "--channels %lld --heads %lld: channels/heads must be an even number",
                        (long long)o->channels, (long long)o->heads);
    if (o->channels / o->heads > 256)
        return cli_fail(CLI_USAGE, "--channels %lld --heads %lld: channels/heads are %lld, 256 are possible",
                        (long long)o->channels, (long long)o->heads, (long long)(o->channels / o->heads));
    if (o->heads % o->kv_heads != 0)
        return cli_fail(CLI_USAGE, "--heads %lld is not a multiple of --kv-heads %lld", (long long)o->heads,
                        (long long)o->kv_heads);
    if (!output_differ(o->json, o->plot)) return CLI_USAGE;
    const int passes = check_passes(o, resumed);
    if (passes) return passes;
    const bool epoch = shards && o->seconds == 0; /* steps are counted when the files are known */
    if (o->steps == 0 && o->seconds == 0 && !epoch)
        return cli_fail(CLI_USAGE, "a run needs --steps or --seconds above 0");
    if (o->schedule > SCHEDULE_BUDGET && o->schedule != SCHEDULE_CONSTANT && o->steps == 0 && !epoch)
        return cli_fail(CLI_USAGE, "this --schedule needs --steps; --schedule budget works with --seconds, too");
    return CLI_OK;
}

int train_options_place(train_options *o) {
    if (o->gpus != UNSET && o->ranks != UNSET && o->ranks != o->gpus)
        return cli_fail(CLI_USAGE, "--gpus %lld is %lld ranks, not --ranks %lld", (long long)o->gpus,
                        (long long)o->gpus, (long long)o->ranks);
    if (o->gpus != UNSET && o->device == ON_CPU)
        return cli_fail(CLI_USAGE, "--gpus %lld is --device cuda, not cpu", (long long)o->gpus);
    if (o->gpus != UNSET) o->ranks = o->gpus, o->device = ON_CUDA;
    if (o->ranks == UNSET) o->ranks = 1;
    if (o->time_limit == UNSET) o->time_limit = 600; /* rank 0 evaluates, asks HellaSwag and saves meanwhile */
    return CLI_OK;
}

int train_options_complete(train_options *o, checkpoint *from) {
    if (o->ranks == UNSET) o->ranks = 1;
    /* If one budget is given, both of the default or the checkpoint are dropped. */
    if (o->steps != UNSET && o->seconds == UNSET) o->seconds = 0;
    if (o->steps == UNSET && o->seconds != UNSET) o->steps = 0;
    if (from && o->preset != UNSET)
        return cli_fail(CLI_USAGE, "--preset needs a new run: a resumed one keeps its sizes");
    if (from) {
        train_options stored = train_unset;
        if (!checkpoint_options(from, train_table, &stored, train_not_stored)) return CLI_FAILURE;
        if (o->device == UNSET) o->device = 0;
        o->same_log = !o->json || (stored.json && strcmp(o->json, stored.json) == 0);
        if (stored.task < 0)
            return cli_fail(CLI_FAILURE, "%s was written by another version: it has no task", checkpoint_path(from));
        take_missing(&stored, &defaults[stored.task], false); /* what older versions did not have */
        const int dtype = o->dtype == UNSET ? stored.dtype : o->dtype;
        if (dtype != IN_F16) stored.loss_scale = NULL; /* the run goes on in a type that has none */
        if (dtype == IN_F32) stored.rounding = ROUNDING_MASTERS;
        if (dtype != IN_F32) stored.tf32 = false;
        /* What older versions, which had one rank, stored. */
        if (stored.total_batch == 0) stored.total_batch = stored.batch * stored.context;
        if (o->total_batch == 0) o->total_batch = stored.batch * stored.context * o->ranks;
        const int code = take_missing(o, &stored, true);
        return code ? code : check(o, false, true);
    }
    if (o->task == UNSET && o->data) o->task = TASK_SHARDS;
    const bool preset_dtype = o->preset != UNSET && o->dtype == UNSET;
    if (o->preset != UNSET) {
        const train_options preset = preset_of(o->preset);
        if (o->task == UNSET) o->task = TASK_TOKENS;
        take_missing(o, &preset, false);
        if (o->task != TASK_TOKENS && o->task != TASK_SHARDS)
            return cli_fail(CLI_USAGE, "a --preset needs --task tokens or shards");
    }
    if (o->task == UNSET) return cli_fail(CLI_USAGE, "no task given: --task recall, text, tokens or shards");
    if (o->arch == UNSET && o->task == TASK_SHARDS) o->arch = ARCH_GPT2;
    if (o->arch == ARCH_GPT2) take_gpt2(o);
    if (o->kv_heads == UNSET) o->kv_heads = o->heads;
    take_missing(o, &defaults[o->task], false);
    /* The number is stored: a run that goes on with other ranks keeps it. */
    if (o->total_batch == 0) o->total_batch = o->batch * o->context * o->ranks;
    return check(o, preset_dtype, false);
}

fattn_dtype train_dtype(int choice) {
    return choice == IN_BF16 ? FATTN_BF16 : choice == IN_F16 ? FATTN_F16 : FATTN_F32;
}

model_config train_model_config(const train_options *o, int64_t vocab) {
    return (model_config){
        .arch = o->arch,
        .vocab = vocab,
        .positions = o->positions,
        .context = o->context,
        .channels = o->channels,
        .layers = (int)o->layers,
        .heads = (int)o->heads,
        .kv_heads = (int)o->kv_heads,
        .mlp_ratio = (int)o->mlp,
        .algorithm = o->algorithm == 1 ? FATTN_ALGO_STANDARD : FATTN_ALGO_AUTO,
        .dtype = train_dtype(o->dtype),
        .fp8 = o->fp8,
        .fp8_renew = o->fp8_renew,
        .fp8_int8 = o->fp8_int8,
        .dropout = (float)o->dropout,
        .seed = (uint64_t)o->seed,
    };
}

trainer_config train_trainer_config(const train_options *o) {
    double loss_scale;
    (void)scale_of(o->loss_scale, &loss_scale); /* has been checked */
    return (trainer_config){.batch = o->batch,
                            .steps = o->steps,
                            .warmup = o->warmup,
                            .passes = o->total_batch / (o->batch * o->context),
                            .schedule = o->schedule,
                            .rounding = o->rounding,
                            .final_lr = o->final_lr,
                            .beta2 = o->beta2,
                            .seconds = o->seconds,
                            .lr = o->lr,
                            .weight_decay = o->weight_decay,
                            .clip = o->clip,
                            .loss_scale = loss_scale,
                            .tree = o->deterministic,
                            .zero = o->zero,
                            .graph = o->device == ON_CUDA && !o->no_graph};
}
