#include "json.h"

#include "cli.h"

#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

bool json_open(json *j, const char *path, bool append) {
    *j = (json){.path = path};
    if (!path) return true;
    j->file = cli_make_parents(path) ? fopen(path, append ? "a" : "w") : NULL;
    if (!j->file) cli_fail(CLI_FAILURE, "cannot write %s: %s", path, strerror(errno));
    return j->file != NULL;
}

static void check(json *j, bool written) {
    if (!written && !j->error) j->error = errno ? errno : EIO;
}

static void put(json *j, const char *text) {
    if (j->file) check(j, fputs(text, j->file) >= 0);
}

static void put_string(json *j, const char *text) {
    put(j, "\"");
    for (const unsigned char *c = (const unsigned char *)text; j->file && *c; ++c) {
        char escaped[8] = {(char)*c};
        if (*c == '"' || *c == '\\')
            snprintf(escaped, sizeof escaped, "\\%c", *c);
        else if (*c < 0x20)
            snprintf(escaped, sizeof escaped, "\\u%04x", *c);
        put(j, escaped);
    }
    put(j, "\"");
}

static void put_key(json *j, const char *key) {
    if (!j->first) put(j, ", ");
    j->first = false;
    put_string(j, key);
    put(j, ": ");
}

void json_begin(json *j) {
    j->first = true;
    put(j, "{");
}

void json_text(json *j, const char *key, const char *value) {
    put_key(j, key);
    put_string(j, value);
}

void json_int(json *j, const char *key, int64_t value) {
    char text[32];
    snprintf(text, sizeof text, "%lld", (long long)value);
    put_key(j, key);
    put(j, text);
}

void json_real(json *j, const char *key, double value) {
    char text[40] = "null";
    for (int digits = 6; isfinite(value) && digits <= 17; ++digits) {
        snprintf(text, sizeof text, "%.*g", digits, value);
        if (strtod(text, NULL) == value) break;
    }
    put_key(j, key);
    put(j, text);
}

void json_bool(json *j, const char *key, bool value) {
    put_key(j, key);
    put(j, value ? "true" : "false");
}

bool json_end(json *j) {
    put(j, "}\n");
    if (j->file) check(j, fflush(j->file) == 0);
    return j->error == 0;
}

bool json_close(json *j) {
    if (!j->file) return true;
    errno = 0;
    check(j, fclose(j->file) == 0);
    j->file = NULL;
    if (j->error) cli_fail(CLI_FAILURE, "cannot write %s: %s", j->path, strerror(j->error));
    return j->error == 0;
}
