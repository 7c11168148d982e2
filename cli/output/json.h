/* JSON lines: one object per line, each line flushed, every write checked. */
#ifndef FATTNI_CLI_OUTPUT_JSON_H
#define FATTNI_CLI_OUTPUT_JSON_H

#include "cli/output/files.h"

#include <stdint.h>

typedef struct json {
    output to; /* to.file NULL: no log is wanted, all calls do nothing */
    bool first;
} json;

/* path NULL = no log, "-" = standard output; see output_open. append keeps what the file holds. False
   after a sentence. */
bool json_open(json *j, const char *path, bool append);
/* The log of a run that goes on after `step`: with lines of later steps, from the first such line on,
   and a last line that was never finished goes what the run will say again. may_cut false: with such
   lines the log is not the run's to cut, and refused. False after a sentence. */
bool json_resume(json *j, const char *path, int64_t step, bool may_cut);
void json_begin(json *j); /* { */
void json_text(json *j, const char *key,
               const char *value); /* what is not UTF-8 in it becomes U+FFFD */
void json_int(json *j, const char *key, int64_t value);
void json_real(json *j, const char *key,
               double value); /* shortest that reads back; null if not finite */
void json_bool(json *j, const char *key, bool value);
/* } and a line end, flushed. False when this or an earlier write failed. */
bool json_end(json *j);
bool json_failed(const json *j); /* a write did; json_close says why */
/* False after a sentence that names the file, when any write failed: a full disk is an error. */
bool json_close(json *j);

#endif
