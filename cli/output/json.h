/* JSON lines: one object per line, each line flushed, every write checked. */
#ifndef FATTNI_CLI_OUTPUT_JSON_H
#define FATTNI_CLI_OUTPUT_JSON_H

#include "cli/output/files.h"

#include <stdint.h>

typedef struct json {
    output to; /* to.file NULL: no log, all calls do nothing */
    bool first;
    bool replaces; /* the first line replaces what the file holds */
} json;

/* path NULL = no log, "-" = standard output; see output_open. append keeps what the file holds; else the first line
   replaces it: a command that logs nothing leaves it as it is. False after an error message. */
bool json_open(json *j, const char *path, bool append);
/* Which log a resumed run may cut: one whose losses up to there are the run's own, or any. */
typedef enum json_cut { JSON_CUT_NONE, JSON_CUT_OWN, JSON_CUT_ANY } json_cut;
/* The log of a run that resumes after `step`, with these losses of steps 1..step: the first line of a later step, or
   an incomplete last line, and all lines after it are removed. A log with such lines that may not be cut is an error.
   Standard output is only written to. False after an error message. */
bool json_resume(json *j, const char *path, int64_t step, const double *losses, json_cut cut);
void json_begin(json *j);                                    /* { */
void json_text(json *j, const char *key, const char *value); /* invalid UTF-8 becomes U+FFFD */
void json_int(json *j, const char *key, int64_t value);
void json_real(json *j, const char *key, double value); /* shortest that reads back; null if not finite */
void json_bool(json *j, const char *key, bool value);
/* } and a line end, flushed. False when this or an earlier write failed. */
bool json_end(json *j);
bool json_failed(const json *j); /* a write failed; json_close reports it */
/* False after an error message that names the file, when any write failed: a full disk is an error. */
bool json_close(json *j);

#endif
