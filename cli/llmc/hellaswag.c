#include "cli/llmc/hellaswag.h"

#include "cli/base/cli.h"
#include "cli/base/device.h"
#include "cli/llmc/file.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { START = 65535, WORDS_BEFORE = 6, LENGTH_STEP = 64, IGNORED = -1 };

/* ---- the file ---- */

typedef struct reading {
    const llmc_file *f;
    const hellaswag *h;
    int64_t words, at; /* of the file, the next one */
    int64_t context, vocab;
} reading;

static int64_t offset_of(int64_t word) { return LLMC_HEADER_BYTES + 2 * word; }

/* The next word, in least..most. */
static bool take(reading *r, int64_t least, int64_t most, const char *what, int64_t *out) {
    if (r->at == r->words) return llmc_fail(r->f->path, r->f->size, "the file ends, %s is expected", what);
    *out = r->h->words[r->at];
    if (*out < least || *out > most)
        return llmc_fail(r->f->path, offset_of(r->at), "%s is %lld, not in %lld..%lld", what, (long long)*out,
                         (long long)least, (long long)most);
    r->at += 1;
    return true;
}

/* A length of at most `most`, and as many tokens. */
static bool take_tokens(reading *r, int64_t most, const char *what, int64_t *begin, int64_t *n) {
    if (!take(r, 1, most, what, n)) return false;
    *begin = r->at;
    for (int64_t i = 0, token; i < *n; ++i)
        if (!take(r, 0, r->vocab - 1, "a token", &token)) return false;
    return true;
}

static bool take_example(reading *r, int64_t index, hellaswag_example *e) {
    const int64_t begin = r->at;
    int64_t start, bytes = 0, number, label = 0, endings;
    if (!take(r, START, START, "the start of an example", &start) || !take(r, 0, START, "its bytes", &bytes) ||
        !take(r, index & 65535, index & 65535, "its number", &number) ||
        !take(r, 0, HELLASWAG_ENDINGS - 1, "its label", &label) ||
        !take(r, HELLASWAG_ENDINGS, HELLASWAG_ENDINGS, "the number of its endings", &endings) ||
        !take_tokens(r, r->context, "the length of its context", &e->at, &e->context))
        return false;
    e->label = (int)label;
    /* The last token of an ending is only a target. */
    for (int i = 0; i < HELLASWAG_ENDINGS; ++i)
        if (!take_tokens(r, r->context + 1 - e->context, "the length of an ending", &e->ending[i], &e->lengths[i]))
            return false;
    if (2 * (r->at - begin) == bytes) return true;
    return llmc_fail(r->f->path, offset_of(begin + 1), "the example has %lld bytes, not %lld",
                     (long long)(2 * (r->at - begin)), (long long)bytes);
}

static bool read_file(hellaswag *h, llmc_file *f, int64_t context, int64_t vocab) {
    enum { MOST = 1 << 20 };
    if (!llmc_expect(f, 0, LLMC_EVALUATION, "the first word (an evaluation's)") ||
        !llmc_expect(f, 1, 1, "the version") || !llmc_in_range(f, 2, 1, MOST, "the number of examples"))
        return false;
    const int64_t bytes = f->size - LLMC_HEADER_BYTES, n = f->header[2];
    unsigned char *const raw = malloc((size_t)bytes + 2);
    h->words = malloc((size_t)bytes + 2);
    h->example = calloc((size_t)n, sizeof *h->example);
    bool ok = raw && h->words && h->example;
    if (!ok) cli_fail(CLI_FAILURE, "no memory for %lld examples", (long long)n);
    ok = ok && llmc_read(f, LLMC_HEADER_BYTES, raw, bytes);
    reading r = {.f = f, .h = h, .words = bytes / 2, .context = context, .vocab = vocab};
    for (int64_t i = 0; ok && i < r.words; ++i) h->words[i] = (uint16_t)llmc_u16(raw + 2 * i);
    free(raw);
    for (; ok && h->n < n; h->n += 1) ok = take_example(&r, h->n, &h->example[h->n]);
    return ok && llmc_has_bytes(f, offset_of(r.at));
}

bool hellaswag_open(hellaswag *h, const char *path, int64_t context, int64_t vocab) {
    llmc_file f;
    *h = (hellaswag){.n = 0};
    if (!llmc_open(&f, path)) return false;
    const bool ok = read_file(h, &f, context, vocab);
    llmc_close(&f);
    if (!ok) hellaswag_close(h);
    return ok;
}

void hellaswag_close(hellaswag *h) {
    free(h->words);
    free(h->example);
    *h = (hellaswag){.n = 0};
}

/* ---- answers ---- */

static int64_t longest_of(const hellaswag *h, int64_t first, int64_t n) {
    int64_t longest = 1;
    for (int64_t i = first; i < first + n; ++i)
        for (int k = 0; k < HELLASWAG_ENDINGS; ++k) {
            const int64_t length = h->example[i].context + h->example[i].lengths[k] - 1;
            if (length > longest) longest = length;
        }
    return longest;
}

/* A row: context and ending, whose tokens alone are targets. */
static void fill_row(const hellaswag *h, const hellaswag_example *e, int k, int64_t length, int32_t *ids,
                     int32_t *targets) {
    for (int64_t i = 0; i < length; ++i) ids[i] = 0, targets[i] = IGNORED;
    for (int64_t i = 0; i < e->context; ++i) ids[i] = h->words[e->at + i];
    for (int64_t i = 0; i < e->lengths[k]; ++i) {
        const int32_t token = h->words[e->ending[k] + i];
        targets[e->context - 1 + i] = token;
        if (e->context + i < length) ids[e->context + i] = token;
    }
}

/* The number of right answers to examples first..first+n-1. */
static fattn_status ask(const hellaswag *h, fattn_ctx *ctx, model *m, fattn_tape *t, int64_t first, int64_t n,
                        int64_t *right) {
    const int64_t rows = HELLASWAG_ENDINGS * n, context = model_get_config(m)->context;
    int64_t length = (longest_of(h, first, n) + LENGTH_STEP - 1) / LENGTH_STEP * LENGTH_STEP;
    if (length > context) length = context;
    const int64_t shape[2] = {rows, length};
    int32_t *const symbols = malloc(2 * (size_t)(rows * length) * sizeof *symbols);
    double *const losses = malloc((size_t)rows * sizeof *losses);
    fattn_tensor ids = {0}, targets = {0};
    fattn_status s = symbols && losses ? FATTN_OK : fattn_ctx_fail(ctx, FATTN_E_NOMEM, "no memory for examples");
    for (int64_t row = 0; !s && row < rows; ++row)
        fill_row(h, &h->example[first + row / HELLASWAG_ENDINGS], (int)(row % HELLASWAG_ENDINGS), length,
                 symbols + row * length, symbols + (rows + row) * length);
    if (!s) s = fattn_tensor_alloc(ctx, FATTN_I32, 2, shape, &ids);
    if (!s) s = fattn_tensor_alloc(ctx, FATTN_I32, 2, shape, &targets);
    if (!s) s = device_write_i32(ctx, &ids, symbols);
    if (!s) s = device_write_i32(ctx, &targets, symbols + rows * length);
    fattn_tape_reset(t);
    if (!s) s = model_row_losses(m, t, &ids, &targets, losses);
    for (int64_t row = 0; !s && row < rows; ++row) /* nothing is less than NaN */
        if (!isfinite(losses[row]))
            s = fattn_ctx_fail(ctx, FATTN_E_MISMATCH, "example %lld: the loss of its ending %lld is %g",
                               (long long)(first + row / HELLASWAG_ENDINGS), (long long)(row % HELLASWAG_ENDINGS),
                               losses[row]);
    for (int64_t i = 0; !s && i < n; ++i) {
        const double *const of = losses + HELLASWAG_ENDINGS * i;
        int best = 0;
        for (int k = 1; k < HELLASWAG_ENDINGS; ++k)
            if (of[k] < of[best]) best = k;
        *right += best == h->example[first + i].label;
    }
    fattn_tape_reset(t);
    fattn_tensor_free(ctx, &ids);
    fattn_tensor_free(ctx, &targets);
    free(losses);
    free(symbols);
    return s;
}

fattn_status hellaswag_count(const hellaswag *h, fattn_ctx *ctx, model *m, fattn_tape *t, int64_t count, int64_t rows,
                             bool (*stop)(void), int64_t *right, int64_t *done) {
    const int64_t all = count < h->n ? count : h->n;
    const int64_t at_once = rows / HELLASWAG_ENDINGS > 1 ? rows / HELLASWAG_ENDINGS : 1;
    *right = *done = 0;
    while (*done < all && !(stop && stop())) {
        const int64_t n = all - *done < at_once ? all - *done : at_once;
        const fattn_status s = ask(h, ctx, m, t, *done, n, right);
        if (s) return s;
        *done += n;
    }
    return FATTN_OK;
}
