#include "cli/commands/model_text.h"

#include "cli/base/cli.h"
#include "cli/output/progress.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

bool text_prompt(const tokenizer *t, const char *text, int64_t n, token_list *to) {
    const unsigned char *const bytes = (const unsigned char *)text;
    bool ok = true;
    if (t) return token_list_add(to, (uint32_t)t->end) && tokenizer_encode(t, bytes, n, to);
    for (int64_t i = 0; ok && i < n; ++i) ok = token_list_add(to, bytes[i]);
    return ok;
}

fattn_status text_begin(generator *g, const token_list *prompt) {
    return generator_begin(g, (const int32_t *)prompt->token, prompt->n);
}

/* Bytes of a character of UTF-8 after its first one. */
static int following(unsigned char first) {
    if (first < 0xc2 || first >= 0xf5) return 0;
    return first < 0xe0 ? 1 : first < 0xf0 ? 2 : 3;
}

bool text_put(text_output *to, const unsigned char *bytes, int64_t n) {
    int64_t whole = 0;
    for (int64_t i = 0; i < n; ++i) {
        const bool goes_on = to->missing > 0 && bytes[i] >> 6 == 2;
        to->missing = goes_on ? to->missing - 1 : following(bytes[i]);
        if (to->missing == 0) whole = i + 1;
    }
    bool ok = fwrite(bytes, 1, (size_t)whole, stdout) == (size_t)whole;
    if (whole > 0) ok = cli_flush() && ok;
    return fwrite(bytes + whole, 1, (size_t)(n - whole), stdout) == (size_t)(n - whole) && ok;
}

static bool put_symbol(text_output *to, const tokenizer *t, int32_t symbol) {
    int64_t length = 1;
    const unsigned char byte = (unsigned char)symbol, *const text = t ? tokenizer_text(t, symbol, &length) : &byte;
    return text_put(to, text, length);
}

/* Symbols are chosen some at a time, as many as take a device about 20 ms. */
enum { MOST_AT_ONCE = 64 };
static const double AT_ONCE_SECONDS = 0.02;

fattn_status text_continue(generator *g, const tokenizer *t, const sample_options *o, int64_t n, text_output *to,
                           int64_t *written) {
    int32_t symbols[MOST_AT_ONCE];
    int64_t some = 1;
    for (*written = 0; *written < n;) {
        const double begin = seconds_now();
        if (some > n - *written) some = n - *written;
        const fattn_status s = generator_next(g, o, some, symbols);
        if (s) return s;
        for (int64_t i = 0; i < some; ++i, ++*written)
            if (!put_symbol(to, t, symbols[i])) return FATTN_OK;
        const double seconds = seconds_now() - begin;
        if (seconds < AT_ONCE_SECONDS / 2 && some < MOST_AT_ONCE) some *= 2;
        if (seconds > AT_ONCE_SECONDS && some > 1) some /= 2;
    }
    return FATTN_OK;
}

int text_sample(fattn_ctx *ctx, model *m, fattn_tape *tape, const tokenizer *t, const sample_options *o,
                const char *prompt, int64_t n) {
    const int64_t length = (int64_t)strlen(prompt);
    token_list symbols = {0};
    text_output to = {0};
    generator *g = NULL;
    int64_t written;
    fattn_status s = FATTN_OK;
    const bool known = text_prompt(t, prompt, length, &symbols);
    if (known) s = generator_create(ctx, m, tape, &g);
    if (known && !s) s = text_begin(g, &symbols);
    if (known && !s && text_put(&to, (const unsigned char *)prompt, length))
        s = text_continue(g, t, o, n, &to, &written);
    generator_destroy(g);
    free(symbols.token);
    return !known ? CLI_FAILURE : s ? cli_status(ctx, s, "sample") : CLI_OK;
}
