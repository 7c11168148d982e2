/* Every allocation of a whole run fails once: of the context, the fixture library and the program, including
   malloc (the linker replaces it by the functions below). The current step reports it, nothing leaks, and the
   same step works when there is memory. */
#define _XOPEN_SOURCE 700 /* mkdtemp */
#include <criterion/criterion.h>
#include <criterion/redirect.h>

#include "fixtures.h"
#include "cli/tasks/ngram.h"
#include "tests/cli/symbols.h"
#include "cli/train/train_options.h"

#include <fattn/check.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* ---- the heap ---- */

static long left = -1; /* allocations that still succeed; negative = no limit */
static long live;      /* allocated blocks */

void *__real_malloc(size_t bytes);
void *__real_calloc(size_t n, size_t bytes);
void *__real_realloc(void *p, size_t bytes);
void *__real_aligned_alloc(size_t align, size_t bytes);
void __real_free(void *p);
#pragma GCC visibility push(default)
void *__wrap_malloc(size_t bytes);
void *__wrap_calloc(size_t n, size_t bytes);
void *__wrap_realloc(void *p, size_t bytes);
void *__wrap_aligned_alloc(size_t align, size_t bytes);
void __wrap_free(void *p);
#pragma GCC visibility pop

static bool may(void) {
    if (left == 0) return false;
    if (left > 0) --left;
    return true;
}
static void *count(void *p) {
    live += p != NULL;
    return p;
}
void *__wrap_malloc(size_t bytes) { return may() ? count(__real_malloc(bytes)) : NULL; }
void *__wrap_calloc(size_t n, size_t bytes) { return may() ? count(__real_calloc(n, bytes)) : NULL; }
void *__wrap_aligned_alloc(size_t align, size_t bytes) {
    return may() ? count(__real_aligned_alloc(align, bytes)) : NULL;
}
void *__wrap_realloc(void *p, size_t bytes) {
    if (!may()) return NULL;
    return p ? __real_realloc(p, bytes) : count(__real_realloc(p, bytes));
}
void __wrap_free(void *p) {
    live -= p != NULL;
    __real_free(p);
}

static void *take(void *user, size_t bytes, size_t align, fattn_stream s) {
    (void)user, (void)s;
    return __wrap_aligned_alloc(align, (bytes + align - 1) / align * align);
}
static void give(void *user, void *p, size_t bytes, fattn_stream s) {
    (void)user, (void)bytes, (void)s;
    __wrap_free(p);
}

/* ---- the steps of a run: true when all went well ---- */

static char folder[] = "/tmp/fattn-no-memory-XXXXXX", fixture[64], text[64], saved[64];

static fattn_ctx *open_context(void) {
    const fattn_ctx_options o = {.struct_size = sizeof o, .cpu_threads = 1, .allocator = {take, give, NULL}};
    fattn_ctx *ctx;
    return fattn_ctx_create(&o, &ctx) == FATTN_OK ? ctx : NULL;
}

static bool write_fixture(void) {
    fattn_ctx *const ctx = open_context();
    const bool ok = ctx && fixture_write_sample(ctx, fixture) == FATTN_OK;
    fattn_ctx_destroy(ctx);
    return ok;
}

static bool read_fixture(void) {
    uint64_t digest;
    fattn_ctx *const ctx = open_context();
    const bool ok = ctx && fixture_read_all(ctx, fixture, &digest) == FATTN_OK;
    fattn_ctx_destroy(ctx);
    return ok;
}

static bool run_fixture(void) {
    fattn_ctx *const ctx = open_context();
    fattn_fixture *f = NULL;
    bool ok = ctx && fattn_fixture_open(ctx, fixture, 0, &f) == FATTN_OK;
    fattn_fixture_attention c = {.struct_size = sizeof c};
    ok = ok && fattn_fixture_attention_load(f, "a", FATTN_F64, &c) == FATTN_OK;
    if (ok) {
        ok = fattn_fixture_attention_run(ctx, &c) == FATTN_OK;
        fattn_fixture_attention_free(ctx, &c);
    }
    ok = fattn_fixture_close(f) == FATTN_OK && ok;
    fattn_ctx_destroy(ctx);
    return ok;
}

static fattn_var square(fattn_tape *t, const fattn_var *in, int n, void *user) {
    (void)n, (void)user;
    return fattn_op_mul(t, in[0], in[0]);
}

static bool check_gradients(void) {
    double x[6] = {1, 2, 3, 4, 5, 6};
    const int64_t shape[] = {2, 3};
    const fattn_tensor in = fattn_tensor_view(x, FATTN_F64, FATTN_CPU, 0, 2, shape);
    fattn_report r = {.struct_size = sizeof r};
    fattn_ctx *const ctx = open_context();
    const bool ok = ctx && fattn_gradcheck(ctx, square, NULL, &in, 1, NULL, &r) == FATTN_OK;
    fattn_ctx_destroy(ctx);
    return ok;
}

static train_options tiny(void) {
    train_options o = train_unset;
    o.task = TASK_TEXT, o.algorithm = 0, o.text = text;
    o.layers = 1, o.channels = 8, o.heads = 2, o.kv_heads = 1, o.mlp = 1;
    o.context = 16, o.batch = 2, o.steps = 4, o.threads = 1;
    return o;
}

/* Training, evaluation, a sample, the n-gram table, a checkpoint; then all of it resumed from there. */
static bool train_from(fattn_ctx *ctx, checkpoint *from, const char *to) {
    train_options o = tiny();
    trainer r = {0};
    evaluation e;
    int32_t said[24] = {1, 2, 3};
    double loss[NGRAM_ORDERS];
    const sample_options greedy = {.temperature = 0};
    if (train_options_complete(&o, from) != CLI_OK) return false;
    task *const t = text_open(text, 1, o.context);
    if (!t) return false;
    const model_config shape = train_model_config(&o, t->vocab);
    const trainer_config config = train_trainer_config(&o);
    const text_buffer *const a = &text_corpus(t)->train, *const b = &text_corpus(t)->held_out;
    bool ok = trainer_create(&r, ctx, t, &shape, &config) == FATTN_OK;
    if (ok) {
        ok = (!from || checkpoint_restore(from, &r)) && trainer_step(&r) == FATTN_OK &&
             trainer_evaluate(&r, 2, &e) == FATTN_OK && trainer_note(&r, &e) == FATTN_OK &&
             trainer_step(&r) == FATTN_OK && generate_symbols(ctx, r.model, r.tape, &greedy, said, 3, 24) == FATTN_OK &&
             ngram_losses(a->symbols, a->n, b->symbols, b->n, TEXT_SYMBOLS, loss) &&
             (!to || checkpoint_save(to, train_table, &o, train_not_stored, &r));
        trainer_destroy(&r);
    }
    t->close(t);
    return ok;
}

static bool train(void) {
    fattn_ctx *const ctx = open_context();
    const bool ok = ctx && train_from(ctx, NULL, folder);
    fattn_ctx_destroy(ctx);
    return ok;
}

static bool resume(void) {
    fattn_ctx *const ctx = open_context();
    checkpoint *const c = ctx ? checkpoint_open(saved) : NULL;
    const bool ok = c && train_from(ctx, c, NULL);
    checkpoint_close(c);
    fattn_ctx_destroy(ctx);
    return ok;
}

/* ---- all of them ---- */

static void make_files(void) {
    cr_redirect_stderr();
    cr_assert_not_null(mkdtemp(folder));
    snprintf(fixture, sizeof fixture, "%s/fixture.h5", folder);
    snprintf(text, sizeof text, "%s/text", folder);
    snprintf(saved, sizeof saved, "%s/step-%09d.h5", folder, 2);
    FILE *const file = fopen(text, "w");
    for (unsigned record = 0; record < 60; ++record)
        fprintf(file, "record %u says: %x\n%%\n", record, record * 2654435761u);
    cr_assert_eq(fclose(file), 0);
}

static void remove_files(void) {
    char command[96];
    snprintf(command, sizeof command, "rm -rf '%s'", folder);
    cr_assert_eq(system(command), 0);
}

TestSuite(no_memory, .init = make_files, .fini = remove_files);

Test(no_memory, every_allocation_may_fail, .timeout = 200) {
    static const struct {
        const char *name;
        bool (*run)(void);
        int least;
    } steps[] = {{"write a fixture", write_fixture, 40},   {"read it", read_fixture, 80}, {"run it", run_fixture, 40},
                 {"check gradients", check_gradients, 10}, {"train", train, 60},          {"resume", resume, 60}};
    for (size_t n = 0; n < sizeof steps / sizeof *steps; ++n) {
        const long before = live;
        cr_assert(steps[n].run(), "%s", steps[n].name);
        cr_assert_eq(live, before, "%s: %ld blocks leaked", steps[n].name, live - before);
        int failures = 0;
        for (;; ++failures) {
            left = failures;
            const bool ok = steps[n].run(), failed = left == 0;
            left = -1;
            cr_assert_eq(live, before, "%s without allocation %d: %ld blocks leaked", steps[n].name, failures,
                         live - before);
            if (ok) break;
            cr_assert(failed, "%s fails without a reason", steps[n].name);
        }
        cr_assert_geq(failures, steps[n].least, "%s: %d allocations only", steps[n].name, failures);
        cr_assert(steps[n].run(), "%s, the next time", steps[n].name);
    }
}
