#include "cli/train/sample.h"

#include "cli/base/device.h"
#include "cli/random/random.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* Rounding lengths up keeps the number of different shapes small; attention is causal, so the padding after
   the last symbol has no effect. */
enum { LENGTH_STEP = 64 };

/* How many logits are above this one, or equal and earlier. */
static int64_t rank_of(const float *logits, int64_t n, int64_t which) {
    int64_t above = 0;
    for (int64_t i = 0; i < n; ++i) above += logits[i] > logits[which] || (logits[i] == logits[which] && i < which);
    return above;
}

int64_t sample_choose(const float *logits, int64_t n, const sample_options *o, int64_t number) {
    int64_t best = 0;
    for (int64_t i = 1; i < n; ++i)
        if (logits[i] > logits[best]) best = i;
    if (o->temperature <= 0) return best;
    const int64_t k = o->top_k > 0 ? o->top_k : n;
    draws d = draws_at(o->seed, RANDOM_SAMPLE, (uint64_t)number);
    /* Gumbel's trick: the index of the largest logit/temperature - log(-log u) has this distribution. */
    int64_t chosen = best;
    double highest = -INFINITY;
    for (int64_t i = 0; i < n; ++i) {
        const double u = draw_unit(&d) + 0x1p-33; /* in (0, 1) */
        const double score = ((double)logits[i] - (double)logits[best]) / o->temperature - log(-log(u));
        if (score > highest && (k >= n || rank_of(logits, n, i) < k)) {
            highest = score;
            chosen = i;
        }
    }
    return chosen;
}

fattn_status sample_symbols(fattn_ctx *ctx, model *m, fattn_tape *t, const sample_options *o, int32_t *symbols,
                            int64_t n_prompt, int64_t n) {
    const model_config *c = model_get_config(m);
    int32_t *window = calloc((size_t)c->context, sizeof *window);
    float *row = malloc((size_t)model_columns(c) * sizeof *row);
    fattn_tensor buffer = {0};
    fattn_status s = fattn_tensor_alloc(ctx, FATTN_I32, 1, &c->context, &buffer);
    if (!window || !row) s = fattn_ctx_fail(ctx, FATTN_E_NOMEM, "no memory for a window");
    for (int64_t have = n_prompt; !s && have < n; ++have) {
        const int64_t seen = have < c->context ? have : c->context;
        const int64_t up = (seen + LENGTH_STEP - 1) / LENGTH_STEP * LENGTH_STEP;
        const int64_t shape[2] = {1, up < c->context ? up : c->context};
        const fattn_tensor ids =
            fattn_tensor_view(buffer.data, FATTN_I32, (fattn_device)buffer.device, buffer.device_id, 2, shape);
        memcpy(window, symbols + have - seen, (size_t)seen * sizeof *window);
        s = device_write_i32(ctx, &ids, window);
        if (s) break;
        fattn_tape_reset(t);
        fattn_tensor logits;
        s = fattn_tape_value(t, model_logits(m, t, &ids), &logits);
        if (!s) logits = fattn_tensor_slice(&logits, 1, seen - 1, seen);
        if (!s) s = device_read(ctx, &logits, row);
        if (s) break;
        symbols[have] = (int32_t)sample_choose(row, c->vocab, o, have);
    }
    fattn_tensor_free(ctx, &buffer);
    free(row);
    free(window);
    return s;
}
