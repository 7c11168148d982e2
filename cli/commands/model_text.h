/* Text to and from the symbols of a model, and the text that a generator writes. */
#ifndef FATTNI_CLI_COMMANDS_MODEL_TEXT_H
#define FATTNI_CLI_COMMANDS_MODEL_TEXT_H

#include "cli/llmc/tokenizer.h"
#include "cli/sample/generate.h"

/* What a model continues: t NULL, the bytes; else the token of a document's end, which also begins one, and the text's
   tokens. False after an error message. */
bool text_prompt(const tokenizer *t, const char *text, int64_t n, token_list *to);
fattn_status text_begin(generator *g, const token_list *prompt);

/* Standard output, which is flushed after the last whole character of UTF-8 that has been put. Bytes that are none go
   out as they are. Begin with {0}. */
typedef struct text_output {
    int missing; /* bytes of a character that has begun */
} text_output;
/* False: the bytes cannot be written, which cli_main reports. */
bool text_put(text_output *to, const unsigned char *bytes, int64_t n);
/* Chooses n symbols and puts each at once; ends early when standard output fails. *written: how many. */
fattn_status text_continue(generator *g, const tokenizer *t, const sample_options *o, int64_t n, text_output *to,
                           int64_t *written);

/* A prompt and n symbols that follow it, to standard output. CLI_OK, or another code after an error message. */
int text_sample(fattn_ctx *ctx, model *m, fattn_tape *tape, const tokenizer *t, const sample_options *o,
                const char *prompt, int64_t n);

#endif
