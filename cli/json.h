/* JSON lines: one object per line, each line flushed, every write checked. */
#ifndef CLI_JSON_H
#define CLI_JSON_H

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>

typedef struct json {
    FILE *file; /* NULL: no log is wanted, all calls do nothing */
    const char *path;
    int error; /* errno of the first failure, 0 */
    bool first;
} json;

/* path NULL = no log. append keeps what the file holds; the folders above it are made. False after
   an error sentence on standard error. */
bool json_open(json *j, const char *path, bool append);
void json_begin(json *j); /* { */
void json_text(json *j, const char *key, const char *value);
void json_int(json *j, const char *key, int64_t value);
void json_real(json *j, const char *key,
               double value); /* shortest that reads back; null if not finite */
void json_bool(json *j, const char *key, bool value);
/* } and a line end, flushed. False when this or an earlier write failed. */
bool json_end(json *j);
/* False after a sentence that names the file, when any write failed: a full disk is an error. */
bool json_close(json *j);

#endif
