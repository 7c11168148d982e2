#include "cli/llmc/model_file.h"

#include "cli/base/cli.h"
#include "cli/base/device.h"
#include "cli/llmc/file.h"
#include "cli/train/durable.h"
#include "core/tensor/numeric.h"

#include <dirent.h>
#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* Parameters before the blocks, of a block and after them: model_gpt2.c's, in the order of the files' tensors. */
enum { BEFORE = 2, OF_BLOCK = 12, AFTER = 2, NAME_BYTES = 64 };
enum { F32_BYTES = 4, BF16_BYTES = 2, AT_ONCE = 1 << 16 };

/* The index of the parameter that comes as number i in a file: by tensor, then by block. */
static int in_file(const trainer *r, int i) {
    const int layers = model_get_config(r->model)->layers;
    if (i < BEFORE || i >= BEFORE + layers * OF_BLOCK) return i;
    return BEFORE + (i - BEFORE) % layers * OF_BLOCK + (i - BEFORE) / layers;
}

static bool no_memory(const char *what) {
    cli_fail(CLI_FAILURE, "no memory for %s", what);
    return false;
}

/* ---- sizes ---- */

static int64_t numbers_of(const llmc_model *m) {
    const int64_t C = m->channels;
    return (m->columns + m->positions) * C + m->layers * (12 * C * C + 13 * C) + 2 * C;
}

static bool header_sizes(const llmc_file *f, llmc_model *m) {
    if (!llmc_expect(f, 0, LLMC_MODEL, "the first word (a GPT-2 model's)")) return false;
    if (f->header[1] != 3 && f->header[1] != 5)
        return llmc_fail(f->path, 4, "the version is %d, not 3 (f32) or 5 (bf16)", f->header[1]);
    if (!llmc_in_range(f, 2, 1, 1 << 20, "the number of positions") ||
        !llmc_in_range(f, 3, 1, 1 << 20, "the vocabulary") || !llmc_in_range(f, 4, 1, 1000, "the number of layers") ||
        !llmc_in_range(f, 5, 1, 1024, "the number of heads") ||
        !llmc_in_range(f, 6, 2, 65536, "the number of channels"))
        return false;
    *m = (llmc_model){.positions = f->header[2],
                      .vocab = f->header[3],
                      .layers = f->header[4],
                      .heads = f->header[5],
                      .channels = f->header[6],
                      .bf16 = f->header[1] == 5};
    const model_config c = {.arch = ARCH_GPT2, .vocab = m->vocab};
    m->columns = model_columns(&c);
    if (m->channels % m->heads != 0)
        return llmc_fail(f->path, 20, "%lld channels are no multiple of %lld heads", (long long)m->channels,
                         (long long)m->heads);
    if (!llmc_expect(f, 7, m->columns, "the padded vocabulary")) return false;
    m->numbers = numbers_of(m);
    return llmc_has_bytes(f, LLMC_HEADER_BYTES + m->numbers * (m->bf16 ? BF16_BYTES : F32_BYTES));
}

bool llmc_model_sizes(const char *path, llmc_model *m) {
    llmc_file f;
    if (!llmc_open(&f, path)) return false;
    const bool ok = header_sizes(&f, m);
    llmc_close(&f);
    return ok;
}

/* ---- numbers ---- */

/* n numbers at an offset, which moves on. */
static bool read_numbers(llmc_file *f, int64_t *offset, int bytes, float *to, int64_t n) {
    unsigned char *const buffer = malloc(AT_ONCE * F32_BYTES);
    bool ok = buffer || no_memory("a buffer");
    for (int64_t done = 0; ok && done < n;) {
        const int64_t part = n - done < AT_ONCE ? n - done : AT_ONCE;
        ok = llmc_read(f, *offset, buffer, part * bytes);
        for (int64_t i = 0; ok && i < part; ++i, *offset += bytes) {
            const unsigned char *const b = buffer + i * bytes;
            to[done + i] = fattni_bits_float(bytes == F32_BYTES ? llmc_u32(b) : llmc_u16(b) << 16);
            ok = isfinite(to[done + i]) ||
                 llmc_fail(f->path, *offset, "the number is %g, finite ones are expected", (double)to[done + i]);
        }
        done += part;
    }
    free(buffer);
    return ok;
}

static bool write_numbers(durable_stream *s, int bytes, const float *from, int64_t n) {
    unsigned char *const buffer = malloc(AT_ONCE * F32_BYTES);
    bool ok = buffer || no_memory("a buffer");
    for (int64_t done = 0; ok && done < n;) {
        const int64_t part = n - done < AT_ONCE ? n - done : AT_ONCE;
        for (int64_t i = 0; i < part; ++i) {
            if (bytes == F32_BYTES)
                llmc_put_u32(buffer + i * bytes, fattni_float_bits(from[done + i]));
            else
                llmc_put_u16(buffer + i * bytes, fattni_float_to_bf16(from[done + i]));
        }
        ok = durable_append(s, buffer, (size_t)(part * bytes));
        done += part;
    }
    free(buffer);
    return ok;
}

/* ---- tensors ---- */

enum { VALUES = 0 }; /* beside fattn_adam_state: the values, or their masters if there are some */

/* Of a value of 16 bits, if the trainer keeps them. */
static bool has_master(const trainer *r, const fattn_tensor *value) {
    return value->dtype != FATTN_F32 && !(fattn_adamw_flags(r->adamw) & FATTN_OPTIM_NO_MASTERS);
}

static fattn_status tensor_of(const trainer *r, int index, int which, fattn_tensor *t) {
    int n;
    fattn_param *const p = model_params(r->model, &n)[index];
    *t = p->value;
    if (which == VALUES && !has_master(r, t)) return FATTN_OK;
    return fattn_adamw_state(r->adamw, index, which == VALUES ? FATTN_ADAM_MASTER : (fattn_adam_state)which, t);
}

static bool failed(const trainer *r, fattn_status s) {
    if (s) cli_status(r->ctx, s, "parameters");
    return s != FATTN_OK;
}

/* Numbers of a parameter or a moment; ranks may divide the moments and the masters. */
static fattn_status put_numbers(trainer *r, int index, int which, float *x) {
    int n;
    fattn_tensor *const value = &model_params(r->model, &n)[index]->value;
    const fattn_tensor host = fattn_tensor_view(x, FATTN_F32, FATTN_CPU, 0, value->ndim, value->shape);
    fattn_status s = FATTN_OK;
    if (which != VALUES || has_master(r, value))
        s = fattn_adamw_set_state(r->adamw, index, which == VALUES ? FATTN_ADAM_MASTER : (fattn_adam_state)which,
                                  &host);
    return s || which != VALUES ? s : fattn_tensor_copy(r->ctx, value, &host);
}

/* All parameters, moments or masters, between a file and the trainer. */
static bool read_all(llmc_file *f, int64_t *offset, int bytes, trainer *r, int which) {
    int n;
    fattn_param *const *const params = model_params(r->model, &n);
    bool ok = true;
    for (int i = 0; ok && i < n; ++i) {
        const int index = in_file(r, i);
        const int64_t count = fattn_tensor_numel(&params[index]->value);
        float *const x = malloc((size_t)count * sizeof *x);
        ok = (x || no_memory("a tensor")) && read_numbers(f, offset, bytes, x, count) &&
             !failed(r, put_numbers(r, index, which, x));
        free(x);
    }
    return ok;
}

static bool write_all(durable_stream *s, int bytes, const trainer *r, int which) {
    int n;
    (void)model_params(r->model, &n);
    bool ok = true;
    for (int i = 0; ok && i < n; ++i) {
        fattn_tensor t;
        if (failed(r, tensor_of(r, in_file(r, i), which, &t))) return false;
        const int64_t count = fattn_tensor_numel(&t);
        float *const x = malloc((size_t)count * sizeof *x);
        ok =
            (x || no_memory("a tensor")) && !failed(r, device_read(r->ctx, &t, x)) && write_numbers(s, bytes, x, count);
        free(x);
    }
    return ok;
}

/* ---- models ---- */

static bool same(const char *path, int word, int64_t of_file, int64_t of_model, const char *what) {
    if (of_file == of_model) return true;
    return llmc_fail(path, 4 * word, "%s is %lld, this model's %lld", what, (long long)of_file, (long long)of_model);
}

static bool fits(const char *path, const llmc_model *m, const model_config *c) {
    return same(path, 2, m->positions, c->positions, "the number of positions") &&
           same(path, 3, m->vocab, c->vocab, "the vocabulary") &&
           same(path, 4, m->layers, c->layers, "the number of layers") &&
           same(path, 5, m->heads, c->heads, "the number of heads") &&
           same(path, 6, m->channels, c->channels, "the number of channels");
}

bool llmc_model_read(const char *path, trainer *r) {
    llmc_file f;
    llmc_model m = {0};
    int64_t offset = LLMC_HEADER_BYTES;
    if (!llmc_open(&f, path)) return false;
    const bool ok = header_sizes(&f, &m) && fits(path, &m, model_get_config(r->model)) &&
                    read_all(&f, &offset, m.bf16 ? BF16_BYTES : F32_BYTES, r, VALUES);
    llmc_close(&f);
    return ok;
}

/* Everything but durable_end. */
static bool put_model(durable_stream *s, const char *folder, const char *name, const trainer *r, bool bf16) {
    const model_config *const c = model_get_config(r->model);
    unsigned char header[LLMC_HEADER_BYTES];
    llmc_header(header,
                (const int32_t[]){LLMC_MODEL, bf16 ? 5 : 3, (int32_t)c->positions, (int32_t)c->vocab, c->layers,
                                  c->heads, (int32_t)c->channels, (int32_t)model_columns(c)},
                8);
    return durable_begin(s, folder, name) && durable_append(s, header, sizeof header) &&
           write_all(s, bf16 ? BF16_BYTES : F32_BYTES, r, VALUES);
}

bool llmc_model_write(const char *folder, const char *name, const trainer *r, bool bf16) {
    durable_stream s;
    const bool ok = put_model(&s, folder, name, r, bf16);
    return durable_end(&s, ok) && ok;
}

/* ---- states ---- */

/* Offsets in the header, and the size of the generator: a seed that nothing uses, left, next, its words, two constants
   of the recurrence. */
enum { STEP = 40, RNG = 80, RNG_OF_UPDATE = 88, SHARD = 120, SAMPLE = 128 };
enum { GENERATOR = 8 + 4 + 4 + 4 * MT19937_WORDS + 8 };
static const uint64_t FIRST_RNG = 13371337; /* of llm.c's generator for stochastic rounding; ours is Philox */

/* The orders and the generator at an offset to the end of the file. The caller frees both orders. */
static bool read_loader(llmc_file *f, int64_t offset, loader_state *s, int32_t *orders[2]) {
    for (int k = 0; k < 2; ++k) {
        unsigned char count[8];
        if (!llmc_read(f, offset, count, sizeof count)) return false;
        const uint64_t n = llmc_u64(count);
        if (n < 1 || n > (uint64_t)f->size / 4)
            return llmc_fail(f->path, offset, "an order of %llu %s, 1..%lld are possible", (unsigned long long)n,
                             k ? "samples" : "files", (long long)(f->size / 4));
        orders[k] = malloc((size_t)n * 4);
        if (!orders[k]) return no_memory("an order");
        if (!llmc_read(f, offset + 8, orders[k], (int64_t)n * 4)) return false;
        for (uint64_t i = 0; i < n; ++i) orders[k][i] = (int32_t)llmc_u32((unsigned char *)&orders[k][i]);
        *(k ? &s->samples : &s->shards) = (int64_t)n;
        offset += 8 + 4 * (int64_t)n;
    }
    if (!llmc_has_bytes(f, offset + GENERATOR)) return false;
    unsigned char g[GENERATOR];
    if (!llmc_read(f, offset, g, sizeof g)) return false;
    s->random.left = (int32_t)llmc_u32(g + 8);
    s->random.next = llmc_u32(g + 12);
    for (int i = 0; i < MT19937_WORDS; ++i) s->random.word[i] = llmc_u32(g + 16 + 4 * i);
    s->shard_order = orders[0];
    s->sample_order = orders[1];
    return true;
}

static bool find_place(llmc_file *f, int64_t offset, trainer *r, loader *l) {
    unsigned char header[LLMC_HEADER_BYTES];
    int32_t *orders[2] = {NULL, NULL};
    char error[400];
    if (!llmc_read(f, 0, header, sizeof header)) return false;
    loader_state s = {.shard = (int64_t)llmc_u64(header + SHARD), .sample = (int64_t)llmc_u64(header + SAMPLE)};
    bool ok = read_loader(f, offset, &s, orders);
    if (ok && l) {
        ok = loader_find(l, &s, error, sizeof error) || llmc_fail(f->path, SHARD, "%s", error);
        if (ok) r->cursor = l->taken * r->config.batch;
    }
    free(orders[0]);
    free(orders[1]);
    return ok;
}

/* What a header says about the rest of the file; and everything in the file that can be checked before a change. */
static bool check_state(llmc_file *f, int64_t numbers, int64_t *after) {
    if (!llmc_expect(f, 0, LLMC_STATE, "the first word (a state's)") || !llmc_expect(f, 1, 1, "the version") ||
        !llmc_expect(f, 2, 1, "the number of processes") || !llmc_expect(f, 3, 0, "the rank") ||
        !llmc_in_range(f, 4, 0, 1, "the flag of masters") || !llmc_in_range(f, 5, 0, 1, "the flag of shuffling") ||
        !llmc_in_range(f, STEP / 4, 0, INT32_MAX, "the step"))
        return false;
    *after = LLMC_HEADER_BYTES + numbers * F32_BYTES * (f->header[4] ? 3 : 2);
    if (f->header[5] == 0) return llmc_has_bytes(f, *after);
    if (f->size >= *after + 16) return true;
    return llmc_fail(f->path, f->size, "the file ends, a model of %lld parameters has more than %lld bytes of state",
                     (long long)numbers, (long long)*after);
}

bool llmc_state_read(const char *path, trainer *r, loader *l) {
    llmc_file f;
    int64_t after, offset = LLMC_HEADER_BYTES;
    if (!llmc_open(&f, path)) return false;
    bool ok = check_state(&f, model_size(r->model), &after);
    if (ok && f.header[5] == 0 && l)
        ok = llmc_fail(path, 20, "a run that does not shuffle (llm.c's -a 1): this program shuffles, it cannot go on");
    if (ok && f.header[5]) ok = find_place(&f, after, r, l);
    ok = ok && read_all(&f, &offset, F32_BYTES, r, FATTN_ADAM_M) && read_all(&f, &offset, F32_BYTES, r, FATTN_ADAM_V) &&
         (!f.header[4] || read_all(&f, &offset, F32_BYTES, r, VALUES));
    const int64_t step = f.header[STEP / 4];
    if (ok && (failed(r, fattn_adamw_set_step(r->adamw, step)) ||
               failed(r, history_resize(r->ctx, &r->history, step, r->history.evals))))
        ok = false;
    llmc_close(&f);
    if (!ok) return false;
    r->step = step;
    for (int64_t i = 0; i < step; ++i) r->history.loss[i] = NAN; /* the file does not have them */
    return true;
}

static bool write_loader(durable_stream *s, const loader *l) {
    const loader_state at = loader_save(l);
    const struct {
        const int32_t *order;
        int64_t n;
    } orders[] = {{at.shard_order, at.shards}, {at.sample_order, at.samples}};
    unsigned char g[GENERATOR] = {0};
    bool ok = true;
    for (int k = 0; ok && k < 2; ++k) {
        unsigned char word[8];
        llmc_put_u64(word, (uint64_t)orders[k].n);
        ok = durable_append(s, word, 8);
        for (int64_t i = 0; ok && i < orders[k].n; ++i) {
            llmc_put_u32(word, (uint32_t)orders[k].order[i]);
            ok = durable_append(s, word, 4);
        }
    }
    llmc_put_u32(g + 8, (uint32_t)at.random.left);
    llmc_put_u32(g + 12, at.random.next);
    for (int i = 0; i < MT19937_WORDS; ++i) llmc_put_u32(g + 16 + 4 * i, at.random.word[i]);
    llmc_put_u32(g + GENERATOR - 4, 0x9908b0dfu);
    return ok && durable_append(s, g, sizeof g);
}

/* Everything but durable_end. l: at the run's place; NULL: a run without shuffled files, at its start. */
static bool put_state(durable_stream *s, const char *folder, const char *name, const trainer *r, const loader *l) {
    unsigned char header[LLMC_HEADER_BYTES];
    llmc_header(header, (const int32_t[]){LLMC_STATE, 1, 1, 0, 1, l != NULL, 0, 0, 0, 0, (int32_t)r->step}, 11);
    llmc_put_u64(header + RNG, FIRST_RNG);
    llmc_put_u64(header + RNG_OF_UPDATE, FIRST_RNG);
    if (l) llmc_put_u64(header + SHARD, (uint64_t)l->shard), llmc_put_u64(header + SAMPLE, (uint64_t)l->sample);
    return durable_begin(s, folder, name) && durable_append(s, header, sizeof header) &&
           write_all(s, F32_BYTES, r, FATTN_ADAM_M) && write_all(s, F32_BYTES, r, FATTN_ADAM_V) &&
           write_all(s, F32_BYTES, r, VALUES) && (!l || write_loader(s, l));
}

/* ---- runs ---- */

/* False after an error message; a file that is not there is no error. */
static bool remove_from(const char *folder, const char *name) {
    char path[LLMC_PATH];
    if (snprintf(path, sizeof path, "%s/%s", folder, name) >= LLMC_PATH || unlink(path) == 0 || errno == ENOENT)
        return true;
    cli_fail(CLI_FAILURE, "cannot remove %s: %s", path, strerror(errno));
    return false;
}

bool llmc_run_write(const char *folder, const trainer *r, bool bf16, const loader *l) {
    char model_name[NAME_BYTES], state_name[NAME_BYTES], done_name[NAME_BYTES];
    durable_stream weights, state = {.file = -1}, done;
    const long long step = (long long)r->step;
    if (step > 99999999) {
        cli_fail(CLI_FAILURE, "step %lld has more digits than llm.c's names, 8", step);
        return false;
    }
    snprintf(model_name, sizeof model_name, "model_%08lld.bin", step);
    snprintf(state_name, sizeof state_name, "state_%08lld_00000.bin", step);
    snprintf(done_name, sizeof done_name, "DONE_%08lld", step);
    bool ok = put_model(&weights, folder, model_name, r, bf16) && put_state(&state, folder, state_name, r, l);
    ok = ok && remove_from(folder, done_name); /* an older model and this state are no checkpoint */
    ok = durable_end(&weights, ok) && ok;
    ok = durable_end(&state, ok) && ok;
    return ok && durable_begin(&done, folder, done_name) && durable_end(&done, true);
}

int64_t llmc_run_newest(const char *folder) {
    int64_t newest = -1;
    DIR *d = opendir(folder);
    for (struct dirent *e; d && (e = readdir(d));) {
        char *end;
        if (strncmp(e->d_name, "DONE_", 5) != 0) continue;
        const int64_t step = strtoll(e->d_name + 5, &end, 10);
        if (end == e->d_name + 13 && !*end && step > newest) newest = step;
    }
    if (d) closedir(d);
    return newest;
}

bool llmc_run_remove_after(const char *folder, int64_t step) {
    for (long long at; (at = (long long)llmc_run_newest(folder)) > step;) {
        char name[NAME_BYTES];
        snprintf(name, sizeof name, "DONE_%08lld", at); /* first: then the step does not count */
        if (!remove_from(folder, name)) return false;
        snprintf(name, sizeof name, "model_%08lld.bin", at);
        if (!remove_from(folder, name)) return false;
        snprintf(name, sizeof name, "state_%08lld_00000.bin", at);
        if (!remove_from(folder, name)) return false;
    }
    return true;
}

bool llmc_run_find(const char *folder, char model_path[LLMC_PATH], char state_path[LLMC_PATH]) {
    const long long newest = (long long)llmc_run_newest(folder);
    if (newest < 0) return false;
    return snprintf(model_path, LLMC_PATH, "%s/model_%08lld.bin", folder, newest) < LLMC_PATH &&
           snprintf(state_path, LLMC_PATH, "%s/state_%08lld_00000.bin", folder, newest) < LLMC_PATH;
}
