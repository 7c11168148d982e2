/* fattn_sample: checks, and the CPU's code. */
#include "core/sampling/sample.h"

#include "core/base/device.h"
#include "core/tensor/rows.h"
#include "core/tensor/spans.h"

#include <fattn/sample.h>

/* ---- the CPU ---- */

enum { CHUNK = 256, BINS = 2048 };

/* Logits first to first + n - 1 of row b, in place or in `buffer`. */
static const float *chunk_of(const fattni_sample *a, int64_t b, int64_t first, int64_t n, float buffer[CHUNK]) {
    const int64_t at = b * a->row_stride + first * a->stride;
    if (a->dtype == FATTN_F32 && a->stride == 1) return (const float *)a->logits + at;
    for (int64_t i = 0; i < n; ++i) buffer[i] = (float)fattni_load(a->logits, a->dtype, at + i * a->stride);
    return buffer;
}

#define EACH_CHUNK(a, b, first, n, x)                                                                                  \
    for (int64_t first = 0, n = fattni_min((a)->V, CHUNK); first < (a)->V;                                             \
         first += CHUNK, n = fattni_min((a)->V - first, CHUNK))                                                        \
        for (const float *x = chunk_of(a, b, first, n, buffer); x; x = NULL)

/* The likeliest token; false: a logit is NaN or infinity, or all are -infinity. */
static bool find_top(const fattni_sample *a, int64_t b, uint64_t *top) {
    float buffer[CHUNK];
    int bad = 0;
    *top = 0;
    EACH_CHUNK(a, b, first, n, x) {
        float most = -INFINITY; /* of vectors: the place of the first one that is it, where it matters */
        for (int64_t i = 0; i < n; ++i) {
            bad |= fattni_sample_is_bad(x[i]);
            most = x[i] > most ? x[i] : most;
        }
        if (fattni_sample_place(most, 0) <= *top && *top) continue;
        for (int64_t i = 0; i < n; ++i) {
            const uint64_t place = fattni_sample_place(x[i], first + i);
            *top = place > *top ? place : *top;
        }
    }
    return !bad && fattni_sample_logit(*top) > -INFINITY;
}

/* Of tokens at `least` or above, likeliest first, the last one of those that first amount to `wanted`, or a bound
   between its place and the next one's: by number, or by weight, of which top_p's part is wanted. Digits of places
   from the highest one on: those above are known, and a bin for each value of the next one. */
static uint64_t border_of(const fattni_sample *a, int64_t b, float top, uint64_t least, bool by_weight,
                          uint64_t wanted) {
    static const int shifts[] = {53, 42, 32, 21, 10, 0}, bits[] = {11, 11, 10, 11, 11, 10};
    float buffer[CHUNK];
    uint64_t border = 0;
    for (int d = 0; d < 6; ++d) {
        const uint64_t mask = ((uint64_t)1 << bits[d]) - 1;
        uint64_t amount[BINS] = {0}, all = 0;
        EACH_CHUNK(a, b, first, n, x)
        for (int64_t i = 0; i < n; ++i) {
            const uint64_t place = fattni_sample_place(x[i], first + i);
            if (place < least || (place ^ border) >> shifts[d] >> bits[d]) continue;
            amount[place >> shifts[d] & mask] += by_weight ? fattni_sample_weight(a, x[i], top) : 1;
        }
        int bin = (int)mask;
        for (int n = 0; n <= bin; ++n) all += amount[n];
        if (d == 0 && by_weight) wanted = fattni_sample_part(a, all);
        while (amount[bin] < wanted) wanted -= amount[bin--];
        border |= (uint64_t)bin << shifts[d];
        if (amount[bin] == wanted) break;
        if (by_weight && shifts[d] == 32) { /* all that are left have one weight */
            const uint64_t each = fattni_sample_weight(a, fattni_sample_logit(border), top);
            wanted = (wanted + each - 1) / each, by_weight = false;
        }
    }
    return border > least ? border : least;
}

static int64_t choose(const fattni_sample *a, int64_t b, uint64_t top_place, int32_t draw) {
    const float top = fattni_sample_logit(top_place);
    fattni_contest c = {-INFINITY, fattni_sample_index(top_place)};
    uint64_t border = 0;
    if (a->inverse == 0) return c.chosen;
    if (a->top_k < a->V) border = border_of(a, b, top, 0, false, (uint64_t)a->top_k);
    if (a->top_p < 1) border = border_of(a, b, top, border, true, 0);
    float buffer[CHUNK];
    fattni_block words = {{0}};
    int64_t block = -1;
    EACH_CHUNK(a, b, first, n, x)
    for (int64_t i = 0; i < n; ++i) {
        const int64_t at = first + i;
        if (fattni_sample_place(x[i], at) < border) continue;
        if (at / 4 != block) block = at / 4, words = fattni_philox(a->seed, fattni_sample_counter(a, draw, block));
        fattni_contest_enter(&c, fattni_sample_scaled(a, x[i], top), words.w[at % 4], at);
    }
    return c.chosen;
}

static int32_t draw_of(const fattni_sample *a, int64_t b) {
    return a->draws ? a->draws[b * a->draws_step] : (int32_t)b;
}

static void sample_row(void *arg, int64_t b, int thread) {
    const fattni_sample *const a = arg;
    uint64_t top;
    (void)thread;
    const bool right = find_top(a, b, &top);
    const int32_t draw = draw_of(a, b);
    a->tokens[b * a->tokens_step] = right ? (int32_t)choose(a, b, top, draw) : -1;
    if (a->draws_after) a->draws_after[b * a->draws_after_step] = (int32_t)((uint32_t)draw + 1);
}

fattn_status fattni_host_sample(fattn_ctx *ctx, const fattni_sample *a) {
    for (int64_t b = 0; b < a->B; ++b)
        if (draw_of(a, b) < 0)
            return fattn_ctx_fail(ctx, FATTN_E_ARG, "draws[%lld] = %d is negative", (long long)b, draw_of(a, b));
    fattni_sample job = *a;
    fattni_parallel(ctx, a->B, sample_row, &job);
    return FATTN_OK;
}

/* ---- checks ---- */

static fattn_status check_row_of_I32(fattn_ctx *ctx, const char *name, const fattn_tensor *t, int64_t B, bool written) {
    char text[96];
    FATTNI_TRY(fattni_check_tensor(ctx, name, t));
    if (t->dtype != FATTN_I32)
        return fattn_ctx_fail(ctx, FATTN_E_DTYPE, "%s: is %s, must be i32", name,
                              fattn_dtype_name((fattn_dtype)t->dtype));
    if (t->ndim != 1 || t->shape[0] != B)
        return fattn_ctx_fail(ctx, FATTN_E_SHAPE, "%s: is %s, must be [B] = [%lld]", name,
                              fattni_shape_text(t, text, sizeof text), (long long)B);
    if (written && B > 1 && t->stride[0] == 0)
        return fattn_ctx_fail(ctx, FATTN_E_SHAPE, "%s: stride[0] is 0: several elements share one address", name);
    return FATTN_OK;
}

static fattn_status check_numbers(fattn_ctx *ctx, const fattn_sample_io *io) {
    if (!(io->temperature == 0 || (io->temperature >= 1e-300 && isfinite(io->temperature))))
        return fattn_ctx_fail(ctx, FATTN_E_ARG, "temperature: %g is not 0 and not a number from 1e-300 on",
                              io->temperature);
    if (io->top_k < 0) return fattn_ctx_fail(ctx, FATTN_E_ARG, "top_k: %d is negative (0 = all)", io->top_k);
    if (!(io->top_p >= 0 && io->top_p <= 1))
        return fattn_ctx_fail(ctx, FATTN_E_ARG, "top_p: %g is not in 0..1", io->top_p);
    if (io->rng.reserved) return fattn_ctx_fail(ctx, FATTN_E_ARG, "rng.reserved: %u is not 0", io->rng.reserved);
    return FATTN_OK;
}

static fattn_status check_tensors(fattn_ctx *ctx, const fattn_sample_io *io) {
    const fattn_tensor *const x = io->logits;
    char text[96];
    FATTNI_TRY(fattni_check_tensor(ctx, "logits", x));
    if (x->dtype < FATTN_F64 || x->dtype > FATTN_BF16)
        return fattn_ctx_fail(ctx, FATTN_E_DTYPE, "logits: is %s, not f64, f32, f16 or bf16",
                              fattn_dtype_name((fattn_dtype)x->dtype));
    if (x->ndim != 2 || x->shape[1] < 1 || x->shape[1] > INT32_MAX)
        return fattn_ctx_fail(ctx, FATTN_E_SHAPE, "logits: is %s, must be [B,V] with V in 1..2^31-1",
                              fattni_shape_text(x, text, sizeof text));
    if (io->draws_after && !io->draws) return fattn_ctx_fail(ctx, FATTN_E_ARG, "draws_after without draws");
    if (io->draws) FATTNI_TRY(check_row_of_I32(ctx, "draws", io->draws, x->shape[0], false));
    if (io->draws_after) FATTNI_TRY(check_row_of_I32(ctx, "draws_after", io->draws_after, x->shape[0], true));
    return check_row_of_I32(ctx, "tokens", io->tokens, x->shape[0], true);
}

static fattn_status check_overlaps(fattn_ctx *ctx, const fattn_sample_io *io) {
    const fattn_tensor *const draws = io->draws, *const after = io->draws_after;
    const bool in_place = after && after->data == draws->data && fattni_step(after, 0) == fattni_step(draws, 0);
    fattni_span all[4];
    int n = 0;
    fattni_add_span(all, &n, "tokens", io->tokens);
    fattni_add_span(all, &n, "draws_after", after);
    const int written = n;
    fattni_add_span(all, &n, "logits", io->logits);
    if (!in_place) fattni_add_span(all, &n, "draws", draws);
    return fattni_check_spans(ctx, all, written, n);
}

fattn_status fattn_sample(fattn_ctx *ctx, const fattn_sample_io *given) {
    if (!ctx) return FATTN_E_ARG;
    if (!given) return fattn_ctx_fail(ctx, FATTN_E_ARG, "io: NULL");
    fattn_sample_io io;
    FATTNI_TRY(fattni_take_struct(ctx, "fattn_sample_io", given, &io, sizeof io));
    FATTNI_TRY(check_numbers(ctx, &io));
    FATTNI_TRY(check_tensors(ctx, &io));
    FATTNI_TRY(check_overlaps(ctx, &io));
    const fattn_tensor *const x = io.logits, *const draws = io.draws, *const after = io.draws_after;
    const int64_t V = x->shape[1];
    const fattni_sample a = {.logits = x->data,
                             .draws = draws ? draws->data : NULL,
                             .draws_after = after ? after->data : NULL,
                             .tokens = io.tokens->data,
                             .row_stride = fattni_step(x, 0),
                             .stride = fattni_step(x, 1),
                             .draws_step = draws ? fattni_step(draws, 0) : 0,
                             .draws_after_step = after ? fattni_step(after, 0) : 0,
                             .tokens_step = fattni_step(io.tokens, 0),
                             .B = x->shape[0],
                             .V = V,
                             .top_k = io.top_k > 0 && io.top_k < V ? io.top_k : V,
                             .inverse = io.temperature > 0 ? 1 / io.temperature : 0,
                             .top_p = io.top_p > 0 ? io.top_p : 1,
                             .seed = io.rng.seed,
                             .stream = io.rng.stream,
                             .dtype = x->dtype,
                             .weight_bits = V > 1 ? __builtin_clzll((unsigned long long)V - 1) - 1 : 62};
    return a.B > 0 ? ctx->ops->sample(ctx, &a) : FATTN_OK;
}
