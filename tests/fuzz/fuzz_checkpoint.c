/* Checkpoints of `fattn train`, starting from a valid one. Damage of any byte is found. Wrong contents with a valid
   seal are rejected, or give a run that can be resumed. */
#include "autograd_c/fixture/sealed_file.h"
#include "fuzz_hdf5.h"
#include "cli/train/train_options.h"

#include <limits.h>
#include <string.h>
#include <unistd.h>

static struct sample {
    unsigned char *bytes; /* with its seal */
    size_t size;
    train_options options;
    fattn_ctx *ctx;
    task *task;
} sample;

static void free_sample(void) {
    free(sample.bytes);
    sample.task->close(sample.task);
    fattn_ctx_destroy(sample.ctx);
}

static void create(trainer *r) {
    const model_config shape = train_model_config(&sample.options, sample.task->vocab);
    const trainer_config config = train_trainer_config(&sample.options);
    FUZZ_CHECK(trainer_create(r, sample.ctx, sample.task, &shape, &config) == FATTN_OK, "%s",
               fattn_ctx_error(sample.ctx));
}

/* The smallest run there is, after two steps. */
static void make_sample(void) {
    const fattn_ctx_options one = {.struct_size = sizeof one, .cpu_threads = 1};
    FUZZ_CHECK(fattn_ctx_create(&one, &sample.ctx) == FATTN_OK, "context");
    train_options *const o = &sample.options;
    *o = train_unset;
    o->task = TASK_RECALL, o->algorithm = 0;
    o->layers = 1, o->channels = 4, o->heads = o->kv_heads = 2, o->mlp = 1;
    o->context = 8, o->batch = 2, o->steps = 10;
    FUZZ_CHECK(train_options_complete(o, NULL) == CLI_OK, "options");
    o->threads = 1;
    sample.task = recall_open((uint64_t)o->seed, o->context);
    FUZZ_CHECK(sample.task, "task");
    trainer r;
    evaluation e;
    create(&r);
    const bool ran = trainer_step(&r) == FATTN_OK && trainer_step(&r) == FATTN_OK &&
                     trainer_evaluate(&r, 2, &e) == FATTN_OK && trainer_note(&r, &e) == FATTN_OK;
    FUZZ_CHECK(ran, "%s", fattn_ctx_error(sample.ctx));
    FUZZ_CHECK(checkpoint_save(fuzz_folder(), train_table, o, train_not_stored, &r), "no file");
    trainer_destroy(&r);
    char name[PATH_MAX];
    snprintf(name, sizeof name, "%s/step-000000002.h5", fuzz_folder());
    FUZZ_CHECK(fattni_sealed_read(sample.ctx, name, &sample.bytes, &sample.size) == FATTN_OK, "no checkpoint");
    sample.size += FATTNI_SEAL; /* it is behind the data */
    unlink(name);
    atexit(free_sample);
}

/* Returns whether there is any: two changes may undo each other. */
static bool damage(fuzz_input *in) {
    unsigned char *const bytes = malloc(sample.size);
    FUZZ_CHECK(bytes, "no memory");
    memcpy(bytes, sample.bytes, sample.size);
    const size_t size = fuzz_damage(in, bytes, sample.size);
    const bool any = size != sample.size || memcmp(bytes, sample.bytes, size) != 0;
    fuzz_file_write(bytes, size);
    free(bytes);
    return any;
}

static const char *const objects[] = {"/config",
                                      "/config/prompt",
                                      "/config/checkpoint",
                                      "/state",
                                      "/params",
                                      "/params/embedding",
                                      "/params/norm",
                                      "/params/block0.qkv",
                                      "/adam/m/embedding",
                                      "/adam/v/norm",
                                      "/history/loss",
                                      "/history/eval_step",
                                      "/history/eval_right",
                                      "/history",
                                      "/",
                                      NULL};
static const char *const attributes[] = {"step",       "cursor",     "adam_step", "elapsed",  "fingerprint", "task",
                                         "layers",     "heads",      "kv-heads",  "channels", "context",     "batch",
                                         "lr",         "algorithm",  "seed",      "text",     "seconds",     "steps",
                                         "checkpoint", "eval-every", NULL};

/* Recomputes the seal, so that the hash is valid. */
static void replace(fuzz_input *in) {
    fuzz_file_write(sample.bytes, sample.size - FATTNI_SEAL);
    const hid_t file = H5Fopen(fuzz_file(), H5F_ACC_RDWR, H5P_DEFAULT);
    FUZZ_CHECK(file >= 0, "HDF5 does not open the sample");
    for (unsigned n = 1 + fuzz_below(in, 4); n > 0; --n) fuzz_hdf5_replace(in, file, objects, attributes);
    H5Fclose(file);
    size_t size;
    unsigned char *const bytes = fuzz_file_read(FATTNI_SEAL, &size);
    FUZZ_CHECK(fattni_sealed_write(sample.ctx, fuzz_file(), bytes, size + FATTNI_SEAL) == FATTN_OK, "cannot write");
    free(bytes);
}

/* The steps of `fattn train --resume`. */
static bool resume(void) {
    checkpoint *const c = checkpoint_open(fuzz_file());
    if (!c) return false;
    train_options o = train_unset;
    const bool complete = train_options_complete(&o, c) == CLI_OK;
    trainer r;
    create(&r);
    const bool restored = complete && checkpoint_restore(c, &r);
    if (restored) {
        const fattn_status s = trainer_step(&r);
        FUZZ_CHECK(s == FATTN_OK || s == FATTN_E_MISMATCH, "%s", fattn_ctx_error(sample.ctx));
    }
    trainer_destroy(&r);
    checkpoint_close(c);
    return restored;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    fuzz_input in = {data, data + size};
    H5Eset_auto2(H5E_DEFAULT, NULL, NULL);
    if (!sample.bytes) make_sample();
    bool damaged = false;
    if (fuzz_byte(&in) & 64)
        damaged = damage(&in);
    else
        replace(&in);
    const bool resumed = resume();
    FUZZ_CHECK(!damaged || !resumed, "damage was not found");
    FUZZ_CHECK(H5Fget_obj_count(H5F_OBJ_ALL, H5F_OBJ_ALL) == 0, "objects of HDF5 are left");
    FUZZ_CHECK(fattn_ctx_mem(sample.ctx).live == 0, "memory is left");
    return 0;
}
